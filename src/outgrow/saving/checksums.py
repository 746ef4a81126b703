"""Checksums of a file's contents, so that a flipped bit is found when the file is read.

Neither safetensors nor `torch.load` checks the bytes of a tensor (`torch.load` ignores the checksums of the zip file that it
reads). Our files therefore hold a CRC-32 per tensor, and one over everything else: names, types, shapes and plain values. A
CRC-32 differs for any change of up to 32 adjacent bits. zlib computes it at about the speed of copying memory
(benchmarks/checksums.py), on the tensor's own bytes: a tensor is copied only if it is on another device or not contiguous.

A file holds two entries, the table of checksums and the checksum of that table. If one of them is missing, the file is
damaged; if both are, an earlier version of outgrow wrote it, and there is nothing to compare.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outgrow.errors import CheckpointError, Problem
from outgrow.saving.replay_growths import refuse

TABLE, SEAL = "checksums", "checksum"
REST = "other values"  # the entry for everything that is not a tensor
IF_DAMAGED = (
    "use an earlier copy of the file, or pass checksums=False (command line: --no-checksums) if its contents were changed on "
    "purpose"
)

PLAIN = (bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device)

Checksums = dict[str, str]


def of_bytes(data: Any) -> str:
    """The CRC-32 of bytes or of an array, as eight hexadecimal digits.

    Example:
        >>> of_bytes(b"123456789")
        'cbf43926'
    """
    return f"{zlib.crc32(data):08x}"


def of_tensor(tensor: Tensor) -> str:
    """The CRC-32 of a tensor's values in row-major order, wherever and however they are stored."""
    code = 0
    for part in _strided(tensor.detach()):
        values = part.resolve_conj().resolve_neg().cpu().contiguous()
        if values.numel():
            code = zlib.crc32(values.reshape(-1).view(torch.uint8).numpy().data, code)
    return f"{code:08x}"


def _strided(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that hold a tensor's values: itself, or the parts of a sparse one or of a wrapper around others."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _strided(getattr(tensor, name))
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif tensor.is_quantized:
        yield tensor.int_repr()
    elif tensor.layout is torch.strided and not tensor.is_meta:
        yield tensor


def of_tensors(tensors: Mapping[str, Tensor]) -> Checksums:
    """One checksum per tensor; a tensor with several names is read once."""
    known: dict[object, str] = {}
    found: Checksums = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage() if type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_sparse else None
        where = id(tensor) if memory is None else (memory.data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
        key = (where, tensor.dtype, tensor.device)
        if key not in known:
            known[key] = of_tensor(tensor)
        found[name] = known[key]
    return found


def sealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same tree of plain values and tensors, with its checksums.

    Example:
        >>> state = sealed({"step": 3, "weight": torch.zeros(2)})
        >>> list(state["checksums"])
        ['weight', 'other values']
        >>> check_seal({**state, "step": 2}, "run.pt")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        outgrow.errors.CheckpointError: run.pt is damaged: ...
    """
    table = _table(state)
    return {SEAL: of_bytes(_text(table)), **state, TABLE: table}


def check_seal(state: Mapping[str, Any], path: Any) -> None:
    """Raise CheckpointError, with the names of damaged entries, if a tree has changed since it was sealed."""
    if SEAL not in state and TABLE not in state:
        return
    table = state.get(TABLE)
    if not isinstance(table, Mapping) or state.get(SEAL) != of_bytes(_text(table)):
        raise CheckpointError(f"{path} is damaged: its table of checksums is incomplete or was changed: {IF_DAMAGED}")
    compare(_table({name: value for name, value in state.items() if name not in (SEAL, TABLE)}), table, path)


def compare(found: Mapping[str, str], table: Mapping[str, str], path: Any) -> None:
    """Raise if checksums differ from those in a file."""
    problems = [
        Problem(name, f"the checksum is {found.get(name, 'missing')}, and should be {table.get(name, 'missing')}")
        for name in {**table, **found}
        if found.get(name) != table.get(name)
    ]
    refuse(f"{path} is damaged: its contents differ from what was written", problems, IF_DAMAGED)


def seal_text(text: str) -> str:
    """A JSON object with its own checksum as its last entry.

    Example:
        >>> seal_text('{"step":3}')
        '{"step":3,"checksum":"232fcf13"}'
    """
    return f'{text[:-1]},"{SEAL}":"{of_bytes(text.encode())}"}}'


def check_text(text: bytes, what: str) -> None:
    """Raise CheckpointError if a JSON object has changed since it was sealed. One without a checksum passes."""
    found = re.search(rb',"checksum":"([0-9a-f]{8})"}$', text)
    if found is not None and found[1].decode() != of_bytes(text[: found.start()] + b"}"):
        raise CheckpointError(f"{what} is damaged: it differs from what was written: use an earlier copy of the file")


def _text(table: Mapping[str, str]) -> bytes:
    return json.dumps(dict(table), sort_keys=True, default=repr).encode()


def _table(state: Mapping[str, Any]) -> Checksums:
    tensors: dict[str, Tensor] = {}
    lines = list(_lines(state, "", tensors))
    return {**of_tensors(tensors), REST: of_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))}


def _lines(tree: Any, path: str, tensors: dict[str, Tensor]) -> Iterator[str]:
    """The contents of a tree in order, as lines of text; tensors are collected in `tensors`, by path."""
    kind = type(tree).__name__
    if isinstance(tree, Tensor):
        tensors[path] = tree
        yield f"{path} tensor {tree.dtype} {tuple(tree.shape)} {tree.layout} {tree.requires_grad}"
    elif isinstance(tree, np.ndarray):
        yield f"{path} {tree.dtype} {tree.shape} {of_bytes(np.ascontiguousarray(tree))}"
    elif isinstance(tree, Mapping):
        yield f"{path} {kind} of {len(tree)}"
        for number, (key, value) in enumerate(tree.items()):
            name = key if isinstance(key, str) else repr(key)
            yield f"{path} {number} {key!r}"
            yield from _lines(value, f"{path}/{name}" if path else name, tensors)
        if getattr(tree, "__dict__", None):  # versions of modules in a state dict
            yield from _lines(vars(tree), f"{path}/attributes", tensors)
    elif isinstance(tree, (list, tuple)):
        yield f"{path} {kind} of {len(tree)}"
        for number, value in enumerate(tree):
            yield from _lines(value, f"{path}/{number}" if path else str(number), tensors)
    elif isinstance(tree, (set, frozenset)):  # unordered
        yield f"{path} {kind} {sorted(map(repr, tree))}"
    elif isinstance(tree, np.generic):
        yield f"{path} {tree.dtype} {tree.item()!r}"
    else:  # the text of other objects may differ from process to process
        yield f"{path} {kind} {tree!r}" if tree is None or isinstance(tree, PLAIN) else f"{path} {kind}"
