"""Optimizers of timm, Transformers, schedulefree, prodigyopt, apex, torchao and bitsandbytes."""

from __future__ import annotations

from outgrow.optimizers.known_torch import ADAM, MOMENTS, MOMENTUM, RMSPROP, Words

FACTORS = {"exp_avg_sq_row": "row means", "exp_avg_sq_col": "column means"}
NORM = "its second moment is the norm of the whole gradient"
ANCHORED = "it recomputes the weights from their starting values and the sum of all gradients, which copies do not share"
UPDATES = {**ADAM, "exp_avg": "update"}  # the first moment is an average of normalised gradients

TIMM: dict[str, Words] = {
    "timm.AdaBelief": {**ADAM, "exp_avg_var": "second moment", "max_exp_avg_var": "second moment"},
    "timm.Adafactor": {**ADAM, **FACTORS, "exp_avg": "update", "RMS": "scalar"},
    "timm.AdafactorBigVision": {
        **ADAM,
        "exp_avg": "update",
        "exp_avg_sq_r": "row means",
        "exp_avg_sq_c": "column means",
    },
    "timm.AdamP": ADAM,
    "timm.AdamWLegacy": ADAM,
    "timm.Adan": {**MOMENTS, "exp_avg_diff": "first moment", "neg_pre_grad": "first moment"},
    "timm.Adopt": UPDATES,
    "timm.Lamb": MOMENTS,
    "timm.LaProp": {**UPDATES, "exp_avg_lr_1": "scalar", "exp_avg_lr_2": "scalar"},
    "timm.Lars": MOMENTUM,
    "timm.Lion": {"exp_avg": "first moment"},
    "timm.Lookahead": {"lookahead_slow_buff": "weights"},  # kept in the state of the wrapped optimizer
    "timm.MADGRAD": {"step": "step count", "grad_sum_sq": "second moment", "s": "first moment", "x0": "weights"},
    "timm.Mars": {**ADAM, "last_grad": "first moment"},
    "timm.Muon": {**ADAM, **MOMENTUM, "exp_avg_sq beside momentum_buffer": "step length", "use_muon": "scalar"},
    "timm.NAdamLegacy": {**ADAM, "m_schedule": "scalar"},
    "timm.NAdamW": ADAM,
    "timm.NvNovoGrad": {"step": "step count", "exp_avg": "update", "exp_avg_sq": "scalar", "max_exp_avg_sq": "scalar"},
    "timm.RAdamLegacy": ADAM,
    "timm.RMSpropTF": RMSPROP,
    "timm.SGDP": {"momentum": "first moment"},
    "timm.SGDW": MOMENTUM,
}
SCHEDULE_FREE = {"z": "weights", "exp_avg_sq": "second moment"}
SCHEDULE_FREES: dict[str, Words] = {
    "schedulefree.AdamWScheduleFree": SCHEDULE_FREE,
    "schedulefree.RAdamScheduleFree": SCHEDULE_FREE,
    "schedulefree.SGDScheduleFree": SCHEDULE_FREE,
    "schedulefree.AdamWScheduleFreeClosure": SCHEDULE_FREE,
    "schedulefree.RAdamScheduleFreeClosure": SCHEDULE_FREE,
    "schedulefree.SGDScheduleFreeClosure": SCHEDULE_FREE,
}
BLOCKS1 = {"step": "step count", "state1": "first moment", "unorm_vec": "scalar"}
BLOCKS2 = {**BLOCKS1, "state2": "second moment"}
BITSANDBYTES: dict[str, Words] = {
    **{f"bitsandbytes.{name}{bits}": BLOCKS2 for name in ("Adam", "AdamW") for bits in ("", "8bit", "32bit")},
    **{f"bitsandbytes.Paged{name}{bits}": BLOCKS2 for name in ("Adam", "AdamW") for bits in ("", "8bit", "32bit")},
    **{f"bitsandbytes.LAMB{bits}": BLOCKS2 for bits in ("", "8bit", "32bit")},
    **{f"bitsandbytes.{name}{bits}": BLOCKS1 for name in ("SGD", "Lion", "LARS") for bits in ("", "8bit", "32bit")},
    **{f"bitsandbytes.PagedLion{bits}": BLOCKS1 for bits in ("", "8bit", "32bit")},
    **{
        f"bitsandbytes.{name}{bits}": {**BLOCKS1, "state1": "second moment"}
        for name in ("RMSprop", "Adagrad")
        for bits in ("", "8bit", "32bit")
    },
}
OTHERS: dict[str, Words] = {
    **TIMM,
    **SCHEDULE_FREES,
    **BITSANDBYTES,
    **{f"torchao.{name}{bits}": ADAM for name in ("Adam", "AdamW") for bits in ("8bit", "4bit", "Fp8")},
    "torchao._AdamW": ADAM,
    "transformers.Adafactor": {**ADAM, **FACTORS, "RMS": "scalar"},
    "prodigyopt.Prodigy": {**MOMENTS, "step": "scalar", "s": "first moment", "p0": "weights"},  # `step` corrects no bias here
    "apex.FusedAdam": MOMENTS,
    "apex.FusedLAMB": MOMENTS,
    "apex.FusedSGD": MOMENTUM,
}

OTHERS_NO_COPIES: dict[str, str] = {
    "timm.MADGRAD": ANCHORED,
    "timm.NvNovoGrad": NORM,
}

OTHERS_REFUSED: dict[str, str] = {
    "timm.Adahessian": "it keeps an estimate of the Hessian as an attribute of each parameter",
    "timm.Kron": "its preconditioners are triangular factors that it fits at random steps, for which there is no rule",
    "apex.FusedNovoGrad": "it keeps the norms of all gradients of a group in one tensor",
    "torchao.CPUOffloadOptimizer": "it keeps a copy of every parameter, of the previous size, in another optimizer",
}
