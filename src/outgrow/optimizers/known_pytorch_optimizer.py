"""The optimizers of pytorch_optimizer. Almost all of them count steps per group, not per parameter."""

from __future__ import annotations

from outgrow.optimizers.known_torch import MOMENTS, MOMENTUM, Words

NORMED = {"exp_grad_adanorm": "scalar"}
ADAMS: Words = {**MOMENTS, **NORMED, "exp_avg_var": "second moment", "max_exp_avg_var": "second moment"}
FACTORS = {"exp_avg_sq_row": "row means", "exp_avg_sq_col": "column means"}
UPDATES = {**ADAMS, "exp_avg": "update"}
ANCHORED = "it recomputes the weights from their starting values and the sum of all gradients, which copies do not share"
NORM = "its second moment is the norm of the whole gradient"
UNEVEN = "its state does not scale like a power of the gradient"
ANGLE = "it keeps the angle between whole gradients"
HESSIAN = "its state is computed from the Hessian, which does not scale like gradients"
PROJECTED = "it projects gradients to a basis of its own, for which there is no rule"

_ADAMS = (
    "AdaBelief AdaBound AdaGC AdamC AdamP AdamS AdamW StableAdamW ADOPT AdaNorm AdaPNM Aida Ano AvaGrad DiffGrad EXAdam "
    "Grams GrokFastAdamW Lamb LaProp Lion MARS MSVAG PAdam RAdam Ranger SimplifiedAdEMAMix Tiger Yogi AdEMAMix DualAdam AdaTAM "
    "Adan SWATS QHAdam AdamWSN"
).split()

PYTORCH_OPTIMIZER: dict[str, Words] = {
    **{f"pytorch_optimizer.{name}": ADAMS for name in _ADAMS},
    "pytorch_optimizer.A2Grad": {
        "alpha_k": "scalar",
        "v_k": "scalar",
        "v_kk": "scalar",
        "avg_grad": "first moment",
        "x_k": "weights",
    },
    "pytorch_optimizer.AccSGD": {"momentum_buffer": "weights"},
    "pytorch_optimizer.AdaDelta": {"square_avg": "second moment", "acc_delta": "step length"},
    "pytorch_optimizer.AdaFactor": {
        **MOMENTS,
        **FACTORS,
        "exp_avg": "update",
        "exp_avg_sq_hat": "second moment",
        "RMS": "scalar",
    },
    "pytorch_optimizer.AdaGC": {**ADAMS, "gamma": "scalar"},
    "pytorch_optimizer.Adai": {**MOMENTS, "beta1_prod": "step length"},
    "pytorch_optimizer.AdaHessian": {"exp_avg": "first moment", "exp_hessian_diag_sq": "second moment", "hessian": "fresh"},
    "pytorch_optimizer.AdaMax": {**ADAMS, "exp_inf": "magnitude"},
    "pytorch_optimizer.AdamG": {"m": "first moment", "v": "second moment", "r": "step length"},
    "pytorch_optimizer.AdaMod": {**ADAMS, "exp_avg_lr": "rate"},
    "pytorch_optimizer.AdaNorm": {**ADAMS, "exp_grad_norm": "scalar"},
    "pytorch_optimizer.AdaPNM": {**ADAMS, "neg_exp_avg": "first moment"},
    "pytorch_optimizer.AdaShift": {**MOMENTS, "grad_queue": "first moment"},
    "pytorch_optimizer.AdaSmooth": {"prev_param": "weights", "s": "update", "n": "step length", "exp_avg_sq": "second moment"},
    "pytorch_optimizer.AdaTAM": {**MOMENTS, "s": "update"},
    "pytorch_optimizer.AdEMAMix": {**ADAMS, "exp_avg_slow": "first moment"},
    "pytorch_optimizer.SimplifiedAdEMAMix": {**ADAMS, "num_sum": "scalar", "den_sum": "scalar"},
    "pytorch_optimizer.ADOPT": UPDATES,
    "pytorch_optimizer.AggMo": MOMENTUM,
    "pytorch_optimizer.AliG": MOMENTUM,
    "pytorch_optimizer.Amos": {"exp_avg": "update", "exp_avg_sq": "scalar", "decay": "scalar"},
    "pytorch_optimizer.ApolloDQN": {"exp_avg_grad": "first moment", "approx_hessian": "magnitude", "update": "update"},
    "pytorch_optimizer.ASGD": {},
    "pytorch_optimizer.BCOS": {"m": "first moment", "v": "second moment"},
    "pytorch_optimizer.CAME": {
        **MOMENTS,
        "exp_avg": "update",
        "exp_avg_sq_row": "row means",
        "exp_avg_sq_col": "column means",
        "exp_avg_res_row": "row means",
        "exp_avg_res_col": "column means",
        "exp_avg_sq_hat": "second moment",
        "RMS": "scalar",
    },
    "pytorch_optimizer.DAdaptAdam": {**MOMENTS, "s": "first moment"},
    "pytorch_optimizer.DAdaptAdan": {
        **MOMENTS,
        "s": "first moment",
        "exp_avg_diff": "first moment",
        "previous_grad": "first moment",
    },
    "pytorch_optimizer.DAdaptLion": {"exp_avg": "first moment", "s": "update"},
    "pytorch_optimizer.DAdaptSGD": {"z": "weights", "s": "first moment", "x0": "weights"},
    "pytorch_optimizer.Adan": {**MOMENTS, "exp_avg_diff": "first moment", "previous_grad": "first moment"},
    "pytorch_optimizer.DiffGrad": {**ADAMS, "previous_grad": "first moment"},
    "pytorch_optimizer.EmoLynx": {"exp_avg": "first moment"},
    "pytorch_optimizer.EmoNavi": MOMENTS,
    "pytorch_optimizer.FAdam": {"momentum": "update", "fim": "second moment"},
    "pytorch_optimizer.Fira": MOMENTS,
    "pytorch_optimizer.GaLore": MOMENTS,
    "pytorch_optimizer.APOLLO": MOMENTS,
    "pytorch_optimizer.Fromage": {},
    "pytorch_optimizer.Gravity": {"v": "first moment"},
    "pytorch_optimizer.GrokFastAdamW": {**ADAMS, "grok_exp_avg": "first moment"},
    "pytorch_optimizer.Kate": {"m": "step length", "b": "magnitude"},
    "pytorch_optimizer.Lamb": {**ADAMS, "weight_norm": "scalar", "adam_norm": "scalar", "trust_ratio": "scalar"},
    "pytorch_optimizer.LaProp": {
        **UPDATES,
        "exp_avg_lr_1": "scalar",
        "exp_avg_lr_2": "scalar",
        "exp_mean_avg_beta2": "first moment",
    },
    "pytorch_optimizer.LARS": MOMENTUM,
    "pytorch_optimizer.Lookahead": {"slow_params": "weights", "slow_momentum": "first moment", "backup_params": "weights"},
    "pytorch_optimizer.MADGRAD": {"grad_sum_sq": "second moment", "s": "first moment", "x0": "weights"},
    "pytorch_optimizer.MARS": {**ADAMS, "last_grad": "first moment"},
    "pytorch_optimizer.Muon": {**MOMENTS, **MOMENTUM},
    "pytorch_optimizer.AdaGO": {**MOMENTS, **MOMENTUM, "v": "scalar"},
    "pytorch_optimizer.AdaMuon": {**MOMENTS, "m": "first moment", "v": "step length"},
    "pytorch_optimizer.NorMuon": {**MOMENTS, **MOMENTUM, "second_momentum_buffer": "per row"},
    "pytorch_optimizer.NovoGrad": {"grads_ema": "scalar", "moments": "update"},
    "pytorch_optimizer.PID": {"grad_buffer": "first moment", "i_buffer": "first moment", "d_buffer": "first moment"},
    "pytorch_optimizer.PNM": {"pos_momentum": "first moment", "neg_momentum": "first moment"},
    "pytorch_optimizer.Prodigy": {**MOMENTS, "s": "first moment", "p0": "weights"},
    "pytorch_optimizer.QHAdam": {**ADAMS, "beta1_weight": "step count", "beta2_weight": "scalar"},
    "pytorch_optimizer.QHM": MOMENTUM,
    "pytorch_optimizer.Ranger": {**ADAMS, "slow_buffer": "weights"},
    "pytorch_optimizer.Ranger21": {
        "grad_ma": "first moment",
        "neg_grad_ma": "first moment",
        "variance_ma": "second moment",
        "max_variance_ma": "second moment",
        "lookahead_params": "weights",
    },
    "pytorch_optimizer.ROSE": {},
    "pytorch_optimizer.SAM": {},
    "pytorch_optimizer.ScheduleFreeAdamW": {"z": "weights", **MOMENTS},
    "pytorch_optimizer.ScheduleFreeRAdam": {"z": "weights", **MOMENTS},
    "pytorch_optimizer.ScheduleFreeSGD": {"z": "weights"},
    "pytorch_optimizer.SCION": {"d": "first moment"},
    "pytorch_optimizer.SCIONLight": {},
    "pytorch_optimizer.SGDP": {"momentum": "first moment"},
    "pytorch_optimizer.SGDSaI": {**MOMENTUM, "gsnr": "scalar"},
    "pytorch_optimizer.SGDW": MOMENTUM,
    "pytorch_optimizer.Shampoo": {**MOMENTUM, "pre_cond_*": "covariance", "inv_pre_cond_*": "inverse root"},
    "pytorch_optimizer.SignSGD": MOMENTUM,
    "pytorch_optimizer.SOAP": {
        **MOMENTS,
        "GG": "covariance",
        "Q": "basis",
        "precondition_frequency": "scalar",
        "shampoo_beta": "scalar",
    },
    "pytorch_optimizer.SophiaH": {"momentum": "first moment", "hessian_moment": "magnitude", "hessian": "fresh"},
    "pytorch_optimizer.SRMM": {"mov_avg_grad": "first moment", "mov_avg_param": "weights"},
    "pytorch_optimizer.StableAdamW": {**ADAMS, "kahan_comp": "update"},
    "pytorch_optimizer.StableSPAM": {**MOMENTS, "m_norm_t": "scalar", "v_norm_t": "scalar", "m_max_t": "scalar"},
    "pytorch_optimizer.SWATS": {**ADAMS, "exp_avg2": "scalar", "momentum_buffer": "first moment"},
    "pytorch_optimizer.TAM": {**MOMENTUM, "s": "update"},
    "pytorch_optimizer.VSGD": {"mug": "first moment", "bg": "second moment", "bhg": "second moment"},
}

PYTORCH_OPTIMIZER_NO_COPIES: dict[str, str] = {
    "pytorch_optimizer.MADGRAD": ANCHORED,
    "pytorch_optimizer.DAdaptSGD": ANCHORED,
    "pytorch_optimizer.NovoGrad": NORM,
    "pytorch_optimizer.Amos": NORM,
    "pytorch_optimizer.AdamG": UNEVEN,
    "pytorch_optimizer.ApolloDQN": UNEVEN,
    "pytorch_optimizer.Gravity": UNEVEN,
    "pytorch_optimizer.AdaMuon": "its second moment is that of orthogonalised matrices",
    "pytorch_optimizer.AdaSmooth": "it sums up how far each weight has moved",
    "pytorch_optimizer.VSGD": UNEVEN,
    "pytorch_optimizer.AdaTAM": ANGLE,
    "pytorch_optimizer.TAM": ANGLE,
    "pytorch_optimizer.AdaHessian": HESSIAN,
    "pytorch_optimizer.SophiaH": HESSIAN,
}

PYTORCH_OPTIMIZER_REFUSED: dict[str, str] = {
    "pytorch_optimizer.Conda": PROJECTED,
    "pytorch_optimizer.FTRL": "it computes the weights from the sum of all gradients, and new entries have no past gradients",
    "pytorch_optimizer.Adalite": "it keeps its second moment as factors of a form of its own",
    "pytorch_optimizer.AdamMini": "it keeps one second moment per block, by the names and sizes at its construction",
    "pytorch_optimizer.Alice": PROJECTED,
    "pytorch_optimizer.DASH": "it cuts parameters into blocks of a fixed size",
    "pytorch_optimizer.DAdaptAdaGrad": "the first update of new entries would be up to 12 times the largest one so far",
    "pytorch_optimizer.DeMo": "it keeps the part of each gradient that was not sent yet",
    "pytorch_optimizer.EmoFact": "it keeps its second moment as factors of a form of its own",
    "pytorch_optimizer.FOCUS": "it keeps an average of the weights that starts at zero",
    "pytorch_optimizer.Kron": "its preconditioners are triangular factors that it fits at random steps",
    "pytorch_optimizer.LoRARite": "it keeps bases for pairs of low-rank factors",
    "pytorch_optimizer.Magma": "it keeps data per parameter outside of its state",
    "pytorch_optimizer.MuonClip": "it keeps names of layers and norms of attention outside of its state",
    "pytorch_optimizer.Nero": "it keeps the weights of every unit at one norm, which new inputs change",
    "pytorch_optimizer.RACS": "it keeps its second moment as factors of a form of its own",
    "pytorch_optimizer.ScalableShampoo": "it keeps preconditioners of blocks of a fixed size in objects of its own",
    "pytorch_optimizer.SM3": "it keeps the largest squares along each axis, from which those of new entries do not follow",
    "pytorch_optimizer.SpectralSphere": "it keeps weights on a sphere, whose radius depends on their number",
    "pytorch_optimizer.SPlus": "it keeps an average of the weights that starts at zero, and bases of its own",
    "pytorch_optimizer.SPAM": "it keeps moments of a random part of each parameter",
    "pytorch_optimizer.SaRA": "it keeps moments of the smallest entries of each parameter only",
    "pytorch_optimizer.FlashAdamW": "it keeps quantised moments in a format of its own",
}
