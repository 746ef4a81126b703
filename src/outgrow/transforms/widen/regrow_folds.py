"""The Folds of a model after volumes on either side of them have grown: which channels they add up, and with which factors.

`modules/fold.py` has the algebra. A Fold is a list of *entries*: a channel of its input is added to a channel of its result, as
it is, as one of a pair, or times a factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import nn

from outgrow.analysis.labels import Labels, block_at
from outgrow.analysis.slot_positions import Irregular, unit_runs
from outgrow.analysis.unit_states import State
from outgrow.analysis.volumes import Anatomy
from outgrow.apply.fold_skips import fold_refusal
from outgrow.growth_plan.plan import Setting
from outgrow.methods.net2net import Net2Net
from outgrow.modules.fold import Fold
from outgrow.trace.operators import FOLD, Op
from outgrow.transforms.widen.make_plan import Choice, draft_of

Ranges = tuple[tuple[float, ...], ...]


def fold_settings(model: nn.Module, anatomy: Anatomy, choices: Sequence[Choice], seed: int) -> list[Setting]:
    """Settings of the Folds after the volumes on either side of them have grown."""
    settings: dict[str, list[Setting]] = {}
    for op in anatomy.reading.trace.ops:
        if op.name != FOLD:
            continue
        fold = model.get_submodule(op.module)
        assert isinstance(fold, Fold)
        try:
            after = _regrown(anatomy, fold, op, choices, seed)
        except Irregular:
            raise fold_refusal(op.module, "its channels have no regular order there") from None
        new = [
            Setting(op.module, name, getattr(fold, name), value)
            for name, value in after.items()
            if getattr(fold, name) != value
        ]
        if settings.setdefault(op.module, new) != new:
            raise fold_refusal(op.module, "that code runs several times, on volumes that are now of different sizes")
    return [setting for new in settings.values() for setting in new]


@dataclass
class Entries:
    """The entries of a Fold, channel by channel.

    keep: (input, result). pairs: (input of x_L, input of x_R, result). shared: (input, result) and a factor.
    """

    keep: list[tuple[int, int]]
    pairs: list[tuple[int, int, int]]
    shared: dict[tuple[int, int], float] = field(default_factory=dict)

    def move_inputs(self, moved: Labels) -> None:
        self.keep = [(int(moved[x]), result) for x, result in self.keep]
        self.pairs = [(int(moved[left]), int(moved[right]), result) for left, right, result in self.pairs]
        self.shared = {(int(moved[x]), result): factor for (x, result), factor in self.shared.items()}

    def move_results(self, moved: Labels) -> None:
        self.keep = [(x, int(moved[result])) for x, result in self.keep]
        self.pairs = [(left, right, int(moved[result])) for left, right, result in self.pairs]
        self.shared = {(x, int(moved[result])): factor for (x, result), factor in self.shared.items()}

    def results(self, inputs: set[int]) -> list[int]:
        """The channels to which some input channels are added; pairs do not count."""
        return list(dict.fromkeys(result for x, result in (*self.keep, *self.shared) if x in inputs))

    def share(self, source: int, kept: float, copies: Sequence[tuple[int, float]]) -> None:
        """Divide an input channel among itself and its copies. A pair that contains it does not cancel by itself any more."""
        broken = [pair for pair in self.pairs if source in pair[:2]]
        self.pairs = [pair for pair in self.pairs if pair not in broken]
        for left, right, result in broken:
            self.shared |= {(left, result): 1.0, (right, result): -1.0}
        self.shared |= {(x, result): 1.0 for x, result in self.keep if x == source}
        self.keep = [(x, result) for x, result in self.keep if x != source]
        for (x, result), factor in list(self.shared.items()):
            if x == source:
                self.shared |= {(copy, result): factor * share for copy, share in copies}
                self.shared[source, result] = factor * kept

    def copy_result(self, source: int, copy: int) -> None:
        """Give a new channel of the result the value of an existing one."""
        self.keep += [(x, copy) for x, result in self.keep if result == source]
        self.pairs += [(left, right, copy) for left, right, result in self.pairs if result == source]
        self.shared |= {(x, copy): factor for (x, result), factor in self.shared.items() if result == source}


def _regrown(anatomy: Anatomy, fold: Fold, op: Op, choices: Sequence[Choice], seed: int) -> dict[str, int | Ranges]:
    """The attributes of a Fold after growth."""
    entries = _entries(fold)
    sides = op.args[0].value, op.outputs[0]
    blocks = [block_at(anatomy.reading.layouts[value], fold.dim) for value in sides]
    sizes = [anatomy.reading.trace.values[value].shape[fold.dim] for value in sides]
    olds = [np.arange(size) for size in sizes]  # for each current position, the position it had at first, or −1
    for choice in choices:
        for side, block in enumerate(blocks):
            first = np.full(sizes[side], -1) if block is None else anatomy.units(choice.volume, block.labels)
            ids = np.where(olds[side] >= 0, first[np.maximum(olds[side], 0)], -1)
            if (ids < 0).all():
                continue
            table, *others = unit_runs(ids, choice.volume.count)  # (run, unit, offset)
            if others:
                raise Irregular
            block_size = choice.new * table.shape[2]
            after = np.insert(np.arange(len(ids)), np.repeat(table[:, -1, -1] + 1, block_size), -1)
            moved = np.flatnonzero(after >= 0)
            olds[side] = np.where(after >= 0, olds[side][np.maximum(after, 0)], -1)
            new = np.flatnonzero(after < 0).reshape(len(table), choice.new, -1)  # (run, new unit, offset)
            (_take_results if side else _take_inputs)(entries, moved, moved[table], new, choice, seed)
    return {
        "keep": _ranges(entries.keep),
        "pairs": _ranges(entries.pairs),
        "outputs": len(olds[1]),
        "shared": _shared_ranges(entries.shared),
    }


def _take_inputs(entries: Entries, moved: Labels, table: Labels, new: Labels, choice: Choice, seed: int) -> None:
    """Add the entries of new units of the input, run by run."""
    entries.move_inputs(moved)
    state = choice.method.state
    for old_units, new_units in zip(table, new, strict=True):
        goals = entries.results(set(old_units.ravel().tolist()))
        if state is State.PAIR and goals:
            left, right = (half.ravel().tolist() for half in np.split(new_units, 2))
            entries.pairs += [(*pair, goals[index % len(goals)]) for index, pair in enumerate(zip(left, right, strict=True))]
        elif state is State.ZERO and goals:
            entries.keep += [(x, goals[index % len(goals)]) for index, x in enumerate(new_units.ravel().tolist())]
        elif state is State.COPY and isinstance(choice.method, Net2Net):  # others: the existing units alone are passed on
            draft = draft_of(choice, seed)
            kept, given = draft.extra[: choice.volume.count], draft.extra[choice.volume.count :]
            for unit in sorted(set(draft.models)):
                copies = [copy for copy, model in enumerate(draft.models) if model == unit]
                for offset, source in enumerate(old_units[unit].tolist()):
                    parts = [(int(new_units[copy, offset]), float(given[copy])) for copy in copies]
                    entries.share(source, float(kept[unit]), parts)


def _take_results(entries: Entries, moved: Labels, table: Labels, new: Labels, choice: Choice, seed: int) -> None:
    """Fill new channels of the result: with copies of existing ones, or with zeros."""
    entries.move_results(moved)
    if choice.method.state is State.COPY:
        models = draft_of(choice, seed).models
        for old_units, new_units in zip(table, new, strict=True):
            for copy, model in enumerate(models):
                for source, made in zip(old_units[model].tolist(), new_units[copy].tolist(), strict=True):
                    entries.copy_result(source, made)


def _entries(fold: Fold) -> Entries:
    """The entries in a Fold's ranges, whose last field is their length."""
    keep = [(x + step, to + step) for x, to, count in fold.keep for step in range(count)]
    pairs = [(left + step, right + step, to + step) for left, right, to, count in fold.pairs for step in range(count)]
    shared = {(x + step, to + step): factor for x, to, factor, count in fold.shared for step in range(count)}
    return Entries(keep, pairs, shared)


def _ranges(entries: Sequence[tuple[int, ...]]) -> Ranges:
    """The ranges that contain these entries, in their order."""
    result: list[list[int]] = []
    for entry in entries:
        if result and list(entry) == [start + result[-1][-1] for start in result[-1][:-1]]:
            result[-1][-1] += 1
        else:
            result.append([*entry, 1])
    return tuple(tuple(one) for one in result)


def _shared_ranges(shared: dict[tuple[int, int], float]) -> Ranges:
    """The ranges of entries with equal factors."""
    result: list[tuple[int, int, float, int]] = []
    for (x, to), factor in sorted(shared.items()):
        if result and (x, to, factor) == (result[-1][0] + result[-1][3], result[-1][1] + result[-1][3], result[-1][2]):
            result[-1] = (*result[-1][:3], result[-1][3] + 1)
        else:
            result.append((x, to, factor, 1))
    return tuple(result)
