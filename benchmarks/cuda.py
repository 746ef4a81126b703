"""A growth on a GPU: what it costs to carry out a plan, and how long a growing step holds training up.

Llamas of more than 500 M parameters with Adam's moments, in float32, on one CUDA device. Each growth is planned once, in the
dry run of an `outgrow.Run`; all measurements use that plan.

1. apply. The plan is carried out on the model and its optimizer's state (the part of a growth that is left after its dry run),
   then undone. Next to it, every tensor of the grown model and of its grown optimizer state is copied on the device, all
   copies alive at once. Both get new memory from the driver (the allocator's cache is emptied before); the ratio with memory
   that the allocator has at hand is measured too.
2. stall. The call of `outgrow.Run.step()` that grows, with the default check of outputs and without any, next to a usual
   training step. Each repetition has a new model.

The result file is written after every measurement, so that a run that is cut short leaves what it has measured.

    python -m benchmarks.cuda                  # writes results/cuda.json and docs/results/cuda.md; at most 150 s on an H200
    python -m benchmarks.cuda --table          # only write docs/results/cuda.md again
    python -m benchmarks.cuda --small --results FILE   # tiny models, also on a CPU: a test of this program
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.cuda_page import page
from benchmarks.speed import say, spread

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "cuda.json"
PAGE = HERE.parent / "docs" / "results" / "cuda.md"

LIMIT = 1.5
REPETITIONS = 5
STALLS = 3  # repetitions, each with a new model
COMMON = {"num_hidden_layers": 24, "vocab_size": 32000}
MODELS = {
    "0.6 B": {**COMMON, "hidden_size": 1280, "intermediate_size": 3456, "num_attention_heads": 20, "num_key_value_heads": 20},
    "1.3 B": {**COMMON, "hidden_size": 2048, "intermediate_size": 5504, "num_attention_heads": 16, "num_key_value_heads": 16},
}
SMALL = {"num_hidden_layers": 2, "vocab_size": 50, "num_attention_heads": 2, "num_key_value_heads": 2}
SMALL_MODELS = {
    "small": {**SMALL, "hidden_size": 16, "intermediate_size": 24},
    "larger": {**SMALL, "hidden_size": 32, "intermediate_size": 48},
}
GROWTHS = {
    "MLPs × 1.5": ("widen", "model.layers.*.mlp.gate_proj"),
    "everything × 1.5": ("widen", "*"),
    "six more layers": ("deepen", "model.layers.{middle}"),
}
Growth = tuple[str, str]  # name of the model, name of the growth


class Setting:
    """The models of a run of this benchmark, and their device."""

    def __init__(self, small: bool) -> None:
        import torch

        self.models: dict[str, dict[str, int]] = SMALL_MODELS if small else MODELS
        self.device = "cuda" if torch.cuda.is_available() or not small else "cpu"
        if self.device == "cpu":
            from benchmarks.coverage import import_timm

            import_timm()  # makes torchvision, which Transformers imports, work with a CPU build of torch

    def build(self, size: str) -> tuple[Any, Any, Any]:
        """The model, a batch, and Adam."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        with torch.device(self.device):
            model = LlamaForCausalLM(LlamaConfig(**self.models[size]))
        ids = torch.randint(0, self.models[size]["vocab_size"], (2, 128), device=self.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        return model, {"input_ids": ids, "labels": ids}, optimizer

    def request(self, size: str, growth: str) -> Any:
        import outgrow

        kind, where = GROWTHS[growth]
        middle = self.models[size]["num_hidden_layers"] // 2 - 1
        return outgrow.Widen(where, factor=1.5) if kind == "widen" else outgrow.Deepen(where.format(middle=middle), count=6)

    def clock(self, action: Callable[[], Any]) -> tuple[float, Any]:
        gc.collect()
        self.wait()
        start = time.perf_counter()
        result = action()
        self.wait()
        return time.perf_counter() - start, result

    def wait(self) -> None:
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def release(self) -> None:
        """Return the allocator's unused memory to the driver."""
        import torch

        if self.device == "cuda":
            torch.cuda.empty_cache()


def train(model: Any, example: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(**example).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def tensors(model: Any, optimizer: Any) -> list[Any]:
    import torch

    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, torch.Tensor)]
    return [tensor.detach() for tensor in (*model.parameters(), *model.buffers(), *state)]


def planned(setting: Setting, size: str, growth: str) -> tuple[Any, Any]:
    """A run that grows at step 4, with its plan and its brief check; and the optimizer, which has state."""
    import outgrow

    model, example, optimizer = setting.build(size)
    train(model, example, optimizer)
    event = outgrow.At(step=4, grow=[setting.request(size, growth)])
    return outgrow.Run(model, example, optimizer, [event], quiet=True), optimizer


@contextlib.contextmanager
def plan_of(run: Any) -> Iterator[None]:
    """A context in which new runs take the plan of another one, for an equal model, instead of making it again."""
    with (
        patch("outgrow.runs.run.timeline", lambda *given: run.timeline),
        patch("outgrow.runs.run.plan_brief_check", lambda *given: copy.copy(run._brief)),
    ):
        yield


def measure_apply(setting: Setting, run: Any, optimizer: Any, fresh: bool) -> dict[str, Any]:
    """Carry a planned growth out and undo it, with a copy of what it made in between; the first repetition warms up."""
    import torch

    from outgrow.engine.carry_out import Work

    pairs, held = [], 0
    for _ in range(REPETITIONS + 1):
        work = Work(run.model, [], [optimizer], run.example)
        if fresh:
            setting.release()
        seconds, _ = setting.clock(lambda work=work: [work.carry_out(step) for step in run._ready[0].steps])
        made = tensors(run.model, optimizer)
        held = sum(tensor.nbytes for tensor in made)
        if fresh:
            setting.release()
        copying, copies = setting.clock(lambda made=made: [torch.empty_like(tensor).copy_(tensor) for tensor in made])
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


def measure_stall(setting: Setting, size: str, plan: Any, check: bool) -> dict[str, Any]:
    import outgrow

    stalls, steps, after, error = [], [], [0, 0], 0.0
    for _ in range(STALLS):
        model, example, optimizer = setting.build(size)
        before = sum(parameter.numel() for parameter in model.parameters())
        with plan_of(plan):
            run = outgrow.Run(model, example, optimizer, plan.schedule, check=check, quiet=True)
        for number in range(4):
            seconds, _ = setting.clock(lambda m=model, e=example, o=optimizer: train(m, e, o))
            if number > 1:
                steps.append(seconds)
            stall, _ = setting.clock(run.step)
        stalls.append(stall)
        after = [before, sum(parameter.numel() for parameter in model.parameters())]
        error = run.records[0].error
        del model, optimizer, run
        gc.collect()
        setting.release()
    return {"stall_s": spread(stalls), "step_s": spread(steps), "parameters": after, "error": error}


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "from its source"


def empty_results(setting: Setting) -> dict[str, Any]:
    import torch

    device = torch.cuda.get_device_name() if setting.device == "cuda" else "CPU"
    configuration = {"models": setting.models, "optimizer": "AdamW, fused", "dtype": "float32"}
    return {
        "command": "python -m benchmarks.cuda",
        "versions": {name: installed(name) for name in ("torch", "transformers", "outgrow")},
        "machine": {"python": platform.python_version(), "device": device, "cuda": torch.version.cuda},
        "configuration": {**configuration, "repetitions": REPETITIONS, "stalls": STALLS},
        "limit": LIMIT,
        "seconds": 0.0,
        "complete": False,
        "plans": [],
        "apply": [],
        "stalls": [],
    }


def measure_all(setting: Setting, write: Callable[[dict[str, Any]], None]) -> None:
    """Measure everything; `write` gets the results so far after every measurement."""
    started, results = time.perf_counter(), empty_results(setting)

    def note(kind: str, found: dict[str, Any], text: str) -> None:
        results[kind].append(found)
        results["seconds"] = time.perf_counter() - started
        say(f"{results['seconds']:.0f} s: {found['model']}, {found['growth']}, {text}")
        write(results)

    for number, size in enumerate(setting.models):
        for growth, (kind, _) in GROWTHS.items():
            if kind == "deepen" and number > 0:
                continue
            arm = {"model": size, "growth": growth}
            seconds, (plan, optimizer) = setting.clock(lambda size=size, growth=growth: planned(setting, size, growth))
            gc.freeze()  # or each collection between measurements takes longer than they do
            note("plans", {**arm, "plan_s": seconds}, f"model and plan: {seconds:.1f} s")
            for fresh in (True, False) if kind == "widen" else ():
                found = measure_apply(setting, plan, optimizer, fresh)
                memory = "new" if fresh else "recycled"
                note("apply", {**arm, "memory": memory, **found}, f"{memory}: {found['ratio']['median']:.2f} × the copy")
                setting.release()
            optimizer.state.clear()
            for check in (True, False) if number == 0 else ():
                found = measure_stall(setting, size, plan, check)
                text = f"stall, check={check}: {found['stall_s']['median']:.3f} s, a step {found['step_s']['median']:.3f} s"
                note("stalls", {**arm, "check": check, **found}, text)
            del plan, optimizer
            gc.unfreeze()
            gc.collect()
            setting.release()
    results["complete"] = True
    write(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only write the page again")
    parser.add_argument("--small", action="store_true", help="tiny models, also without a GPU")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of results")
    parser.add_argument("--page", type=Path, help="the page (by default docs/results/cuda.md, if --results is not given)")
    options = parser.parse_args()
    where = options.page or (PAGE if options.results == RESULTS else None)
    if options.small and options.results == RESULTS:
        parser.error("--small measures nothing of interest: give --results another file")
    warnings.filterwarnings("ignore")
    if not options.table:
        measure_all(Setting(options.small), lambda found: write(options.results, json.dumps(found, indent=1) + "\n"))
    if where is not None:
        write(where, page(json.loads(options.results.read_text(encoding="utf-8"))))
        say(f"see {where.name}")


def write(path: Path, text: str) -> None:
    """Replace a file by a complete one."""
    part = path.with_suffix(f"{path.suffix}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


if __name__ == "__main__":
    main()
