"""The arms of the study: sizes at the start, growths at shares of the run, rates. All of them are data.

    scratch@2000            the large model from the beginning, 2,000 steps
    stay-half@2200          half of the layers from the beginning to the end, for about the FLOPs of depth-two@2000
    depth-two@2000          3 layers at first, 6 from 40 % of the steps on, 12 from 70 %; copies that fade in
    reuse-depth@400         from a finished small model, whose own training is not counted: grown at once, trained for 400 steps
    reuse-on@400            the same small model, trained on as it is

Every arm has one peak rate, a warm-up, and a linear decay to zero over the last fifth of its steps. Models from scratch, those
that never grow and those that grow are tuned apart (`tuning.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from experiments.lm.gpt import Size

STABLE = 0.8  # share of the steps before the decay


@dataclass(frozen=True)
class Growth:
    """A growth: to how many layers and in which way, and what is widened by which factor.

    how: new blocks are "copy" (of a neighbour; exact with `fade`), "zeroed" copies (what writes to the stream is zero), copies
    with "gamma" = 0, "pairs" (R2R), "random". widen: pairs of a kind of volume and a factor, by `method`.
    state: of the optimizer, "carried" (new blocks start without), "copied" (also to copies of blocks), "fresh", or "rewarmed":
    carried, but that of new entries begins at zero, and their rate rises from zero over as many steps as a fade takes.
    """

    layers: int | None = None
    how: str = "copy"
    order: str = "interleave"
    fade: int | None = None
    widen: tuple[tuple[str, float], ...] = ()
    method: str = "auto"
    state: str = "carried"


@dataclass(frozen=True)
class Arm:
    """A run: `steps` in all; each growth at a share of them.

    trained: steps of an earlier run of the start, with a rate that fell to zero. They are not counted.
    """

    name: str
    start: Size
    steps: int
    growths: tuple[tuple[float, Growth], ...] = ()
    rate: float = 2e-3
    decay: float = 0.1
    optimizer: str = "adamw"
    trained: int = 0

    def at(self, steps: int) -> Arm:
        """The same arm with another number of steps."""
        return replace(self, name=f"{self.name.partition('@')[0]}@{steps}", steps=steps)


@dataclass(frozen=True)
class Setting:
    """A size of the study: the large model, batches, and the arms' usual settings."""

    large: Size
    batch: int
    context: int
    warm_up: int
    fade: int
    rate: float  # where nothing was tuned
    budgets: tuple[int, ...]  # steps of scratch; most arms have the third
    grown: tuple[int, ...]  # budgets of the main growth
    stay: tuple[int, ...]  # budgets whose FLOPs models get that never grow
    text: str  # "source code" or "shakespeare"


@dataclass(frozen=True)
class Tuned:
    """Peak rate and weight decay of one kind of runs."""

    rate: float
    decay: float = 0.1


SETTINGS = {
    # 31 bytes per parameter at the longest budget of scratch
    "small": Setting(
        Size(12, 256, 4, 1024),
        64,
        512,
        100,
        200,
        4e-3,
        (1500, 2200, 3000, 6000),
        (1500, 3000, 6000),
        (3000, 6000),
        "source code",
    ),
    "large": Setting(
        Size(16, 768, 12, 3072), 64, 512, 100, 200, 1e-3, (1200, 1600, 2000, 2400), (1600, 2000, 2400), (2000,), "source code"
    ),
    # rate: the best of 3e-3, 6e-3, 1e-2, 1.5e-2 and 2.5e-2, for scratch and for depth-two, 400 steps, seed 7
    "cpu": Setting(
        Size(8, 48, 6, 192, 8), 16, 64, 40, 40, 1.5e-2, (240, 320, 400, 560), (320, 400, 560), (400,), "shakespeare"
    ),
}
MAIN = (  # names before the @: enough for a comparison in a quarter of an hour of one core with the setting "cpu"
    "scratch",
    "stay-half",
    "stay-quarter",
    "depth-two",
    "depth-one",
    "depth-two-zeroed",
    "depth-two-pairs",
    "depth-two-copy",
    "depth-two-random",
    "width2-net2net",
)


def layers(size: Size, count: int) -> Size:
    return replace(size, layers=count)


def depth(setting: Setting, name: str, steps: int, stages: tuple[tuple[float, int], ...], **options: Any) -> Arm:
    """Deepened from the first number of layers (at share 0) through the others."""
    options = {"fade": setting.fade, **options}
    (_, first), *rest = stages
    growths = tuple((share, Growth(layers=count, **options)) for share, count in rest)
    return Arm(f"{name}@{steps}", layers(setting.large, first), steps, growths)


def narrow(size: Size, factor: float) -> Size:
    """A model that is narrower by a factor in everything: stream, heads and hidden units."""
    return replace(size, width=round(size.width / factor), heads=round(size.heads / factor), hidden=round(size.hidden / factor))


def whole_width(factor: float) -> tuple[tuple[str, float], ...]:
    return (("width", factor), ("heads", factor), ("mlp", factor))


KINDS = ("scratch", "stay", "grown")  # of runs; each is tuned for itself


def kind_of(arm: Arm) -> str:
    """A model that is trained on after a finished run, with or without a growth, is one that grows."""
    if arm.growths or arm.trained:
        return "grown"
    return "stay" if arm.name.removeprefix("muon-").startswith("stay-") else "scratch"


def arms(setting: Setting, tuned: Mapping[str, Tuned] | None = None) -> list[Arm]:
    """All arms of a setting, each with the rate and the weight decay of its kind."""
    own = {kind: Tuned(setting.rate) for kind in KINDS} | dict(tuned or {})
    found = [replace(arm, rate=own[kind_of(arm)].rate, decay=own[kind_of(arm)].decay) for arm in untuned(setting)]
    middle = setting.budgets[2]
    for name in ("scratch", "depth-two"):
        (arm,) = (arm for arm in found if arm.name == f"{name}@{middle}")
        found += [replace(arm, name=f"{name}-rate{factor:g}@{middle}", rate=arm.rate * factor) for factor in (0.5, 1.5)]
    return found


def untuned(setting: Setting) -> list[Arm]:
    large, middle = setting.large, setting.budgets[2]
    found = [Arm(f"scratch@{steps}", large, steps) for steps in setting.budgets]
    found += deepened(setting) + widened(setting)
    for budget in setting.stay:  # about as many FLOPs as depth-two
        for name, count, times in (("half", large.layers // 2, 1.1), ("quarter", max(large.layers // 4, 1), 2.2)):
            steps = round(times * budget)
            found.append(Arm(f"stay-{name}@{steps}", layers(large, count), steps))
    both = Growth(layers=large.layers, widen=whole_width(2.0), fade=setting.fade)
    found.append(Arm(f"depth-and-width@{middle}", layers(narrow(large, 2.0), large.layers // 2), middle, ((0.5, both),)))
    for kind, start in (("mlp", replace(large, hidden=large.hidden // 2)), ("heads", replace(large, heads=large.heads // 2))):
        found.append(Arm(f"{kind}@{middle}", start, middle, ((0.5, Growth(widen=((kind, 2.0),))),)))
    found += [replace(arm, name=f"muon-{arm.name}", optimizer="muon") for arm in found if arm.name in _of_muon(setting)]
    return found + reuse(setting)


def deepened(setting: Setting) -> list[Arm]:
    """Arms that are deepened in one, two or three stages, at several moments, in several ways."""
    deep, middle = setting.large.layers, setting.budgets[2]
    quarter, half = max(deep // 4, 1), deep // 2
    two = ((0.0, quarter), (0.4, half), (0.7, deep))
    found = [depth(setting, "depth-two", steps, two) for steps in setting.grown]
    found += [depth(setting, "depth-two-copied", steps, two, state="copied") for steps in setting.grown]
    found += [
        depth(setting, "depth-one", middle, ((0.0, half), (0.7, deep))),
        depth(setting, "depth-one-far", middle, ((0.0, quarter), (0.5, deep))),
        depth(setting, "depth-three", middle, ((0.0, 1), (0.1, quarter), (0.3, half), (0.55, deep))),
        depth(setting, "depth-two-late", middle, ((0.0, quarter), (0.5, half), (0.75, deep))),
        depth(setting, "depth-two-early", middle, ((0.0, quarter), (0.3, half), (0.55, deep))),
        depth(setting, "depth-two-stack", middle, two, order="stack"),
        depth(setting, "depth-two-zeroed", middle, two, how="zeroed", fade=None),
        depth(setting, "depth-two-gamma", middle, two, how="gamma", fade=None),
        depth(setting, "depth-two-pairs", middle, two, how="pairs", fade=None),
        depth(setting, "depth-two-copy", middle, two, fade=None),
        depth(setting, "depth-two-random", middle, two, how="random", fade=None),
        depth(setting, "depth-two-fresh", middle, two, state="fresh"),
        depth(setting, "depth-two-fade4", middle, two, fade=max(setting.fade // 4, 1)),
    ]
    return found


def widened(setting: Setting) -> list[Arm]:
    """Arms that are widened once, in the middle of the run: in everything, by two or by one and a half, in several ways."""
    large, middle = setting.large, setting.budgets[2]
    found = []
    for factor in (2.0, 1.5):
        small = narrow(large, factor)
        if (small.width * factor, small.heads * factor) != (large.width, large.heads):
            continue
        for method in ("auto", "netmorph", "mean", *(("net2net",) if factor == 2 else ())):  # copies of a stream are whole
            growth = Growth(widen=whole_width(factor), method=method)
            found.append(Arm(f"width{factor:g}-{method}@{middle}", small, middle, ((0.5, growth),)))
        growth = Growth(widen=whole_width(factor), fade=setting.fade)
        found.append(Arm(f"width{factor:g}-fade@{middle}", small, middle, ((0.5, growth),)))
        if factor == 2:  # as in SPARKLING: copies, which keep the size of activations
            growth = Growth(widen=whole_width(factor), method="net2net", state="rewarmed")
            found.append(Arm(f"width{factor:g}-net2net-rewarmed@{middle}", small, middle, ((0.5, growth),)))
    return found


def _of_muon(setting: Setting) -> list[str]:
    """Arms that are run again with Muon: enough of scratch for an interpolation, and the main growths."""
    middle = setting.budgets[2]
    scratch = [f"scratch@{steps}" for steps in setting.budgets]
    return [*scratch, f"depth-two@{middle}", f"depth-two-copy@{middle}", f"width2-auto@{middle}"]


def reuse(setting: Setting) -> list[Arm]:
    """Arms that start from a finished small model, with half of the layers or half of the width, and this model trained on for
    about as many FLOPs."""
    large, trained = setting.large, setting.budgets[2]
    shallow, thin = layers(large, large.layers // 2), narrow(large, 2.0)
    ways = {
        "depth": (shallow, Growth(layers=large.layers, fade=setting.fade, state="copied")),
        "depth-random": (shallow, Growth(layers=large.layers, how="random")),
        "width2": (thin, Growth(widen=whole_width(2.0))),
    }
    found: list[Arm] = []
    for steps in (setting.budgets[0] // 4, setting.budgets[0] // 2, setting.budgets[0]):
        for name, size, times in (("shallow", shallow, 2), ("thin", thin, 4)):
            found.append(Arm(f"reuse-on-{name}@{times * steps}", size, times * steps, trained=trained))
        for name, (size, growth) in ways.items():
            found.append(Arm(f"reuse-{name}@{steps}", size, steps, ((0.0, growth),), trained=trained))
    return found
