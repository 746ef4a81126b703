"""The peak rate and the weight decay of each kind of runs: from scratch, those that never grow, and those that grow.

    python -m experiments.lm.tuning --setting small --device cuda

Each kind is trained at three rates, then with other weight decays at the best of these, with a seed that the study does not
use. Results go to the folder "tuning" beside those of the setting, where the study reads them. An interrupted command goes on
where it stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.lm.arms import KINDS, Arm, Setting, Tuned, arms
from experiments.lm.results import read
from experiments.lm.savings import ends
from experiments.lm.study import GOES_ON, Study, add_options, folder_of, study_of

TUNED_BY = {"scratch": "scratch", "stay": "stay-half", "grown": "depth-two-copied"}
FACTORS = (0.5, 1.0, 2.0)  # of the setting's rate
DECAYS = (0.03, 0.3)  # beside the usual one
SEED = 7  # none of the study's
Results = Mapping[str, Mapping[str, Any]]


def tried(setting: Setting, kind: str, tuned: Sequence[Tuned]) -> list[Arm]:
    """The arms by which a kind is tuned: as many steps as the shortest budget, or as many FLOPs for what never grows."""
    found = [arm for arm in arms(setting) if arm.name.partition("@")[0] == TUNED_BY[kind]]
    steps = round(setting.budgets[0] * (1.1 if kind == "stay" else 1))
    return [replace(found[0].at(steps), name=name_of(kind, one), rate=one.rate, decay=one.decay) for one in tuned]


def name_of(kind: str, tuned: Tuned) -> str:
    return f"{kind}-{tuned.rate:g}-{tuned.decay:g}"


def best(results: Results, kind: str) -> Tuned | None:
    """The lowest loss of a kind; None if nothing was tried."""
    losses = {
        Tuned(content["arm"]["rate"], content["arm"]["decay"]): ends(results, name)[SEED].loss
        for name, content in results.items()
        if name.startswith(f"{kind}-")
    }
    return min(losses, key=lambda one: losses[one]) if losses else None


def tuned_in(folder: Path) -> dict[str, Tuned]:
    """What was best for each kind, in the results of a setting; nothing where it was not tuned."""
    results = read(folder / "tuning")
    return {kind: one for kind in KINDS if (one := best(results, kind)) is not None}


def tune(study: Study) -> None:
    """Try rates, then weight decays."""
    for kind in KINDS:
        study.run(tried(study.setting, kind, [Tuned(study.setting.rate * factor) for factor in FACTORS]), [SEED])
        found = best(read(study.folder), kind)
        assert found is not None
        study.run(tried(study.setting, kind, [Tuned(found.rate, decay) for decay in DECAYS]), [SEED])


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m experiments.lm.tuning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    options = parser.parse_args(given)
    folder = folder_of(options) / "tuning"
    study = study_of(options, folder, "python -m experiments.lm.tuning", sys.argv[1:] if given is None else given)
    if not study.finish(tune):
        return GOES_ON
    for kind, one in tuned_in(folder.parent).items():
        print(f"{kind}: rate {one.rate:g}, weight decay {one.decay:g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
