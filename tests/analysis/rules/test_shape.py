"""Rules for views and indexing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import outgrow


class Selecting(nn.Module):
    """Takes the shape of one feature, as BART's code does for its positions; or its values too."""

    def __init__(self, values: bool) -> None:
        super().__init__()
        self.up, self.down, self.values = nn.Linear(3, 6), nn.Linear(6, 2), values

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.up(x))
        last = hidden[..., -1]
        steps = torch.arange(last.shape[-1], dtype=x.dtype)
        return self.down(hidden) + (last if self.values else steps)[..., None]


@pytest.mark.parametrize("values", [False, True])
def test_a_selected_unit_pins_its_axis_only_if_its_value_is_read(values: bool) -> None:
    model, x = Selecting(values), torch.randn(4, 5, 3)
    before = model(x)
    if values:
        with pytest.raises(outgrow.GrowthError, match="can't grow"):
            outgrow.widen(model, x, "up", to=9)
    else:
        outgrow.widen(model, x, "up", to=9)
        assert model.up.out_features == 9
    torch.testing.assert_close(model(x), before)
