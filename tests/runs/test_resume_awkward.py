"""Awkward resumes: at the very moment of a growth, with another schedule, into a live run, from files that do not fit."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import outgrow
from outgrow.errors import CheckpointError, GrowthError, ScheduleError
from outgrow.modules.gates import gates_of
from tests.helpers.small_runs import DEEPEN, WIDEN, Block, Mlp, X, at, mlp, train
from tests.helpers.training_run import STEPS, Trial, assert_equal, without_times

LAST = outgrow.Widen("blocks.1.up", to=12)
FADED = outgrow.Deepen("blocks.0", fade=5)


class Scene:
    """A run with a newly built small model; options replace its parts."""

    def __init__(self, schedule: Any = None, **options: Any) -> None:
        self.model: Any = options.pop("model", None) or mlp()
        self.optimizer = options.pop("optimizer", lambda p: AdamW(p, lr=1e-2))(self.model.parameters())
        self.scheduler = options.pop("scheduler", lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, 40))(self.optimizer)
        self.average = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        events = [at(4, WIDEN, lr=0.5, warmup=3), outgrow.At(epoch=2, grow=[FADED], new_lr=2.0), at(9, LAST)]
        schedule = events if schedule is None else schedule
        self.also = options.pop("also", {"order": torch.Generator().manual_seed(3)})
        self.run = outgrow.Run(
            self.model, X, self.optimizer, schedule, self.scheduler, self.average, also=self.also, quiet=True
        )

    def step(self) -> None:
        train(self.model, self.optimizer, int(torch.randint(0, 1000, (), generator=self.also["order"])))
        self.scheduler.step()
        self.average.update_parameters(self.model)
        self.run.step()

    def go(self, until: int) -> Scene:
        """An epoch is three steps."""
        while self.run.steps < until:
            self.step()
            if self.run.steps % 3 == 0:
                self.run.epoch()
        return self

    def state(self) -> Any:
        levels = {place: (gate.done, gate.steps) for one in (self.model, self.average) for place, gate in gates_of(one).items()}
        modules = [name for name, _ in self.model.named_modules()]
        return copy.deepcopy((without_times(self.run.state_dict()), levels, modules))


def resumed(path: Path, **options: Any) -> Scene:
    again = Scene(**options)
    torch.manual_seed(77)
    again.run.load(path)
    return again


def test_at_every_moment_around_the_growths(tmp_path: Path) -> None:
    """Saved right before and right after each call that grows, by step, by epoch, or at a step that ends an epoch."""
    path, whole = tmp_path / "run.pt", Scene().go(14)
    assert len(whole.run.records) == 3
    for moment in (3, 4, 6, 9):
        part = Scene().go(moment - 1)
        part.step()
        part.run.save(path)  # after the growth at this step, before the growth at the end of the epoch
        again = resumed(path)
        assert_equal(again.state(), part.state())
        if moment % 3 == 0:
            for one in (part, again):
                one.run.epoch()
            again.run.save(path)
            again = resumed(path)
            assert_equal(again.state(), part.state())
        assert_equal(again.go(14).state(), whole.state())


def test_into_a_schedule_with_further_events(tmp_path: Path) -> None:
    path, events = tmp_path / "run.pt", list(Scene().run.schedule)
    Scene().go(10).run.save(path)
    more = at(12, outgrow.Widen("blocks.2.up", to=16))
    again = resumed(path, schedule=[*events, more])
    assert [event.time for event in again.run.ahead] == ["step 12"]
    whole = Scene(schedule=[*events, more]).go(14)
    assert_equal(again.go(14).state(), whole.state())
    assert whole.model.blocks[2].up.out_features == 16


def test_a_time_that_is_past(tmp_path: Path) -> None:
    path, events = tmp_path / "run.pt", list(Scene().run.schedule)
    Scene().go(10).run.save(path)
    for late in (at(10, DEEPEN), outgrow.At(epoch=3, grow=[DEEPEN])):
        again = Scene(schedule=[*events, late] if late.epoch else [*events[:2], late])
        before = again.state()
        with pytest.raises(ScheduleError, match=r"(?s)is past: the run is at step 10 after 3 epochs.*give it a later time"):
            again.run.load(path)
        assert_equal(again.state(), before)


def test_two_runs_by_turns() -> None:
    alone = [Scene().go(14).state(), Scene(schedule=[at(3, FADED, train="new", hold=4), at(6, WIDEN)]).go(14).state()]
    both = [Scene(), Scene(schedule=[at(3, FADED, train="new", hold=4), at(6, WIDEN)])]
    for until in range(1, 15):
        for one in both:
            one.go(until)
    for one, truth in zip(both, alone, strict=True):
        mine = one.state()
        del mine[0]["random"], truth[0]["random"]
        assert_equal(mine, truth)


def test_back_into_the_live_run(tmp_path: Path) -> None:
    """No growth since the save: the run goes back to where it was, also in the middle of a fade and a warm-up."""
    path, whole = tmp_path / "run.pt", Scene().go(14)
    live = Scene().go(7)
    live.run.save(path)
    saved = live.state()
    live.go(8)
    live.run.load(path)
    assert_equal(live.state(), saved)
    assert_equal(live.go(14).state(), whole.state())
    before = live.state()
    with pytest.raises(CheckpointError, match="has grown once since the checkpoint"):  # a growth can't be undone
        live.run.load(path)
    assert_equal(live.state(), before)


class Deeper(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block(), Block())


class Wider(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x: Any) -> Any:
        return super().forward(torch.cat([x, x[:, :1]], 1))


def groups(parameters: Any) -> AdamW:
    held = list(parameters)
    return AdamW([{"params": held[:4]}, {"params": held[4:]}], lr=1e-2)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "another kind of optimizer": (
        {"optimizer": lambda p: SGD(p, lr=0.1)},
        "optimizer 0 is of type SGD, and in the checkpoint AdamW",
    ),
    "other groups": ({"optimizer": groups}, "AdamW has 2 parameter groups, and the checkpoint 1"),
    "fewer parameters": ({"optimizer": lambda p: AdamW(list(p)[:-1], lr=1e-2)}, "group 0 of AdamW does not hold.*head.bias"),
    "another scheduler": (
        {"scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 3)},
        "scheduler 0 is of type StepLR, and in the checkpoint OneCycleLR",
    ),
    "other things beside": ({"also": {"order": torch.Generator(), "more": torch.Generator()}}, "also= holds"),
    "another architecture": ({"model": lambda: Wider().double()}, "does not fit this model"),
    "more blocks": ({"model": lambda: Deeper().double()}, "does not fit this model"),
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a run in the middle of a fade."""
    path = tmp_path_factory.mktemp("run") / "run.pt"
    Scene().go(8).run.save(path)
    return path


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("case", OTHERS)
def test_a_run_that_is_made_otherwise(case: str, live: bool, file: Path) -> None:
    """live: the run is in the middle of a fade, and its state must stay unchanged."""
    options, reason = OTHERS[case]
    other = Scene(**{**options, **({"model": options["model"]()} if "model" in options else {})})
    if live:
        other.go(7)
        assert gates_of(other.model)
        assert gates_of(other.average)
    before = other.state()
    with pytest.raises(CheckpointError, match="(?s)" + reason):
        other.run.load(file)
    assert_equal(other.state(), before)


def foreign(path: Path) -> None:
    torch.save({"model": mlp().state_dict()}, path)


def of_another_kind(path: Path) -> None:
    torch.save([1, 2], path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    at = data.index(b"data.pkl") + 200
    data[at : at + 400] = bytes(400)
    path.write_bytes(bytes(data))


def without(*keys: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        state = torch.load(path, weights_only=True)
        inner = state
        for key in keys[:-1]:
            inner = inner[key]
        del inner[keys[-1]], state["checksum"], state["checksums"]
        torch.save(state, path)

    return damage


def newer(path: Path) -> None:
    torch.save({**torch.load(path, weights_only=True), "version": 99}, path)


def pickled(path: Path) -> None:
    torch.save({"outgrow": {}, "model": mlp()}, path)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "gone": (Path.unlink, "there is no such file"),
    "empty": (lambda path: path.write_bytes(b""), "is damaged, or was not written by Run.save"),
    "text": (lambda path: path.write_text("hello"), "is damaged, or was not written by Run.save"),
    "cut short": (cut, "is damaged, or was not written by Run.save"),
    "bytes lost": (flipped, "is damaged, or was not written by Run.save"),
    "a state dict": (foreign, "was not written by Run.save"),
    "a list": (of_another_kind, "was not written by Run.save"),
    "code in it": (pickled, "is damaged, or was not written by Run.save"),
    "of a later version": (newer, "format version 99"),
    "no optimizers": (without("optimizers"), "can't be loaded into this run: KeyError"),
    "no random states": (without("random"), "can't be loaded into this run: KeyError"),
    "no steps": (without("outgrow", "steps"), "can't be loaded into this run: KeyError"),
    "no pace": (without("outgrow", "pace"), "can't be loaded into this run: KeyError"),
    "a weight is missing": (without("model", "head.bias"), "head.bias"),
}


@pytest.mark.parametrize("live", [False, True])
def test_files_that_are_not_whole(live: bool, file: Path, tmp_path: Path) -> None:
    """They are loaded one after the other into a run, which then continues as if nothing had happened."""
    scene = Scene().go(7) if live else Scene()
    before, path = scene.state(), tmp_path / "run.pt"
    for case, (damage, reason) in DAMAGES.items():
        path.write_bytes(file.read_bytes())
        damage(path)
        with pytest.raises(CheckpointError, match=reason):
            scene.run.load(path)
        assert_equal(scene.state(), before, case)
    assert_equal(scene.go(11).state(), Scene().go(11).state())


def test_a_schedule_that_the_saved_run_did_not_have_at_all(tmp_path: Path) -> None:
    """Past growths are in the file, so the schedule may no longer list them."""
    path = tmp_path / "run.pt"
    Scene().go(10).run.save(path)
    again = resumed(path, schedule=[])
    assert again.run.ahead == []
    assert_equal(again.model.state_dict(), Scene().go(10).model.state_dict())


def test_paths_that_can_not_be_written(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "run.safetensors", tmp_path / "nowhere" / "run.pt"):
        with pytest.raises(GrowthError, match=re.escape(str(place))):
            Scene().run.save(place)
    with pytest.raises(GrowthError):
        Scene().run.load(tmp_path)


def test_the_run_of_all_other_tests_goes_on_after_a_load_that_failed(tmp_path: Path) -> None:
    """A run with three growths, unfinished fades and an average with buffers."""
    path = tmp_path / "run.pt"
    trial = Trial().go(21)
    trial.run.save(path)
    without("random")(path)
    with pytest.raises(CheckpointError):
        trial.run.load(path)
    assert_equal(without_times(trial.go(STEPS).state()), without_times(Trial().go().state()))
