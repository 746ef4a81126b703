"""Cut a model to a few layers and a small vocabulary, with its real weights.

The configuration is cut as Transformers describes a stack: by counts, lists with an item per layer, lists of layer numbers, and
numbers of layers before those of another kind. Weights come from the files, by the names of the kept layers in the whole model.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outgrow.checkpoints.read_checkpoint import MergedTensor, StoredTensor
from outgrow.checkpoints.read_values import Reader
from outgrow.checkpoints.tensor_names import is_optional
from outgrow.configuration.per_layer import COUNTS, FIRST, LAYER_NUMBERS, PER_LAYER
from outgrow.configuration.rebuild_from_config import EmptyOnMeta
from outgrow.errors import CheckpointError
from outgrow.model.sandbox import tensors_of

VOCABULARY = 64
PARTS = ("image", "video", "audio", "vision_start", "vision_end")
PLACEHOLDERS = tuple(f"{part}_token_{form}" for form in ("id", "index") for part in PARTS)
TOKENS = r".*token_id|.*_token_index"


@dataclass(frozen=True)
class Cut:
    """The layers of a stack that are kept, by their numbers. container: path of the stack."""

    container: str
    count: int  # of layers in the whole stack
    kept: tuple[int, ...]

    def whole_name(self, name: str) -> str:
        """The name in the whole model of a tensor of the cut one."""
        found = re.match(rf"{re.escape(self.container)}\.(\d+)\.", name)
        if found is None:
            return name
        return f"{self.container}.{self.kept[int(found.group(1))]}.{name[found.end() :]}"


def cut_config(config: Any, cuts: Sequence[Cut], vocabulary: int) -> Any:
    """A configuration for the kept layers and tokens."""
    data = _cut(config.to_dict(), cuts, vocabulary)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        new = type(config).from_dict(data)
    for name in ("_attn_implementation", "_experts_implementation"):
        if getattr(config, name, None) is not None:
            setattr(new, name, getattr(config, name))
    return new


def _cut(data: Mapping[str, Any], cuts: Sequence[Cut], vocabulary: int) -> dict[str, Any]:
    found = dict(data)
    for name, value in data.items():
        if isinstance(value, dict) and "model_type" in value:  # a configuration within
            found[name] = _cut(value, cuts, vocabulary)
        elif name == "vocab_size" and type(value) is int:
            found[name] = min(value, vocabulary)
        elif re.fullmatch(TOKENS, name) and type(value) is int and value >= vocabulary:
            found[name] = vocabulary - 1 - PLACEHOLDERS.index(name) if name in PLACEHOLDERS else None
        for cut in cuts:
            found[name] = _cut_field(name, found[name], cut)
    return found


def _cut_field(name: str, value: Any, cut: Cut) -> Any:
    if name in COUNTS and value == cut.count:
        return len(cut.kept)
    if name in FIRST and type(value) is int:
        return sum(layer < value for layer in cut.kept)
    if not isinstance(value, (list, tuple)):
        return value
    if name.endswith(LAYER_NUMBERS):
        return [cut.kept.index(layer) for layer in value if layer in cut.kept]
    if len(value) == cut.count and any(part in name for part in (*PER_LAYER, "window")):
        return [value[layer] for layer in cut.kept]
    return value


def cut_model(
    kind: Any,
    config: Any,
    cuts: Sequence[Cut],
    vocabulary: int,
    stored: Mapping[str, StoredTensor | MergedTensor],
    reader: Reader,
) -> nn.Module:
    """A model of the kept layers. It reads large tensors while it runs.

    stored: the tensors in the files by all of their names in the whole model.
    """
    with warnings.catch_warnings(), EmptyOnMeta():
        warnings.simplefilter("ignore")
        model: nn.Module = kind(cut_config(config, cuts, vocabulary))
    tie: Any = getattr(model, "tie_weights", None)
    if callable(tie):
        tie()

    def whole(name: str) -> str:
        for cut in cuts:
            name = cut.whole_name(name)
        return name

    fill_model(model, lambda name, shape: reader.tensor(stored.get(whole(name)), shape, name))
    return model.eval()


def fill_model(model: nn.Module, read: Callable[[str, tuple[int, ...]], Tensor | None]) -> None:
    """Give a model values. read: returns the values of a tensor by name; None for those that are not stored under it."""
    names: dict[int, list[str]] = {}
    tensors = {id(tensor): tensor for tensor in tensors_of(model).values()}
    persistent = set(model.state_dict())
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                names.setdefault(id(tensor), []).append(f"{path}.{name}" if path else name)
    values: dict[int, Tensor] = {}
    for key, aliases in names.items():
        stored = [alias for alias in aliases if alias in persistent]
        found = (read(alias, tuple(tensors[key].shape)) for alias in stored)
        value = next((one for one in found if one is not None), None)
        if value is None and tensors[key].is_meta:
            value = _made_by_the_library(model, aliases[0], tensors[key])
        if value is not None:
            values[key] = value
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            _put(held, values)


def _made_by_the_library(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """The values of a tensor that is not stored, since the library makes it when it loads a model (Marian's positions)."""
    path, _, own = name.rpartition(".")
    make: Any = getattr(model, "_init_weights", None)
    if not is_optional(model, name) or not callable(make):
        raise CheckpointError(f"{name} has no values in the files")
    module = model.get_submodule(path)
    kept = module._parameters[own]
    module._parameters[own] = nn.Parameter(torch.zeros(tensor.shape, dtype=tensor.dtype), False)
    try:
        make(module)
        return module._parameters[own].detach()  # type: ignore[union-attr]
    finally:
        module._parameters[own] = kept


def _put(held: dict[str, Any], values: Mapping[int, Tensor]) -> None:
    """Replace tensors that a module holds. values: by the identity of the tensor."""
    for name, tensor in held.items():
        if tensor is not None and id(tensor) in values:
            value = values[id(tensor)]
            held[name] = nn.Parameter(value, False) if isinstance(tensor, nn.Parameter) else value
