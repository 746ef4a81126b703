"""The arms of the study: sizes at the start, growths at shares of the run, rates. All of them are data.

    scratch@2000            the large model from the beginning, 2,000 steps
    stay-half@2200          half of the layers from the beginning to the end, for about the FLOPs of depth-two@2000
    depth-two@2000          3 layers at first, 6 from 40 % of the steps on, 12 from 70 %; copies that fade in
    reuse-depth@400         from a finished small model, whose own training is not counted: grown at once, trained for 400 steps
    reuse-on@400            the same small model, trained on as it is

Every arm has one peak rate, a warm-up, and a linear decay to zero over the last fifth of its steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from experiments.lm.gpt import Size

STABLE = 0.8  # share of the steps before the decay


@dataclass(frozen=True)
class Growth:
    """A growth: to how many layers and in which way, and what is widened by which factor.

    how: new blocks are "copy" (of a neighbour; exact with `fade`), "zeroed" copies (what writes to the stream is zero), copies
    with "gamma" = 0, "pairs" (R2R), "random". widen: pairs of a kind of volume and a factor, by `method`.
    state: of the optimizer, "carried" (new blocks start without), "copied" (also to copies of blocks) or "fresh".
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
    rate: float
    budgets: tuple[int, ...]  # steps of scratch
    text: str  # "source code" or "shakespeare"


SETTINGS = {
    "small": Setting(Size(12, 384, 6, 1536), 64, 512, 100, 200, 2e-3, (1200, 1600, 2000, 2400, 3200), "source code"),
    "large": Setting(Size(16, 768, 12, 3072), 64, 512, 100, 200, 1e-3, (1200, 1600, 2000, 2400), "source code"),
    # rate: the best of 3e-3, 6e-3, 1e-2, 1.5e-2 and 2.5e-2, for scratch and for depth-two, 400 steps, seed 7
    "cpu": Setting(Size(8, 48, 6, 192, 8), 16, 64, 40, 40, 1.5e-2, (240, 320, 400, 560), "shakespeare"),
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
    return Arm(f"{name}@{steps}", layers(setting.large, first), steps, growths, setting.rate)


def narrow(size: Size, factor: float) -> Size:
    """A model that is narrower by a factor in everything: stream, heads and hidden units."""
    return replace(size, width=round(size.width / factor), heads=round(size.heads / factor), hidden=round(size.hidden / factor))


def whole_width(factor: float) -> tuple[tuple[str, float], ...]:
    return (("width", factor), ("heads", factor), ("mlp", factor))


def arms(setting: Setting) -> list[Arm]:
    """All arms of a setting."""
    large, rate, middle = setting.large, setting.rate, setting.budgets[2]
    deep = large.layers
    quarter, half = max(deep // 4, 1), deep // 2
    two = ((0.0, quarter), (0.4, half), (0.7, deep))
    found = [Arm(f"scratch@{steps}", large, steps, (), rate) for steps in setting.budgets]
    for factor in (0.5, 1.5):
        found.append(Arm(f"scratch-rate{factor:g}@{middle}", large, middle, (), rate * factor))
    for steps in setting.budgets[-3:]:
        found.append(depth(setting, "depth-two", steps, two))
    for name, count, times in (("half", half, 1.1), ("quarter", quarter, 2.2)):  # about as many FLOPs as depth-two
        steps = round(times * middle)
        found.append(Arm(f"stay-{name}@{steps}", layers(large, count), steps, (), rate))
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
        depth(setting, "depth-two-copied", middle, two, state="copied"),
        depth(setting, "depth-two-fade4", middle, two, fade=max(setting.fade // 4, 1)),
    ]
    found += [replace(depth(setting, f"depth-two-rate{f:g}", middle, two), rate=rate * f) for f in (0.5, 1.5)]
    for factor in (2.0, 1.5):
        for method in ("auto", "netmorph", "mean", *(("net2net",) if factor == 2 else ())):  # copies of a stream are whole
            growth = Growth(widen=whole_width(factor), method=method)
            small = narrow(large, factor)
            found.append(Arm(f"width{factor:g}-{method}@{middle}", small, middle, ((0.5, growth),), rate))
    for factor in (2.0, 1.5):
        growth = Growth(widen=whole_width(factor), fade=setting.fade)
        found.append(Arm(f"width{factor:g}-fade@{middle}", narrow(large, factor), middle, ((0.5, growth),), rate))
    both = Growth(layers=deep, widen=whole_width(2.0), fade=setting.fade)
    found.append(Arm(f"depth-and-width@{middle}", layers(narrow(large, 2.0), half), middle, ((0.5, both),), rate))
    found += [replace(arm, name=f"muon-{arm.name}", optimizer="muon") for arm in found if arm.name in _of_muon(setting)]
    found += reuse(setting)
    for kind, start in (("mlp", replace(large, hidden=large.hidden // 2)), ("heads", replace(large, heads=large.heads // 2))):
        found.append(Arm(f"{kind}@{middle}", start, middle, ((0.5, Growth(widen=((kind, 2.0),))),), rate))
    return found


def _of_muon(setting: Setting) -> list[str]:
    """Arms that are run again with Muon: enough of scratch for an interpolation, and the main growths."""
    middle = setting.budgets[2]
    scratch = [f"scratch@{steps}" for steps in setting.budgets]
    return [*scratch, f"depth-two@{middle}", f"depth-two-copy@{middle}", f"width2-auto@{middle}"]


def reuse(setting: Setting) -> list[Arm]:
    """Arms that start from a finished small model: half the layers, or half the width."""
    large, rate, trained = setting.large, setting.rate, setting.budgets[-1]
    shallow, thin = layers(large, large.layers // 2), narrow(large, 2.0)
    ways = {
        "depth": (shallow, Growth(layers=large.layers, fade=setting.fade)),
        "depth-random": (shallow, Growth(layers=large.layers, how="random")),
        "width2": (thin, Growth(widen=whole_width(2.0))),
    }
    found: list[Arm] = []
    for steps in (setting.budgets[0] // 4, setting.budgets[0] // 2, setting.budgets[0]):
        found += [
            Arm(f"reuse-on-{name}@{steps}", size, steps, (), rate, trained=trained)
            for name, size in (("shallow", shallow), ("thin", thin))
        ]
        for name, (size, growth) in ways.items():
            found.append(Arm(f"reuse-{name}@{steps}", size, steps, ((0.0, growth),), rate, trained=trained))
    return found
