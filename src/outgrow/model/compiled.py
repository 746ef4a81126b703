"""Compiled models: a growth works on the Python code, and has what was compiled for the old shapes forgotten.

Dynamo compiles a function again when the shapes of the parameters it uses have changed, but only eight times: then it gives up
without a word and the model runs uncompiled from there on. `torch._dynamo.reset()` starts the count anew. It is for the whole
process, so it is called only if something has been compiled since the last time; whether that was this model can't be asked,
since a compiled training step, or a compiled optimizer step, does not tell what it closes over.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from threading import Lock
from typing import Any

import torch

COMPILED = ("forward", "training_step", "validation_step", "test_step", "predict_step")  # of a LightningModule


class _Eager:
    """Torch's stance is the process's: the first of several threads changes it, the last puts it back."""

    def __init__(self) -> None:
        self.lock, self.users, self.stance = Lock(), 0, contextlib.ExitStack()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self.lock:
            if not self.users:
                self.stance.enter_context(torch.compiler.set_stance("force_eager"))
            self.users += 1
        try:
            yield
        finally:
            with self.lock:
                self.users -= 1
                if not self.users:
                    self.stance.close()


_EAGER = _Eager()


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Let compiled modules run as the Python code they were made from, for a while."""
    if "torch._dynamo" not in sys.modules:  # torch.compile imports it: nothing is compiled
        yield
        return
    with _EAGER():
        yield


def forget_compiled() -> None:
    """After a growth: what is compiled will be compiled again, for the new shapes."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return
    convert = sys.modules.get("torch._dynamo.convert_frame")
    codes = [getattr(convert, name, None) for name in ("input_codes", "output_codes")]
    if any(getattr(seen, "seen", True) for seen in codes):
        dynamo.reset()


@contextlib.contextmanager
def as_written(module: Any) -> Iterator[None]:
    """A LightningModule without what Lightning has put on it for `torch.compile`, for a while.

    `trainer.fit(torch.compile(module))` replaces the module's `forward` and its steps by compiled functions, which call the
    module that they were made from, also in a copy of it. A rehearsal on a copy would see nothing of that copy run.
    """
    context = vars(module).get("_compiler_ctx")
    if context is None:
        yield
        return
    names = [name for name in COMPILED if name in vars(module)]
    kept = {name: vars(module).pop(name) for name in ("_compiler_ctx", *names)}
    calls = {name: context[f"original_{name}"] for name in names}
    kind = type(module)
    own = {name: call for name, call in calls.items() if getattr(call, "__func__", None) is not getattr(kind, name)}
    vars(module).update({**own, "_compiler_ctx": None})
    try:
        yield
    finally:
        vars(module).update(kept)
