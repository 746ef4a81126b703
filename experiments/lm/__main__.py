"""The study of language models that are grown in training.

    python -m experiments.lm --list                             the arms
    python -m experiments.lm --setting cpu --seeds 3 main       the main arms, small: twenty minutes of one CPU core
    python -m experiments.lm --setting cpu                      all arms, small
    python -m experiments.lm --setting small --device cuda      12 layers of width 384 on source code
    python -m experiments.lm --setting large --device cuda      16 layers of width 768
    python -m experiments.lm … 'scratch@*' 'depth-two@*'        some of the arms

An interrupted study goes on where it stopped when the same command is given again: finished legs are in --work, finished arms
in --results.
"""

from __future__ import annotations

import argparse
import fnmatch
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.lm.arms import MAIN, SETTINGS, Arm, arms
from experiments.lm.legs import all_legs
from experiments.lm.results import add, facts, has
from experiments.lm.text import shakespeare, source_code
from experiments.lm.training import OutOfTime, Training

RESULTS = Path(__file__).parents[1] / "results" / "lm"
GOES_ON = 3  # exit status of a study that stopped for lack of time


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "python -m experiments.lm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("patterns", nargs="*", metavar="ARM", help="names or globs, or main; without them all arms")
    made.add_argument("--setting", choices=tuple(SETTINGS), default="cpu")
    made.add_argument("--device", default="cpu")
    made.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds 0 to N − 1 (1)")
    made.add_argument("--work", type=Path, default=Path("lm-work"), help="states of legs (lm-work)")
    made.add_argument("--results", type=Path, default=RESULTS, help="a JSON file per arm (experiments/results/lm/SETTING)")
    made.add_argument("--minutes", type=float, help="stop after this time, with exit status 3")
    made.add_argument("--list", action="store_true", help="print the arms and leave")
    return made


def chosen(found: Sequence[Arm], patterns: Sequence[str]) -> list[Arm]:
    """Arms by name or glob; "main" stands for those of `MAIN`."""
    globs = [glob for one in patterns for glob in ([f"{name}@*" for name in MAIN] if one == "main" else [one])]
    taken = [arm for arm in found if not globs or any(fnmatch.fnmatchcase(arm.name, one) for one in globs)]
    if not taken:
        raise SystemExit(f"no arm is called {' or '.join(patterns)}: --list prints their names")
    return taken


def main(given: Sequence[str] | None = None) -> int:
    options = parser().parse_args(given)
    setting = SETTINGS[options.setting]
    wanted = chosen(arms(setting), options.patterns)
    if options.list:
        for arm in wanted:
            print(f"{arm.name:28} {arm.start}, " + "; ".join(f"at {share:.0%} {growth}" for share, growth in arm.growths))
        return 0
    folder = options.results / options.setting if options.results == RESULTS else options.results
    text = (shakespeare() if setting.text == "shakespeare" else source_code()).to(options.device)
    until = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    training = Training(setting, text, options.device, options.work / options.setting, until)
    command = "python -m experiments.lm " + shlex.join(sys.argv[1:] if given is None else list(given))
    made_by = {
        "command": command,
        **facts(options.device),
        "text": {"name": text.name, "bytes": len(text.train), "hash": text.hash},
    }
    legs = all_legs(wanted, range(options.seeds))
    for seed in range(options.seeds):
        for arm in wanted:
            if has(folder, arm, seed):
                continue
            try:
                curves = [training.run(leg) for leg in legs[arm.name, seed]]
            except OutOfTime:
                print("stopped for lack of time; the same command goes on")
                return GOES_ON
            add(folder, arm, seed, curves, setting, made_by)
            print(f"{arm.name}, seed {seed}: held-out loss {list(curves[-1]['held_out'].values())[-1]:.4f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
