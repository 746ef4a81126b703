"""What large models cost before anything grows: volumes, places and plans of networks with many layers.

Everything here is Python over shapes, so that it is measured in CPU seconds of one thread, each in a new process, the best of a
few repetitions. Goals are times, except for two: what four times the layers cost, and how much memory a model of 7 B parameters
takes that is on the meta device. Beside the first stands the cost of one forward pass on the meta device that is watched,
operator by operator: the model's own Python, which runs for every layer whatever is known of the layers before it.

    python -m benchmarks.large            # all of it; writes results/large.json and docs/results/speed.md
    python -m benchmarks.large --jobs 12  # so many processes side by side: CPU seconds are what is counted
    python -m benchmarks.large --table    # only write docs/results/speed.md again
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.markdown import table

HERE = Path(__file__).parent
FAMILIES = json.loads((HERE / "timm_families.json").read_text())
RESULTS = HERE / "results" / "large.json"

LLAMA = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 32000}
MEDIUM = {"hidden_size": 1024, "intermediate_size": 2731, "num_attention_heads": 16, "vocab_size": 1000}
SEVEN_B = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "vocab_size": 32000}
PLACES = {"convnext_base": 224, "swin_base_patch4_window7_224": 224, "maxvit_tiny_rw_224": 224, "vit_base_patch16_224": 224}
SLOW = {
    "nasnetalarge": 331,
    "pnasnet5large": 331,
    "sam2_hiera_tiny": 896,
    "qwen3_vit_88m": 768,
    "naflexvit_base_patch16_parfac_gap": 384,
}
DEEPENED = {
    "vit_base_patch16_224": "blocks.5",
    "convnext_base": "stages.2.blocks.5",
    "swin_base_patch4_window7_224": "layers.2.blocks.5",
}
GROWN = {"104 M": LLAMA, "302 M": MEDIUM}
GOALS = {"llama": 3.0, "places": 5.0, "family": 60.0, "layers": 1.5, "meta_s": 30.0, "meta_gib": 2.0}
REPETITIONS = 2


def llama(layers: int, device: str = "cpu", sizes: dict[str, int] = LLAMA) -> tuple[Any, Any]:
    import torch
    from torch import nn

    from benchmarks.coverage import import_timm

    import_timm()  # Transformers imports torchvision too
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes)).eval()
    return model, {"input_ids": torch.arange(32).view(2, 16)}


def timm_model(name: str, size: int) -> tuple[Any, Any]:
    import torch

    from benchmarks.coverage import import_timm

    torch.manual_seed(0)
    return import_timm().create_model(name).eval(), torch.randn(1, 3, size, size)


def best(action: Callable[[], Any], repetitions: int = REPETITIONS) -> float:
    """CPU seconds of the quickest of some runs."""
    times = []
    for _ in range(repetitions):
        start = time.process_time()
        action()
        times.append(time.process_time() - start)
    return min(times)


def widened(make: Callable[[], tuple[Any, Any]]) -> tuple[float, Any, Any]:
    """CPU seconds of the quickest of some growths, each of a new model; the last growth, and its model."""
    import outgrow

    times = []
    for _ in range(REPETITIONS):
        model, example = make()
        start = time.process_time()
        growth = outgrow.widen(model, example, "*", factor=1.5)
        times.append(time.process_time() - start)
    return min(times), growth, model


def measure_layers(layers: str) -> dict[str, float]:
    import outgrow
    from outgrow.trace.record import record

    model, example = llama(int(layers))
    outgrow.volumes(*llama(1))  # what is imported and worked out once per process
    watched, found = best(lambda: record(model, example)), best(lambda: outgrow.volumes(model, example))
    seconds, growth, _ = widened(lambda: llama(int(layers)))
    return {"watched_s": watched, "volumes_s": found, "widen_s": seconds, "parameters": growth.parameters[0]}


def measure_grown(size: str) -> dict[str, float]:
    """A growth without optimizer state, beside a copy of the grown model and one of its forward passes."""
    import torch

    import outgrow

    outgrow.volumes(*llama(1))
    seconds, growth, model = widened(lambda: llama(24, sizes=GROWN[size]))
    example = llama(1)[1]

    def copy() -> None:
        _ = [torch.empty_like(parameter).copy_(parameter) for parameter in model.parameters()]

    with torch.no_grad():
        copied, passed = best(copy), best(lambda: model(**example))
    return {
        "widen_s": seconds,
        "copy_s": copied,
        "pass_s": passed,
        "before": growth.parameters[0],
        "after": growth.parameters[1],
    }


def measure_places(name: str) -> dict[str, float]:
    import outgrow

    model, example = timm_model(name, PLACES[name])
    return {"forward_s": best(lambda: model(example)), "places_s": best(lambda: outgrow.places(model, example))}


def measure_slow(name: str) -> dict[str, float]:
    return measure_model(name, SLOW[name])


def measure_family(name: str) -> dict[str, float]:
    """The smallest model of a family of timm's."""
    return measure_model(FAMILIES[name]["model"], FAMILIES[name]["input"][-1])


def measure_model(name: str, size: int) -> dict[str, float]:
    import outgrow

    model, example = timm_model(name, size)
    found = {
        "volumes_s": best(lambda: outgrow.volumes(model, example), 1),
        "places_s": best(lambda: outgrow.places(model, example), 1),
    }
    start = time.process_time()
    outgrow.widen(model, example, "*", factor=1.5, check=False)
    return {**found, "widen_s": time.process_time() - start}


def measure_deepened(name: str) -> dict[str, float]:
    import outgrow

    model, example = timm_model(name, 224)
    forward = best(lambda: model(example))
    start = time.process_time()
    outgrow.deepen(model, example, DEEPENED[name])
    return {"forward_s": forward, "deepen_s": time.process_time() - start}


def measure_meta(what: str) -> dict[str, float]:
    import outgrow

    model, example = llama(32, "meta", SEVEN_B)
    events = [
        outgrow.At(step=10, grow=[outgrow.Widen("*.mlp.*", factor=1.5)]),
        outgrow.At(step=20, grow=[outgrow.Deepen(after="model.layers.3")]),
    ]
    actions: dict[str, Callable[[], Any]] = {
        "volumes": lambda: outgrow.volumes(model, example),
        "places": lambda: outgrow.places(model, example),
        "timeline": lambda: outgrow.timeline(model, example, events),
    }
    seconds = best(actions[what], 1)
    return {"cpu_s": seconds, "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


MEASURES: dict[str, tuple[Callable[[str], dict[str, float]], tuple[str, ...]]] = {
    "layers": (measure_layers, ("24", "96")),
    "grown": (measure_grown, tuple(GROWN)),
    "places": (measure_places, tuple(PLACES)),
    "slow": (measure_slow, tuple(SLOW)),
    "deepened": (measure_deepened, tuple(DEEPENED)),
    "meta": (measure_meta, ("volumes", "places", "timeline")),
    "families": (measure_family, tuple(FAMILIES)),
}


def measure_one(what: str, name: str) -> dict[str, Any]:
    """In a new process; what can't be measured is noted with the last line of its error."""
    command = [sys.executable, "-m", "benchmarks.large", "--measure", what, name]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=False)
    failed = {"failed": (done.stderr.strip() or "no output").splitlines()[-1][:300]}
    found: dict[str, Any] = failed if done.returncode else json.loads(done.stdout.splitlines()[-1])
    print(what, name, found, file=sys.stderr, flush=True)
    return found


def measure_all(jobs: int) -> dict[str, Any]:
    from benchmarks.speed import processor  # which imports this file

    results: dict[str, Any] = {
        "command": f"python -m benchmarks.large --jobs {jobs}",
        "versions": {name: version(name) for name in ("torch", "timm", "transformers")},
        "machine": {"python": platform.python_version(), "processor": processor()},
        "threads": 1,
        "goals": GOALS,
    }
    with ThreadPoolExecutor(jobs) as pool:
        for what, (_, names) in MEASURES.items():
            found = pool.map(measure_one, [what] * len(names), names)
            results[what] = dict(zip(names, found, strict=True))
    return results


def verdicts(results: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Goal, what was measured, its figure, and whether it is met."""
    goals = results["goals"]
    rows: list[tuple[str, str, str, str]] = []

    def add(goal: str, model: str, value: float, limit: float, unit: str) -> None:
        rows.append((f"{goal} ≤ {limit:g}{unit}", model, f"{value:.2f}{unit}", "pass" if value <= limit else "FAIL"))

    few, many = results["layers"]["24"], results["layers"]["96"]
    add("`volumes`", "Llama, 24 layers", few["volumes_s"], goals["llama"], " s")
    add('`widen("*")`', "Llama, 24 layers", few["widen_s"], goals["llama"], " s")
    add("`volumes`, 96 layers over 24", "Llama", many["volumes_s"] / few["volumes_s"], goals["layers"], " ×")
    for name, item in results["places"].items():
        add("`places`", name, item["places_s"], goals["places"], " s")
    for name, item in results["slow"].items():
        for what in ("volumes", "places", "widen"):
            add(f"`{what}`", name, item[f"{what}_s"], goals["places" if what == "places" else "family"], " s")
    families = {name: item for name, item in results.get("families", {}).items() if "failed" not in item}
    for what in ("volumes", "places", "widen") if families else ():
        slowest = max(families, key=lambda name: families[name][f"{what}_s"])
        model = f"slowest of {len(families)} timm families: {slowest}"
        add(f"`{what}`", model, families[slowest][f"{what}_s"], goals["family"], " s")
    for what, item in results["meta"].items():
        add(f"`{what}` on the meta device", "Llama, 7 B", item["cpu_s"], goals["meta_s"], " s")
        add(f"memory of `{what}`", "Llama, 7 B, meta", item["peak_gib"], goals["meta_gib"], " GiB")
    return rows


def grown(results: dict[str, Any]) -> list[str]:
    """Growths without optimizer state: passes of the check and copies of the weights, both as large as the model."""
    rows = [
        (
            f"{item['before'] / 1e6:.0f} M → {item['after'] / 1e6:.0f} M",
            f"{item['widen_s']:.2f} s",
            f"{item['copy_s']:.2f} s",
            f"{item['widen_s'] / item['copy_s']:.1f} ×",
            f"{item['pass_s']:.2f} s",
        )
        for item in results.values()
    ]
    header = ("Llama, 24 layers", '`widen("*")`, checked', "a copy of the grown model", "ratio", "one pass of it")
    return [*table(header, rows), ""] if rows else []


def section(results: dict[str, Any]) -> list[str]:
    """The part of docs/results/speed.md that is about large models."""

    layers = results["layers"]
    failed = [f"{name} ({item['failed']})" for name, item in results.get("families", {}).items() if "failed" in item]
    versions = ", ".join(f"{name} {number}" for name, number in results.get("versions", {}).items())
    return [
        "## Large models",
        "",
        "Made by `benchmarks/large.py` from `benchmarks/results/large.json`: CPU seconds of one thread.",
        *([f"{versions}; {results['machine']['processor']}."] if versions else []),
        *([f"Not measured: {'; '.join(failed)}."] if failed else []),
        "",
        *table(("goal", "model", "measured", ""), [*verdicts(results)]),
        "",
        "Verdicts are worked out once per kind of block, so that volumes of further layers cost little more than watching",
        "these layers run. That remains: a layer's code is Python that may do anything, and nothing is taken for granted of a",
        "layer that was not watched. The column “watched” is that pass alone (on the meta device, without arithmetic).",
        "",
        *table(
            ("Llama", "parameters", "one pass, watched", "`volumes`", '`widen("*")`, checked'),
            [
                (
                    f"{count} layers",
                    f"{item['parameters'] / 1e6:.0f} M",
                    f"{item['watched_s']:.2f} s",
                    f"{item['volumes_s']:.2f} s",
                    f"{item['widen_s']:.2f} s",
                )
                for count, item in layers.items()
            ],
        ),
        "",
        *grown(results.get("grown", {})),
        "One block more, compared with the old model in eval and train mode:",
        "",
        *table(
            ("model", "a forward pass", "`deepen`"),
            [(name, f"{i['forward_s']:.2f} s", f"{i['deepen_s']:.2f} s") for name, i in results["deepened"].items()],
        ),
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only write docs/results/speed.md again")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--measure", nargs=2, metavar=("WHAT", "NAME"), help="one measurement, as JSON (for the benchmark)")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.measure:
        import torch

        torch.set_num_threads(1)
        what, name = arguments.measure
        print(json.dumps(MEASURES[what][0](name)))
        return
    if not arguments.table:
        RESULTS.write_text(json.dumps(measure_all(arguments.jobs), indent=1) + "\n")
    from benchmarks import speed

    speed.write_page()
    rows = verdicts(json.loads(RESULTS.read_text()))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    print(f"{sum(row[3] == 'pass' for row in rows)} of {len(rows)} goals met")


if __name__ == "__main__":
    main()
