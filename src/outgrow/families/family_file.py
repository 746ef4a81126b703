"""Save and load a family: the file of a run (see `saving/run_state.py`), with the sizes of its members.

The values of parameters are stored once, in the largest member. For each smaller member the file holds the number of growths
that it has been through, its shapes, and its own buffers. Loading replays the growths size by size on the newly built model,
and makes a member before each of them. `torch.load(weights_only=True)` reads the file: nothing in it can run code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outgrow.errors import CheckpointError
from outgrow.families.member import Member
from outgrow.families.shared_entries import kept_entries
from outgrow.history.growth_order import Histories, histories_of
from outgrow.history.growths_on_model import history
from outgrow.model.journal import Journal
from outgrow.saving.atomic_write import Path, check_path, place_for, write_whole
from outgrow.saving.checksums import sealed
from outgrow.saving.growth_record import UNREADABLE, unreadable
from outgrow.saving.growths_in_state_dict import record_in
from outgrow.saving.model_contents import contents_of
from outgrow.saving.replay_growths import replay
from outgrow.saving.reshape_for_checkpoint import reshaping
from outgrow.saving.run_file import read_run, refuse_not_finite
from outgrow.saving.run_state import Parts, pack, restore
from outgrow.saving.torch_files import save_safely, without_numpy

DIVERGED = "go back to a file from before training diverged; family.save(path, finite=False) writes the family as it is"
SAVE, LOAD = "family.save('family.pt')", "outgrow.Family.load(model, 'family.pt')"


def write_family(path: Path, saved: Parts, members: Sequence[Member], flops: Sequence[int], extra: Any, finite: bool) -> None:
    """Write a family to a file, completely or not at all."""
    check_path(path, SAVE)
    if os.fspath(path).endswith(".safetensors"):
        raise CheckpointError(f"{path}: a family is written with torch.save, and not as safetensors: name it family.pt")
    target = place_for(path, SAVE)
    if finite:
        refuse_not_finite([saved.model, *(member.module for member in members)], path, DIVERGED)
    sizes = [_size_of(member.module) for member in members]
    try:
        state = without_numpy({"outgrow": {}, "family": {"sizes": sizes, "flops": list(flops)}, **pack(saved), "extra": extra})
    except RecursionError:
        raise CheckpointError(f"{path} was not written: a list or dict in extra= contains itself") from None
    write_whole(target, lambda draft: save_safely(sealed(state), draft))


def _size_of(module: nn.Module) -> dict[str, Any]:
    """The growths of a member so far, by the path of the grown module, its shapes, and its own buffers."""
    histories = histories_of(module)
    contents = contents_of(module, histories)
    return {
        "plans": {place: len(plans) for place, plans in histories.items()},
        "shapes": {name: list(tensor.shape) for name, tensor in contents.items()},
        "buffers": {name: tensor.detach() for name, tensor in _buffers_in(module, contents).items()},
    }


def _buffers_in(module: nn.Module, contents: Mapping[str, Tensor]) -> dict[str, Tensor]:
    own = {id(buffer) for buffer in module.buffers()}
    return {name: tensor for name, tensor in contents.items() if id(tensor) in own}


def read_family(path: Path, saved: Parts, checksums: bool) -> tuple[list[Member], list[int], Any]:
    """Grow a newly built model to the sizes of a file, and load everything; on any failure, all is as it was.

    Returns the smaller members, the FLOPs of all sizes, and the extra value.
    """
    check_path(path, LOAD)
    state = read_run(path, checksums, families=True)
    if "family" not in state:
        raise CheckpointError(f"{path} holds a run, and no family: outgrow.Run(…).load(path) continues it")
    misfit = f"{path} does not fit this model ({type(saved.model).__qualname__}; the file was written for {state.get('class')})"
    with reshaping(saved.model, path) as journal:
        try:
            histories = record_in(state["model"], os.fspath(path)).histories
            sizes, flops = list(state["family"]["sizes"]), [int(count) for count in state["family"]["flops"]]
        except UNREADABLE as error:
            raise unreadable(os.fspath(path), error) from error
        members = _members(saved.model, histories, sizes, state["model"], misfit, journal)
        restore(saved, state, journal)
        for member, size in zip(members, sizes, strict=True):
            member.install()
            _load_buffers(member.module, size["buffers"], misfit)
    return members, flops, state.get("extra")


def _members(
    model: nn.Module,
    histories: Histories,
    sizes: Sequence[Mapping[str, Any]],
    final: Mapping[str, Any],
    misfit: str,
    journal: Journal,
) -> list[Member]:
    """Make the smaller members, each on the way of the model to its final shapes."""
    shapes = [{str(name): tuple(shape) for name, shape in size["shapes"].items()} for size in sizes]
    shapes.append({name: tuple(value.shape) for name, value in final.items() if isinstance(value, Tensor)})
    counts: list[Mapping[str, int]] = [
        *(size["plans"] for size in sizes),
        {place: len(made) for place, made in histories.items()},
    ]
    members: list[Member] = []
    for number, (shape, count) in enumerate(zip(shapes, counts, strict=True)):
        done = len(history(model))
        replay(
            model,
            {place: plans[: count[place]] for place, plans in histories.items() if count.get(place)},
            shape,
            misfit,
            journal,
        )
        if members:
            kept = kept_entries(model, history(model)[done:])
            for member in members:
                member.grown(kept)
        if number < len(sizes):
            members.append(Member(model))
    return members


@torch.no_grad()
def _load_buffers(module: nn.Module, buffers: Mapping[str, Tensor], misfit: str) -> None:
    own = _buffers_in(module, contents_of(module, histories_of(module)))
    if set(own) != set(buffers) or any(own[name].shape != buffers[name].shape for name in own):
        raise CheckpointError(f"{misfit}: a member has other buffers")
    for name, tensor in own.items():
        tensor.copy_(buffers[name])
