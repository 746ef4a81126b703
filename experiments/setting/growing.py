"""Growth of a network in an experiment, by the public calls of outgrow; appendix B's third block by its author's way."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import Tensor, nn

import outgrow
from experiments.setting.arms import Grow
from experiments.setting.models import SmallConv
from experiments.setting.three_blocks import ThreeBlocks

WIDENINGS: dict[str, Any] = {
    "r2r": outgrow.R2R,
    "netmorph": outgrow.NetMorph,
    "netmorph-writers": lambda **options: outgrow.NetMorph(zero="writers", **options),
    "net2net": lambda **options: outgrow.Net2Net(split="random"),
    "copies": lambda **options: outgrow.R2R(**{**options, "init": "copy"}),
    "random": outgrow.RandomPad,
}


def transforms(model: nn.Module, grow: Grow) -> list[Any]:
    """The growth of an arm as outgrow's requests: all widths by a factor, or a new block (or layer) behind each."""
    if grow.what == "widen":
        method = WIDENINGS[grow.method](init=grow.init, scale=grow.scale, noise=grow.noise)
        return [outgrow.Widen(widened(model), factor=grow.factor, method=method, fade=grow.fade or None)]
    stages = {name: module for name, module in model.named_children() if name.startswith("layer")}
    places = [f"{name}.{number}" for name, module in stages.items() for number in range(len(list(module.children())))]
    return [outgrow.Deepen(place, method=grow.method, fade=grow.fade or None) for place in places]


def widened(model: nn.Module) -> str | list[str]:
    """Where a network is widened: a SmallConv in its first layer, appendix B's inside its blocks, others everywhere."""
    if isinstance(model, ThreeBlocks):
        return [f"block{number}.conv{layer}" for number in (1, 2, 3) for layer in (1, 2, 3)]
    return "conv1" if isinstance(model, SmallConv) else "*"


def grow_model(model: nn.Module, example: Tensor, grow: Grow, optimizer: torch.optim.Optimizer, seed: int) -> dict[str, Any]:
    """Grow it; what is kept about that with the results."""
    started = time.perf_counter()
    if isinstance(model, ThreeBlocks) and grow.what == "deepen":
        return {**add_block(model, example, seed), "seconds": time.perf_counter() - started}
    growth = outgrow.grow(model, example, *transforms(model, grow), optimizer=optimizer, seed=seed)
    return {
        "parameters": list(growth.parameters),
        "error": growth.max_error,
        "preserving": growth.preserving,
        "seconds": time.perf_counter() - started,
        "plan": str(growth.plan),
    }


@torch.no_grad()
def add_block(model: ThreeBlocks, example: Tensor, seed: int) -> dict[str, Any]:
    """The third block of appendix B's network. It changes the number of channels, so that no other block is its model."""
    twin = copy.deepcopy(model).eval()
    before, count = twin(example), sum(parameter.numel() for parameter in model.parameters())
    model.add_block(seed)
    after = copy.deepcopy(model).eval()(example)
    error = float((after - before).abs().max() / before.abs().max())
    parameters = [count, sum(parameter.numel() for parameter in model.parameters())]
    return {"parameters": parameters, "error": error, "preserving": True, "plan": "a third block, whose branch is zero"}
