"""Compiled models: a growth works on the Python code, and discards the code compiled for the old shapes.

Dynamo recompiles a function when the shapes of its parameters have changed, but only eight times: then it gives up silently and
the model runs uncompiled. `torch._dynamo.reset()` resets the count. It affects the whole process, so it is called only if
something has been compiled since the last reset; whether that was this model is not known, since a compiled training step or
optimizer step does not expose the model that it refers to.
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
    """Torch's stance is global to the process: the first of several threads changes it, the last restores it."""

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
    """Run compiled modules as the original Python code inside the context."""
    if "torch._dynamo" not in sys.modules:  # torch.compile imports it: nothing is compiled
        yield
        return
    with _EAGER():
        yield


def forget_compiled() -> None:
    """After a growth: discard compiled code, so that it is compiled again for the new shapes."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return
    convert = sys.modules.get("torch._dynamo.convert_frame")
    codes = [getattr(convert, name, None) for name in ("input_codes", "output_codes")]
    if any(getattr(seen, "seen", True) for seen in codes):
        dynamo.reset()


@contextlib.contextmanager
def without_compiled_steps(module: Any) -> Iterator[None]:
    """Remove the compiled functions that Lightning has set on a LightningModule, inside the context.

    `trainer.fit(torch.compile(module))` replaces the module's `forward` and its steps by compiled functions. These call the
    original module, even from a copy, so a dry run on a copy would not run that copy.
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
