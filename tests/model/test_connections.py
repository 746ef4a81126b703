"""The matrix of a connection is the mixed derivative of the loss in the row and the column of a unit that is not there yet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outgrow.analysis.analyse import dissect
from outgrow.analysis.find_connections import columns_of, connection_of, rows_of
from outgrow.errors import MethodError
from outgrow.model.connections import check_batches, observe


class Wired(nn.Module):
    """A writer, something linear in between, a reader, and a nonlinear function of the result; `extra` is one more unit."""

    def __init__(self, writer: nn.Module, between: Any, reader: nn.Module) -> None:
        super().__init__()
        self.writer, self.reader, self.between = writer, reader, between
        self.extra: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.reader(self.between(self.writer(x)))
        if self.extra is not None:
            u, z = self.extra
            y = y + run(self.reader, z, self.between(run(self.writer, u, x)))
        return y.tanh() ** 2 + y.sin()


def run(layer: nn.Module, weight: Tensor, x: Tensor) -> Tensor:
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight)
    function = F.conv1d if isinstance(layer, nn.Conv1d) else F.conv2d
    assert isinstance(layer, (nn.Conv1d, nn.Conv2d))
    if layer.padding_mode != "zeros":
        x = F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        return function(x, weight, None, layer.stride, 0, layer.dilation)
    return function(x, weight, None, layer.stride, layer.padding, layer.dilation)


CASES: dict[str, tuple[nn.Module, Any, nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(3, 4), nn.Identity(), nn.Linear(4, 2), (5, 3)),
    "tokens": (nn.Linear(3, 4), nn.Identity(), nn.Linear(4, 2), (2, 3, 3)),
    "convolutions": (nn.Conv2d(2, 3, 3, padding=1), nn.Identity(), nn.Conv2d(3, 2, 3, padding=1), (2, 2, 4, 5)),
    "strides": (nn.Conv2d(2, 3, 3, 2, 1), nn.Identity(), nn.Conv2d(3, 2, 2, 1, 1, dilation=2), (2, 2, 7, 6)),
    "circular": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), nn.Identity(), nn.Conv2d(3, 2, 1), (2, 2, 3, 3)),
    "one axis": (nn.Conv1d(2, 3, 3, padding="same"), nn.Identity(), nn.Conv1d(3, 2, 2), (2, 2, 6)),
    "pooled": (nn.Conv2d(2, 3, 1), nn.AvgPool2d(2), nn.Conv2d(3, 2, 2), (2, 2, 6, 6)),
    "flattened": (nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(3 * 6, 2), (2, 2, 3, 4)),
    "pooled, flattened": (nn.Conv2d(2, 3, 1), nn.Sequential(nn.AvgPool2d(2), nn.Flatten()), nn.Linear(3 * 6, 2), (2, 2, 4, 6)),
    "averaged": (nn.Conv2d(2, 3, 2), lambda x: x.mean((2, 3)), nn.Linear(3, 2), (2, 2, 3, 4)),
    "channels last": (nn.Conv2d(2, 3, 2), lambda x: x.permute(0, 2, 3, 1), nn.Linear(3, 2), (2, 2, 3, 4)),
    "patches as tokens": (nn.Conv2d(2, 3, 2, 2), lambda x: x.flatten(2).transpose(1, 2), nn.Linear(3, 2), (2, 2, 4, 6)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_matrix_is_the_mixed_derivative_for_one_more_unit(name: str) -> None:
    writer, between, reader, shape = CASES[name]
    torch.manual_seed(0)
    model = Wired(writer, between, reader).double()
    batches = [torch.randn(shape, dtype=torch.float64) for _ in range(2)]
    anatomy = dissect(model, batches[0])
    (volume,) = [volume for volume in anatomy.volumes if volume.name == "writer"]
    connection = connection_of(model, anatomy, volume)
    found = observe(model, {"v": connection}, batches, lambda model, x: model(x).sum())["v"]
    assert not found.problem
    assert found.matrix is not None

    u = torch.zeros_like(writer.weight[:1], requires_grad=True)  # type: ignore[index]
    z = torch.zeros_like(reader.weight[:, : connection.readers[0].length], requires_grad=True)  # type: ignore[index]
    model.extra = u, z
    value = sum(model(x).sum() for x in batches) / len(batches)
    (of_u,) = torch.autograd.grad(value, u, create_graph=True)
    rows = [torch.autograd.grad(one, z, retain_graph=True)[0].flatten() for one in of_u.flatten()]
    expected = torch.stack(rows, dim=1)  # (entries of z, entries of u)
    torch.testing.assert_close(found.matrix, expected)
    assert rows_of(model, connection).shape == (volume.count, expected.shape[1])
    assert columns_of(model, connection).shape == (volume.count, expected.shape[0])


def test_several_readers_have_one_matrix_below_the_other() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).relu()
            return torch.cat([self.b(h), self.c(h)], dim=-1)

    model, x, way = Two(), torch.randn(6, 3), torch.randn(6, 7)
    anatomy = dissect(model, x)
    connection = connection_of(model, anatomy, next(v for v in anatomy.volumes if v.name == "a"))
    found = observe(model, {"a": connection}, [x], lambda model, x: (model(x) * way).sum(), ("matrix", "units", "inputs"))["a"]
    torch.testing.assert_close(found.matrix, way.T @ x)
    torch.testing.assert_close(found.inputs, x.T @ x / 6)
    hidden = model.a(x).relu()
    torch.testing.assert_close(found.units, hidden.T @ hidden / 6)


def test_observing_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.ReLU(inplace=True), nn.Linear(4, 2))
    model[1].eval()
    x = torch.randn(6, 3)
    model(x).sum().backward()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    state, modes = torch.get_rng_state(), [module.training for module in model.modules()]
    anatomy = dissect(model, x)
    connection = connection_of(model, anatomy, next(v for v in anatomy.volumes if v.name == "0"))
    one, other = (observe(model, {"0": connection}, [x], lambda m, x: m(x).square().sum())["0"].matrix for _ in range(2))
    assert one is not None
    torch.testing.assert_close(one, other, rtol=0, atol=0)  # dropout masks are drawn alike
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, model.parameters(), strict=True) if p.grad is not None)
    assert torch.equal(state, torch.get_rng_state())
    assert modes == [module.training for module in model.modules()]
    assert not any(module._forward_hooks for module in model.modules())


def test_frozen_layers_have_a_matrix_too() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).requires_grad_(False), torch.randn(6, 3)
    anatomy = dissect(model, x)
    connection = connection_of(model, anatomy, next(v for v in anatomy.volumes if v.name == "0"))
    found = observe(model, {"0": connection}, [x], lambda model, x: model(x).sum())["0"].matrix
    torch.testing.assert_close(found, x.sum(0).expand(2, 3))


@pytest.mark.parametrize(
    ("batches", "loss", "words"),
    [
        (iter([1]), len, "an iterator, which can be read only once"),
        (torch.zeros(2), len, "of type Tensor"),
        ([1], None, "pass a function of"),
        ([], lambda model, batch: model(batch).sum(), "there are no batches"),
        ([torch.zeros(2, 3)], lambda model, batch: model(batch), "returned a tensor of shape"),
        ([torch.zeros(2, 3)], lambda model, batch: 1.0, "returned an object of float"),
        ([torch.zeros(2, 3)], lambda model, batch: 1 / 0, "failed with ZeroDivisionError"),
        ([torch.zeros(2, 3)], lambda model, batch: model(batch).sum() / 0, "pass batches on which it is finite"),
    ],
)
def test_wrong_batches_and_losses_are_refused(batches: Any, loss: Any, words: str) -> None:
    def tried() -> None:
        check_batches(batches, loss, "…")
        observe(nn.Linear(3, 2), {}, batches, loss)

    with pytest.raises(MethodError, match=words):
        tried()
