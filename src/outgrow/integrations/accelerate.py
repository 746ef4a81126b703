"""Growth in loops that Accelerate prepares: `save_state` and `load_state` carry it.

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    run = outgrow.Run(model, example, optimizer, schedule, scheduler)
    outgrow.accelerate.attach(run, accelerator)
    …
    accelerator.save_state("checkpoints/7")     # weights, optimizer, scheduler and random states are written by Accelerate
    accelerator.load_state("checkpoints/7")     # onto the small model: it is grown first, then loaded

A file of ours, `outgrow.pt`, stands beside Accelerate's own, and is written last (see `growth_file.py`). Call `run.step()`
where gradients were in sync: `if accelerator.sync_gradients: run.step(loss)`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

from outgrow.distributed.ddp import check_renewable, renew_around, wrappers_around
from outgrow.errors import GrowthError, MissingError
from outgrow.integrations.growth_file import NAME, fit_to_checkpoint, read_beside, write_beside
from outgrow.model.journal import Journal
from outgrow.model.unwrap import bare
from outgrow.runs.run import Run
from outgrow.wrong_arguments import usage

try:
    import accelerate  # type: ignore[import-untyped]
except ImportError as error:
    raise MissingError(f"outgrow.accelerate needs the Accelerate library: pip install outgrow[accelerate] ({error})") from error

ATTACH = "outgrow.accelerate.attach(run, accelerator)"


@usage("outgrow.accelerate.attach(run, accelerator)")
def attach(run: Run, accelerator: accelerate.Accelerator) -> None:
    """Let an accelerator's `save_state` and `load_state` carry the growths of a run, and where it is.

    Args:
        run: made with the prepared model and optimizer.
        accelerator: what has prepared them.

    `load_state` takes a run that is made from the small constructor, or that run itself if it has not grown since; it goes on
    bit for bit. Several models of one accelerator each get a file of their own. In several processes of
    DistributedDataParallel, `save_state` and `load_state` are called on all ranks, as ever.

    Example:
        >>> import tempfile, torch, outgrow
        >>> def make():
        ...     accelerator = accelerate.Accelerator(cpu=True)
        ...     model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        ...     model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        ...     schedule = [outgrow.At(step=1, grow=[outgrow.Widen("0", to=12)])]
        ...     run = outgrow.Run(model, torch.zeros(1, 4), optimizer, schedule, quiet=True)
        ...     attach(run, accelerator)
        ...     return accelerator, run
        >>> folder = tempfile.mkdtemp()
        >>> accelerator, run = make()
        >>> growth = run.step()
        >>> path = accelerator.save_state(folder)
        >>> accelerator, run = make()
        >>> accelerator.load_state(folder)
        >>> run.model[0].out_features, run.steps
        (12, 1)
    """
    if not isinstance(run, Run) or not isinstance(accelerator, accelerate.Accelerator):
        given = f"{type(run).__name__} and {type(accelerator).__name__}"
        raise GrowthError(f"attach takes an outgrow.Run and an Accelerator, not {given}: write {ATTACH}")
    _place(run, accelerator._models)
    if any(isinstance(one, _Carrier) and one.run is run for one in accelerator._custom_objects):
        raise GrowthError("this run is attached to the accelerator already: call outgrow.accelerate.attach once")
    carrier = _Carrier(run, accelerator)
    accelerator.register_save_state_pre_hook(carrier.begin)
    accelerator.register_load_state_pre_hook(carrier.load)
    accelerator.register_for_checkpointing(carrier)


class _Carrier:
    """Writes our file last: Accelerate has no hook for that, but asks what is registered for its state after all else."""

    def __init__(self, run: Run, accelerator: accelerate.Accelerator) -> None:
        self.run, self.accelerator = run, accelerator
        self.path: tuple[str, str] | None = None

    def begin(self, models: Sequence[Any], weights: Any, output_dir: str) -> None:
        """A folder that is written over is not whole until our file is there again."""
        self.path = output_dir, _place(self.run, models)
        if self.accelerator.is_main_process:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(*self.path))

    def state_dict(self) -> dict[str, Any]:
        self.accelerator.wait_for_everyone()  # each rank writes its random state by itself
        if self.path is not None and self.accelerator.is_main_process:
            write_beside(self.path[0], self.run, self.path[1], last=True)
        self.path = None
        return {}

    def load(self, models: Sequence[Any], input_dir: str) -> None:
        """Grow the model and regroup its optimizers, before anything is loaded."""
        run, journal = self.run, Journal()
        saved, before = read_beside(input_dir, _place(run, models)), run.position()
        check_renewable(wrappers_around([bare(run.model)], run.model))
        try:
            fit_to_checkpoint(run.model, run.optimizers, saved, journal)
            run.go_to(saved["run"])
        except BaseException:
            journal.undo()
            run.go_to(before)
            raise
        journal.close()
        renew_around([bare(run.model)])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """All is done by `load`, which comes first."""


def _place(run: Run, models: Sequence[Any]) -> str:
    """The name of a run's file: Accelerate numbers its models, from the second on."""
    model = bare(run.model)
    for number, one in enumerate(models):
        if bare(one) is model:
            stem, ending = os.path.splitext(NAME)
            return f"{stem}_{number}{ending}" if number else NAME
    raise GrowthError("the accelerator does not hold the run's model: call accelerator.prepare(model, optimizer) first")
