"""The tensors of an upcycled model: those of the old one by name, and new ones for experts and routers.

`mlp.gate_proj`, `mlp.up_proj` and `mlp.down_proj` of a dense layer become `mlp.experts.gate_up_proj` and
`mlp.experts.down_proj` (all experts in one tensor), and `mlp.gate.weight` is the router. Every other tensor keeps its name; one
without a place in the new class is refused unless it is a bias of zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outgrow.errors import MethodError, Problem
from outgrow.upcycling.expert_values import Form, expert_weights, router_rows

State = Mapping[str, Tensor]
GATE_UP, DOWN, ROUTER = "experts.gate_up_proj", "experts.down_proj", "gate.weight"
SHARED, SHARED_GATE = "shared_expert.", "shared_expert_gate.weight"
DENSE = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


@dataclass(frozen=True)
class Start:
    """Initial values. deviation: of a router's drawn rows. shared: which expert holds the dense MLP, "zero" or "dense".

    "zero": the routed experts hold it, and the shared expert's output is zero. "dense": the shared expert holds it (its gate is
    σ(0) = 1/2, so its last matrix is doubled), and the output of the routed experts is zero.
    """

    form: Form
    seed: int
    deviation: float
    shared: str = "zero"


@torch.no_grad()
def from_dense(old: State, new: nn.Module, start: Start) -> dict[str, Tensor]:
    """The state of the new model, which may be on the meta device. old: the state of the dense model."""
    generator = torch.Generator().manual_seed(start.seed)
    found: dict[str, Tensor] = {}
    there = dict(new.state_dict())
    for path in (name.removesuffix(GATE_UP) for name in there if name.endswith(GATE_UP)):
        found.update(_layer(old, path, there, start, generator))
    used = {
        f"{path}{part}" for path in (name.removesuffix(GATE_UP) for name in there if name.endswith(GATE_UP)) for part in DENSE
    }
    problems = []
    for name, like in there.items():
        if name in old and old[name].shape == like.shape:
            found[name] = old[name].clone()
        elif name not in found and name.endswith(".bias"):
            found[name] = torch.zeros(like.shape, dtype=like.dtype)
        elif name not in found:
            problems.append(Problem(name, "the new class needs this tensor, and the dense model does not have it"))
    for name, tensor in old.items():
        if name not in there and name not in used and (not name.endswith(".bias") or bool(tensor.any())):
            problems.append(Problem(name, f"{type(new).__name__} has no place for this tensor"))
    if problems:
        raise MethodError(f"the model can't become {type(new).__name__}", problems[:5])
    return found


def _layer(old: State, path: str, there: State, start: Start, generator: torch.Generator) -> dict[str, Tensor]:
    """The experts and the router of one layer. path: of its MLP, with a dot."""
    gate, up, down = (old[path + part] for part in DENSE)
    form = start.form
    weights = expert_weights(gate[None], up[None], down[None], form, generator)
    rows = router_rows(form.copies, form.slices, gate, start.deviation, generator)
    found = {path + GATE_UP: weights[0], path + DOWN: weights[1], path + ROUTER: rows.to(gate.device)}
    if path + SHARED_GATE in there:
        inside = start.shared == "dense"
        shared = (gate.clone(), up.clone(), down * 2 if inside else torch.zeros_like(down))
        found |= {path + SHARED + part: value for part, value in zip(DENSE, shared, strict=True)}
        found[path + SHARED_GATE] = torch.zeros_like(gate[:1])
        if inside:
            found[path + DOWN] = torch.zeros_like(weights[1])
    return found


@torch.no_grad()
def from_experts(old: State, new: nn.Module, form: Form, seed: int) -> dict[str, Tensor]:
    """The state of a mixture of experts with more of them. old: the state of the one with fewer."""
    generator = torch.Generator().manual_seed(seed)
    found = {name: tensor.clone() for name, tensor in old.items()}
    for path in (name.removesuffix(GATE_UP) for name in old if name.endswith(GATE_UP)):
        gate, up = old[path + GATE_UP].chunk(2, dim=1)
        found[path + GATE_UP], found[path + DOWN] = expert_weights(gate, up, old[path + DOWN], form, generator)
        found[path + ROUTER] = old[path + ROUTER].repeat_interleave(form.factor, 0)
    wrong = [name for name, like in new.state_dict().items() if name not in found or found[name].shape != like.shape]
    if wrong or len(found) != len(new.state_dict()):
        raise MethodError(f"the tensors of {type(new).__name__} are not as expected", [Problem(name, "") for name in wrong[:5]])
    return found
