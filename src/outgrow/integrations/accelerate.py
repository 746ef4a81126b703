"""Growth in training loops with Accelerate: `save_state` and `load_state` include it.

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    run = outgrow.Run(model, example, optimizer, schedule, scheduler)
    outgrow.accelerate.attach(run, accelerator)
    …
    accelerator.save_state("checkpoints/7")     # weights, optimizer, scheduler and random states are written by Accelerate
    accelerator.load_state("checkpoints/7")     # into the small model: it is grown first, then loaded

A file of outgrow, `outgrow.pt`, is written to the same folder after Accelerate's own files (see
`integrations/growth_file.py`). Call `run.step()` only after an optimizer step:
`if accelerator.sync_gradients: run.step(loss)`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

from outgrow.distributed.ddp import check_renewable, renew_around, wrappers_around
from outgrow.errors import GrowthError, MissingError
from outgrow.integrations.growth_file import NAME, fit_to_checkpoint, read_growth_file, write_growth_file
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
    """Let an accelerator's `save_state` and `load_state` include the growths and the position of a run.

    Args:
        run: made with the prepared model and optimizer.
        accelerator: the one that has prepared them.

    `load_state` works for a run with a newly built small model, or for the saved run itself if it has not grown since; the run
    then continues bit for bit. If an accelerator has several models, each gets its own file. With DistributedDataParallel, call
    `save_state` and `load_state` on all ranks, as usual.

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
    if any(isinstance(one, _GrowthState) and one.run is run for one in accelerator._custom_objects):
        raise GrowthError("this run is already attached to the accelerator: call outgrow.accelerate.attach once")
    growth_state = _GrowthState(run, accelerator)
    accelerator.register_save_state_pre_hook(growth_state.begin)
    accelerator.register_load_state_pre_hook(growth_state.load)
    accelerator.register_for_checkpointing(growth_state)


class _GrowthState:
    """An object registered for checkpointing, which writes outgrow's file.

    Accelerate has no hook after its last file, but it calls `state_dict` of registered objects after everything else.
    """

    def __init__(self, run: Run, accelerator: accelerate.Accelerator) -> None:
        self.run, self.accelerator = run, accelerator
        self.path: tuple[str, str] | None = None

    def begin(self, models: Sequence[Any], weights: Any, output_dir: str) -> None:
        """Delete outgrow's file in a folder that is written again: without it, the folder counts as incomplete."""
        self.path = output_dir, _place(self.run, models)
        if self.accelerator.is_main_process:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(*self.path))

    def state_dict(self) -> dict[str, Any]:
        self.accelerator.wait_for_everyone()  # each rank writes its own random state
        if self.path is not None and self.accelerator.is_main_process:
            write_growth_file(self.path[0], self.run, self.path[1], last=True)
        self.path = None
        return {}

    def load(self, models: Sequence[Any], input_dir: str) -> None:
        """Grow the model, and give its optimizers their parameters, before anything is loaded."""
        run, journal = self.run, Journal()
        saved, before = read_growth_file(input_dir, _place(run, models)), run.position()
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
        """Do nothing: `load` has done everything before."""


def _place(run: Run, models: Sequence[Any]) -> str:
    """The name of a run's file; like Accelerate's files of models, it has a number from the second model on."""
    model = bare(run.model)
    for number, one in enumerate(models):
        if bare(one) is model:
            stem, ending = os.path.splitext(NAME)
            return f"{stem}_{number}{ending}" if number else NAME
    raise GrowthError("the accelerator does not hold the run's model: call accelerator.prepare(model, optimizer) first")
