"""Shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import outgrow
from tests.helpers.commands import checkpoint as checkpoint
from tests.helpers.commands import run as run
from tests.helpers.saved_models import grown_cnn

collect_ignore = ["outside"]  # a package of its own, which registers things when it is imported
_STAND_INS: list[torch.library.Library] = []


def _let_torchvision_import() -> None:
    """The torchvision wheel registers its operators for CUDA builds of torch only; timm needs the names, not the operators."""
    schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + schema)
    _STAND_INS.append(library)


if torch.version.cuda is None:
    _let_torchvision_import()
torch.set_num_threads(1)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing is compiled before and after a test.

    For each compiled function torch 2.6 keeps a pointer to its backend, but no reference. A compiled model that has gone leaves
    the pointer behind; the next one with a layer of the same class compares the two, which crashes now and then.
    """
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


@pytest.fixture
def saved(path: Path) -> tuple[nn.Module, Path]:
    """A grown model and the file it was saved to."""
    model = grown_cnn()
    outgrow.save(model, path)
    return model, path
