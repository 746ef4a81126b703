"""Compare the outputs of the old and the new model, in float32; old values are rounded to the new dtype if one was requested.

Values in half precision are rounded once. If that changes outputs by more than float32 does, the new model runs again with
its values before that rounding, and with the same narrow limit; the files must hold exactly what these are rounded to.

`full` runs both, one after the other. `brief` needs little time whatever the size of the model: both are cut to the same few
layers with their real weights. A grown block that computes the same does so in a shorter stack too, and a new block leaves its
input unchanged; so the first and the last old layer, with new blocks among them, must give the outputs of the old layers alone.
The vocabulary is cut to its first tokens as well. Large tensors are read when an operator uses them, so that one of them is in
memory at a time.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from outgrow.checkpoints.build_on_meta import class_of, config_of
from outgrow.checkpoints.cut_models import VOCABULARY, Cut, cut_model
from outgrow.checkpoints.plan_checkpoint import CheckpointPlan, NewTensor
from outgrow.checkpoints.read_checkpoint import MergedTensor, StoredTensor, read_header
from outgrow.checkpoints.read_values import Reader, UnroundedReader
from outgrow.checkpoints.standard_examples import example_for
from outgrow.checkpoints.stream_tensors import Stream
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
ALL_TOKENS = 2**62
LAYERS = 2  # of the cut models
LIMIT = 32 * torch.finfo(torch.float32).eps
SENSITIVITY = 10  # times the change of the outputs when every weight changes by one unit in the last place
UNROUNDED = 3  # tensors in memory while values before their rounding are computed: old, new, and those of the file
SMALL = 2**33  # bytes up to which all layers are compared where a model can't be cut
INSTEAD = "use --verify full (verify='full') if both models fit into memory, or --verify none"


@dataclass(frozen=True)
class Comparison:
    """The largest change of an output, relative to the largest output, and its limit. what: the models that ran.

    rounding: None, or the change of an output by the values in the files, which are rounded to `dtype`; `error` is then that of
    the values before, and the files hold what these are rounded to.
    """

    what: str
    error: float
    limit: float
    rounding: float | None = None
    dtype: str = ""

    @property
    def agrees(self) -> bool:
        return self.error <= self.limit

    def __str__(self) -> str:
        text = f"error {self.error:.1e} of the largest output (limit for rounding: {self.limit:.1e}), {self.what}"
        if self.rounding is None:
            return text
        return f"{text}; {self.rounding:.1e} with new values as rounded to {self.dtype}"


@dataclass(frozen=True, eq=False)
class Side:
    """One of the two models: its configuration, its layers, and its tensors in files by all of their names in the model."""

    config: Any
    cuts: tuple[Cut, ...]
    stored: Mapping[str, StoredTensor | MergedTensor]
    rounded: torch.dtype | None = None
    new: Mapping[int, NewTensor] = field(default_factory=dict)  # what each stored tensor is, by its identity
    stream: Stream | None = None  # computes new values before they are rounded


def compare(plan: CheckpointPlan, folder: str, mode: str, example: Example | None = None) -> Comparison | None:
    """Compare the models; None if mode is "none". folder: of the new weights."""
    if mode == "none":
        return None
    with keeping(kept_outputs(plan.requests)):
        return _compared(plan, folder, mode, example)


def _compared(plan: CheckpointPlan, folder: str, mode: str, example: Example | None) -> Comparison:
    if mode == "full":
        _check_memory(plan)
    kind, (cut, inputs, before) = class_of(plan.checkpoint), _first_outputs(plan, folder, mode, example)
    old, new, vocabulary = cut.old, cut.new, cut.vocabulary
    gc.collect()
    gains = tuple(replace(gain, at=tuple(place for place in gain.at if place < vocabulary)) for gain in plan.gains)
    after = old_entries(before, _outputs(kind, new, vocabulary, inputs)[1], (*plan.gains, *gains))
    found, limit, coarse = error(before, after), LIMIT, plan.dtype or plan.checkpoint.dtype
    if found <= limit:
        return Comparison(cut.what, found, limit)
    rounding = None
    if coarse in HALF:
        _check_memory(plan, UNROUNDED)
        rounding, old = found, replace(old, rounded=None)
        if plan.dtype is not None:
            before = _outputs(kind, old, vocabulary, inputs)[1]
        with open_files(plan.checkpoint.files) as files:
            precise = replace(new, stream=Stream(plan, files))
            after = old_entries(before, _outputs(kind, precise, vocabulary, inputs)[1], (*plan.gains, *gains))
        found = error(before, after)
    if found > limit:
        moved = _outputs(kind, old, vocabulary, inputs, torch.float32 if coarse in HALF else coarse)[1]
        limit = max(limit, SENSITIVITY * error(before, moved))
    return Comparison(cut.what, found, limit, rounding, str(coarse).removeprefix("torch."))


@dataclass(frozen=True, eq=False)
class CutPair:
    """The old and the new model, cut or whole; what they are, in words; and the number of tokens that they keep."""

    old: Side
    new: Side
    what: str
    vocabulary: int


def _first_outputs(
    plan: CheckpointPlan, folder: str, mode: str, example: Example | None
) -> tuple[CutPair, Example, list[Tensor]]:
    """The models to compare, the example, and the outputs of the old one.

    Not every configuration can be cut: then all tokens are kept and, in a small model, all layers.
    """
    attempts = [(True, ALL_TOKENS)] if mode == "full" else [(False, ALL_TOKENS)]
    if mode != "full" and example is None:  # a given example may use any token
        attempts = [(False, VOCABULARY), *attempts]
    if mode != "full" and plan.bytes <= SMALL:
        attempts.append((True, ALL_TOKENS))
    reasons = []
    for whole, vocabulary in attempts:
        pair = CutPair(*sides(plan, folder, whole), vocabulary)
        try:
            return pair, *_outputs(class_of(plan.checkpoint), pair.old, vocabulary, example)
        except Exception as reason:
            reasons.append(reason)
    raise CheckpointError(f"the model can't be compared in this way ({reasons[0]}): {INSTEAD}") from reasons[0]


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
    new = {id(new_names[tensor.alias]): tensor for tensor in plan.tensors}
    if whole:
        return Side(config, (), names, plan.dtype), Side(plan.model.config, (), new_names, new=new), "of the whole model"
    old_cuts, new_cuts = [], []
    for container, count in stacks(plan):
        one, other = _cuts(plan, container, count)
        old_cuts.append(one)
        new_cuts.append(other)
    layers = "the first and the last layer" + (" of each stack" if len(old_cuts) > 1 else "") if old_cuts else "all layers"
    more = sum(len(other.kept) - len(one.kept) for one, other in zip(old_cuts, new_cuts, strict=True))
    what = f"with {layers}" + (f" and {counted(more, 'new block')}" if more else "")
    new_side = Side(plan.model.config, tuple(new_cuts), new_names, new=new)
    return Side(config, tuple(old_cuts), names, plan.dtype), new_side, what


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
    """The first layers and the last of the old stack; in the new one the same, and some of the new blocks.

    The last layer is among them, since its norm may have been rescaled for a head that is tied to the embedding.
    """
    kept = (*range(LAYERS - 1), count - 1)
    moved = [int(plan.plan.renamed(f"{container}.{layer}").rpartition(".")[2]) for layer in kept]
    inserted = sorted(int(path.rpartition(".")[2]) for path in plan.plan.new_blocks if path.rpartition(".")[0] == container)[
        :LAYERS
    ]
    total = count + sum(path.rpartition(".")[0] == container for path in plan.plan.new_blocks)
    return Cut(container, count, kept), Cut(container, total, tuple(sorted([*moved, *inserted])))


@torch.no_grad()
def _outputs(
    kind: Any, side: Side, vocabulary: int, example: Example | None, moved: torch.dtype | None = None
) -> tuple[Example, list[Tensor]]:
    """The example, and the floating-point tensors that a model returns for it, without its cache.

    moved: a dtype by one unit in whose last place every weight is changed, which shows how sensitive the outputs are.
    """
    paths = tuple(dict.fromkeys(part.file for stored in side.stored.values() for part in stored.parts))
    with open_files(paths) as files, random_state():
        reader = Reader(files, side.rounded, moved)
        if side.stream is not None:
            reader = UnroundedReader(files, side.rounded, moved, side.stream, side.new)
        model = cut_model(kind, side.config, side.cuts, vocabulary, side.stored, reader)
        inputs = example_for(model) if example is None else example
        assert isinstance(inputs, Mapping)
        result = model(**inputs)
    found = [value for value in model_outputs(result) if value.is_floating_point()]
    if not found or not all(bool(torch.isfinite(value).all()) for value in found):
        raise VerifyError("the model's outputs are not finite, or there are none")
    return inputs, found


def _check_memory(plan: CheckpointPlan, times: int = 1) -> None:
    """Raise unless the largest tensor fits into the free memory some times, in float32."""
    needed = 4 * times * max(math.prod(tensor.shape) for tensor in plan.tensors)
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not every system reports it
        return
    if needed > free:
        raise CheckpointError(
            f"to compare the models takes {needed / 1e9:.1f} GB of memory for the largest tensor, and {free / 1e9:.1f} GB are "
            "free: use a machine with more, or --verify none (verify='none')"
        )
