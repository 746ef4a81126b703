"""Small pieces of HTML that all parts of the report are made of: prose, tables, folds, swatches."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from experiments.pages.looks import look
from experiments.reading.curves import Estimate
from experiments.reading.words import interval, signed


def prose(text: str) -> str:
    """Escaped, with numbers kept on one line with their signs, units and intervals."""
    kept = re.sub(r"(?<=[\d×±−]) (?=%|points|±|\d|seeds)", "\u00a0", escape(text)).replace("± ", "±\u00a0")
    return re.sub(r"\[[^\]<]*\]", lambda found: found[0].replace(" ", "\u00a0"), kept)


def breakable(name: str) -> str:
    """The name of an arm or a path, which may break behind a hyphen or a slash and before a bracket, never inside a word."""
    return re.sub(r"(?<=[-/_.=@])(?=\w)|(?<=\w)(?=\()", "<wbr>", escape(name))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str, numeric_from: int = 1) -> str:
    """A table in a box of its own under its caption; cells are HTML already."""
    top = "".join(f'<th scope="col"{" class=n" if i >= numeric_from else ""}>{cell}</th>' for i, cell in enumerate(head))
    body = "".join(
        "<tr>"
        + f'<th scope="row">{row[0]}</th>'
        + "".join(f"<td{' class=n' if i >= numeric_from else ''}>{cell}</td>" for i, cell in enumerate(row[1:], start=1))
        + "</tr>"
        for row in rows
    )
    name = escape(caption)
    return (
        f'<div class="sheet"><p class="caption" aria-hidden="true">{name}</p><div class="scroll" tabindex="0" role="region" '
        f'aria-label="{name}"><table aria-label="{name}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div></div>'
    )


def fold(title: str, inside: str) -> str:
    """A part that opens when its title is clicked; nothing if there is nothing inside."""
    return f"<details><summary>{title}</summary>{inside}</details>" if inside else ""


def swatch(arm: str) -> str:
    style = look(arm)
    dot = f'<i class="swatch" style="--c:var(--{style.colour})"></i>'
    return f'<span class="arm">{dot}<span>{escape(style.label)}</span></span>'


def minus(text: str) -> str:
    return text.replace("-", "−")


def tight(text: str) -> str:
    """Text that stays on one line."""
    return text.replace(" ", "\u00a0")


def difference(one: Estimate | None) -> str:
    """A signed number with its interval, in bold where the interval excludes zero."""
    if one is None:
        return '<span class="quiet">–</span>'
    value = signed(one.value)
    strong = f"<b>{value}</b>" if one.clear else value
    return f'{strong} <span class="quiet">{tight(interval(one))}</span>'


def around(mean: float, sd: float, n: int, digits: int) -> str:
    """A mean with its spread; of one seed there is none."""
    return tight(f"{mean:.{digits}f}" + (f" ± {sd:.{digits}f}" if n > 1 else ""))


def with_code(text: str) -> str:
    """Text in which `…` is code."""
    pieces = text.split("`")
    return "".join(f"<code>{breakable(piece)}</code>" if number % 2 else escape(piece) for number, piece in enumerate(pieces))
