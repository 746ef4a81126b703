"""Inputs on which a model of Transformers runs, found from its configuration and the signature of its forward method.

A model may take images or sounds in several forms, and a text in which some tokens stand for their features. So there are
candidates, those with the most parts of the model first; the first that runs on the meta device is taken. The number of tokens
that stand for an image is the number of features that the model itself computes for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from outgrow.checkpoints.build_on_meta import arguments, build_on_meta, takes
from outgrow.errors import CheckpointError
from outgrow.model.example import Example, call, describe_example, tensors_in
from outgrow.model.known_values import on_meta
from outgrow.model.meta_copy import CachedShapes

BATCH, LENGTH = 2, 8
FRAMES = 16  # of a sound
SECOND = 16_000  # samples of a sound, where the configuration does not say how many make a frame
SIDE = 224  # of an image, unless the configuration has one
GRID = (1, 4, 4)  # patches of an image along time, height and width, where their number is free
WAY_OUT = "--example FILE (example=) with named tensors, in a .safetensors or a .pt file"
Inputs = dict[str, Tensor]


def example_for(model: nn.Module, batch: int = BATCH, length: int = LENGTH) -> Example:
    """Inputs on which a model of Transformers runs.

    Raises CheckpointError if there are none: the example has to be given.
    """
    found = list(_candidates(model, batch, length))
    if len(found) == 1:
        return found[0]
    reasons = []
    for one in found:
        reason = why_it_fails(_twin(model), one)
        if reason is None:
            return one
        reasons.append(f"on {describe_example(one)}: {str(reason).partition(chr(10))[0]}")
    tried = f"; it does not run {reasons[0]}" if reasons else ""
    raise CheckpointError(
        f"there is no standard example for {type(model).__name__}{tried}: pass {WAY_OUT}; {takes(type(model))}"
    )


def why_it_fails(model: nn.Module, inputs: Example) -> Exception | None:
    """The error with which a model on the meta device fails; None if it runs."""
    try:
        with CachedShapes(known=True), torch.no_grad():
            call(model, on_meta(inputs))
    except Exception as error:
        return error
    return None


def _twin(model: nn.Module) -> nn.Module:
    """The same model on the meta device: a pass may leave something behind, e.g. positions that are kept for later."""
    return build_on_meta(type(model), model.config)


def _candidates(model: nn.Module, batch: int, length: int) -> Iterator[Inputs]:
    """Inputs to try, those that use the most parts of the model first."""
    config: Any = model.config
    main = getattr(model, "main_input_name", "")
    taken = arguments(type(model))
    has_text = "input_ids" in taken and _text_config(config) is not None
    text = _text(config, batch, length) if has_text else {}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in taken:
        text |= _text_of_the_decoder(model, batch, length)
    for name, makers in PARTS.items():
        if name in taken and (name == main or _has_part(config, name)):
            for make in makers:
                inputs = make(config, batch)
                if inputs:
                    yield from _with_text(model, {name: one for name, one in inputs.items() if name in taken}, text)
    if has_text and main not in PARTS:
        yield {name: one for name, one in text.items() if name in taken}


def _has_part(config: Any, name: str) -> bool:
    """Whether a configuration has a part for images or sounds."""
    images = ("vision_config", "vit_config", "image_size")
    parts = images if name == "pixel_values" else ("audio_config", "speech_config")
    return any(getattr(config, part, None) is not None for part in parts)


def _with_text(model: nn.Module, inputs: Inputs, text: Inputs) -> Iterator[Inputs]:
    """Inputs with a text, in which tokens stand for features where the configuration names such a token."""
    taken = arguments(type(model))
    token = _placeholder(model.config, "audio" if "input_features" in inputs else "image")
    if token is None or "input_ids" not in text:
        yield {**text, **inputs}
    elif (count := _features(model, inputs, len(text["input_ids"]))) is not None:
        places = torch.full((len(text["input_ids"]), count), token)
        ids = torch.cat([text["input_ids"][:, :2], places, text["input_ids"][:, 2:]], 1)
        found = {**text, **inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if "mm_token_type_ids" in taken:
            found["mm_token_type_ids"] = (ids == token).int()
        yield {name: one for name, one in found.items() if name in taken}


def _placeholder(config: Any, sort: str) -> int | None:
    """The token that stands for features of an image or a sound."""
    names = (f"{sort}_token_id", f"{sort}_token_index")
    return next((value for name in names if type(value := getattr(config, name, None)) is int), None)


def _features(model: nn.Module, inputs: Inputs, batch: int) -> int | None:
    """The number of features that the model computes per text for images or sounds; None if it computes none for these."""
    name = "get_audio_features" if "input_features" in inputs else "get_image_features"
    twin = _twin(model)
    compute = getattr(twin, name, None) or getattr(getattr(twin, "model", None), name, None)
    if compute is None:
        return 1  # the model itself inserts the others
    taken = inspect.signature(compute).parameters
    try:
        with CachedShapes(known=True), torch.no_grad():
            found = compute(**{name: one for name, one in on_meta(inputs).items() if name in taken})
    except Exception:
        return None
    features = tensors_in(getattr(found, "pooler_output", found))
    return sum(one.numel() // one.shape[-1] for one in features) // batch or None


def _text_config(config: Any) -> Any:
    """The part of a configuration that describes texts; None if there is no vocabulary."""
    found = config.get_text_config() if hasattr(config, "get_text_config") else config
    return found if type(getattr(found, "vocab_size", None)) is int else None


def _text(config: Any, batch: int, length: int) -> Inputs:
    """Tokens that are neither padding nor other special ones."""
    text = _text_config(config)
    parts = {**text.to_dict(), **config.to_dict()}
    special = {value for name, value in parts.items() if name.endswith(("token_id", "token_index")) and type(value) is int}
    usual = [token for token in range(min(text.vocab_size, 512)) if token not in special] or [0]
    ids = torch.tensor([usual[(7 * n + 3) % len(usual)] for n in range(batch * length)]).view(batch, length)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _text_of_the_decoder(model: nn.Module, batch: int, length: int) -> Inputs:
    """Tokens for a decoder; for models that classify texts, with the token at the end whose state they read."""
    config: Any = getattr(model.config, "decoder", None) or model.config
    if _text_config(config) is None:
        return {}
    ids = _text(config, batch, length)["input_ids"]
    generates: Any = getattr(model, "can_generate", None)
    if callable(generates) and not generates() and type(getattr(config, "eos_token_id", None)) is int:
        read = _text(config, batch, length)
        read["input_ids"][:, -1] = config.eos_token_id
        return {**read, "decoder_input_ids": read["input_ids"].clone()}
    return {"decoder_input_ids": ids.flip(1)}


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _vision(config: Any) -> Any:
    parts = (getattr(config, name, None) for name in ("vision_config", "vit_config", "encoder"))
    return next((part for part in parts if part is not None), config)


def _pixels(config: Any) -> tuple[int, int, int]:
    """Channels, height and width of an image."""
    vision = _vision(config)
    side = getattr(vision, "image_size", None) or SIDE
    height, width = tuple(side) if isinstance(side, (tuple, list)) else (side, side)
    names = ("num_channels", "in_channels", "in_chans")
    return next((int(getattr(vision, name)) for name in names if hasattr(vision, name)), 3), height, width


def _patches(config: Any, batch: int) -> Inputs:
    """Images as rows of patches, with their numbers along time, height and width (Qwen2-VL)."""
    vision = _vision(config)
    if not hasattr(vision, "temporal_patch_size") or not hasattr(vision, "patch_size"):
        return {}
    size = _pixels(config)[0] * int(vision.temporal_patch_size) * int(vision.patch_size) ** 2
    grid = torch.tensor([GRID] * batch)
    return {"pixel_values": _drawn(batch * GRID[1] * GRID[2], size), "image_grid_thw": grid}


def _image(config: Any, batch: int) -> Inputs:
    return {"pixel_values": _drawn(batch, *_pixels(config))}


def _image_and_size(config: Any, batch: int) -> Inputs:
    channels, height, width = _pixels(config)
    return {"pixel_values": _drawn(batch, channels, height, width), "image_sizes": torch.tensor([[height, width]] * batch)}


def _list_of_images(config: Any, batch: int) -> Inputs:
    """One image per text, along an axis of its own."""
    return {"pixel_values": _drawn(batch, 1, *_pixels(config))}


def _video(config: Any, batch: int) -> Inputs:
    frames = getattr(_vision(config), "num_frames", None)
    return {"pixel_values": _drawn(batch, int(frames), *_pixels(config))} if frames else {}


def _wave(config: Any, batch: int) -> Inputs:
    """Samples for some frames behind a stack of convolutions (Wav2Vec2), or for a second."""
    size, kernels, strides = FRAMES, getattr(config, "conv_kernel", None), getattr(config, "conv_stride", None)
    if not isinstance(kernels, (tuple, list)) or not isinstance(strides, (tuple, list)):
        return {"input_values": _drawn(batch, SECOND)}
    for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
        size = (size - 1) * stride + kernel
    return {"input_values": _drawn(batch, size)}


def _wave_of_channels(config: Any, batch: int) -> Inputs:
    return {"input_values": _drawn(batch, int(getattr(config, "audio_channels", 1)), SECOND)}


def _spectrogram(config: Any, batch: int) -> Inputs:
    sizes = getattr(config, "max_length", None), getattr(config, "num_mel_bins", None)
    return {"input_values": _drawn(batch, *map(int, sizes))} if all(sizes) else {}  # type: ignore[arg-type]


def _sound(config: Any, batch: int) -> Inputs:
    """Spectra of the length that the model expects, bins first (Whisper)."""
    audio = getattr(config, "audio_config", None) or config
    bins, frames = getattr(audio, "num_mel_bins", None), getattr(audio, "max_source_positions", None)
    if not bins or not frames:
        return {}
    mask = torch.ones(batch, 2 * int(frames), dtype=torch.long)
    return {"input_features": _drawn(batch, int(bins), 2 * int(frames)), "feature_attention_mask": mask}


def _frames(config: Any, batch: int) -> Inputs:
    """Spectra of any length, time first (Speech2Text, Wav2Vec2-BERT)."""
    audio = getattr(config, "audio_config", None) or getattr(config, "encoder_config", None) or config
    names = ("input_feat_per_channel", "feature_projection_input_dim", "num_mel_bins", "input_dim")
    size = next((getattr(audio, name) for name in names if type(getattr(audio, name, None)) is int), None)
    return {"input_features": _drawn(batch, 4 * FRAMES, size)} if size else {}


PARTS: Mapping[str, tuple[Callable[[Any, int], Inputs], ...]] = {
    "pixel_values": (_patches, _video, _image, _image_and_size, _list_of_images),
    "input_features": (_sound, _frames),
    "input_values": (_spectrogram, _wave, _wave_of_channels),
}
