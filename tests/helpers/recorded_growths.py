"""Growths by every transform, as plain values that can be recorded and compared with those of another version.

`python tests/recorded_growths.py` writes `tests/files/growths.json`. Values of tensors are kept as two sums each, since other
machines may round the last digit of a mean otherwise; names, shapes, orders, settings and plans are kept as they are.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import outgrow
from outgrow.history.growths_on_model import history
from outgrow.modules.gates import gates_of

FILE = Path(__file__).parents[1] / "files" / "growths.json"
DTYPE = torch.float64


class Residual(nn.Module):
    """A residual block with batch norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.n, self.b, self.m = (
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.m(self.b(torch.relu(self.n(self.a(x))))))


class Mlp(nn.Module):
    """A residual block of linear layers, with an odd number of hidden units."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Skips(nn.Module):
    """A stream whose skips are added in the model's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(self.a(x)) + x
        return self.head(torch.relu(self.b(x)) + x)


def images() -> tuple[nn.Module, Any]:
    body = nn.Sequential(Residual(6), Residual(6))
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), body, nn.Flatten(), nn.Linear(96, 3))
    return model, torch.randn(4, 3, 4, 4, dtype=DTYPE)


def features() -> tuple[nn.Module, Any]:
    blocks = nn.ModuleDict({"body": nn.Sequential(Mlp(6, 9), Mlp(6, 9)), "head": nn.Linear(6, 2), "stem": nn.Linear(4, 6)})
    model = nn.Sequential(blocks["stem"], blocks["body"], blocks["head"])
    return model, torch.randn(5, 4, dtype=DTYPE)


def plain() -> tuple[nn.Module, Any]:
    layers = [nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 5, 3), nn.Tanh(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(20, 3)), torch.randn(4, 3, 4, 4, dtype=DTYPE)


def skips() -> tuple[nn.Module, Any]:
    return Skips(), torch.randn(5, 4, dtype=DTYPE)


def encoder() -> tuple[nn.Module, Any]:
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.Sequential(nn.Linear(4, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 2))
    return model, torch.randn(3, 5, 4, dtype=DTYPE)


def language() -> tuple[nn.Module, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=8, n_head=2, n_layer=2, vocab_size=11, n_positions=12, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return GPT2LMHeadModel(config), {"input_ids": torch.randint(11, (2, 6)), "use_cache": False}


D, B, W, K = outgrow.Deepen, outgrow.Branch, outgrow.Widen, outgrow.Kernel
CASES: dict[str, tuple[Callable[[], tuple[nn.Module, Any]], tuple[Any, ...]]] = {
    **{
        f"images {method} {fade or ''}".strip(): (images, (D("3.0", method=method, fade=fade),))
        for method, fade in (("auto", None), ("r2r-paper", None), ("copy", None), ("random", None), ("auto", 7), ("random", 7))
    },
    "images two": (images, (D("3.1", count=2),)),
    "images residual": (images, (D("3.1", method="residual"),)),
    "images residual random": (images, (D("3.1", method="random", layers=3),)),
    "features two": (features, (D("1.0", count=2),)),
    "features three layers": (features, (D("1.0", layers=3),)),
    "features faded": (features, (D("1.0", fade=5, layers=2),)),
    **{f"plain {method}": (plain, (D("2", method=method),)) for method in ("auto", "net2net", "random")},
    **{f"plain {method} faded": (plain, (D("2", method=method, fade=5),)) for method in ("auto", "net2net", "random")},
    "plain identities": (plain, (D("2", method="net2net", count=2),)),
    "plain soft identity": (plain, (D("4", method="net2net", fade=5),)),
    "plain split": (plain, (D("3", method="netmorph"),)),
    "plain split twice": (plain, (D("3", method="netmorph", count=2),)),
    "plain split faded": (plain, (D("3", method="netmorph", fade=5),)),
    "skips behind": (skips, (D("a"),)),
    "encoder": (encoder, (D("1.layers.0", count=2),)),
    "encoder faded": (encoder, (D("1.layers.1", fade=4),)),
    "language": (language, (D("transformer.h.0", count=2),)),
    "language copy": (language, (D("transformer.h.1", method="copy"),)),
    "language both": (language, (W("*mlp*", factor=2), D("transformer.h.0"))),
    **{f"branch {method}": (images, (B("3", method=method),)) for method in ("auto", "netmorph", "copy", "random")},
    **{f"branch of a layer {method}": (plain, (B("3", method=method),)) for method in ("auto", "netmorph", "random")},
    "branch built": (images, (B("3", layers=3, hidden=8),)),
    "branch copy faded": (images, (B("3.0", fade=3),)),
    "branch random faded": (plain, (B("0", method="random", fade=3),)),
    "two branches": (images, (B("3.0"), B("3.1"))),
    "fold": (skips, (W("a", by=4, residual="fold"),)),
    "all": (
        images,
        (B("3"), D("3.1", count=2), W("*", factor=1.5), K("0", 5), D("2", method="net2net"), D("0", method="netmorph")),
    ),
    "widened": (features, (W("*", by=3), D("1.1"), B("2"))),
}


def sums(tensor: Tensor) -> list[Any]:
    """The shape of a tensor, and two sums that a change of a value or of its place changes."""
    values = tensor.detach().double().flatten()
    places = torch.arange(1, len(values) + 1, dtype=torch.float64)
    return [list(tensor.shape), *(float(f"{float(one.sum()):.10g}") for one in (values, values * torch.cos(places)))]


def values_of(state: Mapping[str, Any], form: Callable[[Tensor], Any]) -> dict[str, Any]:
    return {name: form(value) if isinstance(value, Tensor) else value for name, value in state.items()}


def grown(name: str, form: Callable[[Tensor], Any] = sums) -> Any:
    """What a growth leaves: model, averaged copy, optimizer, gates, plan and notes."""
    make, transforms = CASES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model, example = make()
        model = model.to(DTYPE).eval()
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.data.copy_(torch.rand_like(tensor) - (0.0 if tensor.ndim == 1 else 0.5))
        average = copy.deepcopy(model)
        for parameter in average.parameters():
            parameter.data.mul_(0.875)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for parameter in model.parameters():
            moments = {"exp_avg": torch.rand_like(parameter), "exp_avg_sq": torch.rand_like(parameter)}
            optimizer.state[parameter] = {"step": torch.tensor(3.0), **moments}
            parameter.grad = torch.rand_like(parameter)
    growth = outgrow.grow(model, example, *transforms, optimizer=optimizer, average=average, seed=11)
    names = {id(parameter): path for path, parameter in model.named_parameters()}
    config = getattr(model, "config", None)
    return {
        "model": values_of(model.state_dict(), form),
        "average": values_of(average.state_dict(), form),
        "gradients": values_of({path: p.grad for path, p in model.named_parameters()}, form),
        "groups": [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups],
        "state": {names[id(parameter)]: values_of(state, form) for parameter, state in optimizer.state.items()},
        "learn": [path for path, parameter in model.named_parameters() if parameter.requires_grad],
        "modules": [f"{path}: {type(module).__name__}" for path, module in average.named_modules()],
        "gates": {path: [gate.done, gate.steps] for path, gate in gates_of(model).items()},
        "shared": {path: gate in gates_of(average).values() for path, gate in gates_of(model).items()},
        "history": sha256(json.dumps([_without_kinds(plan.to_json()) for plan in history(model)]).encode()).hexdigest(),
        "report": str(growth).split("\nerror:")[0],
        "notes": list(growth.notes),
        "config": {} if config is None else {name: vars(config)[name] for name in ("n_layer", "n_inner", "n_embd", "n_head")},
    }


def _without_kinds(plan: dict[str, Any]) -> dict[str, Any]:
    """A plan as it was when growths were recorded: without the kinds of volumes."""
    return {**plan, "changes": [{name: one[name] for name in one if name != "kind"} for one in plan["changes"]]}


if __name__ == "__main__":
    from tests import conftest  # noqa: F401  (so that transformers can be imported)

    recorded = {name: grown(name) for name in CASES}
    FILE.write_text(json.dumps(recorded, separators=(",", ":"), ensure_ascii=False).replace('},"', '},\n"') + "\n")
