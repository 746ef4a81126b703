"""Which volumes have a plain connection, and the reasons of the others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from outgrow.analysis.analyse import dissect
from outgrow.analysis.find_connections import NoConnection, connection_of


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.last = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.one(x) * self.other(x).sigmoid())
        return result


class Tokens(nn.Module):
    """Positions are combined between writer and reader."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.one, self.last, self.how, self.mix = nn.Linear(3, 4), nn.Linear(4, 2), how, nn.Parameter(torch.randn(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        h = h.roll(1, 1) if self.how == "roll" else h.transpose(1, 2) @ self.mix if self.how == "mix" else h
        result: Tensor = self.last(h.transpose(1, 2) if self.how == "mix" else h)
        return result


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(5, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.table(x).relu())
        return result


REFUSED = {
    "two writers": (Sum(), torch.randn(2, 3), "one", "2 tensors write it"),
    "layer norm": (nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), torch.randn(2, 3), "0", "combines units"),
    "softmax": (nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1), nn.Linear(4, 2)), torch.randn(2, 3), "0", "combines units"),
    "rolled positions": (Tokens("roll"), torch.randn(2, 5, 3), "one", "aten.roll"),
    "mixed positions": (Tokens("mix"), torch.randn(2, 5, 3), "one", "combines units or positions"),
    "embedding": (Embedded(), torch.tensor([[1, 2]]), "table", "belongs to Embedding"),
    "depthwise": (
        nn.Sequential(nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 2, 1)),
        torch.randn(1, 2, 5, 5),
        "0",
        "1.weight",
    ),
    "transposed": (
        nn.Sequential(nn.ConvTranspose2d(2, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1)),
        torch.randn(1, 2, 5, 5),
        "0",
        "ConvTranspose2d",
    ),
    "outputs": (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(2, 3), "2", "output"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_volumes_without_a_plain_connection_have_a_reason(name: str) -> None:
    model, x, where, words = REFUSED[name]
    anatomy = dissect(model, x)
    (volume,) = [volume for volume in anatomy.volumes if volume.name == where]
    with pytest.raises(NoConnection, match=words):
        connection_of(model, anatomy, volume)


@pytest.mark.parametrize("between", [nn.GELU(), nn.BatchNorm1d(4), nn.PReLU(4), nn.Dropout(), nn.SiLU()])
def test_functions_of_single_units_are_passed(between: nn.Module) -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), between, nn.Linear(4, 2)), torch.randn(5, 3)
    anatomy = dissect(model, x)
    connection = connection_of(model, anatomy, next(v for v in anatomy.volumes if v.name == "0"))
    assert connection.paths == ("0", "2")
    assert connection.rows == (0, 1, 2, 3) == connection.readers[0].columns
