"""Triggers: functions of a run's metrics that decide when to grow.

A trigger is called with the metrics of all epochs since the last growth, oldest first. It has no state of its own, so that a
resumed run decides as an uninterrupted one. Any callable can be a trigger; those in the table `TRIGGERS` can also be written in
a schedule file, under the key `rule`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan

from outgrow.errors import ScheduleError
from outgrow.text.plurals import counted
from outgrow.wrong_arguments import usage

Metrics = Mapping[str, float]
Trigger = Callable[[Sequence[Metrics]], bool]


def measured_value(metrics: Metrics, metric: str) -> float:
    """The value of a metric in one epoch; raises if it was not measured."""
    if metric not in metrics:
        known = ", ".join(metrics) or "none"
        raise ScheduleError(f"the schedule reads the metric {metric!r}, which was not measured (measured: {known})")
    return float(metrics[metric])


@dataclass(frozen=True)
class Plateau:
    """The trigger made by `plateau`: a metric has stopped improving."""

    metric: str
    patience: int = 3
    least: float = 0.0
    mode: str = "min"

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise ScheduleError(f"plateau({self.metric!r}): write the name of a metric, e.g. plateau('val_loss')")
        if type(self.patience) is not int or self.patience < 1:
            raise ScheduleError(f"patience={self.patience!r}: write a number of epochs, an integer above 0")
        if self.mode not in ("min", "max"):
            raise ScheduleError(f"mode={self.mode!r}: write 'min' (lower is better) or 'max'")
        if isinstance(self.least, bool) or not isinstance(self.least, (int, float)) or not self.least >= 0:
            raise ScheduleError(
                f"least={self.least!r}: write the least improvement of the metric, a number that is not negative"
            )

    def __call__(self, past: Sequence[Metrics]) -> bool:
        best, waited, value = float("inf"), 0, 0.0
        for metrics in past:
            value = measured_value(metrics, self.metric) * (1 if self.mode == "min" else -1)
            better = value < best - self.least  # False for NaN
            best, waited = (value, 0) if better else (best, waited + 1)
        return waited >= self.patience and not isnan(value)  # growing does not help a diverged run

    def __str__(self) -> str:
        return f"{self.metric} has not improved for {counted(self.patience, 'epoch')}"


@usage("outgrow.plateau('val_loss', patience=3)")
def plateau(metric: str, patience: int = 3, least: float = 0.0, mode: str = "min") -> Plateau:
    """Grow when a metric has not improved by more than `least` for `patience` epochs in a row.

    Example:
        >>> trigger = plateau("val_loss", patience=2)
        >>> [trigger([{"val_loss": loss} for loss in losses]) for losses in ((0.5, 0.4, 0.4), (0.4, 0.5, 0.4))]
        [False, True]
    """
    return Plateau(metric, patience, least, mode)


@dataclass(frozen=True)
class Reached:
    """The trigger made by `reached`: a metric has reached a value."""

    metric: str
    value: float
    mode: str = "max"

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise ScheduleError(f"reached({self.metric!r}, …): write the name of a metric, e.g. reached('accuracy', 0.9)")
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)) or isnan(self.value):
            raise ScheduleError(f"value={self.value!r}: write a number")
        if self.mode not in ("min", "max"):
            raise ScheduleError(f"mode={self.mode!r}: write 'max' (at least the value) or 'min' (at most)")

    def __call__(self, past: Sequence[Metrics]) -> bool:
        value = measured_value(past[-1], self.metric) if past else float("nan")
        return value >= self.value if self.mode == "max" else value <= self.value

    def __str__(self) -> str:
        return f"{self.metric} is {'at least' if self.mode == 'max' else 'at most'} {self.value:g}"


@usage("outgrow.reached('accuracy', 0.9)")
def reached(metric: str, value: float, mode: str = "max") -> Reached:
    """Grow when a metric is at least (or, with mode="min", at most) a value.

    Example:
        >>> reached("accuracy", 0.9)([{"accuracy": 0.5}, {"accuracy": 0.91}])
        True
    """
    return Reached(metric, value, mode)


TRIGGERS: dict[str, type[Trigger]] = {"plateau": Plateau, "reached": Reached}  # by their names in schedule files
