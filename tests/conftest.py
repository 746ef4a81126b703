"""Shared by all tests."""

from __future__ import annotations

import torch

_STAND_INS: list[torch.library.Library] = []


def _let_torchvision_import() -> None:
    """The torchvision wheel registers its operators for CUDA builds of torch only; timm needs the names, not the operators."""
    schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + schema)
    _STAND_INS.append(library)


if not torch.cuda.is_available():
    _let_torchvision_import()
torch.set_num_threads(1)
