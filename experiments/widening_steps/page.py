"""The page on widening in small steps, docs/results/widening-steps.md, from committed results alone; no page without them.

python -m experiments.widening_steps.page                    results of the setting "cifar"
python -m experiments.widening_steps.page --setting tiny --results DIR --out FILE
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from experiments.reading.curves import student
from experiments.widening_steps.arms import SETTINGS, arms
from experiments.widening_steps.results import FOLDER, read
from experiments.widening_steps.speed import IMAGES

PAGE = Path(__file__).parents[2] / "docs" / "results" / "widening-steps.md"
FULL, SHORT, RATES, LONG = "scratch", "scratch-short", "-rates", "-long"
WORDS = ("data", "start", "width", "epochs", "momentum", "decay", "batch", "rate", "pad")  # of the setting
Results = Mapping[str, Mapping[str, Any]]

OPENING = """\
{network} on {data}, as large from the beginning (`scratch`) or widened in training: from {start} to {width} channels in the
first stage in {growths} equal steps, with the other stages in proportion. {epochs} epochs of SGD (momentum {momentum}, weight
decay {decay}, batches of {batch}, a rate of {rate} on a cosine to zero). Images are moved by up to {pad} pixels{mirrored}.
Skips that change the size are convolutions (option B). {seeds}, 95 % intervals by Student’s t, differences seed by seed, in
points of test accuracy. {device}, torch {torch}, products in {precision}.

Grown arms make as many epochs as `scratch` and fewer FLOPs, as in the paper of variance transfer (X. Yuan, P. Savarese,
M. Maire, 2023, *Accelerated training via incrementally growing neural networks using variance transfer and learning rate
adaptation*). `scratch-short` has about their FLOPs, and arms called `-long` have about those of `scratch`. The paper reports
92.62 % for scratch and 92.53 % for its method on CIFAR-10. Rates and rescaling are our reading of the paper, without its code.
"""
NOTES = """\
## The arms

- The function stays as it is at each growth: `pairs` (R2R, the default of outgrow), `net2net` (copies that share their outputs
  in random parts), `netmorph` (readers of zero).
- `random`: drawn values that change the function.
- `gradmax`, `north`: pairs whose values are learned, inside the blocks. Streams, which several layers write, get drawn pairs,
  since these inits are defined for units with one writer. GradMax learns from four batches at each growth, which its FLOPs
  include.
- Left out: zero writers, and with them GradMax as published. A batch norm keeps such units at zero, where a ReLU has no slope:
  they would never learn.
- `-rates`: a rate for each cohort of weights and each layer, times ‖W_k‖ / ‖W_0‖, computed again in each epoch
  (`experiments/widening_steps/cohort_rates.py`).
- `-rescaled`: at each growth, weights of convolutions times √(inputs before / inputs after), with the norms’ statistics.
"""


def paired(results: Results, one: str, other: str) -> str:
    """The difference of two arms in the seeds that both have, in points."""
    ours, theirs = (results[name]["seeds"] for name in (one, other))
    gaps = [100 * (ours[seed]["final_accuracy"] - theirs[seed]["final_accuracy"]) for seed in ours if seed in theirs]
    return shown(gaps, "+") if gaps else ""


def shown(values: Sequence[float], sign: str = "") -> str:
    """A mean with its interval, if there are several values."""
    one = student(values)
    interval = f" [{one.low:{sign}.2f}, {one.high:{sign}.2f}]" if len(values) > 1 else ""
    return f"{one.value:{sign}.2f}{interval}".replace("-", "−")


def flops(results: Results, name: str) -> float:
    return mean(float(one["flops"]) for one in results[name]["seeds"].values())


def seconds(results: Results, name: str, speed: Mapping[str, Any] | None, how: str, steps: int) -> str:
    """Minutes of training, from the time of a step at each width."""
    if speed is None:
        return ""
    per_step = speed["seconds_per_step"][how]
    return f"{sum(epochs * steps * per_step[str(width)] for width, epochs in results[name]['arm']['stages']) / 60:.1f}"


def table(results: Results, speed: Mapping[str, Any] | None, steps: int) -> list[str]:
    """All arms: those of the same FLOPs are compared with each other."""
    head = ["arm", "test accuracy, %", "FLOPs", "to scratch with these FLOPs", "to scratch with these epochs"]
    head += ["minutes alone", f"minutes, {speed['networks']} side by side"] if speed else []
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for name in results:
        accuracies = [100 * one["final_accuracy"] for one in results[name]["seeds"].values()]
        share = f"{flops(results, name) / flops(results, FULL):.0%}"
        to_flops = "" if name in (FULL, SHORT) else paired(results, name, FULL if name.endswith(LONG) else SHORT)
        to_epochs = "" if name == FULL or name.endswith(LONG) else paired(results, name, FULL) if name != SHORT else ""
        cells = [f"`{name}`", shown(accuracies), share, to_flops, to_epochs]
        cells += [seconds(results, name, speed, how, steps) for how in ("alone", "side_by_side")] if speed else []
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def of_rates(results: Results) -> list[str]:
    """What a rate per cohort changes."""
    names = [name for name in results if RATES in name and name.replace(RATES, "") in results]
    if not names:
        return []
    lines = ["| arm | with a rate per cohort, points |", "| --- | --- |"]
    for name in names:
        plain = name.replace(RATES, "")
        lines.append(f"| `{plain}` | {paired(results, name, plain)} |")
    return ["## A rate per cohort", "", *lines, ""]


def of_growths(results: Results) -> list[str]:
    """What growths did to the loss."""
    lines = ["| arm | largest change of the test loss at a growth | seconds per growth |", "| --- | --- | --- |"]
    for name, arm in results.items():
        growths = [growth for one in arm["seeds"].values() for growth in one["growths"]]
        if growths:
            most = max((growth["loss_after"] - growth["loss_before"] for growth in growths), key=abs)
            spent = mean(growth["seconds"] for growth in growths)
            lines.append(f"| `{name}` | {most:+.1e} | {spent:.2f} |".replace("| -", "| −"))
    return ["## At the growths", "", *lines, ""] if len(lines) > 2 else []


def diverged(results: Results) -> list[str]:
    found = [f"`{name}` ({seed})" for name, arm in results.items() for seed, one in arm["seeds"].items() if one["diverged"]]
    return [f"Runs whose loss became infinite, with the accuracy that they had then: {', '.join(found)}.", ""] if found else []


def page(results: Results, speed: Mapping[str, Any] | None) -> str:
    setting = results[FULL]["setting"]
    runs = [one for arm in results.values() for one in arm["seeds"].values()]
    steps, count = IMAGES[setting["data"]] // setting["batch"], len(results[FULL]["seeds"])
    opening = OPENING.format(
        **{key: setting[key] for key in WORDS},
        network=f"ResNet-{6 * setting['blocks'] + 2}",
        growths=(setting["width"] - setting["start"]) // setting["step"],
        mirrored=" and mirrored" if setting["mirror"] else "",
        seeds=f"{count} seeds" if count > 1 else "One seed",
        device=runs[0]["device"],
        torch=runs[0]["versions"]["torch"],
        precision=runs[0]["precision"],
    )
    made_by = (
        f"Made by `python -m experiments.widening_steps.page`. The results: `{runs[0]['command']}`, or with some of the arms."
    )
    parts = ["# Widening in small steps", "", opening, *table(results, speed, steps), "", *diverged(results)]
    return "\n".join([*parts, *of_rates(results), *of_growths(results), NOTES, made_by, ""])


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m experiments.widening_steps.page", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setting", choices=tuple(SETTINGS), default="cifar")
    parser.add_argument("--results", type=Path, default=FOLDER)
    parser.add_argument("--out", type=Path, default=PAGE)
    options = parser.parse_args(given)
    folder = options.results / options.setting
    found = read(folder)
    results = {arm.name: found[arm.name] for arm in arms(SETTINGS[options.setting]) if arm.name in found}
    if not {FULL, SHORT} <= results.keys():
        print(f"{folder} has no results of {FULL} and {SHORT}: run python -m experiments.widening_steps first", file=sys.stderr)
        return 2
    path = folder / "speed.json"
    speed = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    options.out.write_text(page(results, speed), encoding="utf-8")
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
