"""Compute the values of learned initialisations, on the model as it is right before its tensors grow.

A plan only names such values (`gradmax/0.weight/0`). Files need no more: they hold the weights themselves.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outgrow.analysis.find_connections import columns_of, rows_of
from outgrow.apply.final_positions import edits_by_tensor
from outgrow.errors import MethodError, ParallelError, Problem
from outgrow.growth_plan.plan import Plan
from outgrow.methods.learned import LearnedInit, learned_name
from outgrow.model.connections import Connection, Observed, is_transposed, observe, weight_of
from outgrow.model.walk_modules import module_at

Given = Callable[[Tensor, tuple[int, ...], torch.Generator], Tensor]


@dataclass(frozen=True, eq=False)
class Learning:
    """New units of one volume whose values are learned. count: the number of different units; the two of a pair count once."""

    volume: str
    init: LearnedInit
    connection: Connection
    count: int


def learned_values(model: nn.Module, learnings: Sequence[Learning], plan: Plan) -> dict[str, Given]:
    """Functions that return the values of new entries, by their names in the plan."""
    if not learnings or any(parameter.is_meta for parameter in model.parameters()):
        return {}
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        name = learnings[0].init.name
        raise ParallelError(f"init={name} sees other batches in each process, and the values would differ: use a drawn init")
    observed = _observed(model, learnings, plan.seed)
    values: dict[str, Given] = {}
    problems: list[Problem] = []
    for learning in learnings:
        seen = observed[learning.volume]
        try:
            if seen.problem:
                raise MethodError(seen.problem)
            values |= _values(model, learning, seen, plan)
        except MethodError as error:
            problems.append(Problem(learning.volume, str(error), "grow it with a drawn init, in a Widen of its own"))
    if problems:
        raise MethodError(f"init={learnings[0].init.name} can't be learned", problems)
    return values


def _observed(model: nn.Module, learnings: Sequence[Learning], seed: int) -> dict[str, Observed]:
    """What each volume's init needs; the batches of an init are run once for all of its volumes."""
    found = {learning.volume: Observed() for learning in learnings}
    for init in dict.fromkeys(learning.init for learning in learnings):
        batches, loss = getattr(init, "batches", None), getattr(init, "loss", None)
        if init.wants and batches is not None and loss is not None:
            own = {learning.volume: learning.connection for learning in learnings if learning.init is init}
            found |= observe(model, own, batches, loss, init.wants, seed)
    return found


def _values(model: nn.Module, learning: Learning, seen: Observed, plan: Plan) -> dict[str, Given]:
    connection, init, count = learning.connection, learning.init, learning.count
    generator = torch.Generator().manual_seed(zlib.crc32(f"{plan.seed}/{learning.volume}/{init.name}".encode()))
    old_rows, old_columns = rows_of(model, connection), columns_of(model, connection)
    rows, columns = init.directions(seen, old_rows, old_columns, count, generator)
    values: dict[tuple[str, int], Tensor] = {}
    if rows is not None:
        writer = module_at(model, connection.writer)
        name, axis, value = _stored(writer, connection.writer, 0, rows.reshape(count, *weight_of(writer).shape[1:]))
        values[name, axis] = value
        values[f"{connection.writer}.bias", 0] = torch.zeros(count)
    start = 0
    for reader in connection.readers if columns is not None else ():
        assert columns is not None
        layer = module_at(model, reader.path)
        shape = weight_of(layer).shape
        block = (shape[0], reader.length, *shape[2:])
        entries = int(torch.Size(block).numel())
        own = columns[:, start : start + entries].reshape(count, *block)
        name, axis, value = _stored(layer, reader.path, 1, own.transpose(0, 1).flatten(1, 2))
        values[name, axis] = value
        start += entries
    return {learned_name(init, tensor, axis): _given(value, tensor, axis, plan) for (tensor, axis), value in values.items()}


def _stored(layer: nn.Module, path: str, axis: int, value: Tensor) -> tuple[str, int, Tensor]:
    """The name of a layer's weight, and an axis and values of a weight (out, in, …) as the layer stores it."""
    return f"{path}.weight", *((1 - axis, value.t()) if is_transposed(layer) else (axis, value))


def _given(value: Tensor, tensor: str, axis: int, plan: Plan) -> Given:
    """A function that returns values, with zeros for new entries of other axes: new units do not read each other at first."""
    edits: Mapping[str, object] = edits_by_tensor(plan)
    where = edits_by_tensor(plan)[tensor].where if tensor in edits else {}

    def given(old: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        result = value
        for other, positions in where.items():
            if other != axis:
                sizes = [shape[a] if a == other else size for a, size in enumerate(result.shape)]
                result = result.new_zeros(sizes).index_copy_(other, torch.from_numpy(positions), result)
        return result

    return given
