"""The layers that write and read a volume, where one layer writes it and its units are changed value by value on the way."""

from __future__ import annotations

import torch
from torch import nn

from outgrow.analysis.effects import Contract, Folded, Mix, Normalise, Reduce
from outgrow.analysis.roles import READS, SCALES, WRITES
from outgrow.analysis.slot_positions import Irregular, slot_ids, unit_runs
from outgrow.analysis.volumes import Anatomy, Slot, Volume
from outgrow.model.connections import LAYERS, Connection, Reader, is_linear, is_transposed, weight_of
from outgrow.model.walk_modules import module_at

REORDERS = ("roll", "flip", "index", "gather", "index_select", "cumsum", "cumprod", "sort", "scatter", "constant_pad_nd")


POOLING = ("mean", "extreme")


class NoConnection(Exception):
    """Why a volume has no plain connection from one writer to its readers."""


def connection_of(model: nn.Module, anatomy: Anatomy, volume: Volume) -> Connection:
    """The connection of a volume; NoConnection with the reason if it has none."""
    if volume.pinned:
        raise NoConnection(volume.pinned)
    slots = {role: [s for s in volume.slots if s.role == role and not s.vector] for role in (WRITES, SCALES, READS)}
    if volume.kind == "heads" or volume.grain != 1:
        raise NoConnection("its units are heads or groups of channels, and not rows of one layer")
    if len(slots[WRITES]) != 1:
        names = ", ".join(slot.tensor for slot in slots[WRITES][:3]) + (" …" if len(slots[WRITES]) > 3 else "")
        raise NoConnection(
            f"{len(slots[WRITES])} tensors write it ({names}), and one is needed" if names else "no weight writes it"
        )
    if slots[SCALES]:
        raise NoConnection(f"{slots[SCALES][0].tensor} scales each of its units by more than one value")
    if not slots[READS]:
        raise NoConnection("no weight reads it")
    (write,) = slots[WRITES]
    writer, rows, _ = _layer(model, anatomy, volume, write, axis=0)
    others = [s.tensor for s in volume.slots if s.role == WRITES and s.vector and s.tensor != f"{writer}.bias"]
    if others:
        raise NoConnection(f"{others[0]} is added to it")
    readers = []
    for slot in slots[READS]:
        path, columns, length = _layer(model, anatomy, volume, slot, axis=1)
        readers.append(Reader(path, columns, length))
    connection = Connection(writer, rows, tuple(readers))
    _check_path(anatomy, volume, connection)
    return connection


def _layer(model: nn.Module, anatomy: Anatomy, volume: Volume, slot: Slot, axis: int) -> tuple[str, tuple[int, ...], int]:
    """The layer of a weight: its path, the positions of the units, and the number of adjacent positions per unit.

    axis: that of the units in a weight (out, in, …).
    """
    path, _, own = slot.tensor.rpartition(".")
    layer = module_at(model, path)
    kind = type(layer).__name__
    known = isinstance(layer, LAYERS) or is_linear(layer)
    if own != "weight" or not known or slot.axis != (1 - axis if is_transposed(layer) else axis):
        raise NoConnection(f"{slot.tensor} is not the weight of a linear layer or a convolution (it belongs to {kind})")
    if getattr(layer, "groups", 1) != 1:
        raise NoConnection(f"{path} is a grouped convolution")
    try:
        tables = unit_runs(slot_ids(anatomy, volume, slot), volume.count)  # (run, unit, offset)
    except Irregular:
        raise NoConnection(f"its units are in no regular order in {slot.tensor}") from None
    if len(tables) != 1 or len(tables[0]) != 1 or (axis == 0 and tables[0].shape[2] != 1):
        raise NoConnection(f"{slot.tensor} holds more than one row of weights per unit")
    (table,) = tables[0]
    if table.shape[1] != 1 and not is_linear(layer):
        raise NoConnection(f"{path} reads several channels per unit")
    return path, tuple(table.reshape(-1).tolist()), table.shape[1]


def _check_path(anatomy: Anatomy, volume: Volume, connection: Connection) -> None:
    """Units must reach the readers value by value; pooling is allowed."""
    reading = anatomy.reading
    for index in anatomy.ops_of[volume.name]:
        op, effect = reading.trace.ops[index], reading.effects[index]
        if op.module in connection.paths or all(reading.constant[output] for output in op.outputs):
            continue
        mixes = isinstance(effect, (Normalise, Mix, Folded)) or (isinstance(effect, Contract) and effect.contracted)
        if isinstance(effect, Reduce):  # over positions, it is pooling
            mixes = effect.how not in POOLING or not any(_carries(anatomy, volume, output) for output in op.outputs)
        if mixes or op.name.removeprefix("aten.") in REORDERS:
            place = op.module or "the model"
            raise NoConnection(f"between {connection.writer} and its readers, {op.name} in {place} combines units or positions")


def _carries(anatomy: Anatomy, volume: Volume, value: int) -> bool:
    """Whether a value has entries per unit."""
    return any((anatomy.units(volume, block.labels) >= 0).any() for block in anatomy.reading.layouts[value])


def rows_of(model: nn.Module, connection: Connection) -> torch.Tensor:
    """The present rows: (unit, entry of a row)."""
    return _select(weight_of(module_at(model, connection.writer)), 0, connection.rows).flatten(1)


def columns_of(model: nn.Module, connection: Connection) -> torch.Tensor:
    """The present columns: (unit, entry of a column in all readers: output, offset, kernel position)."""
    parts = []
    for reader in connection.readers:
        weight = weight_of(module_at(model, reader.path))
        mine = _select(weight, 1, reader.columns).unflatten(1, (-1, reader.length))  # (out, unit, offset, …)
        parts.append(mine.transpose(0, 1).flatten(1))
    return torch.cat(parts, dim=1)


def _select(weight: torch.Tensor, axis: int, positions: tuple[int, ...]) -> torch.Tensor:
    found = weight.detach().index_select(axis, torch.tensor(positions, device=weight.device))
    return found if found.dtype == torch.float64 else found.float()
