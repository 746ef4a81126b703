"""Shared parts of the pictures of a search: colours for light and dark pages, texts, and short forms of values."""

from __future__ import annotations

from html import escape

LIGHT = {"ground": "#fdfcf9", "edge": "#d8d3c8", "ink": "#262626", "soft": "#6b675f", "line": "#b9b3a6", "best": "#c4650a"}
DARK = {"ground": "#1d1f21", "edge": "#3a3d40", "ink": "#e8e6e1", "soft": "#a09b91", "line": "#5d6166", "best": "#f0a35a"}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
LETTER = 7.0  # the width of a letter in pixels, about

STYLE = f"""
.og {{ font-family: {FONT}; font-size: 12px; {"".join(f"--{name}: {hue}; " for name, hue in LIGHT.items())}}}
@media (prefers-color-scheme: dark) {{ .og {{ {"".join(f"--{name}: {hue}; " for name, hue in DARK.items())}}} }}
.og .card {{ fill: var(--ground); stroke: var(--edge) }} .og text {{ fill: var(--ink) }} .og .soft {{ fill: var(--soft) }}
.og .end {{ text-anchor: end }} .og .middle {{ text-anchor: middle }} .og .line {{ fill: none; stroke: var(--line) }}
.og .grid {{ stroke: var(--edge) }} .og .path {{ fill: none; stroke: var(--best); stroke-width: 2 }}
.og .trial {{ fill: var(--ground); stroke: var(--soft); stroke-width: 1.5 }} .og .failed {{ fill: none; stroke: var(--line) }}
.og .best {{ fill: var(--best); stroke: var(--best) }} .og .bold {{ font-weight: 600 }} .og tspan.soft {{ font-weight: 400 }}
"""


def text(x: float, y: float, said: str, style: str = "", more: str = "") -> str:
    """A line of text. more: follows it, in a softer colour."""
    kind = f' class="{style}"' if style else ""
    rest = f'<tspan class="soft" dx="10">{escape(more)}</tspan>' if more else ""
    return f'<text{kind} x="{x:g}" y="{y:g}">{escape(said)}{rest}</text>'


def picture(width: float, height: float, title: str, parts: list[str]) -> str:
    """An SVG picture on a card, which follows the colour scheme of the reader's system."""
    box = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    card = f'<rect class="card" x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" rx="8"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="og" role="img" {box}>'
    return "\n".join([head, f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", card, *parts, "</svg>\n"])


def short(value: float) -> str:
    """A value in a few letters.

    Example:
        >>> [short(value) for value in (0.03125, 12.0, 48_250, 3_100_000)]
        ['0.03125', '12', '48.2k', '3.1M']
    """
    for unit, power in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= power:
            return f"{value / (1e3 if unit == 'k' else power):.3g}{unit}"
    return f"{value:.4g}"
