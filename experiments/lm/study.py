"""A study: arms are trained with seeds, leg by leg, and their results are written; the command line of that."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.lm.arms import SETTINGS, Arm, Setting
from experiments.lm.legs import all_legs
from experiments.lm.results import add, facts, has
from experiments.lm.text import shakespeare, source_code
from experiments.lm.training import OutOfTime, Training

RESULTS = Path(__file__).parents[1] / "results" / "lm"
GOES_ON = 3  # exit status of a study that stopped for lack of time


@dataclass(frozen=True)
class Study:
    """Where arms of a setting are trained, and where their results go."""

    setting: Setting
    training: Training
    folder: Path
    made_by: Mapping[str, Any]

    def run(self, wanted: Sequence[Arm], seeds: Iterable[int], beside: Sequence[Arm] = ()) -> None:
        """Train arms that have no results yet. Legs are cut where any arm of `beside` leaves them, too."""
        seeds = list(seeds)
        legs = all_legs([*wanted, *(arm for arm in beside if arm not in wanted)], seeds)
        for seed in seeds:
            for arm in wanted:
                if has(self.folder, arm, seed):
                    continue
                curves = [self.training.run(leg) for leg in legs[arm.name, seed]]
                add(self.folder, arm, seed, curves, self.setting, self.made_by)
                print(f"{arm.name}, seed {seed}: held-out loss {list(curves[-1]['held_out'].values())[-1]:.4f}", flush=True)

    def finish(self, work: Callable[[Study], None]) -> bool:
        """Whether some work was done in time."""
        try:
            work(self)
        except OutOfTime:
            if self.training.finished:
                print("stopped for lack of time; the same command goes on")
            else:
                print("stopped for lack of time within the first leg, which begins again next time: give more --minutes")
            return False
        return True


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--setting", choices=tuple(SETTINGS), default="cpu")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", type=Path, default=Path("lm-work"), help="states of legs (lm-work)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="a folder per setting (experiments/results/lm)")
    parser.add_argument("--minutes", type=float, help=f"stop after this time, with exit status {GOES_ON}")
    parser.add_argument("--eager", action="store_true", help="on a GPU too: do not compile blocks")
    parser.add_argument("--no-replays", action="store_true", help="on a GPU too: launch each step anew, not as a graph")


def folder_of(options: argparse.Namespace) -> Path:
    """Of the results of the setting."""
    folder: Path = options.results / options.setting
    return folder


def study_of(options: argparse.Namespace, folder: Path, command: str, given: Sequence[str]) -> Study:
    setting = SETTINGS[options.setting]
    text = (shakespeare() if setting.text == "shakespeare" else source_code()).to(options.device)
    until = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    backend = "inductor" if options.device.startswith("cuda") and not options.eager else None
    replays = options.device.startswith("cuda") and not options.no_replays
    training = Training(setting, text, options.device, options.work / options.setting, until, backend, replays)
    about = {"name": text.name, "bytes": len(text.train), "hash": text.hash}
    made_by = {"command": f"{command} {shlex.join(given)}", **facts(options.device), "compiled": backend, "text": about}
    return Study(setting, training, folder, made_by)
