"""Search on CIFAR-10 by growth, and its baselines; each arm and seed writes one result file.

    python -m experiments.search --setting h200 --device cuda --data DATA --minutes 9 --seeds 3   a piece; exit status 3: again
    python -m experiments.search --setting h200 --device cuda --data DATA --arms growth --each 2  cheaper
    python -m experiments.search --setting tiny                                                   digits on the CPU, to try it

Arms: `growth` (trials inherit weights and optimizer state), `fresh` (the same space and trials, but each trial starts over
with new weights), `scratch` (the architecture that `growth` found, with new weights, trained for the FLOPs of its search and
final training). Trials are compared on held-out training images. The best one is then trained on all of them, and tested once.
The setting for one H200 has not been run yet; its epochs and trials are guesses.

The same command goes on where it was stopped, also after SIGTERM or SIGKILL, and on another machine with the folders --work and
--out. Seeds are done one after the other, so that --work holds the models of one seed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from experiments.search.experiment import GOES_ON, Clock, Experiment, OutOfTime
from experiments.search.settings import SETTINGS, Setting, expected, in_words
from experiments.setting.data import Data, DataError, cifar10, digits

RESULTS, WORK = (Path(__file__).parents[1] / name / "search" for name in ("results", "work"))
ARMS = ("growth", "fresh", "scratch")
CHANGED = {
    "trials": "of a search",
    "width": "of the parent",
    "first": "epochs of the parent",
    "each": "epochs of a trial",
    "last": "epochs of the final training",
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "python -m experiments.search", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--setting", choices=tuple(SETTINGS), default="tiny")
    for name, what in CHANGED.items():
        made.add_argument(f"--{name}", type=int, metavar="N", help=f"{what}, instead of the setting's; results get other names")
    made.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS))
    made.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds 0 to N − 1 (1)")
    made.add_argument("--from-seed", type=int, default=0, metavar="K", help="leave out the seeds below K (0)")
    made.add_argument("--device", default="cpu")
    made.add_argument("--data", type=Path, default=Path("data"), help="the folder of CIFAR-10's binary files")
    made.add_argument("--work", type=Path, default=WORK, help="where interrupted arms go on (experiments/work/search)")
    made.add_argument("--out", type=Path, default=RESULTS, help="where result files are written")
    made.add_argument("--minutes", type=float, default=1e6, help="begin no trial, and no epoch of a final training, after that")
    return made


def setting_of(args: argparse.Namespace) -> tuple[str, Setting]:
    """The setting with what is changed in it, and its name."""
    changed = {name: getattr(args, name) for name in CHANGED if getattr(args, name) is not None}
    name = "-".join([args.setting, *(f"{key}{value}" for key, value in changed.items())])
    return name, replace(SETTINGS[args.setting], **changed)


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a result, completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1), encoding="utf-8")
    part.replace(path)


def run_seed(experiment: Experiment, left: dict[str, Path]) -> None:
    """The arms of a seed that are left. left: their result files by name."""
    images, before = experiment.images, experiment.chosen_by
    costs = expected(experiment.setting, experiment.parent_flops, before.per_epoch, images.per_epoch)
    for arm, path in left.items():
        print(f"{arm}, seed {experiment.seed}: expected to cost about {in_words(costs[arm])} on one H200", flush=True)
        found = experiment.run(arm)
        write(path, found)
        experiment.remove(arm)
        seconds = found["search_seconds"] + found["final_seconds"]
        print(
            f"{arm}, seed {experiment.seed}: test error {found['test_error']:.2%}, {found['parameters']:,} parameters, "
            f"{found['flops'] / 1e15:.3g} PFLOP in {seconds / 60:.1f} minutes, {found['flops'] / seconds / 1e12:.3g} TFLOP/s",
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    clock = Clock(args.minutes)
    before = signal.signal(signal.SIGTERM, clock.stop)
    torch.set_num_threads(1 if args.device.startswith("cuda") else torch.get_num_threads())
    name, setting = setting_of(args)
    data: Data | None = None
    try:
        for seed in range(args.from_seed, args.seeds):
            work = args.work / f"{name}-{seed}"
            files = {arm: args.out / f"{name}-{arm}-{seed}.json" for arm in args.arms}
            left = {arm: path for arm, path in files.items() if not path.exists()}
            if left:
                data = data or (digits() if args.setting == "tiny" else cifar10(args.data))
                run_seed(Experiment(setting, seed, args.device, data, work, clock), left)
            if all((args.out / f"{name}-{arm}-{seed}.json").exists() for arm in ARMS):
                shutil.rmtree(work, ignore_errors=True)  # nothing goes on from it
    except OutOfTime:
        print("time is up; the same command goes on")
        return GOES_ON
    except DataError as error:
        raise SystemExit(str(error)) from error
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


if __name__ == "__main__":
    sys.exit(main())
