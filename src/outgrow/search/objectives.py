"""The objectives of a search: metrics that the training function returns, and sizes that are measured here."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outgrow.analysis.analyse import watch
from outgrow.errors import SearchError
from outgrow.model.example import Example, call
from outgrow.trace.flops import count_flops

MEASURED = ("parameters", "flops", "latency")
DIRECTIONS = {"min": "minimize", "minimize": "minimize", "max": "maximize", "maximize": "maximize"}
TIMED = 7  # forward passes, of which the median counts


class ReturnedError(SearchError):
    """What the training function returned is not what the objectives need."""


class DivergedError(Exception):
    """Training returned NaN or infinity, or left such values in the model."""


@dataclass(frozen=True)
class Objectives:
    """Names and directions ("minimize", "maximize") of the objectives, in order.

    Example:
        >>> Objectives.of({"accuracy": "max", "parameters": "min"})
        Objectives(names=('accuracy', 'parameters'), directions=('maximize', 'minimize'))
        >>> Objectives.of("error").losses([0.25])
        (0.25,)
    """

    names: tuple[str, ...]
    directions: tuple[str, ...]

    @staticmethod
    def of(given: Any) -> Objectives:
        """From a name, a list of names (which are minimised), or a dict from names to "min" or "max"."""
        if isinstance(given, Objectives):
            return given
        named = {given: "min"} if isinstance(given, str) else given
        if isinstance(named, Sequence):
            named = dict.fromkeys(named, "min")
        if not isinstance(named, Mapping) or not named or not all(isinstance(name, str) and name for name in named):
            raise SearchError(
                f"objectives={given!r}: write a name such as 'error', a list of names, or {{'accuracy': 'max', 'flops': 'min'}}"
            )
        if wrong := [name for name, way in named.items() if way not in DIRECTIONS]:
            raise SearchError(f"objectives: {wrong[0]!r} is {named[wrong[0]]!r}: write 'min' or 'max'")
        return Objectives(tuple(named), tuple(DIRECTIONS[way] for way in named.values()))

    @property
    def trained(self) -> tuple[str, ...]:
        """The objectives that the training function has to return."""
        return tuple(name for name in self.names if name not in MEASURED)

    def losses(self, values: Sequence[float]) -> tuple[float, ...]:
        """Values with signs so that all are minimised."""
        return tuple(-v if way == "maximize" else v for v, way in zip(values, self.directions, strict=True))

    def evaluate(self, model: nn.Module, example: Example, metrics: Mapping[str, float]) -> list[float]:
        """The value of each objective, from the metrics or measured on the model."""
        return [metrics[name] if name not in MEASURED else float(measure(name, model, example)) for name in self.names]

    def metrics_of(self, returned: Any) -> dict[str, float]:
        """The metrics that the training function returned: a dict, or a number if there is one objective to train.

        Raises DivergedError if one is not finite, and ReturnedError if one is missing.
        """
        if not isinstance(returned, Mapping):
            if len(self.trained) != 1 or isinstance(returned, (str, bool)) or returned is None:
                wanted = ", ".join(f"{name!r}: …" for name in self.trained)
                raise ReturnedError(f"train returned {returned!r}: it has to return a dict, {{{wanted}}}")
            returned = {self.trained[0]: returned}
        if missing := [name for name in self.trained if name not in returned]:
            raise ReturnedError(f"train returned {', '.join(map(str, returned)) or 'nothing'}, but not {missing[0]!r}")
        metrics = {str(name): _number(name, value) for name, value in returned.items()}
        if bad := [name for name in self.trained if not math.isfinite(metrics[name])]:
            raise DivergedError(f"training diverged: {bad[0]} is {metrics[bad[0]]}")
        return metrics


def _number(name: Any, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ReturnedError(f"train returned metrics that are no numbers: {name!r} is {value!r:.60}") from error


def measure(what: str, model: nn.Module, example: Example) -> float:
    """Parameters, FLOPs of one forward pass on the example, or its time in seconds."""
    if what == "parameters":
        return sum(parameter.numel() for parameter in model.parameters())
    if what == "flops":
        trace = watch(model, example)
        return count_flops(trace, [value.shape for value in trace.values].__getitem__)
    return latency(model, example)


def latency(model: nn.Module, example: Example) -> float:
    """The median time of forward passes on the example in eval mode, in seconds, after one that is not counted."""
    was, times = model.training, []
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(TIMED + 1):
                start = time.perf_counter()
                call(model, example)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                times.append(time.perf_counter() - start)
    finally:
        model.train(was)
    return statistics.median(times[1:])
