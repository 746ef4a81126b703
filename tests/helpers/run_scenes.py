"""A small run whose parts can be replaced one by one, and a check that a call is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.optim import AdamW

import outgrow
from tests.helpers.judging import random_states
from tests.helpers.small_runs import X, facts, mlp, train
from tests.helpers.training_run import assert_equal


class Scene:
    """A model in training, with everything that a refused call could change by mistake."""

    def __init__(self) -> None:
        self.model = mlp()
        self.optimizer = AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        train(self.model, self.optimizer, 0)
        self.scheduler.step()

    def state(self) -> Any:
        return (
            facts(self.model, [self.optimizer], self.scheduler),
            facts(self.average),
            [(name, id(module), module.training) for name, module in self.model.named_modules()],
            [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in self.model.modules()],
            [len(hooks) for hooks in (self.optimizer._optimizer_step_pre_hooks, self.optimizer._optimizer_step_post_hooks)],
            random_states(),
        )

    def run(self, schedule: Any, **options: Any) -> outgrow.Run:
        given = {"model": self.model, "example": X, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return outgrow.Run(schedule=schedule, **{**given, "average": self.average, "quiet": True, **options})


@contextmanager
def refused(scene: Scene, error: type[Exception], reason: str, run: outgrow.Run | None = None) -> Iterator[None]:
    before, position = scene.state(), None if run is None else copy.deepcopy(run.position())
    with pytest.raises(error, match=reason):
        yield
    assert_equal(scene.state(), before)
    if run is not None:
        assert_equal(run.position(), position)
