"""Made-up results of the experiments: every arm, short, with curves that are easy to compute by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from experiments.reading.result_files import FILTERS, FORMAT, file_name
from experiments.setting.arms import Arm, Grow, paper_arms
from experiments.setting.growing import grow_model
from experiments.setting.models import SmallConv
from experiments.setting.more_arms import guessed_appendix_b

EPOCHS = 6  # of every stage


def curve(arm: Arm, place: int, seed: int, epochs: int) -> dict[str, object]:
    """Accuracy climbs by 40 points a stage, a little higher with each seed; an epoch costs (1 + stage) TFLOP and 0.1 s."""
    stage = arm.stages[place]
    accuracy = [round(0.1 + 0.4 * place + 0.4 * epoch / epochs + 0.001 * seed, 6) for epoch in range(epochs + 1)]
    growth = {"parameters": [100, 200], "error": 1e-7, "preserving": True, "seconds": 0.05, "plan": ""}
    return {
        "epoch": [float(epoch) for epoch in range(epochs + 1)],
        "accuracy": accuracy,
        "test_loss": [1.0] * (epochs + 1),
        "train_loss": [None] + [1.0] * epochs,
        "flops": [(1 + place) * 1e12 * epoch for epoch in range(epochs + 1)],
        "seconds": [0.1 * epoch for epoch in range(epochs + 1)],
        "steps": [1.0, 1.5, 0.9],
        "growth": growth if stage.grow else {},
    }  # fmt: skip


def write(
    folder: Path,
    seeds: int = 2,
    only: str | tuple[str, ...] = "",
    filters: bool = False,
    epochs: int = EPOCHS,
    arms: Sequence[Arm] | None = None,
) -> Path:
    """Results of all arms of the paper's table, or of those that are given, whose name begins with `only`."""
    folder.mkdir(parents=True, exist_ok=True)
    for arm in (*paper_arms(), *guessed_appendix_b()) if arms is None else arms:
        if not arm.name.startswith(only):
            continue
        arm = replace(arm, stages=tuple(replace(stage, epochs=epochs) for stage in arm.stages))
        curves = {
            str(seed): [curve(arm, place, seed, epochs) for place in range(arm.own, len(arm.stages))] for seed in range(seeds)
        }
        made_by = {
            "command": "made up",
            "data": "CIFAR-10",
            "engine": "none",
            "precision": "ieee",
            "versions": {"torch": "0"},
            "device": "paper",
        }
        content = {"format": FORMAT, "arm": asdict(arm), "seeds": list(range(seeds)), **made_by, "curves": curves}
        (folder / file_name(arm.name)).write_text(json.dumps(content))
    if filters:
        save_file(grown_filters(seeds), folder / FILTERS)
    return folder


def grown_filters(seeds: int) -> dict[str, torch.Tensor]:
    """Filters of real growths; what training does to them is some noise."""
    tensors = {}
    for title, method in (("R2R", "r2r"), ("Net2Net", "net2net"), ("NetMorph", "netmorph")):
        for seed in range(seeds):
            torch.manual_seed(seed)
            model, example = SmallConv(), torch.randn(2, 3, 32, 32)
            tensors[f"VIZ-{title}/{seed}/before"] = model.conv1.weight.detach().half()
            grow_model(model, example, Grow("widen", method, 2), torch.optim.Adam(model.parameters()), seed)
            weight = model.conv1.weight.detach()
            tensors[f"VIZ-{title}/{seed}/after"] = weight.half()
            tensors[f"VIZ-{title}/{seed}/end"] = (weight + 0.05 * torch.randn_like(weight)).half()
    return tensors
