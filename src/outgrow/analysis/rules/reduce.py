"""Statistics over axes, pooling and resampling over the image, and operators that mix the indices of an axis."""

from __future__ import annotations

from outgrow.analysis.effects import Map, Mix, Move, Reduce
from outgrow.analysis.interpret_trace import Outcome, Reading
from outgrow.analysis.labels import reduce
from outgrow.trace.evaluate_operator import base_name
from outgrow.trace.operators import Op

HOW = {"sum": "sum", "mean": "mean", "linalg_vector_norm": "norm", "norm": "norm", "var": "var", "std": "std"}
HOW |= dict.fromkeys(("amax", "amin", "any", "all"), "extreme")
STATISTICS = (
    "sum mean amax amin linalg_vector_norm norm var std var_mean std_mean prod logsumexp max min argmax argmin any all".split()
)
POOL_LINEAR = """
    avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d
    upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa reflection_pad1d reflection_pad2d reflection_pad3d
    replication_pad1d replication_pad2d replication_pad3d _upsample_nearest_exact1d _upsample_nearest_exact2d
""".split()
POOL_MAX = "max_pool1d max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d".split()
LOSS = "the model returns a loss over it (pass an example without labels)"


def statistic(reading: Reading, op: Op) -> Outcome:
    name = base_name(op)
    ref = op.args[0]
    rank = len(reading.shape(ref))
    position = 2 if name in ("linalg_vector_norm", "norm") else 1
    named = op.args[position] if len(op.args) > position else op.kwargs.get("dim")
    if isinstance(named, bool):  # var(x, unbiased)
        named = None
    axes = [named] if isinstance(named, int) else list(named or range(rank))
    axes = [axis % rank for axis in axes] if rank else []
    out_rank = len(reading.trace.values[op.outputs[0]].shape)
    layout = reduce(reading.ties, reading.layout(ref), axes, keepdim=out_rank == rank)
    how = HOW.get(name, "other")
    if how == "norm" and len(op.args) > 1 and op.args[1] not in (2, 2.0):
        how = "other"
    if how in ("var", "std") and _correction(op) != 0:  # n − 1 does not grow in proportion
        how = "other"
    return Outcome((layout,) * len(op.outputs), Reduce(ref.value, frozenset(axes), how), reading.uniform[ref.value])


def _correction(op: Op) -> float:
    """What var and std subtract from the number of entries: `var(x, dim, unbiased)` or `var(x, dim, *, correction)`."""
    given = op.args[2] if len(op.args) > 2 else op.kwargs.get("correction")
    return 1.0 if given is None else float(given)


def pool(reading: Reading, op: Op) -> Outcome:
    """Neighbouring positions are averaged, maximised or interpolated, for each channel alike."""
    name = base_name(op)
    ref = op.args[0]
    rank = len(reading.shape(ref))
    digits = [int(char) for char in name if char.isdigit()]
    space = range(rank - digits[0], rank)
    reading.pin(reading.layout(ref), list(space), f"{op.name} pools or resamples along it", op)
    kept = reduce(reading.ties, reading.layout(ref), space, keepdim=True)
    effect = Map((ref.value,), True, True) if name in POOL_MAX else Move((ref.value,))
    return Outcome((kept,) * len(op.outputs), effect)


def softmax(reading: Reading, op: Op) -> Outcome:
    ref, axis = op.args[0], op.args[1] % max(len(reading.shape(op.args[0])), 1)
    what = base_name(op).strip("_").replace("safe_", "")
    shares = what == "softmax"
    effect = Mix((reading.operand(ref),), frozenset([axis]), f"a {what} runs over its units", shares)
    return Outcome((reading.layout(ref),) * len(op.outputs), effect)


def ranked(reading: Reading, op: Op) -> Outcome:
    """topk, sort: the order of the indices depends on the data."""
    ref = op.args[0]
    rank = len(reading.shape(ref))
    position = 2 if op.name == "aten.topk" else 1
    axis = (op.args[position] if len(op.args) > position else -1) % rank
    reading.pin(reading.layout(ref), [axis], f"{op.name} ranks its units", op)
    kept = reduce(reading.ties, reading.layout(ref), [axis], keepdim=True)
    return Outcome((kept,) * len(op.outputs), Move((ref.value,)))


def log_likelihood_of_labels(reading: Reading, op: Op) -> Outcome:
    """nll_loss: for each label one entry of the class axis is taken, so a loss is part of the model."""
    ref, rank = op.args[0], len(reading.shape(op.args[0]))
    reading.pin_all([other for other in op.refs if other != ref], "it weights the classes of a loss", op)
    reading.pin(reading.layout(ref), [min(rank - 1, 1)], LOSS, op)
    return Outcome(((),) * len(op.outputs), Mix((reading.operand(ref),), frozenset([min(rank - 1, 1)]), LOSS))


RULES = {
    **{f"aten.{name}": log_likelihood_of_labels for name in ("nll_loss_forward", "nll_loss2d_forward")},
    **{f"aten.{name}": statistic for name in STATISTICS},
    **{f"aten.{name}": pool for name in (*POOL_LINEAR, *POOL_MAX)},
    **{f"aten.{name}": softmax for name in "_softmax _log_softmax _safe_softmax cumsum cumprod".split()},
    **{f"aten.{name}": ranked for name in ("topk", "sort")},
}
