"""Compiled models: a growth works on the Python code, and has what was compiled for the old shapes forgotten.

Dynamo compiles a function again when the shapes of the parameters it uses have changed, but only eight times: then it gives up
without a word and the model runs uncompiled from there on. `torch._dynamo.reset()` starts the count anew. It is for the whole
process, so it is called only if something has been compiled since the last time; whether that was this model can't be asked,
since a compiled training step, or a compiled optimizer step, does not tell what it closes over.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Let compiled modules run as the Python code they were made from, for a while."""
    if "torch._dynamo" not in sys.modules:  # torch.compile imports it: nothing is compiled
        yield
        return
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        # torch warns where a compiled part is watched by hooks that see all modules: they see the part and what it holds
        warnings.filterwarnings("ignore", "Using `torch.compile")
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
