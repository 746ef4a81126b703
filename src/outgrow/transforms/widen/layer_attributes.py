"""Attributes of torch.nn's layers, and of layers outside it, that follow from the shapes of their own tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from outgrow.analysis.peft_adapters import of_wrappers
from outgrow.growth_plan.plan import Setting
from outgrow.model.sandbox import tensors_of
from outgrow.transforms.widen.predict_shapes import Prediction


def known_settings(
    model: nn.Module,
    before: Mapping[str, Sequence[int]],
    after: Mapping[str, Sequence[int]],
    prediction: Prediction,
) -> list[Setting]:
    """Settings for attributes of torch.nn's layers (and of subclasses) that follow from the shapes of their own tensors."""
    settings: list[Setting] = []
    grouped: dict[str, tuple[int, int]] = {}
    for op in prediction.anatomy.reading.trace.ops:
        groups = prediction.groups(op.index)
        if groups is not None:
            grouped[op.module] = groups
    tied = {id(tensor): name for name, tensor in tensors_of(model).items()}
    for path, module in model.named_modules():
        new: dict[str, tuple[int, ...]] = {}
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            full = tied.get(id(tensor), "")
            if full in after:
                new[name] = tuple(after[full])
        for name, value in _sizes(module, new, grouped.get(path)).items():
            old = vars(module).get(name)
            if old is not None and old != value:
                settings.append(Setting(path, name, old, value))
    return [*settings, *of_wrappers(model, settings)]


def _sizes(module: nn.Module, new: Mapping[str, tuple[int, ...]], groups: tuple[int, int] | None) -> dict[str, Any]:
    weight = new.get("weight")
    match module:
        case nn.Linear() if weight:
            return {"out_features": weight[0], "in_features": weight[1]}
        case nn.Bilinear() if weight:
            return {"out_features": weight[0], "in1_features": weight[1], "in2_features": weight[2]}
        case nn.modules.conv._ConvNd() if weight:
            count = groups[1] if groups is not None and groups[0] == module.groups else module.groups
            first, second = ("in_channels", "out_channels") if module.transposed else ("out_channels", "in_channels")
            return {first: weight[0], second: weight[1] * count, "groups": count}
        case nn.modules.batchnorm._NormBase() if new:
            return {"num_features": next(iter(new.values()))[0]}
        case nn.GroupNorm() if weight or groups:
            count = groups[1] if groups is not None and groups[0] == module.num_groups else module.num_groups
            return {
                "num_channels": weight[0] if weight else module.num_channels // module.num_groups * count,
                "num_groups": count,
            }
        case nn.LayerNorm() | nn.RMSNorm() if weight:
            return {"normalized_shape": weight}
        case nn.Embedding() | nn.EmbeddingBag() if weight:
            return {"num_embeddings": weight[0], "embedding_dim": weight[1]}
        case nn.PReLU() if weight:
            return {"num_parameters": weight[0]}
        case nn.RNNBase() if new:
            return _recurrent_sizes(module, new)
        case nn.MultiheadAttention() if "in_proj_weight" in new:
            width = new["in_proj_weight"][1]
            return {"embed_dim": width, "kdim": width, "vdim": width}
    if not isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)) and new:
        own = {
            name: tuple(t.shape) for name, t in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        }
        return _generic_sizes(module, own, new)
    return {}


def _recurrent_sizes(module: nn.RNNBase, new: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """weight_hh: (gates·hidden, hidden or projected), weight_ih: (gates·hidden, inputs), weight_hr: (projected, hidden)."""
    gates = {"LSTM": 4, "GRU": 3}.get(module.mode, 1)
    recurrent, inputs, projection = (new.get(f"weight_{name}_l0") for name in ("hh", "ih", "hr"))
    sizes = {
        "hidden_size": recurrent and recurrent[0] // gates,
        "input_size": inputs and inputs[1],
        "proj_size": projection and projection[0],
    }
    return {name: size for name, size in sizes.items() if size}


def _generic_sizes(module: nn.Module, old: Mapping[str, tuple[int, ...]], new: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Attributes of a layer outside torch.nn that equal a size of its own tensors, if the new size is unambiguous."""
    meaning: dict[int, set[int]] = {}
    for name, shape in old.items():
        for before, after in zip(shape, new.get(name, shape), strict=True):
            meaning.setdefault(before, set()).add(after)
    sizes: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name.startswith("_"):
            continue
        if type(value) is int and len(meaning.get(value, ())) == 1:
            sizes[name] = next(iter(meaning[value]))
        elif isinstance(value, (tuple, torch.Size)) and any(value == shape for shape in old.values()):
            match = {new.get(name, shape) for name, shape in old.items() if shape == tuple(value)}
            if len(match) == 1:
                sizes[name] = type(value)(next(iter(match)))
    return sizes
