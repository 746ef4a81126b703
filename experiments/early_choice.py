"""How often does the loss shortly after a growth name the way that is best in the end? docs/results/early-choice.md.

python -m experiments.early_choice [--results FOLDER] [--out PAGE] [--facts JSON]

`outgrow.trial` grows copies of a model in several ways, trains each for some steps, and compares their losses. Runs of the
experiments did the same and went on to the end, so that the choice of a trial can be compared with what was best then. A group
consists of runs that differ in the way of their growth alone: same network before and after it, same moment, same rates. A case
is a group with one seed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from experiments.lm.results import read as read_lm
from experiments.lm.training import EVERY
from experiments.reading.result_files import read_all

RESULTS, PAGE = Path(__file__).parent / "results", Path("docs") / "results" / "early-choice.md"
FACTS = "early_choice.json"
STEPS = 100  # after the growth
WINDOWS = {"at the growth": (0, 1), "steps 1–50": (0, 50), "steps 51–100": (50, 100)}
TRIAL = "steps 51–100"  # what `outgrow.trial` compares with its default of 100 steps
FEWEST = 3  # ways in a group
INTRODUCTION = """\
Made by `python -m experiments.early_choice` from `experiments/results`; all figures are in `early_choice.json` there.
Runs that differ in the way of their growth alone form a group; a group with one seed is a case. The way with the lowest
mean training loss in a window of steps after the growth is *chosen*; the best in the end has the highest accuracy (for
language models, the lowest held-out loss). *Blindly*: chosen at random. *Lost*: by how much the chosen way is worse than
the best, in points of accuracy (for language models, in hundredths of the loss). *Order*: the rank correlation between
low losses and good ends, 1 if they agree, 0 if they have nothing in common."""
TITLES = {"protocol": "from nothing, rates decayed to zero", "sweep": "scale of new weights", "table": "the paper's settings"}


@dataclass(frozen=True)
class Way:
    """A run of a case: losses of the first steps after its growth, and its score at the end (more is better)."""

    losses: tuple[float, ...]
    score: float


@dataclass(frozen=True)
class Group:
    """Runs that differ in the way of their growth alone: by seed, and by the name of the arm."""

    folder: str
    arms: tuple[str, ...]
    cases: tuple[Mapping[str, Way], ...]

    @property
    def name(self) -> str:
        """What the arms' names have in common, and how they differ: EQ-widen-*@8 (copies, net2net, …)."""
        start, end = shared(self.arms), shared([name[::-1] for name in self.arms])[::-1]
        inner = [name[len(start) : len(name) - len(end)] or "–" for name in self.arms]
        return f"{start}*{end} ({', '.join(inner)})"


def shared(names: Sequence[str]) -> str:
    """The longest common beginning of names, up to a separator."""
    length = next((at for at, letters in enumerate(zip(*names, strict=False)) if len(set(letters)) > 1), 0)
    begun = names[0][:length]
    return begun[: max((begun.rfind(sign) for sign in "-@("), default=-1) + 1]


def groups_of(folder: str, results: Mapping[str, Mapping[str, Any]]) -> list[Group]:
    """The groups among results of the experiments with images."""
    found: dict[str, dict[str, Mapping[str, Way]]] = defaultdict(dict)
    for name, content in results.items():
        arm, stages = content["arm"], content["arm"]["stages"]
        grown = [number for number, stage in enumerate(stages) if stage["grow"]]
        if len(grown) != 1 or grown[0] < arm["own"]:
            continue
        place, grow = grown[0] - arm["own"], stages[grown[0]]["grow"]
        ways = {}
        for seed, curves in content["curves"].items():
            if place < len(curves) and len(curves[place]["steps"]) >= STEPS and curves[place].get("growth"):
                ways[seed] = Way(tuple(curves[place]["steps"][:STEPS]), curves[-1]["accuracy"][-1])
                sizes = curves[place]["growth"]["parameters"]
        if not ways:
            continue
        plain = [{key: value for key, value in stage.items() if key != "grow" and value} for stage in stages]
        same = json.dumps([arm["net"], plain, arm["optimizer"], arm["flips"], sizes, grow["what"]])
        found[same][name] = ways
    return [made for made in (group(folder, ways) for ways in found.values()) if made is not None]


def groups_of_lm(folder: str, results: Mapping[str, Mapping[str, Any]]) -> list[Group]:
    """The groups among results of the study of language models, by their first growth."""
    found: dict[str, dict[str, Mapping[str, Way]]] = defaultdict(dict)
    for name, content in results.items():
        arm = content["arm"]
        if not arm["growths"]:
            continue
        sizes = [[share, growth["layers"], growth["widen"]] for share, growth in arm["growths"]]
        settings = [arm.get(name) for name in ("start", "trained", "steps", "rate", "decay", "optimizer")]
        same = json.dumps([*settings, sizes])
        ways = {seed: way for seed, run in content["seeds"].items() if (way := lm_way(run["legs"])) is not None}
        if ways:
            found[same][name] = ways
    return [made for made in (group(folder, ways) for ways in found.values()) if made is not None]


def lm_way(legs: Sequence[Mapping[str, Any]]) -> Way | None:
    """Training losses from the first growth on (each entry is a mean of several steps), and the last held-out loss."""
    first = next((number for number, leg in enumerate(legs) if leg["growth"]), len(legs))
    losses: list[float] = []
    for leg in legs[first:]:
        steps = leg["last"] - leg["first"]
        losses += [loss for at, loss in enumerate(leg["train"]) for _ in range(min(EVERY, steps - at * EVERY))]
    return Way(tuple(losses[:STEPS]), -list(legs[-1]["held_out"].values())[-1]) if len(losses) >= STEPS else None


def group(folder: str, ways: Mapping[str, Mapping[str, Way]]) -> Group | None:
    """A group of the seeds that all of its arms have; None if there are too few arms, or no such seed."""
    seeds = [seed for seed in next(iter(ways.values())) if all(seed in runs for runs in ways.values())]
    if len(ways) < FEWEST or not seeds:
        return None
    cases = tuple({name: runs[seed] for name, runs in ways.items()} for seed in seeds)
    return Group(folder, tuple(ways), cases)


def early_losses(case: Mapping[str, Way], window: str) -> dict[str, float]:
    first, last = WINDOWS[window]
    return {name: mean(way.losses[first:last]) for name, way in case.items()}


def judged(cases: Iterable[Mapping[str, Way]], window: str) -> dict[str, float]:
    """The choice by the loss in a window against the end.

    hits: cases in which the chosen way is the best in the end. chance: what choosing blindly hits on average. lost: the score
    of the best way less that of the chosen one, on average; lost_blindly: less the mean of all ways. order: the mean rank
    correlation between a low loss and a high score, 1 if the orders agree and 0 if they have nothing in common.
    """
    hits = chance = 0.0
    lost, blindly, order = [], [], []
    for case in cases:
        early, scores = early_losses(case, window), {name: way.score for name, way in case.items()}
        best = max(scores.values())
        chosen = scores[min(early, key=lambda name: early[name])]
        hits += chosen == best
        chance += sum(score == best for score in scores.values()) / len(scores)
        lost.append(best - chosen)
        blindly.append(best - mean(scores.values()))
        order.append(rank_correlation([-early[name] for name in case], [scores[name] for name in case]))
    found = {"cases": len(lost), "hits": hits, "chance": chance}
    return found | {"lost": mean(lost), "lost_blindly": mean(blindly), "order": mean(order)}


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's rank correlation, with mean ranks for equal values; 0 where all values are equal."""

    def ranks(values: Sequence[float]) -> list[float]:
        return [sum(x < value for x in values) + (sum(x == value for x in values) - 1) / 2 for value in values]

    first, second = ranks(one), ranks(other)
    middle = (len(first) - 1) / 2
    spread = [sum((rank - middle) ** 2 for rank in each) for each in (first, second)]
    if not all(spread):
        return 0.0
    together = sum((a - middle) * (b - middle) for a, b in zip(first, second, strict=True))
    return float(together / (spread[0] * spread[1]) ** 0.5)


def all_groups(results: Path) -> list[Group]:
    """The groups in all folders of results."""
    found = []
    for folder in TITLES:
        arms = read_all(results / folder)
        # other changes of the sweep are no ways of growth, and repeat its starting point under several names
        found += groups_of(folder, {name: arm for name, arm in arms.items() if folder != "sweep" or "-scale-" in name})
    for folder in sorted(path for path in (results / "lm").glob("*") if path.is_dir()):
        found += groups_of_lm(f"lm/{folder.name}", read_lm(folder))
    return found


def facts(groups: Sequence[Group]) -> dict[str, Any]:
    """All figures, by folder and by group."""
    folders = {folder: [case for one in groups if one.folder == folder for case in one.cases] for folder in by_folder(groups)}
    return {
        "windows": WINDOWS,
        "folders": {folder: {window: judged(cases, window) for window in WINDOWS} for folder, cases in folders.items()},
        "groups": {
            one.name: {"folder": one.folder, **{window: judged(one.cases, window) for window in WINDOWS}} for one in groups
        },
    }


def by_folder(groups: Sequence[Group]) -> list[str]:
    return list(dict.fromkeys(one.folder for one in groups))


def page(found: Mapping[str, Any]) -> str:
    """The figures as a page."""
    lines = [
        "# Does the loss after a growth name the best way?",
        "",
        INTRODUCTION,
        "",
        "| runs | chosen by the loss | the best in the end | blindly | lost by the choice | lost blindly | order |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for folder, windows in found["folders"].items():
        lines += [row(TITLES.get(folder, folder), window, figures) for window, figures in windows.items()]
    header = "| runs | the best in the end | blindly | lost by the choice | lost blindly | order |"
    lines += ["", f"## Group by group, {TRIAL}", "", header, "| --- " * 6 + "|"]
    lines += [row(name, None, figures[TRIAL]) for name, figures in found["groups"].items()]
    return "\n".join([*lines, ""])


def row(name: str, window: str | None, one: Mapping[str, float]) -> str:
    cells = [name, *([] if window is None else [window]), f"{one['hits']:.0f} of {one['cases']:.0f}", f"{one['chance']:.1f}"]
    cells += [f"{100 * one['lost']:.2f}", f"{100 * one['lost_blindly']:.2f}", f"{one['order']:+.2f}".replace("-", "−")]
    return f"| {' | '.join(cells)} |"


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m experiments.early_choice", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=PAGE)
    parser.add_argument("--facts", type=Path, default=RESULTS / FACTS)
    options = parser.parse_args(given)
    found = facts(all_groups(options.results))
    options.facts.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    options.out.write_text(page(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
