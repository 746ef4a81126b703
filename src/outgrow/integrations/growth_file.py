"""What a checkpoint folder of another library needs to know of growth: one small file beside that library's own.

Trainers write weights, optimizer, scheduler and random states each in their own way, and those files stay theirs. Ours has the
growth history and the fades under way, the names of what the optimizers' groups hold, and where the run is. It is read first,
and gives a freshly built small model, and its optimizers, the shapes that the library then loads its own files into. Written
last, it also says how large the other files were, so that a folder which was left half written is told from a whole one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outgrow.errors import CheckpointError, Problem
from outgrow.model.journal import Journal
from outgrow.model.unwrap import bare
from outgrow.optimizers.wrappers import unwrapped as bare_optimizers
from outgrow.saving.atomic_write import Path, write_whole
from outgrow.saving.checksums import check_seal, sealed
from outgrow.saving.growth_record import VERSION, check_version
from outgrow.saving.growths_in_state_dict import luggage, unpack
from outgrow.saving.param_groups import names_in, regroup
from outgrow.saving.replay_growths import FRESH, refuse
from outgrow.saving.torch_files import load_safely, save_safely, without_numpy

if TYPE_CHECKING:
    from outgrow.runs.run import Run

NAME = "outgrow.pt"
AFTER = ("outgrow", ".outgrow", "custom_checkpoint_")  # how files begin that are ours, or that Accelerate may write after ours


def write_beside(folder: Path, run: Run, name: str = NAME, last: bool = False) -> None:
    """Write what the folder needs besides the library's own files; `last`: these are all there by now."""
    model = bare(run.model)
    state = {
        "version": VERSION,
        "luggage": {key: value.detach().cpu() for key, value in luggage(model).items()},
        "shapes": _shapes(model),
        "groups": [names_in(optimizer, model) for optimizer in bare_optimizers(run.optimizers)],
        "run": run.position(),
        "files": _sizes(folder) if last else {},
    }
    write_whole(os.path.join(os.path.realpath(folder), name), lambda draft: save_safely(sealed(without_numpy(state)), draft))


def read_beside(folder: Path, name: str = NAME) -> dict[str, Any]:
    """What `write_beside` wrote; CheckpointError if it is not there, or the folder is not as it was then."""
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
        raise CheckpointError(
            f"{folder} has no {name}: its writing was interrupted, or the run that wrote it did not grow by outgrow",
            _earlier(folder, name),
        )
    try:
        state: dict[str, Any] = load_safely(path)
        version = state.get("version")
    except Exception as error:
        reason = f"{path} is damaged, or no file of outgrow's ({type(error).__name__}: {error})"
        raise CheckpointError(reason, _earlier(folder, name)) from error
    try:
        check_version(version, path)
        check_seal(state, path)
    except CheckpointError as error:
        raise CheckpointError(str(error), _earlier(folder, name)) from error
    found = _sizes(folder)
    for other, size in state["files"].items():
        if found.get(other) != size:
            now = f"{found[other]:,} bytes" if other in found else "missing"
            reason = f"{folder} is not whole: {other} is {now}, and was {size:,} bytes when it was saved"
            raise CheckpointError(reason, _earlier(folder, name))
    return state


def fit_to_checkpoint(model: nn.Module, optimizers: Sequence[Any], saved: Mapping[str, Any], journal: Journal) -> None:
    """Give a model, and its optimizers' groups, the shapes of the saved ones; their numbers are loaded afterwards."""
    model = bare(model)
    misfit = f"the checkpoint does not fit this model ({type(model).__qualname__})"
    unpack(model, dict(saved["luggage"]), journal)
    here = _shapes(model)
    problems = [
        Problem(name, f"{_told(here.get(name))} in the model, {_told(saved['shapes'].get(name))} in the checkpoint")
        for name in {**here, **saved["shapes"]}
        if here.get(name) != saved["shapes"].get(name)
    ]
    refuse(misfit, problems, FRESH)
    real = bare_optimizers(optimizers)
    if real and len(real) != len(saved["groups"]):
        raise CheckpointError(
            f"the run has {len(real)} optimizers, and the checkpoint {len(saved['groups'])}: make it as before"
        )
    for optimizer, names in zip(real, saved["groups"], strict=False):
        regroup(optimizer, model, names, journal)


def _shapes(model: nn.Module) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def _told(shape: Sequence[int] | None) -> str:
    return "none" if shape is None else str(tuple(shape))


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file in a folder that is there before ours."""
    with os.scandir(folder) as entries:
        return {one.name: one.stat().st_size for one in entries if one.is_file() and not one.name.startswith(AFTER)}


def _earlier(folder: Path, name: str) -> list[Problem]:
    """The checkpoint to go on from: the last one before this whose file is there."""
    folder = os.path.realpath(folder)
    parent, own = os.path.split(folder)
    stem, _, number = own.replace("_", "-").rpartition("-")
    numbers: dict[int, str] = {}
    for one in os.listdir(parent) if os.path.isdir(parent) else ():
        front, _, back = one.replace("_", "-").rpartition("-")
        if front == stem and back.isdecimal() and number.isdecimal() and int(back) < int(number):
            numbers[int(back)] = os.path.join(parent, one)
    whole = [numbers[key] for key in sorted(numbers) if os.path.isfile(os.path.join(numbers[key], name))]
    return [Problem(own, "can't be resumed from", f"go on from {whole[-1]}")] if whole else []
