"""Grow copies of a model by several candidates, train each briefly on the same batches, and compare losses with costs.

The copies start from the same weights and optimizer state, and step number i has the same random state in each of them, so that
they see the same batches and, as far as shapes agree, the same dropout masks. A candidate differs from the others by its growth
alone. What such a comparison predicts was measured: `experiments/early_choice.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from outgrow.engine.grow import grow
from outgrow.errors import GrowthError, OptimizerError
from outgrow.model.check_arguments import check_model, check_seed
from outgrow.model.example import Example
from outgrow.model.sandbox import random_state, seed_everything
from outgrow.model.unwrap import as_list, bare
from outgrow.modules.gates import gates_of
from outgrow.runs.input_checks import as_loss, as_number
from outgrow.runs.schedule import Schedule
from outgrow.runs.timeline import timeline
from outgrow.text.plurals import counted
from outgrow.text.terminal import track
from outgrow.transforms.all_transforms import check_transforms, described, kind_of, no_transform
from outgrow.trials.copies import FACTORY, Untouched, copies_of
from outgrow.trials.result import CONTROL, Candidate, Trial, unique_names
from outgrow.wrong_arguments import usage

Step = Callable[[nn.Module, Any, int], Any]
STEP = "def step(model, optimizer, index): …; return loss"
APART = 1_000_003  # between the random seeds of two trials


@usage("outgrow.trial(model, example, {'wider': outgrow.Widen('*', factor=2)}, step, optimizer=optimizer)")
def trial(
    model: nn.Module,
    example: Example,
    candidates: Mapping[str, Any] | Sequence[Any],
    step: Step,
    steps: int = 100,
    *,
    optimizer: Any = None,
    state: str = "carry",
    seed: int = 0,
    quiet: bool = False,
) -> Trial:
    """Grow copies of a model by each candidate, train each briefly on the same batches, and compare losses with costs.

    The model and the optimizer stay unchanged, bit for bit. A copy that is not grown is trained too, as a control. A candidate
    that can't be grown is listed with the reason.

    A low loss after some steps is no promise for the end of a run: on CIFAR-10 the lowest loss in 100 steps after the growth
    named the method that was best in the end no more often than chance, except in short runs (docs/recipes.md). A
    trial shows spikes, refusals and costs.

    Args:
        model: the model, as it is in training now.
        example: an input of the model, as for `outgrow.grow`.
        candidates: transforms, or lists of transforms that are one growth, by name; or a list of them.
        step: called as `step(model, optimizer, index)` with a copy of the model; makes one training step, and returns its loss.
            The index (0, 1, …) decides the batch. The random state is the same at step `index` of each candidate.
        steps: the number of steps.
        optimizer: the optimizer in training (or several), which is copied with its state and grows with the copy; or a function
            that makes one from a model: then each copy starts with a new one. Without it, step gets None.
        state: "carry", or "copy" to give copies of blocks the optimizer state of their originals, as in a schedule.
        seed: for the drawn values of growths, and for the random state in the steps.
        quiet: show no progress bar.

    Example:
        >>> import outgrow
        >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
        <...>
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> x, y = torch.randn(64, 4), torch.randint(2, (64,))
        >>> def step(model, optimizer, index):
        ...     optimizer.zero_grad()
        ...     loss = nn.functional.cross_entropy(model(x), y)
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss
        >>> wider, deeper = outgrow.Widen("0", to=16), outgrow.Deepen("1", method="net2net")
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> result = trial(model, x, {"wider": wider, "deeper": deeper}, step, steps=10, optimizer=optimizer)
        >>> [(one.name, one.parameters) for one in result.candidates], model[0].out_features
        ([('wider', 114), ('deeper', 130)], 8)
    """
    named = named_candidates(candidates)
    if not callable(step):
        raise GrowthError(f"step={step!r} is no function: write one that makes a training step, {STEP}")
    if type(steps) is not int or steps < 1:
        raise GrowthError(f"steps={steps!r}: write a number of steps, an integer above 0")
    if state not in ("carry", "copy"):
        raise GrowthError(f"state={state!r}: write 'carry' or 'copy'; pass a function as optimizer= to start with new state")
    check_seed(seed)
    inner = bare(model)
    check_model(inner)
    with random_state():
        whole = timeline(inner, example, Schedule()).stages[0]
    made = Making(inner, example, optimizer, step, steps, state, seed)
    with contextlib.closing(made.progress(len(named), quiet)) as work:
        next(work)
        control = made.trained(Candidate(CONTROL, "", whole.parameters, whole.flops), (), work)
        tried = tuple(made.tried(name, transforms, work) for name, transforms in named.items())
    return Trial(steps, control, tried)


class Making:
    """A trial in progress."""

    def __init__(
        self, model: nn.Module, example: Example, optimizer: Any, step: Step, steps: int, state: str, seed: int
    ) -> None:
        self.model, self.example, self.step, self.steps = model, example, step, steps
        self.state, self.seed = state, seed
        self.factory = optimizer if callable(optimizer) and not hasattr(optimizer, "param_groups") else None
        self.several = isinstance(optimizer, Sequence)
        self.optimizers = as_list(optimizer) if self.factory is None else []
        _check_optimizers(model, self.optimizers)
        self.untouched = Untouched(model, self.optimizers)
        self.now = CONTROL

    def progress(self, candidates: int, quiet: bool) -> Generator[int, None, None]:
        """One item per step of the control and all candidates, with a progress bar, which advances with the next item."""
        total = self.steps * (candidates + 1)
        yield from range(total) if quiet else track(range(total), lambda: f"trial: {self.now}", total)

    def tried(self, name: str, transforms: Sequence[Any], work: Iterator[int]) -> Candidate:
        """A candidate with its losses, or with the reason why it is refused."""
        what = ", ".join(map(described, transforms))
        self.now = name
        try:
            return self.trained(Candidate(name, what), transforms, work)
        except Refused as refusal:
            for _ in range(self.steps):
                next(work, None)
            return Candidate(name, what, refused=str(refusal.__cause__))

    def trained(self, candidate: Candidate, transforms: Sequence[Any], work: Iterator[int]) -> Candidate:
        """Train a copy of the model, grown by these transforms; without any, as it is."""
        twin, optimizers = copies_of(self.model, self.optimizers, gradients=True)
        values = {name: getattr(candidate, name) for name in ("name", "what", "parameters", "flops")}
        if transforms:
            growth = self._grown(twin, transforms, optimizers)
            values |= {"parameters": growth.parameters[1], "flops": growth.flops[1], "preserving": growth.preserving}
        given = self._optimizer(twin, optimizers)
        losses: list[Any] = []
        with random_state():
            for index in range(self.steps):
                seed_everything(self.seed * APART + index)
                losses.append(self._loss(candidate.name, twin, given, index))
                if not index:
                    self.untouched.check()
                next(work, None)
        self.untouched.check()
        left = max((gate.steps - gate.done for gate in gates_of(twin).values()), default=0)
        note = f"still fading in for {counted(left, 'step')}" if left > 0 else ""
        if not transforms and _alike(twin, self.model):
            note = "not trained: no parameter has changed"
        return Candidate(**values, losses=tuple(as_number("the loss", loss) for loss in losses), note=note)

    def _grown(self, twin: nn.Module, transforms: Sequence[Any], optimizers: Sequence[Any]) -> Any:
        try:
            return grow(twin, self.example, *transforms, optimizer=optimizers, seed=self.seed, state=self.state)
        except GrowthError as error:
            raise Refused from error

    def _optimizer(self, twin: nn.Module, optimizers: Sequence[Any]) -> Any:
        """The second argument of the step."""
        if self.factory is not None:
            return _made(self.factory, twin)
        return list(optimizers) if self.several else (optimizers[0] if optimizers else None)

    def _loss(self, name: str, twin: nn.Module, optimizer: Any, index: int) -> Any:
        try:
            loss = self.step(twin, optimizer, index)
        except Exception as error:
            more = "; step gets no optimizer: pass optimizer= to the trial" if optimizer is None else ""
            raise GrowthError(f"step {index} of {name!r} has failed: {type(error).__name__}: {error}{more}") from error
        if loss is None:
            raise GrowthError(f"step= has returned nothing: return the loss, {STEP}")
        return as_loss(loss)


def _alike(one: nn.Module, other: nn.Module) -> bool:
    """Whether two copies of a model have the same parameters, so that neither was trained."""
    return all(map(torch.equal, one.parameters(), other.parameters()))


def _made(factory: Any, twin: nn.Module) -> Any:
    """What a function makes for optimizer=."""
    try:
        made = factory(twin)
    except Exception as error:
        raise OptimizerError(f"optimizer= has failed: {type(error).__name__}: {error}; {FACTORY}") from error
    if made is None:
        raise OptimizerError(f"optimizer= has returned nothing; {FACTORY}")
    return made


def _check_optimizers(model: nn.Module, optimizers: Sequence[Any]) -> None:
    """Raise unless these are optimizers of the model."""
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        if not hasattr(optimizer, "param_groups"):
            raise OptimizerError(f"optimizer={optimizer!r} is no optimizer: pass the one in training, or {FACTORY}")
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if held and not any(id(parameter) in own for parameter in held):
            raise OptimizerError(f"the optimizer holds no parameter of the model: pass the one that trains it, or {FACTORY}")


class Refused(Exception):
    """A growth was refused; the reason is the cause."""


def named_candidates(given: Any) -> dict[str, tuple[Any, ...]]:
    """Candidates by name, each as the transforms of one growth."""
    if not isinstance(given, Mapping) and kind_of(given) is not None:
        given = [given]
    if not isinstance(given, (Mapping, Sequence)) or isinstance(given, str) or not given:
        example = "{'wider': outgrow.Widen('*', factor=1.5), 'deeper': outgrow.Deepen(layers=12)}"
        raise GrowthError(f"candidates={given!r}: write transforms, or lists of them, by name, e.g. {example}")
    values = list(given.values()) if isinstance(given, Mapping) else list(given)
    lists = [(one,) if kind_of(one) is not None else one for one in values]
    for one in lists:
        if not isinstance(one, Sequence) or isinstance(one, str):
            raise GrowthError(f"candidates: {no_transform(one)}")
        check_transforms(one)
    names = list(map(str, given)) if isinstance(given, Mapping) else [", ".join(map(described, one)) for one in lists]
    if CONTROL in names:
        raise GrowthError(f"candidates: {CONTROL!r} is the name of the control, which every trial has: choose another one")
    return dict(zip(unique_names(names), map(tuple, lists), strict=True))
