"""Compare the outputs of the old and the new model, in float32; old values are rounded to the new dtype if one was requested.

`full` runs both, one after the other. `brief` needs little time whatever the size of the model: both are cut to the same few
layers with their real weights. A grown block that computes the same does so in a shorter stack too, and a new block leaves its
input unchanged; so the first old layers, with new blocks among them, must give the outputs of the old layers alone. The
vocabulary is cut to its first tokens as well. Large tensors are read when an operator uses them, so that one of them is in
memory at a time.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from outgrow.checkpoints.build_on_meta import class_of, config_of, example_for
from outgrow.checkpoints.cut_models import VOCABULARY, Cut, Reader, cut_model
from outgrow.checkpoints.plan_checkpoint import CheckpointPlan
from outgrow.checkpoints.read_checkpoint import MergedTensor, StoredTensor, read_header
from outgrow.checkpoints.tensor_bytes import open_files
from outgrow.configuration.per_layer import COUNTS
from outgrow.errors import CheckpointError, VerifyError
from outgrow.model.example import Example
from outgrow.model.kept_outputs import keeping, model_outputs
from outgrow.model.sandbox import random_state
from outgrow.text.plurals import counted
from outgrow.transforms.all_transforms import kept_outputs
from outgrow.verify.compare_old_entries import old_entries
from outgrow.verify.outputs import HALF, error

MODES = ("brief", "full", "none")
LAYERS = 2  # of the cut models
LIMIT = 32 * torch.finfo(torch.float32).eps
SENSITIVITY = 10  # times the change of the outputs when every weight changes by one unit in the last place
CLOSER = 2  # the same for half precision, in which values are stored but not computed
INSTEAD = "use --verify full (verify='full') if both models fit into memory, or --verify none"


@dataclass(frozen=True)
class Comparison:
    """The largest change of an output, relative to the largest output, and its limit. what: the models that ran."""

    what: str
    error: float
    limit: float

    @property
    def agrees(self) -> bool:
        return self.error <= self.limit

    def __str__(self) -> str:
        return f"error {self.error:.1e} of the largest output (limit for rounding: {self.limit:.1e}), {self.what}"


@dataclass(frozen=True, eq=False)
class Side:
    """One of the two models: its configuration, its layers, and its tensors in files by all of their names in the model."""

    config: Any
    cuts: tuple[Cut, ...]
    stored: Mapping[str, StoredTensor | MergedTensor]
    rounded: torch.dtype | None = None


def compare(plan: CheckpointPlan, folder: str, mode: str, example: Example | None = None) -> Comparison | None:
    """Compare the models; None if mode is "none". folder: of the new weights."""
    if mode == "none":
        return None
    with keeping(kept_outputs(plan.requests)):
        return _compared(plan, folder, mode, example)


def _compared(plan: CheckpointPlan, folder: str, mode: str, example: Example | None) -> Comparison:
    old, new, what = sides(plan, folder, whole=mode == "full")
    vocabulary = 2**62 if mode == "full" else VOCABULARY
    if mode == "full":
        _check_memory(plan)
    kind = class_of(plan.checkpoint)
    try:
        inputs, before = _outputs(kind, old, vocabulary, example)
    except Exception as reason:
        raise CheckpointError(f"the model can't be compared in this way ({reason}): {INSTEAD}") from reason
    gc.collect()
    cut = tuple(replace(gain, at=tuple(place for place in gain.at if place < vocabulary)) for gain in plan.gains)
    after = old_entries(before, _outputs(kind, new, vocabulary, inputs)[1], (*plan.gains, *cut))
    found, limit = error(before, after), LIMIT
    if found > limit:
        coarse = plan.dtype or plan.checkpoint.dtype
        moved = _outputs(kind, old, vocabulary, inputs, coarse)[1]
        limit = max(limit, (CLOSER if coarse in HALF else SENSITIVITY) * error(before, moved))
    return Comparison(what, found, limit)


def sides(plan: CheckpointPlan, folder: str, whole: bool) -> tuple[Side, Side, str]:
    """The old and the new model, cut to a few layers or whole; and what they are, in words."""
    config, stored = config_of(plan.checkpoint), plan.checkpoint.tensors
    names = {alias: stored[named.stored] for named in plan.names.used for alias in (named.alias, named.name)}
    written: dict[str, StoredTensor] = {}
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.endswith(".safetensors"):
            written.update(read_header(entry.path))
    new_names = {
        tensor.alias: MergedTensor(tuple(written[part] for part, _ in tensor.entries), tensor.shape) for tensor in plan.tensors
    }
    if whole:
        return Side(config, (), names, plan.dtype), Side(plan.model.config, (), new_names), "of the whole model"
    old_cuts, new_cuts = [], []
    for container, count in stacks(plan):
        one, other = _cuts(plan, container, count)
        old_cuts.append(one)
        new_cuts.append(other)
    layers = " and ".join(counted(len(cut.kept), "layer") for cut in old_cuts) or "all layers"
    more = sum(len(other.kept) - len(one.kept) for one, other in zip(old_cuts, new_cuts, strict=True))
    what = f"with the first {layers}" + (f" and {counted(more, 'new block')}" if more else "")
    return Side(config, tuple(old_cuts), names, plan.dtype), Side(plan.model.config, tuple(new_cuts), new_names), what


def stacks(plan: CheckpointPlan) -> list[tuple[str, int]]:
    """Paths of the stacks of layers that the configuration counts, and their lengths before the growth."""
    new = set(plan.plan.new_blocks)
    found = []
    for path, module in plan.model.named_modules():
        if isinstance(module, nn.ModuleList):
            old = sum(f"{path}.{key}" not in new for key in module._modules)
            if old > LAYERS and old in _counts(plan.checkpoint.config):
                found.append((path, old))
    return [(path, count) for path, count in found if not any(path.startswith(f"{other}.") for other, _ in found)]


def _counts(config: Mapping[str, Any]) -> set[int]:
    nested = [_counts(value) for value in config.values() if isinstance(value, dict) and "model_type" in value]
    return {value for name, value in config.items() if name in COUNTS and type(value) is int}.union(*nested)


def _cuts(plan: CheckpointPlan, container: str, count: int) -> tuple[Cut, Cut]:
    """The first layers of the old stack; in the new one the same, and some of the new blocks."""
    kept = range(min(LAYERS, count))
    moved = [int(plan.plan.renamed(f"{container}.{layer}").rpartition(".")[2]) for layer in kept]
    inserted = sorted(int(path.rpartition(".")[2]) for path in plan.plan.new_blocks if path.rpartition(".")[0] == container)[
        :LAYERS
    ]
    total = count + sum(path.rpartition(".")[0] == container for path in plan.plan.new_blocks)
    return Cut(container, count, tuple(kept)), Cut(container, total, tuple(sorted([*moved, *inserted])))


@torch.no_grad()
def _outputs(
    kind: Any, side: Side, vocabulary: int, example: Example | None, moved: torch.dtype | None = None
) -> tuple[Example, list[Tensor]]:
    """The example, and the floating-point tensors that a model returns for it, without its cache.

    moved: a dtype by one unit in whose last place every weight is changed, which shows how sensitive the outputs are.
    """
    paths = tuple(dict.fromkeys(part.file for stored in side.stored.values() for part in stored.parts))
    with open_files(paths) as files, random_state():
        model = cut_model(kind, side.config, side.cuts, vocabulary, side.stored, Reader(files, side.rounded, moved))
        inputs = example_for(model) if example is None else example
        assert isinstance(inputs, Mapping)
        result = model(**inputs)
    found = [value for value in model_outputs(result) if value.is_floating_point()]
    if not found or not all(bool(torch.isfinite(value).all()) for value in found):
        raise VerifyError("the model's outputs are not finite, or there are none")
    return inputs, found


def _check_memory(plan: CheckpointPlan) -> None:
    """Raise unless the largest tensor fits into the free memory, in float32."""
    needed = 4 * max(math.prod(tensor.shape) for tensor in plan.tensors)
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not every system reports it
        return
    if needed > free:
        raise CheckpointError(
            f"to compare the whole models takes {needed / 1e9:.1f} GB of memory for the largest tensor, and {free / 1e9:.1f} "
            "GB are free: use --verify brief (verify='brief')"
        )
