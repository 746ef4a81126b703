"""A search as one object: what is searched, how trials are trained, and what counts."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import nn

from outgrow.errors import SearchError
from outgrow.model.example import Example
from outgrow.model.unwrap import as_list
from outgrow.saving.run_state import random_states, set_random_states
from outgrow.search.artifacts import Models
from outgrow.search.objectives import Objectives
from outgrow.search.parents import SAMPLERS
from outgrow.search.space import Space
from outgrow.wrong_arguments import usage

TRAIN = "def train(model, optimizer, trial): …; return {'error': error}"


@usage("outgrow.Search(parent, example, outgrow.Space(), train, 'error')")
@dataclass(eq=False)
class Search:
    """The description of a search, as the arguments of `outgrow.search`; a worker process builds it from `MODULE:CALLABLE`.

    Example:
        >>> import torch
        >>> def train(model, optimizer, trial):
        ...     return {"error": float(model(torch.ones(1, 4)).abs().sum())}
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> Search(model, torch.zeros(1, 4), Space(), train, ["error", "parameters"], trials=10).objectives.names
        ('error', 'parameters')
    """

    parent: nn.Module
    example: Example
    space: Space
    train: Callable[[Any, Any, Any], Any]
    objectives: Any
    optimizer: Callable[[nn.Module], Any] | None = None
    sampler: str = "evolution"
    trials: int = 50
    population: int = 8
    seed: int = 0
    artifacts: Any = None
    lease: float = 60.0
    attempts: int = 5

    def __post_init__(self) -> None:
        if not isinstance(self.parent, nn.Module):
            raise SearchError(f"parent is of type {type(self.parent).__name__}: pass the model to grow")
        if not isinstance(self.space, Space):
            raise SearchError(f"space is of type {type(self.space).__name__}: pass e.g. outgrow.Space(factors=(1.5, 2))")
        if not callable(self.train):
            raise SearchError(f"train is of type {type(self.train).__name__}: pass a function, {TRAIN}")
        with contextlib.suppress(ValueError):  # a function of C may have no signature
            try:
                inspect.signature(self.train).bind(None, None, None)
            except TypeError as error:
                raise SearchError(
                    f"train can't be called with a model, an optimizer and a trial ({error}): write {TRAIN}"
                ) from None
        if self.optimizer is not None and not callable(self.optimizer):
            raise SearchError(
                f"optimizer is of type {type(self.optimizer).__name__}: pass a function that makes one, e.g. "
                "lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)"
            )
        self.objectives = Objectives.of(self.objectives)
        if self.sampler not in SAMPLERS:
            raise SearchError(f"sampler={self.sampler!r}: write one of {', '.join(map(repr, SAMPLERS))}")
        for name in ("trials", "population", "attempts"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise SearchError(f"{name}={getattr(self, name)!r}: write a whole number above 0")
        if type(self.seed) is not int:
            raise SearchError(f"seed={self.seed!r}: write a whole number")
        if not isinstance(self.lease, Real) or not self.lease > 0:
            raise SearchError(f"lease={self.lease!r}: write a number of seconds")

    def check(self) -> None:
        """Raise, before a study is created, if nothing can grow, or the model does not run on the example."""
        before = random_states()
        try:
            model, optimizer = Models(self.parent, self.optimizer, None).fresh()
            self.space.refuse_if_empty(model, self.example, as_list(optimizer))
        finally:
            set_random_states(before)
