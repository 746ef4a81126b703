"""Numbers in words: signed points, intervals, shares, powers of ten, amounts."""

from __future__ import annotations

import math

from experiments.reading.curves import Estimate


def signed(number: float, digits: int = 1) -> str:
    """With its sign, and no minus before zero."""
    return f"{round(number, digits) + 0.0:+.{digits}f}".replace("-", "−")


def interval(one: Estimate, digits: int = 1) -> str:
    if one.n < 2:
        return "[one seed]"
    return f"[{signed(one.low, digits)}, {signed(one.high, digits)}]"


def points(one: Estimate) -> str:
    """+3.5 points [+2.0, +4.7]"""
    return f"{signed(one.value)} points {interval(one)}"


def verdict(one: Estimate, more: str, less: str) -> str:
    """`more` or `less` with the size of the difference, where there is one."""
    if not one.clear:
        return f"no clear difference ({points(one)})"
    return f"{abs(one.value):.1f} points {more if one.value > 0 else less} {interval(one)}"


def share(one: Estimate, what: str = "FLOPs") -> str:
    """27 % fewer FLOPs [3, 45]"""
    low, high = (one.low, one.high) if one.value >= 0 else (-one.high, -one.low)
    ends = ", ".join(f"{round(100 * end) + 0.0:.0f}" for end in (low, high))
    text = f"{abs(100 * one.value):.0f} % {'fewer' if one.value >= 0 else 'more'} {what} [{ends}]"
    return text.replace("-", "−") + ("" if one.clear else ", no clear difference")


def fewer(saved: float) -> str:
    """0.27 → 27 % fewer"""
    return f"{abs(100 * saved):.0f} % {'fewer' if saved >= 0 else 'more'}"


def plain(one: Estimate, digits: int = 2) -> str:
    """0.85 [0.84, 0.86]"""
    value, low, high = (signed(number, digits).removeprefix("+") for number in (one.value, one.low, one.high))
    return f"{value} [{low}, {high}]" if one.n > 1 else f"{value} [one seed]"


def tiny(value: float) -> str:
    """3·10⁻⁷, or "no difference" for zero."""
    if value == 0:
        return "no difference"
    power = math.floor(math.log10(value))
    power += round(value / 10**power) == 10
    digits = str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{round(value / 10**power):d}·10{digits}"


def amount(number: float, unit: str = "") -> str:
    """1.2e16 → 12 P"""
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.3g} {letter}{unit}"
    return f"{number:.3g} {unit}".strip()


def duration(seconds: float) -> str:
    return f"{seconds / 60:,.0f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"
