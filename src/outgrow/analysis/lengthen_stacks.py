"""Derive the volumes of a model with long stacks from those of its short trace.

In the short trace (see `analysis/shorten_stacks.py`) one segment M represents others, its copies. A copy of M after M changes
no result, and the results in the copy are those in M under other names, if M *represents itself*:

    1. The values carried into M and out of it have the same shapes and facts, and labels in the same pattern and of the same
       classes. Values made for each segment before the run have the same facts, and no labels. So the copy is interpreted as M
       was, and ties nothing that M has not tied.
    2. A walk along the path of a volume that reaches beyond M has the same state before and after M, or has ended before.
    3. A walk along the path of a volume inside M reads only M and values that all segments share.
    4. Volumes inside M are those inside the previous segment, under other names; likewise the slots in M of volumes that reach
       beyond it. No volume that reaches beyond M is first used, or named, there.

All of that is checked. Where it does not hold, there is no result, and the full trace is interpreted instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from outgrow.analysis.labels import Labels
from outgrow.analysis.repeated_blocks import Lookups
from outgrow.analysis.shorten_stacks import ShortTrace, Stack
from outgrow.analysis.unit_states import Carried, Verdict
from outgrow.analysis.volumes import Anatomy, AxisLabels, Slot, Volume


class Renaming:
    """Replaces paths of some modules by those of others, in names and texts."""

    def __init__(self, old: Sequence[str], new: Sequence[str]) -> None:
        self.paths = dict(zip(old, new, strict=True))
        self.pattern = _mentioning(old)

    def __call__(self, text: str) -> str:
        return self.pattern.sub(lambda found: self.paths[found[0]], text) if text else text


def _mentioning(paths: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds these modules, their submodules and their tensors by name."""
    longest_first = sorted(paths, key=len, reverse=True)
    return re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")


@dataclass(frozen=True, eq=False)
class RenamedAxisLabels(AxisLabels):
    """Axis labels whose tensors represent others, by name."""

    stand_for: Mapping[str, Sequence[str]] = field(default_factory=dict)
    order: Mapping[str, int] = field(default_factory=dict)  # position of each tensor of the model

    def slots(self, labels: Labels) -> tuple[Slot, ...]:
        found = [
            replace(slot, tensor=name)
            for slot in super().slots(labels)
            for name in self.stand_for.get(slot.tensor, (slot.tensor,))
        ]
        return tuple(sorted(found, key=lambda slot: (self.order[slot.tensor], slot.axis)))


def stationary(short: ShortTrace, anatomy: Anatomy) -> bool:
    """Condition 1, for all segments that represent others: values carried in and out are equally described."""
    return all(_stationary(stack, anatomy) for stack in short.stacks)


def _stationary(stack: Stack, anatomy: Anatomy) -> bool:
    reading, root = anatomy.reading, anatomy.root
    if any(reading.layouts[value] or reading.summed[value] for values in stack.given for value in values):
        return False
    if any([*map(reading.facts, values)] != [*map(reading.facts, stack.given[0])] for values in stack.given):
        return False
    sides: list[list[Labels]] = [[], []]
    for values in zip(stack.before, stack.after, strict=True):
        axes = [[(block.axes, block.labels.shape) for block in reading.layouts[value]] for value in values]
        facts = [(reading.facts(value), reading.summed[value]) for value in values]
        if axes[0] != axes[1] or facts[0] != facts[1]:
            return False
        for side, value in zip(sides, values, strict=True):
            side += [block.labels for block in reading.layouts[value]]
    if not all(np.array_equal(root[one], root[other]) for one, other in zip(*sides, strict=True)):
        return False
    shared = [block.labels for value in stack.shared for block in reading.layouts[value]]
    return np.array_equal(_pattern([*sides[0], *shared]), _pattern([*sides[1], *shared]))


def lengthened(short: ShortTrace, anatomy: Anatomy) -> list[Volume] | None:
    """All volumes of the full model; None if a segment does not represent its copies.

    The segments must be stationary, and all volumes judged.
    """
    parts = [_StackVolumes(stack, anatomy) for stack in short.stacks]
    if not all(part.stands_for_itself() for part in parts):
        return None
    order = {name: number for number, name in enumerate(short.names)}
    everywhere = {name: names for part in parts for name, names in part.stand_for().items()}
    inside = {id(volume): part for part in parts for volume in part.inner}
    beyond = {id(volume) for part in parts for volume in part.beyond}
    result: list[Volume] = []
    for volume in anatomy.volumes:
        if id(volume) in beyond:
            volume = replace(volume, births=_renamed_labels(volume.births, everywhere, order))
        result.append(volume)
        part = inside.get(id(volume))
        if part is not None and volume is part.inner[-1]:
            result += part.copied(order)
    return result


def multiplicities(short: ShortTrace) -> dict[str, int]:
    """For each tensor of a segment that represents others, the number of tensors that it represents."""
    values = short.trace.values
    return {
        values[value].name: 1 + len(stack.copies)
        for stack in short.stacks
        for value in stack.belonging[1]
        if values[value].name
    }


def _renamed_labels(births: AxisLabels, stand_for: Mapping[str, Sequence[str]], order: Mapping[str, int]) -> AxisLabels:
    return RenamedAxisLabels(births.origins, births.owner, births.roles, births.vectors, stand_for, order)


class _StackVolumes:
    """A stack, and the volumes in the segment that represents its copies: inside it, or also reaching beyond it."""

    def __init__(self, stack: Stack, anatomy: Anatomy) -> None:
        self.stack, self.anatomy = stack, anatomy
        self.names = [self._names(values) for values in stack.belonging]
        tensors = {id(volume): {slot.tensor for slot in volume.slots} for volume in anatomy.volumes}
        self.firsts = [volume for volume in anatomy.volumes if tensors[id(volume)] <= self.names[0]]
        self.inner = [volume for volume in anatomy.volumes if tensors[id(volume)] <= self.names[1]]
        self.beyond = [v for v in anatomy.volumes if tensors[id(v)] & self.names[1] and not tensors[id(v)] <= self.names[1]]

    def _names(self, values: set[int]) -> set[str]:
        return {self.anatomy.reading.trace.values[value].name for value in values} - {""}

    def stands_for_itself(self) -> bool:
        return self._like_the_first() and self._unseen_from_inside() and self._same_states()

    def _like_the_first(self) -> bool:
        """Condition 4: the volumes of the segment correspond to those of the previous one."""
        renamed = Renaming(self.stack.model.paths, self.stack.first.paths)
        if [_described(volume, renamed) for volume in self.inner] != [_described(volume) for volume in self.firsts]:
            return False
        here, there = _mentioning(self.stack.model.paths), _mentioning(self.stack.first.paths)
        foremost = all(self.stack.first.paths <= paths for paths in (self.stack.model.paths, *self.stack.copies))
        for volume in self.beyond:
            slots = [[slot for slot in volume.slots if slot.tensor in names] for names in self.names]
            if slots[0] != [replace(slot, tensor=renamed(slot.tensor)) for slot in slots[1]]:
                return False
            texts = f"{volume.name}\n{volume.pinned}\n{volume.reason}"
            if here.search(texts) or (not foremost and there.search(texts)):
                return False
        return True

    def _unseen_from_inside(self) -> bool:
        """Condition 3: verdicts on volumes inside the segment depend only on it and on values that all segments share."""
        stack = self.stack
        own = stack.belonging[0] | stack.belonging[1]
        makers, users = (own | set(stack.shared)) - set(stack.before), own - set(stack.before) - set(stack.after)

        def unseen(volume: Volume, looked_up: Lookups) -> bool:
            like = self.anatomy.kinds.like(volume)
            if like is not None and like.holds(looked_up):  # looked up in another block, and inside that
                return any(f"{like.block.path}.".startswith(f"{path}.") for path in stack.model.paths)
            return looked_up.makers <= makers and looked_up.users <= users

        return all(
            all(op in stack.model for op in self.anatomy.ops_of[volume.name])
            and all(unseen(volume, looked_up) for _, looked_up in self._verdicts(volume))
            for volume in self.inner
        )

    def _same_states(self) -> bool:
        """Condition 2: walks beyond the segment have the same state before and after it, or end before it."""
        for verdict, looked_up in (found for volume in self.beyond for found in self._verdicts(volume)):
            for before, after in zip(self.stack.before, self.stack.after, strict=True):
                one, other = looked_up.states.get(before), looked_up.states.get(after)
                ended = other is None and bool(verdict.refusal)
                if not ended and (one is None or other is None or _summary(one) != _summary(other)) and one is not other:
                    return False
        return True

    def _verdicts(self, volume: Volume) -> list[tuple[Verdict, Lookups]]:
        return [found for (name, _), found in self.anatomy.verdicts.items() if name == volume.name]

    def stand_for(self) -> dict[str, list[str]]:
        """For each tensor of the segment, itself and its copies."""
        renamings = [Renaming(self.stack.model.paths, paths) for paths in self.stack.copies]
        return {name: [name, *(renamed(name) for renamed in renamings)] for name in self.names[1]}

    def copied(self, order: Mapping[str, int]) -> list[Volume]:
        """The volumes inside all copies of the segment."""
        result: list[Volume] = []
        for paths in self.stack.copies:
            renamed = Renaming(self.stack.model.paths, paths)
            births = _renamed_labels(self.inner[0].births, {name: [renamed(name)] for name in self.names[1]}, order)
            result += [
                replace(v, name=renamed(v.name), pinned=renamed(v.pinned), reason=renamed(v.reason), births=births)
                for v in self.inner
            ]
        return result


def _described(volume: Volume, renamed: Renaming | None = None) -> list[object]:
    """Everything that is reported about a volume."""
    rename = renamed or str
    slots = [replace(slot, tensor=rename(slot.tensor)) for slot in volume.slots]
    texts = [rename(text) for text in (volume.name, volume.pinned, volume.reason)]
    return [*texts, volume.kind, volume.unit, volume.count, volume.grain, volume.methods, slots]


def _summary(carried: Carried) -> tuple[object, ...]:
    """What decides how a walk continues from a value; a mean of one particular value equals nothing else."""
    passed = {bool(scale) for _, scale in carried.writers}
    mean = object() if carried.mean is not None else None
    return carried.state, carried.exponent, carried.ratio, carried.standardised, passed, mean


def _pattern(arrays: Sequence[Labels]) -> Labels:
    """For each entry, the number of its label in the order of first appearance."""
    entries = np.concatenate([np.zeros(0, dtype=np.int64), *(array.ravel() for array in arrays)])
    _, first, inverse = np.unique(entries, return_index=True, return_inverse=True)
    rank = np.empty_like(first)
    rank[np.argsort(first)] = np.arange(len(first))
    found: Labels = rank[inverse.reshape(-1)]
    return found
