"""Which class of Transformers is the mixture of experts of which dense class, and the names of its configuration fields.

A pair matches if both classes have the same attention, norms and order of operations, so that they differ only in the MLP.
OLMo2 norms the output of a branch, and so does FlexOlmo; OLMoE norms its input, so no OLMoE computes what an OLMo2 does. Nor
what an OLMo does, which has no norms of queries and keys (`MISMATCHES`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outgrow.errors import MethodError, MissingError, Problem

TOP_K = "num_experts_per_tok"
NORMALISED = {"norm_topk_prob": True}  # weights of the chosen experts add up to 1


@dataclass(frozen=True)
class Experts:
    """A class with experts: the prefix of its class names, and the names of its configuration fields."""

    prefix: str
    count: str  # field for the number of experts
    size: str  # field for the hidden units of an expert
    shared: str | None = None  # field for the hidden units of an expert that all tokens pass
    fixed: Mapping[str, Any] = field(default_factory=dict)  # further fields of an upcycled model


MIXTRAL = Experts("Mixtral", "num_local_experts", "intermediate_size", fixed={"router_jitter_noise": 0.0})
QWEN2 = Experts(
    "Qwen2Moe",
    "num_experts",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    {**NORMALISED, "qkv_bias": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
)
QWEN3 = Experts(
    "Qwen3Moe", "num_experts", "moe_intermediate_size", fixed={**NORMALISED, "decoder_sparse_step": 1, "mlp_only_layers": []}
)
OLMOE = Experts("Olmoe", "num_experts", "intermediate_size")
FLEX_OLMO = Experts("FlexOlmo", "num_experts", "intermediate_size", fixed=NORMALISED)

BY_DENSE: Mapping[str, Experts] = {"llama": MIXTRAL, "mistral": MIXTRAL, "qwen2": QWEN2, "qwen3": QWEN3, "olmo2": FLEX_OLMO}
BY_SPARSE: Mapping[str, Experts] = {
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN2,
    "qwen3_moe": QWEN3,
    "olmoe": OLMOE,
    "flex_olmo": FLEX_OLMO,
}
OUTPUT_NORMS = "norms what attention and MLP return, x + norm(f(x)), where OLMoE norms what they read, x + f(norm(x))"
MISMATCHES = {  # dense class and class with experts that look alike: why no weights make them compute the same
    ("olmo2", "olmoe"): f"OLMo2 {OUTPUT_NORMS}; FlexOlmo is its class with experts",
    ("olmo3", "olmoe"): f"OLMo3 {OUTPUT_NORMS}",
    (
        "olmo",
        "olmoe",
    ): "OLMo subtracts the mean in its norms and has none of queries and keys; OLMoE has RMS norms, of these too",
}
UNUSED = ("pretraining_tp",)  # fields of dense configurations that no code reads
BY_TENSORS = ("attention_bias", "mlp_bias")  # fields that hold if all tensors have a place
UNDECLARED = ("head_dim",)  # a field that attention reads in all of these classes, declared or not


def kind_of(model: Any) -> str:
    """The name of a model's class in its library; "None" for other models."""
    return str(getattr(getattr(model, "config", None), "model_type", None))


def mismatches(model: Any, into: Any = None) -> list[Problem]:
    """Why a model can't become one of a class with experts that looks alike; of any class, if `into` is None."""
    found = {there: why for (here, there), why in MISMATCHES.items() if here == kind_of(model)}
    return [Problem(f"as {there}", why) for there, why in found.items() if into is None or there == kind_of(into)]


def family_of(model: Any) -> tuple[Experts, bool]:
    """The class with experts for a model, and whether the model is dense; MethodError for other models."""
    kind = kind_of(model)
    if kind in BY_SPARSE:
        return BY_SPARSE[kind], False
    if kind in BY_DENSE:
        return BY_DENSE[kind], True
    prefixes = dict.fromkeys(experts.prefix for experts in BY_DENSE.values())
    pairs = ((prefix, [dense for dense, experts in BY_DENSE.items() if experts.prefix == prefix]) for prefix in prefixes)
    text = ", ".join(f"{' and '.join(dense)} → {prefix}" for prefix, dense in pairs)
    raise MethodError(
        f"{type(model).__name__} can't be upcycled: no class with experts is known to compute the same",
        [
            *mismatches(model),
            Problem("dense models of Transformers", text),
            Problem("mixtures of experts that may get more experts", ", ".join(BY_SPARSE)),
            Problem("other models", "build the model with experts yourself, and pass it as into="),
        ],
    )


def class_for(model: Any, family: Experts) -> Any:
    """The class of the new model: that of the family with the same head."""
    import transformers

    name = type(model).__name__
    heads = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "Model")
    head = next((head for head in heads if name.endswith(head)), "")
    found = getattr(transformers, family.prefix + head, None) if head else None
    if found is None:
        raise MethodError(f"{name} can't be upcycled: Transformers has no {family.prefix} with the same head")
    if not hasattr(transformers, "core_model_loading"):
        raise MissingError("upcycling needs Transformers 5, in which the experts of a layer are one tensor")
    return found
