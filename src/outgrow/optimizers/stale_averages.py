"""Detect averaged copies (EMA, SWA) that were not passed to a growth of their model.

An update of such a copy fails in torch with an error about sizes or, after a deepening, pairs the wrong parameters without an
error. torch has no hook for such updates, so the first growth wraps the update methods of known classes. A wrapper calls the
method unchanged, unless all of this holds; then it raises:

    the model that is passed to the update has grown
    the copy has a parameter of another shape than its partner, or lacks exactly the parameters that the last growths added

Torch and timm pair parameters in order, so that such an update can't be meant.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from outgrow.errors import Problem, StaleAverageError

SHOWN = 5


@dataclass(frozen=True)
class AverageClass:
    """A class of averaged copies: its update method, the attribute with the copy, and what to pass to a growth."""

    module: str
    name: str
    method: str
    copy: str = "module"
    passed: str = "average"


KNOWN = (
    AverageClass("torch.optim.swa_utils", "AveragedModel", "update_parameters"),
    AverageClass("timm.utils.model_ema", "ModelEma", "update", copy="ema", passed="average.ema"),
    AverageClass("timm.utils.model_ema", "ModelEmaV2", "update"),
    AverageClass("timm.utils.model_ema", "ModelEmaV3", "update"),
)


class _Watch:
    """Parameters that growths have changed or added. Module-level state, because updates happen outside outgrow's calls.

    It keeps no model alive. Classes are wrapped by a growth, not by an import; a class whose module is imported later has no
    copies from before the growth.
    """

    def __init__(self) -> None:
        self.changed: Any = WeakTensorKeyDictionary()  # parameter → name of the call that grew it last
        self.added: Any = WeakTensorKeyDictionary()  # parameter → (name of the call, number of the growth)
        self.growths = 0

    def start(self) -> None:
        for known in KNOWN:
            kind = getattr(sys.modules.get(known.module), known.name, None)
            method = vars(kind).get(known.method) if isinstance(kind, type) else None
            if method is not None and not hasattr(method, "outgrow_watches"):
                setattr(kind, known.method, _watched(method, known))


_WATCH = _Watch()


def watch_averages(changed: Sequence[Tensor], added: Sequence[Tensor], call: str) -> None:
    """From now on, raise before a known kind of average is updated that was left out of this growth.

    call: the name of the function that made the growth.
    """
    _WATCH.growths += 1
    for tensor in changed:
        _WATCH.changed[tensor] = call
    for tensor in added:
        _WATCH.added[tensor] = call, _WATCH.growths
    _WATCH.start()


def _watched(method: Callable[..., Any], known: AverageClass) -> Callable[..., Any]:
    """An update method that checks the average first."""

    @functools.wraps(method)
    def update(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            try:
                error = _check(self, model, known)
            except Exception:  # an average that can't be read is ignored
                error = None
            if error is not None:
                raise error
        return method(self, model, *args, **kwargs)

    update.outgrow_watches = True  # type: ignore[attr-defined]
    return update


def _check(average: Any, model: Any, known: AverageClass) -> StaleAverageError | None:
    """The error for an average from before a growth of the model, if it is one."""
    copy = getattr(average, known.copy)
    theirs, own = list(copy.parameters()), list(model.parameters())
    differ = [number for number, pair in enumerate(zip(theirs, own, strict=False)) if pair[0].shape != pair[1].shape]
    if not differ and len(theirs) == len(own):
        return None
    calls = [_WATCH.changed.get(tensor) or _WATCH.added.get(tensor, ("",))[0] for tensor in own]
    if not any(calls) or not (differ or _lacks_the_latest(len(own) - len(theirs), own)):
        return None
    names = [name for name, _ in copy.named_parameters()]
    problems = [
        Problem(names[number], f"{tuple(theirs[number].shape)} in the average, {tuple(own[number].shape)} in the model")
        for number in differ[:SHOWN]
    ]
    kind, call = type(average).__name__, next(filter(None, calls))
    counts = f" ({len(theirs)} parameters, the model has {len(own)})" if len(theirs) != len(own) else ""
    return StaleAverageError(
        f"{kind} holds weights from before the model grew{counts}; it was not updated. Make a new {kind} after the growth; or "
        f"pass it to the growth, outgrow.{call}(model, example, …, average={known.passed}), or to outgrow.Run(…, "
        f"average={known.passed}), so that it grows too",
        problems,
    )


def _lacks_the_latest(missing: int, parameters: Sequence[Tensor]) -> bool:
    """Whether the number of missing parameters is that of the last growths' new ones."""
    numbers = Counter(_WATCH.added[tensor][1] for tensor in parameters if tensor in _WATCH.added)
    latest = (numbers[growth] for growth in sorted(numbers, reverse=True))
    return missing in itertools.accumulate(latest)
