"""The page docs/results/cuda.md, from the results of `benchmarks/cuda.py`."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import table


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
        "The model and both moments of Adam grow by the plan of a run's dry run. The copy is of every tensor of the grown",
        "model and its optimizer's state, on the device. With “new” memory both get theirs from the driver.",
        "The time that the driver takes differs between machines, and with it these ratios: 25 and 47 ms for the copy of",
        "14.3 GB on two of them. With recycled memory a growth is limited by Python and by the launches of kernels.",
        "",
        *table(("model", "growth", "memory", "bytes", "apply", "copy", "apply / copy", f"≤ {results['limit']:g}"), applied),
        "",
        "## The step that grows",
        "",
        "The call of `run.step()` that grows, next to a usual training step (two sequences of 128 tokens).",
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
