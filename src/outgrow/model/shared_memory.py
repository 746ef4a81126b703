"""Tensors that share memory."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def disjoint(one: Tensor, other: Tensor) -> bool:
    """Whether two views of one storage share no element: modulo some stride, they lie in disjoint intervals.

    This recognises slices along one axis of a tensor as disjoint (modulo the stride of the next outer axis).
    """
    sides = [
        (int(t.storage_offset()), [(n, s) for n, s in zip(t.shape, t.stride(), strict=True) if n > 1]) for t in (one, other)
    ]
    strides = {stride for _, axes in sides for _, stride in axes}
    for period in (*strides, sys.maxsize):
        ends = []
        for offset, axes in sides:
            inside = sum((size - 1) * stride for size, stride in axes if stride < period)
            outside_fits = all(stride % period == 0 for _, stride in axes if stride >= period)
            if period and outside_fits and offset % period + inside < period:
                ends.append((offset % period, offset % period + inside))
        if len(ends) == 2 and (ends[0][1] < ends[1][0] or ends[1][1] < ends[0][0]):
            return True
    return False


def storage_of(tensor: Tensor) -> int:
    """Identity of a tensor's storage; a sparse tensor has none, and gets an identity of its own."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else -id(tensor)


def geometry_of(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def overlapping_pair(tensors: Mapping[str, torch.Tensor]) -> tuple[str, str] | None:
    """Names of two tensors that overlap in memory; None if there are none."""
    plain = {n: t for n, t in tensors.items() if t.layout is torch.strided and not t.is_meta and t.numel()}
    storage = {name: tensor.untyped_storage().data_ptr() for name, tensor in plain.items()}
    order = sorted(plain, key=lambda name: (storage[name], plain[name].storage_offset()))
    ends = {
        n: t.storage_offset() + sum((k - 1) * s for k, s in zip(t.shape, t.stride(), strict=True)) for n, t in plain.items()
    }
    longest = order[0] if order else ""
    for name in order[1:]:
        if storage[name] != storage[longest]:
            longest = name
        elif plain[name].storage_offset() <= ends[longest] and not disjoint(plain[name], plain[longest]):
            return name, longest
        longest = max(name, longest, key=ends.__getitem__) if storage[name] == storage[longest] else name
    return None
