"""Make the validation that Lightning (2.6) skips when a run is resumed from a checkpoint after an epoch's last batch.

    uninterrupted:   last batch → checkpoint → validation → the epoch's end, where triggers read the metrics
    resumed:                      checkpoint → the next epoch

A checkpoint that is written every n steps may be one of these. When it is loaded, Lightning counts its epoch as done. Here,
Lightning's progress is set back to the last batch, its own validation runs, and the progress is set forward again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


def is_missed(trainer: Any) -> bool:
    """Whether a resumed run has skipped a validation."""
    loop = trainer.fit_loop.epoch_loop
    if not (loop.restarted_on_train_batch_end and loop.batch_progress.is_last_batch):
        return False
    with _at_last_batch(trainer):
        return bool(loop._should_check_val_fx(trainer.fit_loop._data_fetcher))


def validate(trainer: Any) -> None:
    """Make the skipped validation; its results are in `trainer.callback_metrics`."""
    loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
    first = connector._first_loop_iter
    with _at_last_batch(trainer):
        trainer.validating = True
        loop.val_loop.restarting = False
        loop.val_loop.run()
        trainer.training = True
        connector._first_loop_iter = first
    _once(
        loop.val_loop, "increment_progress_to_evaluation_end", lambda usual: None
    )  # the progress is set already; this would make a loader


@contextlib.contextmanager
def _at_last_batch(trainer: Any) -> Iterator[None]:
    """Set Lightning's progress to the moment between the last batch of an epoch and the epoch's end."""
    epoch, batch = trainer.fit_loop.epoch_progress, trainer.fit_loop.epoch_loop.batch_progress
    _move(epoch, -1, "processed", "completed")
    _move(batch, 1, "completed")
    try:
        yield
    finally:
        _move(epoch, 1, "processed", "completed")
        _move(batch, -1, "completed")


def _move(progress: Any, by: int, *names: str) -> None:
    for part in (progress.total, progress.current):
        for name in names:
            setattr(part, name, getattr(part, name) + by)


def after(owner: Any, name: str, then: Callable[[], None]) -> None:
    """Call a function after the next call of a method."""

    def both(usual: Callable[[], None]) -> None:
        usual()
        then()

    _once(owner, name, both)


def _once(owner: Any, name: str, instead: Callable[[Callable[[], None]], None]) -> None:
    """Replace the next call of a method without arguments by `instead(usual)`."""
    usual = getattr(owner, name)

    def call() -> None:
        delattr(owner, name)
        instead(usual)

    setattr(owner, name, call)
