"""The volumes of a model with long stacks, from those that were found with short ones.

In the short trace (see `analysis/shorten_stacks.py`) one segment M stands for others, its copies. A copy of M behind M changes
nothing of what was found, and what is found in the copy is what was found in M under other names, if M *stands for itself*:

    1. What is known of the values carried into M is known of those carried out of it: the same shapes and facts, labels in the
       same pattern, and of the same classes. Values made for each segment beforehand have the same facts, and no labels. So the
       copy is read as M was, and ties nothing that M has not tied.
    2. A walk along the path of a volume that reaches beyond M has the same state before and behind it, or has ended before.
    3. A walk along the path of a volume inside M looks at nothing but M and what all segments share.
    4. Volumes inside M are those inside the segment before it, under other names; likewise the slots in M of volumes that
       reach beyond it. No volume that reaches beyond M is first used, or named, there.

All of that is checked. Where it does not hold, there is no answer, and the whole trace is read instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from outgrow.analysis.labels import Labels
from outgrow.analysis.repeated_blocks import Lookups
from outgrow.analysis.shorten_stacks import Short, Stack
from outgrow.analysis.unit_states import Carried, Verdict
from outgrow.analysis.volumes import Anatomy, AxisLabels, Slot, Volume


class Renaming:
    """What is called after some modules, called after others."""

    def __init__(self, old: Sequence[str], new: Sequence[str]) -> None:
        self.paths = dict(zip(old, new, strict=True))
        self.pattern = _mentioning(old)

    def __call__(self, text: str) -> str:
        return self.pattern.sub(lambda found: self.paths[found[0]], text) if text else text


def _mentioning(paths: Iterable[str]) -> re.Pattern[str]:
    """Finds names of modules, of what is inside them, and of their tensors."""
    longest_first = sorted(paths, key=len, reverse=True)
    return re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")


@dataclass(frozen=True, eq=False)
class RenamedAxisLabels(AxisLabels):
    """Births whose tensors stand for others, by name."""

    stand_for: Mapping[str, Sequence[str]] = field(default_factory=dict)
    order: Mapping[str, int] = field(default_factory=dict)  # of all tensors of the model

    def slots(self, labels: Labels) -> tuple[Slot, ...]:
        found = [
            replace(slot, tensor=name)
            for slot in super().slots(labels)
            for name in self.stand_for.get(slot.tensor, (slot.tensor,))
        ]
        return tuple(sorted(found, key=lambda slot: (self.order[slot.tensor], slot.axis)))


def stationary(short: Short, anatomy: Anatomy) -> bool:
    """Whether all that is known of what is carried into the segments that stand for others is known of what is carried out."""
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


def lengthened(short: Short, anatomy: Anatomy) -> list[Volume] | None:
    """All volumes of the whole model; none if a segment does not stand for its copies.

    The segments are stationary, and all volumes have been judged.
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


def multiplicities(short: Short) -> dict[str, int]:
    """For each tensor of a segment that stands for others, how many there are of it."""
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
    """A stack, and the volumes that lie in the segment that stands for its copies, there only or beyond it too."""

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
        """Whether volumes lie in the segment as they lie in the one before it, and those beyond it have nothing to do there."""
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
        """Whether verdicts on volumes inside the segment were found by looking at it, and at what all segments share."""
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
        """Whether walks beyond the segment were in the same state before and behind it, or ended before."""
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
    """All that is reported of a volume."""
    rename = renamed or str
    slots = [replace(slot, tensor=rename(slot.tensor)) for slot in volume.slots]
    texts = [rename(text) for text in (volume.name, volume.pinned, volume.reason)]
    return [*texts, volume.count, volume.grain, volume.methods, slots]


def _summary(carried: Carried) -> tuple[object, ...]:
    """What decides how a walk goes on from a value; a mean of a single value is told apart from everything."""
    passed = {bool(scale) for _, scale in carried.writers}
    mean = object() if carried.mean is not None else None
    return carried.state, carried.exponent, carried.ratio, carried.standardised, passed, mean


def _pattern(arrays: Sequence[Labels]) -> Labels:
    """For each entry, which of the different labels it is, in the order of their appearance."""
    entries = np.concatenate([np.zeros(0, dtype=np.int64), *(array.ravel() for array in arrays)])
    _, first, inverse = np.unique(entries, return_index=True, return_inverse=True)
    rank = np.empty_like(first)
    rank[np.argsort(first)] = np.arange(len(first))
    found: Labels = rank[inverse.reshape(-1)]
    return found
