"""Missing, swapped or mistyped arguments: one error message that shows a correct call, and no side effects."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import outgrow
from outgrow.errors import CallError, CheckpointError, GrowthError, ScheduleError
from outgrow.wrong_arguments import usage
from tests.helpers.saved_models import photograph

X = torch.randn(3, 4)
WIDEN = outgrow.Widen("0", to=12)
SCHEDULE = outgrow.Schedule([outgrow.At(step=3, grow=[WIDEN])])


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


class Scene:
    """A model, its files and its run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, mlp()
        self.path, self.run_path = folder / "model.safetensors", folder / "run.pt"
        self.optimizer = SGD(self.model.parameters(), lr=0.1)
        self.run = outgrow.Run(self.model, X, self.optimizer, SCHEDULE, quiet=True)
        outgrow.save(self.model, self.path)
        self.run.save(self.run_path)


Mistake = Callable[[Any], Any]

FILES: dict[str, tuple[Mistake, str]] = {
    "load, exchanged": (lambda s: outgrow.load(s.path, s.model), "the model comes first"),
    "load, path alone": (lambda s: outgrow.load(s.path), "missing a required argument: 'path'.*outgrow.load"),
    "load, model alone": (lambda s: outgrow.load(s.model), "missing a required argument: 'path'"),
    "load, file": (
        lambda s: outgrow.load(s.model, io.BytesIO(s.path.read_bytes())),
        "instead of a path .BytesIO.",
    ),
    "load, bytes": (
        lambda s: outgrow.load(s.model, s.path.read_bytes()),
        "must be a string or a pathlib.Path, and not of type bytes",
    ),
    "load, None": (lambda s: outgrow.load(s.model, None), "and not None: write e.g. outgrow.load"),
    "load, state": (lambda s: outgrow.load(s.model, torch.load(s.run_path)), "and not of type dict"),
    "load, class": (lambda s: outgrow.load(nn.Linear, s.path), "the class Linear: pass an instance"),
    "load, home": (lambda s: outgrow.load(s.model, "~/model.safetensors"), r"os\.path\.expanduser\('~/model.safetensors'\)"),
    "load, null": (lambda s: outgrow.load(s.model, "a\0b"), "can't be the name of a file"),
    "load, option": (lambda s: outgrow.load(s.model, s.path, checksum=False), "did you mean 'checksums'"),
    "save, exchanged": (lambda s: outgrow.save(s.path, s.model), "the model comes first"),
    "save, model alone": (lambda s: outgrow.save(s.model), "missing a required argument: 'path'"),
    "save, file": (lambda s: outgrow.save(s.model, io.BytesIO()), "an open file was given"),
    "save, state": (lambda s: outgrow.save(s.model.state_dict(), s.path), "of type OrderedDict: pass an instance"),
    "save, run": (lambda s: outgrow.save(s.run, s.path), "of type Run"),
    "save, lazy": (lambda s: outgrow.save(nn.LazyLinear(3), s.path), "lazy module"),
    "save, home": (lambda s: outgrow.save(s.model, "~/model.safetensors"), "expanduser"),
    "Run.save, None": (lambda s: s.run.save(None), r"and not None: write e.g. run.save\('run.pt'\)"),
    "Run.save, nothing": (lambda s: s.run.save(), "missing a required argument: 'path'"),
    "Run.save, file": (lambda s: s.run.save(io.BytesIO()), "an open file was given"),
    "Run.save, bytes": (lambda s: s.run.save(os.fsencode(s.run_path)), "not of type bytes"),
    "Run.save, endless": (lambda s: s.run.save(s.run_path, extra=endless()), "contains itself"),
    "Run.load, file": (lambda s: s.run.load(io.BytesIO()), "an open file was given"),
    "Run.load, folder": (lambda s: s.run.load(s.folder), "is a folder"),
    "Run.load, state": (lambda s: s.run.load(s.run.state_dict()), "not of type dict"),
    "Run.load_state_dict, path": (lambda s: s.run.load_state_dict(str(s.run_path)), r"run\.load\(path\) to read a file"),
    "Run.load_state_dict, weights": (lambda s: s.run.load_state_dict(s.model.state_dict()), "is not a state of a run"),
}

CALLS: dict[str, tuple[Mistake, str]] = {
    "At without grow": (lambda s: outgrow.At(epoch=25), r"missing a required .*argument: 'grow'.*outgrow.At\(epoch=25, grow="),
    "At by position": (lambda s: outgrow.At(25, [WIDEN]), "too many positional arguments.*outgrow.At"),
    "At, misspelt": (lambda s: outgrow.At(epochs=25, grow=[WIDEN]), "did you mean 'epoch'"),
    "When without rule": (lambda s: outgrow.When(grow=[WIDEN]), "missing a required argument: 'rule'"),
    "When by position": (lambda s: outgrow.When(outgrow.plateau("loss"), [WIDEN]), "too many positional arguments"),
    "plateau of nothing": (lambda s: outgrow.plateau(), r"outgrow.plateau\('val_loss'"),
    "reached, misspelt": (lambda s: outgrow.reached("loss", above=1), "there are metric, value, mode"),
    "Schedule of several": (
        lambda s: outgrow.Schedule(*SCHEDULE, *SCHEDULE),
        "too many",
    ),
    "to_file, no folder": (lambda s: SCHEDULE.to_file(s.folder / "no" / "x.toml"), "there is no folder .*: create it first"),
    "to_file, folder": (lambda s: (s.folder / "y.toml").mkdir() or SCHEDULE.to_file(s.folder / "y.toml"), "is a folder"),
    "to_file, file": (lambda s: SCHEDULE.to_file(io.StringIO()), "an open file was given"),
    "to_file, long": (lambda s: SCHEDULE.to_file(s.folder / f"{'a' * 300}.toml"), "can't be written: File name too long"),
    "from_file, None": (lambda s: outgrow.Schedule.from_file(None), "not None"),
    "svg, no folder": (lambda s: s.run.timeline.svg(s.folder / "no" / "x.svg"), "there is no folder"),
    "log, no folder": (lambda s: outgrow.Run(s.model, X, s.optimizer, SCHEDULE, log=s.folder / "no" / "x.csv"), "no folder"),
    "position": (lambda s: outgrow.Run(s.model, X, s.optimizer, SCHEDULE, position={}), r"the result of run\.position\(\)"),
    "track": (lambda s: s.run.track(3), r"run\.track\(loader\)"),
    "Run without schedule": (lambda s: outgrow.Run(s.model, X, s.optimizer), "missing a required argument: 'schedule'"),
    "widen without example": (lambda s: outgrow.widen(s.model), "missing a required argument: 'example'"),
    "widen, misspelt": (
        lambda s: outgrow.widen(s.model, X, "0", size=12),
        "there is no argument 'size'",
    ),
    "widen by position": (lambda s: outgrow.widen(s.model, X, "0", 12), "too many positional arguments"),
    "grow without example": (lambda s: outgrow.grow(s.model), "missing a required argument: 'example'"),
    "volumes without example": (lambda s: outgrow.volumes(s.model), "missing a required argument: 'example'"),
    "R2R by position": (lambda s: outgrow.R2R("he"), "too many positional arguments"),
    "cohorts of nothing": (lambda s: outgrow.cohorts(None), "of type NoneType: pass a torch.nn.Module"),
    "shard of nothing": (lambda s: outgrow.shard(3, lambda model: None), r"outgrow\.shard\(model, function\)"),
}


def endless() -> list[Any]:
    result: list[Any] = []
    result.append(result)
    return result


def test_mistakes_raise_a_readable_error_and_have_no_effect(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    before, files = photograph(scene.model), {path: path.read_bytes() for path in tmp_path.iterdir()}
    for name, (mistake, reason) in (FILES | CALLS).items():
        with pytest.raises(GrowthError, match=f"(?s){reason}") as caught:
            mistake(scene)
        expected = CheckpointError if name in FILES else GrowthError
        assert isinstance(caught.value, (expected, CallError, ScheduleError)), name
        assert str(tmp_path / "no") not in [str(path) for path in tmp_path.iterdir()]
    assert photograph(scene.model) == before
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == files
    scene.run.load(scene.run_path)


def test_a_wrong_call_is_a_type_error_too_and_errors_inside_the_call_are_unchanged() -> None:
    @usage("f(3)")
    def f(number: int, *, option: int = 0) -> int:
        return number + len("x" * number) + unknown(number) if option else number

    def unknown(number: int) -> int:
        return number("text")  # type: ignore[operator,no-any-return]

    assert f(3) == 3
    with pytest.raises(TypeError, match=r"f: missing a required argument: 'number'. Write e.g. f\(3\)"):
        f()
    with pytest.raises(TypeError, match="'int' object is not callable"):
        f(3, option=1)
