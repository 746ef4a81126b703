"""What checksums cost: how fast they are computed, and their share of the time that saving and loading take.

    python -m benchmarks.checksums            # about a minute; writes results/checksums.json

One thread, processor time, the best of five. The model is a stack of linear layers; its run has AdamW's state, three times the
values. The files are in a temporary folder, and thus mostly in the system's cache: on a slower disk the share is smaller.
"""

from __future__ import annotations

import hashlib
import json
import platform
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import outgrow
from benchmarks.speed import processor, say
from outgrow.saving.checksums import of_tensors, sealed

RESULTS = Path(__file__).parent / "results" / "checksums.json"
WIDTH, LAYERS, TIMES = 1024, 16, 5


def build() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def best(call: Callable[[], Any]) -> float:
    """Processor seconds."""
    found = []
    for _ in range(TIMES):
        started = time.process_time()
        call()
        found.append(time.process_time() - started)
    return min(found)


def speeds() -> dict[str, float]:
    """Gigabytes per second of a few checksums, and of a copy."""
    values = torch.randn(2**24)
    data = values.view(torch.uint8).numpy().data
    kinds: dict[str, Callable[[], Any]] = {
        "zlib.crc32": lambda: zlib.crc32(data),
        "hashlib.sha256": lambda: hashlib.sha256(data).digest(),
        "hashlib.blake2b": lambda: hashlib.blake2b(data).digest(),
        "a copy": lambda: values.clone(),
    }
    return {name: round(values.nbytes / best(call) / 1e9, 2) for name, call in kinds.items()}


def shares(folder: Path) -> dict[str, dict[str, float]]:
    """Seconds of saving and of loading a model and a run, and of the checksums within."""
    model, example = build(), torch.randn(2, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    model(example).square().mean().backward()
    optimizer.step()
    run = outgrow.Run(model, example, optimizer, [], quiet=True)
    weights, whole = folder / "model.safetensors", folder / "run.pt"
    tensors, state = dict(model.state_dict()), run.state_dict()
    fresh = build()
    jobs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "outgrow.save": (lambda: outgrow.save(model, weights), lambda: of_tensors(tensors)),
        "outgrow.load": (lambda: outgrow.load(fresh, weights), lambda: of_tensors(tensors)),
        "Run.save": (lambda: run.save(whole), lambda: sealed(state)),
        "Run.load": (lambda: run.load(whole), lambda: sealed(state)),
    }
    found = {}
    for name, (job, codes) in jobs.items():
        seconds, part = best(job), best(codes)
        found[name] = {"seconds": round(seconds, 3), "checksums": round(part, 3), "share": round(part / seconds, 3)}
        say(f"{name}: {seconds:.3f} s, checksums {part:.3f} s ({part / seconds:.0%})")
    return found


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rates = speeds()
    say(", ".join(f"{name} {rate} GB/s" for name, rate in rates.items()))
    with tempfile.TemporaryDirectory() as folder:
        found = shares(Path(folder))
    facts = {"processor": processor(), "python": platform.python_version(), "torch": torch.__version__}
    parameters = sum(parameter.numel() for parameter in build().parameters())
    RESULTS.write_text(json.dumps({**facts, "parameters": parameters, "GB/s": rates, "jobs": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
