"""Carry out an insert: put a new module, with its starting values, into a model and its averaged copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from outgrow.apply.grow_tensor import rotation
from outgrow.apply.insert_modules import apply_insert, draw_parameters, like_of
from outgrow.exactness.zero_output import write
from outgrow.growth_plan.module_starts import Start
from outgrow.growth_plan.plan import Insert
from outgrow.model.example import Example, outputs_in
from outgrow.model.journal import Journal
from outgrow.model.module_calls import calls_of
from outgrow.modules.blocks import make_identity, make_rotation
from outgrow.modules.gates import close_around, close_gates, link_ramps, soften
from outgrow.verify.outputs import RandomAtMean


def put_in(models: Sequence[nn.Module], example: Example, insert: Insert, journal: Journal) -> tuple[str, str]:
    """Put a new module into `models`: the model itself, then its averaged copies.

    Returns the path of the new module, and the path of the module whose optimizers get the new parameters.
    """
    start, model = insert.start, models[0]
    batch = batch_behind(model, example, start.identity) if start.identity else None
    blocks = [apply_insert(one, insert, journal) for one in models]
    for block in blocks:
        begin(block, start, batch)
    if start.gates:
        close_gates(model, blocks, start.gates, start.steps)
    if start.whole:
        close_around(model, blocks, start.steps)
    if start.soft:
        soften(blocks, start.soft, start.steps)
    if insert.made or start.soft:
        link_ramps(blocks)
    return insert.path, like_of(model, insert)


def begin(block: nn.Module, start: Start, batch: Tensor | None = None) -> None:
    """Give a new module its starting values. batch: the input on which a block with batch norm is made the identity."""
    if start.draw is not None:
        draw_parameters(block, start.draw)
    write(block, start.writes)
    if batch is not None:
        assert isinstance(block, nn.Sequential)
        make_identity(block, batch)
    if start.rotation is not None:
        assert isinstance(block, nn.Sequential)
        make_rotation(block, rotation(*start.rotation))


def batch_behind(model: nn.Module, example: Example, path: str) -> Tensor:
    """A module's output in train mode, with dropout off: the batch whose statistics make a batch norm the identity."""
    try:
        with torch.no_grad(), RandomAtMean():
            found = calls_of(model, example, [path], training=True)[path][0].output
        return next(iter(outputs_in(found)))
    except Exception:  # batch norm fails on a single value in train mode: use eval mode
        found = calls_of(model, example, [path])[path][0].output
        return next(iter(outputs_in(found)))
