"""Save a grown model, and load it into a newly built small one.

The file is plain safetensors, which any reader opens: the tensors under their `state_dict` names, and the growth history as
JSON in the metadata. A tied tensor is stored once, under its first name; the metadata maps its other names to it. Buffers
outside the state dict (persistent=False) that a growth has changed can't be rebuilt by the small model's constructor: they are
stored too, under the prefix `outgrow.buffer/`. The remaining changes of a faded widening are under `outgrow.fade/`. Extra state
of modules is JSON in the metadata (see `saving/extra_state.py`). The metadata holds a checksum of each tensor, and one of the
header itself, under `outgrow.checksum` (see `saving/checksums.py`).

Loading replays the shapes and settings of the history, draws no random numbers, and takes all values from the file. Everything
is checked; on any failure the model is unchanged, bit for bit. Nothing here reads or writes pickle. (Files of `Run.save` are
read by `saving/run_file.py`.)
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from outgrow.apply.weight_fades import STORED, pack_drifts, restore_drifts
from outgrow.distributed.agreement import by_first
from outgrow.distributed.fsdp import gathered, group_of, whole
from outgrow.errors import CheckpointError, Problem
from outgrow.history.growth_order import Histories, histories_of
from outgrow.model.check_arguments import packed_tensor
from outgrow.model.journal import Journal
from outgrow.model.unwrap import unwrapped_module
from outgrow.modules.gates import restore_gates
from outgrow.saving import checksums as checksum
from outgrow.saving.atomic_write import Path, check_path, place_for, write_whole
from outgrow.saving.extra_state import STORED as EXTRA
from outgrow.saving.extra_state import extras_of, note_extras, pack_extras, unpack_extras
from outgrow.saving.growth_record import EARLIER, VERSION, record_text
from outgrow.saving.model_contents import contents_of, not_finite, unique
from outgrow.saving.replay_growths import BUFFER, FRESH, refuse, replay
from outgrow.saving.reshape_for_checkpoint import reshaping
from outgrow.saving.weights_file import SEAL, Description, description_in, header_checksum, opened
from outgrow.wrong_arguments import usage

M = TypeVar("M", bound=nn.Module)
SAVE, LOAD = "outgrow.save(model, 'model.safetensors')", "outgrow.load(model, 'model.safetensors')"
NOT_FINITE = "go back to weights from before training diverged; torch.save(model.state_dict(), path) writes these anyway"


@usage("outgrow.save(model, 'model.safetensors')")
def save(model: nn.Module, path: Path) -> None:
    """Write a model's weights and its growth history to a safetensors file, completely or not at all.

    Args:
        model: any module; wrappers (`torch.compile`, DistributedDataParallel, AveragedModel) are unwrapped. If FSDP2 has
            sharded the model, rank 0 writes all of it: call `save` on all ranks.
        path: the file; an existing one is replaced only when the new one is complete on disk.

    Raises CheckpointError, and writes nothing, if a parameter or buffer holds NaN or infinity. (Minus infinity is allowed in
    buffers: attention masks contain it.)

    Example:
        >>> import tempfile, outgrow
        >>> path = tempfile.mkdtemp() + "/model.safetensors"
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> growth = outgrow.widen(model, torch.zeros(1, 4), "0", to=12)
        >>> save(model, path)
        >>> describe(path).tensors["0.weight"]
        ('F32', (12, 4))
    """
    _check_module(model, path, SAVE)
    target = place_for(path, SAVE)
    model = unwrapped_module(model)
    histories = histories_of(model)
    contents, group = whole(contents_of(model, histories)), group_of(model)
    by_first(group, lambda: _write(model, histories, contents, target, path))


def _write(model: nn.Module, histories: Histories, contents: Mapping[str, Tensor], target: str, path: Path) -> None:
    """Write a model's contents to a file."""
    from safetensors.torch import save_file

    (facts, amounts), (extras, parts) = pack_drifts(model), pack_extras(extras_of(model))
    bad = not_finite(model, {**contents, **amounts})
    refuse(f"{path} was not written: the model holds values that are not finite", bad, NOT_FINITE)
    own, aliases = unique({**contents, **parts})
    tensors = {**own, **amounts}

    def write(draft: str) -> None:
        also = {"aliases": aliases, "extras": extras, checksum.TABLE: checksum.of_tensors(tensors)}
        record = record_text(model, histories, facts, **also)
        metadata = {"format": "pt", "outgrow.version": str(VERSION), "outgrow": record}
        metadata[SEAL] = header_checksum(metadata, {name: tensor.shape for name, tensor in tensors.items()})
        save_file(tensors, draft, metadata)
        describe(draft)

    write_whole(target, write)


@usage("outgrow.load(model, 'model.safetensors')")
def load(model: M, path: Path, *, checksums: bool = True) -> M:
    """Grow a newly built small model to the shapes in a file that `save` wrote, and load its weights. Returns the model.

    The file may also be one of `Run.save`, from which only the weights are loaded. The model may have been through some or all
    of the growths already, or have been built at the final size. A model that `outgrow.shard` has sharded is sharded again:
    call `load` on all ranks, and make the optimizer after it.

    checksums: compare the contents with the checksums in the file, which finds single flipped bits. False saves that time,
        and reads a file whose contents were changed on purpose. Files of outgrow 0.1.0 have no checksums, and load as before.

    Raises CheckpointError, and leaves the model unchanged, if the file is damaged, was not written by outgrow, or does not fit.

    Example:
        >>> import tempfile, outgrow
        >>> path = tempfile.mkdtemp() + "/model.safetensors"
        >>> build = lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> model = build()
        >>> growth = outgrow.widen(model, torch.zeros(1, 4), "0", to=12)
        >>> save(model, path)
        >>> again = load(build(), path)
        >>> again[0], bool((again[0].weight == model[0].weight).all())
        (Linear(in_features=4, out_features=12, bias=True), True)
    """
    _check_module(model, path, LOAD)
    check_path(path, LOAD)
    if _of_a_run(path):
        from outgrow.saving.run_file import load_model

        load_model(model, path, checksums)
        return model
    inner = unwrapped_module(model)
    with opened(path) as file:
        about = description_in(path, file, checksums)
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if checksums and about.checksums is not None:
        checksum.compare(checksum.of_tensors(stored), about.checksums, path)
    misfit = f"{path} does not fit this model ({type(inner).__qualname__}; the file was written for {about.model})"
    amounts = {name: stored.pop(name) for name in tuple(stored) if name.startswith(STORED)}
    extras = unpack_extras(about.extras, stored)
    stored = {name: tensor for name, tensor in stored.items() if not name.startswith(EXTRA)}
    given = {name: stored[about.aliases.get(name, name)] for name in (*stored, *about.aliases)}
    final = {name: tuple(tensor.shape) for name, tensor in given.items()}
    with gathered([inner], []) as shards, reshaping(inner, path) as journal:
        new = replay(inner, about.histories, final, misfit, journal)
        contents = contents_of(inner, about.histories)
        refuse(misfit, [*_differences(contents, given), *_other_extras(extras_of(inner), extras)], FRESH)
        refuse(misfit, _ties(contents, given, about), FRESH)
        refuse(f"{path} holds values that are not finite", not_finite(inner, {**given, **amounts}), EARLIER)
        _take(inner, contents, {**given, **extras}, new, journal)
        restore_drifts(inner, about.drifts, amounts, journal)
        restore_gates(inner, about.gates)
        shards.again()
    return model


def describe(path: Path, *, checksums: bool = True, values: bool = False) -> Description:
    """Read the growth history and the shapes of a checkpoint, without a model.

    checksums: compare the header with its checksum. values: also read the values, one tensor at a time, and compare them with
        their checksums; `verified` of the result says whether the file has any.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/model.safetensors"
        >>> save(nn.Linear(2, 3), path)
        >>> describe(path).model, describe(path).tensors["bias"]
        ('Linear', ('F32', (3,)))
    """
    check_path(path, "describe('model.safetensors')")
    if _of_a_run(path):
        from outgrow.saving.run_file import describe_run

        return describe_run(path, checksums)
    with opened(path) as file:
        about = description_in(path, file, checksums)
        if not (checksums and values) or about.checksums is None:
            return about
        checksum.compare({name: checksum.of_tensor(file.get_tensor(name)) for name in about.tensors}, about.checksums, path)
    return replace(about, verified=True)


def _check_module(model: Any, path: Any, call: str) -> None:
    """Raise if the model is not a module; the error says so if model and path were swapped."""
    if isinstance(path, nn.Module) and not isinstance(model, nn.Module):
        raise CheckpointError(f"the model comes first, and the path after it: write e.g. {call}")
    if not isinstance(model, nn.Module):
        found = f"the class {model.__name__}" if isinstance(model, type) else f"of type {type(model).__name__}"
        raise CheckpointError(f"the model is {found}: pass an instance of torch.nn.Module, e.g. {call}")
    lazy = [place for place, module in model.named_modules() if getattr(module, "has_uninitialized_params", bool)()]
    if lazy:
        raise CheckpointError(f"{lazy[0] or 'the model'} is a lazy module without shapes: run the model once before")
    packed = packed_tensor(model)
    if packed is not None:
        raise CheckpointError("files of outgrow hold plain tensors", [packed])


def _of_a_run(path: Path) -> bool:
    """Whether a file is a zip file, as written by `Run.save` and `torch.save`."""
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            start = file.read(9)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror or error}") from error
    return start[:4] == b"PK\x03\x04" and start[8:] != b"{"  # safetensors begins with a length, of any bytes, and JSON


def _differences(contents: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[Problem]:
    problems = []
    for name in (*contents, *(name for name in given if name not in contents)):
        if name not in given:
            problems.append(Problem(name, "the file has no such tensor"))
        elif name not in contents:
            problems.append(Problem(name, "the model has no such tensor"))
        elif contents[name].shape != given[name].shape:
            problems.append(
                Problem(name, f"{tuple(contents[name].shape)} in the model, {tuple(given[name].shape)} in the file")
            )
        elif contents[name].dtype != given[name].dtype:
            here, there = contents[name].dtype, given[name].dtype
            problems.append(Problem(name, f"{here} in the model, {there} in the file", f"model.to({there}) before loading"))
    return problems


def _other_extras(here: Collection[str], there: Collection[str]) -> list[Problem]:
    """Extra state that only the model or only the file has."""
    missing = [Problem(name, "the file has no such extra state") for name in here if name not in there]
    return missing + [Problem(name, "the model has no such extra state") for name in there if name not in here]


def _ties(contents: Mapping[str, Tensor], given: Mapping[str, Tensor], about: Description) -> list[Problem]:
    """Tensors that are tied in the file but not in the model, or tied in the model with different values in the file."""
    problems = []
    for alias, name in about.aliases.items():
        one, other = contents[name], contents[alias]
        if one is not other and isinstance(one, nn.Parameter) and isinstance(other, nn.Parameter):
            problems.append(Problem(alias, f"it is the same tensor as {name} in the file, and a separate one in the model"))
    names: dict[int, str] = {}
    for name, tensor in contents.items():
        first = names.setdefault(id(tensor), name)
        if given[first] is not given[name] and not torch.equal(given[first], given[name]):
            problems.append(Problem(name, f"it is the same tensor as {first} in the model, and has other values in the file"))
    return problems


@torch.no_grad()
def _take(
    model: nn.Module, contents: Mapping[str, Tensor], given: Mapping[str, Any], new: Collection[int], journal: Journal
) -> None:
    """Copy the values of the file; the journal can restore the values of all tensors except `new` ones."""
    note_extras(model, journal)
    for tensor in {id(tensor): tensor for tensor in contents.values() if id(tensor) not in new}.values():
        journal.note(partial(_put_back, tensor.detach(), tensor.detach().clone()))
    model.load_state_dict({name: tensor for name, tensor in given.items() if not name.startswith(BUFFER)}, strict=True)
    for name, tensor in contents.items():
        if name.startswith(BUFFER):
            tensor.copy_(given[name])
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def _put_back(tensor: Tensor, before: Tensor) -> None:
    tensor.copy_(before)
