"""The growths of a run in a checkpoint folder of another library: one small file besides the library's own files.

Trainers write weights, optimizer, scheduler and random states in their own formats, and these files stay unchanged. The file of
outgrow holds the growth history, unfinished fades, the names of the optimizers' parameters, and the position of the run. It is
read first, and gives a newly built small model and its optimizers the shapes into which the library then loads its own files.
It is written last, with the sizes of the other files, so that an incompletely written folder is detected.
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
from outgrow.saving.growths_in_state_dict import growth_entries, unpack
from outgrow.saving.param_groups import names_in, regroup
from outgrow.saving.replay_growths import FRESH, refuse
from outgrow.saving.torch_files import load_safely, save_safely, without_numpy
from outgrow.text.plurals import counted

if TYPE_CHECKING:
    from outgrow.runs.run import Run

NAME = "outgrow.pt"
AFTER = ("outgrow", ".outgrow", "custom_checkpoint_")  # prefixes of outgrow's files, and of files that Accelerate writes later


def write_growth_file(folder: Path, run: Run, name: str = NAME, last: bool = False) -> None:
    """Write outgrow's file to a checkpoint folder. last: all files of the library have been written."""
    model = bare(run.model)
    state = {
        "version": VERSION,
        "luggage": {key: value.detach().cpu() for key, value in growth_entries(model).items()},
        "shapes": _shapes(model),
        "groups": [names_in(optimizer, model) for optimizer in bare_optimizers(run.optimizers)],
        "run": run.position(),
        "files": _sizes(folder) if last else {},
    }
    write_whole(os.path.join(os.path.realpath(folder), name), lambda draft: save_safely(sealed(without_numpy(state)), draft))


def read_growth_file(folder: Path, name: str = NAME) -> dict[str, Any]:
    """Read outgrow's file; CheckpointError if it is missing, or if the folder has changed since it was written."""
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
        raise CheckpointError(
            f"{folder} has no {name}: its writing was interrupted, or the run that wrote it did not use outgrow",
            _earlier(folder, name),
        )
    try:
        state: dict[str, Any] = load_safely(path)
        version = state.get("version")
    except Exception as error:
        reason = f"{path} is damaged, or was not written by outgrow ({type(error).__name__}: {error})"
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
            reason = f"{folder} is incomplete: {other} is {now}, and was {size:,} bytes when it was saved"
            raise CheckpointError(reason, _earlier(folder, name))
    return state


def fit_to_checkpoint(model: nn.Module, optimizers: Sequence[Any], saved: Mapping[str, Any], journal: Journal) -> None:
    """Give a model, and its optimizers' groups, the shapes of the saved ones; the library loads the values afterwards."""
    model = bare(model)
    misfit = f"the checkpoint does not fit this model ({type(model).__qualname__})"
    unpack(model, dict(saved["luggage"]), journal)
    here = _shapes(model)
    problems = [
        Problem(name, f"{_in_words(here.get(name))} in the model, {_in_words(saved['shapes'].get(name))} in the checkpoint")
        for name in {**here, **saved["shapes"]}
        if here.get(name) != saved["shapes"].get(name)
    ]
    refuse(misfit, problems, FRESH)
    real = bare_optimizers(optimizers)
    if real and len(real) != len(saved["groups"]):
        raise CheckpointError(
            f"the run has {counted(len(real), 'optimizer')}, and the checkpoint {len(saved['groups'])}: make the run with as "
            "many"
        )
    for optimizer, names in zip(real, saved["groups"], strict=False):
        regroup(optimizer, model, names, journal)


def _shapes(model: nn.Module) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def _in_words(shape: Sequence[int] | None) -> str:
    return "none" if shape is None else str(tuple(shape))


def _sizes(folder: Path) -> dict[str, int]:
    """Sizes in bytes of the files in a folder that are written before outgrow's."""
    with os.scandir(folder) as entries:
        return {one.name: one.stat().st_size for one in entries if one.is_file() and not one.name.startswith(AFTER)}


def _earlier(folder: Path, name: str) -> list[Problem]:
    """The way out: the last earlier checkpoint that has outgrow's file."""
    folder = os.path.realpath(folder)
    parent, own = os.path.split(folder)
    stem, _, number = own.replace("_", "-").rpartition("-")
    numbers: dict[int, str] = {}
    for one in os.listdir(parent) if os.path.isdir(parent) else ():
        front, _, back = one.replace("_", "-").rpartition("-")
        if front == stem and back.isdecimal() and number.isdecimal() and int(back) < int(number):
            numbers[int(back)] = os.path.join(parent, one)
    whole = [numbers[key] for key in sorted(numbers) if os.path.isfile(os.path.join(numbers[key], name))]
    return [Problem(own, "can't be resumed from", f"resume from {whole[-1]}")] if whole else []
