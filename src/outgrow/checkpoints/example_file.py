"""An example in a file: named tensors, which are the arguments of the model's forward method."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outgrow.checkpoints.build_on_meta import arguments, takes
from outgrow.errors import CheckpointError
from outgrow.model.example import Example

GivenExample = Example | str | os.PathLike[str]
FORM = "a dict of names and tensors, e.g. {'input_values': torch.randn(2, 16000)}"
PLAIN = (Tensor, bool, int, float, str, type(None))


def given_example(given: GivenExample | None, kind: Any) -> Mapping[str, Any] | None:
    """An example that was passed, or the contents of its file; floating-point tensors are in float32, as the models that run.

    Raises CheckpointError unless all names are arguments of the forward method of the class `kind`.
    """
    if given is None:
        return None
    found = read_example(given) if isinstance(given, (str, os.PathLike)) else given
    if isinstance(found, Tensor):
        found = {getattr(kind, "main_input_name", "input_ids"): found}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"the example is of type {type(found).__name__}: pass {FORM}, or the path of a file with one")
    unknown = [str(name) for name in found if name not in arguments(kind)]
    if unknown:
        raise CheckpointError(f"the example has {', '.join(unknown)}, which {kind.__name__} does not take; {takes(kind)}")
    return {name: _in_float32(value) for name, value in found.items()}


def _in_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def read_example(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The named tensors of a .safetensors file, or the dict in a .pt file; code in a file is not run."""
    name = os.fspath(path)
    if not os.path.isfile(name):
        raise CheckpointError(f"{name}: there is no such file with an example")
    found = _safetensors(name) if name.endswith(".safetensors") else _torch_file(name)
    if not isinstance(found, Mapping) or not found or not all(isinstance(key, str) for key in found):
        raise CheckpointError(f"{name} holds no example: save {FORM}")
    wrong = [key for key, value in found.items() if not isinstance(value, PLAIN)]
    if wrong:
        raise CheckpointError(f"{name}: {wrong[0]} is of type {type(found[wrong[0]]).__name__}; an example is {FORM}")
    return found


def _safetensors(name: str) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(name)
    except SafetensorError as error:
        raise CheckpointError(f"{name} can't be read as safetensors: {error}") from error


def _torch_file(name: str) -> Any:
    try:
        return torch.load(name, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{name} is neither .safetensors nor a file of torch.save with plain tensors, and code in it is not run: save "
            f"{FORM}; for the result of a processor, torch.save(dict(inputs), …)"
        ) from error
