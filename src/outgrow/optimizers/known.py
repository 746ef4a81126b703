"""Tables of known optimizer classes: package and class → state key → word of `rules.py`. No library is imported for this."""

from __future__ import annotations

from collections.abc import Mapping

Words = Mapping[str, str]

MOMENTS = {"exp_avg": "first moment", "exp_avg_sq": "second moment"}
COUNTED = {"step": "step count", **MOMENTS}
ADAM = {**COUNTED, "max_exp_avg_sq": "second moment"}
MOMENTUM = {"momentum_buffer": "first moment"}
FACTORS = {"exp_avg_sq_row": "row means", "exp_avg_sq_col": "column means"}

TORCH: dict[str, Words] = {
    "torch.SGD": MOMENTUM,
    "torch.Adam": ADAM,
    "torch.NAdam": {**COUNTED, "mu_product": "scalar"},
    "torch.RAdam": COUNTED,
    "torch.SparseAdam": COUNTED,
    "torch.Adamax": {"step": "step count", "exp_avg": "first moment", "exp_inf": "magnitude"},
    "torch.Adagrad": {"step": "step count", "sum": "second moment"},
    "torch.Adadelta": {"step": "step count", "square_avg": "second moment", "acc_delta": "step length"},
    "torch.RMSprop": {
        "step": "step count",
        "square_avg": "second moment",
        "grad_avg": "first moment",
        "momentum_buffer": "update",
    },
    "torch.Rprop": {"step": "step count", "prev": "first moment", "step_size": "step length"},
    "torch.ASGD": {"step": "step count", "eta": "scalar", "mu": "scalar", "ax": "weights"},
    "torch.Muon": MOMENTUM,
    "torch.Adafactor": {
        "step": "step count",
        "row_var": "row means",
        "col_var": "column means",
        "variance": "second moment",
    },
    "transformers.Adafactor": {**COUNTED, **FACTORS, "RMS": "scalar"},
}

KNOWN: dict[str, Words] = {**TORCH}

REFUSED: dict[str, str] = {
    "torch.LBFGS": "LBFGS remembers past steps as flat vectors over all parameters, which can't be grown",
}
