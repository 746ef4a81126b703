"""The growths that the no-spike benchmark compares: what each does to each of the two networks.

Groups: "ours" are the library's methods; "paper" are forms as the paper prints them, to stand beside ours; "baseline" does not
preserve the function, or not exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import outgrow

FACTOR = 1.5
KERNEL = 5
FADES = (50, 200)
NOISE = 0.05

PLACES: Mapping[str, Mapping[str, Any]] = {
    "resnet": {
        "widen": {"all": "*"},
        "fold": ("conv1", "layer1.0.conv2", "layer1.1.conv2", "layer2.0.conv2", "layer2.1.conv2"),
        "deepen": ("layer1.1", "layer2.1"),
        "split": ("layer1.1.conv1", "layer2.1.conv1"),
        "branch": ("layer1", "layer2"),
        "kernel": tuple(f"layer{stage}.{block}.conv{conv}" for stage in (1, 2) for block in (0, 1) for conv in (1, 2)),
    },
    "vit": {
        "widen": {"all": "*", "mlp": "blocks.*.mlp.fc1"},
        "fold": (),
        "deepen": ("blocks.3",),
        "split": ("blocks.3.mlp.fc1",),
        "branch": ("blocks.2.mlp", "blocks.3.mlp"),
        "kernel": (),
    },
}

WIDENINGS: tuple[tuple[str, str, Any], ...] = (
    ("auto", "ours", "auto"),
    ("r2r", "ours", "r2r"),
    ("r2r, copies", "ours", outgrow.R2R(init="copy")),
    ("r2r, scale 0.5", "ours", outgrow.R2R(scale=0.5)),
    ("r2r, as printed", "paper", outgrow.R2R(scale=1 / 3)),  # U(−s/√3, s/√3), whose deviation is s/3
    ("net2net", "ours", "net2net"),
    ("net2net, random split", "ours", outgrow.Net2Net(split="random")),
    (f"net2net, noise {NOISE}", "baseline", outgrow.Net2Net(noise=NOISE)),
    ("netmorph", "ours", outgrow.NetMorph()),
    ("netmorph, zero writers", "paper", outgrow.NetMorph(zero="writers")),
    ("mean", "ours", "mean"),
    ("random", "baseline", "random"),
)

DEEPENINGS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("r2r", "ours", {"method": "r2r"}),
    ("r2r, as printed", "paper", {"method": "r2r-paper"}),
    *((f"copy, fade {steps}", "ours", {"method": "copy", "fade": steps}) for steps in FADES),
    ("residual block", "ours", {"method": "residual"}),
    ("net2net", "ours", {"method": "net2net"}),
    ("copy", "baseline", {"method": "copy"}),
    ("random", "baseline", {"method": "random"}),
)


@dataclass(frozen=True)
class Arm:
    """One growth: its transforms are carried out as one. The twin has none."""

    name: str
    kind: str
    group: str
    transforms: tuple[Any, ...] = ()


TWIN = Arm("not grown", "twin", "twin")


def arms_of(model: str) -> list[Arm]:
    return [TWIN, *_widenings(model), *_deepenings(model)]


def _widenings(model: str) -> Iterator[Arm]:
    places = PLACES[model]
    for label, where in places["widen"].items():
        kind = f"widen {label}"
        for name, group, method in WIDENINGS:
            yield Arm(name, kind, group, (outgrow.Widen(where, factor=FACTOR, method=method),))
        for method, fade in (("auto", FADES[0]), ("random", FADES[0]), ("random", FADES[1])):
            request = outgrow.Widen(where, factor=FACTOR, method=method, fade=fade)
            yield Arm(f"{method}, fade {fade}", kind, "ours", (request,))
    if places["fold"]:
        request = outgrow.Widen(places["fold"], factor=FACTOR, method="r2r", residual="fold")
        yield Arm("r2r, folded residuals", "widen all", "paper", (request,))


def _deepenings(model: str) -> Iterator[Arm]:
    places = PLACES[model]
    for name, group, how in DEEPENINGS:
        yield Arm(name, "deepen", group, tuple(outgrow.Deepen(place, **how) for place in places["deepen"]))
    yield Arm("netmorph", "deepen", "ours", tuple(outgrow.Deepen(place, method="netmorph") for place in places["split"]))
    for method in ("r2r", "netmorph"):
        yield Arm(method, "branch", "ours", tuple(outgrow.Branch(place, method=method) for place in places["branch"]))
    if places["kernel"]:
        yield Arm(f"{KERNEL} × {KERNEL}", "kernel", "ours", tuple(outgrow.Kernel(place, KERNEL) for place in places["kernel"]))
