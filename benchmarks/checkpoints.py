"""The command `outgrow grow` beside `cp`: rate, memory, and the time of planning from a configuration alone.

A Llama-shaped checkpoint in bfloat16 is written, grown by the command (mlp × 1.5 and a few more layers), and the result is
copied by `cp`, several times in turn, since other processes and the page cache disturb both. The streaming of tensors is also
timed without the start of Python and the planning, which do not depend on the number of bytes. Plans of 7 B and 70 B parameters
are made from checkpoints whose files have real headers and no data (holes).

    python -m benchmarks.checkpoints             # writes results/checkpoints.json and docs/results/checkpoints.md
    python -m benchmarks.checkpoints --layers 18  # a smaller checkpoint
    python -m benchmarks.checkpoints --table     # only write the page again
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.markdown import table

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results" / "checkpoints.json", HERE.parent / "docs" / "results" / "checkpoints.md"
SIZES: dict[str, dict[str, int]] = {
    "8 GB": {"hidden": 2560, "mlp": 6912, "layers": 53, "heads": 20, "kv": 20, "vocabulary": 32000},
    "7 B": {"hidden": 4096, "mlp": 11008, "layers": 32, "heads": 32, "kv": 32, "vocabulary": 32000},
    "70 B": {"hidden": 8192, "mlp": 28672, "layers": 80, "heads": 64, "kv": 8, "vocabulary": 32000},
}
MORE_LAYERS = 4
SHARD = 5 * 10**9
ROUNDS = 3
GOALS = {"share": 0.5, "7 B": 30.0, "70 B": 60.0}
START = (
    "import sys, torch\n"
    "if torch.version.cuda is None:\n"  # the torchvision wheel registers its operators for CUDA builds of torch only
    "    library = torch.library.Library('torchvision', 'DEF')\n"
    "    for name in ('nms', 'qnms'):\n"
    "        library.define(name + '(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')\n"
)
COMMAND = "from outgrow.cli.main import main; sys.exit(main())"


def tensors_of(
    hidden: int, mlp: int, layers: int, heads: int, kv: int, vocabulary: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of a Llama, in the order of its files."""
    keys = hidden // heads * kv
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for number in range(layers):
        path = f"model.layers.{number}"
        yield f"{path}.input_layernorm.weight", (hidden,)
        yield f"{path}.mlp.down_proj.weight", (hidden, mlp)
        yield f"{path}.mlp.gate_proj.weight", (mlp, hidden)
        yield f"{path}.mlp.up_proj.weight", (mlp, hidden)
        yield f"{path}.post_attention_layernorm.weight", (hidden,)
        for name, rows in (("k", keys), ("o", hidden), ("q", hidden), ("v", keys)):
            yield f"{path}.self_attn.{name}_proj.weight", (rows, hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def write_checkpoint(folder: Path, size: dict[str, int], data: bool) -> int:
    """Write a Llama-shaped checkpoint in bfloat16, without data if not `data`; returns its bytes."""
    from math import prod

    import torch

    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size["hidden"],
        "intermediate_size": size["mlp"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["kv"],
        "vocab_size": size["vocabulary"],
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    for name, shape in tensors_of(**size):
        if shards[-1] and sum(2 * prod(other) for _, other in shards[-1]) + 2 * prod(shape) > SHARD:
            shards.append([])
        shards[-1].append((name, shape))
    generator = torch.Generator().manual_seed(0)
    values = torch.empty(2**24 + 64).uniform_(-0.03, 0.03, generator=generator).bfloat16()
    places = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in shard:
            places[name] = file
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end := end + 2 * prod(shape)]}
        text = json.dumps(header).encode()
        with open(folder / file, "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            if not data:
                out.truncate(8 + len(text) + end)
                continue
            for _, shape in shard:
                left = prod(shape)
                source = torch.ones(left).bfloat16() if len(shape) == 1 else values
                while left:
                    shift = int(torch.randint(0, 64, (1,), generator=generator)) if len(shape) > 1 else 0
                    part = source[shift : shift + min(left, 2**24)]
                    out.write(memoryview(part.view(torch.uint8).numpy()))
                    left -= len(part)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return sum(2 * prod(shape) for _, shape in tensors_of(**size))


def run_child(command: Sequence[str], log: Path) -> dict[str, float]:
    """Wall and CPU seconds of a process, and its peak memory in bytes."""
    started = time.perf_counter()
    with open(log, "w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL, cwd=HERE.parent)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{command} ended with status {status}: {log.read_text()[-500:]}")
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "seconds": time.perf_counter() - started,
        "cpu": used.ru_utime + used.ru_stime,
        "peak": used.ru_maxrss * unit,
    }


def grow_command(old: Path, size: dict[str, int], *more: str) -> list[str]:
    options = ["--widen", "mlp=1.5", "--deepen", f"layers={size['layers'] + MORE_LAYERS}", "--quiet", *more]
    return [sys.executable, "-c", START + COMMAND, "grow", str(old), *options]


def measure_streaming(folder: Path, size: dict[str, int], rounds: int) -> dict[str, Any]:
    """Rounds of the whole command, of the streaming alone with one job and with all cores, and of cp."""
    old, new, copy, log = folder / "old", folder / "new", folder / "copy", folder / "log"
    read = write_checkpoint(old, size, data=True)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found: dict[str, Any] = {"size": size, "read": read, "cores": cores, "rounds": []}
    for _ in range(rounds):
        one: dict[str, Any] = {"command": run_child(grow_command(old, size, "--out", str(new)), log)}
        one["report"] = [line for line in log.read_text().splitlines() if line.startswith(("written", "compared"))][-1:]
        written = sum(file.stat().st_size for file in new.iterdir())
        os.sync()
        one["cp"] = run_child(["cp", "-r", str(new), str(copy)], log)
        shutil.rmtree(copy)
        shutil.rmtree(new)
        for jobs in sorted({1, cores}):
            child = [sys.executable, "-m", "benchmarks.checkpoints", "--stream", str(old), str(new), str(jobs)]
            run_child(child, log)
            one[f"jobs {jobs}"] = json.loads(log.read_text().splitlines()[-1])
            shutil.rmtree(new)
        found["written"] = written
        found["rounds"].append(one)
        print(json.dumps(one), file=sys.stderr, flush=True)
    shutil.rmtree(old)
    return found


def stream_only(old: str, new: str, jobs: int) -> dict[str, float]:
    """Write the new weights of a growth that is planned already."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    kept: dict[str, Any] = {}  # the library is there as long as its object
    exec(START, kept)
    import outgrow
    from outgrow.checkpoints.plan_checkpoint import plan_checkpoint
    from outgrow.checkpoints.read_checkpoint import read_checkpoint
    from outgrow.checkpoints.stream_tensors import Stream
    from outgrow.checkpoints.tensor_bytes import open_files
    from outgrow.checkpoints.write_shards import Draft, lay_out, write_shards

    checkpoint = read_checkpoint(old)
    layers = int(checkpoint.config["num_hidden_layers"]) + MORE_LAYERS
    plan = plan_checkpoint(checkpoint, [outgrow.Widen(kind="mlp", factor=1.5), outgrow.Deepen(layers=layers)])
    shards, draft = lay_out(plan.tensors, SHARD), Draft(new, "benchmark")
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    draft.begin(shards)
    with open_files(checkpoint.files) as files:
        stream = Stream(plan, files, jobs)
        write_shards(draft, shards, stream.write, stream.memory, jobs)
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu": cpu, "largest": plan.largest}


def measure_plan(folder: Path, name: str) -> dict[str, Any]:
    """The dry run of the command on a checkpoint without data."""
    old, log = folder / name.replace(" ", ""), folder / "log"
    read = write_checkpoint(old, SIZES[name], data=False)
    found: dict[str, Any] = run_child(grow_command(old, SIZES[name], "--dry-run"), log)
    text = log.read_text()
    shutil.rmtree(old)
    parameters = re.search(r"parameters: ([\d,]+) → ([\d,]+)", text)
    assert parameters is not None
    counts = [int(count.replace(",", "")) for count in parameters.groups()]
    grown = {**SIZES[name], "mlp": SIZES[name]["mlp"] * 3 // 2}
    largest = max(2 * rows * (shape or [1])[0] for _, (rows, *shape) in tensors_of(**grown))
    return {**found, "read": read, "written": 2 * counts[1], "parameters": counts, "largest": largest}


def measure_all(layers: int, rounds: int, scratch: str | None) -> dict[str, Any]:
    from benchmarks.speed import processor

    with tempfile.TemporaryDirectory(dir=scratch) as place:
        folder = Path(place)
        plans = {name: measure_plan(folder, name) for name in ("7 B", "70 B")}
        streaming = measure_streaming(folder, {**SIZES["8 GB"], "layers": layers}, rounds)
    return {
        "command": f"python -m benchmarks.checkpoints --layers {layers} --rounds {rounds}",
        "versions": {name: version(name) for name in ("torch", "transformers", "numpy", "safetensors")},
        "machine": {"python": platform.python_version(), "processor": processor(), "load": os.getloadavg()},
        "goals": GOALS,
        "plans": plans,
        "streaming": streaming,
    }


def median(rounds: list[dict[str, Any]], what: str, key: str, other: str = "") -> float:
    """The median over the rounds of a figure, or of its ratio to that of another."""
    return statistics.median(one[what][key] / (one[other][key] if other else 1.0) for one in rounds)


def page(results: dict[str, Any]) -> list[str]:
    """The page of results."""
    streaming, plans = results["streaming"], results["plans"]
    rounds, written = streaming["rounds"], streaming["written"]
    alone = {f"streaming alone, --jobs {jobs}": f"jobs {jobs}" for jobs in sorted({1, streaming["cores"]})}
    what = {"`cp` of the result": "cp", **alone, "the whole command, compared too": "command"}
    rows = [
        (
            name,
            f"{median(rounds, key, 'seconds'):.1f} s",
            f"{written / median(rounds, key, 'seconds') / 1e6:,.0f} MB/s",
            f"{median(rounds, key, 'cpu'):.1f} s",
            f"{median(rounds, 'cp', 'seconds', key):.0%}",
        )
        for name, key in what.items()
    ]
    peak, largest = max(one["command"]["peak"] for one in rounds), max(one["jobs 1"]["largest"] for one in rounds)
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    machine, goals = results["machine"], results["goals"]
    planned = [
        (
            f"Llama, {name}",
            f"{plan['parameters'][0] / 1e9:.1f} B → {plan['parameters'][1] / 1e9:.1f} B",
            f"{plan['cpu']:.0f} s (goal {goals[name]:.0f} s)",
            f"{plan['peak'] / 1e9:.2f} GB",
            f"{(2**30 + 2 * plan['largest']) / 1e9:.2f} GB",
        )
        for name, plan in plans.items()
    ]
    hours = [
        (
            f"Llama, {name}",
            f"{plan['read'] / 1e9:.0f} GB",
            f"{plan['written'] / 1e9:.0f} GB",
            f"{(2 * plan['read'] + plan['written']) / 1e9:.0f} GB",
            f"{(plan['read'] + plan['written']) / 1e9 / 3600:.2f} h",
            f"{(2 * plan['read'] + plan['written']) / 1e9 / 3600:.2f} h",
        )
        for name, plan in plans.items()
    ]
    return [
        "# Checkpoints: speed and memory",
        "",
        "Made by `benchmarks/checkpoints.py` (`make bench`) from `benchmarks/results/checkpoints.json`:",
        f"`{results['command']}`.",
        f"{versions}; {machine['processor']}, {streaming['cores']} cores, load {machine['load'][0]:.1f}.",
        "",
        "## Streaming",
        "",
        f"A Llama-shaped checkpoint of {streaming['read'] / 1e9:.1f} GB in bfloat16, sharded, grows to {written / 1e9:.1f} GB",
        f"by `outgrow grow OLD --widen mlp=1.5 --deepen layers={streaming['size']['layers'] + MORE_LAYERS} --out NEW`. Medians",
        f"of {len(rounds)} rounds; the last column is the time of `cp` over the time in that row (goal: {goals['share']:.0%}",
        "for the streaming). `cp` leaves its bytes in memory for the system to write later; the growth syncs them to the disk.",
        "",
        *table(("", "wall time", "rate", "CPU time", "of the speed of `cp`"), rows),
        "",
        f"Peak memory of the whole command: {peak / 1e9:.2f} GB (goal: 1 GiB + 2 × the largest new tensor ="
        f" {(2**30 + 2 * largest) / 1e9:.2f} GB), of which importing torch and Transformers takes 0.5 GB.",
        "",
        "## Planning",
        "",
        "`outgrow grow --dry-run` on checkpoints whose files have headers only, with the start of Python and the imports:",
        "",
        *table(("", "parameters", "CPU time", "peak memory", "limit of a growth"), planned),
        "",
        "## On paper",
        "",
        "Bytes of the same growths in bfloat16. Each old tensor is read once to be copied or computed, and those with drawn",
        "values once more for their standard deviation; the second time usually comes from the page cache. Hours at 1 GB/s,",
        "with one and with two passes over the old bytes:",
        "",
        *table(("", "old", "new", "moved at most", "one pass", "two passes"), hours),
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only write the page again")
    parser.add_argument("--layers", type=int, default=SIZES["8 GB"]["layers"], help="of the checkpoint that is grown")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--scratch", help="directory for the checkpoints, of which three are there at a time")
    parser.add_argument(
        "--stream", nargs=3, metavar=("OLD", "NEW", "JOBS"), help="one measurement, as JSON (for the benchmark)"
    )
    arguments = parser.parse_args()
    if arguments.stream:
        old, new, jobs = arguments.stream
        print(json.dumps(stream_only(old, new, int(jobs))))
        return
    if not arguments.table:
        results = measure_all(arguments.layers, arguments.rounds, arguments.scratch)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text("\n".join(page(json.loads(RESULTS.read_text()))))


if __name__ == "__main__":
    main()
