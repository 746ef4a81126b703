"""Findings as rows that unfold, with ▲▼ strips over budgets; and the table of the paper's claims."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from experiments.pages.basics import difference, prose, table, tight
from experiments.reading.against_paper import Claim
from experiments.reading.curves import Estimate
from experiments.reading.findings import Finding, Strip
from experiments.reading.tables import Numbers, image_error
from experiments.reading.words import interval, signed

SIGNS = {1: ("up", "▲"), -1: ("down", "▼"), 0: ("flat", "·")}


def direction(one: Estimate) -> int:
    return 0 if not one.clear else 1 if one.value > 0 else -1


def strip(one: Strip) -> str:
    """A row of arrows, one per budget, with the value at a touch."""
    cells = []
    for budget, found in one.cells.items():
        kind, sign = SIGNS[direction(found)]
        value = f"{budget} epochs: {signed(found.value)} points {interval(found)}"
        cells.append(f'<b class="{kind}" title="{escape(value)}">{sign}<small>{escape(budget)}</small></b>')
    said = "; ".join(f"{budget}: {signed(found.value)}" for budget, found in one.cells.items())
    name = f"<i>{escape(one.short or one.name)}</i>{''.join(cells)}"
    return f'<span class="strip" role="img" aria-label="{escape(one.name)}, {escape(said)}">{name}</span>'


def strip_table(strips: Sequence[Strip]) -> str:
    """The values behind the arrows."""
    budgets = list(dict.fromkeys(budget for one in strips for budget in one.cells))
    rows = [(prose(one.name), *(difference(one.cells.get(budget)) for budget in budgets)) for one in strips]
    return table(("points, at a budget of", *budgets), rows, "Differences seed by seed, with 95 % intervals (Student’s t)")


def card(one: Finding) -> str:
    number, unit = one.figure.split("|")
    strips = "".join(map(strip, one.strips))
    lines = one.text.split("\n") if one.text else []
    inside = f"<p>{prose(lines[0])}</p>" if len(lines) == 1 else "".join(f"<li>{prose(line)}</li>" for line in lines)
    inside = f"<ul>{inside}</ul>" if len(lines) > 1 else inside
    inside += strip_table((*one.strips, *one.more)) if one.strips else ""
    return (
        f'<details class="card {one.tone}"><summary><span class="figure">{prose(number)}<small>{prose(unit)}</small></span>'
        f'<span class="title">{prose(one.title)}</span><span class="strips">{strips}</span></summary>{inside}</details>'
    )


def cards(found: Sequence[Finding]) -> str:
    return "".join(map(card, found))


def claim_table(found: Sequence[Claim]) -> str:
    """The paper's claims with verdicts; none are given for a run on a part of the images."""
    if not found:
        return "<p>A quick run says nothing about the paper's numbers: fewer images, fewer epochs.</p>"
    counts = {kind: sum(one.verdict == kind for one in found) for kind in dict.fromkeys(one.verdict for one in found)}
    head = "".join(f"<th scope=col>{name}</th>" for name in ("the paper", "here", "verdict"))
    rows = "".join(map(claim_row, found))
    words = {"agrees": "agree", "differs": "differ"}
    total = ", ".join(f"{count} {words.get(kind, kind) if count > 1 else kind}" for kind, count in counts.items())
    return (
        f'<p class="quiet">{len(found)} claims: {total}. A difference counts where its 95&nbsp;% interval excludes zero.</p>'
        f'<table class="claims"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    )


def claim_row(one: Claim) -> str:
    why = f"<details><summary>why</summary><p>{prose(one.why)}</p></details>" if one.why else ""
    badge = f'<span class="badge {one.verdict.split()[0]}">{one.verdict}</span>'
    return (
        f'<tr><th scope="row"><small>{escape(one.place)}</small>{prose(one.paper)}</th><td>{prose(one.ours)}{why}</td>'
        f"<td>{badge}</td></tr>"
    )


def scores(numbers: Numbers) -> str:
    """The paper's table 2 beside ours, each with its own error."""
    rows, held = [], any(row.validation is not None for row in numbers.final)
    for row in numbers.final:
        if row.paper is None or row.difference is None:
            continue
        cells = [
            tight(f"{row.paper:.1f} ± {image_error(row.paper, 1_000):.1f}"),
            tight(f"{row.mean:.1f} ± {row.sd:.1f}"),
            tight(f"{row.late:.1f} ± {row.late_sd:.1f}"),
            *(["–" if row.validation is None else f"{row.validation:.1f}"] if held else []),
            difference(row.difference),
            "differs" if row.difference.clear else "agrees",
        ]
        rows.append((escape(row.arm).replace("(", "<wbr>("), *cells))
    head = (
        "arm",
        "paper ± s.e.",
        "ours, last epoch",
        "ours, last ten",
        *(["ours, validation"] if held else []),
        "ours − paper",
        "",
    )
    caption = "Table 2: the paper’s one run on 1,000 images, and our seeds on the 10,000 test images (± standard deviation)"
    return table(head, rows, caption) if rows else ""
