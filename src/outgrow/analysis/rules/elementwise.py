"""Elementwise operators: activations, sums, products, casts.

An activation keeps equal units equal (the paper's MCD). Whether it maps zero to zero is found by evaluating it at zero.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from outgrow.analysis.effects import Contract, Effect, Map, Move, Operand, PerUnit, Power, Scale, Shift, Sum
from outgrow.analysis.interpret_trace import Outcome, Reading
from outgrow.analysis.labels import FREQUENCIES, Layout
from outgrow.trace.evaluate_operator import base_name
from outgrow.trace.operators import Op, Ref, refs_in

UNARY = """
    relu gelu silu sigmoid tanh hardswish hardsigmoid hardtanh leaky_relu elu celu selu softplus mish erf erfc erfinv exp exp2
    expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh asinh acosh atanh abs neg sqrt rsqrt square reciprocal clamp
    clamp_min clamp_max sign sgn floor ceil round trunc frac threshold hardshrink softshrink logit log_sigmoid_forward
    relu6 rrelu_with_noise isnan isinf isfinite logical_not bitwise_not nan_to_num positive digamma lgamma angle
""".split()
HOMOGENEOUS = {"relu", "leaky_relu", "abs", "neg", "positive"}
BINARY = """
    maximum minimum fmax fmin atan2 remainder fmod where masked_fill eq ne lt le gt ge logical_and logical_or logical_xor
    bitwise_and bitwise_or bitwise_xor addcmul addcdiv lerp hypot xlogy floor_divide
""".split()
BINARY_KEEPS_ZERO = {
    "maximum",
    "minimum",
    "where",
    "lerp",
    "polar",
}  # zero wherever all their operands are zero; others: not assumed
SAME = """
    clone alias detach _to_copy lift_fresh lift_fresh_copy contiguous _conj _conj_physical conj_physical _neg_view bernoulli
    native_dropout
""".split()
LIKE = "zeros_like ones_like full_like empty_like fill zero".split()
NOISE = "rand_like randn_like randint_like normal uniform exponential random".split()
FACTORY = "zeros ones full new_zeros new_ones new_full new_empty empty scalar_tensor new_empty_strided empty_strided".split()


TENSOR = object()  # placeholder for any tensor


def unary(reading: Reading, op: Op) -> Outcome:
    name = base_name(op)
    value = op.args[0].value
    layout = reading.layouts[value]
    if name in ("sin", "cos"):
        _pin_frequencies(reading, op, op.args[0])
    effect: Effect = Map((value,), _zero_at_zero(op), name in HOMOGENEOUS)
    if name in ("rsqrt", "sqrt", "reciprocal", "square"):
        effect = Power(value, {"rsqrt": -0.5, "sqrt": 0.5, "reciprocal": -1.0, "square": 2.0}[name])
    return Outcome((layout,) * len(op.outputs), effect, reading.uniform[value])


def power(reading: Reading, op: Op) -> Outcome:
    base, exponent = op.args[:2]
    if isinstance(base, Ref) and isinstance(exponent, (int, float)):
        return Outcome((reading.layout(base),), Power(base.value, float(exponent)), reading.uniform[base.value])
    return pointwise(reading, op)


def same(reading: Reading, op: Op) -> Outcome:
    """A copy of the tensor, possibly in another type; dropout counts as a copy, since checks switch its randomness off."""
    value = op.args[0].value
    return Outcome((reading.layouts[value],) * len(op.outputs), Move((value,)), reading.uniform[value])


def like(reading: Reading, op: Op) -> Outcome:
    """A new tensor of the size of another, with equal values."""
    return Outcome((reading.layout(op.args[0]),), Map((), True), uniform=True, zeros=_made_of_zeros(op))


def noise(reading: Reading, op: Op) -> Outcome:
    """A new random value for every entry of a tensor: nothing is known about its value at a unit."""
    return Outcome((reading.layout(op.args[0]),), Map((), False))


def factory(reading: Reading, op: Op) -> Outcome:
    return Outcome(((),), Map((), True), uniform=True, zeros=_made_of_zeros(op))


def _made_of_zeros(op: Op) -> bool:
    name = base_name(op)
    if "full" in name or name == "fill":
        return isinstance(op.args[-1], (bool, int, float)) and op.args[-1] == 0
    return "zero" in name


factory.always = True  # type: ignore[attr-defined]
noise.always = True  # type: ignore[attr-defined]
like.always = True  # type: ignore[attr-defined]


def broadcast(reading: Reading, op: Op, refs: list[Ref]) -> tuple[Layout, list[Operand]]:
    """Broadcast operands against each other, and tie their labels."""
    shape = reading.trace.values[op.outputs[0]].shape
    rank = len(shape)
    operands = []
    for ref in refs:
        missing = rank - len(reading.shape(ref))
        repeated = reading.repeated.get(ref.value, frozenset())
        sizes = {axis + missing: size for axis, size in enumerate(reading.shape(ref)) if axis not in repeated}
        operands.append((ref, reading.spread(ref, rank), sizes))
    layout = reading.meet(op, operands, shape)
    return layout, [Operand(ref.value, spread) for ref, spread, _ in operands]


def pointwise(reading: Reading, op: Op) -> Outcome:
    """A function of several tensors, entry by entry."""
    refs = refs_in(op.args)
    layout, _ = broadcast(reading, op, refs)
    return Outcome((layout,), Map(tuple(ref.value for ref in refs), base_name(op) in BINARY_KEEPS_ZERO))


def polar(reading: Reading, op: Op) -> Outcome:
    """(r, φ) → r·(cos φ + i·sin φ)."""
    _pin_frequencies(reading, op, op.args[1])
    return pointwise(reading, op)


def _pin_frequencies(reading: Reading, op: Op, angle: Ref) -> None:
    """Keep the sizes of position encodings: their frequencies follow from a size, unless they are learned."""
    if not reading.learned[angle.value]:
        reading.pin(reading.layout(angle), range(len(reading.shape(angle))), FREQUENCIES, op)


def add(reading: Reading, op: Op) -> Outcome:
    """a + b, a − b, b − a."""
    refs = refs_in(op.args)
    alpha = float(op.kwargs.get("alpha", 1.0))
    minus = base_name(op) in ("sub", "rsub")
    if len(refs) == 1:
        number = alpha * next(float(arg) for arg in op.args if isinstance(arg, (int, float)))
        layout = reading.layout(refs[0])
        effect: Effect = Shift(refs[0].value, -number if minus else number) if number else Move((refs[0].value,))
        if base_name(op) == "rsub" and number:
            effect = Map((refs[0].value,), False)
        return Outcome((layout,), effect, reading.uniform[refs[0].value])
    layout, operands = broadcast(reading, op, refs)
    return Outcome((layout,), Sum(tuple(operands), minus and alpha == 1.0))


def multiply(reading: Reading, op: Op) -> Outcome:
    """a·b, a/b."""
    refs = refs_in(op.args)
    divide = base_name(op) == "div"
    if divide and op.kwargs.get("rounding_mode"):
        return pointwise(reading, op)
    if len(refs) == 1:
        value = refs[0].value
        effect: Effect = Scale(value) if isinstance(op.args[0], Ref) else Power(value, -1.0 if divide else 1.0)
        return Outcome((reading.layouts[value],), effect, reading.uniform[value])
    layout, operands = broadcast(reading, op, refs)
    return Outcome((layout,), Contract(operands[0], operands[1], frozenset(), divide))


def copy(reading: Reading, op: Op) -> Outcome:
    """`target.copy_(source)`: the target's labels are tied to the source's."""
    target, source = refs_in(op.args)[:2]
    layout, _ = broadcast(reading, op, [target, source])
    return Outcome((layout,), Move((source.value,)))


def prelu(reading: Reading, op: Op) -> Outcome:
    refs = refs_in(op.args)
    layout, _ = broadcast(reading, op, refs)
    return Outcome((layout,), PerUnit(refs[0].value, (refs[1].value,), ()))


def _zero_at_zero(op: Op) -> bool:
    """Whether an operator maps zero to zero, found by evaluating it."""
    try:
        return (
            _of_zero(op.name, tuple(TENSOR if isinstance(arg, Ref) else arg for arg in op.args), tuple(op.kwargs.items())) == 0
        )
    except (RuntimeError, TypeError):
        return False


@lru_cache
def _of_zero(name: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> float:
    function = getattr(torch.ops.aten, name.removeprefix("aten.").removesuffix("_"))
    result = function(*(torch.zeros(1) if arg is TENSOR else arg for arg in args), **dict(kwargs))
    return float(result[0] if isinstance(result, (tuple, list)) else result)


RULES = {
    **{f"aten.{name}": unary for name in UNARY},
    **{f"aten.{name}": pointwise for name in BINARY},
    **{f"aten.{name}": same for name in SAME},
    **{f"aten.{name}": like for name in LIKE},
    **{f"aten.{name}": noise for name in NOISE},
    **{f"aten.{name}": factory for name in FACTORY},
    "aten.pow": power,
    "aten.polar": polar,
    "aten.add": add,
    "aten.sub": add,
    "aten.rsub": add,
    "aten.mul": multiply,
    "aten.div": multiply,
    "aten.copy": copy,
    "aten._prelu_kernel": prelu,
}
