"""A callback that grows the model in the middle of a Lightning run.

    trainer = lightning.Trainer(callbacks=[outgrow.lightning.Grow(schedule, example)])
    trainer.fit(LitModel(), loader)
    trainer.fit(LitModel(), loader, ckpt_path="last.ckpt")   # resumes, with a newly built small model

`At(step=…)` refers to Lightning's `global_step` (optimizer steps), `At(epoch=…)` to finished epochs, `At(share=…)` to the
trainer's `estimated_stepping_batches`, which follow from max_steps and max_epochs. Rules read
`trainer.callback_metrics` at the end of each training epoch, after its validation: the last value logged under a name. Use
validation metrics in triggers: values that `training_step` has logged in an epoch before a checkpoint are not restored by
Lightning, so that a run resumed within the epoch gets the mean of the rest, and may grow at another time. If a metric has no
value at all, a trigger that reads it skips the epoch with a warning.

Lightning's own checkpoints hold everything that a resumed run needs: the growth history in the state dict (`outgrow.history`),
and the rest under the key `outgrow`. This works because of the order in which Lightning restores: first the model, then
optimizers are made from the grown model; here their groups are put in the order of the saved ones; then their state is
restored. Weights-only checkpoints hold the history too; `load` reads any of them without a trainer.

Resumed runs equal uninterrupted ones bit for bit, within epochs too, if the order of batches can be reproduced: shuffled by the
process's random state, by a seeded generator, or by the number of the epoch. Batches that are done are loaded again and
skipped. A loader with a `state_dict` (torchdata's StatefulDataLoader) is left to Lightning. If a checkpoint was written after
an epoch's last batch, but before its validation, the validation is made on resuming, which Lightning (2.6) does not do (see
`missed_validation.py`). One difference is due to Lightning, with or without growth: with `max_steps`, no validation, and a
checkpoint from the end of an epoch, it trains one more batch in that epoch.

With `strategy="ddp"` the checkpoint holds the random states of each rank: for equality bit for bit, resume with as many
processes.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from outgrow.distributed.agreement import of_all
from outgrow.errors import CheckpointError, GrowthError, MissingError, Problem
from outgrow.integrations.lightning.batches_seen import BatchPosition
from outgrow.integrations.lightning.checkpoint_file import read_checkpoint
from outgrow.integrations.lightning.missed_validation import after, is_missed, validate
from outgrow.model.compiled import without_compiled_steps
from outgrow.model.example import Example
from outgrow.model.journal import Journal
from outgrow.model.unwrap import bare
from outgrow.modules.fade_warnings import warn_at_the_end
from outgrow.modules.gates import gates_of
from outgrow.runs.input_checks import check_check
from outgrow.runs.run import Run
from outgrow.runs.schedule import At, Schedule, When, placed_schedule, schedule_of
from outgrow.saving.checksums import check_seal, sealed
from outgrow.saving.growths_in_state_dict import expect, growth_entries
from outgrow.saving.param_groups import names_in, regroup
from outgrow.saving.run_state import load_weights
from outgrow.wrong_arguments import usage

KEY = "outgrow"  # in a checkpoint
NEEDED = {"position", "groups", "metrics", "feeds"}  # keys under it
LOAD = "outgrow.lightning.load(LitModel(width=8), 'last.ckpt')"


def _installed() -> Any:
    """`lightning.pytorch` or `pytorch_lightning`, whichever the program uses."""
    for name in sorted(("lightning.pytorch", "pytorch_lightning"), key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise MissingError("outgrow.lightning needs Lightning, which is not installed: pip install outgrow[lightning]")


_LIGHTNING = _installed()
Callback: Any = _LIGHTNING.Callback


@usage("outgrow.lightning.Grow(schedule, example)")
class Grow(Callback):  # type: ignore[misc]
    """A callback that grows the model by a schedule, and resumes from the checkpoints of such a run.

    Args:
        schedule: an `outgrow.Schedule`, a list of events, or the path of a schedule file.
        example: an input of the module: a tensor, a tuple of arguments or a dict of keyword arguments.
        module: the part to grow, e.g. "model"; names in the schedule refer to this part. By default the LightningModule
            itself, which then needs a `forward` that accepts the example.
        seed: for the random values of growths.
        check: compare outputs before and after each growth: True (brief if it was planned in the dry run), "full" or False, as
            for `outgrow.Run`.
        quiet: print nothing. The trainer's loggers log growths in any case.

    `grow.run` is the `outgrow.Run`, once training has started. An EMA or other `WeightAveraging` callback of the trainer
    follows the growths; Lightning's StochasticWeightAveraging is refused. Of the strategies for several processes, `"ddp"` is
    supported, in a script or under torchrun: all ranks grow in the same way, and triggers read the metrics of rank 0.
    """

    def __init__(
        self,
        schedule: Schedule | Sequence[At | When] | str | os.PathLike[str],
        example: Example,
        module: str | None = None,
        *,
        seed: int = 0,
        check: bool | str = True,
        quiet: bool = False,
    ) -> None:
        check_check(check)
        self.schedule, self.example, self.module = schedule_of(schedule), example, module
        self.seed, self.check, self.quiet = seed, check, quiet
        self.run: Run | None = None
        self._batches = BatchPosition()
        self._position: Mapping[str, Any] | None = None  # of the run that is resumed
        self._saved: Mapping[str, Any] | None = None  # from the checkpoint that is resumed
        self._measured: dict[str, float] = {}  # metrics of the run that is resumed, which Lightning does not restore
        self._within = False  # this epoch was begun by the run that is resumed
        self._hooks: list[Any] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Before anything is restored: let the model accept the shapes of checkpoints, and write growths into checkpoints."""
        self._saved = None
        if stage == "fit":
            _refuse(trainer)
            self._part(pl_module)
        self._hooks = [expect(pl_module), *(expect(average, drifting=False) for average in _averages(trainer))]
        if not isinstance(vars(pl_module).get("on_save_checkpoint"), Packing):
            pl_module.on_save_checkpoint = Packing(pl_module)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self._saved is not None:  # nothing was left to train
            checkpoint[KEY] = self._saved
        elif self.run is not None:
            saved = {
                "position": self.run.position(),
                "groups": [names_in(optimizer, pl_module) for optimizer in trainer.optimizers],
                "metrics": self._metrics(trainer),
                "open": _unfinished_metrics(trainer) if self._batches.seen else [],
                "feeds": of_all(_group(trainer), self._batches.state(trainer)),  # one per rank
            }
            checkpoint[KEY] = sealed(saved)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get(KEY)
        if saved is not None and not (isinstance(saved, Mapping) and set(saved) >= NEEDED):
            raise CheckpointError(f"the checkpoint is damaged: {KEY!r} has no position of the run: use an earlier one")
        if saved is not None:
            check_seal(saved, f"{KEY!r} in the checkpoint")
        self._saved = saved

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the run, which checks everything in a dry run; optimizers exist, but their state is not restored yet."""
        part, saved = self._part(pl_module), self._saved
        self._position = self._earlier(part) if saved is None else saved["position"]
        if saved is not None:
            _regroup(trainer.optimizers, pl_module, saved["groups"])
        optimizers = [optimizer for optimizer in trainer.optimizers if _trains(optimizer, part)] or trainer.optimizers
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        place = next(path for path, module in pl_module.named_modules() if module is part)
        quiet = self.quiet or not trainer.is_global_zero
        bar = None if quiet else trainer.progress_bar_callback
        with without_compiled_steps(pl_module):
            self.run = Run(
                part,
                self._on_device(trainer, pl_module),
                optimizers,
                _placed(self.schedule, trainer),
                [scheduler for scheduler in schedulers if any(scheduler.optimizer is one for one in optimizers)],
                [average.get_submodule(place) for average in _averages(trainer)],
                seed=self.seed,
                check=self.check,
                log=[*trainer.loggers, *([] if bar is None else [lambda record: bar.print(str(record))])],
                quiet=quiet or bar is not None,
                position=self._position,
            )
        self._batches = BatchPosition(first=trainer.current_epoch == 0)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore the run's position; if Lightning has counted one epoch more, that epoch still lacks its end."""
        run, saved, self._within = self._running(), self._saved, False
        if saved is None:
            counted = {"steps": trainer.global_step, "epochs": trainer.current_epoch}
            run.go_to({**(self._position or run.position()), **counted})
            return
        run.go_to(saved["position"])
        self._measured = {name: value for name, value in saved["metrics"].items() if name not in saved.get("open", ())}
        self._saved = None
        feed = saved["feeds"][trainer.global_rank % len(saved["feeds"])]
        if run.epochs >= trainer.current_epoch:
            self._within = feed["seen"] > 0
            self._batches.go_to(feed, trainer, ended=False)
        elif is_missed(trainer):
            # the module's hook is called last: progress bars exist by then
            after(pl_module, "on_train_start", lambda: self._end_epoch(trainer, feed, validated=False))
        else:
            self._end_epoch(trainer, feed, validated=True)

    def _end_epoch(self, trainer: Any, feed: Mapping[str, Any], validated: bool) -> None:
        """End an epoch whose batches were all done in the saved run, and which Lightning counts as done."""
        if not validated:
            self._batches.restore_without_iterator(feed, trainer)
            validate(trainer)
            feed = self._batches.state(trainer)
        with without_compiled_steps(trainer.lightning_module):
            self._running().epoch(self._metrics(trainer), resumed=True)
        self._batches.go_to(feed, trainer, ended=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._running().tell()  # a growth after which no loss was logged
        warn_at_the_end(gates_of(pl_module).values())

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._batches.epoch_starts(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        run, loss = self._running(), outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self._batches.seen = batch_idx + 1
        while run.steps < trainer.global_step:  # not after batches that only accumulate gradients
            with without_compiled_steps(pl_module):
                run.step(loss if isinstance(loss, Tensor) else None)
            loss = None

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        run = self._running()
        if run.epochs <= trainer.current_epoch:  # Lightning may repeat the end of an epoch in a resumed run
            with without_compiled_steps(pl_module):
                run.epoch(self._metrics(trainer), resumed=self._within)
        self._within = False
        self._batches.epoch_ends()

    def _running(self) -> Run:
        assert self.run is not None, "on_fit_start comes first"
        return self.run

    def _earlier(self, part: nn.Module) -> dict[str, Any] | None:
        """The position of the run at the end of the last `fit` of the same model."""
        return None if self.run is None or self.run.model is not part else self.run.position()

    def _metrics(self, trainer: Any) -> dict[str, float]:
        return {**self._measured, **{name: float(value) for name, value in trainer.callback_metrics.items()}}

    def _on_device(self, trainer: Any, pl_module: Any) -> Any:
        return tree_map_only(Tensor, lambda x: x.to(pl_module.device), trainer.precision_plugin.convert_input(self.example))

    def _part(self, pl_module: Any) -> nn.Module:
        """The module that grows."""
        kind = type(pl_module).__name__
        parts = [name for name, child in pl_module.named_children() if any(True for _ in child.parameters())]
        instead = f"name the part to grow, e.g. Grow(schedule, example, module={(parts or ['model'])[0]!r})"
        if self.module is None:
            if type(pl_module).forward is _LIGHTNING.LightningModule.forward:
                reason = "it has no forward, so the example can't be run through it"
                raise GrowthError("the module to grow is not known", [Problem(kind, reason, instead)])
            return pl_module  # type: ignore[no-any-return]
        try:
            part: nn.Module = pl_module.get_submodule(self.module)
        except AttributeError:
            reason = f"it has no such module; it has {', '.join(parts)}"
            raise GrowthError(f"module={self.module!r}", [Problem(kind, reason, instead)]) from None
        return part


class Packing:
    """A replacement for `on_save_checkpoint` of a LightningModule, which also adds the growth history.

    Lightning calls this method last, after callbacks that replace the state dict. If only weights are saved, it calls no
    callbacks.
    """

    def __init__(self, module: Any) -> None:
        self.module, self.usual = module, module.on_save_checkpoint

    def __call__(self, checkpoint: dict[str, Any]) -> None:
        self.usual(checkpoint)
        for name in ("state_dict", "current_model_state"):  # the second is WeightAveraging's
            if name in checkpoint:
                checkpoint[name].update(growth_entries(self.module))


@usage("outgrow.lightning.load(LitModel(width=8), 'last.ckpt')")
def load(module: Any, path: str | os.PathLike[str], weights_only: bool = True) -> Any:
    """Give a newly built LightningModule the shapes and weights of a checkpoint. Returns the module.

    Use it instead of `LitModel.load_from_checkpoint(path)`, which does not support growths. It also reads weights-only
    checkpoints.

    weights_only: as for `torch.load`; False also reads hyper-parameters of types of your own, from files that you trust.

    Example:
        >>> model = load(LitModel(width=8), "last.ckpt")  # doctest: +SKIP
    """
    if not isinstance(module, nn.Module) or not hasattr(module, "on_load_checkpoint"):
        swapped = isinstance(path, nn.Module)
        instead = "swap module and path" if swapped else "pass an instance" if isinstance(module, type) else "pass one"
        raise CheckpointError(f"the module is not a LightningModule ({_kind(module)}): {instead}, e.g. {LOAD}")
    checkpoint = read_checkpoint(path, weights_only, LOAD)
    hook: Any = module.on_load_checkpoint
    hook(checkpoint)
    with Journal() as journal:
        load_weights(module, dict(checkpoint["state_dict"]), journal)
    return module


def _kind(thing: Any) -> str:
    return f"the class {thing.__name__}" if isinstance(thing, type) else f"of type {type(thing).__name__}"


def _refuse(trainer: Any) -> None:
    """Raise if a strategy or callback of the trainer can't follow growths."""
    problems = []
    kinds, strategy = _LIGHTNING.strategies, trainer.strategy
    if isinstance(strategy, kinds.DDPStrategy) and not isinstance(strategy, (kinds.DeepSpeedStrategy, kinds.XLAStrategy)):
        if isinstance(strategy.launcher, kinds.launchers._MultiProcessingLauncher):
            reason = (
                "its processes end with the run, and it then loads the grown weights into the small model of the main process"
            )
            problems.append(Problem(f"strategy={strategy._start_method!r}", reason, "strategy='ddp', or torchrun"))
    elif not isinstance(strategy, kinds.SingleDeviceStrategy):
        reason = "it shards the model over processes, and would not see new parameters"
        instead = "strategy='ddp', or a plain loop with outgrow.Run and outgrow.shard"
        problems.append(Problem(type(strategy).__name__, reason, instead))
    for callback in trainer.callbacks:
        if isinstance(callback, _LIGHTNING.callbacks.StochasticWeightAveraging):
            reason = "it replaces the run's scheduler by its own, and its average can't be restored in other shapes"
            problems.append(Problem(type(callback).__name__, reason, "use EMAWeightAveraging or WeightAveraging"))
    if problems:
        raise GrowthError("this trainer can't grow its model", problems)


def _placed(schedule: Schedule, trainer: Any) -> Schedule:
    """The schedule for a run of the trainer's length, if an event is at a share of it."""
    if not schedule.has_shares:
        return schedule
    length = trainer.estimated_stepping_batches  # may build the loaders, and is infinite without a limit
    steps = int(length) if isfinite(length) else None
    return placed_schedule(schedule, steps, None, "write lightning.Trainer(max_steps=…) or Trainer(max_epochs=…)")


def _group(trainer: Any) -> Any:
    """The process group of a trainer; None if there is one process only."""
    return torch.distributed.group.WORLD if trainer.world_size > 1 else None


def _unfinished_metrics(trainer: Any) -> list[str]:
    """Metrics that training reduces at the end of this epoch: until then, their values are those of the last epoch."""
    kinds = [metric.meta for metric in trainer.fit_loop.epoch_loop._results.values() if metric.meta.on_epoch]
    return sorted({name for kind in kinds for name in (kind.name, kind.forked_name(on_step=False))})


def _averages(trainer: Any) -> list[Any]:
    """Averaged copies of the LightningModule that callbacks keep."""
    kept = (getattr(callback, "_average_model", None) for callback in trainer.callbacks)
    return [average.module for average in kept if isinstance(average, torch.optim.swa_utils.AveragedModel)]


def _regroup(optimizers: Sequence[Any], module: nn.Module, wanted: Sequence[Any]) -> None:
    if len(optimizers) != len(wanted):
        raise CheckpointError(
            f"there are {len(optimizers)} optimizers, and {len(wanted)} in the checkpoint: return as many of them"
        )
    with Journal() as journal:
        for optimizer, names in zip(optimizers, wanted, strict=True):
            regroup(optimizer, module, names, journal)


def _trains(optimizer: Any, part: nn.Module) -> bool:
    own = {id(parameter) for parameter in bare(part).parameters()}
    return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
