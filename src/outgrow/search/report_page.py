"""The report of a search as one HTML page, for light and dark schemes and narrow screens, that loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from outgrow.search.drawing import DARK, FONT, LIGHT, short
from outgrow.search.front_svg import draw_fronts
from outgrow.search.objectives import Objectives
from outgrow.search.records import COMPLETE, Record, complete, pareto_front
from outgrow.search.tree_svg import draw_tree
from outgrow.text.plurals import counted
from outgrow.text.tables import rounded

CSS = f"""
:root {{ color-scheme: light dark; {"".join(f"--{name}: {hue}; " for name, hue in LIGHT.items())}}}
@media (prefers-color-scheme: dark) {{ :root {{ {"".join(f"--{name}: {hue}; " for name, hue in DARK.items())}}} }}
body {{ margin: 0 auto; max-width: 70rem; padding: 1rem; background: var(--ground); color: var(--ink); font: 16px/1.5 {FONT} }}
h1 {{ font-size: 1.5rem; margin: .5rem 0 }} h2 {{ font-size: 1.15rem; margin: 2rem 0 .5rem }} p {{ margin: .5rem 0 }}
.wide {{ overflow-x: auto }} .pictures {{ display: flex; flex-wrap: wrap; gap: 1rem }}
.pictures svg {{ max-width: 100%; height: auto }}
table {{ border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums }}
th, td {{ padding: .25rem .75rem .25rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--edge) }}
th {{ color: var(--soft); font-weight: 600 }} .best td {{ font-weight: 600 }} .failed td {{ color: var(--soft) }}
"""


def page(name: str, records: Sequence[Record], objectives: Objectives) -> str:
    """The page of a study: its Pareto front, its tree, and a table of all trials."""
    front, done = pareto_front(records, objectives), complete(records)
    minutes = sum(record.seconds for record in records) / 60
    spent = f"{minutes:.1f} minutes" if minutes < 120 else f"{minutes / 60:.1f} hours"
    failed = [record for record in records if record.state != COMPLETE]
    facts = [
        f"{counted(len(done), 'trial')} complete, {len(failed)} without a result, {spent} in all.",
        f"{counted(len(front), 'trial')} that no other dominates in {' and '.join(objectives.names)}.",
    ]
    pictures = "\n".join(draw_fronts(records, objectives))
    names = [*objectives.names, *(["parameters"] if "parameters" not in objectives.names else [])]
    header = "".join(f"<th>{escape(cell)}</th>" for cell in ("trial", "from", "growth", *names, "seconds"))
    numbers = {record.number for record in front}
    order = sorted(records, key=lambda record: (record.number not in numbers, record.state != COMPLETE, record.number))
    rows = "\n".join(_row(record, objectives, record.number in numbers) for record in order)
    parts = [
        f"<h1>Search {escape(name)}</h1>",
        *(f"<p>{escape(fact)}</p>" for fact in facts),
        f'<h2>Objectives</h2>\n<div class="pictures">\n{pictures}\n</div>' if pictures else "",
        f'<h2>Family tree</h2>\n<div class="wide">\n{draw_tree(records, objectives)}\n</div>',
        f'<h2>Trials</h2>\n<div class="wide"><table>\n<thead><tr>{header}</tr></thead>',
        f"<tbody>\n{rows}\n</tbody></table></div>",
    ]
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Search {escape(name)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n"
    )
    return head + "\n".join(filter(None, parts)) + "\n</body>\n</html>\n"


def _row(record: Record, objectives: Objectives, best: bool) -> str:
    kind = "best" if best else "" if record.state == COMPLETE else "failed"
    growth = "; ".join(record.growth) or ("the parent itself" if record.parent is None else "trained on")
    if record.state == COMPLETE:
        values = [short(value) for value in record.values]
    else:
        growth = f"{growth} · {record.outcome or record.state.lower()}: {record.error}".rstrip(": ")
        values = ["–"] * len(objectives.names)
    size = [rounded(record.parameters)] if "parameters" not in objectives.names else []
    parent = "–" if record.parent is None else str(record.parent)
    cells = [str(record.number), parent, growth, *values, *size, f"{record.seconds:.1f}"]
    return f'<tr class="{kind}">' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
