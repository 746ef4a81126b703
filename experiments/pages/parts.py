"""Parts of the report as HTML: tables, filters, and a chart of final accuracies that needs no script."""

from __future__ import annotations

import base64
import io
import math
from html import escape
from typing import Any

import numpy as np

from experiments.figures import picture
from experiments.pages.basics import around, breakable, difference, prose, swatch, table, tight, with_code
from experiments.pages.looks import ACCOUNT_NAMES, look
from experiments.reading.curves import ACCOUNTS, Results, mean_curve
from experiments.reading.diversity import WHEN
from experiments.reading.filter_changes import changes
from experiments.reading.groups import GROUPS, Group
from experiments.reading.tables import PAPER_IMAGES, Cost, Numbers, image_error
from experiments.reading.words import amount, plain, share, tiny
from experiments.setting.arms import CHOICES

MOMENTS = {"before": "before the growth", "after": "just after", "end": "at the end"}


def final_table(numbers: Numbers) -> str:
    rows = []
    for row in numbers.final:
        net = numbers.results[row.arm]["arm"]["net"]
        kind = "" if net["residual"] or net["kind"] == "small" else ' <span class="quiet">no skips</span>'
        rows.append(
            (
                f"{breakable(row.arm)}{kind}",
                around(row.mean, row.sd, row.n, 2),
                around(row.late, row.late_sd, row.n, 2),
                str(row.n),
                "–" if row.paper is None else f"{row.paper:.1f}",
                difference(row.difference),
            )
        )
    head = ("arm", "last epoch", "last ten epochs", "seeds", "paper", "ours − paper")
    return table(head, rows, "Final accuracy in per cent: mean ± standard deviation over seeds")


def paired_table(numbers: Numbers) -> str:
    rows = [
        (breakable(pair.arm), breakable(pair.against), difference(pair.end), difference(pair.late), str(pair.end.n))
        for pair in numbers.pairs
    ]
    head = ("arm", "less", "last epoch", "last ten epochs", "seeds")
    return table(head, rows, "Differences in points, seed by seed, with 95 % intervals (Student’s t)", 2)


def growth_table(numbers: Numbers) -> str:
    rows = [
        (
            breakable(row.arm),
            "–" if row.before is None else f"{row.before:.2f}",
            f"{row.after:.2f}",
            f"{row.one_epoch:.2f}",
            tight(f"{row.first_loss:.2f} → {row.worst_loss:.2f}"),
            "–" if row.soon is None else f"{row.soon:.2f}",
            tiny(row.error) if row.preserving else tight("not preserving"),
            f"{row.parameters[0]:,} → {row.parameters[1]:,}",
        )
        for row in numbers.growths
    ]
    head = (
        "arm",
        "before",
        "just after",
        "an epoch later",
        "loss, ten steps",
        "next 20 / last 30 steps",
        "error of outputs",
        "parameters",
    )
    caption = "At the growth: accuracy in per cent; training loss of the first step and the highest of the next ten"
    return table(head, rows, caption)


def cost_cell(flops: Cost | None, seconds: Cost | None) -> str:
    if flops is None or seconds is None:
        return "–"
    if not flops.reached:
        return '<span class="quiet">not reached</span>'
    text = tight(amount(flops.median, "FLOP")) if math.isfinite(flops.median) else "–"
    if flops.median == 0:
        text = "at once"
    if flops.saving is not None:
        amounts, spans = share(flops.saving, "").replace(", no clear difference", "").split(" [")
        value = tight(amounts.replace("fewer", "less").strip())
        text += f'<br>{f"<b>{value}</b>" if flops.saving.clear else value} <span class="quiet">[{tight(spans)}</span>'
    small = [f"{seconds.median:.2f} s" if math.isfinite(seconds.median) else ""]
    small += [f"{flops.reached} of {flops.n} seeds"] if flops.reached < flops.n else []
    small += [f"{flops.early} before growing"] if flops.early else []
    return f'{text}<br><span class="quiet">{", ".join(part for part in small if part)}</span>'


def cost_tables(numbers: Numbers) -> list[tuple[str, str]]:
    """For each group its title and a table: arms and accounts by targets that are its own."""
    tables = []
    for group in GROUPS:
        mine = [row for row in numbers.costs if row.group == group.key]
        if not mine:
            continue
        whats, rows = list(dict.fromkeys((row.what, row.target) for row in mine)), []
        names = dict.fromkeys((*group.present(numbers.results), *(row.arm for row in mine)))
        for name in names:
            never = not any(stage["grow"] for stage in numbers.results[name]["arm"]["stages"])
            for account in ACCOUNTS[:1] if never else ACCOUNTS:
                both = [
                    tuple(numbers.cost(name, what, account, axis, group.key) for axis in ("flops", "seconds"))
                    for what, _ in whats
                ]
                kind = "both accounts" if never else ACCOUNT_NAMES[account]
                kind += "" if name in group.arms else ", rate dropped"
                rows.append((f'{swatch(name)}<br><span class="quiet">{kind}</span>', *(cost_cell(*cells) for cells in both)))
        head = ["arm", *(what if "%" in what else f"{what}<br>({target:.1f} %)" for what, target in whats)]
        caption = f"{group.title}: compute to reach an accuracy, median over seeds"
        tables.append((group.title, table(head, rows, caption)))
    return tables


def final_chart(numbers: Numbers) -> str:
    """Dots with one standard deviation and the paper's numbers: plain boxes on a scale of per cents, so that text stays as
    large."""
    groups = [(group.title, [row for name in group.present(numbers.results) if (row := numbers.end(name))]) for group in GROUPS]
    ends = [row for _, rows in groups for row in rows]
    if not ends:
        return ""
    low = math.floor(min(min(row.mean - row.sd, row.paper or 100) for row in ends)) - 1
    high = math.ceil(max(max(row.mean + row.sd, row.paper or 0) for row in ends)) + 1

    def at(value: float) -> str:
        return f"{100 * (value - low) / (high - low):.2f}%"

    ticks = range(5 * math.ceil(low / 5), high, 5)
    grid = "".join(f'<i class="grid" style="left:{at(tick)}"></i>' for tick in ticks)
    parts = []
    for title, rows in groups:
        parts.append(f'<p class="head">{escape(title)}</p>' if rows else "")
        for row in rows:
            said = f"{row.arm}: {row.mean:.1f} ± {row.sd:.1f} %" + (
                "" if row.paper is None else f"; the paper: {row.paper:.1f} %"
            )
            paper = "" if row.paper is None else f'<i class="paper" style="left:{at(row.paper)}"></i>'
            if row.paper is not None:
                error = image_error(row.paper, PAPER_IMAGES)
                wide = f"{100 * 2 * error / (high - low):.2f}%"
                paper = f'<i class="error" style="left:{at(row.paper - error)};width:{wide}"></i>{paper}'
            width = f"{100 * 2 * row.sd / (high - low):.2f}%"
            parts.append(
                f'<div class="dot" style="--c:var(--{look(row.arm).colour})" title="{escape(said)}">'
                f"<span>{escape(look(row.arm).label)}</span><div>{grid}"
                f'<i class="bar" style="left:{at(row.mean - row.sd)};width:{width}"></i>'
                f'<i class="mean" style="left:{at(row.mean)}"></i>{paper}</div></div>'
            )
    scale = "".join(f'<i style="left:{at(tick)}">{tick}\u00a0%</i>' for tick in ticks)
    label = "Final accuracies of all arms with one standard deviation, and the paper's; the table below has the numbers"
    parts.append(f'<div class="dot scale"><span></span><div>{scale}</div></div>')
    return f'<div class="dots" role="img" aria-label="{label}">{"".join(parts)}</div>'


def fallback(numbers: Numbers, group: Group) -> str:
    """The curves of a group as a table, for readers without scripts."""
    curves = {name: curve for name in group.present(numbers.results) if (curve := mean_curve(numbers.results, name))}
    if not curves:
        return ""
    end = max(float(curve.epochs[-1]) for curve in curves.values())
    epochs = [epoch for epoch in (1, 5, 10, 20, 25, 26, 30, 50, 100, 150, 200, 250, 251, 300, 400, 500, 600) if epoch <= end]
    rows = [
        (
            swatch(name),
            *(
                around(curve.accuracy[place], curve.spread[place], curve.n, 1) if curve.epochs[-1] >= epoch else "–"
                for epoch in epochs
                for place in (int(np.abs(curve.epochs - epoch).argmin()),)
            ),
        )
        for name, curve in curves.items()
    ]
    return table(("arm", *(f"epoch {epoch}" for epoch in epochs)), rows, f"{group.title}: accuracy in per cent, from nothing")


def inline(weights: Any) -> str:
    """A picture of filters, one pixel a weight, as a data address; the page scales it."""
    from matplotlib.image import imsave

    buffer = io.BytesIO()
    imsave(buffer, picture(weights), format="png", metadata={"Software": None})
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def filter_part(numbers: Numbers) -> str:
    if not numbers.filters:
        return (
            '<p class="missing">The filter runs (VIZ) are not among these results: the folder has no '
            "<code>filters.safetensors</code>. <code>python -m experiments 'VIZ-*'</code> makes it.</p>"
        )
    arms = {row.arm for row in numbers.diversity}
    order = [arm for group in GROUPS for arm in (*group.arms, *group.more) if arm in arms]
    figures = []
    for arm in order:
        seed = min((name.split("/")[1] for name in numbers.filters if name.startswith(arm + "/")), key=int)
        for when in WHEN:
            weights = numbers.filters.get(f"{arm}/{seed}/{when}")
            if weights is not None:
                alt = f"{len(weights)} filters of {look(arm).label} {MOMENTS[when]}"
                moment = MOMENTS[when] + (f", {after_growth(numbers, arm)} epochs later" if when == "end" else "")
                note = f"<figcaption><b>{escape(look(arm).label)}</b> {moment}</figcaption>"
                figures.append(f'<figure><img src="{inline(weights)}" alt="{escape(alt)}">{note}</figure>')
    return f'<div class="filters">{"".join(figures)}</div>'


def filter_table(numbers: Numbers) -> str:
    """What becomes of filters, arm by arm."""
    found = changes(numbers.filters)
    if not found:
        return ""
    ends = {row.arm: row for row in numbers.diversity if row.when == "end"}
    rows = [
        (
            swatch(arm),
            after_growth(numbers, arm),
            *(prose(plain(one)) for one in (row.kept, row.pattern, row.colour, row.size, row.twins, row.rough_new)),
            f"{ends[arm].diversity:.2f}" if arm in ends else "–",
        )
        for arm, row in found.items()
    ]
    head = (
        "arm",
        "epochs after",
        "first filters kept",
        "pattern kept",
        "colour kept",
        "size, new / first",
        "twins",
        "high frequencies",
        "1 − |cos|",
    )
    return table(head, rows, "Filters at the end of training: means over seeds with 95 % intervals")


def after_growth(numbers: Numbers, arm: str) -> str:
    """The epochs that an arm was trained for after its growth."""
    return f"{numbers.results[arm]['arm']['stages'][-1]['epochs']:g}" if arm in numbers.results else "–"


def choices() -> str:
    return "<ul>" + "".join(f"<li>{with_code(choice)}</li>" for choice in CHOICES) + "</ul>"


def arm_table(numbers: Numbers) -> str:
    rows = []
    for row in numbers.final:
        arm = numbers.results[row.arm]["arm"]
        net = arm["net"]
        kind = "SmallConv" if net["kind"] == "small" else f"ResNetCifar-{2 + 4 * net['blocks']}({net['r']:.4g})"
        stages = [
            f"{stage['epochs']:g} epochs at {stage['rate']:.2g}, decay {stage['decay']:g}"
            + (f", {stage['grow']['what']} by {stage['grow']['method']}" if stage["grow"] else "")
            for stage in arm["stages"]
        ]
        rows.append(
            (breakable(row.arm), kind + ("" if net["residual"] else ", no skips"), "<br>then ".join(stages), arm["optimizer"])
        )
    return table(("arm", "network", "training", "optimizer"), rows, "Every arm as it was run", 9)


def made_by(results: Results) -> str:
    """Commands, engines, versions and devices: each of those that are in the files once."""
    contents = results.values()
    facts = {
        "command": {content["command"] for content in contents},
        "engine": {f"{content['engine']}, {content['precision']}" for content in contents},
        "device": {content["device"] for content in contents},
        "versions": {", ".join(f"{name} {version}" for name, version in content["versions"].items()) for content in contents},
        "seeds": {", ".join(map(str, content["seeds"])) for content in contents},
    }
    items = (
        f"<dt>{name}</dt><dd>{'<br>'.join(f'<code>{breakable(value)}</code>' for value in sorted(values))}</dd>"
        for name, values in facts.items()
    )
    return f'<dl class="facts">{"".join(items)}</dl>'
