"""Where learned values are computed, and where not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import outgrow
from outgrow.apply.learned_values import Learning, learned_values
from outgrow.errors import ParallelError
from outgrow.growth_plan.plan import Plan
from outgrow.model.connections import Connection, Reader

LEARNING = Learning("0", outgrow.North(), Connection("0", (0, 1, 2, 3), (Reader("2", (0, 1, 2, 3)),)), 2)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))


def test_values_have_the_shape_of_the_new_entries() -> None:
    values = learned_values(network(), [LEARNING], Plan((), ()))
    assert sorted(values) == ["north/0.bias/0", "north/0.weight/0"]
    given = values["north/0.weight/0"](torch.zeros(4, 6), (2, 6), torch.Generator())
    assert given.shape == (2, 6)


def test_nothing_is_computed_on_the_meta_device() -> None:
    assert learned_values(network().to("meta"), [LEARNING], Plan((), ())) == {}


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ParallelError, match="sees other batches in each process"):
        learned_values(network(), [LEARNING], Plan((), ()))
