"""Upcycling: a trained dense model becomes a mixture of experts that computes the same (`outgrow.upcycle`).

    configuration → an empty model of the new class → values of experts and routers → comparison of outputs

The result is another class, so it is a new model; the old one is not changed. See `expert_values.py` for the algebra.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outgrow.configuration.rebuild_from_config import EmptyOnMeta
from outgrow.errors import MethodError, Problem, SizeError, VerifyError
from outgrow.model.check_arguments import check_model, check_seed
from outgrow.model.example import Example
from outgrow.model.sandbox import random_state, tensors_of
from outgrow.model.unwrap import bare
from outgrow.upcycling.expert_values import Form
from outgrow.upcycling.families import TOP_K, Experts, class_for, family_of, mismatches
from outgrow.upcycling.given_model import from_names
from outgrow.upcycling.new_config import dense_to_experts, fields_for, more_experts
from outgrow.upcycling.new_tensors import Start, from_dense, from_experts
from outgrow.verify.outputs import FLOOR, before, differences, epsilon, run, sensitivity
from outgrow.wrong_arguments import usage

SHARED = ("zero", "dense")
ROUTER_LOGITS = "output_router_logits"


@dataclass(frozen=True)
class Upcycling:
    """The report of an upcycling: `model.upcycling` of its result.

    experts: per layer, and how many of them a token passes; None for a model that the user has built. error: the largest
    difference of an output on the example, relative to the largest output. limit: that of rounding. parameters: before and
    after.

    Example:
        >>> print(Upcycling(("LlamaForCausalLM", "MixtralForCausalLM"), (8, 2), True, 1.8e-7, 3.8e-6, (6_736, 28_496)))
        LlamaForCausalLM → MixtralForCausalLM: 8 experts per layer, 2 per token
        parameters: 6,736 → 28,496 (× 4.23)
        error: 1.8e-07 of the largest output (limit for rounding: 3.8e-06)
    """

    names: tuple[str, str]
    experts: tuple[int, int] | None
    exact: bool
    error: float
    limit: float
    parameters: tuple[int, int]

    def __str__(self) -> str:
        counts = "" if self.experts is None else f": {self.experts[0]} experts per layer, {self.experts[1]} per token"
        old, new = self.parameters
        limit = f" (limit for rounding: {self.limit:.1e})" if self.exact else ": this form does NOT preserve the function"
        return (
            f"{self.names[0]} → {self.names[1]}{counts}\n"
            f"parameters: {old:,} → {new:,} (× {new / old:.2f})\n"
            f"error: {self.error:.1e} of the largest output{limit}"
        )


@usage("outgrow.upcycle(model, example, experts=8, top_k=2)")
def upcycle(
    model: nn.Module,
    example: Example,
    experts: int = 8,
    top_k: int | None = None,
    *,
    granularity: int = 1,
    drop: float = 0.0,
    shared: str = "zero",
    seed: int = 0,
    into: nn.Module | None = None,
) -> Any:
    """A mixture of experts that computes what a dense model of Transformers does: Llama and Mistral become Mixtral, Qwen2
    becomes Qwen2-MoE, Qwen3 becomes Qwen3-MoE, OLMo2 becomes FlexOlmo.

    The result is a new model of the library's own class, on the same device and in the same dtype; `save_pretrained` writes it,
    and it loads without outgrow. The given model is not changed. Both are compared on the example before the call returns;
    `result.upcycling` is the report. For a model that has experts already, the result has more of them.

    Args:
        model: a dense model, or a mixture of experts (Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, FlexOlmo).
        example: inputs on which both are compared.
        experts: how many copies of the dense MLP; for a mixture of experts, a multiple of its experts, each of which then has
            as many copies.
        top_k: how many of these a token passes; 2 by default. For a mixture of experts: as many copies of each as before.
        granularity: slices of each of these experts; a token passes all slices of an expert at first. `experts=8, top_k=2,
            granularity=4` gives 32 experts of a quarter of the size, 8 of which a token passes.
        drop: part of each expert's hidden units that are drawn again (drop-upcycling, e.g. 0.5). This is NOT exact.
        shared: for Qwen2-MoE, whose layers have an expert that all tokens pass: "zero" if its output is zero at first, "dense"
            if it holds the dense MLP, and the output of the other experts is zero at first.
        seed: for routers and drawn values.
        into: for models of other classes: a model with experts, as its constructor made it. It is filled by the names of its
            tensors (see `docs/upcycling.md`), compared, and returned; the other options have no effect.

    Example:
        >>> upcycle(nn.Linear(2, 2), torch.zeros(1, 2))
        Traceback (most recent call last):
        ...
        outgrow.errors.MethodError: Linear can't be upcycled: no class with experts is known to compute the same
          - dense models of Transformers: llama and mistral → Mixtral, qwen2 → Qwen2Moe, qwen3 → Qwen3Moe, olmo2 → FlexOlmo
          - mixtures of experts that may get more experts: mixtral, qwen2_moe, qwen3_moe, olmoe, flex_olmo
          - other models: build the model with experts yourself, and pass it as into=
    """
    model = bare(model)
    if into is not None:
        return _filled_by_names(model, into, example)
    family, dense = family_of(model)
    check_model(model)
    check_seed(seed)
    _check_options(family, dense, experts, top_k, granularity, drop, shared)
    source: Any = model
    make = _from_dense if dense else _with_more
    new = make(source, family, experts, top_k, Form(experts, granularity, drop), shared, seed)
    counts = getattr(new.config, family.count), getattr(new.config, TOP_K)
    with _without_router_logits(source), _without_router_logits(new):
        vars(new)["upcycling"] = _report(source, new, counts, example, exact=not drop)
    return new


def _filled_by_names(model: nn.Module, into: nn.Module, example: Example) -> nn.Module:
    """Fill a model that the user has built; it is put back if it does not compute the same."""
    check_model(model)
    check_model(into)
    shared = {tensor.data_ptr() for tensor in tensors_of(model).values()} & {
        one.data_ptr() for one in tensors_of(into).values()
    }
    if into is model or shared - {0}:
        raise MethodError("into= has tensors of the model itself: build a new model for it")
    if known := mismatches(model, into):
        raise MethodError(f"{type(model).__name__} can't be upcycled to {type(into).__name__}", known)
    before_filling = {name: tensor.clone() for name, tensor in into.state_dict().items()}
    values, _ = from_names(model.state_dict(), into.state_dict(), type(into).__name__)
    try:
        into.load_state_dict({**before_filling, **values})
        vars(into)["upcycling"] = _report(model, into, None, example, exact=True)
    except BaseException:
        into.load_state_dict(before_filling)
        raise
    return into


def _from_dense(model: Any, family: Experts, experts: int, top_k: int | None, form: Form, shared: str, seed: int) -> Any:
    kind = class_for(model, family)
    size = _divided(model.config.intermediate_size, form.slices)
    fields: dict[str, Any] = fields_for(family, experts * form.slices, (2 if top_k is None else top_k) * form.slices, size)
    if family.shared is not None:
        fields[family.shared] = model.config.intermediate_size
    new = _empty(kind, dense_to_experts(model, kind, family, fields))
    start = Start(form, seed, float(model.config.initializer_range), shared)
    return _filled(model, new, from_dense(model.state_dict(), new, start))


def _with_more(model: Any, family: Experts, experts: int, top_k: int | None, form: Form, shared: str, seed: int) -> Any:
    config = model.config
    count, chosen = getattr(config, family.count), getattr(config, TOP_K)
    copies, rest = divmod(experts, count)
    if rest or (top_k is not None and top_k != chosen * copies):
        raise SizeError(
            f"experts={experts}, top_k={top_k}: the model has {count} experts, {chosen} of which a token passes",
            [
                Problem(
                    type(model).__name__,
                    "more experts are exact only if each of them has the same number of copies, and all copies of a chosen one "
                    "are chosen too: a single new expert would take the place of another one, or change all weights",
                    f"write experts={count * max(copies, 1)} without top_k, or granularity=2 for smaller experts",
                )
            ],
        )
    size = _divided(getattr(config, family.size), form.slices)
    form = Form(copies, form.slices, form.drop, shares=True)
    new = _empty(type(model), more_experts(model, fields_for(family, count * form.factor, chosen * form.factor, size)))
    return _filled(model, new, from_experts(model.state_dict(), new, form, seed))


def _check_options(
    family: Experts, dense: bool, experts: int, top_k: int | None, granularity: int, drop: float, shared: str
) -> None:
    for name, value in (("experts", experts), ("top_k", 1 if top_k is None else top_k), ("granularity", granularity)):
        if type(value) is not int or value < 1:
            raise SizeError(f"{name}={value!r}: write a whole number above 0")
    if dense and (2 if top_k is None else top_k) > experts:
        raise SizeError(f"top_k={2 if top_k is None else top_k}: there are only {experts} experts")
    if not isinstance(drop, (int, float)) or not 0 <= drop < 1:
        raise SizeError(f"drop={drop!r}: write the part of hidden units to draw again, from 0 to below 1")
    if shared not in SHARED:
        raise MethodError(f"shared={shared!r}: write one of {', '.join(map(repr, SHARED))}")
    if shared != "zero" and (family.shared is None or not dense):
        raise MethodError(f"shared={shared!r}: only a dense Qwen2 becomes a model with a shared expert")


def _divided(size: int, slices: int) -> int:
    if size % slices:
        raise SizeError(f"granularity={slices}: an expert has {size} hidden units, which is not a multiple of that")
    return size // slices


def _empty(kind: Any, config: Any) -> Any:
    """A model without memory for weights."""
    with random_state(), EmptyOnMeta():
        return kind(config)


def _filled(model: Any, new: Any, state: dict[str, torch.Tensor]) -> Any:
    """Give the new model its values, and what else the old one has: device, dtype, mode, frozen parameters."""
    new.load_state_dict(state, assign=True)
    new.tie_weights()
    device = next(model.parameters()).device
    new.to(device)
    new.train(model.training)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    for name, parameter in new.named_parameters():
        parameter.requires_grad_(name not in frozen)
    if getattr(model, "generation_config", None) is not None:
        new.generation_config = copy.deepcopy(model.generation_config)
    if any(parameter.dtype == torch.float64 for parameter in new.parameters()):
        new.set_experts_implementation("eager")  # torch has no grouped product in float64
    return new


@contextmanager
def _without_router_logits(model: Any) -> Iterator[None]:
    """Inside the context, a model does not return the logits of its routers, of which a new one has others."""
    returned = getattr(model.config, ROUTER_LOGITS, None)
    try:
        if returned is not None:
            setattr(model.config, ROUTER_LOGITS, False)
        yield
    finally:
        if returned is not None:
            setattr(model.config, ROUTER_LOGITS, returned)


def _report(model: Any, new: Any, counts: tuple[int, int] | None, example: Example, exact: bool) -> Upcycling:
    """Compare both models; VerifyError if an exact form differs."""
    base = before(model, example)
    try:
        after = run(new, example)
    except Exception as error:
        reason = f"it does not run on the example: {type(error).__name__}: {error}"
        way_out = "pass other inputs; or, if it is a grouped product, choose sizes of experts that are multiples of 16 bytes"
        raise VerifyError("the new model can't be compared", [Problem(type(new).__name__, reason, way_out)]) from error
    found, floor = max(differences(base, after)), FLOOR * epsilon(base.evaluated)
    limit = (
        max(floor, *(base.multiple * moved for moved in sensitivity(new, example, after))) if found > floor and exact else floor
    )
    if exact and not found <= limit:
        raise VerifyError(
            f"{type(new).__name__} differs from {type(model).__name__} by {found:.1e} of its largest output on the example, "
            f"where its own rounding allows {limit:.1e}: this is not exact for this model"
        )
    parameters = tuple(sum(one.numel() for one in each.parameters()) for each in (model, new))
    names = type(model).__name__, type(new).__name__
    return Upcycling(names, counts, exact, found, limit, (parameters[0], parameters[1]))
