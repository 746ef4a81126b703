"""Growth in the Transformers Trainer: a callback.

    trainer = transformers.Trainer(model=…, args=…, callbacks=[outgrow.transformers.Grow(schedule, example)])
    trainer.train()                                # or
    trainer.train(resume_from_checkpoint=True)     # with the small model again; continues bit for bit

The order of events in the Trainer:

    optimizer, scheduler → on_step_end → log, evaluate, save          each optimizer step
    on_epoch_end → log, evaluate → on_evaluate → save                 each epoch

A growth at a step happens in on_step_end; a growth at an epoch in on_epoch_end or, if an evaluation follows, in on_evaluate,
since triggers read its metrics. So it always comes before the save, and a checkpoint holds the grown model. The Trainer's files
stay unchanged; `outgrow.pt` is written after them (see `integrations/growth_file.py`), and read before the weights. No callback
is called at these two points: so the class wraps `_load_from_checkpoint` and the function that writes trainer_state.json.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from outgrow.distributed.fsdp import is_sharded
from outgrow.engine.grow import grow
from outgrow.errors import CheckpointError, GrowthError, MissingError, ScheduleError
from outgrow.integrations.growth_file import fit_to_checkpoint, read_growth_file, write_growth_file
from outgrow.model.example import Example
from outgrow.model.journal import Journal
from outgrow.model.unwrap import as_list, bare
from outgrow.modules.fade_warnings import warn_at_the_end
from outgrow.modules.gates import gates_of
from outgrow.optimizers.wrappers import unwrapped as bare_optimizers
from outgrow.runs.growth_log import Record, check_sinks
from outgrow.runs.input_checks import check_check
from outgrow.runs.run import Run
from outgrow.runs.schedule import At, Schedule, When, schedule_of
from outgrow.saving.atomic_write import Path
from outgrow.saving.param_groups import names_in
from outgrow.transforms.all_transforms import Transform, check_transforms
from outgrow.wrong_arguments import usage

try:
    import transformers
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ImportError as error:
    raise MissingError(
        f"outgrow.transformers needs the Transformers library: pip install outgrow[transformers] ({error})"
    ) from error


@usage("outgrow.transformers.Grow(schedule, example)")
class Grow(transformers.TrainerCallback):
    """A callback that grows the model of a `transformers.Trainer` by a schedule.

    Args:
        schedule: an `outgrow.Schedule`, a list of events, or the path of a schedule file. Steps refer to `global_step`, shares
            of the run to `max_steps`, which the Trainer computes from its epochs if it is not given. Rules read the metrics of
            an epoch's evaluation, e.g. `outgrow.plateau("eval_loss")`.
        example: an input of the model: a dict of keyword arguments (a batch), or a tensor.
        seed: for the random values of growths.
        check: compare outputs before and after each growth: True (brief if it was planned in the dry run), "full" or False, as
            for `outgrow.Run`.
        log: further logs for growths, as for `outgrow.Run`, besides the Trainer's own.
        first: transforms of a growth before the first step; the schedule may then be empty.
        freeze: "old" trains only what the newest growth has added, as in LLaMA Pro, until the end of the training. Everything
            older gets no gradients, no updates and no weight decay.

    `grow.run` is the `outgrow.Run`, once training has begun. With `load_best_model_at_end` the search for the best model starts
    again after each growth, since a grown model can't load a smaller one.

    Example:
        >>> import outgrow
        >>> callback = Grow([outgrow.At(epoch=2, grow=[outgrow.Widen("*.mlp.*", factor=1.5)])], {"input_ids": [[1, 2]]})
        >>> print(callback.schedule)
        epoch 2: Widen '*.mlp.*' × 1.5
    """

    def __init__(
        self,
        schedule: Schedule | Sequence[At | When] | Path,
        example: Example,
        *,
        seed: int = 0,
        check: bool | str = True,
        log: Any = None,
        first: Sequence[Transform] = (),
        freeze: str | None = None,
    ) -> None:
        check_check(check)
        self.first, self.freeze = tuple(first), freeze
        if self.first:
            check_transforms(self.first)
        self.schedule = schedule_of(schedule)
        self.example, self.seed, self.check, self.log = example, seed, check, as_list(log)
        check_sinks(self.log)
        self.run: Run | None = None
        self._trainer: Any = None
        self._saved: dict[str, Any] | None = None  # from the checkpoint that is resumed
        self._measured: dict[str, float] = {}
        self._waits, self._evaluations = False, 0  # whether the evaluation of an ended epoch is still to come
        self._losses: Tensor | None = None  # the Trainer's sum of losses at the begin of this step
        self._grown = False  # the growth before the first step has happened

    def on_init_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Wrap the loading of checkpoints: no callback is called before it, and none gets the path."""
        trainer = self._trainer = _caller()
        load = trainer._load_from_checkpoint

        def after_ours(resume_from_checkpoint: str, model: Any = None, *rest: Any) -> Any:
            self._restore(resume_from_checkpoint, trainer.model if model is None else model)
            return load(resume_from_checkpoint, model, *rest)

        trainer._load_from_checkpoint = after_ours

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **parts: Any,
    ) -> None:
        """Make the run, which checks everything, and move it to the position of the checkpoint."""
        missed, self._trainer = self._trainer is None, _caller()
        _check_trainer(self._trainer, model)
        saved, self._saved = self._saved, None
        if state.global_step and saved is None:
            how = "Trainer(callbacks=[…])" if missed else "trainer.train(resume_from_checkpoint=…)"
            raise CheckpointError(
                f"training is resumed at step {state.global_step:,}, but its growth history was not read: use {how}"
            )
        if self.first and saved is None and not self._grown:
            self._grow_first(model, optimizer)
        run = Run(
            model,
            self.example,
            optimizer,
            self.schedule,
            lr_scheduler,
            seed=self.seed,
            check=self.check,
            log=[*self.log, self._log_in_trainer],
            quiet=True,
            position=None if saved is None else saved["run"],
            freeze=self.freeze,
            steps=state.max_steps if state.max_steps > 1 else None,
        )
        if saved is not None:
            groups = [names_in(one, model) for one in bare_optimizers([optimizer])]
            if groups != saved["groups"]:
                raise CheckpointError(
                    "the optimizer's groups do not hold the parameters of the saved groups: make it in the same way"
                )
            run.go_to(saved["run"])
        _check_triggers(run, args)
        self.run = run
        state.save_to_json = partial(_write_with_ours, state.save_to_json, run)
        _wait_for_ranks(self._trainer)
        self._waits, self._measured, self._evaluations = False, {}, 0

    def _grow_first(self, model: Any, optimizer: Any) -> None:
        """Grow before the first step."""
        growth = grow(model, self.example, *self.first, optimizer=optimizer.optimizer, seed=self.seed, check=bool(self.check))
        self._grown = True
        self._trainer.log(Record.of(growth, self.first, 1, step=0, epoch=0, loss_before=None).as_metrics())

    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        losses = getattr(self._trainer, "_tr_loss", None)
        self._losses = losses.clone() if isinstance(losses, Tensor) else None

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        loss = None if self._losses is None else self._trainer._tr_loss - self._losses
        self._note(self._running.step(loss), args, state)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Make up for the end of the last epoch, if the checkpoint was written at its last step: the Trainer skips that end."""
        if not self._epoch_due(state):
            return
        if any(isinstance(event, When) for event in self._running.ahead):
            self._waits = True
            self._trainer.evaluate()
        else:
            self._epoch(args, state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if self._epoch_due(state):
            self._waits = control.should_evaluate
            if not self._waits:
                self._epoch(args, state)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **parts: Any) -> None:
        if not self._waits:
            return
        self._measured.update({name: value for name, value in (metrics or {}).items() if isinstance(value, (int, float))})
        self._evaluations += 1
        data = self._trainer.eval_dataset
        if self._evaluations >= (len(data) if isinstance(data, dict) else 1):  # one call per dataset
            self._epoch(args, state)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **parts: Any) -> None:
        self._running.tell()  # a growth after which no loss was logged
        self._running.unfreeze()
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._restore(state.best_model_checkpoint, model)  # its weights are loaded already; this restores fades
            self._saved = None
        warn_at_the_end(gates_of(bare(model)).values())

    @property
    def _running(self) -> Run:
        if self.run is None:
            raise GrowthError("training has not begun: add outgrow.transformers.Grow before trainer.train()")
        return self.run

    def _restore(self, folder: str, model: Any) -> None:
        """Give the small model, and the optimizer if one was passed, the shapes of a checkpoint, which is loaded next."""
        saved, given = read_growth_file(folder), self._trainer.optimizer
        with Journal() as journal:
            fit_to_checkpoint(model, [] if given is None else [given], saved, journal)
        self._saved = saved

    def _epoch_due(self, state: Any) -> bool:
        return self._running.epochs < int(state.epoch or 0)

    def _epoch(self, args: Any, state: Any) -> None:
        measured, self._measured, self._waits, self._evaluations = self._measured, {}, False, 0
        self._note(self._running.epoch(measured), args, state)

    def _note(self, growth: Any, args: Any, state: Any) -> None:
        if growth is not None and args.load_best_model_at_end:
            state.best_metric = state.best_model_checkpoint = state.best_global_step = None

    def _log_in_trainer(self, record: Any) -> None:
        """Log the values of a growth in the Trainer, and keep its next regular log due."""
        due = self._trainer.control.should_log
        self._trainer.log(record.as_metrics())
        self._trainer.control.should_log = due


def _caller() -> Any:
    """The Trainer that calls the callback, found on the stack, since it does not pass itself."""
    frame = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), transformers.Trainer):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        raise GrowthError("outgrow.transformers.Grow is a callback of transformers.Trainer: pass it as Trainer(callbacks=[…])")
    return frame.f_locals["self"]


def _write_with_ours(write: Callable[[str], None], run: Run, json_path: str) -> None:
    """Write the Trainer's state, its last file of a checkpoint, and then outgrow's; older checkpoints are deleted later."""
    folder = os.path.dirname(json_path)
    if not os.path.basename(folder).startswith(f"{PREFIX_CHECKPOINT_DIR}-"):
        write(json_path)
        return
    run.tell()  # a growth that is not logged yet
    write(json_path)
    write_growth_file(folder, run, last=True)


def _wait_for_ranks(trainer: Any) -> None:
    """Let the main process wait for the random states of all ranks, so that outgrow's file is the last one."""
    write = trainer._save_rng_state
    if trainer.args.world_size == 1 or isinstance(write, partial):
        return

    def write_and_wait(write: Callable[[str], None], output_dir: str) -> None:
        write(output_dir)
        trainer.accelerator.wait_for_everyone()

    trainer._save_rng_state = partial(write_and_wait, write)


def _check_trainer(trainer: Any, model: Any) -> None:
    """Raise if the Trainer has a copy or wrapper of the model that can't follow growths. DistributedDataParallel can."""
    wrapper = trainer.model_wrapped
    plain = bare(wrapper) is bare(model) or isinstance(wrapper, nn.DataParallel)
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or not plain or is_sharded(model):
        raise GrowthError(
            "the Trainer shards its model over several processes, and would not see new parameters: use plain "
            "DistributedDataParallel (torchrun, without fsdp or deepspeed), or write the loop yourself with outgrow.Run and "
            "outgrow.shard"
        )
    if type(model).__module__.partition(".")[0] == "peft":
        raise GrowthError(
            "a Trainer's checkpoint of a PEFT model holds its adapters only, and not the base model that has grown: grow "
            "before the training with outgrow.grow, or merge the adapters first, model.merge_and_unload()"
        )


def _check_triggers(run: Run, args: Any) -> None:
    triggered = [event for event in run.ahead if isinstance(event, When)]
    if triggered and (args.eval_strategy != transformers.trainer_utils.IntervalStrategy.EPOCH or args.eval_delay):
        raise ScheduleError(
            f"the schedule waits for {triggered[0].time!r}, which reads the metrics of each epoch: "
            "write TrainingArguments(eval_strategy='epoch'), without eval_delay"
        )
