"""Sub-net morphing: a new branch beside a layer or a stage, whose output is zero at first (Network Morphism, §3.6).

    m(x)  →  m(x) + b(x),   b zero by pairs, with dense weights (r2r), or by a last layer of zeros (netmorph)

Beside a module that contains layers, b is a copy of it, if that can be made zero. Beside a single layer, or if layers= or
hidden= is given, b is built: a layer like m, or one with the same stride as m, then activations and layers with kernels of
size one. An `outgrow.Parallel` with both replaces m.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from outgrow.apply.insert_modules import apply_insert
from outgrow.errors import MethodError, Problem, SelectionError, TraceError
from outgrow.exactness.identity_blocks import dissect_alone
from outgrow.exactness.zero_output import NotZero, Search, resolved
from outgrow.growth_plan.module_starts import Start, Write
from outgrow.growth_plan.plan import Change, Insert, Plan
from outgrow.model.module_calls import Call, calls_of
from outgrow.modules.blocks import CONVOLUTIONS, LAYERS, LINEAR, Parallel
from outgrow.optimizers.new_parameters import LEARNS, is_frozen
from outgrow.requests import Branch
from outgrow.text.plurals import counted
from outgrow.transforms.deepen.new_layers import LEAST_HIDDEN, surroundings
from outgrow.transforms.site_and_step import Site, Step


def branch_plan(site: Site, request: Branch) -> Step:
    """The plan that puts a branch beside a module, with its starting values."""
    model, example, path = site.model, site.example, request.beside
    try:
        module = model.get_submodule(path)
    except AttributeError:
        names = ", ".join([name for name, _ in model.named_modules() if name][:8])
        raise SelectionError(f"the model has no module {path!r}: it has {names} …") from None
    try:
        call = _only(calls_of(model, example, [path])[path])
        given, output = _tensors(call)
        there = list(module.children()) if isinstance(module, Parallel) else []
        main = there[0] if there else module
        made, writes = _branch(model, main, path, call, request, site.seed)
    except NotZero as reason:
        raise MethodError("no branch can be put there", [Problem(path, str(reason))]) from None
    count = max(len(there), 1)
    description = tuple(sorted(made.items()))
    insert = Insert(path, count, -1 if made else 0, str(count), "", 0, made=description, wraps=not there, beside=True)
    with site.trial() as journal:
        block = apply_insert(model, insert, journal, shared=True)
        try:
            calls_of(model, example, [insert.path])
        except TraceError as error:
            why = f"the code around it uses more than its output ({error.__cause__})"
            raise MethodError("no branch can be put there", [Problem(path, why)]) from None
        if made and request.exact and request.fade is None:
            try:
                writes = _zeros(block, Call((given,), output), request)
            except NotZero as reason:
                raise MethodError("no branch can be put there", [Problem(path, str(reason))]) from None
        thawed = is_frozen(block)
    draw = site.seed if request.kind == "random" and not made else None
    start = Start(draw, writes, gates=("",) if request.fade else (), steps=request.fade or 0)
    name = request.kind + (f", faded in over {counted(request.fade, 'step')}" if request.fade else "")
    change = Change(f"beside {path}", count, count + 1, name, request.exact, LEARNS if thawed else "")
    return Step((Plan((change,), (), seed=site.seed, inserts=(replace(insert, start=start),)),))


def _only(calls: Sequence[Call]) -> Call:
    if len(calls) != 1:
        raise NotZero("the example does not run it" if not calls else f"it runs {len(calls)} times in one pass")
    return calls[0]


def _tensors(call: Call) -> tuple[Tensor, Tensor]:
    """A module's first input, and its output; refused unless both are tensors of features."""
    example, output = call.example, call.output
    given = next(iter(example.values() if isinstance(example, dict) else example), None)
    if not isinstance(given, Tensor) or not isinstance(output, Tensor):
        raise NotZero("it does not turn a tensor into another tensor")
    if not given.is_floating_point() or min(given.ndim, output.ndim) < 2:
        raise NotZero("it does not turn features into features")
    return given, output


def _branch(
    model: nn.Module, main: nn.Module, path: str, call: Call, request: Branch, seed: int
) -> tuple[dict[str, Any], tuple[Write, ...]]:
    """The description of a branch to build; or, for a copy of the module, no description and the writes that make it zero."""
    wanted = request.layers or request.hidden or type(main).__name__ in LAYERS or not len(main._modules)
    reason = ""
    if request.kind == "copy" or not wanted:
        if not any(True for _ in main.parameters()):
            raise NotZero("it has no parameters, so that a copy of it would learn nothing: write method='random'")
        if request.kind in ("copy", "random"):
            return {}, ()
        try:
            return {}, _zeros(main, call, request)
        except NotZero as refusal:
            reason = f"a copy of it can't be made zero ({refusal}), and "
    first, dims, channels = _first(main, *_tensors(call), request.hidden, reason)
    activation, norm = surroundings(model, path, dims)
    made = {"kind": "branch", "first": first, "channels": channels, "layers": request.layers or 2, "dims": dims}
    return {**made, "norm": norm, "activation": activation, "seed": seed}, ()


def _zeros(block: nn.Module, given: Call, request: Branch) -> tuple[Write, ...]:
    """The writes that make a module's output zero."""
    anatomy = dissect_alone(block, given)
    search = Search(anatomy, pairs=request.kind != "netmorph")
    for output in anatomy.reading.trace.outputs:
        search.zero(output)
    return resolved(anatomy, search.found())


def _first(main: nn.Module, given: Tensor, output: Tensor, hidden: int | None, reason: str) -> tuple[dict[str, Any], int, int]:
    """The first layer of a branch (like `main`, or one with the same output shape), its dims, and its output channels."""
    kind = type(main).__name__
    if kind == "Linear" or (kind not in LAYERS and given.shape[:-1] == output.shape[:-1] and given.ndim < 4):
        channels = output.shape[-1]
        units = hidden or max(channels + channels % 2, LEAST_HIDDEN)
        return {"type": "Linear", "in_features": given.shape[-1], "out_features": units}, LINEAR, channels
    dims, channels = given.ndim - 2, output.shape[1]
    units = hidden or max(channels + channels % 2, LEAST_HIDDEN)
    ends = {"in_channels": given.shape[1], "out_channels": units}
    if kind in LAYERS:
        names = (
            "kernel_size",
            "stride",
            "padding",
            "dilation",
            "padding_mode",
            *(("output_padding",) if "Transpose" in kind else ()),
        )
        like = {name: getattr(main, name) for name in names}
        return {"type": kind, **ends, **{n: list(v) if isinstance(v, tuple) else v for n, v in like.items()}}, dims, channels
    if dims not in CONVOLUTIONS or output.ndim != given.ndim:
        raise NotZero(f"{reason}no layer turns {tuple(given.shape)} into {tuple(output.shape)}")
    strides = [max(1, -(-a // b)) for a, b in zip(given.shape[2:], output.shape[2:], strict=True)]
    made = tuple((size - 1) // stride + 1 for size, stride in zip(given.shape[2:], strides, strict=True))
    if made != tuple(output.shape[2:]):
        raise NotZero(f"{reason}no convolution with a stride turns {tuple(given.shape)} into {tuple(output.shape)}")
    return {"type": CONVOLUTIONS[dims].__name__, **ends, "kernel_size": 3, "stride": strides, "padding": 1}, dims, channels
