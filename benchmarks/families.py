"""What a family costs: its memory beside that of its largest member, and a step of a member beside that member alone.

    memory of a family ≤ 1.1 × its largest member,   step of a member ≤ 1.1 × the member alone

Memory is that of all tensors that are alive after a training step of every size: parameters, buffers, gradients and the moments
of AdamW; beside it, the same for a stand-alone copy of the largest member. A step is a forward and a backward pass, then the
optimizer; it is measured in turn with that of `family.extract(k)`, as processor time of one thread, and the ratio is the median
over pairs. Three kinds of steps are measured:

    passes, inside    the passes and the step inside a context of `family.alone(k, optimizer)`
    step              the same with the context itself: it is entered and left for each step
    plain             a step without a context, in which the optimizer updates all entries of each parameter

    python -m benchmarks.families            # writes results/families.json and docs/results/families.md
    python -m benchmarks.families gpt        # one of the models, beside the results that are there
    python -m benchmarks.families --table    # only write the page again, also from experiments/results/families.json
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from benchmarks.speed import processor, say, spread

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "families.json"
TRAINED = HERE.parent / "experiments" / "results" / "families.json"
PAGE = HERE.parent / "docs" / "results" / "families.md"
LIMIT = 1.1
PAIRS, WARM = 5, 2
SECONDS = 2.0  # short steps are repeated for about so long
KINDS = ("passes", "inside", "step", "plain")
Built = tuple[Any, Any, list[Any]]  # a model, a batch, and the transforms to each further size


def gpt() -> Built:
    """Heads and hidden units of a language model; 1,024 bytes per step."""
    import torch

    import outgrow
    from experiments.lm.gpt import Size
    from experiments.lm.gpt import build as build_gpt

    sizes = [[outgrow.Widen(kind="heads", factor=2), outgrow.Widen(kind="mlp", factor=2)] for _ in range(3)]
    return build_gpt(Size(4, 128, 2, 128, 16), 128, 0), torch.randint(0, 256, (8, 128)), sizes


def resnet() -> Built:
    """All channels of timm's ResNet-18 at a quarter of its width; 128 images of 64 × 64 per step."""
    import torch

    import outgrow
    from benchmarks.coverage import import_timm

    import_timm()
    from timm.models.resnet import BasicBlock, ResNet

    model = ResNet(BasicBlock, (2, 2, 2, 2), num_classes=10, channels=(16, 32, 64, 128))
    return model, torch.randn(128, 3, 64, 64), [outgrow.Widen("*", factor=factor) for factor in (1.25, 1.2, 4 / 3)]


def resnet_few() -> Built:
    """The same with 16 images per step, and a largest member three times as wide as the smallest."""
    import outgrow

    model, x, _ = resnet()
    return model, x[:16], [outgrow.Widen("*", factor=factor) for factor in (1.5, 4 / 3, 1.5)]


def blocks() -> Built:
    """Blocks of a language model, which smaller members skip; 1,024 bytes per step."""
    import outgrow

    model, x, _ = gpt()
    return model, x, [outgrow.Deepen(layers=layers) for layers in (6, 8, 12)]


def mlp() -> Built:
    """Two hidden layers of 128, 256 and 512 units; 256 vectors per step."""
    import torch
    from torch import nn

    import outgrow

    layers = (nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    return nn.Sequential(*layers), torch.randn(256, 64), [outgrow.Widen("*", factor=2), outgrow.Widen("*", factor=2)]


MODELS: dict[str, Callable[[], Built]] = {
    "gpt": gpt,
    "resnet": resnet,
    "resnet, few images": resnet_few,
    "blocks": blocks,
    "mlp": mlp,
}


def alive() -> int:
    """Bytes of all tensors that Python holds, each storage once."""
    import torch

    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and not thing.is_meta:
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def step(model: Any, optimizer: Any, x: Any) -> tuple[float, float]:
    """Processor seconds of both passes, and of a whole step."""
    start = time.process_time()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    passes = time.process_time()
    optimizer.step()
    return passes - start, time.process_time() - start


def alone_step(family: Any, number: int, optimizer: Any, x: Any) -> tuple[float, float, float]:
    """Processor seconds of the passes and of the step inside a context, and with the context."""
    start = time.process_time()
    with family.alone(number, optimizer) as member:
        inside = step(member, optimizer, x)
    return *inside, time.process_time() - start


def peak(family: Any, optimizer: Any, x: Any) -> int:
    """The most bytes that are alive after a step of all sizes, or after one of a size alone."""
    optimizer.zero_grad()
    for member in family:
        member(x).square().mean().backward()
    optimizer.step()
    found = [alive()]
    for number in range(len(family)):
        with family.alone(number, optimizer) as member:
            step(member, optimizer, x)
            found.append(alive())
    return max(found)


def measure(name: str) -> dict[str, Any]:
    import torch

    import outgrow

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x, sizes = MODELS[name]()
    before = alive() - sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    family = outgrow.Family(model, x[:2], *sizes)
    optimizer = torch.optim.AdamW(family.parameters())
    whole = peak(family, optimizer, x) - before
    with_family = alive()
    largest = family.extract(-1)
    apart = torch.optim.AdamW(largest.parameters())
    step(largest, apart, x)
    alone = alive() - with_family
    del largest, apart
    members = [member_costs(family, number, optimizer, x) for number in range(len(family))]
    for number, member in enumerate(members):
        say(f"{name} {number}: " + ", ".join(f"{kind} × {member[kind]['median']:.3f}" for kind in KINDS))
    return {"memory": {"family": whole, "largest": alone}, "members": members, "what": (MODELS[name].__doc__ or "").strip()}


def member_costs(family: Any, number: int, optimizer: Any, x: Any) -> dict[str, Any]:
    """Ratios of the steps of a member to those of the same network alone."""
    import torch

    copy = family.extract(number)
    own = torch.optim.AdamW(copy.parameters())
    pairs = max(PAIRS, min(300, round(SECONDS / max(step(copy, own, x)[1] for _ in range(3)))))
    pairs_of = {
        "alone": lambda: alone_step(family, number, optimizer, x),
        "plain": lambda: step(family[number], optimizer, x),
    }
    ratios: dict[str, list[float]] = {kind: [] for kind in KINDS}
    times = []
    for way, measured in pairs_of.items():
        for turn in range(pairs + WARM):
            found, alone = measured(), step(copy, own, x)
            if turn < WARM:
                continue
            times.append(alone)
            if way == "plain":
                ratios["plain"].append(found[1] / alone[1])
                continue
            for kind, one, other in zip(KINDS, found, (alone[0], alone[1], alone[1]), strict=False):
                ratios[kind].append(one / other)
    optimizer.zero_grad()
    return {
        "parameters": sum(parameter.numel() for parameter in copy.parameters()),
        **{kind: spread(found) for kind, found in ratios.items()},
        "alone_s": [statistics.median(one) for one in zip(*times, strict=True)],
        "pairs": pairs,
    }


def measure_all(names: Sequence[str], before: dict[str, Any]) -> dict[str, Any]:
    """Of some models; what was measured of the others before is kept."""
    found = {**before.get("models", {}), **{name: measure(name) for name in names}}
    return {
        "command": "python -m benchmarks.families",
        "versions": {name: version(name) for name in ("torch", "numpy", "timm", "outgrow")},
        "machine": {"python": platform.python_version(), "system": platform.platform(), "processor": processor()},
        "configuration": {"optimizer": "AdamW", "dtype": "float32", "threads": 1, "seed": 0},
        "limit": LIMIT,
        "models": {name: found[name] for name in MODELS if name in found},
    }


def costs(results: dict[str, Any]) -> list[str]:
    rows, memory = [], []
    limit = results["limit"]
    for name, found in results["models"].items():
        family, largest = found["memory"]["family"], found["memory"]["largest"]
        ratio = family / largest
        verdict = "pass" if ratio <= limit else "FAIL"
        memory.append((name, found["what"], f"{largest / 2**20:.1f} MiB", f"{ratio:.3f}", verdict))
        for number, member in enumerate(found["members"]):
            shown = [f"{one['median']:.2f} ({one['best']:.2f}–{one['worst']:.2f})" for one in map(member.get, KINDS)]
            verdict = "pass" if member["step"]["median"] <= limit else "FAIL"
            share = 1 - member["alone_s"][0] / member["alone_s"][1]
            rows.append(
                (
                    name,
                    str(number),
                    f"{member['parameters']:,}",
                    f"{1e3 * member['alone_s'][1]:,.{1 if member['alone_s'][1] < 0.01 else 0}f} ms",
                    f"{share:.0%}",
                    *shown[:3],
                    verdict,
                    shown[3],
                )
            )
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    return [
        f"Made by `{results['command']}` from `benchmarks/results/families.json`; how it is measured is described in",
        f"`benchmarks/families.py`. {versions}; AdamW, float32, one thread; {results['machine']['processor']}.",
        "",
        "Memory of all tensors after a step of every size (parameters, gradients, moments, buffers), beside the same for the",
        "largest member alone:",
        "",
        *table(("model", "what grows", "largest alone", "family / largest", f"≤ {limit}"), memory),
        "",
        "A step of a member of the family beside a step of the same network alone: the median of the ratios of pairs, with the",
        "smallest and the largest in brackets. The passes, and the step inside a context of `family.alone(k, optimizer)`;",
        "the step with a context of its own, for which the limit is; and a plain step, in which the optimizer updates all",
        "entries of each parameter, whichever member was trained:",
        "",
        *table(
            (
                *("model", "member", "parameters", "step alone", "optimizer's part of it", "both passes", "inside"),
                *("a context per step", f"≤ {limit}", "plain step"),
            ),
            rows,
        ),
        "",
        "A step inside a context is that of the stand-alone network. Entering and leaving the context takes Python some",
        "microseconds for each parameter, which counts where a whole step takes a few milliseconds. Several steps of the same",
        "member can be made in one context.",
    ]


def mean_and_spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def trained(results: dict[str, Any]) -> list[str]:
    """The tables of experiments/families.py."""
    setting, lines = results["configuration"], []
    for question in dict.fromkeys(run["question"] for run in results["runs"]):
        runs = [run for run in results["runs"] if run["question"] == question]
        numbers = range(4) if question == "four sizes" else (1, 3)
        names = [f"{results['parameters'][number]:,} parameters" for number in numbers]
        rows = []
        for arm in dict.fromkeys(run["arm"] for run in runs):
            own = [run for run in runs if run["arm"] == arm]
            by_size = zip(*(run["measures"] for run in own), strict=True)
            rows.append((arm, f"{own[0]['flops'] / 1e9:.1f} G", *(mean_and_spread(list(found)) for found in by_size)))
        lines += ["", f"### {question.capitalize()}", "", *table(("arm", "FLOPs", *names), rows)]
    count = len({run["seed"] for run in results["runs"]})
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    return [
        f"Made by `{results['command']}` from `experiments/results/families.json`;",
        f"`experiments/families.py` describes the arms. {versions};",
        f"{setting['data']}, N = {setting['steps']} steps of {setting['batch']} samples, {setting['optimizer']}.",
        f"Shown is the {results['measure']}: mean ± standard deviation over {count} seeds.",
        *lines,
    ]


def page() -> str:
    """Both parts, from the files of results that are there."""
    lines = ["# Families", "", "## What they cost", "", *costs(json.loads(RESULTS.read_text(encoding="utf-8")))]
    if TRAINED.exists():
        lines += ["", "## What they learn", "", *trained(json.loads(TRAINED.read_text(encoding="utf-8")))]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"some of {', '.join(map(repr, MODELS))} (default: all)")
    parser.add_argument("--table", action="store_true", help="only write the page again")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if not options.table:
        before = json.loads(RESULTS.read_text(encoding="utf-8")) if options.models else {}
        found = measure_all(options.models or list(MODELS), before)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    say(f"see {PAGE.name}")


if __name__ == "__main__":
    main()
