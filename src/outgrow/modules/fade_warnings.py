"""Warn where the weights of a model that is fading something in are written without the fade.

A gate (see `modules/gates.py`) is no part of the state dict: weights that are loaded by another library compute what the model
will compute at the end of the fade, not what it computes now. `outgrow.save`, `Run.save` and the checkpoints of the trainers'
callbacks keep the gate. `save_pretrained` and `save_model` (of Transformers and Accelerate) do not, so a hook on the module
that is held back warns when one of them takes the state dict.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch import nn

WRITERS = ("save_pretrained", "save_model")  # functions that write weights for others
KEEPERS = ("_save_checkpoint",)  # of the Trainer: beside its checkpoints lies outgrow.pt, which holds the fade
KEPT = "outgrow.save and outgrow.load keep the fade"


def remind(module: nn.Module) -> None:
    """Let a module warn when its weights are written for others."""
    if warn_if_written not in module._state_dict_pre_hooks.values():
        module.register_state_dict_pre_hook(warn_if_written)


def stop_reminding(module: nn.Module) -> None:
    for key in [key for key, hook in module._state_dict_pre_hooks.items() if hook is warn_if_written]:
        del module._state_dict_pre_hooks[key]


def warn_if_written(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """The hook: is the state dict taken for a file of another library?"""
    callers = list(_callers())
    writer = next((name for name in callers if name in WRITERS), None)
    hooks: list[Any] = [*module._forward_hooks.values(), getattr(module, "gate", None)]
    gates = [hook for hook in hooks if hasattr(hook, "steps") and hasattr(hook, "done")]
    left = max((gate.steps - gate.done for gate in gates), default=0)
    if writer is not None and left > 0 and not any(name in KEEPERS for name in callers):
        warnings.warn(
            f"{writer} writes weights without the fade that is under way: loaded elsewhere, the model computes something else "
            f"than it does now. Train {left} more steps first, or use outgrow.save: {KEPT}",
            stacklevel=2,
        )


def _callers() -> Iterable[str]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


def fading(gates: Iterable[Any]) -> str:
    """What a report says of a model with gates that are not open yet; nothing if there are none."""
    left = max((gate.steps - gate.done for gate in gates), default=0)
    if left <= 0:
        return ""
    return f"fading in for {left} more steps: until then a plain state_dict, loaded elsewhere, computes something else ({KEPT})"


def warn_at_the_end(gates: Iterable[Any]) -> None:
    """Warn if training ends while something fades in."""
    notice = fading(gates)
    if notice:
        warnings.warn(f"training has ended with something {notice}. Let the last fade end before training does", stacklevel=3)
