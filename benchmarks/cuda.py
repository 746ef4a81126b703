"""A growth on a GPU: what it costs to carry out a plan, and how long a growing step holds training up.

Llamas of more than 500 M parameters with Adam's moments, in float32, on one CUDA device. In each repetition:

1. apply. The plan is carried out on the model and its optimizer's state (what is left of a growth when it has been rehearsed),
   then undone. Beside it, every tensor of the grown model and of its grown optimizer state is copied on the device, all
   copies alive at once. Both get their memory new from the driver (the allocator's cache is emptied before); the ratio with
   memory that the allocator has at hand is measured too.
2. stall. `outgrow.Run.step()` that grows, with the default check of outputs and without any, beside a usual training step.

    python -m benchmarks.cuda            # writes results/cuda.json and docs/results/cuda.md
    python -m benchmarks.cuda --table    # only write docs/results/cuda.md again
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from benchmarks.speed import say, spread

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "cuda.json"
PAGE = HERE.parent / "docs" / "results" / "cuda.md"

LIMIT = 1.5
REPETITIONS = 5
MODELS = {
    "0.6 B": {"hidden_size": 1280, "intermediate_size": 3456, "num_attention_heads": 20, "num_key_value_heads": 20},
    "1.3 B": {"hidden_size": 2048, "intermediate_size": 5504, "num_attention_heads": 16, "num_key_value_heads": 16},
}
COMMON = {"num_hidden_layers": 24, "vocab_size": 32000}
GROWTHS = {
    "MLPs × 1.5": ("widen", "model.layers.*.mlp.gate_proj"),
    "everything × 1.5": ("widen", "*"),
    "24 → 30 layers": ("deepen", "model.layers.11"),
}


def build(size: str) -> tuple[Any, Any, Any]:
    """The model, a batch, and Adam."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**COMMON, **MODELS[size]))
    ids = torch.randint(0, COMMON["vocab_size"], (2, 128), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return model, {"input_ids": ids, "labels": ids}, optimizer


def train(model: Any, example: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(**example).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def clock(action: Callable[[], Any]) -> tuple[float, Any]:
    import torch

    gc.collect()
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = action()
    torch.cuda.synchronize()
    return time.perf_counter() - start, result


def request(name: str) -> Any:
    import outgrow

    kind, where = GROWTHS[name]
    return outgrow.Widen(where, factor=1.5) if kind == "widen" else outgrow.Deepen(where, count=6)


def tensors(model: Any, optimizer: Any) -> list[Any]:
    import torch

    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, torch.Tensor)]
    return [tensor.detach() for tensor in (*model.parameters(), *model.buffers(), *state)]


def measure_apply(size: str, name: str, fresh: bool) -> dict[str, Any]:
    """A rehearsed growth carried out and undone, beside a copy of what it made; the first repetition warms up."""
    import torch

    import outgrow
    from outgrow.engine.carry_out import Work

    model, example, optimizer = build(size)
    train(model, example, optimizer)
    run = outgrow.Run(model, example, optimizer, [outgrow.At(step=1, grow=[request(name)])], check=False, quiet=True)
    ready, pairs = run._ready[0], []
    for _ in range(REPETITIONS + 1):
        work = Work(model, [], [optimizer], example)
        if fresh:
            torch.cuda.empty_cache()
        seconds, _ = clock(lambda work=work: [work.carry_out(step) for step in ready.steps])
        made = tensors(model, optimizer)
        held = sum(tensor.nbytes for tensor in made)
        if fresh:
            torch.cuda.empty_cache()
        copying, copies = clock(lambda made=made: [torch.empty_like(tensor).copy_(tensor) for tensor in made])
        del copies, made
        work.journal.undo()
        pairs.append((seconds, copying))
    pairs = pairs[1:]
    return {
        "apply_s": spread([a for a, _ in pairs]),
        "copy_s": spread([b for _, b in pairs]),
        "ratio": spread([a / b for a, b in pairs]),
        "bytes": held,
    }


def measure_stall(size: str, name: str, check: bool) -> dict[str, Any]:
    import torch

    import outgrow

    stalls, steps, after = [], [], []
    for _ in range(3):
        model, example, optimizer = build(size)
        before = sum(parameter.numel() for parameter in model.parameters())
        schedule = [outgrow.At(step=4, grow=[request(name)])]
        run = outgrow.Run(model, example, optimizer, schedule, check=check, quiet=True)
        for number in range(4):
            seconds, _ = clock(lambda m=model, e=example, o=optimizer: train(m, e, o))
            if number > 1:
                steps.append(seconds)
            stall, growth = clock(run.step)
        stalls.append(stall)
        after = [before, sum(parameter.numel() for parameter in model.parameters())]
        error = run.records[0].error
        del model, optimizer, run, growth
        gc.collect()
        torch.cuda.empty_cache()
    return {
        "stall_s": spread(stalls),
        "step_s": spread(steps),
        "parameters": after,
        "error": error,
    }


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "from its source"


def measure_all() -> dict[str, Any]:
    import torch

    results: dict[str, Any] = {
        "command": "python -m benchmarks.cuda",
        "versions": {name: installed(name) for name in ("torch", "transformers", "outgrow")},
        "machine": {"python": platform.python_version(), "device": torch.cuda.get_device_name(), "cuda": torch.version.cuda},
        "configuration": {
            "models": MODELS,
            "common": COMMON,
            "optimizer": "AdamW, fused",
            "dtype": "float32",
            "repetitions": REPETITIONS,
        },
        "limit": LIMIT,
        "apply": [],
        "stalls": [],
    }
    for size in MODELS:
        for name, (kind, _) in GROWTHS.items():
            for fresh in (True, False) if kind == "widen" else ():
                found = measure_apply(size, name, fresh)
                say(f"{size}, apply {name}, {'new' if fresh else 'recycled'}: {found['ratio']['median']:.2f} × the copy")
                results["apply"].append({"model": size, "growth": name, "memory": "new" if fresh else "recycled", **found})
                gc.collect()
                torch.cuda.empty_cache()
            for check in (True, False) if size == "0.6 B" else ():
                found = measure_stall(size, name, check)
                say(
                    f"stall {name}, check={check}: {found['stall_s']['median']:.3f} s, a step {found['step_s']['median']:.3f} s"
                )
                results["stalls"].append({"model": size, "growth": name, "check": check, **found})
    return results


def times(found: dict[str, float]) -> str:
    return f"{1e3 * found['median']:.0f} ms ({1e3 * found['best']:.0f}–{1e3 * found['worst']:.0f})"


def page(results: dict[str, Any]) -> str:
    machine = results["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    applied = [
        (
            arm["model"],
            arm["growth"],
            arm["memory"],
            f"{arm['bytes'] / 1e9:.1f} GB",
            times(arm["apply_s"]),
            times(arm["copy_s"]),
            f"{arm['ratio']['median']:.2f} ({arm['ratio']['best']:.2f}–{arm['ratio']['worst']:.2f})",
            ("pass" if arm["ratio"]["median"] <= results["limit"] else "FAIL") if arm["memory"] == "new" else "",
        )
        for arm in results["apply"]
    ]
    stalled = [
        (
            arm["growth"],
            "default" if arm["check"] else "none",
            " → ".join(f"{count / 1e6:.0f} M" for count in arm["parameters"]),
            times(arm["stall_s"]),
            times(arm["step_s"]),
        )
        for arm in results["stalls"]
    ]
    lines = [
        "# A growth on a GPU",
        "",
        "Written by `python -m benchmarks.cuda` from `benchmarks/results/cuda.json`. One "
        f"{machine['device']}, CUDA {machine['cuda']}, {versions}; Llamas of 24 layers, "
        f"{results['configuration']['optimizer']}, {results['configuration']['dtype']}.",
        "Medians, with the best and the worst repetition in brackets.",
        "",
        "## Carrying out a plan",
        "",
        "The model and both moments of Adam grow by a plan that a run has rehearsed. The copy is of every tensor of the grown",
        "model and its optimizer's state, on the device. With “new” memory both get theirs from the driver.",
        "",
        *table(("model", "growth", "memory", "bytes", "apply", "copy", "apply / copy", f"≤ {results['limit']:g}"), applied),
        "",
        "## The step that grows",
        "",
        "The call of `run.step()` that grows, beside a usual training step (two sequences of 128 tokens).",
        "",
        *table(("growth", "check of outputs", "parameters", "stall", "a step"), stalled),
        "",
        "## What follows by itself, and what does not",
        "",
        "Tested on this device (`pytest -m cuda`, `tests/engine/test_cuda.py`): fused and capturable optimizers, autocast with",
        'a GradScaler, growth inside an autocast region, `torch.compile` with CUDA graphs (`mode="reduce-overhead"`),',
        "channels_last, DistributedDataParallel over NCCL (one process), averaged copies in pinned memory, and resuming.",
        "",
        "A CUDA graph that you captured yourself (`torch.cuda.graph`) replays on the memory of the old tensors, and can't be",
        "found from outside: capture it again after a growth.",
        "",
        "A growth gets its memory from the driver as one block per device. Until it is checked, the old and the new tensors",
        "exist side by side.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only write the page again")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if not options.table:
        RESULTS.write_text(json.dumps(measure_all(), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")
    say(f"see {PAGE.name}")


if __name__ == "__main__":
    main()
