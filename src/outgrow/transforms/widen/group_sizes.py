"""Attributes that hold how many query heads share a key head, for code that repeats keys only in some passes.

torch's attention kernel takes shared keys as they are, unless there is a mask. So the pass on an example may not read the
attribute, and a batch with padding reads it later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from outgrow.analysis.attention_products import QUERY
from outgrow.growth_plan.plan import Setting
from outgrow.transforms.widen.make_plan import Choice

NAMES = ("num_key_value_groups", "n_rep", "num_queries_per_kv")


def group_settings(model: nn.Module, choices: Sequence[Choice]) -> Iterator[Setting]:
    """Settings of these attributes in modules that hold the queries of grown groups."""
    for choice in choices:
        if choice.volume.form != QUERY:
            continue
        old, new = choice.volume.count, choice.volume.count + choice.new
        modules = dict.fromkeys(".".join(slot.tensor.split(".")[:-2]) for slot in choice.volume.slots)
        for path in modules:
            holder = vars(model.get_submodule(path))
            yield from (Setting(path, name, old, new) for name in NAMES if holder.get(name) == old)
