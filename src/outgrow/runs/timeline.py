"""All stages of a run before it starts: sizes, parameters and FLOPs, computed by a dry run.

A copy of the model on the meta device is grown event by event. That costs neither memory nor arithmetic, and an impossible
event is found before training starts. Code that reads values of tensors can't run on the meta device: then the dry run is
repeated on a real copy. Two assumptions are made: triggers apply in the order of the list, and fades are complete by
the next growth, unless the number of steps between two growths is known and smaller.
"""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from outgrow.analysis.analyse import dissect
from outgrow.apply.final_positions import edits_by_tensor
from outgrow.apply.weight_fades import without_drifts
from outgrow.configuration.rebuild_from_config import shapes_suffice
from outgrow.engine.dry_run_findings import Ready
from outgrow.engine.grow import dry_run
from outgrow.errors import GrowthError, ScheduleError, SelectionError, SizeError
from outgrow.growth_plan.plan import Change
from outgrow.model.check_arguments import check_model
from outgrow.model.compiled import uncompiled
from outgrow.model.example import Example
from outgrow.model.known_values import on_meta
from outgrow.model.sandbox import random_state, tensors_of
from outgrow.modules.gates import gates_of
from outgrow.optimizers.grow_state import keeps_old_entries
from outgrow.runs.schedule import At, Schedule, When
from outgrow.saving.atomic_write import check_path, write_plain
from outgrow.text.tables import plain_table
from outgrow.trace.flops import count_flops
from outgrow.transforms.all_transforms import described
from outgrow.wrong_arguments import usage

WIDTH = 132
SHOWN = 4  # kinds of changes that a table lists by name; the others are counted


@dataclass(frozen=True)
class Stage:
    """The model from one growth to the next: the time and changes of the first one, and the model's size after it."""

    when: str
    what: str
    changes: tuple[Change, ...]
    parameters: int
    flops: int
    preserving: bool = True
    tensors: frozenset[str] = field(default=frozenset(), repr=False, compare=False)  # see `_concerned`
    copies: bool = field(default=False, repr=False, compare=False)  # existing units are copied or rescaled
    ready: Ready | None = field(default=None, repr=False, compare=False)  # findings of the dry run that the run reuses

    @property
    def method(self) -> str:
        return ", ".join(dict.fromkeys(change.method for change in self.changes))

    @property
    def sizes(self) -> str:
        """The volumes that grow, in short: volumes with the same sizes are grouped."""
        alike: dict[str, list[str]] = {}
        for name, sizes, _ in (change.row for change in self.changes):
            alike.setdefault(sizes, []).append(name)
        groups = []
        for sizes, (first, *others) in alike.items():
            groups.append(f"{first}{f' + {len(others)} more' if others else ''}: {sizes}")
        rest = sum(len(names) for names in list(alike.values())[SHOWN:])
        return ", ".join(groups[:SHOWN]) + (f", and {rest} more" if rest else "")


@dataclass(frozen=True)
class Timeline:
    """The stages of a run. `print(timeline)` shows them as a table, `timeline.svg(path)` as a picture."""

    stages: tuple[Stage, ...]

    def table(self, width: int = WIDTH) -> str:
        """The stages as a table, at most `width` characters wide."""
        rows = []
        for number, stage in enumerate(self.stages):
            before = self.stages[max(number - 1, 0)]
            note = "" if stage.preserving else " (does not preserve)"
            rows.append(
                (
                    str(number),
                    stage.when,
                    stage.sizes or "–",
                    (stage.method or "–") + note,
                    f"{stage.parameters:,}{_times(before.parameters, stage.parameters, number)}",
                    f"{stage.flops:,}{_times(before.flops, stage.flops, number)}",
                )
            )
        shown = plain_table(("stage", "when", "what grows", "method", "parameters", "FLOPs"), rows, width)
        if len(self.stages) > 2:
            first, last = self.stages[0], self.stages[-1]
            sizes = _times(first.parameters, last.parameters, 1), _times(first.flops, last.flops, 1)
            shown += "\n\nin all: parameters {}, FLOPs {}".format(*(size.strip(" ()") for size in sizes))
        return shown

    def __str__(self) -> str:
        return self.table()

    __repr__ = __str__

    def to_json(self) -> dict[str, Any]:
        """The timeline as plain JSON values."""
        bare = replace(self, stages=tuple(replace(stage, ready=None, tensors=frozenset()) for stage in self.stages))
        data: dict[str, Any] = json.loads(json.dumps(asdict(bare), default=list))
        for stage in data["stages"]:
            del stage["ready"], stage["tensors"], stage["copies"]
        return data

    def to_svg(self) -> str:
        """A picture as SVG: parameters and FLOPs over the stages, and the volumes that grow."""
        from outgrow.runs.timeline_svg import draw

        return draw(self.stages)

    def svg(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to a file."""
        check_path(path, "timeline.svg('timeline.svg')", GrowthError)
        write_plain(path, self.to_svg().encode())


def _times(before: int, after: int, number: int) -> str:
    return f" (× {after / before:.2f})" if number and before else ""


@usage("outgrow.timeline(model, example, schedule)")
def timeline(
    model: nn.Module, example: Example, schedule: Schedule | Sequence[At | When], seeds: Sequence[int] | None = None
) -> Timeline:
    """Preview the stages of a run with a schedule. The model stays unchanged.

    Args:
        model: the model at the start of the run; it may be on the meta device.
        example: a tensor, a tuple of arguments, or a dict of keyword arguments; FLOPs are those of a forward pass on it.
        schedule: an `outgrow.Schedule`.
        seeds: one per growth; a run passes its own, to reuse the plans.

    Raises ScheduleError if an event is impossible, with the event and the reason.

    Example:
        >>> import torch
        >>> from outgrow import At, Deepen, Widen
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> events = At(step=10, grow=[Widen("0", to=16)]), At(step=20, grow=[Deepen(after="1", method="net2net")])
        >>> print(timeline(model, torch.zeros(1, 4), Schedule(events)))
        stage  when     what grows       method   parameters    FLOPs
        ─────  ───────  ───────────────  ───────  ────────────  ────────────
        0      start    –                –        58            96
        1      step 10  0: 8 → 16        r2r      114 (× 1.97)  192 (× 2.00)
        2      step 20  behind 1: 0 → 1  net2net  386 (× 3.39)  704 (× 3.67)
        <BLANKLINE>
        in all: parameters × 6.66, FLOPs × 7.33
    """
    schedule = schedule if isinstance(schedule, Schedule) else Schedule(schedule)
    seeds = range(len(schedule)) if seeds is None else seeds
    check_model(model, values=False)
    without = any(tensor.is_meta for tensor in tensors_of(model).values())
    with uncompiled(), random_state(), shapes_suffice() if without else nullcontext():
        try:
            return Timeline(tuple(_stages(_copy(model, meta=True), on_meta(example), schedule, seeds)))
        except Exception as error:
            certain = isinstance(error.__cause__, (SelectionError, SizeError))  # these depend on names and sizes only
            if certain or without:
                raise
        return Timeline(tuple(_stages(_copy(model, meta=False), example, schedule, seeds)))


def _stages(twin: nn.Module, example: Example, schedule: Schedule, seeds: Sequence[int]) -> Iterator[Stage]:
    trace = dissect(twin, example).reading.trace
    flops = count_flops(trace, [value.shape for value in trace.values].__getitem__)
    yield Stage("start", "", (), sum(parameter.numel() for parameter in twin.parameters()), flops)
    step: float | None = 0
    first = {id(parameter): name for name, parameter in twin.named_parameters()}
    for number, event in enumerate(schedule, 1):
        now = event.at_step if isinstance(event, At) else None
        _pass(twin, math.inf if now is None or step is None else now - step)
        step = now
        try:
            growth, ready = dry_run(twin, example, event.grow, seeds[number - 1])
        except GrowthError as error:
            time = f"{'at' if isinstance(event, At) else 'when'} {event.time}"
            raise ScheduleError(f"event {number}, {time}: {error}") from error
        what = ", ".join(map(described, event.grow))
        edits = edits_by_tensor(growth.plan)
        yield Stage(
            event.time,
            what,
            growth.plan.changes,
            growth.parameters[1],
            growth.flops[1],
            growth.preserving,
            _concerned(twin, ready, first),
            any(not keeps_old_entries(each) for each in edits.values()),
            ready,
        )


def _concerned(twin: nn.Module, ready: Ready, first: dict[int, str]) -> frozenset[str]:
    """The parameters that a growth changes, or whose groups new parameters join, by their names at the start of the run.

    first: these names, by the parameter's id. New parameters are noted there under the name of the one that they join.
    """
    now = dict(twin.named_parameters())
    for new, like in ready.joins:
        first[id(now[new])] = first.get(id(now[like]), new)
    return frozenset(first[id(now[name])] for name in (*ready.edited, *(like for _, like in ready.joins)))


def _pass(twin: nn.Module, steps: float) -> None:
    """Advance the fades of a model by a number of optimizer steps."""
    without_drifts(twin)
    for gate in set(gates_of(twin).values()):
        gate.done = int(min(gate.steps, gate.done + steps))
        if gate.done >= gate.steps:
            gate.open()


def _copy(model: nn.Module, meta: bool) -> nn.Module:
    """A deep copy of a model, with its tensors on the meta device or cloned; tied tensors stay tied."""
    copies: dict[int, Any] = {}  # by identity
    for tensor in tensors_of(model).values():
        other = tensor.detach().to("meta") if meta else tensor.detach().clone()
        copies[id(tensor)] = nn.Parameter(other, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else other
    for module in model.modules():  # unregistered tensors; deepcopy refuses those that are part of an autograd graph
        for value in vars(module).values():
            if isinstance(value, Tensor) and id(value) not in copies:
                copies[id(value)] = value.detach().clone()
    try:
        return copy.deepcopy(model, copies)
    except Exception as error:
        raise GrowthError(f"the model can't be copied: {type(error).__name__}: {error}") from error


def check_late(model: nn.Module, example: Example, ahead: Sequence[At | When]) -> None:
    """Raise if an event at a fixed time is impossible before the triggers: it does not wait for them."""
    late = sorted(ahead, key=lambda event: isinstance(event, When))
    if late != list(ahead):
        try:
            timeline(model, example, Schedule(late))
        except ScheduleError as error:
            raise ScheduleError(f"if the triggers apply only after all fixed times: {error}") from error
