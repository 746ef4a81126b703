"""The report's parts on the honest comparison, and on the two engines beside each other, as HTML."""

from __future__ import annotations

import json
import math
import re
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from experiments.agreement import apart
from experiments.pages.basics import around, breakable, fold, prose, table
from experiments.pages.cards import cards
from experiments.pays import caveats
from experiments.reading.answers import answers
from experiments.reading.comparison import Comparison
from experiments.reading.own_tuned import other_tables, own_tables
from experiments.reading.result_files import read_all
from experiments.reading.ways import VERBS, Table
from experiments.reading.words import tiny

NOTES = {
    "widen": "ResNetCifar-18(1/8) → 18(1/4).",
    "deepen": "ResNetCifar-10(1/4) → 18(1/4).",
    "both": "ResNetCifar-10(1/8) → 18(1/4), by two growths.",
}


def cell(text: str) -> str:
    return re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", prose(text))


def sheet(made: Table) -> str:
    return table(made.head, [tuple(map(cell, row)) for row in made.rows], made.caption)


def pays(compared: Comparison | None) -> str:
    if compared is None:
        return (
            '<p class="missing">The results of the honest comparison are not beside these: <code>'
            "python -m experiments --set tuning</code>, then <code>sweep</code>, then <code>protocol</code> make them.</p>"
        )
    plots = [(what, plot(what)) for what in VERBS if compared.of("EQ", what)]
    held = "".join(f"<li>{prose(one)}</li>" for one in caveats(compared))
    made = other_tables(compared)
    return (
        f'<div class="cards">{cards(answers(compared))}</div>{"".join(drawn for what, drawn in plots if what != "both")}'
        + "".join(fold("Plot of both, one after the other", drawn) for what, drawn in plots if what == "both")
        + fold("r2r against random padding, and every way tuned for itself", "".join(map(sheet, own_tables(compared))))
        + fold(made[0].caption, sheet(made[0]))
        + fold("Changes at the growth (sweep)", sheet(made[-2]))
        + fold("Further tables, and what tuning chose", "".join(map(sheet, [*made[1:-2], made[-1]])))
        + fold("What to hold against it", f"<ul>{held}</ul>")
    )


def plot(what: str) -> str:
    return (
        f'<figure class="plot" data-group="pays-{what}" id="pays-{what}"><h3>{VERBS[what]}</h3><p class="quiet">{NOTES[what]} '
        'Every point is the end of a whole run, its rate decayed; names below add lines.</p><div class="view"></div>'
        "<noscript><p>The tables below have all values.</p></noscript></figure>"
    )


def engines(folder: Path, results: dict[str, Any]) -> str:
    """The fused engine beside the plain loop: losses step by step, and where whole runs end."""
    path = folder / "agreement.json"
    if not path.exists():
        return ""
    content = json.loads(path.read_text(encoding="utf-8"))
    names = [name for name in content["losses"] if name != "eager"]
    rows = [
        (f"{breakable(arm)}, {escape(name)}", *(tiny(apart(content, name, arm, steps)) for steps in (1, 10, 100)))
        for arm in content["arms"]
        for name in names
    ]
    first = table(
        ("largest difference of losses", "1 step", "10 steps", "100 steps"),
        rows,
        "Against the plain loop, from the same networks",
    )
    plain = [item for name in ("eager", "eager-cpu") if (folder / name).exists() for item in read_all(folder / name).items()]
    ends = []
    for arm, one in sorted(plain, key=lambda item: item[0]):
        cells = []
        for source in (one, results.get(arm)):
            found = [] if source is None else [100 * seed[-1]["accuracy"][-1] for seed in source["curves"].values()]
            sd = float(np.std(found, ddof=1)) if len(found) > 1 else math.nan
            cells.append(
                "–"
                if not found
                else around(float(np.mean(found)), sd, len(found), 1) + f", {len(found)} seed{'s' * (len(found) > 1)}"
            )
        ends.append((breakable(arm), *cells, escape(one["device"])))
    second = (
        table(("arm", "plain loop", "fused engine", "plain loop on"), ends, "Whole runs: final accuracy in per cent")
        if ends
        else ""
    )
    ratios = [apart(content, "fused", arm, 100) / apart(content, "one ulp off", arm, 100) for arm in content["arms"]]
    return (
        "<p>Two runs that differ by rounding diverge after some steps, because Adam amplifies small gradients. “One ulp "
        "off” is a "
        "plain loop whose weights begin one unit in the last place off; it shows how fast that goes. The fused engine adds in "
        f"another order: after a hundred steps it is {min(ratios):.1f} to {max(ratios):.1f} times as far from the plain "
        f"loop as "
        "that one. Products are in float32 unless “tf32” is named."
        f"</p>{first}{second}"
    )
