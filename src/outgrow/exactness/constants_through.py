"""Constants through operators: which constant must enter an operator for a given constant to leave it?

A zero initialisation makes everything before the last layer's bias cancel, so that its output is σ(b) (the paper's appendix C).
It is zero if σ(b) = 0 and, for values before other operators, if σ(b) = t for the constant t that these turn into zero: for
softplus(x) − 1 that is b = log(e − 1). b is found by evaluating the operator. Its slope there must not be zero, or nothing
before it would learn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outgrow.trace.evaluate_operator import base_name, evaluated
from outgrow.trace.operators import Op, Ref, Trace

FINE = torch.arange(-800, 801, dtype=torch.float64) / 40
COARSE = torch.logspace(1.31, 3, 60, dtype=torch.float64)
GRID = torch.cat([-COARSE.flip(0), FINE, COARSE])  # where roots are searched; larger biases are not tried
LEAST_SLOPE = 1e-3
ROUNDING = 1e-12
BISECTIONS = 100
MOST = 8


class NoSource(Exception):
    """Raised where no constant becomes the wanted one; its text ends the sentence "it ends in OPERATOR, …"."""


def sources_of(op: Op, target: float) -> list[float]:
    """Constants b with f(b) = target and f′(b) ≠ 0 for an elementwise operator f, those near zero first, at most `MOST`.

    NoSource with the reason if there is none.
    """
    wanted = "zero" if target == 0 else f"{target:g}"
    found = _roots(op, target)
    if found is None:
        raise NoSource("and outgrow does not know what it computes, since it can't be evaluated by itself")
    if not found:
        raise NoSource(f"which is never {wanted}")
    slopes = {root: abs(_slope(op, root)) for root in found}
    steep = [root for root, slope in slopes.items() if LEAST_SLOPE <= slope < float("inf")]
    if not steep:
        where = "at zero" if 0.0 in found and target == 0 else f"wherever it is {wanted}"
        size = (
            "infinite" if min(slopes.values()) >= LEAST_SLOPE else f"below {LEAST_SLOPE:g}" if any(slopes.values()) else "zero"
        )
        raise NoSource(f"whose slope {where} is {size}: nothing before it would learn")
    return steep[:MOST]


def _roots(op: Op, target: float) -> list[float] | None:
    """Numbers that the operator maps to the target, those near zero first; None if it is not an elementwise function."""
    values = _values(op, GRID)
    if values is None:
        return None
    gaps = values - target
    exact = FINE[gaps[len(COARSE) : -len(COARSE)] == 0].tolist()  # far out, a sigmoid is zero by underflow only
    low, high = gaps[:-1], gaps[1:]
    crossed = torch.isfinite(low) & torch.isfinite(high) & (low * high < 0)
    found = [*exact, *_bisected(op, target, GRID[:-1][crossed], GRID[1:][crossed])]
    return sorted(found, key=lambda root: (abs(root), -root))


def _bisected(op: Op, target: float, left: Tensor, right: Tensor) -> list[float]:
    """The roots between pairs of numbers where the sign changes; jumps and poles are left out."""
    if not len(left):
        return []
    start = _values(op, left)
    assert start is not None
    rising = start < target
    for _ in range(BISECTIONS):
        middle = (left + right) / 2
        values = _values(op, middle)
        assert values is not None
        beyond = torch.where(rising, values > target, values < target)
        left, right = torch.where(beyond, left, middle), torch.where(beyond, middle, right)
    values = _values(op, left)
    assert values is not None
    close = (values - target).abs() <= ROUNDING * (1 + abs(target)) * (1 + left.abs())
    return list(left[close].tolist())


def _values(op: Op, x: Tensor) -> Tensor | None:
    """The operator's values; None if it does not run by itself, or does not work entry by entry."""
    try:
        values = evaluated(op, x)
        turned = evaluated(op, x.flip(0))
    except Exception:  # an operator of another library, or one that needs further tensors or other shapes
        return None
    if not isinstance(values, Tensor) or values.shape != x.shape or not values.is_floating_point():
        return None
    same = torch.allclose(values, turned.flip(0), rtol=1e-12, atol=1e-12, equal_nan=True)
    return values if same else None


def _slope(op: Op, at: float) -> float:
    x = torch.tensor([at], dtype=torch.float64, requires_grad=True)
    try:
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(evaluated(op, x).sum(), x)
    except RuntimeError:  # the operator has no derivative
        return 0.0
    return float(slope)


def keeps_constant(trace: Trace, op: Op, value: int, constant: float) -> bool:
    """Whether an operator on tensors full of a constant returns the same constant everywhere; padding with zeros does not."""

    def full(argument: object) -> object:
        if isinstance(argument, Ref):
            return torch.full(trace.values[argument.value].shape, constant, dtype=torch.float64)
        return type(argument)(map(full, argument)) if isinstance(argument, (tuple, list)) else argument

    try:
        result = getattr(torch.ops.aten, base_name(op))(*map(full, op.args), **dict(op.kwargs))
        results = result if isinstance(result, (tuple, list)) else (result,)
        gap = (results[op.outputs.index(value)] - constant).abs().max()
    except Exception:
        return False
    return bool(gap <= ROUNDING * abs(constant))


def operand_factor(op: Op, operand: int) -> float:
    """The factor on an operand of a sum."""
    alpha = float(op.kwargs.get("alpha", 1.0))
    return {"sub": (1.0, -alpha), "rsub": (-alpha, 1.0)}.get(base_name(op), (1.0, alpha))[operand]
