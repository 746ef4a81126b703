"""Population-based training of Ray Tune on a local cluster of two processes: losers go on from the winner, and grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outgrow
from outgrow.errors import CheckpointError, MissingError, SizeError
from outgrow.integrations.ray import FILE
from outgrow.saving.trained_state import write_trained

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.f(x)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Sequential(Block(), Block()), nn.Linear(8, 2))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


@pytest.fixture
def winner(tmp_path: Path) -> tuple[nn.Module, torch.optim.Optimizer, Path]:
    """A trained model of width 12, and a folder with its checkpoint."""
    model = build()
    optimizer = momentum(model)
    outgrow.widen(model, X, "0", to=12, optimizer=optimizer)
    model(X).square().mean().backward()
    optimizer.step()
    write_trained(tmp_path / FILE, model, [optimizer], extra={"step": 7})
    return model, optimizer, tmp_path


@pytest.mark.parametrize(
    ("sizes", "width", "blocks"),
    [
        ([], 12, 2),
        ([outgrow.Widen("0", to=16)], 16, 2),
        ([outgrow.Widen("0", to=8)], 12, 2),  # the winner is larger
        ([outgrow.Widen("0", to=12), outgrow.Deepen(layers=3)], 12, 3),
        ([outgrow.Widen("0", to=14), outgrow.Deepen(layers=2, stack="1")], 14, 2),
    ],
)
def test_a_restored_model_computes_what_the_winner_does(winner: Any, sizes: list[Any], width: int, blocks: int) -> None:
    trained, state, folder = winner
    model = build()
    optimizer = momentum(model)
    assert outgrow.ray.restore(model, X, sizes, optimizer, checkpoint=folder) == {"step": 7}
    assert (model[0].out_features, len(model[1])) == (width, blocks)  # type: ignore[index, arg-type]
    other = torch.randn(9, 4)
    torch.testing.assert_close(model(other), trained(other), rtol=1e-4, atol=1e-5)
    old = state.state[trained[0].weight]["momentum_buffer"]
    assert torch.equal(optimizer.state[model[0].weight]["momentum_buffer"][:12], old)  # type: ignore[index]


def test_sizes_that_depend_on_the_checkpoint_and_other_folders_are_refused(winner: Any, tmp_path: Path) -> None:
    for request in (outgrow.Widen("0", factor=2), outgrow.Deepen("1.0"), outgrow.Kernel("0", 5)):
        with pytest.raises(SizeError, match="does not say the size at the end"):
            outgrow.ray.restore(build(), X, [request], checkpoint=tmp_path)
    (tmp_path / FILE).unlink()
    with pytest.raises(CheckpointError, match=r"holds no file outgrow\.pt"):
        outgrow.ray.restore(build(), X, [], checkpoint=tmp_path)


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray.tune", None)
    with pytest.raises(MissingError, match=r"pip install outgrow\[ray\]"):
        outgrow.ray.restore(build(), X, [])


def train(config: dict[str, Any]) -> None:
    """Three steps; metrics say how far the outputs are from those of the checkpoint that the trial started from."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    extra = outgrow.ray.restore(model, X, [outgrow.Widen("0", to=config["width"])], optimizer)
    gap = -1.0 if extra is None else (model(X) - extra["outputs"]).abs().max().item()
    step = 0 if extra is None else extra["step"]
    for group in optimizer.param_groups:
        group["lr"] = config["lr"]
    for number in range(step + 1, 4):
        for _ in range(20):
            optimizer.zero_grad()
            loss = (model(X)[:, 0] - X.prod(1)).square().mean()
            loss.backward()
            optimizer.step()
        sizes = {"gap": gap, "from": 0 if extra is None else extra["width"], "width": model[0].out_features}
        outputs = {"outputs": model(X).detach(), "step": number, "width": model[0].out_features}
        outgrow.ray.report({"loss": loss.item(), **sizes}, model, optimizer, extra=outputs)
        gap = -1.0


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_population_on_a_local_cluster(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install outgrow[ray]")
    tune = pytest.importorskip("ray.tune", reason="Ray Tune is not installed: pip install outgrow[ray]")
    from ray.tune.schedulers import PopulationBasedTraining

    def wider(config: dict[str, Any]) -> dict[str, Any]:
        return {**config, "width": config["width"] * 2}

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        scheduler = PopulationBasedTraining(
            time_attr="training_iteration", metric="loss", mode="min", perturbation_interval=1, quantile_fraction=0.5,
            resample_probability=0.0, hyperparam_mutations={"lr": [0.0, 0.02]}, perturbation_factors=(1.0, 1.0),
            custom_explore_fn=wider, synch=True,
        )  # fmt: skip
        results = tune.Tuner(
            tune.with_resources(train, {"cpu": 1}),
            param_space={"lr": tune.grid_search([0.02, 0.0]), "width": 6},
            tune_config=tune.TuneConfig(scheduler=scheduler, reuse_actors=False),
            run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
        ).fit()
    finally:
        ray.shutdown()
    assert not results.errors
    rows = [row for result in results for row in result.metrics_dataframe.to_dict("records")]
    grown = [row for row in rows if row["from"] and row["width"] > row["from"]]
    assert grown, "no trial has restored a smaller winner"
    restored = [row for row in rows if row["gap"] >= 0]
    assert restored
    assert all(row["gap"] < 1e-5 for row in restored)
    assert all(row["parameters"] == 6 * row["width"] + 1 for row in rows)
