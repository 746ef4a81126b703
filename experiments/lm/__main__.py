"""The study of language models that are grown in training.

    python -m experiments.lm --list                             the arms
    python -m experiments.lm --setting cpu --seeds 3 main       the main arms, small: twenty minutes of one CPU core
    python -m experiments.lm --setting cpu                      all arms, small
    python -m experiments.lm --setting small --device cuda      12 layers of width 256 on source code
    python -m experiments.lm --setting large --device cuda      16 layers of width 768
    python -m experiments.lm … 'scratch@*' 'depth-two@*'        some of the arms, in this order, each for all seeds

Rates and weight decays are those that `python -m experiments.lm.tuning` has found, if it was run for the setting. An
interrupted study goes on behind its last finished leg when the same command is given again: finished legs are in --work,
finished arms in --results.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections.abc import Sequence

from experiments.lm.arms import MAIN, SETTINGS, Arm, arms
from experiments.lm.study import GOES_ON, Study, add_options, folder_of, study_of
from experiments.lm.tuning import tuned_in


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "python -m experiments.lm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("patterns", nargs="*", metavar="ARM", help="names or globs, or main; without them all arms")
    add_options(made)
    made.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds 0 to N − 1 (1)")
    made.add_argument("--list", action="store_true", help="print the arms and leave")
    return made


def chosen(found: Sequence[Arm], patterns: Sequence[str]) -> list[list[Arm]]:
    """Arms by name or glob, those of each pattern together; "main" stands for those of `MAIN`."""
    groups = []
    for pattern in patterns or ["*"]:
        globs = [f"{name}@*" for name in MAIN] if pattern == "main" else [pattern]
        taken = [arm for arm in found if any(fnmatch.fnmatchcase(arm.name, one) for one in globs)]
        if not taken:
            raise SystemExit(f"no arm is called {pattern}: --list prints their names")
        groups.append(taken)
    return groups


def main(given: Sequence[str] | None = None) -> int:
    options = parser().parse_args(given)
    folder = folder_of(options)
    found = arms(SETTINGS[options.setting], tuned_in(folder))
    groups = chosen(found, options.patterns)
    if options.list:
        for arm in (arm for group in groups for arm in group):
            print(f"{arm.name:28} {arm.start}, " + "; ".join(f"at {share:.0%} {growth}" for share, growth in arm.growths))
        return 0
    study = study_of(options, folder, "python -m experiments.lm", sys.argv[1:] if given is None else given)

    def work(study: Study) -> None:
        for group in groups:
            study.run(group, range(options.seeds), beside=found)

    return 0 if study.finish(work) else GOES_ON


if __name__ == "__main__":
    sys.exit(main())
