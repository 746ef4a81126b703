"""Growth of a network in an experiment: the public calls of outgrow, and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import outgrow
from experiments.setting.arms import Grow
from experiments.setting.models import SmallConv

WIDENINGS: dict[str, Any] = {
    "r2r": outgrow.R2R,
    "netmorph": outgrow.NetMorph,
    "net2net": lambda **options: outgrow.Net2Net(split="random"),
    "copies": lambda **options: outgrow.R2R(**{**options, "init": "copy"}),
    "random": outgrow.RandomPad,
}


def transforms(model: nn.Module, grow: Grow) -> list[Any]:
    """What an arm's growth is in outgrow's words: all widths by a factor, or a new block (or layer) behind each."""
    if grow.what == "widen":
        where = "conv1" if isinstance(model, SmallConv) else "*"
        method = WIDENINGS[grow.method](init=grow.init, scale=grow.scale)
        return [outgrow.Widen(where, factor=grow.factor, method=method, fade=grow.fade or None)]
    stages = {name: module for name, module in model.named_children() if name.startswith("layer")}
    places = [f"{name}.{number}" for name, module in stages.items() for number in range(len(list(module.children())))]
    return [outgrow.Deepen(place, method=grow.method, fade=grow.fade or None) for place in places]


def grow_model(model: nn.Module, example: Tensor, grow: Grow, optimizer: torch.optim.Optimizer, seed: int) -> outgrow.Growth:
    return outgrow.grow(model, example, *transforms(model, grow), optimizer=optimizer, seed=seed)
