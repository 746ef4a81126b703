"""The optimizers of torch.optim, and sets of state keys that other libraries share with them."""

from __future__ import annotations

from collections.abc import Mapping

Words = Mapping[str, str]

MOMENTS = {"exp_avg": "first moment", "exp_avg_sq": "second moment", "max_exp_avg_sq": "second moment"}
ADAM = {"step": "step count", **MOMENTS}
MOMENTUM = {"momentum_buffer": "first moment"}
RMSPROP = {
    "step": "step count",
    "square_avg": "second moment",
    "grad_avg": "first moment",
    "momentum_buffer": "update",  # of g / √square_avg
}

TORCH: dict[str, Words] = {
    "torch.SGD": MOMENTUM,
    "torch.Adam": ADAM,
    "torch.AdamW": ADAM,  # a class of its own up to torch 2.6
    "torch.NAdam": {**ADAM, "mu_product": "scalar"},
    "torch.RAdam": ADAM,
    "torch.SparseAdam": ADAM,
    "torch.Adamax": {"step": "step count", "exp_avg": "first moment", "exp_inf": "magnitude"},
    "torch.Adagrad": {"step": "step count", "sum": "second moment"},
    "torch.Adadelta": {"step": "step count", "square_avg": "second moment", "acc_delta": "step length"},
    "torch.RMSprop": RMSPROP,
    "torch.Rprop": {"step": "step count", "prev": "first moment", "step_size": "step length"},
    "torch.ASGD": {"step": "step count", "eta": "scalar", "mu": "scalar", "ax": "weights"},
    "torch.Muon": MOMENTUM,
    "torch.Adafactor": {
        "step": "step count",
        "row_var": "row means",
        "col_var": "column means",
        "variance": "second moment",
    },
}

TORCH_REFUSED: dict[str, str] = {
    "torch.LBFGS": "LBFGS remembers past steps as flat vectors over all parameters, which can't be grown",
}
