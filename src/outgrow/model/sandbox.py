"""Run a model without side effects: with other tensors or kernels, and with everything restored afterwards."""

from __future__ import annotations

import contextlib
import random
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from threading import RLock, get_ident
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from outgrow.model.walk_modules import all_modules

REGISTERED = ("_parameters", "_buffers", "_modules")
CONTAINERS = {dict, OrderedDict, list, set}
_TURN = RLock()  # random state and choice of kernels are global to the process: one thread at a time, which restores them


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; a tied tensor under its first name."""
    kind = type(model)
    if kind.named_parameters is not nn.Module.named_parameters or kind.named_buffers is not nn.Module.named_buffers:
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}
    parameters: dict[int, tuple[str, Tensor]] = {}  # both in one walk: this is called often
    buffers: dict[int, tuple[str, Tensor]] = {}
    for path, module in all_modules(model):
        prefix = f"{path}." if path else ""
        held: tuple[tuple[dict[int, tuple[str, Tensor]], Mapping[str, Tensor | None]], ...]
        held = (parameters, module._parameters), (buffers, module._buffers)
        for found, own in held:
            for name, tensor in own.items():
                if tensor is not None:
                    found.setdefault(id(tensor), (f"{prefix}{name}", tensor))
    return dict((*parameters.values(), *buffers.values()))


@contextlib.contextmanager
def substituted(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace the tensors of a model's modules by others, by name, inside the context."""
    twins = {id(tensor): tensors[name] for name, tensor in tensors_of(model).items()}
    undo: list[tuple[dict[str, Any], str, Any]] = []
    flats: list[tuple[nn.RNNBase, list[Any]]] = []
    try:
        for _, module in all_modules(model):
            groups: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for group in groups:
                for name, held in list(group.items()):
                    if held is not None and id(held) in twins:
                        undo.append((group, name, held))
                        group[name] = twins[id(held)]
            if isinstance(module, nn.RNNBase):
                flats.append((module, module._flat_weights))
                module._flat_weights = [twins.get(id(weight), weight) for weight in module._flat_weights]
        yield
    finally:
        for group, name, tensor in reversed(undo):
            group[name] = tensor
        for module, weights in flats:
            module._flat_weights = weights


@contextlib.contextmanager
def untouched(model: nn.Module, buffers: bool = True) -> Iterator[None]:
    """Undo afterwards what a forward pass inside the context changes: modes, batch statistics, caches, random state.

    Lists, dicts and sets of modules are restored in place instead of replaced: other objects may refer to them too. Hooks that
    the pass registers are removed as well: Transformers adds some at a model's first pass and sets a flag on the model; if only
    the flag were removed, it would add them a second time.
    Modules that the pass exchanges are put back: BigBird-Pegasus takes another attention for short inputs from then on.
    `buffers`: whether the pass uses the model's own buffers, and may write into them.
    """
    attributes = [(now := vars(module), dict(now)) for _, module in all_modules(model)]
    contents = [
        (value, type(value)(value) if value else ())  # most are empty
        for _, before in attributes
        for name, value in before.items()
        if type(value) in CONTAINERS and name not in REGISTERED
    ]
    children = [(now["_modules"], dict(now["_modules"])) for now, _ in attributes]
    written = [(buffer, buffer.detach().clone()) for buffer in model.buffers()] if buffers else []
    with random_state():
        try:
            yield
        finally:
            for now, before in attributes:
                now.clear()
                now.update(before)
            for modules, present in children:
                if modules != present:
                    modules.clear()
                    modules.update(present)
            for value, items in contents:
                if value or items:
                    value.clear()
                    value.extend(items) if isinstance(value, list) else value.update(items)
            with torch.no_grad():
                for buffer, value in written:
                    buffer.copy_(value)
            torch.clear_autocast_cache()  # casts made without gradients


def forget_caches(model: nn.Module) -> None:
    """Clear the caches that modules keep between eval passes: switching to train mode clears them."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train()
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def random_state() -> Iterator[None]:
    """Restore the random state of torch, numpy and Python afterwards."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    with _TURN, torch.random.fork_rng(devices=devices):
        states = random.getstate(), np.random.get_state()
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def seed_everything(seed: int) -> None:
    """Set the random state of torch, numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextlib.contextmanager
def precise() -> Iterator[None]:
    """Compute without gradients, and without TF32, whose rounding would hide differences."""
    with _TURN, torch.no_grad(), torch.backends.cudnn.flags(True, benchmark=False, deterministic=False, allow_tf32=False):
        matmul_tf32 = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = matmul_tf32


@contextlib.contextmanager
def elementary() -> Iterator[None]:
    """Run composite layers as the elementary operators for which there are rules."""
    without_cudnn = torch.backends.cudnn.flags(enabled=False)
    with _TURN, torch.no_grad(), sdpa_kernel(SDPBackend.MATH), _without_onednn(), without_cudnn, _plain_weight_norm():
        fastpath = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fastpath)


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@contextlib.contextmanager
def _plain_weight_norm() -> Iterator[None]:
    """Compute weight norm as a division instead of one fused kernel; in this thread only."""
    places = [torch, sys.modules["torch.nn.utils.weight_norm"]]
    fused = [getattr(place, "_weight_norm") for place in places]  # noqa: B009
    thread = get_ident()

    def plain(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
        if get_ident() != thread:
            result: Tensor = fused[0](v, g, dim)
            return result
        return v * (g / torch.norm_except_dim(v, 2, dim))

    try:
        for place in places:
            setattr(place, "_weight_norm", plain)  # noqa: B010
        yield
    finally:
        for place, function in zip(places, fused, strict=True):
            setattr(place, "_weight_norm", function)  # noqa: B010
