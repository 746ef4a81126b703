"""Run the model on the example before training starts: a dry run on the meta device does not find every wrong example."""

from __future__ import annotations

from torch import nn

from outgrow.model.autocast import own_precision
from outgrow.model.check_arguments import check_model
from outgrow.model.compiled import uncompiled
from outgrow.model.example import Example
from outgrow.model.module_calls import calls_of
from outgrow.model.sandbox import random_state


@uncompiled()
def check_runs(model: nn.Module, example: Example | None) -> None:
    """Raise if a model can't be grown, or does not run on the example (None: that is not checked)."""
    check_model(model)
    if example is not None:
        with random_state(), own_precision(model, example):
            calls_of(model, example, [])
