"""Kinds of blocks: results for a volume in one block hold in every equal block.

Networks repeat their blocks, and so do the surroundings of the volumes inside them. Two blocks (`layers.3`, `layers.7`) are
equal if the operators that ran in them are the same, one by one, except for the names of their values: equal operators,
arguments and effects, values of equal shapes in equal roles, parameters of equal names within their block, and labels that
coincide wherever those of the other do. All of that is compared exactly; blocks that differ anywhere are of different kinds.

A walk that stays inside one block (every operator it visits, every maker and user of a value that it looks up) gives the same
result, under other names, in an equal block. So it is done once per kind, and its verdict is renamed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from outgrow.analysis.effects import VALUE_FIELDS, Contract, Effect, Operand
from outgrow.analysis.labels import Labels, Layout
from outgrow.analysis.roles import measuring_side, weight_of
from outgrow.analysis.unit_states import Carried, ScoreFeatures, Verdict
from outgrow.trace.operators import Ref

if TYPE_CHECKING:
    from outgrow.analysis.volumes import Anatomy, Volume

NUMBERED = re.compile(r".*[A-Za-z_].*\d")  # paths that end in a number; a bare number could occur in a text by chance


class NotComparable(Exception):
    """Raised for a block that can't be compared."""


@dataclass(frozen=True, eq=False)
class TracedBlock:
    """The operators that ran in a module, and their values, numbered in the order of appearance."""

    path: str
    ops: list[int]
    values: dict[int, int]  # value → its number
    open: set[int]  # values that operators outside the block make or take
    structure: Hashable  # everything that is compared, except for labels
    names: set[int]  # values that are parameters or buffers
    labels: Labels  # all labels, each once, in the order of appearance
    pattern: NDArray[np.int32]  # for each entry of all label arrays, which of `labels` it is

    def alike(self, other: TracedBlock) -> bool:
        return np.array_equal(self.pattern, other.pattern) and self.structure == other.structure


@dataclass(frozen=True, eq=False)
class SimilarVolume:
    """A volume in an earlier block of the same kind, with the two blocks between which names are translated."""

    volume: Volume
    model: TracedBlock
    block: TracedBlock

    def named(self, text: str) -> str:
        """A text about the model block with the names of this block."""
        pattern = rf"(?<![\w.]){re.escape(self.model.path)}(?!\w)"
        return re.sub(pattern, lambda _: self.block.path, text)

    def verdict(self, found: Verdict) -> Verdict:
        return replace(
            found,
            refusal=self.named(found.refusal),
            stuck=self.named(found.stuck),
            readers={(self.named(tensor), axis): demand for (tensor, axis), demand in found.readers.items()},
            rescales=[replace(rescale, tensor=self.named(rescale.tensor)) for rescale in found.rescales],
            eps=[replace(eps, op=self.op(eps.op), module=self.named(eps.module)) for eps in found.eps],
            weights={self.named(writer): self.named(scale) for writer, scale in found.weights.items()},
            scalars={self.op(op): power for op, power in found.scalars.items()},
            tied=self.named(found.tied),
            compared=self.named(found.compared),
            scores=[self._scores(scores) for scores in found.scores],
        )

    def _scores(self, found: ScoreFeatures) -> ScoreFeatures:
        zeroed, kept = (tuple((self.named(t), axis, at) for t, axis, at in rows) for rows in (found.zeroed, found.kept))
        scalars = tuple(replace(scalar, op=self.op(scalar.op)) for scalar in found.scalars)
        return replace(found, op=self.op(found.op), zeroed=zeroed, kept=kept, scalars=scalars)

    def op(self, index: int) -> int:
        return self.block.ops[self.model.ops.index(index)]

    def holds(self, looked_up: Lookups) -> bool:
        """Whether a walk stayed inside the model block, so that its result holds here."""
        closed = self.model.values.keys() - self.model.open
        made = {value for value in looked_up.makers if value not in closed}
        return looked_up.users <= closed and made <= self.model.names


@dataclass(frozen=True)
class Lookups:
    """Values whose makers and whose users a walk has looked up, and the states that it has found."""

    makers: set[int] = field(default_factory=set)
    users: set[int] = field(default_factory=set)
    states: Mapping[int, Carried] = field(default_factory=dict)


class BlockKinds:
    """Finds, for a volume that lies in one block, the first volume like it in a block of the same kind."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy = anatomy
        self._blocks: dict[str, TracedBlock | None] = {}
        self._models: dict[str, list[TracedBlock]] = defaultdict(list)  # by the path of their parent
        self._model_of: dict[str, TracedBlock | None] = {}
        self._likes: dict[str, SimilarVolume | None] = {}
        self._known: dict[str, dict[Hashable, list[Volume]]] = {}

    def like(self, volume: Volume) -> SimilarVolume | None:
        """The corresponding volume in the first block of the same kind; None if the volume is in that block itself."""
        if volume.name not in self._likes:
            self._likes[volume.name] = self._find(volume)
        return self._likes[volume.name]

    def _find(self, volume: Volume) -> SimilarVolume | None:
        for path in self._homes[volume.name]:
            block, model = self._block(path), self._model(path)
            if block is None or model is None or model is block:
                continue
            slots = self._slots(volume, path)
            for first in self._volumes_in(model.path).get(slots, ()):
                if not first.pinned and self._same_units(first, model, volume, block):
                    return SimilarVolume(first, model, block)
        return None

    @cached_property
    def _homes(self) -> dict[str, list[str]]:
        """For each volume, the numbered modules (paths that end in a number) that ran all operators that touch it."""
        return {volume.name: self._paths(volume) for volume in self.anatomy.volumes}

    def _volumes_in(self, path: str) -> dict[Hashable, list[Volume]]:
        """The volumes of a block by their slots."""
        if path not in self._known:
            self._known[path] = defaultdict(list)
            for volume in self._by_home[path]:
                self._known[path][self._slots(volume, path)].append(volume)
        return self._known[path]

    @cached_property
    def _by_home(self) -> dict[str, list[Volume]]:
        result: dict[str, list[Volume]] = defaultdict(list)
        for volume in self.anatomy.volumes:
            for path in self._homes[volume.name]:
                result[path].append(volume)
        return result

    def _paths(self, volume: Volume) -> list[str]:
        ops = self.anatomy.reading.trace.ops
        modules = {ops[index].module for index in self.anatomy.ops_of[volume.name]}
        if not modules:
            return []
        low, high = min(modules).split("."), max(modules).split(".")
        common = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
        paths = [".".join(low[:length]) for length in range(common, 0, -1)]
        return [path for path in paths if NUMBERED.fullmatch(path)]

    @cached_property
    def _ops_in(self) -> dict[str, list[int]]:
        """For each numbered module, the operators that ran there."""
        prefixes: dict[str, list[str]] = {}
        result: dict[str, list[int]] = defaultdict(list)
        for op in self.anatomy.reading.trace.ops:
            if op.module not in prefixes:
                parts = op.module.split(".")
                paths = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
                prefixes[op.module] = [path for path in paths if NUMBERED.fullmatch(path)]
            for path in prefixes[op.module]:
                result[path].append(op.index)
        return result

    def _block(self, path: str) -> TracedBlock | None:
        if path not in self._blocks:
            try:
                self._blocks[path] = BlockDescriber(self.anatomy, path, self._ops_in[path]).block()
            except NotComparable:
                self._blocks[path] = None
        return self._blocks[path]

    def _model(self, path: str) -> TracedBlock | None:
        """The first block of a kind, among the children of one module."""
        if path not in self._model_of:
            block, models = self._block(path), self._models[path.rpartition(".")[0]]
            found = None if block is None else next((model for model in models if model.alike(block)), block)
            if found is not None and found is block:
                models.append(found)
            self._model_of[path] = found
        return self._model_of[path]

    def _slots(self, volume: Volume, path: str) -> Hashable:
        """The slots of a volume, with names relative to a block."""
        places = tuple(
            (slot.tensor.removeprefix(f"{path}."), slot.tensor.startswith(f"{path}."), slot.axis, slot.role, slot.shift)
            for slot in volume.slots
        )
        return volume.count, places

    def _same_units(self, first: Volume, model: TracedBlock, volume: Volume, block: TracedBlock) -> bool:
        """Whether corresponding labels of two blocks belong to corresponding units, and both or none come from parameters."""
        units = self.anatomy.units(first, model.labels)
        births = len(first.births.owner)
        born = [labels < births for labels in (model.labels, block.labels)]
        return np.array_equal(units, self.anatomy.units(volume, block.labels)) and bool((born[0] == born[1])[units >= 0].all())


class BlockDescriber:
    """Describes a block in terms that do not depend on its position in the model."""

    def __init__(self, anatomy: Anatomy, path: str, ops: list[int]) -> None:
        self.anatomy, self.reading, self.path, self.ops = anatomy, anatomy.reading, path, ops
        self.roles = anatomy.volumes[0].births.roles
        self.place = {index: number for number, index in enumerate(ops)}
        self.values: dict[int, int] = {}
        self.open: set[int] = set()
        self.arrays: dict[int, tuple[int, Labels]] = {}
        self.lines: list[Hashable] = []

    def block(self) -> TracedBlock:
        for index in self.ops:
            op, effect = self.reading.trace.ops[index], self.reading.effects[index]
            self.lines.append(
                (
                    op.name,
                    self.name(op.module),
                    self.argument(op.args),
                    tuple((key, self.argument(value)) for key, value in op.kwargs.items()),
                    tuple(map(self.value, op.outputs)),
                    self.effect(effect),
                )
            )
        structure = tuple(self.lines)
        try:
            hash(structure)
        except TypeError as error:
            raise NotComparable from error
        entries = np.concatenate([np.zeros(0, dtype=np.int64), *(array.ravel() for _, array in self.arrays.values())])
        labels, first, inverse = np.unique(entries, return_index=True, return_inverse=True)
        order = np.argsort(first)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        names = {value for value in self.values if self.reading.trace.values[value].name}
        pattern = rank.astype(np.int32)[inverse.reshape(-1)]  # kept for each block: half of the memory
        return TracedBlock(self.path, self.ops, self.values, self.open, structure, names, labels[order], pattern)

    def name(self, name: str) -> Hashable:
        """The path of a module or tensor: relative to the block if it lies inside, otherwise unchanged."""
        if name == self.path or name.startswith(f"{self.path}."):
            return True, name[len(self.path) :]
        return False, name

    def value(self, value: int) -> int:
        """The number of a value; what is known about it is recorded at its first appearance."""
        if value not in self.values:
            self.values[value] = len(self.values)
            item, reading = self.reading.trace.values[value], self.reading
            maker, takers = self.anatomy.maker.get(value), self.anatomy.consumers.get(value, [])
            made = None if maker is None else self.place.get(maker.index)
            inside = [self.place[index] for index in takers if index in self.place]
            if len(inside) < len(takers) or (maker is not None and made is None):
                self.open.add(value)
            roles = [self.roles.get((item.name, axis)) for axis in range(len(item.shape))] if item.name else []
            self.lines.append(
                (
                    item.shape,
                    item.floating,
                    item.kind,
                    self.name(item.name) if item.name else None,
                    made,
                    tuple(inside),
                    value in self.open,
                    value in reading.trace.outputs,
                    reading.facts(value),
                    tuple(None if role is None else frozenset(role) for role in roles),
                    self.layout(reading.layouts[value]),
                )
            )
        return self.values[value]

    def layout(self, layout: Layout) -> Hashable:
        return tuple((block.axes, block.labels.shape, self.array(block.labels)) for block in layout)

    def array(self, labels: Labels) -> int:
        return self.arrays.setdefault(id(labels), (len(self.arrays), labels))[0]

    def argument(self, item: Any) -> Hashable:
        if isinstance(item, Ref):
            return "value", self.value(item.value)
        if isinstance(item, (tuple, list)):
            return tuple(map(self.argument, item))
        return type(item), item  # 1 and 1.0 are equal, but may mean different things

    def effect(self, effect: Effect) -> Hashable:
        kind = type(effect)
        if kind not in VALUE_FIELDS:
            raise NotComparable
        parts = []
        for item in fields(effect):
            held = getattr(effect, item.name)
            if item.name in VALUE_FIELDS[kind]:
                held = None if held is None else tuple(map(self.value, held)) if isinstance(held, tuple) else self.value(held)
            parts.append(self.part(held))
        if isinstance(effect, Contract):
            for found in (measuring_side, weight_of):  # depends on how the sides are computed, also outside the block
                side = found(self.reading, effect)
                parts.append(None if side is None else side is effect.left)
        return kind, *parts

    def part(self, held: Any) -> Hashable:
        if isinstance(held, Operand):
            return "operand", self.value(held.value), self.layout(held.layout)
        if isinstance(held, tuple):
            return tuple(map(self.part, held))
        return self.name(held) if isinstance(held, str) else (type(held), held)
