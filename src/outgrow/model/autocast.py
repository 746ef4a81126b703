"""Autocast: a growth inside `torch.autocast` is checked in the model's own precision, and leaves no cast of old weights behind.

Autocast caches the casts of weights until its outermost region ends. A cast made before a growth has the old shape and values,
and one made without gradients disconnects the weight from the loss. So the cache is cleared after every pass of ours and after
the growth. With autocast's rounding an error of a tenth would pass the check, so the model runs without autocast, unless its
code needs it (e.g. for an input in half precision).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from outgrow.model.example import Example, call, tensors_in
from outgrow.model.sandbox import tensors_of, untouched


@contextlib.contextmanager
def own_precision(model: nn.Module, example: Example) -> Iterator[None]:
    """Disable autocast inside the context if the model runs without it; in any case disable autocast's cache."""
    kinds = {tensor.device.type for tensor in (*tensors_of(model).values(), *tensors_in(example))}
    active = [kind for kind in sorted(kinds) if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)]
    if not active:
        yield
        return
    on = not _runs_without(model, example, active)
    try:
        with _autocast(active, on):
            yield
    finally:
        torch.clear_autocast_cache()


@contextlib.contextmanager
def _autocast(kinds: list[str], on: bool) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, torch.get_autocast_dtype(kind), enabled=on, cache_enabled=False))
        yield


def _runs_without(model: nn.Module, example: Example, kinds: list[str]) -> bool:
    try:
        with untouched(model), torch.no_grad(), _autocast(kinds, on=False):
            model.eval()
            call(model, example)
    except Exception:
        return False
    return True
