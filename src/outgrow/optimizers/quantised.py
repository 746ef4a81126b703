"""Grow quantised state: decode it to plain tensors, and encode the grown tensors again with the library's own code.

The error of the encoding limits the precision of a growth: it is that of one step of the optimizer.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

BLOCK = 256  # bitsandbytes: so many values share a scale


def decoded(optimizer: Optimizer, parameter: Tensor, state: Mapping[Any, Any]) -> dict[Any, Any]:
    """A parameter's state with plain tensors in place of quantised ones."""
    if all(type(value) is Tensor and value.dtype != torch.uint8 for value in state.values()):
        return dict(state)
    if _by_blocks(state):
        functional = sys.modules["bitsandbytes.functional"]
        plain = {key: value for key, value in state.items() if not str(key).startswith(("qmap", "absmax"))}
        for number in ("1", "2"):
            if f"absmax{number}" in state:
                codes, scales, code = (state[f"{part}{number}"] for part in ("state", "absmax", "qmap"))
                plain[f"state{number}"] = functional.dequantize_blockwise(codes, absmax=scales, code=code, blocksize=BLOCK)
        return plain
    return {key: value.dequantize() if _is_low_bit(value) else value for key, value in state.items()}


def is_encoded(optimizer: Any, state: Mapping[Any, Any]) -> bool:
    """Whether `encoded` changes a grown state."""
    return _by_blocks(state) or type(optimizer).__module__.startswith("torchao.")


def encoded(optimizer: Any, parameter: Tensor, state: Mapping[Any, Any], new: Mapping[Any, Any]) -> dict[Any, Any]:
    """Grown state, quantised again where it was before, in the form in which the optimizer itself would make it."""
    if _by_blocks(state):
        return _encoded_by_blocks(state, new)
    if not type(optimizer).__module__.startswith("torchao."):
        return dict(new)
    return {key: optimizer._new_buffer(parameter, key == "exp_avg").copy_(value) for key, value in new.items()}


def _is_low_bit(value: Any) -> bool:
    """Whether a tensor is one of torchao's (8 bit, 4 bit or float8)."""
    return isinstance(value, Tensor) and type(value).__module__.startswith("torchao.") and hasattr(value, "dequantize")


def _by_blocks(state: Mapping[Any, Any]) -> bool:
    """Whether a state is one of bitsandbytes', in eight bits."""
    value = state.get("state1")
    return isinstance(value, Tensor) and value.dtype == torch.uint8 and "absmax1" in state


def _encoded_by_blocks(state: Mapping[Any, Any], new: Mapping[Any, Any]) -> dict[Any, Any]:
    functional = sys.modules["bitsandbytes.functional"]
    result: dict[Any, Any] = {}
    for key, value in new.items():
        number = str(key).removeprefix("state")
        codes, quantised = functional.quantize_blockwise(value.contiguous(), code=state[f"qmap{number}"], blocksize=BLOCK)
        result[key], result[f"absmax{number}"] = codes, quantised.absmax
    return result
