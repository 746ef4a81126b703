"""Read files of `outgrow.save`: the header with the growth record, and its checksum."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outgrow.errors import CheckpointError
from outgrow.history.growth_order import Histories
from outgrow.saving import checksums as checksum
from outgrow.saving.atomic_write import Path
from outgrow.saving.growth_record import EARLIER, UNREADABLE, read_record, unreadable

SEAL = f"outgrow.{checksum.SEAL}"  # key in the metadata, next to "outgrow"


@dataclass(frozen=True)
class Description:
    """The description of a checkpoint, which can be read without a model."""

    path: str
    model: str  # name of the model's class
    histories: Histories  # plans, oldest first, by the path of the module that was grown ("" is the model itself)
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]  # dtype (safetensors' name) and shape by name
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names of tied tensors
    gates: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # unfinished fades by path: steps made, total steps
    drifts: Sequence[Mapping[str, Any]] = ()  # unfinished faded widenings; see `weight_fades.pack_drifts`
    extras: Mapping[str, Any] = field(default_factory=dict)  # extra state of modules; see `extra_state.pack_extras`
    checksums: Mapping[str, str] | None = None  # by name of tensor; None if the file has none
    verified: bool = False  # whether all values were read and compared with their checksums


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file; for other files, the error says what they are."""
    from safetensors import SafetensorError, safe_open

    if not os.path.exists(path):
        raise CheckpointError(f"{path}: there is no such file")
    if os.path.isdir(path):
        raise CheckpointError(f"{path} is a folder: name the .safetensors file in it")
    if not os.path.getsize(path):
        raise CheckpointError(f"{path} is empty, possibly because its writing was interrupted: {EARLIER}")
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        with open(path, "rb") as raw:
            start = raw.read(2)
        if start[:1] == b"\x80":
            raise CheckpointError(
                f"{path} is a pickle file, which outgrow.load reads only if Run.save wrote it: "
                "model.load_state_dict(torch.load(path, weights_only=True)) loads a state dict"
            ) from error
        raise CheckpointError(f"{path} is damaged, incomplete, or not a safetensors file ({error}): {EARLIER}") from error
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error


def description_in(path: Path, file: Any, checksums: bool = True) -> Description:
    metadata = file.metadata() or {}
    if "outgrow" not in metadata or "outgrow.version" not in metadata:
        raise CheckpointError(
            f"{path} was not written by outgrow.save, so it has no growth history: "
            "model.load_state_dict(safetensors.torch.load_file(path)) loads it into a model of its shapes"
        )
    record = read_record(metadata["outgrow"], os.fspath(path), metadata["outgrow.version"])
    about = record.also
    try:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        found = Description(
            os.fspath(path),
            record.model,
            record.histories,
            {name: (slice_.get_dtype(), tuple(slice_.get_shape())) for name, slice_ in slices.items()},
            {alias: name for alias, name in about["aliases"].items() if slices[name]},
            record.gates,
            record.drifts,
            dict(about.get("extras", {})),
            dict(about[checksum.TABLE]) if checksum.TABLE in about else None,
        )
    except UNREADABLE as error:
        raise unreadable(os.fspath(path), error) from error
    if checksums and (SEAL in metadata or found.checksums is not None):
        shapes = {name: shape for name, (_, shape) in found.tensors.items()}
        if metadata.get(SEAL) != header_checksum(metadata, shapes):
            raise CheckpointError(f"{path} is damaged: its header differs from what was written: {checksum.IF_DAMAGED}")
    return found


def header_checksum(metadata: Mapping[str, str], shapes: Mapping[str, Sequence[int]]) -> str:
    """The checksum of the metadata, and of names and shapes of tensors."""
    values = sorted((key, value) for key, value in metadata.items() if key != SEAL)
    sizes = sorted((name, list(shape)) for name, shape in shapes.items())
    return checksum.of_bytes(json.dumps([values, sizes]).encode())
