"""The experiments' steps on a GPU: `pytest -m cuda`. Without one, these tests are skipped.

The truth is the same steps one after the other, without a graph, and the same experiment on the CPU.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from experiments import family_steps
from experiments.families import ARMS, Arms, made, task_of
from experiments.family_steps import own_stream
from experiments.search.experiment import Clock, Experiment
from experiments.search.images import Images
from experiments.search.network import Parent
from experiments.search.settings import SETTINGS
from experiments.search.training import Steps, error, sgd
from experiments.setting.data import digits

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("default"),
]
pytest.importorskip("sklearn")


def test_replayed_steps_of_the_search_learn_as_steps_on_the_cpu_and_never_wait_for_the_device() -> None:
    torch.manual_seed(0)
    here = Parent(8, 1)
    there = copy.deepcopy(here).to("cuda")
    errors = []
    for model, device in ((here, "cpu"), (there, "cuda")):
        images = Images.of(digits(), device)
        steps = Steps(model, sgd(model), images)
        for epoch in range(12):
            steps.epoch(0, epoch, 12)
        try:
            torch.cuda.set_sync_debug_mode("error")
            steps.clock.zero_()
            steps.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        errors.append(error(model, images))
    assert errors[1] == pytest.approx(errors[0], abs=0.08)  # products are in bfloat16 there
    assert errors[1] < 0.2


def test_making_a_graph_of_the_steps_changes_nothing() -> None:
    model = Parent(8, 1).to("cuda")
    before = copy.deepcopy(model.state_dict())
    optimizer = sgd(model)
    steps = Steps(model, optimizer, Images.of(digits(), "cuda"))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(not bool(state["momentum_buffer"].any()) for state in optimizer.state.values())
    assert int(steps.clock) == 0


@pytest.mark.parametrize("arm", ["growth", "fresh", "scratch"])
def test_an_arm_of_the_search_runs(arm: str, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    found = Experiment(SETTINGS["tiny"], 0, "cuda", digits(), tmp_path / "work", Clock(10)).run(arm)
    assert 0 <= found["test_error"] < 0.95
    assert [trial["state"] for trial in found["search"]["trials"]] == ["COMPLETE"] * SETTINGS["tiny"].trials


@pytest.mark.parametrize("precise", [True, False], ids=["float32", "bfloat16"])
def test_replayed_steps_of_a_family_are_those_on_the_cpu(precise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if precise:
        monkeypatch.setattr(family_steps, "precision", lambda device: torch.autocast("cuda", enabled=False))
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    found = []
    try:
        for device in ("cpu", "cuda"):
            arms = Arms(task_of("digits", device, Path(), 6), seed=0)
            with own_stream(device):
                family = arms._family()
                training = arms._training(family, 6)
                training.run(list(family).copy, 4)
                training.run([family[3], family[1]].copy, 2)
                x, _ = arms.task.drawn(99)
                found.append([member.train()(x).detach().cpu() for member in family])  # biases before norms do not matter here
    finally:
        torch.backends.cudnn.allow_tf32 = before
    for one, other in zip(*found, strict=True):
        assert float((one - other).norm()) <= (1e-3 if precise else 0.2) * float(one.norm())


@pytest.mark.parametrize(("question", "arm"), [(question, arm) for question, arms in ARMS.items() for arm in arms])
def test_all_arms_of_the_families_run(question: str, arm: str) -> None:
    found = made(task_of("digits", "cuda", Path(), 30), question, arm, 0)
    assert all(0 <= value <= 100 for value in found["measures"])


def test_an_arm_of_the_language_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from experiments import families
    from experiments.lm.text import shakespeare

    monkeypatch.setattr(families, "source_code", shakespeare)
    task = families.Language(30, "cuda")
    for arm in ("family", "sandwich"):
        found = made(task, "four sizes", arm, 0)
        assert all(1 < value < 5 for value in found["measures"]), found
