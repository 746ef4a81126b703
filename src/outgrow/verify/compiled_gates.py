"""Gates in a compiled wrapper: torch may leave them out, so what the user calls is compared too.

A gate is a forward hook. `torch.compile(DistributedDataParallel(nn.Sequential(…)))` runs the modules of the nn.Sequential
without their hooks, so that a block that should fade in is there at once. The module inside computes what it should, and a
check of it sees nothing. `DistributedDataParallel(torch.compile(…))` runs the hooks.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from outgrow.errors import ParallelError, Problem
from outgrow.model.example import Example, call, outputs_in
from outgrow.model.sandbox import untouched
from outgrow.modules.gates import gates_of
from outgrow.verify.outputs import error, real_numbers

CLOSE = 1e-3  # of the largest output: a compiled model rounds otherwise
WAY_OUT = "compile the module, then wrap it: DistributedDataParallel(torch.compile(model)); or leave fade= out"


def compiled_around(given: Any) -> DistributedDataParallel | None:
    """The DistributedDataParallel wrapper in a compiled model; None if there is none, or if the model in it is compiled."""
    inner = getattr(given, "_modules", {}).get("_orig_mod")
    while inner is not None and not isinstance(inner, DistributedDataParallel):
        inner = inner._modules.get("_orig_mod")
    return inner


def check_fading(given: Any, transforms: Iterable[Any]) -> None:
    """Refuse, before a run starts, growths whose gates the compiled wrapper would leave out."""
    wrapper = compiled_around(given)
    fading = [one for one in transforms if getattr(one, "fade", None) and not hasattr(one, "patterns")]
    if wrapper is not None and isinstance(wrapper.module, nn.Sequential) and fading:
        raise _refusal(wrapper, f"{type(fading[0]).__name__} with fade={fading[0].fade} holds a new block back by one")


@torch.no_grad()
def check_gates(given: Any, model: nn.Module, example: Example) -> None:
    """Compare what a compiled wrapper computes with what the model in it does, if there are gates. Costs one compilation."""
    wrapper = compiled_around(given)
    if wrapper is None or not gates_of(model):
        return
    outputs = []
    with suppress(Exception), untouched(model), torch.compiler.set_stance("default"):  # what does not compile fails in training
        model.eval()
        compiled: Any = torch.compile(wrapper, backend="eager")
        for one in (model, compiled):
            outputs.append(real_numbers([tensor.detach() for tensor in outputs_in(call(one, example))]))
    if len(outputs) == 2 and (apart := error(*outputs)) > CLOSE:
        raise _refusal(wrapper, f"with its gates left out, the compiled model is off by {apart:.1e} of its largest output")


def _refusal(wrapper: DistributedDataParallel, found: str) -> ParallelError:
    where = f"torch.compile(DistributedDataParallel({type(wrapper.module).__name__}))"
    reason = f"torch runs the modules in it without their forward hooks; {found}"
    return ParallelError("the compiled model would not fade in what is new", [Problem(where, reason, WAY_OUT)])
