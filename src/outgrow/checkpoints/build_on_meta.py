"""Build the model of a checkpoint on the meta device: its class with all shapes, and no values."""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from outgrow.checkpoints.read_checkpoint import Checkpoint
from outgrow.errors import CheckpointError, MissingError, Problem, TraceError
from outgrow.model.example import Example

BATCH, LENGTH = 2, 8


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
    tie: Any = getattr(model, "tie_weights", None)
    if callable(tie):
        tie()
    return model.eval()


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
                Problem(
                    "", "its code may read values", "load the model, grow it by outgrow.grow, and save it by save_pretrained"
                )
            ],
        ) from error


def example_for(model: nn.Module, batch: int = BATCH, length: int = LENGTH) -> Example:
    """Inputs on which a model of Transformers runs, chosen by its main input."""
    config: Any = model.config
    name = getattr(model, "main_input_name", "")
    makers: Mapping[str, Any] = {"input_ids": _text, "pixel_values": _image, "input_features": _sound}
    takes = inspect.signature(model.forward).parameters
    if _compares_images_with_texts(model) and "input_ids" in takes:
        return {**_text(config.text_config, batch, length), **_image(config, batch, length)}
    if name not in makers:
        raise CheckpointError(
            f"{type(model).__name__} takes {name or 'unknown inputs'}, and there is no standard example for that: pass example="
        )
    found: dict[str, torch.Tensor] = makers[name](config, batch, length)
    if name == "pixel_values" and "input_ids" in takes and getattr(config, "text_config", None) is not None:
        found |= _text(config, batch, length)
    if getattr(config, "is_encoder_decoder", False):
        found["decoder_input_ids"] = _text(config, batch, length)["input_ids"].flip(1)
    return found


def _compares_images_with_texts(model: nn.Module) -> bool:
    """Whether a model (as CLIP) takes images and texts and does not generate texts."""
    config: Any = model.config
    both = all(getattr(config, f"{part}_config", None) is not None for part in ("text", "vision"))
    generates: Any = getattr(model, "can_generate", None)
    return both and not (callable(generates) and generates())


def _text(config: Any, batch: int, length: int) -> dict[str, torch.Tensor]:
    """Tokens that are neither padding nor other special ones."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    special = {value for name, value in text.to_dict().items() if name.endswith("token_id") and type(value) is int}
    size = int(text.vocab_size)
    usual = [token for token in range(min(size, 512)) if token not in special] or [0]
    ids = torch.tensor([usual[(7 * n + 3) % len(usual)] for n in range(batch * length)]).view(batch, length)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _sound(config: Any, batch: int, length: int) -> dict[str, torch.Tensor]:
    """Spectra of the length that the model expects."""
    shape = batch, int(config.num_mel_bins), 2 * int(config.max_source_positions)
    return {"input_features": torch.randn(shape, generator=torch.Generator().manual_seed(0))}


def _image(config: Any, batch: int, length: int) -> dict[str, torch.Tensor]:
    config = getattr(config, "vision_config", None) or config
    side, channels = getattr(config, "image_size", 224), getattr(config, "num_channels", 3)
    sides = tuple(side) if isinstance(side, (tuple, list)) else (side, side)
    values = torch.randn(batch, channels, *sides, generator=torch.Generator().manual_seed(0))
    return {"pixel_values": values}
