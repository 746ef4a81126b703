"""A growth of the study, carried out with outgrow's public calls."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

import outgrow
from experiments.lm.arms import Growth
from experiments.lm.gpt import GPT

INEXACT = ("copy", "random")  # without a fade
METHODS = {"pairs": "r2r"}  # names of `Deepen` for ours; the others are its own
STREAM = {"mean": "netmorph"}  # methods that a norm of the stream does not allow, and what is taken there
WRITERS = ("attention.o.weight", "mlp.down.weight")
GAINS = ("norm1.weight", "norm2.weight")


def now(device: str) -> float:
    """Seconds: of the clock on a GPU; on a CPU those that the process used, since others may run beside it."""
    if not device.startswith("cuda"):
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def transforms_of(growth: Growth) -> list[Any]:
    """The growth as transforms of the library."""
    made: list[Any] = [
        outgrow.Widen(
            kind=kind,
            factor=factor,
            method=STREAM.get(growth.method, growth.method) if kind == "width" else growth.method,
            fade=growth.fade,
        )
        for kind, factor in growth.widen
    ]
    if growth.layers is not None:
        method = METHODS.get(growth.how, "copy" if growth.how in ("zeroed", "gamma") else growth.how)
        made.append(outgrow.Deepen(layers=growth.layers, method=method, order=growth.order, fade=growth.fade))
    return made


def preserves(growth: Growth) -> bool:
    return growth.layers is None or growth.fade is not None or growth.how not in INEXACT


def grow_model(
    model: GPT, example: Tensor, growth: Growth, optimizers: list[torch.optim.Optimizer], seed: int
) -> dict[str, Any]:
    """Grow a model and its optimizers; the record for the results.

    Zeroed copies and copies with γ = 0 are made from plain copies here: the library's own exact forms are pairs and fades.
    """
    started = now(example.device.type)
    by_hand = growth.how in ("zeroed", "gamma") and growth.layers is not None
    blocks = set(model.blocks)
    before = model(example).detach() if by_hand or not preserves(growth) else None
    state = "copy" if growth.state == "copied" else "carry"
    transforms, options = transforms_of(growth), {"seed": seed, "check": before is None, "state": state}
    done = outgrow.grow(model, example, *transforms, optimizer=optimizers, **options)
    if by_hand:
        close(model, blocks, WRITERS if growth.how == "zeroed" else GAINS)
    record: dict[str, Any] = {"parameters": list(done.parameters), "exact": preserves(growth)}
    record["moved"] = (
        float((model(example).detach() - before).abs().max() / before.abs().max()) if before is not None else done.max_error
    )
    record["seconds"] = now(example.device.type) - started
    return record


@torch.no_grad()
def close(model: GPT, old: set[Any], names: tuple[str, ...]) -> None:
    """Zero the named tensors of new blocks."""
    for block in model.blocks:
        if block not in old:
            for name, parameter in block.named_parameters():
                if name in names:
                    parameter.zero_()
