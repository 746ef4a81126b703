"""The page on language models, docs/results/growing-language-models.md: one figure, then what every arm saved.

python -m experiments.lm.page              # from the kept results of the largest setting that was run
python -m experiments.lm.page --setting cpu
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from experiments.lm.arms import SETTINGS
from experiments.lm.results import read
from experiments.lm.savings import COSTS, MUON, SCRATCH, Results, Saving, ends, savings
from experiments.pages.chart_svg import Panel, Series, picture
from experiments.reading.curves import student

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results" / "lm"
PAGE = ROOT / "docs" / "results" / "growing-language-models.md"
SETTING_NAMES = ("large", "small", "cpu")
LINES = (
    ("depth-two", "deepened twice", "blue"),
    ("width2-auto", "twice as wide", "green"),
    ("reuse-depth", "reused, grown", "orange"),
)
STAY = ("stay-half", "stay-quarter")
RIVALS = ((STAY, "never grown: half, quarter", "grey"), (("reuse-on-shallow",), "reused, not grown", "orange"))  # dashed
COLUMNS = {"flops": "fewer FLOPs than scratch at that loss", "seconds": "less time"}
UNITS = {1e3: "kFLOPs", 1e6: "MFLOPs", 1e9: "GFLOPs", 1e12: "TFLOPs", 1e15: "PFLOPs", 1e18: "EFLOPs"}
WARNING = """\
**These are results of the small setting for a CPU: a model of 8 layers and a width of 48, a few hundred steps on Shakespeare’s
plays. No general claim follows from them, and nothing about models that anyone would use.** The peak rate
is the best of 0.003, 0.006, 0.01, 0.015 and 0.025 for scratch and for `depth-two`, with one other seed. Times are not compared,
since the arms ran at several times beside other work. The settings for a GPU have not been run yet.
"""
OPENING = """\
A byte-level GPT of {size} on {text}, one peak rate, and a linear decay to zero over the last fifth of every run. Scratch is the
large model from the beginning, at {lengths} lengths; “fewer FLOPs” compares with scratch at the same loss, interpolated between
these. {seeds} seeds, 95 % intervals by Student’s t. Made by `python -m experiments.lm.page` from
`experiments/results/lm/{setting}` ({device}, torch {torch}).
"""
REUSED = "Its own training is not counted. `reuse-on` is the small model, trained on as it is."
ARMS = """\
`python -m experiments.lm --list` prints every arm with its growths. `depth-two`: a quarter of the layers at first, half of them
from 40 % of the steps on, all from 70 %; new blocks are copies that fade in. The words behind it name what is different.
`depth-two-copy` (plain stacking) and `depth-two-random` change the function at a growth; all others keep it. `stay-half` and
`stay-quarter` have that part of the layers from the beginning to the end, for about the FLOPs of `depth-two`.
"""


def points(results: Results, *arms: str) -> list[tuple[float, float, float]]:
    """FLOPs, loss and half of its interval of arms at their lengths, means over seeds, the cheapest first."""
    found = []
    for name in results:
        if name.partition("@")[0] in arms:
            all_ends = list(ends(results, name).values())
            losses = [end.loss for end in all_ends]
            estimate = student(losses) if len(losses) > 1 else None
            half = 0.0 if estimate is None else (estimate.high - estimate.low) / 2
            found.append((mean(end.flops for end in all_ends), mean(losses), half))
    return sorted(found)


def figure(results: Results) -> str:
    """Loss over FLOPs: scratch, and what is grown at several lengths."""
    lines = [(SCRATCH, "from scratch", "black"), *LINES]
    series = []
    for arm, label, colour in lines:
        found = points(results, arm)
        if len(found) > 1:
            x, y, spread = zip(*found, strict=True)
            series.append(Series(label, colour, x, y, spread, width=2.6 if arm == SCRATCH else 2.0))
    for arms, label, colour in RIVALS:
        if len(found := points(results, *arms)) > 1:
            x, y, spread = zip(*found, strict=True)
            series.append(Series(label, colour, x, y, spread, dash="5 4"))
    every = [value + sign * more for one in series for value, more in zip(one.y, one.spread, strict=True) for sign in (-1, 1)]
    low, high = math.floor(10 * min(every)) / 10, math.ceil(10 * max(every)) / 10
    costs = [value for one in series for value in one.x]
    unit = 1000.0 ** math.floor(math.log(min(costs), 1000))
    series = [replace(one, x=[value / unit for value in one.x]) for one in series]
    first, last = (math.floor(min(costs) / unit), math.ceil(max(costs) / unit))
    x_ticks = [first, round((first * last) ** 0.5), last]
    across = f"{UNITS[unit]} of the whole run"
    y_ticks = [low, round((low + high) / 2, 2), high]
    panel = Panel("Held-out loss by compute", across, "loss", series, x_ticks, y_ticks, low, high, log="x")
    return picture("Held-out loss of grown language models and of one trained from scratch", [panel], columns=1)


def table(found: Sequence[Saving], axes: Sequence[str]) -> list[str]:
    lines = ["| arm | FLOPs | loss | " + " | ".join(COLUMNS[axis] for axis in axes) + " |", "| --- " * (3 + len(axes)) + "|"]
    ordered = sorted(found, key=lambda one: -(one.mean("flops") or -9.0))
    for one in ordered:
        shares = " | ".join(_share(one, axis) for axis in axes)
        lines.append(f"| {one.arm} | {one.flops:.3g} | {_loss(list(one.losses.values()))} | {shares} |")
    return lines


def _share(one: Saving, axis: str) -> str:
    value, estimate = one.mean(axis), one.estimate(axis)
    if value is None:
        return "outside of scratch’s range"
    interval = "" if estimate is None else f" [{estimate.low:+.0%}, {estimate.high:+.0%}]"
    return f"{value:+.0%}{interval}".replace("-", "−")


def unchanging(results: Results) -> list[str]:
    """A sentence on small models that never grow, at about the FLOPs of `depth-two`; nothing if they were not run."""
    middle = next((name for name in results if name.startswith("depth-two@") and f"depth-two-pairs{name[9:]}" in results), None)
    stay = [name for name in results if name.partition("@")[0] in STAY]
    if middle is None or not stay:
        return []
    listed = ", ".join(f"`{name}` {_mean(results, name)}" for name in stay)
    what = "A model that stays small is the rival of every growth. Losses at about the same FLOPs:"
    lowest = {name: mean(end.loss for end in ends(results, name).values()) for name in (*stay, middle)}
    best = min(lowest, key=lambda name: lowest[name])
    return [f"{what} {listed}, `{middle}` {_mean(results, middle)}. The lowest is that of `{best}`.", ""]


def _mean(results: Results, name: str) -> str:
    found = list(ends(results, name).values())
    return f"{mean(end.loss for end in found):.3f} ({mean(end.flops for end in found):.3g} FLOPs)"


def section(title: str, text: str, found: Sequence[Saving], axes: Sequence[str]) -> list[str]:
    """A table with a title; nothing if no such arm was run."""
    return [f"## {title}", "", text, "", *table(found, axes), ""] if found else []


def scratch(results: Results) -> list[str]:
    """The lengths of scratch, with their losses."""
    lines = ["| arm | FLOPs | loss |", "| --- | --- | --- |"]
    names = sorted((name for name in results if name.startswith(f"{SCRATCH}@")), key=lambda name: int(name.partition("@")[2]))
    for name in names:
        all_ends = list(ends(results, name).values())
        lines.append(f"| {name} | {mean(end.flops for end in all_ends):.3g} | {_loss([end.loss for end in all_ends])} |")
    return lines


def _loss(losses: Sequence[float]) -> str:
    """The mean with its interval."""
    estimate = student(list(losses)) if len(losses) > 1 else None
    return f"{mean(losses):.3f}" + ("" if estimate is None else f" [{estimate.low:.3f}, {estimate.high:.3f}]")


def page(results: Results, setting: str, picture_file: str) -> str:
    first: Mapping[str, Any] = next(iter(results.values()))
    run = next(iter(first["seeds"].values()))
    found, axes = savings(results), COSTS[:1] if setting == "cpu" else COSTS
    opening = OPENING.format(
        size=SETTINGS[setting].large,
        text=run["text"]["name"],
        lengths=len(points(results, SCRATCH)),
        seeds=len(first["seeds"]),
        setting=setting,
        device=run["device"],
        torch=run["versions"]["torch"],
    )
    parts = [
        "# Language models that grow in training",
        "",
        opening,
        *([WARNING] if setting == "cpu" else []),
        f"![Held-out loss by compute]({picture_file})",
        "",
        "## From nothing",
        "",
        *table([one for one in found if not one.arm.startswith(("reuse-", MUON))], axes),
        "",
        *unchanging(results),
        *section("A small model is there", REUSED, [one for one in found if one.arm.startswith("reuse-")], axes),
        *section("Muon", "Against scratch with Muon.", [one for one in found if one.arm.startswith(MUON)], axes),
        "## Scratch",
        "",
        *scratch(results),
        "",
        "## Arms",
        "",
        ARMS,
    ]
    return "\n".join(parts)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m experiments.lm.page", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setting", choices=SETTING_NAMES)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=PAGE)
    options = parser.parse_args(given)
    there = [name for name in SETTING_NAMES if len(list((options.results / name).glob("scratch@*.json"))) > 1]
    setting = options.setting or next(iter(there), None)
    if setting not in there:
        print(
            f"{options.results} has no results of {setting or 'any setting'}: run python -m experiments.lm first",
            file=sys.stderr,
        )
        return 2
    results = read(options.results / setting)
    options.out.write_text(page(results, setting, options.out.with_suffix(".svg").name), encoding="utf-8")
    options.out.with_suffix(".svg").write_text(figure(results), encoding="utf-8")
    print(f"{options.out} and {options.out.with_suffix('.svg').name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
