"""Fill a model with experts that the user has built, by the names of its tensors.

A tensor of the new model is filled from the old one
- by its name with another index, if it is in a list of modules that is longer by a whole factor: `experts.5.…` of 8 experts
  comes from `experts.2.…` of 4;
- else by its own name: the same values, or each entry along axis 0 repeated if that is longer by a whole factor (routers, and
  the experts of a layer in one tensor);
- else by its name without the list: `mlp.experts.5.fc1.weight` comes from `mlp.fc1.weight` of a dense model.

A tensor without any of these (the router of a dense model's experts) keeps the value that its constructor gave it. Every tensor
of the old model must be used. Whether the result computes the same is then decided by comparing outputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from outgrow.errors import MethodError, Problem

State = Mapping[str, Tensor]


@torch.no_grad()
def from_names(old: State, new: State, kind: str) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Values for the tensors of a new model, and the names of those that keep their own. kind: the new model's class."""
    found: dict[str, Tensor] = {}
    used, kept = set[str](), []
    problems = []
    for name, like in new.items():
        source = next((one for one in _sources(name, old, new) if one in old), None)
        value = None if source is None else _fitting(old[source], like)
        if source is None:
            kept.append(name)
        elif value is None:
            reason = f"it has the shape {tuple(like.shape)}, which {tuple(old[source].shape)} ({source}) does not fill evenly"
            problems.append(Problem(name, reason, "more experts are exact only if each has the same number of copies"))
        else:
            found[name] = value.to(like.dtype)
            used.add(source)
    problems += [
        Problem(name, f"no tensor of {kind} has this name, also not in a list of experts") for name in old if name not in used
    ]
    if problems:
        raise MethodError(f"the model can't be copied into {kind} by names", problems[:5])
    return found, tuple(kept)


def _sources(name: str, old: State, new: State) -> Iterator[str]:
    """Names that a tensor may have in the old model, in the order in which they count."""
    lists = list(re.finditer(r"(?:^|(?<=\.))(\w+)\.(\d+)\.", name))
    for match in lists:  # before the tensor's own name: with copies, experts.1 comes from experts.0
        container, index = name[: match.end(1)], int(match.group(2))
        here, there = _length(old, container), _length(new, container)
        if here and there > here and there % here == 0:
            yield f"{container}.{index // (there // here)}.{name[match.end() :]}"
    yield name
    for match in lists:
        yield name[: match.start()] + name[match.end() :]


def _length(state: State, container: str) -> int:
    """The number of modules in a list, by the names of their tensors."""
    prefix = f"{container}."
    return len({name[len(prefix) :].partition(".")[0] for name in state if name.startswith(prefix)})


def _fitting(value: Tensor, like: Tensor) -> Tensor | None:
    """A copy of a tensor in another shape: the same, or with each entry along axis 0 repeated; None if it does not fit."""
    if value.shape == like.shape:
        return value.clone()
    if value.ndim != like.ndim or not value.ndim or value.shape[1:] != like.shape[1:] or len(like) % len(value):
        return None
    return value.repeat_interleave(len(like) // len(value), 0)
