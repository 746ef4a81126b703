"""The configuration of an upcycled model: that of the dense model, and the fields for experts.

Comparing outputs on an example does not show everything (a sliding window is longer than most examples). So every field of the
dense configuration must have the same value in the new one, or no effect.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from outgrow.errors import MethodError, Problem
from outgrow.upcycling.families import BY_TENSORS, TOP_K, UNDECLARED, UNUSED, Experts

ABOUT = {"transformers_version", "architectures", "model_type", "dtype", "torch_dtype", "_name_or_path"}
LAYER_KINDS = ("layer_types", "max_window_layers", "use_sliding_window", "sliding_window")
PRIVATE = ("_attn_implementation",)


def dense_to_experts(model: Any, kind: Any, family: Experts, experts: Mapping[str, Any]) -> Any:
    """The configuration for the class `kind`; MethodError if it can't describe what the dense model computes.

    experts: fields for the number and the size of experts.
    """
    old, new_class = model.config, kind.config_class
    there = {one.name for one in dataclasses.fields(new_class)}
    declared = {one.name for one in dataclasses.fields(type(old))}
    values = {name: getattr(old, name) for name in (*declared, *vars(old)) if not name.startswith("_") and name not in ABOUT}
    passed = {name: value for name, value in values.items() if name in there or name not in declared or name in UNDECLARED}
    own = {**family.fixed, **experts, **_windows(old, there)}
    new = new_class(**copy.deepcopy({**passed, **own}))
    exempt = {*own, *UNUSED, *BY_TENSORS, *LAYER_KINDS}
    problems = [
        Problem(f"config.{name}", f"{value!r} has no place in {new_class.__name__}, and may change the function")
        for name, value in values.items()
        if name not in exempt and getattr(new, name, None) != value
    ]
    if problems:
        raise MethodError(f"{type(model).__name__} can't become {kind.__name__}", problems)
    return _with_private(old, new)


def more_experts(model: Any, fields: Mapping[str, Any]) -> Any:
    """The configuration of a mixture of experts with other numbers and sizes of experts."""
    new = copy.deepcopy(model.config)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def fields_for(family: Experts, count: int, top_k: int, size: int) -> dict[str, int]:
    """Fields of a configuration: number of experts, how many are chosen, hidden units of each."""
    return {family.count: count, TOP_K: top_k, family.size: size}


def _with_private(old: Any, new: Any) -> Any:
    new.dtype = old.dtype
    for name in PRIVATE:
        if getattr(old, name, None) is not None:
            setattr(new, name, getattr(old, name))
    return new


def _windows(old: Any, there: set[str]) -> dict[str, Any]:
    """Fields for sliding windows: the dense model has one kind of attention per layer, the new class maybe one in all."""
    if not hasattr(old, "sliding_window"):
        return {"sliding_window": None} if "sliding_window" in there and "use_sliding_window" not in there else {}
    if "layer_types" not in {one.name for one in dataclasses.fields(type(old))}:
        return {"sliding_window": old.sliding_window}
    kinds = set(old.layer_types)
    slides = {"use_sliding_window": kinds != {"full_attention"}}
    if "layer_types" in there:
        window = {"sliding_window": old.sliding_window} if slides["use_sliding_window"] else {}
        return {**slides, **window, "layer_types": list(old.layer_types)}
    if len(kinds) > 1 or kinds - {"full_attention", "sliding_attention"}:
        reason = (
            f"layers differ ({', '.join(sorted(kinds))}), and the class with experts has one kind of attention in all layers"
        )
        raise MethodError("the attention of the model can't be expressed", [Problem("config.layer_types", reason)])
    return {**slides, "sliding_window": old.sliding_window}
