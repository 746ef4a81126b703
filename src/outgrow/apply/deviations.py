"""Standard deviations of old values, which scale draws.

For large tensors on the CPU it is √(mean x² − mean² x), which is faster than two passes, unless too many digits cancel. Sums
are taken over pieces of fixed length in float32, and over all pieces in float64: so the result depends neither on the number of
threads nor on whether the values come from memory or, part by part, from a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from outgrow.apply.tensor_entries import reals

MILLION = 2**20
PIECE = 2**15  # values of a sum in float32


def deviations(tensors: Sequence[Tensor]) -> list[float]:
    """Standard deviations of detached tensors. The host waits for the device once, not once per tensor."""
    result = [0.0] * len(tensors)
    plain = [reals(tensor) for tensor in tensors]
    values = {n: _precise(t) for n, t in enumerate(plain) if t.numel() > 1 and t.is_floating_point()}
    for n in [n for n, value in values.items() if value.numel() >= MILLION and not value.is_cuda]:
        flat = values.pop(n).reshape(-1)
        result[n] = deviation_of_parts(lambda flat=flat: iter([flat]))  # type: ignore[misc]
    for n, deviation in _read({n: value.std(correction=0) for n, value in values.items()}).items():
        result[n] = deviation
    return result


def deviation_of_parts(parts: Callable[[], Iterable[Tensor]]) -> float:
    """The standard deviation of a large tensor. parts: returns its values in order, in vectors of any lengths."""
    count, total, square = _sums(parts(), 0.0)
    mean = total / count
    if mean**2 >= 0.1 * square / count or math.isinf(square):
        shifted = _sums(parts(), mean)
        return math.sqrt(max(shifted[2] / count - (shifted[1] / count) ** 2, 0.0))
    return math.sqrt(square / count - mean**2)


def _sums(parts: Iterable[Tensor], shift: float) -> tuple[int, float, float]:
    """The number of values, their sum and the sum of their squares, after a shift."""
    count, total, square = 0, 0.0, 0.0
    for values in _in_pieces(parts):
        values = values - shift if shift else values
        count += values.numel()
        total += float(values.sum(dim=1).double().sum())
        square += float(torch.linalg.vector_norm(values, dim=1).double().square().sum())
    return count, total, square


def _in_pieces(parts: Iterable[Tensor]) -> Iterator[Tensor]:
    """Matrices whose rows are pieces, from vectors of any lengths; a shorter piece comes last, alone."""
    rest = torch.empty(0)
    for part in parts:
        if len(rest):
            missing = PIECE - len(rest)
            rest, part = torch.cat([rest, part[:missing]]), part[missing:]
            if len(rest) < PIECE:
                continue
            yield rest.view(1, -1)
        whole = len(part) // PIECE * PIECE
        if whole:
            yield part[:whole].view(-1, PIECE)
        rest = part[whole:].clone()
    if len(rest):
        yield rest.view(1, -1)


def _precise(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _read(scalars: Mapping[int, Tensor]) -> dict[int, float]:
    """Scalars as Python floats, with one transfer per device and dtype."""
    result: dict[int, float] = {}
    for kind in {(scalar.device, scalar.dtype) for scalar in scalars.values()}:
        here = {n: scalar for n, scalar in scalars.items() if (scalar.device, scalar.dtype) == kind}
        result.update(zip(here, torch.stack(list(here.values())).tolist(), strict=True))
    return result
