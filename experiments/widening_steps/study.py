"""All runs, as many side by side as there is room for, until the time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.widening_steps import results
from experiments.widening_steps.arms import Arm, Setting
from experiments.widening_steps.images import Images
from experiments.widening_steps.runs import Run
from experiments.widening_steps.steps import Computing


@dataclass
class Study:
    """folder: of results; work: of runs that are not at their end. until: of `time.monotonic`. limit: runs side by side."""

    setting: Setting
    images: Images
    how: Computing
    folder: Path
    work: Path
    made_by: Mapping[str, Any]
    until: float = float("inf")
    limit: int = 24
    log: Callable[[str], None] = print

    def run(self, arms: Sequence[Arm], seeds: Sequence[int]) -> bool:
        """Train all that has no result yet; whether all is done."""
        self.work.mkdir(parents=True, exist_ok=True)
        there = {arm: results.known(self.folder, arm, self.setting) for arm in arms}
        left = [
            Run(arm, seed, self.setting, self.how, self.work) for arm in arms for seed in seeds if str(seed) not in there[arm]
        ]
        streams = self.how.streams(self.limit)
        while left:
            fleet = left[: self.limit]
            if time.monotonic() > self.until:
                for run in fleet:
                    run.save()
                return False
            self.epoch(fleet, streams)
            for run in fleet:
                if run.ended:
                    self.write(run)
                    left.remove(run)
        return True

    def epoch(self, fleet: Sequence[Run], streams: Sequence[Any]) -> None:
        """One epoch of each of these networks."""
        for run in fleet:
            run.board(self.images)
        seconds = self.how.epoch([run.steps for run in fleet if run.steps is not None], streams)
        for run in fleet:
            run.close(seconds / len(fleet))
        first = fleet[0]
        self.log(
            f"{len(fleet)} networks, {seconds:.1f} s; {first.arm.name}, seed {first.seed}: epoch {first.epoch} of "
            f"{first.arm.epochs}, {100 * first.curve.accuracy[-1]:.2f} %"
        )

    def write(self, run: Run) -> None:
        results.add(self.folder, run.arm, self.setting, run.seed, {**self.made_by, **run.result()})
        self.log(f"{run.arm.name}, seed {run.seed}: {100 * run.curve.accuracy[-1]:.2f} %, {run.curve.flops:.3g} FLOPs")
        run.leave()
