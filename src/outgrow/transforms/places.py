"""Where a model can be deepened, by which methods, and why not elsewhere: found by trying."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outgrow.admit import bare, check_module
from outgrow.anatomy import dissect
from outgrow.apply import Journal
from outgrow.structure import calls_of
from outgrow.trace import Example, outputs_in
from outgrow.training.compiled import uncompiled
from outgrow.transforms.deepen import OWN, Deepen, Kinds, containers, join, own_kind, template_for
from outgrow.transforms.plain import LAYERS, is_activation, legal, unwrappable
from outgrow.usage import usage
from outgrow.zeroing import NotZero


@dataclass(frozen=True)
class Place:
    """Where a model can be deepened: behind the module `name`.

    `methods` are those that keep the function there; where there are none, `reason` tells why. `own`: the block that "r2r" puts
    there is one of the model's own kind.
    """

    name: str
    methods: tuple[str, ...]
    reason: str = ""
    own: bool = False

    @property
    def growable(self) -> bool:
        return bool(self.methods)


@usage("outgrow.places(model, example)")
@uncompiled()
def places(model: nn.Module, example: Example) -> list[Place]:
    """All children of the model's containers, and whether a block can be put behind each.

    Example:
        >>> class Block(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.f = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        ...     def forward(self, x):
        ...         return x + self.f(x)
        >>> model = nn.Sequential(nn.Linear(3, 4), Block(), nn.Linear(4, 2))
        >>> [(place.name, place.methods) for place in places(model, torch.zeros(1, 3)) if place.own]
        [('1', ('r2r', 'r2r-paper', 'residual'))]
    """
    check_module(model := bare(model))
    blocks = [join(path, key) for path, module in containers(model) for key in module._modules]
    layers = [path for path, module in model.named_modules() if path and (isinstance(module, LAYERS) or is_activation(module))]
    paths = list(dict.fromkeys((*blocks, *layers)))
    found = calls_of(model, example, [*paths, ""])
    before = outputs_in(found[""][0].output)
    anatomy = dissect(model, example)
    stuck = unwrappable(model, example, [path for path in paths if found[path]])
    kinds = Kinds()
    idle: dict[str, str] = {}  # containers whose code does not run what is added, and why we think so
    result = []
    for path in (path for path in paths if found[path]):
        container = path.rpartition(".")[0]
        reasons = dict.fromkeys(OWN, "it stands in no container of blocks")
        for method in OWN if path in blocks else ():
            try:
                template_for(model, found, Deepen(path, method=method), 0, kinds)
                if container not in idle:
                    idle[container] = _idle(model, example, path, before)
                reasons[method] = idle[container]
            except NotZero as refused:
                reasons[method] = str(refused)
        plain = legal(model, path, found[path], anatomy, stuck)
        methods = dict.fromkeys(name for name, why in (*reasons.items(), *plain.items()) if not why)
        why = "; ".join(dict.fromkeys((reasons["r2r"], plain["r2r"])))
        result.append(Place(path, tuple(methods), "" if methods else why, own=not reasons["r2r"]))
    return result


def _idle(model: nn.Module, example: Example, path: str, before: Iterable[Tensor]) -> str:
    """Try whether a block that is added there is run, and changes nothing; why not, if it is not."""
    journal = Journal()
    try:
        own_kind([model], example, Deepen(path), 0, journal, None)
        after = outputs_in(calls_of(model, example, [""])[""][0].output)
        if not all(_close(one, other) for one, other in zip(before, after, strict=True)):
            return "with a block more there the model computes something else: its code does more for each block than run it"
    except NotZero as reason:
        return str(reason)
    except Exception as error:
        return f"the model does not run with a block more there: {str(error).splitlines()[0]}"
    finally:
        journal.undo()
    return ""


def _close(one: Tensor, other: Tensor) -> bool:
    """Up to rounding, generously: this is to find code that does something else."""
    gap, size = (one - other).abs().max() if one.numel() else 0.0, one.abs().max() if one.numel() else 1.0
    return one.shape == other.shape and bool(gap <= max(1e-4, 100 * torch.finfo(one.dtype).eps) * size)
