"""The report: one page with everything in it, and the figures beside it.

    python -m experiments.report [--results FOLDER] [--out FOLDER]

writes report.html and figures/*.png, *.pdf. The page is report/page.html in report/frame.html, with page.css, page.js and the
curves put into it; it makes no request to the network. The same results give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from experiments.figures import OUT, RESULTS, draw_all
from experiments.pages import budgets, cards, parts, parts_pays
from experiments.pages.basics import fold, prose
from experiments.pages.looks import look
from experiments.reading.against_paper import claims
from experiments.reading.answers import opening
from experiments.reading.comparison import Comparison, read
from experiments.reading.curves import Mean, has, mean_curve
from experiments.reading.diversity import read_filters
from experiments.reading.earlier_runs import notes
from experiments.reading.findings import findings, lede
from experiments.reading.groups import GROUPS, Group
from experiments.reading.result_files import ResultsError, read_paper, unusable
from experiments.reading.tables import Numbers, numbers

TEMPLATE = Path(__file__).parent / "pages" / "templates"
REUSED = ("nct-widen", "nct-deepen", "nct-narrow", "of")  # groups whose plots open on the students' own epochs
EARLY = ("ftt-widen", "ftt-deepen", "ftt-narrow", "bi")  # groups whose plots open on the epochs around the growth
NOTES = {
    "nct-widen": "A teacher is trained for {first:g} epochs, widened by half, and for {rest:g} more at a fifth of the rate.",
    "nct-deepen": "A teacher of ten layers is trained, deepened to eighteen, and trained on at a fifth of the rate.",
    "ftt-widen": "Widened at epoch {first:g} of {total:g}. The rate of all arms, scratch too, drops to a fifth there.",
    "ftt-deepen": "Deepened at epoch {first:g} of {total:g}. The rate of all arms, scratch too, drops to a fifth there.",
    "apb-widen": "Half the width at first, all of it for the last quarter of 6,000 updates, or from earlier on. The rate drops "
    "to a fifth at update 4,500.",
    "apb-deepen": "Half the depth at first, all of it for the last quarter of 6,000 updates, or from earlier on. The rate "
    "drops to a fifth at update 4,500.",
    "nct-narrow": "8/16 channels: a teacher of ten layers, deepened to eighteen and trained on at a fifth of the rate.",
    "ftt-narrow": "8/16 channels, deepened at epoch {first:g} of {total:g}, where the rate of all arms drops to a fifth.",
    "apb3-widen": "Appendix B on its own network: half the filters until the growth; the rate then falls with the share of old "
    "parameters.",
    "apb3-deepen": "Appendix B on its own network: two layers until the growth; the rate then falls with the share of old "
    "parameters.",
    "of": "The teacher is trained without weight decay until it overfits; its widened student goes on from there.",
    "bi": "Widened at epoch {first:g}, with new weights of the deviation of those they join, or drawn as He and others do.",
    "viz": "A network of one convolution, whose filters are doubled at epoch {first:g} of {total:g}.",
}


def note(found: Numbers, group: Group) -> str:
    """The training of a group's arms in a sentence, with the epochs of the first of them."""
    epochs = [stage["epochs"] for stage in found.results[group.present(found.results)[0]]["arm"]["stages"]]
    return NOTES[group.key].format(first=epochs[0], rest=epochs[-1], total=sum(epochs))


def series(curve: Mean) -> dict[str, Any]:
    """A curve as plain numbers, rounded to what can be seen; FLOPs in units of 10¹²."""
    return {
        "epochs": [round(float(value), 3) for value in curve.epochs],
        "flops": [round(float(value) / 1e12, 4) for value in curve.flops],
        "seconds": [round(float(value), 3) for value in curve.seconds],
        "mean": [round(float(value), 3) for value in curve.accuracy],
        "sd": [round(float(value), 3) for value in curve.spread],
        "cuts": list(curve.cuts),
        "grown": curve.grown,
        "n": curve.n,
    }


def arm_data(found: Numbers, name: str, measure: str = "accuracy") -> dict[str, Any]:
    """An arm in both accounts; "nothing" is null where its teacher is not among the results, "reuse" where it never grows."""
    style = look(name)
    nothing, reuse = (mean_curve(found.results, name, account, measure) for account in ("nothing", "reuse"))
    grows = reuse is not None and reuse.grown is not None
    return {
        "name": name,
        "label": style.label,
        "colour": style.colour,
        "dash": list(style.dash),
        "width": style.width,
        "both": not grows,
        "nothing": None if nothing is None else series(nothing),
        "reuse": series(reuse) if grows and reuse is not None else None,
    }


def trained(found: Numbers, group: Group) -> list[str]:
    """The arms of a group whose accuracy on training batches is shown: figures 7 and 10 of the paper."""
    names = group.shown(found.results) if group.key in ("of", "bi") else ()
    return [name for name in names if has(found.results, name, "running_accuracy")]


def data(found: Numbers) -> dict[str, Any]:
    made = {
        group.key: {
            "title": group.title,
            "first": [*group.present(found.results), *group.teachers[:1]],
            "account": "reuse" if group.key in REUSED else "nothing",
            "range": "start" if group.key in EARLY else "whole",
            "arms": [arm_data(found, name) for name in group.shown(found.results)],
        }
        for group in GROUPS
        if group.present(found.results)
    }
    for group in GROUPS:
        if names := trained(found, group):
            arms = [arm_data(found, name, "running_accuracy") for name in names]
            made[f"{group.key}-training"] = {**made[group.key], "title": f"{group.title}: training accuracy", "arms": arms}
    return made


FIGURE_OF = {
    "apb-widen": "appendix-b",
    "apb-deepen": "appendix-b",
    "of": "overfitting",
    "bi": "initialisation",
    "viz": "filters",
}


def plot(found: Numbers, group: Group, beside: set[str]) -> str:
    """The plot of a group, behind a fold that says where its arms end."""
    names = [name for name in sorted(beside) if name.startswith(group.key) or name == FIGURE_OF.get(group.key)]
    links = "".join(f' <a href="figures/{name}.png">{name}.png</a> <a href="figures/{name}.pdf">pdf</a>' for name in names)
    figure = (
        f'<figure class="plot" data-group="{group.key}" id="{group.key}">'
        f'<p class="quiet">{escape(note(found, group))}</p><div class="view"></div>'
        f"<noscript>{parts.fallback(found, group)}</noscript>"
        + (f'<figcaption class="quiet">For print:{links}</figcaption>' if links else "")
        + "</figure>"
    )
    if trained(found, group):
        figure += (
            f'<figure class="plot" data-group="{group.key}-training" id="{group.key}-training"><h3>On the training batches</h3>'
            '<p class="quiet">As in the paper’s figure.</p><div class="view"></div><noscript></noscript></figure>'
        )
    ends = [(look(name).label, found.end(name)) for name in group.present(found.results)]
    short = ", ".join(f"{label} {row.late:.1f}" for label, row in ends if row)
    return fold(f"{escape(group.title)} <small>{prose(short)} %</small>", figure)


def plots(found: Numbers, beside: set[str]) -> str:
    return "".join(plot(found, group, beside) for group in GROUPS if group.present(found.results))


def earlier_part(found: Numbers) -> str:
    """What differs between these results and today's description of the arms."""
    said = "".join(f"<li>{prose(one)}</li>" for one in notes(found.results))
    return f'<ul class="missing">{said}</ul>' if said else ""


OPENING = (
    '<figure class="plot first" data-group="opening" id="opening"><div class="view"></div><figcaption class="quiet">'
    "ResNetCifar-18 widened by a factor of two on CIFAR-10: accuracy at the end of whole runs, by compute spent after the "
    "small network was there. Means over seeds, with a band of one standard deviation.</figcaption>"
    "<noscript><p>The tables below have all values.</p></noscript></figure>"
)


def page(found: Numbers, beside: set[str], compared: Comparison | None, engines: str) -> str:
    """The whole page; `beside` names the figures that lie next to it."""
    curves = data(found) | ({} if compared is None else budgets.data(compared) | budgets.opening(compared))
    judged = claims(found)
    costs = [fold(f"Compute to reach an accuracy: {escape(title)}", made) for title, made in parts.cost_tables(found)]
    fill = {
        "headline": prose(opening(compared) if compared else "Networks that grow in the middle of training"),
        "opening": OPENING if "opening" in curves else "",
        "lede": prose(lede(found)),
        "earlier": earlier_part(found),
        "claims": cards.claim_table(judged),
        "scores": fold("Table 2, arm by arm", cards.scores(found) if judged else ""),
        "choices": fold("Choices made in reading the paper", parts.choices()),
        "pays": parts_pays.pays(compared),
        "cards": cards.cards(findings(found)),
        "plots": plots(found, beside),
        "filter_table": parts.filter_table(found),
        "filters": fold("The filters of the first seed", parts.filter_part(found)),
        "final": fold("Final accuracy of every arm", parts.final_chart(found) + parts.final_table(found)),
        "pairs": fold("Arm against arm", parts.paired_table(found)),
        "growths": fold("At the growth", parts.growth_table(found)),
        "costs": "".join(costs),
        "made": fold("Commands, engine, device, versions", parts.made_by(found.results)),
        "engines": fold("The fused engine and the plain loop", engines),
        "arms": fold("Every arm as it was run", parts.arm_table(found)),
    }
    return framed("page.html", "outgrow: the paper's experiments, run again", curves, fill)


def framed(body: str, title: str, curves: Mapping[str, Any], fill: Mapping[str, str]) -> str:
    """A page that makes no request to the network: a body in the common frame, with its parts filled in."""

    def read(name: str) -> str:
        return (TEMPLATE / name).read_text(encoding="utf-8")

    text = read("frame.html").replace("{{body}}", read(body))
    plain = json.dumps(curves, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")
    own = {"title": title, "css": read("page.css"), "js": read("page.js"), "snippet": read("snippet.html"), "data": plain}
    for name, value in {**own, **fill}.items():
        text = text.replace("{{" + name + "}}", value)
    return text


def write(results: Path, out: Path, beside: Path | None = None) -> Path:
    """Figures and page, in `out`. `beside` has the results of the honest comparison and of the two engines."""
    found = numbers(read_paper(results), read_filters(results))
    compared = None if beside is None else read(beside)
    engines = "" if beside is None else parts_pays.engines(beside, found.results)
    figures = draw_all(found, out / "figures") + ([] if compared is None else budgets.draw(compared, out / "figures"))
    path = out / "report.html"
    part = path.with_suffix(".part")
    part.write_text(page(found, {figure.stem for figure in figures}, compared, engines), encoding="utf-8")
    part.replace(path)
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.report", description="Write report.html from results.")
    parser.add_argument("--results", type=Path, default=RESULTS, help="a folder of results (default: the committed ones)")
    parser.add_argument(
        "--beside",
        type=Path,
        default=None,
        help="a folder with the results of --set protocol, sweep and tuning in three folders",
    )
    parser.add_argument("--out", type=Path, default=OUT, help="where the page goes, and figures/ beside it (default: report)")
    options = parser.parse_args(arguments)
    try:
        beside = options.beside or (RESULTS.parent if options.results == RESULTS else None)
        path = write(options.results, options.out, beside)
    except ResultsError as error:
        raise SystemExit(str(error)) from error
    except OSError as error:
        raise SystemExit(unusable(error)) from error
    print(f"the report is {path} ({path.stat().st_size / 1e6:.1f} MB), its figures are beside it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
