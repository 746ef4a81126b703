"""Check that the grown model computes what the old one did, as exactly as the network itself is computed.

The yardstick is the network's own sensitivity: how far its outputs move when every weight moves by one unit in the last
place. A growth passes if it moves them by no more than a small multiple of that. A model that goes through a coarser type on
its way (Transformers' RMS norms compute in float32, whatever the model's type) rounds as that type does, and so do the moves.
Random operators (dropout, stochastic depth) are switched off, and batch statistics that a forward pass updates are put back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from outgrow.sandbox import precise, tensors_of, untouched
from outgrow.trace import Example, call, tensors_in

MULTIPLE = 10.0
FLOOR = 32.0  # units in the last place of the largest output


class Sober(TorchDispatchMode):
    """Runs random operators at their expectation; notes how coarsely numbers are rounded on the way."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rounding = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func.overloadpacket)
        if name == "aten._to_copy":
            result = func(*args, **kwargs)
            if result.is_floating_point() and args[0].is_floating_point():
                self.rounding = max(self.rounding, torch.finfo(result.dtype).eps)
            return result
        if name == "aten.native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name == "aten.bernoulli_":
            return args[0].fill_(args[1] if len(args) > 1 and isinstance(args[1], float) else 0.5)
        if name == "aten.bernoulli":
            return args[0].clone() if len(args) == 1 else torch.full_like(args[0], args[1])
        if name in ("aten.rand", "aten.rand_like", "aten.uniform_", "aten.random_", "aten.rrelu_with_noise"):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return func(*args, **kwargs)
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Outputs:
    """What the model computed, in eval and (where it can) in train mode."""

    evaluated: tuple[Tensor, ...]
    trained: tuple[Tensor, ...] | None
    rounding: float = 0.0  # the coarsest that numbers were cast to on the way


def run(model: nn.Module, example: Example) -> Outputs:
    """Outputs on the example in both modes, random operators off; the model is left as it was."""
    sober = Sober()
    with untouched(model), precise(), sober:
        model.eval()
        evaluated = _floats(call(model, example))
    try:
        with untouched(model), precise(), sober:
            model.train()
            trained = _floats(call(model, example))
    except Exception:  # batch norm on a single value, a loss without labels: eval must do
        trained = None
    return Outputs(evaluated, trained, sober.rounding)


def _floats(output: Any) -> tuple[Tensor, ...]:
    return tuple(tensor.detach() for tensor in tensors_in(output) if tensor.is_floating_point())


def sensitivity(model: nn.Module, example: Example, base: Outputs, seed: int = 0) -> tuple[float, float]:
    """How far outputs move, relative to their largest, when every weight moves by one unit in the last place."""
    saved: list[tuple[Tensor, Tensor]] = []
    generator = torch.Generator().manual_seed(seed)
    try:
        with torch.no_grad():
            for tensor in tensors_of(model).values():
                if tensor.is_floating_point() and tensor.numel():
                    saved.append((tensor, tensor.detach().clone()))
                    eps = max(torch.finfo(tensor.dtype).eps, base.rounding)
                    sign = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor) * 2 - 1
                    tensor.mul_(1 + sign * eps)
        moved = run(model, example)
    finally:
        with torch.no_grad():
            for tensor, value in saved:
                tensor.copy_(value)
    return error(base.evaluated, moved.evaluated), error(base.trained, moved.trained)


def error(old: Sequence[Tensor] | None, new: Sequence[Tensor] | None) -> float:
    """Largest difference, relative to the largest output; infinite where shapes differ, or what is no number.

    Infinities and NaNs (at padding, say) must stay where they are; if there is nothing else, nothing can be told.
    """
    if old is None or new is None:
        return 0.0 if old is None and new is None else float("inf")
    if len(old) != len(new):
        return float("inf")
    worst = 0.0
    for one, other in zip(old, new, strict=True):
        if one.shape != other.shape:
            return float("inf")
        if not one.numel():
            continue
        a, b = one.double(), other.double()
        finite = torch.isfinite(a)
        if not bool(finite.all()):
            same = torch.equal(a.isnan(), b.isnan()) and torch.equal(a[a.isinf()], b[a.isinf()])
            if not same or not bool(finite.any()):
                return float("inf")
            a, b = a[finite], b[finite]
        scale = max(float(a.abs().max()), torch.finfo(one.dtype).tiny)
        difference = float((a - b).abs().max()) / scale
        worst = max(worst, difference if difference == difference else float("inf"))
    return worst


def epsilon(outputs: Sequence[Tensor]) -> float:
    return max((torch.finfo(tensor.dtype).eps for tensor in outputs), default=0.0)
