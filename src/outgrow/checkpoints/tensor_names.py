"""Match the names in a checkpoint with those of the model's tensors, as Transformers does when it loads.

Names are equal, or differ by the prefix of the base model (`h.0.…` in the file, `transformer.h.0.…` in the model). A tied
tensor may be stored under any of its names. Tensors that Transformers renames or merges already have the model's names here
(see `checkpoints/merged_tensors.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outgrow.checkpoints.merged_tensors import SAVE_AGAIN
from outgrow.checkpoints.read_checkpoint import Checkpoint
from outgrow.checkpoints.tensor_bytes import open_files, read_tensor
from outgrow.errors import CheckpointError, Problem
from outgrow.model.sandbox import tensors_of

SLAB = 2**24  # values that are compared at once


@dataclass(frozen=True)
class Named:
    """A stored tensor that the model uses. name: the first name of the tensor in the model; alias: the name that is stored."""

    stored: str
    alias: str
    name: str


@dataclass(frozen=True, eq=False)
class Names:
    """The tensors of a checkpoint that the model uses, and those that it ignores when it is loaded."""

    used: tuple[Named, ...]
    ignored: tuple[str, ...]
    prefix: str  # of the base model, with a dot

    def stored_as(self, new: str, like: Named) -> str:
        """The name to store a tensor under. new: its name in the model; like: a tensor from which it is derived."""
        if like.stored == like.alias:
            return new
        if like.alias == self.prefix + like.stored:
            return new.removeprefix(self.prefix)
        return self.prefix + new


def match_names(checkpoint: Checkpoint, model: nn.Module) -> Names:
    """Match stored tensors with those of the model on the meta device; CheckpointError with all problems."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    first, state = first_names(model), model.state_dict(keep_vars=True)
    computed = {name for name, _ in model.named_buffers()} - state.keys()  # earlier versions of the library stored them
    used, ignored, problems = [], [], []
    for stored, tensor in checkpoint.tensors.items():
        names = stored, prefix + stored, stored.removeprefix(prefix)
        alias = next((name for name in names if name in state), None)
        if alias is None and (_is_ignored(model, stored) or computed.intersection(names)):
            ignored.append(stored)
        elif alias is None:
            problems.append(Problem(stored, f"{type(model).__name__} has no tensor of that name", SAVE_AGAIN))
        elif tuple(state[alias].shape) != tensor.shape:
            shape = tuple(state[alias].shape)
            problems.append(Problem(stored, f"it has the shape {tensor.shape}, and {shape} by the configuration"))
        else:
            used.append(Named(stored, alias, first[id(state[alias])]))
    known = {named.name for named in used}
    for name in dict.fromkeys(first[id(tensor)] for tensor in state.values()):
        if name not in known and not problems and not is_optional(model, name):
            problems.append(Problem(name, "the model needs it, and the checkpoint does not contain it"))
    if problems:
        more = [Problem("", f"and {len(problems) - 5} more")] if len(problems) > 5 else []
        raise CheckpointError(
            f"{checkpoint.folder}: the weights do not belong to {type(model).__name__}, the class that config.json names",
            [*problems[:5], *more],
        )
    return Names(tuple(used), tuple(ignored), prefix)


def check_tied(checkpoint: Checkpoint, names: Names) -> None:
    """Refuse a checkpoint in which tensors that the configuration ties have different values: Transformers unties them."""
    stored: dict[str, str] = {}
    for named in names.used:
        first = stored.setdefault(named.name, named.stored)
        if first == named.stored:
            continue
        tensors = checkpoint.tensors[first], checkpoint.tensors[named.stored]
        with open_files(tuple(part.file for tensor in tensors for part in tensor.parts)) as files:
            pairs = ([read_tensor(files, tensor, *rows) for tensor in tensors] for rows in _slabs(tensors[0].shape))
            same = all(torch.equal(one, other) for one, other in pairs)
        if not same:
            raise CheckpointError(
                f"{checkpoint.folder}: config.json ties {first} and {named.stored}, but their stored values differ, and "
                'Transformers loads them untied: write "tie_word_embeddings": false in config.json'
            )


def _slabs(shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Numbers of rows and first rows, for parts of a tensor that take little memory."""
    step = max(1, SLAB // max(1, math.prod(shape[1:])))
    for first in range(0, shape[0], step):
        yield min(step, shape[0] - first), first


def first_names(model: nn.Module) -> dict[int, str]:
    """The first name of each tensor, by identity."""
    return {id(tensor): name for name, tensor in tensors_of(model).items()}


def aliases_of(model: nn.Module) -> dict[str, list[str]]:
    """All names of each tensor in the state dict, by its first name."""
    first, found = first_names(model), dict[str, list[str]]()
    state: Mapping[str, Tensor] = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        found.setdefault(first[id(tensor)], []).append(name)
    return found


def _is_ignored(model: nn.Module, name: str) -> bool:
    patterns: Iterable[str] = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in (*patterns, r"(^|\.)rotary_emb\.inv_freq$"))


def is_optional(model: nn.Module, name: str) -> bool:
    """Whether a checkpoint may lack a tensor, since the library makes its values itself."""
    patterns: Iterable[str] = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)
