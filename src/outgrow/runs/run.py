"""A training run with growths: call `step` after each optimizer step and `epoch` after each epoch.

    for epoch in range(run.epochs, 90):
        for x, y in loader:
            …; loss.backward(); optimizer.step(); scheduler.step()
            run.step(loss)
        run.epoch({"val_loss": …})
        run.save("run.pt")

The training loop stays the user's own. A growth happens inside one of these two calls, completely or not at all: model,
optimizer state, learning rates, averaged copies. `run.load("run.pt")`, on a run with a newly built *small* model, continues
the saved run bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from outgrow.distributed.agreement import by_first, team
from outgrow.distributed.ddp import check_renewable, wrappers_around
from outgrow.distributed.fsdp import is_sharded, seen_whole
from outgrow.engine.grow import Request, run_growth
from outgrow.engine.growth_report import Growth
from outgrow.errors import CheckpointError, GrowthError, OptimizerError, ScheduleError
from outgrow.growth_plan.plan import Plan
from outgrow.history.cohorts import Cohorts, cohorts
from outgrow.model.check_arguments import check_averages, check_seed
from outgrow.model.example import Example
from outgrow.model.journal import Journal
from outgrow.model.unwrap import as_list, bare
from outgrow.modules.gates import share_gates
from outgrow.optimizers.grow_optimizers import check_optimizers
from outgrow.optimizers.restart import discard_state, start_fresh
from outgrow.optimizers.wrappers import unwrapped as bare_optimizers
from outgrow.process.signals import DeferredSignals
from outgrow.runs.cohort_rates import Pace
from outgrow.runs.example_check import check_runs
from outgrow.runs.freeze_old import Freezing
from outgrow.runs.growth_log import Record, check_sinks, write
from outgrow.runs.input_checks import as_loss, as_number, check_check, check_measured, check_parts, measured, warn_lost
from outgrow.runs.learning_rates import scale_decay, scale_rates
from outgrow.runs.optimizer_checks import advised, check_following
from outgrow.runs.outdated_plans import outdated
from outgrow.runs.schedule import At, Schedule, When, placed_schedule
from outgrow.runs.schedule_position import check_position, happened, mark
from outgrow.runs.step_counts import Steps
from outgrow.runs.timeline import Timeline, check_late, timeline
from outgrow.runs.triggers import Metrics
from outgrow.saving.atomic_write import Path, check_path, place_for, write_whole
from outgrow.saving.checksums import sealed
from outgrow.saving.reshape_for_checkpoint import reshaping
from outgrow.saving.run_file import read_run, refuse_not_finite
from outgrow.saving.run_state import Parts, pack, restore
from outgrow.saving.torch_files import save_safely, without_numpy
from outgrow.text.terminal import line, track
from outgrow.verify.brief_check import plan_brief_check
from outgrow.verify.compiled_gates import check_fading
from outgrow.wrong_arguments import usage

T = TypeVar("T")
SAVE = "run.save('run.pt')"
NOTHING = Plan((), (), (), 0)


@usage("outgrow.Run(model, example, optimizer, schedule)")
class Run:
    """A model in training, with everything that must follow its growths.

    Args:
        model: the model in training; wrappers (`torch.compile`, DistributedDataParallel) are unwrapped.
        example: an input of the model, as for `outgrow.grow`.
        optimizer: one or several.
        schedule: an `outgrow.Schedule`, a list of events, or the path of a schedule file.
        scheduler: learning-rate schedulers, one or several; required if an event has lr=.
        average: averaged copies of the model; they grow too.
        also: further objects to save and load with the run, by name: anything with `state_dict` and `load_state_dict`
            (a GradScaler, a sampler), or a torch.Generator.
        seed: for the random values of growths.
        check: compare outputs before and after each growth. True: if the growth was planned in the dry run, one pass each in
            eval mode, on the smallest part of the example that runs the whole model; otherwise as "full". "full": as thorough
            as `outgrow.grow`, in both modes. False: no comparison.
        log: where growths are logged, besides the terminal: a `logging.Logger`, a callable, a TensorBoard writer, a Lightning
            logger, a .csv or .jsonl file; one or several. `quiet=True` prints nothing on the terminal.
        position: the position (`Run.position`) of the run to continue, if the model has been through its growths already.
        freeze: "old" trains only what the newest growth has added; older parameters get no gradients and no weight decay.
            `run.unfreeze()` ends it.
        steps: the length of the whole run, for events at shares of it (`outgrow.At(share=0.4, …)`).
        epochs: the same, in epochs.

    Everything is checked before training starts, by a dry run of the whole schedule: `print(run.timeline)`.

    Example:
        >>> import torch, outgrow
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> schedule = Schedule([At(step=3, grow=[outgrow.Widen("0", to=12)], lr=0.5)])
        >>> run = Run(model, torch.zeros(1, 4), optimizer, schedule, quiet=True)
        >>> for _ in range(5):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(6, 4)).square().mean().backward()
        ...     optimizer.step()
        ...     growth = run.step()
        >>> model[0].out_features, optimizer.param_groups[0]["lr"], len(run.records)
        (12, 0.05, 1)
    """

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        optimizer: Optimizer | Sequence[Optimizer],
        schedule: Schedule | Sequence[At | When] | Path,
        scheduler: Any = None,
        average: nn.Module | Sequence[nn.Module] | None = None,
        *,
        also: Mapping[str, Any] | None = None,
        seed: int = 0,
        check: bool | str = True,
        log: Any = None,
        quiet: bool = False,
        position: Mapping[str, Any] | None = None,
        freeze: str | None = None,
        steps: int | None = None,
        epochs: int | None = None,
    ) -> None:
        check_seed(seed)
        check_check(check)
        self.model, self.example, self.seed, self.check = model, example, seed, check
        self.schedule = placed_schedule(schedule, steps, epochs)
        self.optimizers: list[Any] = as_list(optimizer)
        self.schedulers, self.averages, self.log, self.quiet = as_list(scheduler), as_list(average), as_list(log), quiet
        self.also: Mapping[str, Any] = {} if also is None else also
        if not self.optimizers:
            raise OptimizerError("a run needs an optimizer: pass the one that was made from model.parameters()")
        self._freezing = Freezing(model, freeze)
        copies = [bare(getattr(one, "module", one)) for one in self.averages]
        with seen_whole([bare(model), *copies], self.optimizers) as sharded:
            self._check_and_plan(position, sharded)
        self.pace = Pace(bare(model), self.optimizers)
        for copy in copies:
            share_gates(bare(model), copy)
        self.steps, self.epochs = 0, 0
        self.metrics: list[dict[str, float]] = []  # of the epochs since the last growth
        self.records: list[Record] = []
        self._loss: Any = None
        self._unlogged: Record | None = None  # the last growth, until the loss after it is known
        self._taken = Steps(bare(model), bare_optimizers(self.optimizers))
        if self._freezing.apply():
            self.pace.grown(train="new")

    def _check_and_plan(self, position: Mapping[str, Any] | None, sharded: bool) -> None:
        """Check all arguments, and plan the growths in a dry run."""
        model, example, check = self.model, self.example, self.check
        check_runs(bare(model), example if check is not False and self.schedule else None)
        check_optimizers(self.optimizers, bare(model), NOTHING)
        check_averages(self.averages, bare(model))
        check_parts(self.optimizers, self.schedulers, self.also, self.schedule, sharded)
        check_sinks(self.log)
        check_renewable(wrappers_around([bare(model)], model))
        if position is not None:
            check_position(self.schedule, position)
        self.done: list[int] = [] if position is None else happened(self.schedule, position)  # events, by number
        ahead = dict(self._waiting())
        check_fading(model, [one for event in ahead.values() for one in event.grow])
        seeds = [self.seed + number for number in ahead]
        self.timeline: Timeline = timeline(bare(model), example, Schedule(list(ahead.values())), seeds)
        check_late(bare(model), example, list(ahead.values()))
        check_following(self.optimizers, bare(model), list(ahead.values()), self.timeline.stages[1:])
        self._ready = {number: stage.ready for number, stage in zip(ahead, self.timeline.stages[1:], strict=True)}
        self._brief = plan_brief_check(bare(model), example) if check is True and any(self._ready.values()) else None

    def __repr__(self) -> str:
        return f"Run({type(bare(self.model)).__name__}: {self._status()})"

    @property
    def cohorts(self) -> Cohorts:
        """The growth that added each entry of each parameter."""
        return cohorts(bare(self.model))

    @property
    def ahead(self) -> list[At | When]:
        """Events that have not happened yet."""
        return [event for _, event in self._waiting()]

    def step(self, loss: Any = None) -> Growth | None:
        """Count an optimizer step, and grow if an event is due; call it after `optimizer.step()` (and `scheduler.step()`).

        loss: the loss of this step; the log shows it before and after each growth.
        """
        self._taken.check()
        if loss is not None:
            self._loss = as_loss(loss)
            self.tell(self._loss)
        due = [number for number, event in self._waiting() if isinstance(event, At) and event.at_step == self.steps + 1]
        return self._grow(due, self.steps + 1, self.epochs, self.metrics)

    def epoch(self, metrics: Metrics | None = None, *, resumed: bool = False) -> Growth | None:
        """Count an epoch, and grow if an event is due, or if a trigger decides so from the metrics.

        If several processes train the model together, triggers use the metrics of rank 0.

        resumed: the epoch was begun by an earlier process, and some of its metrics are lost. A trigger whose metric is missing
            then skips the epoch with a warning; otherwise a missing metric is an error.
        """
        group = team(self.model, bare(self.model)) if any(isinstance(event, When) for event in self.ahead) else None
        past, due = by_first(group, lambda: self._decide(metrics, resumed))
        return self._grow(due, self.steps, self.epochs + 1, past)

    def _decide(self, metrics: Any, resumed: bool) -> tuple[list[dict[str, float]], list[int]]:
        """The metrics for triggers, including those of this epoch, and the events that are due."""
        past = [*self.metrics, measured(metrics)]
        due = [number for number, event in self._waiting() if isinstance(event, At) and event.at_epoch == self.epochs + 1]
        triggered = [event for _, event in self._waiting() if isinstance(event, When)]
        if not triggered:
            return past, due
        try:
            check_measured(triggered[:1] if resumed else triggered, past)
            left = [(number, event) for number, event in self._waiting() if number not in due]
            if left and isinstance(left[0][1], When) and left[0][1].rule(past):  # a trigger waits for the events before it
                due.append(left[0][0])
        except (ScheduleError, KeyError):
            if not resumed:
                raise
            warn_lost(triggered[0], self.epochs + 1)
            return self.metrics, due
        return past, sorted(due)

    def track(self, batches: Iterable[T]) -> Iterator[T]:
        """A progress bar over an epoch's batches, with the step, the number of parameters and the next growth."""
        if not isinstance(batches, Iterable):
            raise GrowthError(f"batches are of type {type(batches).__name__}: pass an iterable, e.g. run.track(loader)")
        return track(batches, self._status) if not self.quiet else iter(batches)

    def state_dict(self) -> dict[str, Any]:
        """The complete state of the run; `torch.load(weights_only=True)` can read it."""
        if is_sharded(bare(self.model)):
            raise CheckpointError(
                "a sharded run can't be saved in one file: save model and optimizer with torch.distributed.checkpoint, and "
                "with them outgrow.dcp.history_state(model) and run.position()"
            )
        return {"outgrow": self.position(), **pack(self._parts())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another run; this one has the small model, or is that run itself."""
        if not isinstance(state, Mapping) or "outgrow" not in state:
            raise CheckpointError(
                f"this {type(state).__name__} is not a state of a run: pass the result of run.state_dict(), or use "
                "run.load(path) to read a file"
            )
        with DeferredSignals() as interrupts, reshaping(bare(self.model)) as journal:
            try:
                check_position(self.schedule, state["outgrow"])
                restore(self._parts(), state, journal)
                interrupts.begin()
                self.go_to(state["outgrow"])
            except GrowthError:
                raise
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                raise CheckpointError(f"the checkpoint can't be loaded into this run: {reason}") from error

    @usage("run.save('run.pt')")
    def save(self, path: Path, extra: Any = None, *, finite: bool = True) -> None:
        """Write the run to a file, completely or not at all: if the process dies meanwhile, the old file is unchanged.

        extra: further plain values and tensors; `load` returns them.
        finite: raise CheckpointError, and keep the old file, if the model holds NaN or infinity: a diverged run must not
            replace one that can be continued. False writes it anyway, e.g. to inspect it.
        """
        check_path(path, SAVE)
        if os.fspath(path).endswith(".safetensors"):
            raise CheckpointError(
                f"{path}: a run is written with torch.save, and torch.load reads a file of that name as safetensors: "
                "name it run.pt"
            )
        target = place_for(path, SAVE)
        if finite:
            refuse_not_finite([self.model, *self.averages], path)
        try:
            state = without_numpy({**self.state_dict(), "extra": extra})
        except RecursionError:
            raise CheckpointError(f"{path} was not written: a list or dict in extra= contains itself") from None
        write_whole(target, lambda draft: save_safely(sealed(state), draft))

    @usage("run.load('run.pt')")
    def load(self, path: Path, *, checksums: bool = True) -> Any:
        """Continue from a file that `save` wrote. Returns the value of `extra` that was saved.

        checksums: compare the contents with the checksums in the file, as in `outgrow.load`.
        """
        state = read_run(path, checksums)
        self.load_state_dict(state)
        return state.get("extra")

    def position(self) -> dict[str, Any]:
        """The position of the run, as plain values: steps, epochs, growths and metrics, without model and optimizers."""
        return {
            "steps": self.steps,
            "epochs": self.epochs,
            "done": [mark(self.schedule.events[number]) for number in self.done],
            "metrics": [dict(metrics) for metrics in self.metrics],
            "records": [record.to_json() for record in self.records],
            "pace": self.pace.state_dict(),
            "loss": None if self._loss is None else as_number("the loss", self._loss),
            "untold": self._unlogged is not None,
        }

    def go_to(self, position: Mapping[str, Any]) -> None:
        """Continue from the position of another run, whose model and optimizers are loaded already."""
        check_position(self.schedule, position)
        done, metrics = happened(self.schedule, position), [dict(metrics) for metrics in position["metrics"]]
        records = [Record.from_json(record) for record in position["records"]]
        self.pace.load_state_dict(position["pace"])
        self.steps, self.epochs, self.done = position["steps"], position["epochs"], done
        self.metrics, self.records, self._loss = metrics, records, position.get("loss")
        self._unlogged = records[-1] if position.get("untold") else None
        self._freezing.apply()

    def unfreeze(self) -> None:
        """End `freeze="old"`: all parameters are trained again."""
        self._freezing.release()
        self.pace.end_hold()

    def _waiting(self) -> list[tuple[int, At | When]]:
        return [(number, event) for number, event in enumerate(self.schedule) if number not in self.done]

    def _parts(self) -> Parts:
        return Parts(self.model, bare_optimizers(self.optimizers), self.schedulers, self.averages, self.also)

    def _grow(self, due: Sequence[int], steps: int, epochs: int, metrics: list[dict[str, float]]) -> Growth | None:
        """Set the counts, and carry out the due events; if one fails, restore the counts, so that the next call tries again."""
        before = self.steps, self.epochs, self.metrics
        self.steps, self.epochs, self.metrics = steps, epochs, metrics
        growth = None
        try:
            for number in due:
                growth = self._carry_out(number, self.schedule.events[number])
        except BaseException:
            if not all(number in self.done for number in due):
                self.steps, self.epochs = before[:2]
                self.metrics = [] if any(number in self.done for number in due) else before[2]
            raise
        return growth

    def _carry_out(self, number: int, event: At | When) -> Growth:
        """Carry out one event: first the rates, which the journal can restore, then the growth, which undoes itself on failure.

        Interrupts are deferred until the run has recorded the growth: either both have happened, or neither.
        """
        ready, seed = self._ready.get(number), self.seed + number
        loss = None if self._loss is None else as_number("the loss", self._loss)
        self.tell()
        with DeferredSignals() as interrupts:
            with Journal() as journal, advised(), outdated(bare(self.model), self.example, event, seed, ready):
                fresh = event.state == "fresh"
                if event.lr is not None:
                    scale_rates(self.optimizers, self.schedulers, event.lr, journal)
                if event.weight_decay is not None:
                    scale_decay(self.optimizers, event.weight_decay, journal)
                optimizers = discard_state(self.optimizers, journal) if fresh else self.optimizers
                checks = bool(self.check), ready, self._brief
                parts = self.model, self.example, event.grow, optimizers, self.averages, seed
                request = Request(*parts, *checks, copy_state=event.state == "copy")
                with self._freezing.lifted():
                    growth = run_growth(request, interrupts)
            if fresh:
                start_fresh(self.optimizers)
            train = "new" if self._freezing.on else event.train
            self.pace.grown(new_lr=event.new_lr, train=train, hold=event.hold, warmup=event.warmup)
            record = Record.of(growth, event.grow, len(self.records) + 1, step=self.steps, epoch=self.epochs, loss_before=loss)
            self.records.append(record)
            self._unlogged, self.metrics = record, []
            self.done.append(number)
        if loss is None:
            self.tell()
        return growth

    def tell(self, loss: Any = None) -> None:
        """Log the last growth, unless logged already. `step` does this with the next loss; call it at the end of training."""
        if self._unlogged is None:
            return
        record = replace(self._unlogged, loss_after=None if loss is None else as_number("the loss", loss))
        self.records[-1], self._unlogged = record, None
        if not self.quiet:
            line(str(record))
        write(record, self.log)

    def _status(self) -> str:
        waiting = self._waiting()
        size = sum(parameter.numel() for parameter in bare(self.model).parameters())
        ahead = f"next growth: {waiting[0][1].time}" if waiting else "no more growths"
        return f"epoch {self.epochs + 1} · step {self.steps:,} · {size:,} parameters · {ahead}"
