"""Extra state of modules (`get_extra_state`) in files without pickle: as JSON, with its tensors as tensors of the file.

`state_dict` holds the result of a module's `get_extra_state` under the name `…_extra_state`. A growth does not change it. Plain
values, lists, tuples, dicts and tensors are stored. JSON has neither tuples nor keys other than strings, so each container is
written as a pair of its kind and its items:

    {"scale": 2.0, "shape": (3, 4)}  →  ["dict", [["scale", 2.0], ["shape", ["tuple", [3, 4]]]]]
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as NAME

from outgrow.errors import CheckpointError
from outgrow.model.journal import Journal

STORED = "outgrow.extra/"  # prefix in files of the names of tensors in extra state
STORABLE_INSTEAD = (
    "return plain values, lists, tuples, dicts and tensors from get_extra_state; or save the run (outgrow.Run.save), or use "
    "torch.save(model.state_dict(), path)"
)


def is_extra(name: str) -> bool:
    """Whether a name in a state dict is the name of extra state."""
    return name.rpartition(".")[2] == NAME


def extras_of(model: nn.Module) -> dict[str, Any]:
    """Extra state, except for tensors, by its name in the state dict."""
    return {name: value for name, value in model.state_dict().items() if is_extra(name) and not isinstance(value, Tensor)}


def note_extras(model: nn.Module, journal: Journal) -> None:
    """Let a journal restore the extra state of a model."""
    for module in model.modules():
        kind = type(module)
        if kind.get_extra_state is not nn.Module.get_extra_state and kind.set_extra_state is not nn.Module.set_extra_state:
            journal.note(partial(module.set_extra_state, copy.deepcopy(module.get_extra_state())))


def pack_extras(extras: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Extra state as JSON, and its tensors; CheckpointError if it holds other types.

    Example:
        >>> pack_extras({"norm._extra_state": {"scale": 2.0, "shape": (3, 4)}})
        ({'norm._extra_state': ['dict', [['scale', 2.0], ['shape', ['tuple', [3, 4]]]]]}, {})
    """
    tensors: dict[str, Tensor] = {}
    return {name: _packed(value, name, tensors) for name, value in extras.items()}, tensors


def _packed(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        key = f"{STORED}{len(tensors)}"
        tensors[key] = value.detach()
        return ["tensor", key]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_packed(item, name, tensors) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[_packed(key, name, tensors), _packed(item, name, tensors)] for key, item in value.items()]]
    raise CheckpointError(
        f"{name} of the state dict holds a {type(value).__name__}, which can't be stored safely: {STORABLE_INSTEAD}"
    )


def unpack_extras(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The extra state that `pack_extras` packed; ValueError or LookupError if it is damaged."""
    return {name: _unpacked(value, tensors) for name, value in facts.items()}


def _unpacked(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, list):
        return value
    kind, items = value
    if kind == "tensor":
        return tensors[items]
    if kind == "dict":
        return {_unpacked(key, tensors): _unpacked(item, tensors) for key, item in items}
    if kind not in ("list", "tuple"):
        raise ValueError(f"there is no container of the kind {kind!r}")
    unpacked = [_unpacked(item, tensors) for item in items]
    return unpacked if kind == "list" else tuple(unpacked)
