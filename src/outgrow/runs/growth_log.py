"""The growth log of a run: one line per growth.

    grown at step 1,200: Widen '*' × 1.5 · 12 volumes · parameters 1.20 M → 2.60 M (× 2.2) · FLOPs × 2.1 · error 3e-07 · 0.8 s

A *sink* receives the records: a `logging.Logger`, a Lightning logger, a TensorBoard writer, a function, or a path ending in
.csv or .jsonl. A sink that fails must not end a long run: the failure is reported as a warning.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite, isnan
from typing import Any

from outgrow.engine.growth_report import Growth
from outgrow.errors import ScheduleError
from outgrow.text.plurals import counted
from outgrow.text.tables import rounded
from outgrow.transforms.all_transforms import Transform, described

Size = int | tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Record:
    """The result of a growth in a run. `str(record)` is its line in the log."""

    number: int  # of the growth, from 1
    step: int | None = None
    epoch: int | None = None
    what: str
    sizes: tuple[tuple[str, Size, Size], ...] = ()  # volume, old, new
    parameters: tuple[int, int]
    flops: tuple[int, int]
    error: float = float("nan")
    tolerance: float = 0.0
    preserving: bool = True
    loss_before: float | None = None
    loss_after: float | None = None
    seconds: float = 0.0

    @classmethod
    def of(cls, growth: Growth, transforms: Sequence[Transform], number: int, **when: Any) -> Record:
        """The record of a growth.

        when: step, epoch, loss_before, loss_after; and seconds, if the growth took longer than `growth.seconds`.
        """
        return cls(
            number=number,
            what=", ".join(map(described, transforms)),
            sizes=tuple((change.volume, change.old, change.new) for change in growth.plan.changes),
            parameters=growth.parameters,
            flops=growth.flops,
            error=growth.max_error,
            tolerance=growth.tolerance,
            preserving=growth.preserving,
            **{"seconds": growth.seconds, **when},
        )

    def __str__(self) -> str:
        when = [f"{name} {at:,}" for name, at in (("step", self.step), ("epoch", self.epoch)) if at is not None]
        volumes = counted(len(self.sizes), "volume")
        before, after = self.parameters
        error = "error not checked" if isnan(self.error) else f"error {self.error:.0e}"
        parts = [
            f"grown{' at ' if when else ''}{', '.join(when)}: {self.what}",
            volumes,
            f"parameters {rounded(before)} → {rounded(after)} (× {after / max(before, 1):.2g})",
            f"FLOPs × {self.flops[1] / max(self.flops[0], 1):.2g}",
            error if self.preserving else f"{error} (the function is NOT preserved)",
        ]
        if self.loss_before is not None and self.loss_after is not None:
            parts.append(f"loss {self.loss_before:.4g}, next step {self.loss_after:.4g}")
        return " · ".join([*parts, f"{self.seconds:.1f} s"])

    def as_metrics(self) -> dict[str, float]:
        """The values by name, for metric loggers; unknown values are left out."""
        values = {name: value for name, value in _flat(self).items() if name not in ("step", "epoch", "what")}
        return {f"outgrow/{name}": float(value) for name, value in values.items() if value is not None}

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values; NaN and infinity become None."""
        values = {name: _finite(value) for name, value in asdict(self).items()}
        data: dict[str, Any] = json.loads(json.dumps(values))
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Record:
        """The record from the result of `to_json`."""
        values: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in data.items()}
        values["sizes"] = tuple((name, _size(old), _size(new)) for name, old, new in data["sizes"])
        values["error"] = float("nan") if data["error"] is None else data["error"]
        return cls(**values)


def _size(value: Any) -> Size:
    return tuple(value) if isinstance(value, list) else int(value)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not isfinite(value) else value


def _flat(record: Record) -> dict[str, Any]:
    """A record as one row of strings and numbers."""
    row = {name: value for name, value in asdict(record).items() if name != "sizes"}
    row["parameters_before"], row["parameters"] = record.parameters
    row["flops_before"], row["flops"] = record.flops
    row["volumes"], row["preserving"] = len(record.sizes), int(record.preserving)
    row["error"] = None if isnan(record.error) else record.error
    return row


def write(record: Record, sinks: Any) -> None:
    """Write a record to one sink or to several; a sink that fails is reported in a warning, and the run continues."""
    for sink in sinks if isinstance(sinks, (list, tuple)) else [] if sinks is None else [sinks]:
        try:
            _writer(sink)(record, sink)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            message = f"growth {record.number} could not be logged to {_name(sink)}: {reason}; the run continues"
            warnings.warn(message, stacklevel=2)


def check_sinks(sinks: Any) -> None:
    """Raise if a record can't be written to a sink, before a run starts."""
    for sink in sinks if isinstance(sinks, (list, tuple)) else [] if sinks is None else [sinks]:
        _writer(sink)
        if isinstance(sink, (str, os.PathLike)):
            folder = os.path.dirname(os.path.abspath(sink))
            if not os.path.isdir(folder):
                raise ScheduleError(f"the log {_name(sink)}: there is no folder {folder}: create it first")
            if os.path.isdir(sink):
                raise ScheduleError(f"the log {_name(sink)} is a folder: name a .csv or .jsonl file in it")


def _writer(sink: Any) -> Callable[[Record, Any], None]:
    """The function that writes to a sink, chosen by the sink's methods, so that no logging library is imported."""
    if isinstance(sink, (str, os.PathLike)):
        kinds = {".csv": _to_csv, ".jsonl": _to_jsonl}
        kind = kinds.get(os.path.splitext(os.fspath(sink))[1])
        if kind is None:
            raise ScheduleError(f"{_name(sink)}: the path of a log must end in .csv or .jsonl")
        return kind
    if isinstance(sink, (logging.Logger, logging.LoggerAdapter)):
        return lambda record, sink: sink.info("%s", record)
    if hasattr(sink, "log_metrics"):  # Lightning's
        return lambda record, sink: sink.log_metrics(record.as_metrics(), step=record.step)
    if hasattr(sink, "add_scalar"):
        return _to_tensorboard
    if callable(sink):
        return lambda record, sink: sink(record)
    raise ScheduleError(
        f"growths can't be logged to {_name(sink)}: pass a logging.Logger, a Lightning logger, a TensorBoard SummaryWriter, "
        "a function of a record, or the path of a .csv or .jsonl file"
    )


def _name(sink: Any) -> str:
    return repr(os.fspath(sink)) if isinstance(sink, (str, os.PathLike)) else f"a {type(sink).__name__}"


def _to_tensorboard(record: Record, sink: Any) -> None:
    for name, value in record.as_metrics().items():
        sink.add_scalar(name, value, record.step)
    sink.add_text("outgrow/growth", str(record), record.step)


def _to_jsonl(record: Record, path: Any) -> None:
    _append(path, json.dumps(record.to_json(), ensure_ascii=False, allow_nan=False) + "\n")


def _to_csv(record: Record, path: Any) -> None:
    row = _flat(record)
    text = io.StringIO()
    writer = csv.DictWriter(text, row)
    writer.writeheader()
    header = text.getvalue()
    writer.writerow(row)
    if os.path.exists(path) and os.path.getsize(path):
        with open(path, encoding="utf-8", newline="") as file:
            if file.readline() != header:
                raise ScheduleError("the file is a table with other columns")
        _append(path, text.getvalue().removeprefix(header))
    else:
        _append(path, text.getvalue())


def _append(path: Any, text: str) -> None:
    """Append text to a file, on a new line even if the last line was cut off by a crash."""
    with open(path, "ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            text = text if file.read() == b"\n" else f"\n{text}"
        file.write(text.encode())
