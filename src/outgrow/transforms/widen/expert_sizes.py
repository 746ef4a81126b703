"""Sizes of experts that run in their present form, but not in the form in which Transformers loads them by default.

Torch's grouped product takes matrices whose rows begin at multiples of 16 bytes: sizes must be multiples of 4 in float32, and
of 8 in half precision. A model whose experts run one by one (`experts_implementation="eager"`) can have any size, but is loaded
with grouped products if nothing else is requested.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from outgrow.analysis.roles import READS
from outgrow.model.sandbox import tensors_of
from outgrow.transforms.widen.make_plan import Choice

NOTE = "grouped products of experts:"  # beginning of lines in reports
ALIGNED, KINDS = 16, (torch.float32, torch.float16, torch.bfloat16)  # bytes, and what the product takes


def grouped_product_notes(model: nn.Module, choices: Sequence[Choice]) -> list[str]:
    """Lines of the report on sizes that grouped products do not take, one per size."""
    alike: dict[tuple[int, torch.dtype], list[str]] = {}
    tensors = tensors_of(model)
    for choice in choices if hasattr(torch, "_grouped_mm") else ():
        for size in dict.fromkeys(_unaligned(model, tensors, choice)):
            alike.setdefault(size, []).append(choice.volume.name)
    return [_line(names, size, kind) for (size, kind), names in alike.items()]


def _unaligned(model: nn.Module, tensors: Mapping[str, Tensor], choice: Choice) -> Iterator[tuple[int, torch.dtype]]:
    """New sizes of stacked weights along the axis that reads units, and their types, where only the old sizes are multiples."""
    for slot in choice.volume.slots:
        weight = tensors[slot.tensor]
        if slot.role != READS or weight.ndim != 3 or weight.dtype not in KINDS or not _chooses_form(model, slot.tensor):
            continue
        old, step = weight.shape[slot.axis], ALIGNED // weight.element_size()
        new = old + len(slot.positions) // choice.volume.count * choice.new
        if new % step and not old % step:
            yield new, weight.dtype


def _chooses_form(model: nn.Module, tensor: str) -> bool:
    """Whether a weight belongs to experts whose configuration names another form than grouped products."""
    config = getattr(model.get_submodule(tensor.rpartition(".")[0]), "config", None)
    return getattr(config, "_experts_implementation", None) not in (None, "grouped_mm")


def _line(names: Sequence[str], size: int, kind: torch.dtype) -> str:
    step = ALIGNED // kind.itemsize
    fits = -(-size // step) * step
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return (
        f"{NOTE} {names[0]}{more} has {size} units, and they need a multiple of {step} in {str(kind).removeprefix('torch.')}: "
        f"load it with experts_implementation='eager', since the default form would not run; or grow with to={fits}"
    )
