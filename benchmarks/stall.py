"""How long a growth holds a training run up, beside what a copy of its state takes.

A run (`outgrow.Run`) has rehearsed its schedule before training starts. What is timed is the one call of `run.step()` that
grows: the model, both moments of Adam, all bookkeeping. Beside it, every tensor of the grown model and of its grown optimizer
state is copied, as in `speed.py`, into memory that is new from the system. Each pair is measured in a process of its own, which
uses a good deal of memory once before: what a virtual machine has never used takes longer, and that would be the copy's.

    stall ≤ 3 × copy + re-compile

Growths are timed with the check of outputs that a run makes by default, without any, and with `check="full"`. The default is
brief where the rehearsal has left nothing to find out: a forward pass each of the old and the grown model, on a part of the
example. The thorough one takes six passes on the whole example and two copies of the weights, which is a matter of the
example's size, and has no limit to keep. The rehearsal before a run starts, which allows the check to be brief, is timed too.

With `torch.compile`, what comes on top is the next step's compilation, which any change of shape costs; it is timed once, on a
small model.

    python -m benchmarks.stall            # all of it, in about ten minutes; writes results/stall.json and docs/results/stall.md
    python -m benchmarks.stall llama      # one of the models, beside the results that are there
    python -m benchmarks.stall --table    # only write docs/results/stall.md again
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from benchmarks.speed import build, clock, map_from, processor, say, spread

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "stall.json"
PAGE = HERE.parent / "docs" / "results" / "stall.md"

LIMIT = 3.0
THREADS = 1
CHECKS: dict[str, bool | str] = {"none": False, "default": True, "full": "full"}
REPETITIONS = {"none": 1, "default": 3, "full": 1}
WARM = 7 * 2**30  # bytes: more than any of the growths and the copy after it need
AFTER = {
    "mlp": "4",
    "resnet50": "layer3.2",
    "resnet152": "layer3.10",
    "vit_base_patch16_224": "blocks.5",
    "llama": "model.layers.5",
}


def example_of(name: str) -> tuple[Any, Any]:
    """A model, and two samples; Transformers' Llama with all that a Trainer gives it."""
    import torch

    if name == "llama":
        from benchmarks.coverage import import_timm

        import_timm()  # which lets torchvision be imported beside a torch without it
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
        ids = torch.randint(0, 8000, (2, 64))
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        return LlamaForCausalLM(LlamaConfig(vocab_size=8000, **sizes)), given
    model, example = build(name)
    return model, example if name == "mlp" else torch.cat([example, example])


def run_of(name: str, what: str, check: bool | str) -> tuple[Any, Any, Any]:
    """A run that grows at its first step, its model and its optimizer with both moments."""
    import torch

    import outgrow

    model, example = example_of(name)
    model.train()
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-2
    optimizer.step()
    optimizer.zero_grad()
    grow = outgrow.Widen("*", factor=1.5) if what == "widen" else outgrow.Deepen(AFTER[name])
    return outgrow.Run(model, example, optimizer, [outgrow.At(step=1, grow=[grow])], check=check, quiet=True), model, optimizer


def touch(size: int) -> None:
    """Use so many bytes for a moment: the first use of a virtual machine's memory takes long, and would be the copy's."""
    import torch

    blocks = [torch.empty(2**28, dtype=torch.uint8).fill_(0) for _ in range(size // 2**28)]
    del blocks


def measure(name: str, what: str, check: bool | str) -> dict[str, Any]:
    import torch

    from outgrow.model.sandbox import tensors_of

    torch.set_num_threads(THREADS)
    map_from(2**16)
    run, model, optimizer = run_of(name, what, check)
    brief = run._brief
    touch(WARM)
    stall, _ = clock(run.step)
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, torch.Tensor)]
    tensors = [tensor.detach() for tensor in (*tensors_of(model).values(), *state)]
    copying, _ = clock(lambda: [torch.empty_like(tensor).copy_(tensor) for tensor in tensors])
    record = run.records[0]
    size = sum(tensor.nbytes for tensor in tensors)
    return {
        "stall_s": stall,
        "copy_s": copying,
        "part": None if brief is None else list(brief.lengths),
        "error": record.error,
        "parameters": list(record.parameters),
        "bytes": size,
    }


def measure_study(name: str) -> dict[str, Any]:
    """What a run finds out beforehand so that its checks can be brief, beside a training step on the same example."""
    import torch

    from outgrow.model.example import call
    from outgrow.verify.brief_check import plan_brief_check

    torch.set_num_threads(THREADS)
    run, model, _ = run_of(name, "widen", False)
    seconds, _ = clock(lambda: plan_brief_check(model, run.example))
    step, _ = clock(lambda: loss_of(call(model, run.example)).backward())
    return {"study_s": seconds, "step_s": step}


def loss_of(output: Any) -> Any:
    return output.loss if hasattr(output, "loss") else output.square().mean()


def measure_compiled() -> dict[str, Any]:
    """A compiled model: the growth, and the step after it, which compiles again; beside the first step of all."""
    import torch
    from torch import nn

    import outgrow

    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(256, 10))
    compiled = torch.compile(model)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(32, 256)
    run = outgrow.Run(compiled, x, optimizer, [outgrow.At(step=3, grow=[outgrow.Widen("*", factor=1.5)])], quiet=True)

    def step() -> None:
        optimizer.zero_grad()
        compiled(x).square().mean().backward()
        optimizer.step()

    first, _ = clock(step)
    run.step()
    usual = [clock(step)[0] for _ in range(3)]
    run.step()
    growth, _ = clock(run.step)
    again, _ = clock(step)
    return {"first_step_s": first, "usual_step_s": spread(usual), "growth_s": growth, "step_after_s": again}


def in_new_process(*what: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.stall", "--measure", *what]
    result: dict[str, Any] = json.loads(
        subprocess.run(command, cwd=HERE.parent, check=True, stdout=subprocess.PIPE, text=True).stdout
    )
    return result


def measure_all(names: Sequence[str], before: dict[str, Any]) -> dict[str, Any]:
    """Of some models; what was measured of the others before is kept."""
    results: dict[str, Any] = {
        "command": "python -m benchmarks.stall",
        "versions": {name: version(name) for name in ("torch", "numpy", "timm", "transformers", "outgrow")},
        "machine": {"python": platform.python_version(), "system": platform.platform(), "processor": processor()},
        "configuration": {"optimizer": "Adam", "dtype": "float32", "threads": THREADS, "repetitions": REPETITIONS},
        "limit": LIMIT,
        "studies": before.get("studies", {}),
        "arms": [arm for arm in before.get("arms", []) if arm["model"] not in names],
    }
    for name in names:
        results["studies"][name] = in_new_process("study", name)
        for what in ("widen", "deepen"):
            for check in CHECKS:
                say(f"{name}, {what}, check: {check}")
                pairs = [in_new_process(name, what, check) for _ in range(REPETITIONS[check])]
                ratio = spread([pair["stall_s"] / pair["copy_s"] for pair in pairs])
                say(f"  {ratio['median']:.2f} ({ratio['best']:.2f}–{ratio['worst']:.2f}) × the copy")
                times = {key: spread([pair[key] for pair in pairs]) for key in ("stall_s", "copy_s")}
                facts = {key: pairs[0][key] for key in ("parameters", "bytes", "part", "error")}
                results["arms"].append({"model": name, "what": what, "check": check, "ratio": ratio, **times, **facts})
    say("compiled")
    results["compiled"] = in_new_process("compiled")
    return results


def page(results: dict[str, Any]) -> str:
    rows = []
    for arm in results["arms"]:
        ratio = arm["ratio"]
        met = "" if arm["check"] == "full" else "pass" if ratio["median"] <= results["limit"] else "FAIL"
        part = "×".join(map(str, arm["part"] or ()))
        rows.append(
            (
                arm["model"],
                arm["what"],
                f"{arm['check']}{f' ({part})' if part else ''}",
                " → ".join(f"{count / 1e6:.0f} M" for count in arm["parameters"]),
                f"{arm['stall_s']['median']:.2f} s",
                f"{arm['copy_s']['median']:.2f} s",
                f"{ratio['median']:.2f} ({ratio['best']:.2f}–{ratio['worst']:.2f})",
                met,
            )
        )
    header = ("model", "growth", "check", "parameters", "stall", "copy", "stall / copy", f"≤ {results['limit']:g}")
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    compiled = results["compiled"]
    studies = ", ".join(
        f"{study['study_s']:.1f} s ({name}; a training step takes {study['step_s']:.1f} s)"
        for name, study in results["studies"].items()
    )
    lines = [
        "# How long a growth holds training up",
        "",
        "Made by `make stall` from `benchmarks/results/stall.json`; how it is measured is described in `benchmarks/stall.py`.",
        f"{versions}; Adam, float32, {results['configuration']['threads']} thread; {results['machine']['processor']}.",
        "",
        "The stall is the one call of `run.step()` that grows; the copy is of the grown model and its optimizer's moments.",
        "A ratio is the median over the repetitions, each in a process of its own, with the best and the worst in brackets.",
        "",
        *table(header, rows),
        "",
        "The check compares outputs of the old and the new model. The default is brief where the run's rehearsal has left",
        "nothing to find out: one forward pass each, on a part of the example (its shape is in brackets, where the whole is",
        "2×3×224×224, 2×512, or three times 2×64). Elsewhere (new blocks in the plain mlp) it is the thorough one of",
        '`Run(…, check="full")`: six passes on all of the example. `Run(…, check=False)` makes none.',
        "That a part shows all that the whole shows was found",
        f"out when the run was made, which took {studies}.",
        "",
        f"Compiled (a small network of linear layers): the growth took {compiled['growth_s']:.2f} s, checks included; the step",
        f"after it {compiled['step_after_s']:.1f} s, since it compiles again; the first took {compiled['first_step_s']:.1f} s,",
        f"a usual one takes {1e3 * compiled['usual_step_s']['median']:.0f} ms.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"some of {', '.join(AFTER)} (default: all)")
    parser.add_argument("--table", action="store_true", help="only write the page again")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if options.measure == ["compiled"]:
        print(json.dumps(measure_compiled()))
    elif options.measure and options.measure[0] == "study":
        print(json.dumps(measure_study(options.measure[1])))
    elif options.measure:
        name, what, check = options.measure
        print(json.dumps(measure(name, what, CHECKS[check])))
    else:
        if not options.table:
            before = json.loads(RESULTS.read_text(encoding="utf-8")) if options.models else {}
            RESULTS.write_text(
                json.dumps(measure_all(options.models or list(AFTER), before), indent=1) + "\n", encoding="utf-8"
            )
        PAGE.write_text(page(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")
        say(f"see {PAGE.name}")


if __name__ == "__main__":
    main()
