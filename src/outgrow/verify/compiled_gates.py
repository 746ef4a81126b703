"""Gates in a compiled wrapper: torch may skip them, so the outputs of the wrapper are compared too.

A gate is a forward hook. `torch.compile(DistributedDataParallel(nn.Sequential(…)))` runs the modules of the nn.Sequential
without their hooks, so that a new block takes full effect at once instead of fading in. The module inside computes the right
outputs, so a check of the module does not detect this. `DistributedDataParallel(torch.compile(…))` runs the hooks.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from outgrow.errors import ParallelError, Problem
from outgrow.model.example import Example, call
from outgrow.model.kept_outputs import model_outputs
from outgrow.model.sandbox import untouched
from outgrow.modules.gates import gates_of
from outgrow.verify.outputs import as_real, error

CLOSE = 1e-3  # of the largest output: a compiled model rounds differently
COMPILE_INSIDE = "compile the module, then wrap it: DistributedDataParallel(torch.compile(model)); or leave fade= out"


def compiled_around(given: Any) -> DistributedDataParallel | None:
    """The DistributedDataParallel wrapper inside a compiled model; None if there is none."""
    inner = getattr(given, "_modules", {}).get("_orig_mod")
    while inner is not None and not isinstance(inner, DistributedDataParallel):
        inner = inner._modules.get("_orig_mod")
    return inner


def check_fading(given: Any, transforms: Iterable[Any]) -> None:
    """Refuse, before a run starts, growths whose gates the compiled wrapper would skip."""
    wrapper = compiled_around(given)
    fading = [one for one in transforms if getattr(one, "fade", None) and not hasattr(one, "patterns")]
    if wrapper is not None and isinstance(wrapper.module, nn.Sequential) and fading:
        raise _refusal(wrapper, f"{type(fading[0]).__name__} with fade={fading[0].fade} needs such a hook")


@torch.no_grad()
def check_gates(given: Any, model: nn.Module, example: Example) -> None:
    """Compare the outputs of a compiled wrapper with those of the model in it, if there are gates. Costs one compilation."""
    wrapper = compiled_around(given)
    if wrapper is None or not gates_of(model):
        return
    outputs = []
    with suppress(Exception), untouched(model), torch.compiler.set_stance("default"):  # training reports compile errors
        model.eval()
        compiled: Any = torch.compile(wrapper, backend="eager")
        for one in (model, compiled):
            outputs.append(as_real([tensor.detach() for tensor in model_outputs(call(one, example))]))
    if len(outputs) == 2 and (apart := error(*outputs)) > CLOSE:
        raise _refusal(wrapper, f"without its gates, the compiled model differs by {apart:.1e} of its largest output")


def _refusal(wrapper: DistributedDataParallel, found: str) -> ParallelError:
    where = f"torch.compile(DistributedDataParallel({type(wrapper.module).__name__}))"
    reason = f"torch runs the modules in it without their forward hooks; {found}"
    return ParallelError("the compiled model would not fade in the new blocks", [Problem(where, reason, COMPILE_INSIDE)])
