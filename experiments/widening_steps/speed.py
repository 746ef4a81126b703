"""How long a step takes at each width: one network alone, and several side by side. Needs no data; results go to speed.json.

    python -m experiments.widening_steps.speed --device cuda                                                one minute or two
    python -m experiments.widening_steps.speed --device cuda --precision bf16 --layout first --widths 4 16  another way
    python -m experiments.widening_steps.speed --setting tiny                                               on the CPU

Seconds of a run depend on what was trained beside it, so that the page computes times of arms from these, without growths and
tests. The last line estimates the training time of all arms.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from experiments.setting.data import Data
from experiments.widening_steps.__main__ import add_computing, computing, made_on, setting_of
from experiments.widening_steps.arms import Arm, Setting, arms
from experiments.widening_steps.images import Images, table_of
from experiments.widening_steps.network import build
from experiments.widening_steps.results import FOLDER, write
from experiments.widening_steps.steps import Computing, Steps, sgd

STEPS = 40  # that are timed, after as many to warm up
IMAGES = {"CIFAR-10": 50_000, "digits": 1_347}


def no_data(setting: Setting) -> Data:
    """Images of zeros, enough for the steps of an epoch of `STEPS` steps."""
    number = STEPS * setting.batch
    images, labels = torch.zeros(number, setting.channels, setting.pixels, setting.pixels), torch.zeros(number).long()
    mean, deviation = torch.zeros(setting.channels), torch.ones(setting.channels)
    return Data(images, labels, images[:1], labels[:1], mean, deviation, "zeros")


def seconds_of(setting: Setting, images: Images, how: Computing, width: int, networks: int) -> float:
    """Seconds of a step of one network, while so many are trained side by side."""
    models = [build(width, setting.channels, setting.blocks, seed).to(how.device) for seed in range(networks)]
    fleet = [Steps(model, sgd(model, setting), images, setting, how, rates=True) for model in models]
    table, rates = table_of(setting, 0, 0, len(images.labels)), torch.zeros(STEPS)
    streams, spent = how.streams(networks), 0.0
    for _ in range(2):
        for one in fleet:
            one.begin(table, rates)
        spent = how.epoch(fleet, streams)
    return spent / STEPS / networks


def hours(found: Sequence[Arm], setting: Setting, seconds: dict[int, float]) -> float:
    """Of the training of these arms, each with one seed."""
    steps = IMAGES[setting.data] // setting.batch
    return sum(epochs * steps * seconds[width] for arm in found for width, epochs in arm.stages) / 3_600


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m experiments.widening_steps.speed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_computing(parser)
    parser.add_argument("--networks", type=int, default=24, help="side by side (24)")
    parser.add_argument("--widths", type=int, nargs="*", help="all widths of the setting; only these are not written")
    parser.add_argument("--epochs", type=int, help="of scratch, for the estimate")
    parser.add_argument("--results", type=Path, default=FOLDER)
    options = parser.parse_args(given)
    setting, how = setting_of(options), computing(options)
    images = Images.of(no_data(setting), setting, how.device)
    widths = range(setting.start, setting.width + 1, setting.step)
    found: dict[str, dict[int, float]] = {"alone": {}, "side_by_side": {}}
    for width in options.widths or widths:
        for name, networks in (("alone", 1), ("side_by_side", options.networks)):
            found[name][width] = seconds_of(setting, images, how, width, networks)
        alone, beside = (1e3 * one[width] for one in found.values())
        print(f"width {width}: {alone:.3f} ms per step alone, {beside:.3f} ms with {options.networks} side by side", flush=True)
    if options.widths:
        return 0
    about = {"networks": options.networks, **made_on(how)}
    write(options.results / options.setting / "speed.json", {**about, "seconds_per_step": found})
    print(f"all arms: {60 * hours(arms(setting), setting, found['side_by_side']):.1f} minutes of training per seed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
