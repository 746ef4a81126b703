"""ResNet-20 widened in several small steps on CIFAR-10, with one rate or a rate per cohort, against scratch.

    python -m experiments.widening_steps --list                                          the arms
    python -m experiments.widening_steps --setting tiny                                  digits on a CPU, to try it out
    python -m experiments.widening_steps --device cuda --data DIR --minutes 9 --seeds 3  one piece; exit status 3: again
    python -m experiments.widening_steps --device cuda --data DIR --arms 'scratch*' 'pairs*'
    python -m experiments.widening_steps.speed --device cuda                             steps a second, and how long all takes
    python -m experiments.widening_steps.page                                            the page, from the results

The same command goes on where it was stopped. Every arm writes one file with all of its seeds.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from experiments.lm.results import facts
from experiments.setting.data import DataError, cifar10, digits
from experiments.widening_steps.arms import SETTINGS, Arm, Setting, arms, relative_flops
from experiments.widening_steps.images import Images
from experiments.widening_steps.results import FOLDER
from experiments.widening_steps.steps import Computing
from experiments.widening_steps.study import Study

WORK = Path(__file__).parents[1] / "work" / "widening-steps"
GOES_ON = 3  # exit status if time is up


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "python -m experiments.widening_steps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_computing(made)
    made.add_argument("--arms", nargs="*", default=["*"], metavar="ARM", help="names or globs (all)")
    made.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds 0 to N − 1 (1)")
    made.add_argument("--epochs", type=int, help="of scratch; those of other arms follow")
    made.add_argument("--data", type=Path, default=Path("data"), help="the folder of CIFAR-10's binary files")
    made.add_argument("--work", type=Path, default=WORK, help="where interrupted runs go on (experiments/work/…)")
    made.add_argument("--results", type=Path, default=FOLDER, help="a folder per setting (experiments/results/widening-steps)")
    made.add_argument("--minutes", type=float, default=float("inf"), help=f"begin no epoch after that; exit status {GOES_ON}")
    made.add_argument("--limit", type=int, default=24, help="networks side by side (24)")
    made.add_argument("--list", action="store_true", help="print the arms and leave")
    return made


def add_computing(made: argparse.ArgumentParser) -> None:
    made.add_argument("--setting", choices=tuple(SETTINGS), default="cifar")
    made.add_argument("--device", default="cpu")
    made.add_argument("--precision", choices=("tf32", "bf16"), default="tf32", help="of products on CUDA (tf32)")
    made.add_argument("--layout", choices=("last", "first"), default="last", help="of channels in memory (last)")
    made.add_argument("--compile", action="store_true", help="steps by torch.compile, about half a minute for each width")


def computing(options: argparse.Namespace) -> Computing:
    """Also prepares the process for it."""
    torch.set_num_threads(1)
    if options.device.startswith("cuda"):
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # queues of the device; networks in one queue wait in turn
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    if options.compile:
        torch._dynamo.config.recompile_limit = 64  # of widths
    return Computing(options.device, options.precision, options.layout, options.compile)


def setting_of(options: argparse.Namespace) -> Setting:
    setting = SETTINGS[options.setting]
    return setting if options.epochs is None else replace(setting, epochs=options.epochs)


def chosen(found: Sequence[Arm], patterns: Sequence[str]) -> list[Arm]:
    """Arms by name or glob, in their own order."""
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(arm.name, pattern) for arm in found):
            raise SystemExit(f"no arm is called {pattern}: --list prints their names")
    return [arm for arm in found if any(fnmatch.fnmatchcase(arm.name, pattern) for pattern in patterns)]


def made_on(how: Computing) -> dict[str, Any]:
    """How networks are trained, for the results."""
    return {"precision": how.products, "layout": how.layout, "compiled": how.compiled, **facts(how.device)}


def command_of(options: argparse.Namespace) -> str:
    """The command that makes these results again, without what they do not depend on."""
    words = ["python", "-m", "experiments.widening_steps", "--setting", options.setting, "--device", options.device]
    words += ["--precision", options.precision, "--layout", options.layout, "--seeds", str(options.seeds)]
    words += ["--compile"] if options.compile else []
    words += [] if options.epochs is None else ["--epochs", str(options.epochs)]
    return shlex.join([*words, *([] if options.arms == ["*"] else ["--arms", *options.arms])])


def main(given: Sequence[str] | None = None) -> int:
    started = time.monotonic()
    options = parser().parse_args(given)
    setting = setting_of(options)
    found = chosen(arms(setting), options.arms)
    if options.list:
        for arm in found:
            stages = ", ".join(f"{width}: {epochs}" for width, epochs in arm.stages)
            print(f"{arm.name:28} {relative_flops(setting, arm.stages) / setting.epochs:4.0%} FLOPs; width: epochs {stages}")
        return 0
    how = computing(options)
    try:
        data = digits() if setting.data == "digits" else cifar10(options.data)
    except DataError as error:
        raise SystemExit(str(error)) from error
    if setting.data != "digits":
        assert data.images.shape[1:] == (setting.channels, setting.pixels, setting.pixels)
    made_by = {"command": command_of(options), **made_on(how)}
    study = Study(
        setting,
        Images.of(data, setting, options.device),
        how,
        options.results / options.setting,
        options.work / options.setting,
        made_by,
        started + 60 * options.minutes,
        options.limit,
    )
    if study.run(found, range(options.seeds)):
        print(f"results of {len(found)} arms are in {study.folder}")
        return 0
    print("time is up; the same command goes on")
    return GOES_ON


if __name__ == "__main__":
    sys.exit(main())
