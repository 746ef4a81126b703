"""Models to save, and ways to compare them, for tests of checkpoints."""

from __future__ import annotations

import copy
import functools
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import outgrow
from outgrow.errors import CheckpointError
from outgrow.history.growths_on_model import history


class Cnn(nn.Module):
    """Convolutions, batch norms with buffers, a residual stream, and a buffer that the state dict leaves out."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.bn = nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(width, 6, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(6, width, 3, padding=1)
        self.head = nn.Linear(width, 5)
        self.register_buffer("gain", torch.linspace(0.5, 1.5, width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)))
        x = F.relu(x + self.conv2(F.relu(self.conv1(x))))
        return self.head(x.mean((2, 3)) * self.gain)


class Gpt(nn.Module):
    """A stream under layer norms, and an output layer tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm1 = nn.LayerNorm(8)
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 8)
        self.norm2 = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.fc2(F.gelu(self.fc1(self.norm1(x))))
        return self.head(self.norm2(x))


IMAGES = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))
TOKENS = torch.arange(10).reshape(2, 5)


def trained(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A model with arbitrary values: initial values hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    model = build()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point() and not name.endswith("gain"):
                noise = torch.rand(tensor.shape, generator=generator) + 0.5
                tensor.copy_(noise if "running_var" in name else noise * 2 - 2)
    return model.eval()


def grown_cnn() -> nn.Module:
    return copy.deepcopy(_grown_cnn())


@functools.cache
def _grown_cnn() -> nn.Module:
    model = trained(Cnn)
    outgrow.widen(model, IMAGES, "conv1", to=8, method="r2r")
    outgrow.widen(model, IMAGES, "stem", to=10, method=outgrow.Net2Net(split="random"))
    outgrow.widen(model, IMAGES, "conv1", to=9, method="netmorph", seed=3)
    outgrow.widen(model, IMAGES, "*", factor=1.5, method=outgrow.NetMorph(zero="writers"))
    outgrow.widen(model, IMAGES, "conv1", by=1, method="random")
    return model


def grown_gpt() -> nn.Module:
    model = trained(Gpt)
    outgrow.widen(model, TOKENS, "embedding", to=11, method="mean")
    outgrow.grow(model, TOKENS, outgrow.Widen("embedding", to=14), outgrow.Widen("fc1", to=20, method="r2r"))
    return model


def photograph(model: nn.Module) -> dict[str, Any]:
    """Everything that a model holds: bytes and identities of tensors and gradients, settings, modes, history."""
    picture: dict[str, Any] = {"repr": repr(model), "history": history(model)}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        gradient = None if tensor.grad is None else tensor.grad.numpy().tobytes()
        numbers = tensor.detach().numpy().tobytes()
        picture[name] = (id(tensor), tensor.shape, tensor.stride(), tensor.dtype, numbers, gradient, tensor.requires_grad)
    for name, module in model.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float, str, tuple))}
        picture[f"vars of {name}"] = plain
    return picture


def refused(model: nn.Module, path: Path, *words: str) -> str:
    """Check that loading fails with the file's name and these words, and changes neither model nor random state."""
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, float(number))
    before, drawn = photograph(model), (torch.get_rng_state().tolist(), random.getstate())
    with pytest.raises(CheckpointError) as caught:
        outgrow.load(model, path)
    assert photograph(model) == before
    assert (torch.get_rng_state().tolist(), random.getstate()) == drawn
    text = str(caught.value)
    for word in (str(path), *words):
        assert word in text, text
    return text


def rewrite(path: Path, change: Callable[[dict[str, Tensor], dict[str, str]], object]) -> None:
    """Edit a file with safetensors and json only, and remove its checksums, as in a file of version 0.1.0."""
    tensors = safetensors.torch.load_file(path)
    metadata = header(path)["__metadata__"]
    without_checksums(metadata)
    change(tensors, metadata)
    safetensors.torch.save_file(tensors, path, metadata)


def without_checksums(metadata: dict[str, str]) -> None:
    about = json.loads(metadata["outgrow"])
    del metadata["outgrow.checksum"], about["checksums"]
    metadata["outgrow"] = json.dumps(about, separators=(",", ":"))


def header(path: Path) -> dict[str, Any]:
    """The header as the safetensors format defines it: eight bytes of length, then JSON."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return dict(json.loads(data[8 : 8 + length]))
