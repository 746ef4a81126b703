"""Tensors that Transformers renames or merges when it loads a checkpoint: a view of the files with the model's own names.

Files of mixtures of experts hold one tensor per expert and projection, `experts.0.w1.weight`. The model has one tensor for all
experts, `experts.gate_up_proj`: the parts are stacked along a new first axis, and then concatenated along the second. In memory
the parts of a merged tensor follow one another, so the same bytes are a merged tensor and its parts. A new checkpoint has the
form of the old one: the bytes of the grown tensor, with one entry per part in the header of the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from outgrow.checkpoints.read_checkpoint import Checkpoint, MergedTensor, StoredTensor
from outgrow.errors import CheckpointError, Problem

Shape = tuple[int, ...]
SAVE_AGAIN = (
    "load it once with Transformers and save it with model.save_pretrained(path, save_original_format=False), which writes the "
    "model's own names, and grow that directory"
)
MERGED = [("MergeModulelist", 0), ("Concatenate", 1)]  # experts along a new axis 0, then gate and up projections along axis 1


@dataclass(frozen=True, eq=False)
class Loading:
    """What Transformers does to the names of a checkpoint when it loads it.

    parts: the names in the files of tensors that it renames or merges, by their names in the model, in the order of bytes.
    """

    renamings: Sequence[Any] = ()
    converters: Sequence[Any] = ()
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def renamed(self, stored: str) -> tuple[str, str | None]:
        """The model's name for a stored tensor, and the pattern by which it is merged with others; None if it is not."""
        if not self.renamings and not self.converters:
            return stored, None
        from transformers.core_model_loading import rename_source_key

        found: tuple[str, str | None] = rename_source_key(stored, list(self.renamings), list(self.converters))
        return found

    def entries(self, name: str, shape: Shape, like: str) -> tuple[tuple[str, Shape], ...]:
        """Names and shapes in the file of a new tensor. like: the tensor of the old model that it is derived from."""
        if like not in self.parts:
            return ((name, shape),)
        found = [(one for one in _moved(part, like, name) if self.renamed(one)[0] == name) for part in self.parts[like]]
        names = tuple(next(candidates, "") for candidates in found)
        if "" in names or (len(names) > 1 and len(names) % shape[0]):
            raise CheckpointError(f"{name}: there is no name for its parts like {self.parts[like][0]}: {SAVE_AGAIN}")
        if len(names) == 1:
            return ((names[0], shape),)
        part = (shape[1] * shape[0] // len(names), *shape[2:])
        return tuple((one, part) for one in names)


def as_loaded(checkpoint: Checkpoint, model: nn.Module) -> tuple[Checkpoint, Loading]:
    """A view of a checkpoint in which tensors have the names and shapes of the model that is loaded from it."""
    loading, state = _loading(model), model.state_dict()
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    groups: dict[str, dict[str, list[str]]] = {}
    tensors: dict[str, StoredTensor | MergedTensor] = {}
    for stored, tensor in checkpoint.tensors.items():
        name, pattern = loading.renamed(stored)
        known = name if name in state else prefix + name if prefix + name in state else name.removeprefix(prefix)
        direct = any(one in state for one in (stored, prefix + stored, stored.removeprefix(prefix)))
        if known not in state or (direct and pattern is None):
            tensors[stored] = tensor
        else:
            tensors.setdefault(known, tensor)  # keeps the place of the first part
            groups.setdefault(known, {}).setdefault(pattern or "", []).append(stored)
    parts = {}
    for name, by_pattern in groups.items():
        converter = next((one for one in loading.converters if by_pattern.keys() <= set(one.source_patterns)), None)
        parts[name] = _in_order(by_pattern, converter)
        found = [checkpoint.tensors[one] for one in parts[name]]
        merged = found[0] if converter is None and len(found) == 1 else _merged(found, len(by_pattern), converter)
        if merged is None:
            reason = "Transformers merges or splits it when it loads the file, in a way that is not known here"
            problem = Problem(next(iter(by_pattern.values()))[0], reason, SAVE_AGAIN)
            raise CheckpointError(f"{checkpoint.folder}: its tensors can't be read one by one", [problem])
        tensors[name] = merged
    return replace(checkpoint, tensors=tensors), replace(loading, parts=parts)


def _loading(model: nn.Module) -> Loading:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming
    except ImportError:  # Transformers 4 loads tensors as they are
        return Loading()
    typed: Any = model
    transforms: list[Any] = get_model_conversion_mapping(typed)
    renamings, converters = ([one for one in transforms if isinstance(one, kind)] for kind in (WeightRenaming, WeightConverter))
    return Loading(renamings, converters)


def _in_order(by_pattern: Mapping[str, Sequence[str]], converter: Any) -> tuple[str, ...]:
    """Stored names in the order of their bytes in the merged tensor: expert by expert."""
    patterns = [one for one in converter.source_patterns if one in by_pattern] if converter is not None else [""]
    columns = [sorted(by_pattern[pattern], key=_natural) for pattern in patterns]
    return tuple(name for row in zip(*columns, strict=False) for name in row)


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _merged(stored: Sequence[StoredTensor | MergedTensor], columns: int, converter: Any) -> MergedTensor | None:
    """The tensor that equal parts make up, `columns` of them per expert; None if Transformers merges them in another way."""
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in getattr(converter, "operations", ())]
    parts = [one for one in stored if isinstance(one, StoredTensor)]
    alike = len({(one.shape, one.dtype) for one in parts}) == 1
    if not alike or steps != MERGED[: 1 + (columns > 1)] or columns != len(converter.source_patterns):
        return None
    rows, *rest = parts[0].shape
    return MergedTensor(tuple(parts), (len(parts) // columns, rows * columns, *rest))


def _moved(stored: str, like: str, new: str) -> list[str]:
    """Possible names in the file of a part of another block. stored: that of a part of `like`, a tensor of the model.

    The number of the block may stand at another place in the file (`encoder.layer.1` for `layers.1`).
    """
    pairs = zip(reversed(like.split(".")), reversed(new.split(".")), strict=False)
    found = [stored.split(".")]
    for one, other in pairs:
        if one != other:
            found = [[*name[:n], other, *name[n + 1 :]] for name in found for n, part in enumerate(name) if part == one]
    return [".".join(name) for name in found]
