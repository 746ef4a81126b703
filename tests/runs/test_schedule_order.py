"""Rules wait for the events before them, fixed times do not; values that can't be read back are not written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.errors import CheckpointError, ScheduleError

X = torch.randn(6, 4, dtype=torch.float64)


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()


def make(*events: Any, **options: Any) -> outgrow.Run:
    model = small()
    return outgrow.Run(model, X, torch.optim.SGD(model.parameters(), lr=0.1), events, quiet=True, **options)


def test_a_rule_waits_for_the_events_before_it() -> None:
    fixed = outgrow.At(epoch=3, grow=[outgrow.Deepen(after="1")])
    run = make(fixed, outgrow.When(lambda past: True, grow=[outgrow.Widen("2.branch.0", by=4)]))
    grown = [run.epoch({"loss": 1.0}) is not None for _ in range(4)]
    assert grown == [False, False, True, False]  # both in the third epoch
    assert [record.what for record in run.records] == ["Deepen after '1' + 1", "Widen '2.branch.0' by 4"]


def test_an_event_at_a_fixed_time_must_be_possible_without_the_rules_before_it() -> None:
    rule = outgrow.When(outgrow.plateau("loss"), grow=[outgrow.Deepen(after="1")])
    with pytest.raises(ScheduleError, match=r"after all fixed times.*2\.branch\.0"):
        make(rule, outgrow.At(epoch=9, grow=[outgrow.Widen("2.branch.0", by=4)]))
    run = make(rule, outgrow.At(epoch=1, grow=[outgrow.Widen("0", by=4)]))
    run.epoch({"loss": 1.0})
    assert run.model[0].out_features == 12


def test_a_metric_of_nan_causes_no_growth() -> None:
    rule = outgrow.plateau("loss", patience=1)
    assert rule([{"loss": 1.0}, {"loss": 2.0}])
    assert not rule([{"loss": 1.0}, {"loss": float("nan")}, {"loss": float("nan")}])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_diverged_model_is_reported_as_such(bad: float) -> None:
    model = small()
    with torch.no_grad():
        model[2].weight[0, 0] = bad
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for how in ({"method": "netmorph"}, {"method": "random"}, {}):
        with pytest.raises(outgrow.GrowthError, match=r"2\.weight: it holds NaN or infinity"):
            outgrow.widen(model, X, "0", by=2, **how)
    assert all(
        torch.equal(a, b) or bool(a.isnan().any()) for a, b in zip(before.values(), model.state_dict().values(), strict=True)
    )


def test_numbers_of_numpy_are_saved_and_read_back(tmp_path: Path) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=np.float64(0.1))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + np.cos(np.pi * step / 50)))
    optimizer.step()
    scheduler.step()

    class Sampler:
        order = np.arange(5)

        def state_dict(self) -> dict[str, Any]:
            return {"order": self.order}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.order = state["order"]

    def run(sampler: Sampler) -> outgrow.Run:
        return outgrow.Run(model, X, optimizer, [], scheduler, also={"sampler": sampler}, quiet=True)

    run(Sampler()).save(tmp_path / "run.pt", extra={"best": np.float64(0.3)})
    sampler = Sampler()
    sampler.order = np.zeros(5)
    assert run(sampler).load(tmp_path / "run.pt") == {"best": 0.3}
    assert sampler.order.tolist() == [0, 1, 2, 3, 4]


def test_values_that_could_not_be_read_back_are_not_written(tmp_path: Path) -> None:
    run = make()
    run.save(tmp_path / "run.pt")
    good = (tmp_path / "run.pt").read_bytes()
    with pytest.raises(CheckpointError, match=r"objects of .*Linear"):
        run.save(tmp_path / "run.pt", extra={"layer": nn.Linear(2, 2)})
    assert (tmp_path / "run.pt").read_bytes() == good
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 64), nn.ReLU(), nn.Unflatten(1, (16, 2, 2)), nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.Conv2d(8, 1, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_a_volume_that_a_transposed_convolution_reads_in_another_shape_grows() -> None:
    model = Decoder().double()
    before = model(X)
    growth = outgrow.widen(model, X, "*", factor=1.5)
    assert [change.volume for change in growth.plan.changes] == ["layers.0", "layers.3"]
    assert model.layers[0].out_features == 96
    torch.testing.assert_close(model(X), before)
