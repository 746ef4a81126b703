"""Grow in the middle of a Lightning run: a callback.

    trainer = lightning.Trainer(callbacks=[outgrow.lightning.Grow(schedule, example)])
    trainer.fit(LitModel(), loader)
    trainer.fit(LitModel(), loader, ckpt_path="last.ckpt")   # goes on where that was, from the small constructor

`At(step=…)` is Lightning's `global_step` (optimizer steps), `At(epoch=…)` counts finished epochs, and rules see
`trainer.callback_metrics` at the end of each training epoch, after its validation: what was logged under that name last.
Let rules look at what validation measures: of what `training_step` logs, Lightning forgets the part of an epoch before a
checkpoint, so that a run that is resumed within the epoch sees the mean of the rest, and may grow at another time. If nothing
is left of a metric, a rule that looks at it warns, and leaves that epoch out.

What a resumed run needs travels in Lightning's own checkpoints: the history of growths in the state dict (`outgrow.history`),
and the rest under the key `outgrow`. The order in which Lightning restores makes that work: the model first, then optimizers
are made, so they are made from the grown model; here their groups are put in the order of the saved ones; then their state is
restored. Weights-only checkpoints hold the history too; `load` reads any of them without a trainer.

Resumed runs are bitwise equal to uninterrupted ones, within epochs too, if their loaders can be made again: shuffled by the
process's random state, by a seeded generator, or by the number of the epoch. Batches that were seen already are loaded once
more and passed over. A loader with a `state_dict` of its own (torchdata's StatefulDataLoader) is left to Lightning. A
checkpoint from behind an epoch's last batch, before its validation, will do: that is made up for, which Lightning (2.6) leaves
out (`missed_validation.py`). One thing differs by Lightning's own doing, with or without growth: with `max_steps`, no
validation and a checkpoint from the end of an epoch, it trains that epoch by one batch more.

With `strategy="ddp"` each rank's random states are in the checkpoint: bitwise equal are runs that go on in as many processes.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from outgrow.distributed.agreement import of_all
from outgrow.errors import CheckpointError, GrowthError, MissingError, Problem
from outgrow.integrations.lightning.batches_seen import Feed
from outgrow.integrations.lightning.checkpoint_file import read_checkpoint
from outgrow.integrations.lightning.missed_validation import after, is_missed, validate
from outgrow.model.compiled import without_compiled_steps
from outgrow.model.example import Example
from outgrow.model.journal import Journal
from outgrow.model.unwrap import bare
from outgrow.modules.fade_warnings import warn_at_the_end
from outgrow.modules.gates import gates_of
from outgrow.runs.input_checks import check_check
from outgrow.runs.run import Run, schedule_of
from outgrow.runs.schedule import At, Schedule, When
from outgrow.saving.checksums import check_seal, sealed
from outgrow.saving.growths_in_state_dict import expect, luggage
from outgrow.saving.param_groups import names_in, regroup
from outgrow.saving.run_state import load_weights
from outgrow.wrong_arguments import usage

KEY = "outgrow"  # of a checkpoint
NEEDED = {"position", "groups", "metrics", "feeds"}  # in there
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
    """A callback that grows the model by a schedule, and resumes from checkpoints that were written on the way.

    Args:
        schedule: an `outgrow.Schedule`, a list of events, or a file that holds one.
        example: what the module can be run on: a tensor, a tuple of arguments or a dict of keyword arguments.
        module: the part to grow, e.g. "model"; names in the schedule are those of this part. Without, it is the
            LightningModule itself, which then needs a `forward` that takes the example.
        seed: for the free values of growths.
        check: compare old and new outputs at each growth: True (brief where it was rehearsed), "full" or False, as for
            `outgrow.Run`.
        quiet: print nothing. The trainer's loggers are told of each growth in any case.

    `grow.run` is the `outgrow.Run` once training has started. An EMA or other `WeightAveraging` callback of the trainer
    follows the growths; Lightning's StochasticWeightAveraging is refused. Of the strategies for several processes, `"ddp"` will
    do, by a script or under torchrun: all ranks grow alike, and rules see the metrics of rank 0.
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
        self._feed = Feed()
        self._position: Mapping[str, Any] | None = None  # of the run that this one goes on with
        self._saved: Mapping[str, Any] | None = None  # from the checkpoint that is resumed
        self._measured: dict[str, float] = {}  # metrics of the run that is resumed: Lightning forgets them
        self._within = False  # this epoch was begun by the run that is resumed
        self._hooks: list[Any] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Before anything is restored: let the model take the shapes of a checkpoint, and write them into checkpoints."""
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
                "open": _open(trainer) if self._feed.seen else [],
                "feeds": of_all(_group(trainer), self._feed.state(trainer)),  # each rank has its own
            }
            checkpoint[KEY] = sealed(saved)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get(KEY)
        if saved is not None and not (isinstance(saved, Mapping) and set(saved) >= NEEDED):
            raise CheckpointError(f"the checkpoint is damaged: {KEY!r} does not say where the run was: use an earlier one")
        if saved is not None:
            check_seal(saved, f"{KEY!r} in the checkpoint")
        self._saved = saved

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """The optimizers are made, their state is not yet restored: check everything, by a dry run of what is to come."""
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
                self.schedule,
                [scheduler for scheduler in schedulers if any(scheduler.optimizer is one for one in optimizers)],
                [average.get_submodule(place) for average in _averages(trainer)],
                seed=self.seed,
                check=self.check,
                log=[*trainer.loggers, *([] if bar is None else [lambda record: bar.print(str(record))])],
                quiet=quiet or bar is not None,
                position=self._position,
            )
        self._feed = Feed(first=trainer.current_epoch == 0)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """All is restored. Lightning counts steps and epochs; what it has counted and the run has not is an epoch's end."""
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
            self._feed.go_to(feed, trainer, ended=False)
        elif is_missed(trainer):
            # the module is told last: progress bars are there by then
            after(pl_module, "on_train_start", lambda: self._end_epoch(trainer, feed, validated=False))
        else:
            self._end_epoch(trainer, feed, validated=True)

    def _end_epoch(self, trainer: Any, feed: Mapping[str, Any], validated: bool) -> None:
        """What an epoch that had all its batches in the saved run still lacks, and Lightning takes as done."""
        if not validated:
            self._feed.stand_at(feed, trainer)
            validate(trainer)
            feed = self._feed.state(trainer)
        with without_compiled_steps(trainer.lightning_module):
            self._running().epoch(self._metrics(trainer), resumed=True)
        self._feed.go_to(feed, trainer, ended=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._running().tell()  # of a growth that no loss came after
        warn_at_the_end(gates_of(pl_module).values())

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._feed.epoch_starts(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        run, loss = self._running(), outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self._feed.seen = batch_idx + 1
        while run.steps < trainer.global_step:  # not in batches that only gather gradients
            with without_compiled_steps(pl_module):
                run.step(loss if isinstance(loss, Tensor) else None)
            loss = None

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        run = self._running()
        if run.epochs <= trainer.current_epoch:  # a resumed run may go through the end of an epoch once more
            with without_compiled_steps(pl_module):
                run.epoch(self._metrics(trainer), resumed=self._within)
        self._within = False
        self._feed.epoch_ends()

    def _running(self) -> Run:
        assert self.run is not None, "on_fit_start comes first"
        return self.run

    def _earlier(self, part: nn.Module) -> dict[str, Any] | None:
        """Where the last `fit` has left the same model."""
        return None if self.run is None or self.run.model is not part else self.run.position()

    def _metrics(self, trainer: Any) -> dict[str, float]:
        return {**self._measured, **{name: float(value) for name, value in trainer.callback_metrics.items()}}

    def _on_device(self, trainer: Any, pl_module: Any) -> Any:
        return tree_map_only(Tensor, lambda x: x.to(pl_module.device), trainer.precision_plugin.convert_input(self.example))

    def _part(self, pl_module: Any) -> nn.Module:
        """What is grown."""
        kind = type(pl_module).__name__
        parts = [name for name, child in pl_module.named_children() if any(True for _ in child.parameters())]
        instead = f"name the part to grow, e.g. Grow(schedule, example, module={(parts or ['model'])[0]!r})"
        if self.module is None:
            if type(pl_module).forward is _LIGHTNING.LightningModule.forward:
                reason = "it has no forward, so the example can't be run through it"
                raise GrowthError("what is to grow?", [Problem(kind, reason, instead)])
            return pl_module  # type: ignore[no-any-return]
        try:
            part: nn.Module = pl_module.get_submodule(self.module)
        except AttributeError:
            reason = f"it has no such module; it has {', '.join(parts)}"
            raise GrowthError(f"module={self.module!r}", [Problem(kind, reason, instead)]) from None
        return part


class Packing:
    """`on_save_checkpoint` of a LightningModule, which packs the growth history too.

    Of all that may add to a checkpoint this one comes last, behind callbacks that exchange its state dict for another. Where
    only weights are saved, no callback is asked.
    """

    def __init__(self, module: Any) -> None:
        self.module, self.usual = module, module.on_save_checkpoint

    def __call__(self, checkpoint: dict[str, Any]) -> None:
        self.usual(checkpoint)
        for name in ("state_dict", "current_model_state"):  # the second is WeightAveraging's
            if name in checkpoint:
                checkpoint[name].update(luggage(self.module))


@usage("outgrow.lightning.load(LitModel(width=8), 'last.ckpt')")
def load(module: Any, path: str | os.PathLike[str], weights_only: bool = True) -> Any:
    """Give a LightningModule, as it was first built, the shapes and weights of a checkpoint. Returns the module.

    This takes the place of `LitModel.load_from_checkpoint(path)`, which knows of no growth. Weights-only checkpoints will do.

    weights_only: as for `torch.load`; False also reads hyper-parameters of types of your own, from files that you trust.

    Example:
        >>> model = load(LitModel(width=8), "last.ckpt")  # doctest: +SKIP
    """
    if not isinstance(module, nn.Module) or not hasattr(module, "on_load_checkpoint"):
        swapped = isinstance(path, nn.Module)
        found = "the path comes second" if swapped else "it is made first" if isinstance(module, type) else "pass one"
        raise CheckpointError(f"the module is no LightningModule ({_kind(module)}): {found}, e.g. {LOAD}")
    checkpoint = read_checkpoint(path, weights_only, LOAD)
    told: Any = module.on_load_checkpoint
    told(checkpoint)
    with Journal() as journal:
        load_weights(module, dict(checkpoint["state_dict"]), journal)
    return module


def _kind(thing: Any) -> str:
    return f"the class {thing.__name__}" if isinstance(thing, type) else f"of type {type(thing).__name__}"


def _refuse(trainer: Any) -> None:
    """What can't follow a growth."""
    problems = []
    kinds, strategy = _LIGHTNING.strategies, trainer.strategy
    if isinstance(strategy, kinds.DDPStrategy) and not isinstance(strategy, (kinds.DeepSpeedStrategy, kinds.XLAStrategy)):
        if isinstance(strategy.launcher, kinds.launchers._MultiProcessingLauncher):
            reason = "the processes it starts end with the run, and it loads the grown weights into the small model left behind"
            problems.append(Problem(f"strategy={strategy._start_method!r}", reason, "strategy='ddp', or torchrun"))
    elif not isinstance(strategy, kinds.SingleDeviceStrategy):
        reason = "it shares the model out among processes, and would not see new parameters"
        instead = "strategy='ddp', or a plain loop with outgrow.Run and outgrow.shard"
        problems.append(Problem(type(strategy).__name__, reason, instead))
    for callback in trainer.callbacks:
        if isinstance(callback, _LIGHTNING.callbacks.StochasticWeightAveraging):
            reason = "it puts a scheduler of its own in place of the run's, and its average can't be restored in other shapes"
            problems.append(Problem(type(callback).__name__, reason, "use EMAWeightAveraging or WeightAveraging"))
    if problems:
        raise GrowthError("this trainer can't grow its model", problems)


def _group(trainer: Any) -> Any:
    """The processes of a trainer; None if there is but one."""
    return torch.distributed.group.WORLD if trainer.world_size > 1 else None


def _open(trainer: Any) -> list[str]:
    """Metrics that training sums up at the end of this epoch: until then, their values are those of the last one."""
    kinds = [metric.meta for metric in trainer.fit_loop.epoch_loop._results.values() if metric.meta.on_epoch]
    return sorted({name for kind in kinds for name in (kind.name, kind.forked_name(on_step=False))})


def _averages(trainer: Any) -> list[Any]:
    """Averaged copies of the LightningModule that callbacks keep."""
    kept = (getattr(callback, "_average_model", None) for callback in trainer.callbacks)
    return [average.module for average in kept if isinstance(average, torch.optim.swa_utils.AveragedModel)]


def _regroup(optimizers: Sequence[Any], module: nn.Module, wanted: Sequence[Any]) -> None:
    if len(optimizers) != len(wanted):
        raise CheckpointError(
            f"there are {len(optimizers)} optimizers, and {len(wanted)} in the checkpoint: make them as before"
        )
    with Journal() as journal:
        for optimizer, names in zip(optimizers, wanted, strict=True):
            regroup(optimizer, module, names, journal)


def _trains(optimizer: Any, part: nn.Module) -> bool:
    own = {id(parameter) for parameter in bare(part).parameters()}
    return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
