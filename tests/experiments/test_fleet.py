"""What the fused engine does around its kernels: networks of every kind of arm come aboard, and come out as they went in.

The kernels do nothing here (test_fused runs them), so that this takes no GPU, and every arm that is trained on one is tried.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.setting import own_tuning, protocol
from experiments.setting.arms import Arm, paper_arms
from experiments.setting.more_arms import more_arms
from experiments.setting.segments import all_segments
from experiments.training.store import Store
from experiments.training.train_segments import Training
from tests.helpers.experiment_runs import some_data
from tests.helpers.tuned_arms import TUNED

pytest.importorskip("triton", reason="the fused engine needs Triton: pip install triton")
from experiments.training.fused import backward, forward, network, pooled, precompile, small
from experiments.training.fused.fleet import Fleet
from experiments.training.fused.rows import shape_of


class Nothing:
    """A kernel that computes nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *values, **options: None


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, names in (
        (forward, ("convolve", "statistics", "join", "pool", "classify", "gather")),
        (backward, ("part_gradient", "norm_gradient", "unpool", "convolve_back", "weigh", "adam")),
        (pooled, ("convolve_and_pool", "weigh_chosen")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Nothing())
    assert network.forward is forward
    assert small.pooled is pooled


class Watched(Fleet):
    """Looks at what comes aboard and at what goes out."""

    def __init__(self, models: Any, optimizers: Any, *what: Any, **more: Any) -> None:
        self.came = copy.deepcopy([(m, o.state_dict()["state"]) for m, o in zip(models, optimizers, strict=True)])
        super().__init__(models, optimizers, *what, device="cpu", **more)

    def land(self) -> None:
        super().land()
        for (twin, state), model, optimizer in zip(self.came, self.models, self.optimizers, strict=True):
            clock = torch.optim.SGD(twin.parameters())
            for _ in range(self.made):
                clock.step()  # without gradients: only what fades in moves
            weights = twin.state_dict()
            for name, value in model.state_dict().items():
                assert torch.allclose(value, weights[name], atol=1e-6), name
            for number, now in optimizer.state_dict()["state"].items():
                before = state.get(number, {})
                assert float(now["step"]) == float(before.get("step", 0)) + self.made
                for name in ("exp_avg", "exp_avg_sq"):
                    assert torch.equal(now[name], before.get(name, torch.zeros_like(now[name])))
                    now[name].uniform_()  # so that the next fleet has something to carry


def short(arm: Arm) -> Arm:
    return replace(arm, stages=tuple(replace(stage, epochs=1, looks=min(stage.looks, 1)) for stage in arm.stages))


def alike(arm: Arm) -> Arm:
    """An arm whose growths and schedules have common rates, decays and spans: kernels that compute nothing do not read them."""
    stages = [
        replace(
            stage,
            rate=1e-3,
            decay=1e-3,
            span=float(stage.span > 0),
            takes=float(stage.takes > 0),
            rewarm=float(stage.rewarm > 0),
            new_rate=1.0 if stage.new_rate == 1 else 0.5,
            grow=stage.grow and replace(stage.grow, init="std", scale=1.0),
        )
        for stage in arm.stages
    ]
    return replace(arm, stages=tuple(stages))


SETS: dict[str, Callable[[], list[Arm]]] = {
    "paper": paper_arms,
    "more": more_arms,
    "tuning": lambda: [arm for arm in protocol.tuning_arms() if arm.name.endswith("@2-0.001-0.01")],
    "sweep": lambda: protocol.sweep_arms(TUNED)[::5],
    "protocol": lambda: [arm for arm in protocol.protocol_arms(TUNED) if arm.name.endswith("@4")],
    "own tuning": lambda: [arm for arm in own_tuning.tuning_arms({}) if arm.name.endswith(("@8-0.016-0.2", "@1-0.004-0.2"))],
}


def go_through_the_fused_engine(arms: Sequence[Arm], folder: Path) -> None:
    segments = all_segments([short(arm) for arm in arms], [0])
    assert Training(segments, some_data(), Watched, shape_of, Store(folder), batch=8).run()


def test_every_kind_of_arm_goes_through_the_fused_engine(tmp_path: Path) -> None:
    """What arms have in common apart from their rates is trained once."""
    arms = [alike(arm) for name, make in SETS.items() if name != "more" for arm in make()]
    go_through_the_fused_engine(arms, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("which", SETS)
def test_every_arm_goes_through_the_fused_engine(which: str, tmp_path: Path) -> None:
    go_through_the_fused_engine(SETS[which](), tmp_path)


def test_shapes_are_compiled_before_they_are_needed() -> None:
    """A network of the size that a segment names has the shape of its fleet; two steps and an evaluation use its kernels."""
    sizes = {
        segment.size
        for arm in (*paper_arms(), *more_arms())
        for segment in all_segments([arm], [0])
        if segment.size[0] != "three"
    }
    found = {str(shape_of(precompile.model_of(kind, r, int(blocks), residual))) for kind, r, blocks, residual in sizes}
    assert len(found) == len(sizes)
    assert {"16", "32"} < found
    for kind, r, blocks in (("resnet", 3 / 16, 2), ("small", 1 / 4, 4)):
        model = precompile.model_of(kind, r, blocks, True)
        for part in precompile.PARTS:
            precompile.compile_shape(part, model, "adam", False, 8, [20, 10], device="cpu", precision="ieee")
