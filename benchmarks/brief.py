"""How far a growth moves outputs by rounding alone: what the floor of a run's brief check has to let through.

A run (`outgrow.Run`) that has rehearsed a growth compares one pass before it with one after it, in eval mode, on a part of the
example. It passes at once what moves no output by more than 32 units in the last place (ulps) of the largest one; only above
that the network's own sensitivity is measured, which takes another pass. Here eleven of timm's models are widened by half, and
deepened by a block of their own kind in the middle of those places that take one, in float32: with timm's initial weights, and
with all of them moved at random (`coverage.randomise`), since some of timm's are zero, and hide what is before them. All is
exact on paper, so that what is measured is rounding.

    python -m benchmarks.brief            # about ten minutes; writes results/brief.json
"""

from __future__ import annotations

import json
import platform
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import outgrow
from benchmarks.coverage import import_timm, randomise
from benchmarks.speed import processor, say
from outgrow.verify.outputs import FLOOR

RESULTS = Path(__file__).parent / "results" / "brief.json"
FACTOR, THREADS, SEEDS = 1.5, 1, (0, 1, 2)
MODELS = (
    "resnet18",
    "vgg11",
    "densenet121",
    "mobilenetv3_small_100",
    "efficientnet_b0",
    "regnety_002",
    "convnext_atto",
    "vit_tiny_patch16_224",
    "swin_tiny_patch4_window7_224",
    "mixer_s32_224",
    "poolformer_s12",
)


def build(name: str, weights: str, seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model, example = import_timm().create_model(name), torch.randn(2, 3, 224, 224)
    if weights == "moved":
        randomise(model, seed)
    return model, example


def middle(model: Any, example: Any) -> str | None:
    """A place that takes a block of the model's own kind, in the middle of them."""
    found = [place.name for place in outgrow.places(model, example[:1]) if place.own]
    return found[len(found) // 2] if found else None


def measure(name: str, what: str, after: str | None, weights: str, seed: int) -> dict[str, Any]:
    model, example = build(name, weights, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grow = outgrow.Widen("*", factor=FACTOR) if after is None else outgrow.Deepen(after)
    run = outgrow.Run(model, example, optimizer, [outgrow.At(step=1, grow=[grow])], seed=seed, quiet=True)
    passes: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(lambda _, args: None if args[0].is_meta else passes.append(tuple(args[0].shape)))
    run.step()
    (record,) = run.records
    return {
        "model": name,
        "what": what,
        "after": after,
        "weights": weights,
        "seed": seed,
        "ulps": record.error / torch.finfo(torch.float32).eps,
        "passes": len(passes),  # two, or three if the sensitivity was measured; six of a thorough check
        "part": list(passes[0]),
        "parameters": list(record.parameters),
    }


def summary(arms: list[dict[str, Any]]) -> dict[str, Any]:
    brief = [arm for arm in arms if arm["passes"] <= 3]
    worst = max(brief, key=lambda arm: arm["ulps"])
    return {
        "models": len({arm["model"] for arm in brief}),
        "growths": len(brief),
        "largest_ulps": worst["ulps"],
        "largest": f"{worst['model']}, {worst['what']}",
        "over_the_floor": sum(arm["ulps"] > FLOOR for arm in brief),
        "thorough": len(arms) - len(brief),
    }


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(THREADS)
    arms = []
    for name in MODELS:
        after = middle(*build(name, "initial", 0))
        for what in ("widen", "deepen") if after is not None else ("widen",):
            for weights in ("initial", "moved"):
                for seed in SEEDS:
                    arms.append(measure(name, what, after if what == "deepen" else None, weights, seed))
                found = [arm["ulps"] for arm in arms[-len(SEEDS) :]]
                say(f"{name}, {what}, {weights}: {max(found):.1f} ulps, {arms[-1]['passes']} passes on {arms[-1]['part']}")
    results = {
        "command": "python -m benchmarks.brief",
        "versions": {name: version(name) for name in ("torch", "numpy", "timm", "outgrow")},
        "machine": {"python": platform.python_version(), "system": platform.platform(), "processor": processor()},
        "configuration": {
            "dtype": "float32",
            "threads": THREADS,
            "factor": FACTOR,
            "example": [2, 3, 224, 224],
            "floor": FLOOR,
        },
        "summary": summary(arms),
        "arms": arms,
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    say(json.dumps(results["summary"]))


if __name__ == "__main__":
    main()
