"""What the paper says of filters (abstract, §5.4, appendix C), judged by the filters of the VIZ runs (`filter_changes.py`).

Runs of few epochs after the growth (a carried state, zero writers) answer other questions and are no part of these verdicts.
"""

from __future__ import annotations

from collections.abc import Callable

from experiments.pages.looks import look
from experiments.reading.claim import AGREES, DIFFERS, MISSING, PARTLY, Claim
from experiments.reading.curves import Estimate
from experiments.reading.filter_changes import Changes, changes
from experiments.reading.tables import Numbers
from experiments.reading.words import plain, signed

R2R, NET2NET, NETMORPH = METHODS = "VIZ-R2R", "VIZ-Net2Net", "VIZ-NetMorph"
Found = dict[str, Changes]


def claim(
    place: str, paper: str, *arms: str
) -> Callable[[Callable[[Found], tuple[str, str, str]]], Callable[[Numbers], Claim]]:
    """A claim that is judged by some arms; "not run" where the filters of one of them are not there."""

    def of(judge: Callable[[Found], tuple[str, str, str]]) -> Callable[[Numbers], Claim]:
        def judged(numbers: Numbers) -> Claim:
            found = changes(numbers.filters)
            if not {*arms} <= set(found):
                return Claim(place, paper, "The filter runs are not among these results.", MISSING)
            return Claim(place, paper, *judge(found))

        return judged

    return of


def each(found: Found, value: Callable[[Changes], Estimate], *arms: str) -> str:
    """R2R 0.86, NetMorph 0.86"""
    return ", ".join(f"{look(arm).label} {signless(value(found[arm]).value)}" for arm in arms)


def whole(found: Found, value: Callable[[Changes], Estimate], *arms: str) -> str:
    """R2R 0.86 [0.84, 0.89]; NetMorph 0.86 [0.85, 0.88]"""
    return "; ".join(f"{look(arm).label} {plain(value(found[arm]))}" for arm in arms)


def signless(value: float) -> str:
    return signed(value, 2).removeprefix("+")


@claim("Abstract", "R2R learns a more diverse set of filters than Net2Net and Network Morphism.", *METHODS)
def diverse(found: Found) -> tuple[str, str, str]:
    ahead = [found[R2R].varied.low > found[other].varied.high for other in (NET2NET, NETMORPH)]
    return (
        f"Mean 1 − |cos| of two filters without their high frequencies: {each(found, lambda row: row.varied, *METHODS)}.",
        AGREES if all(ahead) else PARTLY if any(ahead) else DIFFERS,
        "The paper names no measure. High frequencies are left out because noise, too, makes filters unlike each other, and "
        "so are filters that have faded to nothing. " + whole(found, lambda row: row.varied, *METHODS) + ".",
    )


@claim("§5.4, figure 4", "The first 16 filters tend to be present still after widening and training.", *METHODS)
def persist(found: Found) -> tuple[str, str, str]:
    holds = [found[arm].kept.low > max(0.5, found[arm].unrelated.high) for arm in METHODS]
    return (
        f"Mean cosine of a first filter before and at the end: {each(found, lambda row: row.kept, *METHODS)}.",
        AGREES if all(holds) else PARTLY,
        f"Filters that do not belong together have {each(found, lambda row: row.unrelated, *METHODS)}. Intervals: "
        f"{whole(found, lambda row: row.kept, *METHODS)}.",
    )


@claim("§5.4, figure 4", "Net2Net’s new filters keep their orientation; their colours change.", *METHODS)
def net2net_shape(found: Found) -> tuple[str, str, str]:
    own, other = found[NET2NET], found[R2R]
    shape, colour = own.pattern.low > other.pattern.high, own.colour.high < 0.8
    return (
        f"Pattern kept {own.pattern.value:.2f} (R2R’s new filters {other.pattern.value:.2f}); colour kept "
        f"{own.colour.value:.2f}.",
        AGREES if shape and colour else PARTLY if shape or colour else DIFFERS,
        f"|cos| after the growth and at the end. Net2Net: pattern {plain(own.pattern)}, colour {plain(own.colour)}; R2R: "
        f"pattern {plain(other.pattern)}, colour {plain(other.colour)}." + ("" if colour else " Colours are kept too here."),
    )


@claim("§5.4, figure 4", "R2R’s new filters learn different orientations: their symmetry is broken without noise.", *METHODS)
def symmetry(found: Found) -> tuple[str, str, str]:
    own = found[R2R]
    partly = own.twins.low > own.others.high
    return (
        f"Twins, equal at the growth, end at cosine {signless(own.twins.value)}; filters of different pairs at "
        f"{signless(own.others.value)}.",
        AGREES if own.twins.high < 0.9 else DIFFERS,
        f"Twins {plain(own.twins)}" + (": broken, but former twins stay partly alike." if partly else "."),
    )


@claim("Appendix C", "Some new filters stay symmetrical, so that a little noise on new values may help.", R2R, "VIZ-R2R(noise)")
def noise(found: Found) -> tuple[str, str, str]:
    own, noisy = found[R2R], found["VIZ-R2R(noise)"]
    alike, helps = own.twins.low > own.others.high, noisy.twins.high < own.twins.low
    return (
        f"Former twins end at cosine {signless(own.twins.value)} without noise, at {signless(noisy.twins.value)} with noise of "
        "a hundredth of the weights’ deviation.",
        AGREES if alike and helps else PARTLY if alike or helps else DIFFERS,
        whole(found, lambda row: row.twins, R2R, "VIZ-R2R(noise)")
        + f"; filters of different pairs {plain(own.others)}."
        + ("" if helps else " The noise makes no clear difference."),
    )


@claim("§5.4", "R2R’s new filters are often noisy.", R2R)
def rough(found: Found) -> tuple[str, str, str]:
    own = found[R2R]
    return (
        f"Share of high frequencies in new filters {own.rough_new.value:.2f}, in the first ones {own.rough_old.value:.2f}.",
        AGREES if own.rough_new.low > own.rough_old.high else DIFFERS,
        f"New filters {plain(own.rough_new)}, first filters {plain(own.rough_old)}.",
    )


@claim("§5.4, figure 4", "Network Morphism’s new filters are noisy or have small weights.", *METHODS)
def small_weights(found: Found) -> tuple[str, str, str]:
    own, zero = found[NETMORPH], found.get("VIZ-NetMorph(writers)")
    smaller, noisier = own.size.high < 1, own.rough_new.low > own.rough_old.high
    dead = zero is not None and zero.size.high < 0.01
    return (
        f"With zero readers their size is {own.size.value:.2f} of the first filters’, their share of high frequencies "
        f"{own.rough_new.value:.2f} against {own.rough_old.value:.2f}."
        + (" With zero writers, as in the figure, they stay zero." if dead else ""),
        AGREES if smaller or noisier else DIFFERS,
        f"Sizes: {whole(found, lambda row: row.size, NETMORPH, R2R, NET2NET)}."
        + (
            " New filters that are zero get no gradient through torch’s ReLU, whose slope at zero is zero: that run was "
            "ended after 20 epochs."
            if dead
            else ""
        ),
    )


@claim("§5.4", "Initial values of a larger scale lose the first 16 filters.", R2R, "VIZ-R2R(scale10)")
def large_scale(found: Found) -> tuple[str, str, str]:
    own, usual = found["VIZ-R2R(scale10)"], found[R2R]
    scales = [arm for arm in found if arm.startswith("VIZ-R2R(scale")]
    return (
        f"Mean cosine before and at the end: {own.kept.value:.2f} at ten times the scale, {usual.kept.value:.2f} as usual.",
        AGREES if own.kept.high < 0.5 else PARTLY if own.kept.high < usual.kept.low else DIFFERS,
        whole(found, lambda row: row.kept, R2R, *scales) + ".",
    )


FILTER_CLAIMS = (diverse, persist, net2net_shape, symmetry, noise, rough, small_weights, large_scale)
