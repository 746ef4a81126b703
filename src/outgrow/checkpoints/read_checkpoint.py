"""Read the headers of a Transformers checkpoint: which tensors there are, and where their bytes lie.

A safetensors file is an 8-byte length, a JSON header of that length (dtype, shape and byte range per tensor), and the bytes of
all tensors without gaps. A sharded checkpoint is several such files with an index. Only headers are read here; every mistake
that can be found without the values (a missing shard, a truncated file, an index that contradicts the files) is reported
before anything is written.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from outgrow.errors import CheckpointError, Problem

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ADAPTERS = "adapter_config.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
LONGEST_HEADER = 100_000_000  # bytes, as in the safetensors library
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its dtype and shape, and the range of its bytes."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # in the file
    size: int  # bytes

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The stored tensors whose bytes are those of the tensor: only this one."""
        return (self,)


@dataclass(frozen=True)
class MergedTensor:
    """A tensor that files hold in parts: the bytes of all parts, one after another, are its bytes."""

    parts: tuple[StoredTensor, ...]
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint directory: its configuration as plain data, and all of its tensors by name, in the order of the files."""

    folder: str
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor | MergedTensor]

    @cached_property
    def files(self) -> tuple[str, ...]:
        """Paths of the files with weights."""
        return tuple(dict.fromkeys(part.file for tensor in self.tensors.values() for part in tensor.parts))

    @property
    def bytes(self) -> int:
        return sum(tensor.size for tensor in self.tensors.values())

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point dtype of most values."""
        sizes: dict[torch.dtype, int] = {torch.float32: 0}
        for tensor in self.tensors.values():
            if tensor.dtype.is_floating_point:
                sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.size
        return max(sizes, key=lambda dtype: sizes[dtype])


def read_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """The description of a checkpoint directory; CheckpointError with the reason if it is not complete.

    Example:
        >>> read_checkpoint("nowhere")
        Traceback (most recent call last):
        ...
        outgrow.errors.CheckpointError: nowhere: there is no such directory
    """
    folder = os.fspath(folder)
    if not os.path.isdir(folder):
        if os.path.exists(folder):
            raise CheckpointError(
                f"{folder} is a file: name the directory of a Transformers checkpoint, with {CONFIG} and {WEIGHTS} in it"
            )
        raise CheckpointError(f"{folder}: there is no such directory")
    config = read_config(folder)
    if os.path.exists(os.path.join(folder, INDEX)):
        return Checkpoint(folder, config, _sharded(folder))
    if os.path.exists(os.path.join(folder, WEIGHTS)):
        return Checkpoint(folder, config, read_header(os.path.join(folder, WEIGHTS)))
    raise CheckpointError(_without_weights(folder))


def read_config(folder: str) -> dict[str, Any]:
    """The configuration of a checkpoint directory as plain data."""
    if os.path.exists(os.path.join(folder, ADAPTERS)) and not os.path.exists(os.path.join(folder, CONFIG)):
        raise CheckpointError(
            f"{folder} holds adapters of PEFT ({ADAPTERS}) and not a model: merge them into their model once, with "
            "model.merge_and_unload().save_pretrained(…), and grow that directory"
        )
    return _read_json(os.path.join(folder, CONFIG), f"{folder} is not a Transformers checkpoint")


def _read_json(path: str, without: str) -> dict[str, Any]:
    if not os.path.exists(path):
        raise CheckpointError(f"{without}: it has no {os.path.basename(path)}")
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} does not contain a JSON object")
    return found


def _without_weights(folder: str) -> str:
    names = sorted(os.listdir(folder))
    pickles = [name for name in names if name.endswith(PICKLES) and not name.startswith(("optimizer", "training_args"))]
    if pickles:
        return (
            f"{folder} holds its weights as pickle ({pickles[0]}), which can run code when it is read: write safetensors once, "
            "with AutoModelForCausalLM.from_pretrained(…).save_pretrained(…), and grow that directory"
        )
    others = [name for name in names if name.endswith(".safetensors")]
    more = f"; there is {', '.join(others[:3])}, but no index of shards" if others else ""
    return f"{folder} has neither {WEIGHTS} nor {INDEX}{more}"


def _sharded(folder: str) -> dict[str, StoredTensor]:
    """The tensors of all shards; the index and the files must agree."""
    index = os.path.join(folder, INDEX)
    places = _read_json(index, folder).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{index} has no weight_map from tensors to files")
    shards = sorted(set(places.values()))
    outside = [name for name in shards if os.path.basename(name) != name]
    missing = [name for name in shards if name not in outside and not os.path.exists(os.path.join(folder, name))]
    problems = [Problem(name, "the index names a file outside of the directory") for name in outside]
    problems += [Problem(name, "the shard is missing") for name in missing]
    if problems:
        raise CheckpointError(f"{folder} is not complete: download or copy the missing files", problems)
    headers = {shard: read_header(os.path.join(folder, shard)) for shard in shards}
    for name, shard in places.items():
        if name not in headers[shard]:
            problems.append(Problem(name, f"the index says that it is in {shard}, which does not contain it"))
    for shard, header in headers.items():
        problems += [Problem(name, f"{shard} contains it, the index does not") for name in header if places.get(name) != shard]
    if problems:
        raise CheckpointError(f"{index} contradicts the files", problems[:5])
    return {name: tensor for header in headers.values() for name, tensor in header.items()}


def read_header(path: str) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, in the order of their bytes."""
    actual = os.path.getsize(path)
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if actual < 8 or length > min(actual - 8, LONGEST_HEADER):
                raise ValueError("it is truncated, or not a safetensors file")
            header = json.loads(file.read(length))
            tensors = dict(_tensors(path, header, 8 + length))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error
    end = max((tensor.start + tensor.size for tensor in tensors.values()), default=8 + length)
    if end != actual:
        what = "is truncated" if actual < end else "has bytes that no tensor owns"
        raise CheckpointError(f"{path} {what}: its header describes {end:,} bytes, and it has {actual:,}: copy it again")
    return dict(sorted(tensors.items(), key=lambda item: item[1].start))


def _tensors(path: str, header: Mapping[str, Any], base: int) -> Iterable[tuple[str, StoredTensor]]:
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise CheckpointError(
                f"{path}: {name} has the dtype {entry['dtype']}, which can't be grown; known: {', '.join(DTYPES)}"
            )
        dtype, shape = DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
        start, end = map(int, entry["data_offsets"])
        if end - start != math.prod(shape) * dtype.itemsize or start < 0:
            raise ValueError(f"the byte range of {name} does not fit its shape")
        yield name, StoredTensor(path, dtype, shape, base + start, end - start)
