"""What a growth costs: time and memory of carrying it out, time of reading a model, time of the import.

Every requirement is a ratio of two things measured in turn in one process, or a time of its own:

1. apply. A plan that widens every volume by half with R2R is carried out on a model and its Adam state (`apply_plan` and
   `grow_optimizers`), then undone. Beside it, every tensor of the grown model and of its grown optimizer state is copied:
   `torch.empty_like(t).copy_(t)` for parameters, buffers and both moments, all copies alive at once. Both get their memory
   new from the system (glibc maps everything from 64 KiB on), as a first growth does. Recycled memory makes copies
   several times faster; that ratio is measured too, and no requirement.
2. memory. The most that the process holds while the plan is carried out (VmHWM, reset just before through
   /proc/self/clear_refs) less what it held before, over the bytes of the grown model and its optimizer state. Old tensors live
   until the growth is checked, so that 1.0 is the least there can be if all tensors grow.
3. trace. `dissect` (one forward pass on meta tensors, and all volumes) beside Torch-Pruning's `build_dependency` (one forward
   pass), on one image.
4. import. `import outgrow` and `outgrow.widen` after `import torch`, each time in a new process.

    python -m benchmarks.speed            # all of it, in about 4 minutes; writes results/speed.json and docs/results/speed.md
    python -m benchmarks.speed --table    # only write docs/results/speed.md again
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import large
from benchmarks.markdown import table

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "speed.json"
PAGE = HERE.parent / "docs" / "results" / "speed.md"

FACTOR = 1.5
GROWN = ("mlp", "resnet152", "vit_base_patch16_224")
TRACED = ("resnet50", "vit_small_patch16_224", "convnext_tiny", "swin_tiny_patch4_window7_224", "densenet121")
REPETITIONS = 7
THREADS = 1
LIMITS = {"apply": 2.5, "memory": 1.2, "trace": 1.0, "import": 0.2}
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def spread(numbers: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(numbers), "best": min(numbers), "worst": max(numbers), "n": len(numbers)}


def clock(action: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def map_from(size: int) -> None:
    """Let malloc get blocks of this size and more from the system, and give them back when they are freed."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_THRESHOLD, size)
        libc.mallopt(M_TRIM_THRESHOLD, 2**30 if size > 2**20 else size)
        libc.malloc_trim(0)


def held(what: str) -> int:
    """A line of /proc/self/status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


def build(name: str) -> tuple[Any, Any]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    if name == "mlp":  # six feed-forward blocks of a transformer of width 1024
        layers: list[nn.Module] = [nn.Linear(512, 1024)]
        for _ in range(6):
            layers += [nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024), nn.GELU()]
        return nn.Sequential(*layers, nn.Linear(1024, 100)), torch.randn(2, 512)
    from benchmarks.coverage import import_timm

    return import_timm().create_model(name), torch.randn(1, 3, 224, 224)


def measure_apply(name: str) -> dict[str, Any]:
    import torch

    import outgrow
    from outgrow.analysis.analyse import dissect
    from outgrow.apply.apply_plan import apply_plan
    from outgrow.model.journal import Journal
    from outgrow.model.sandbox import tensors_of
    from outgrow.optimizers.grow_optimizers import grow_optimizers
    from outgrow.transforms.widen.settle_sizes import settle

    torch.set_num_threads(THREADS)
    map_from(2**16)
    model, example = build(name)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-2
    optimizer.step()
    optimizer.zero_grad()
    before = sum(parameter.numel() for parameter in model.parameters())
    request = outgrow.Widen("*", factor=FACTOR, method="r2r")
    _, skipped, plan = settle(model, example, dissect(model, example), [request], 0)

    def apply(journal: Journal) -> None:
        tensors = tensors_of(model)
        olds = {id(tensor): tensor.detach() for tensor in tensors.values()}
        apply_plan(model, plan, {}, journal)
        grow_optimizers([optimizer], tensors, plan, olds, journal)

    def everything() -> list[torch.Tensor]:
        state = [value for values in optimizer.state.values() for value in values.values()]
        return [tensor.detach() for tensor in (*tensors_of(model).values(), *state)]

    def copy(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.empty_like(tensor).copy_(tensor) for tensor in tensors]

    def compare() -> tuple[float, float]:
        journal = Journal()
        seconds, _ = clock(lambda: apply(journal))
        copying, copies = clock(lambda: copy(everything()))
        del copies
        journal.undo()
        return seconds, copying

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    start = held("VmRSS")
    journal = Journal()
    apply(journal)
    extra = held("VmHWM") - start
    size = sum(tensor.nbytes for tensor in everything())
    after = sum(parameter.numel() for parameter in model.parameters())
    journal.undo()
    say(f"  {name}: {before / 1e6:.0f} M → {after / 1e6:.0f} M parameters, {len(plan.changes)} volumes")
    pairs = [compare() for _ in range(REPETITIONS)]
    map_from(2**25)
    recycled = [compare() for _ in range(4)][1:]
    return {
        "parameters": [before, after],
        "volumes": len(plan.changes),
        "left_out": len(skipped),
        "bytes": size,
        "apply_s": spread([a for a, _ in pairs]),
        "copy_s": spread([b for _, b in pairs]),
        "ratio": spread([a / b for a, b in pairs]),
        "ratio_recycled": spread([a / b for a, b in recycled]),
        "extra_bytes": extra,
        "extra": extra / size,
    }


def measure_trace(name: str) -> dict[str, Any]:
    import torch
    import torch_pruning

    import outgrow
    from outgrow.analysis.analyse import dissect

    torch.set_num_threads(THREADS)
    model, example = build(name)
    model.eval()

    def pruning() -> Any:
        return torch_pruning.DependencyGraph().build_dependency(model, example_inputs=example)

    failure = ""
    try:
        pruning()
    except Exception as error:
        failure = f"{type(error).__name__}: {error}".split("\n")[0]
    seconds: dict[str, list[float]] = {"dissect": [], "volumes": [], "torch_pruning": [], "forward": []}
    dissect(model, example)
    for _ in range(REPETITIONS):
        seconds["dissect"].append(clock(lambda: dissect(model, example))[0])
        if not failure:
            seconds["torch_pruning"].append(clock(pruning)[0])
        seconds["forward"].append(clock(lambda: model(example))[0])
    seconds["volumes"] = [clock(lambda: outgrow.volumes(model, example))[0] for _ in range(3)]
    result: dict[str, Any] = {f"{what}_s": spread(times) for what, times in seconds.items() if times}
    if failure:
        return {**result, "failure": failure}
    ratios = [a / b for a, b in zip(seconds["dissect"], seconds["torch_pruning"], strict=True)]
    best = min(seconds["torch_pruning"])
    return {**result, "ratio": spread(ratios), "ratio_explained": min(seconds["volumes"]) / best}


IMPORT = """
import time, torch
start = time.perf_counter()
import outgrow
outgrow.widen
print(time.perf_counter() - start)
"""


def measure_import() -> dict[str, Any]:
    run = [sys.executable, "-c", IMPORT]
    times = [float(subprocess.run(run, check=True, capture_output=True, text=True).stdout) for _ in range(REPETITIONS)]
    return {"seconds": spread(times)}


def in_new_process(what: str, name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.speed", "--measure", what, name]
    result: dict[str, Any] = json.loads(
        subprocess.run(command, cwd=HERE.parent, check=True, stdout=subprocess.PIPE, text=True).stdout
    )
    return result


def measure_all() -> dict[str, Any]:
    results: dict[str, Any] = {
        "command": "python -m benchmarks.speed",
        "versions": {name: version(name) for name in ("torch", "numpy", "timm", "torch-pruning", "outgrow")},
        "machine": {"python": platform.python_version(), "system": platform.platform(), "processor": processor()},
        "configuration": {
            "factor": FACTOR,
            "method": "r2r",
            "optimizer": "Adam",
            "dtype": "float32",
            "threads": THREADS,
            "repetitions": REPETITIONS,
        },
        "limits": LIMITS,
        "apply": {},
        "trace": {},
    }
    say("import")
    results["import"] = measure_import()
    for what, names in (("trace", TRACED), ("apply", GROWN)):
        for name in names:
            say(f"{what}: {name}")
            results[what][name] = in_new_process(what, name)
            ratio = results[what][name].get("ratio")
            say(f"  ratio {ratio['median']:.2f} ({ratio['best']:.2f}–{ratio['worst']:.2f})" if ratio else "  no ratio")
    return results


def processor() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor()


def verdicts(results: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Requirement, what was measured, its figure, and whether it is met."""
    limits = results["limits"]
    rows: list[tuple[str, str, str, str]] = []

    def add(requirement: str, model: str, value: float, shown: str, limit: float) -> None:
        rows.append((requirement, model, shown, "pass" if value <= limit else "FAIL"))

    def shown(ratio: dict[str, Any]) -> str:
        return f"{ratio['median']:.2f} ({ratio['best']:.2f}–{ratio['worst']:.2f})"

    for name, item in results["apply"].items():
        add(f"apply ≤ {limits['apply']} × copy", name, item["ratio"]["median"], shown(item["ratio"]), limits["apply"])
    for name, item in results["apply"].items():
        add(f"extra memory ≤ {limits['memory']} × new", name, item["extra"], f"{item['extra']:.2f}", limits["memory"])
    for name, item in results["trace"].items():
        requirement = "trace ≤ Torch-Pruning's graph"
        if "ratio" in item:
            add(requirement, name, item["ratio"]["median"], shown(item["ratio"]), limits["trace"])
        else:
            rows.append((requirement, name, f"Torch-Pruning fails: {item['failure']}", "pass"))
    best = results["import"]["seconds"]["best"]
    add(f"import ≤ {limits['import']} s", "", best, f"{best:.2f} s", limits["import"])
    return rows


def page(results: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    configuration = ", ".join(f"{key} {value}" for key, value in results["configuration"].items())
    apply = [
        (
            name,
            f"{item['parameters'][0] / 1e6:.0f} M → {item['parameters'][1] / 1e6:.0f} M",
            str(item["volumes"]),
            f"{item['bytes'] / 1e9:.2f} GB",
            f"{item['apply_s']['median']:.2f} s",
            f"{item['copy_s']['median']:.2f} s",
            f"{item['ratio']['median']:.2f}",
            f"{item['ratio_recycled']['median']:.2f}",
            f"{item['extra']:.2f}",
        )
        for name, item in results["apply"].items()
    ]
    trace = [
        (
            name,
            f"{item['dissect_s']['best']:.3f} s",
            f"{item['volumes_s']['best']:.3f} s",
            f"{item['torch_pruning_s']['best']:.3f} s" if "torch_pruning_s" in item else item["failure"],
            f"{item['forward_s']['best']:.3f} s",
            f"{item['ratio']['median']:.2f}" if "ratio" in item else "",
        )
        for name, item in results["trace"].items()
    ]
    lines = [
        "# Speed",
        "",
        "Made by `make bench` from `benchmarks/results/speed.json`; `benchmarks/speed.py` describes how each is measured.",
        f"{versions}; {configuration}; {results['machine']['processor']}.",
        "",
        "A ratio is the median over the repetitions, with the best and the worst in brackets.",
        "",
        *table(("requirement", "model", "measured", ""), [*verdicts(results)]),
        "",
        "## Carrying out a plan",
        "",
        "Every volume that R2R can grow is widened by half; Adam's moments follow. The copy is of the same bytes: parameters,",
        "buffers and both moments of the grown model, into memory that is new from the system, as it is in a first growth.",
        "“Recycled” is the ratio when blocks below 32 MiB find their memory already mapped: copies cost little",
        "then, and the rest of a growth weighs more.",
        "",
        *table(("model", "parameters", "volumes", "bytes", "apply", "copy", "ratio", "recycled", "extra memory"), apply),
        "",
        "## Finding the volumes",
        "",
        "Best of the repetitions. `volumes` also judges every method on every volume, which Torch-Pruning's graph does not. A",
        "forward pass is part of what Torch-Pruning does; it shrinks with more threads, and grows with the image.",
        "",
        *table(("model", "trace and volumes", "`outgrow.volumes`", "Torch-Pruning's graph", "a forward pass", "ratio"), trace),
        "",
    ]
    if large.RESULTS.exists():
        lines += large.section(json.loads(large.RESULTS.read_text()))
    return "\n".join(lines)


def write_page() -> None:
    PAGE.write_text(page(json.loads(RESULTS.read_text())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only write docs/results/speed.md again")
    parser.add_argument(
        "--measure", nargs=2, metavar=("WHAT", "MODEL"), help="one measurement, as JSON (for the benchmark itself)"
    )
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.measure:
        what, name = arguments.measure
        print(json.dumps({"apply": measure_apply, "trace": measure_trace}[what](name)))
        return
    if not arguments.table:
        results = measure_all()
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    write_page()
    results = json.loads(RESULTS.read_text())
    rows = verdicts(results)
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    print(f"{sum(row[3] == 'pass' for row in rows)} of {len(rows)} requirements met; see {PAGE}")


if __name__ == "__main__":
    main()
