"""Warn when the weights of a model are written during a fade by a function that does not save the fade.

A gate (see `modules/gates.py`) is not part of the state dict: with these weights, another library computes the outputs that the
model will have at the end of the fade, not its present ones. `outgrow.save`, `Run.save` and the checkpoints of the trainers'
callbacks save the gate. `save_pretrained` and `save_model` (of Transformers and Accelerate) do not, so a hook on the module
behind the gate warns when one of them reads the state dict.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch import nn

WRITERS = ("save_pretrained", "save_model")  # functions that write weights for use without outgrow
KEEPERS = ("_save_checkpoint",)  # of the Trainer: next to its checkpoint is outgrow.pt, which contains the fade
KEPT = "outgrow.save and outgrow.load keep the fade"


def warn_when_written(module: nn.Module) -> None:
    """Make a module warn when its weights are written without the fade."""
    if warn_if_written not in module._state_dict_pre_hooks.values():
        module.register_state_dict_pre_hook(warn_if_written)


def stop_warning(module: nn.Module) -> None:
    for key in [key for key, hook in module._state_dict_pre_hooks.items() if hook is warn_if_written]:
        del module._state_dict_pre_hooks[key]


def warn_if_written(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """The hook: warn if the state dict is read by one of `WRITERS`."""
    callers = list(_callers())
    writer = next((name for name in callers if name in WRITERS), None)
    hooks: list[Any] = [*module._forward_hooks.values(), getattr(module, "gate", None)]
    gates = [hook for hook in hooks if hasattr(hook, "steps") and hasattr(hook, "done")]
    left = max((gate.steps - gate.done for gate in gates), default=0)
    if writer is not None and left > 0 and not any(name in KEEPERS for name in callers):
        warnings.warn(
            f"{writer} writes weights without the fade in progress: loaded elsewhere, the model computes something "
            f"else than now. Train {left} more steps first, or use outgrow.save: {KEPT}",
            stacklevel=2,
        )


def _callers() -> Iterable[str]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


def fading(gates: Iterable[Any]) -> str:
    """The report line on fades in progress; empty if there are none."""
    left = max((gate.steps - gate.done for gate in gates), default=0)
    if left <= 0:
        return ""
    return f"fading in for {left} more steps: until then a plain state_dict, loaded elsewhere, computes something else ({KEPT})"


def warn_at_the_end(gates: Iterable[Any]) -> None:
    """Warn if training ends during a fade."""
    notice = fading(gates)
    if notice:
        warnings.warn(f"training has ended during a fade, {notice}. Let the last fade end before training does", stacklevel=3)
