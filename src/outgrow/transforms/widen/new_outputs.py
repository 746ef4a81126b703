"""Outputs that gain entries: kinds "vocab" and "outputs".

The rows of an embedding and of an output layer can't grow with other volumes, since the model's inputs index them and its
outputs show them. A request for one of these kinds appends rows: indices and entries of outputs that were there before keep
their meaning and their values. What is compared after the growth are the old entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from torch import nn

from outgrow.analysis.labels import Labels
from outgrow.analysis.volumes import Anatomy, Volume
from outgrow.growth_plan.plan import Setting
from outgrow.methods.all_methods import EXTENDING
from outgrow.transforms.widen.make_plan import Choice
from outgrow.transforms.widen.notes import OUTPUTS
from outgrow.verify.compare_old_entries import NewOutputEntries

OLD_ENTRIES = (
    ", so entries that were there before would change (a softmax or a loss in the model: pass an example without labels, or "
    "let the model return its logits)"
)
SIZE_WORDS = ("vocab", "classes", "labels")  # in names of attributes that hold a number of outputs
NOTE = f"{OUTPUTS} "  # beginning of lines in reports
TOKENIZER = f"{NOTE}the tokenizer is not changed: add the new tokens there"
LOSS = f"{NOTE}a softmax over all entries, and a loss with it, changes with their number"


def extended(volume: Volume) -> Volume:
    """A volume whose entries may be appended to, as one that can grow."""
    return replace(volume, pinned="")


def new_output_entries(anatomy: Anatomy, choices: Sequence[Choice]) -> tuple[NewOutputEntries, ...]:
    """The outputs that gain entries, and where."""
    found: dict[NewOutputEntries, None] = {}
    reading = anatomy.reading
    for choice in (choice for choice in choices if choice.volume.kind in EXTENDING):
        for value in reading.trace.outputs:
            for block in reading.layouts[value]:
                ids = anatomy.units(choice.volume, block.labels)
                if block.labels.ndim != 1 or not (ids >= 0).any():
                    continue
                after = np.insert(np.arange(len(ids)), np.repeat(_ends(ids, choice), choice.new), -1)
                shape = reading.trace.values[value].shape
                new = tuple(np.flatnonzero(after < 0).tolist())
                found[NewOutputEntries(len(shape), block.axes[0], len(ids), new)] = None
    return tuple(found)


def _ends(ids: Labels, choice: Choice) -> Labels:
    """The positions after the last unit of a volume in an output; several if the output repeats the volume."""
    found: Labels = np.flatnonzero(ids == choice.volume.count - 1) + 1
    return found


def size_settings(model: nn.Module, choices: Sequence[Choice]) -> Iterator[Setting]:
    """Settings for attributes such as `num_classes` of the modules around a grown layer, which no forward pass may read."""
    for choice in (choice for choice in choices if choice.volume.kind in EXTENDING):
        old, new = choice.volume.size, choice.volume.size + choice.new
        paths: dict[str, None] = {}
        for slot in choice.volume.slots:
            steps = slot.tensor.split(".")[:-1]
            paths.update(dict.fromkeys(".".join(steps[:count]) for count in range(len(steps) + 1)))
        for path in paths:
            for name, value in vars(model.get_submodule(path)).items():
                if type(value) is int and value == old and any(word in name for word in SIZE_WORDS):
                    yield Setting(path, name, old, new)


def output_notes(choices: Sequence[Choice]) -> list[str]:
    """Lines of the report on outputs with new entries."""
    notes = []
    for choice in (choice for choice in choices if choice.volume.kind in EXTENDING):
        new = "1 new entry" if choice.new == 1 else f"{choice.new} new entries"
        notes.append(f"{NOTE}{choice.volume.name} has {new} at the end; the first {choice.volume.size} are as before")
    kinds = {choice.volume.kind for choice in choices}
    notes += [LOSS] if kinds & {*EXTENDING} else []
    return notes + ([TOKENIZER] if "vocab" in kinds else [])
