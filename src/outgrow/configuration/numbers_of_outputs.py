"""Fields of a configuration that hold the size of the vocabulary, or the names of classes.

Transformers has no field for the number of classes: it is the length of `id2label`. Old names stay, and new classes are named
as Transformers would: LABEL_7.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outgrow.growth_plan.plan import Change
from outgrow.methods.fill_new_entries import NAME

VOCABULARY = "vocab"  # in the names of fields
LABELS = ("id2label", "label2id")


def is_new_outputs(change: Change) -> bool:
    """Whether a volume has gained entries of the model's outputs or vocabulary."""
    return change.method.startswith(NAME)


def more_labels(labels: Mapping[Any, Any], count: int) -> dict[Any, Any]:
    """The names of classes (number → name, or name → number), with names for new ones.

    Example:
        >>> more_labels({0: "cat", 1: "dog"}, 3), more_labels({"cat": 0, "dog": 1}, 3)
        ({0: 'cat', 1: 'dog', 2: 'LABEL_2'}, {'cat': 0, 'dog': 1, 'LABEL_2': 2})
    """
    named = {number: f"LABEL_{number}" for number in range(len(labels), count)}
    by_name = any(isinstance(value, int) for value in labels.values())
    return {**labels, **({name: number for number, name in named.items()} if by_name else named)}
