"""e3nn generates code for the sizes of its irreps: its layers are left out for that reason, plain layers next to them grow."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import outgrow
from tests.helpers.grow_everywhere import DTYPE, randomised
from tests.helpers.judging import assert_same_function

e3nn = pytest.importorskip("e3nn")
o3 = pytest.importorskip("e3nn.o3")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def code_in_python() -> Iterator[None]:
    """With a torch older than 2.10, e3nn compiles its code with torch.jit unless it is set otherwise."""
    defaults = e3nn.get_optimization_defaults()
    e3nn.set_optimization_defaults(jit_script_fx=False)
    yield
    e3nn.set_optimization_defaults(**defaults)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle = nn.Linear(5, 9), o3.Linear("3x0e + 2x1o", "4x0e + 3x1o")
        self.leave = o3.Linear("4x0e + 3x1o", "2x0e")
        self.head = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.leave(self.middle(self.enter(x))))


def test_irreps_are_left_out_and_plain_layers_grow() -> None:
    model, x = randomised(Mixed()), torch.randn(4, 5, dtype=DTYPE)
    old = copy.deepcopy(model)
    growth = outgrow.widen(model, x, "*", factor=2)
    assert {change.volume for change in growth.plan.changes} == {"head.0"}
    assert any("torch.fx has written that code for these sizes" in skip.reason for skip in growth.skipped)
    assert_same_function(old, model, [x, 2 * x])


def test_irreps_that_are_named_are_refused_and_nothing_changes() -> None:
    model, x = randomised(Mixed()), torch.randn(4, 5, dtype=DTYPE)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for volume in outgrow.volumes(model, x):
        if volume.growable and volume.name != "head.0":
            with pytest.raises(outgrow.GrowthError):
                outgrow.widen(model, x, volume.name, factor=3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_compiled_irreps_are_refused_with_a_setting_that_helps() -> None:
    e3nn.set_optimization_defaults(jit_script_fx=True)
    x, setting = torch.randn(4, 5, dtype=DTYPE), "e3nn.set_optimization_defaults(jit_script_fx=False)"
    with pytest.raises(outgrow.GrowthError, match=r"torch\.jit has compiled it") as refused:
        outgrow.widen(randomised(Mixed()), x, "head.0", factor=2)
    assert setting in str(refused.value)
    exec(setting, {"e3nn": e3nn})
    outgrow.widen(randomised(Mixed()), x, "head.0", factor=2)
