"""Build the model of a checkpoint on the meta device: its class with all shapes, and no values."""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from outgrow.checkpoints.read_checkpoint import Checkpoint
from outgrow.errors import CheckpointError, MissingError, Problem, TraceError


def library() -> Any:
    """Transformers; MissingError if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise MissingError("checkpoints are grown with Transformers: pip install transformers") from error
    return transformers


def config_of(checkpoint: Checkpoint) -> Any:
    """The configuration object of a checkpoint."""
    transformers, data = library(), dict(checkpoint.config)
    if "quantization_config" in data:
        raise CheckpointError(
            f"{checkpoint.folder}: its weights are quantised (quantization_config), and quantised values can't be grown: "
            "grow the original checkpoint, and quantise the result"
        )
    if data.get("model_type") not in transformers.CONFIG_MAPPING:
        raise CheckpointError(
            f"{checkpoint.folder}: config.json has the model_type {data.get('model_type')!r}, which this version of "
            "Transformers does not contain; code from the directory itself is not run"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return transformers.AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
    except Exception as error:
        raise CheckpointError(f"{checkpoint.folder}: its config.json is refused by Transformers: {error}") from error


def class_of(checkpoint: Checkpoint) -> Any:
    """The class that the configuration names; it decides which head the model has."""
    names = checkpoint.config.get("architectures") or [None]
    found = getattr(library(), str(names[0]), None)
    if found is None:
        raise CheckpointError(
            f"{checkpoint.folder}: config.json names the class {names[0]!r} (architectures), and Transformers has no such "
            "class: write the class that the weights belong to, e.g. LlamaForCausalLM"
        )
    return found


def build_on_meta(kind: Any, config: Any, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model of a class on the meta device, in eval mode; the configuration is copied."""
    usual = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            model: nn.Module = kind(copy.deepcopy(config))
    except Exception as error:
        raise CheckpointError(f"{kind.__name__} can't be built from the configuration: {error}") from error
    finally:
        torch.set_default_dtype(usual)
    if not all(parameter.is_meta for parameter in model.parameters()):  # torch.FloatTensor(…) does not follow the context
        model.to("meta")
    tie: Any = getattr(model, "tie_weights", None)
    if callable(tie):
        tie()
    return model.eval()


def arguments(kind: Any) -> list[str]:
    """Names of the arguments of a forward method."""
    found = inspect.signature(kind.forward).parameters.values()
    return [one.name for one in found if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL) and one.name != "self"]


def takes(kind: Any) -> str:
    """What the forward method of a class takes, in words."""
    return f"its forward method takes {', '.join(arguments(kind))}"


@contextlib.contextmanager
def without_weights(kind: Any) -> Iterator[None]:
    """A context in which a model that does not run on the meta device is refused with the way out for checkpoints."""
    try:
        yield
    except TraceError as error:
        reason = error.problems[0].reason if error.problems else str(error)
        raise CheckpointError(
            f"{kind.__name__} can't be grown on the disk, where it is planned without weights: {reason}",
            [
                Problem("", "the example may not suit it", f"pass one by --example FILE (example=); {takes(kind)}"),
                Problem("", "its code may read values", "load the model, grow it by outgrow.grow, and save by save_pretrained"),
            ],
        ) from error
