"""Does growing pay? The honest comparison as a page, docs/results/does-it-pay.md: answers, caveats, and tables.

python -m experiments.pays [--results FOLDER] [--out PAGE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.reading.answers import answers
from experiments.reading.comparison import EPOCH, Comparison, at_the_edge, read
from experiments.reading.curves import Estimate
from experiments.reading.findings import Finding, Strip
from experiments.reading.own_tuned import OWN, SHARED, at_the_ends, other_tables, own_of, own_tables
from experiments.reading.result_files import ResultsError, unusable
from experiments.reading.ways import VERBS, Table
from experiments.reading.words import signed
from experiments.setting.own_tuning import BRIEF, LEFT, NARROWED_AT, REUSED_BRIEFLY, RIDGE, SEEDS
from experiments.setting.protocol import (
    BIG,
    DECAYS,
    FADE,
    OWNED,
    RATES,
    SHARE,
    SMALL,
    SWEPT_AT,
    TEACHER,
    TUNED_UP_TO,
    cost,
    epochs,
)
from experiments.training.train_segments import BATCH
from experiments.training.trainee import rate_at

RESULTS, PAGE = Path(__file__).parent / "results", Path("docs") / "results" / "does-it-pay.md"


def caveats(compared: Comparison) -> list[str]:
    """What to hold against these numbers."""
    seeds, tuned_with = len(compared.scratch.seeds), " to ".join(map(str, dict.fromkeys(compared.tuned_with)))
    teachers = ", ".join(f"{TEACHER * cost(SMALL[what]) / cost(BIG):.1f} ({VERBS[what].lower()})" for what in SMALL)
    edges = {setting: "; ".join(at_the_edge(compared.tuned, setting)) or "none" for setting in ("rate", "decay")}
    moments = ", ".join(
        f"{100 * done:.0f} % of the steps, at {100 * rate:.0f} % of the peak rate ({VERBS[what].lower()})"
        for what, (done, rate) in ((what, when(what)) for what in SMALL)
    )
    nets = {"big": BIG} | {f"small ({VERBS[what].lower()})": SMALL[what] for what in SMALL}
    steps = ", ".join(f"{name} {epochs(net, 2) * EPOCH:,.0f}" for name, net in nets.items())
    return [
        *compared.remarks,
        f"{seeds} seeds. What is said of the best way is corrected for the number of ways, all else for no number of "
        "comparisons. Intervals are over seeds: neither the choice of test images nor that of settings is in them. Seeds are "
        "paired, but scratch shares neither first weights nor later batches with the grown: pairing helps little there.",
        f"Tuning: {len(RATES['EQ'])} rates × {len(DECAYS)} weight decays for each kind of run at each budget up to "
        f"{TUNED_UP_TO}, {tuned_with} seeds, on held-out images, often decided by a few tenths of a point; longer budgets take "
        f"over what was best at {TUNED_UP_TO}. Grown runs were tuned with r2r, growing after a quarter of the budget (both "
        "ways: deeper first); other methods and moments took that over, so that ways with something to recover (random, faded "
        f"in over {FADE} steps) may do better than here, above all under reuse at 1 and 2. The best rate lies at an end of the "
        f"grid for {edges['rate']}; the best weight decay for {edges['decay']}.",
        *tuned_apart(compared),
        f"Shares are of FLOPs, the cosine goes over steps: a growth after {100 * SHARE:.0f} % of the budget is after {moments}."
        " The big network has the highest rates of the schedule only from scratch.",
        f"All batches have {BATCH} images, so that at equal FLOPs small networks make more steps: at budget 2 {steps}.",
        f"The small network that is reused had {TEACHER} epochs (rate {OWNED.rate:g}, weight decay {OWNED.decay:g}), which "
        f"cost as much as so many of the big one: {teachers}.",
        f"The sweep is at budget {SWEPT_AT['EQ']} from nothing and {SWEPT_AT['RE']} under reuse, with r2r. Its unchanged runs "
        "are those that tuning chose, on the same held-out images, and some of its changes are other points of that grid.",
        f"All of it was trained by {compared.commands} commands.",
        "Small networks of one family, on images of 32 × 32 pixels.",
    ]


def tuned_apart(compared: Comparison) -> list[str]:
    """How the ways were tuned that are tuned for themselves, if they were."""
    own = own_of(compared)
    if own is None:
        return []
    pairs = ["; ".join(f"{rate:g}, {decay:g}" for rate, decay in found) for found in (RIDGE, REUSED_BRIEFLY)]
    return [
        f"In the tables with “{SHARED}”, ways other than r2r and other moments of the growth have the settings of r2r after a "
        f"quarter of the budget, and beyond budget {TUNED_UP_TO} every run has what was best at {TUNED_UP_TO}.",
        f"In the tables with “{OWN}”, each line was tuned at each of its budgets with the same {len(RIDGE)} pairs of rate and "
        f"weight decay ({pairs[0]}; under reuse up to budget {BRIEF}: {pairs[1]}); beyond {NARROWED_AT} with the {LEFT} "
        f"of them that were best at {NARROWED_AT}, or the last {LEFT} where that budget is not compared. Seeds by budget: "
        f"{', '.join(f'{seeds} at {budget}' for budget, seeds in SEEDS.items())}. "
        f"The best rate is the lowest or highest of these for {at_the_ends(own)}. In the answers above and in the picture, "
        f"r2r, scratch and the small networks have what was best in the full grid up to budget {TUNED_UP_TO}.",
    ]


def when(what: str) -> tuple[float, float]:
    """The share of the steps at which a network grows that gets its usual share of the budget, and that of the peak rate."""
    small = epochs(SMALL[what], SHARE)
    done = small / (small + 1 - SHARE)
    return done, rate_at(round(10_000 * done), 10_000, 1.0)


def all_tables(compared: Comparison) -> list[Table]:
    """Of every way tuned for itself first, where those runs were made."""
    own, others = own_tables(compared), other_tables(compared)
    return [*own, *others] if own_of(compared) else [*others, *own]


def markdown(table: Table) -> str:
    lines = [
        f"### {table.caption}",
        "",
        "| " + " | ".join(table.head) + " |",
        "| " + " | ".join("---" for _ in table.head) + " |",
    ]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in table.rows), ""])


def by_budget(strips: Sequence[Strip]) -> Table:
    """The differences behind the findings: ▲ clearly above zero, ▼ clearly below."""
    budgets = sorted({budget for one in strips for budget in one.cells}, key=float)

    def cell(one: Estimate | None) -> str:
        sign = "" if one is None or not one.clear else "▲ " if one.value > 0 else "▼ "
        return "" if one is None else f"{sign}{signed(one.value)}"

    rows = tuple((one.name, *(cell(one.cells.get(budget)) for budget in budgets)) for one in strips)
    return Table("Points of accuracy by budget", ("difference", *budgets), rows)


def bullet(one: Finding) -> str:
    """The title of a finding, and its text: one line beside it, several as a list below."""
    lines = one.text.split("\n") if one.text else []
    below = "".join(f"\n    - {line}" for line in lines) if len(lines) > 1 else "".join(f" {line}" for line in lines)
    return f"- **{one.title}.**{below}"


def page(compared: Comparison) -> str:
    made = next(iter(compared.results.values()))
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    found = answers(compared)
    said = "\n".join(bullet(one) for one in found)
    strips = [strip for one in found for strip in (*one.strips, *one.more)]
    held = "\n".join(f"- {one}" for one in caveats(compared))
    return f"""# Does growing pay? All tables

Made by `python -m experiments.pays` from `experiments/results`, which `python -m experiments --set
tuning`, then `sweep`, then `protocol` made on one {made["device"]} ({versions}). The protocol is described in
`experiments/setting/protocol.py`: CIFAR-10, ResNetCifar-18(1/4), which is reached by widening 18(1/8) by
two, by deepening 10(1/4), or from 10(1/8) by both; AdamW, a cosine down to zero in every run, each kind of run tuned on
held-out images, paired seeds. A budget is so many epochs of the big network, in FLOPs. Two accounts: *from nothing* counts the
small network's training; under *reuse* a trained small network is there already.

![Accuracy by budget, widening and deepening, in both accounts](does-it-pay.svg)

{said}

{markdown(by_budget(strips))}
What to hold against it:

{held}

In brackets behind an accuracy is the difference from scratch at the same budget, in points; bold where its 95 % interval over
paired seeds (Student's t) leaves zero out. What an accuracy costs is a mean over seeds where all reach it, with a bootstrap
interval of what that saves, which with five seeds is narrower than it should be; else a median. “≤” where the smallest budget
was enough. Intervals behind differences from random padding, and where every way is tuned for itself, are of the bootstrap too.

{chr(10).join(markdown(table) for table in all_tables(compared))}"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.pays", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="a folder with protocol, sweep and tuning (the kept ones)"
    )
    parser.add_argument("--out", type=Path, default=PAGE, help=f"the page to write, its picture beside it (default: {PAGE})")
    options = parser.parse_args(arguments)
    try:
        write(options.results, options.out)
    except ResultsError as error:
        raise SystemExit(str(error)) from error
    except OSError as error:
        raise SystemExit(unusable(error)) from error
    return 0


def write(results: Path, out: Path) -> None:
    """The page, and its picture beside it."""
    from experiments.pages.budgets import draw_page

    compared = read(results)
    out.parent.mkdir(parents=True, exist_ok=True)
    draw_page(compared, out.with_suffix(".svg"))
    out.write_text(page(compared), encoding="utf-8")
    print(f"{out} is written")


if __name__ == "__main__":
    sys.exit(main())
