"""Deepen a plain network: insert a new module behind a layer or an activation.

    r2r        y → y + f(y),  f a residual block's branch, zero with dense weights                    (R2DeeperR)
    residual   the same behind blocks of any kind, where r2r would copy one of the model's own
    net2net    y → ψ(I y),    exact where y = ψ(…) with an idempotent ψ, so that ψ(y) = y              (Net2DeeperNet)
    netmorph   W x → Q (Qᵀ W) x,  one layer as two dense ones, Q an orthogonal matrix                 (NetMorph)

In an nn.Sequential the new module is one more child. Elsewhere the module before it is put into an nn.Sequential of its own,
and the plan records the changed names.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from outgrow.analysis.analyse import dissect
from outgrow.analysis.rules.elementwise import UNARY
from outgrow.analysis.volumes import Anatomy
from outgrow.apply.insert_modules import apply_insert, numbering, wrap
from outgrow.errors import TraceError
from outgrow.exactness.identity_blocks import idempotent, identity_of
from outgrow.exactness.zero_output import NotZero, resolved
from outgrow.growth_plan.module_starts import Start
from outgrow.growth_plan.plan import Edit, Insert, Plan, Rotation
from outgrow.model.example import Example, call, outputs_in
from outgrow.model.journal import Journal
from outgrow.model.module_calls import Call, calls_of
from outgrow.model.sandbox import untouched
from outgrow.modules.blocks import CONVOLUTIONS, LINEAR, TRANSPOSED
from outgrow.modules.gates import PActivation
from outgrow.trace.evaluate_operator import base_name

LEAST_HIDDEN = 16  # hidden units of a residual block: a few pairs alone may all be dead behind a ReLU
NEW_LAYER_METHODS = ("r2r", "residual", "net2net", "netmorph")
RESIDUAL = ("r2r", "residual", "random")  # the last preserves the function only if it fades in
PLAIN_LAYERS = (nn.Linear, *CONVOLUTIONS.values(), *TRANSPOSED.values())
SIMPLE_ACTIVATIONS = (
    "ReLU GELU SiLU Tanh Sigmoid Hardswish Hardsigmoid ELU SELU CELU LeakyReLU Softplus Mish ReLU6 Softsign"
).split()
IDEMPOTENT = {"relu": "ReLU"}  # activations with ψ(ψ(x)) = ψ(x): operator → class


class Neighbours:
    """Facts about all modules of a model in their order, collected once for all places."""

    def __init__(self, model: nn.Module) -> None:
        self.held = Counter(id(child) for parent in model.modules() for child in parent._modules.values())
        self.owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
        self.last: dict[str, int] = {}  # by path: the index of the last module inside
        self.layered: list[bool] = []  # for each index, whether a linear layer or convolution comes at or before it
        self.activation: list[str] = []  # for each index, the last activation at or before it
        for place, (path, module) in enumerate(model.named_modules()):
            steps = path.split(".")
            self.last.update({".".join(steps[: length + 1]): place for length in range(len(steps))})
            self.layered.append(isinstance(module, PLAIN_LAYERS) or (place > 0 and self.layered[-1]))
            self.activation.append(
                type(module).__name__ if is_activation(module) else self.activation[-1] if self.activation else ""
            )


def behind(
    model: nn.Module, path: str, calls: Sequence[Call], anatomy: Anatomy, neighbours: Neighbours | None = None
) -> tuple[Tensor, dict[str, Any]]:
    """A module's output, and the description of a layer that can follow it; NotZero with the reason if none can.

    anatomy: of the model; it shows which axis of the output holds features.
    """
    if len(calls) != 1:
        raise NotZero("the example does not run it" if not calls else f"it runs {len(calls)} times in one pass")
    output, given = calls[0].output, calls[0].example
    if not isinstance(given, tuple) or len(given) != 1:
        how = f"with {len(given)} arguments" if len(given) > 1 else "by keyword"
        raise NotZero(
            f"a new layer could follow it only in an nn.Sequential, which passes one tensor on, and the model calls it {how}: "
            "name a layer inside it"
        )
    if not isinstance(output, Tensor) or not output.is_floating_point() or output.ndim < 2:
        raise NotZero("its output is not a tensor of features")
    module = model.get_submodule(path)
    outer = path.rpartition(".")[0]
    if isinstance(model.get_submodule(outer), PActivation):
        raise NotZero(f"it replaces {outer} once that has faded in, and a module behind it would get another name")
    around = neighbours or Neighbours(model)
    if around.held[id(module)] > 1:
        raise NotZero("the model holds it under several names, and may run it under another one, without the new module")
    if not around.layered[around.last[path]]:
        raise NotZero("no linear layer or convolution comes before it")
    dims = _dims(module, output, _labelled(anatomy, path))
    activation, norm = surroundings(model, path, dims, around)
    kernel = 3 if dims and min(output.shape[2:]) > 1 else 1
    channels = output.shape[1] if dims else output.shape[-1]
    return output, {"channels": channels, "dims": dims, "kernel": kernel, "norm": norm, "activation": activation}


def surroundings(model: nn.Module, path: str, dims: int, neighbours: Neighbours | None = None) -> tuple[str, bool]:
    """The last activation up to a module's end (ReLU if there is none), and whether its siblings include a batch norm."""
    around = neighbours or Neighbours(model)
    activation = around.activation[around.last[path]] or "ReLU"
    beside = model.get_submodule(path.rpartition(".")[0]).modules()
    return activation, dims > 0 and any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in beside)


def _labelled(anatomy: Anatomy, path: str) -> list[set[int]]:
    """The axes of a module's output that hold units of the model, one set per grid of labels."""
    value = anatomy.reading.trace.returned.get(path)
    return [] if value is None else [set(block.axes) for block in anatomy.reading.layouts[value]]


def _dims(module: nn.Module, output: Tensor, labelled: Sequence[set[int]]) -> int:
    """The number of spatial axes of a convolution behind a module; LINEAR for a linear layer over the last axis.

    A layer must not mix the positions of an image or a sequence, whose number depends on the input.
    """
    axes, last, dims = set().union(*labelled), output.ndim - 1, output.ndim - 2
    if not axes and isinstance(module, nn.Linear):  # a single channel carries no label
        axes = {last}
    elif not axes and isinstance(module, nn.modules.conv._ConvNd) and output.ndim == len(module.kernel_size) + 2:
        axes = {1}
    image = dims > 1 and set(range(1, output.ndim)) in labelled  # features laid out as channels and positions
    if last in axes and not image:
        return LINEAR
    if 1 in axes and dims in CONVOLUTIONS:
        return dims
    raise NotZero("it is not known which axis of its output holds features")


def is_activation(module: nn.Module) -> bool:
    """Whether a module is one of torch's activations that has no parameters, and can be made again without arguments."""
    return type(module).__name__ in SIMPLE_ACTIVATIONS and type(module) is getattr(nn, type(module).__name__)


def legal(
    model: nn.Module,
    path: str,
    calls: Sequence[Call],
    anatomy: Anatomy,
    stuck: Mapping[str, str],
    neighbours: Neighbours | None = None,
) -> dict[str, str]:
    """For each method, the reason why it is not exact behind a module; empty if it is exact.

    stuck: modules that can't be put into an nn.Sequential, and why.
    """
    around = neighbours or Neighbours(model)
    try:
        behind(model, path, calls, anatomy, around)
        if path in stuck:
            raise NotZero(stuck[path])
    except NotZero as reason:
        return dict.fromkeys(NEW_LAYER_METHODS, str(reason))
    module = model.get_submodule(path)
    bare = type(module) is nn.Sequential or not len(module._modules)
    return {
        "r2r": "" if bare else "an outgrow.ResidualBlock can follow it: write method='residual'",
        "residual": "",
        "net2net": _follows_activation(anatomy, path)[1],
        "netmorph": _split_refusal(module, around),
    }


def _follows_activation(anatomy: Anatomy, path: str) -> tuple[str, str]:
    """The idempotent activation that a module ends in; or why an identity layer with one can't follow it."""
    op = anatomy.maker.get(anatomy.reading.trace.returned.get(path, -1))
    if op is None or base_name(op) not in UNARY:
        return "", "it does not end in an activation: an identity layer behind it would need one that changes nothing there"
    if not idempotent(op):
        return "", f"its activation {op.name} is not idempotent: ψ(ψ(x)) is not ψ(x)"
    if base_name(op) not in IDEMPOTENT:
        return "", f"an identity layer is followed by a ReLU here, and {op.name} is another activation"
    return IDEMPOTENT[base_name(op)], ""


def _split_refusal(module: nn.Module, neighbours: Neighbours) -> str:
    """Why a layer can't be split into two; empty if it can."""
    if not isinstance(module, PLAIN_LAYERS):
        return "it is no linear layer or convolution, which could be split in two"
    if getattr(module, "groups", 1) > 1:
        return "it is a grouped convolution, which can't be the product of two dense ones"
    if neighbours.owners[id(module.weight)] > 1 or hasattr(module, "parametrizations"):
        return "its weight is shared or parametrized"
    return ""


def stands_alone(container: nn.Module) -> bool:
    """Whether a child of a module must be put into an nn.Sequential of its own before another module can follow it."""
    return type(container) is not nn.Sequential or numbering(container) is None


def unwrappable(
    model: nn.Module, example: Example, paths: Sequence[str], certain: tuple[type[Exception], ...] = (Exception,)
) -> dict[str, str]:
    """Modules that can't be put into an nn.Sequential, and why: the code around them uses more than their output.

    For example, torch's encoder layers read the weights of their linear layers. It is found by trying, together for modules at
    the same place of sister blocks. certain: errors of the model's code that prove this; others are raised.
    """
    alike: dict[Any, list[str]] = {}
    for path in paths:
        steps = path.split(".")
        around = [model.get_submodule(".".join(steps[:count])) for count in range(len(steps) + 1)]
        if stands_alone(around[-2]):
            names = ("#" if step.isdecimal() else step for step in steps)
            alike.setdefault((*names, *map(type, around)), []).append(path)
    return _stuck(model, example, list(alike.values()), certain)


def _stuck(
    model: nn.Module, example: Example, groups: Sequence[Sequence[str]], certain: tuple[type[Exception], ...]
) -> dict[str, str]:
    """Put all groups of modules into containers at once; if the model does not run then, try each half."""
    if not groups:
        return {}
    journal = Journal()
    try:
        for path in sorted((path for group in groups for path in group), key=lambda path: -path.count(".")):  # innermost first
            wrap(model, path, journal)
        calls_of(model, example, [])
    except TraceError as error:
        journal.undo()
        if not isinstance(error.__cause__, certain):
            raise
        if len(groups) == 1:
            why = str(error.__cause__).partition("\n")[0]
            return dict.fromkeys(groups[0], f"the code around it uses more than its output ({why})")
        middle = len(groups) // 2
        halves = groups[:middle], groups[middle:]
        return {path: why for half in halves for path, why in _stuck(model, example, half, certain).items()}
    finally:
        journal.undo()
    return {}


def plain_plan(
    model: nn.Module,
    example: Example,
    after: str,
    method: str,
    seed: int,
    journal: Journal,
    fade: int | None,
    layers: int = 2,
) -> Plan:
    """The plan that puts one new module behind another; raises NotZero with the reason if there is none.

    fade: the number of steps in which its branch, or its activation, fades in. Any activation is exact if it fades in.
    layers: of a residual block. The new module is put into the model for a trial, which the journal undoes.
    """
    calls = calls_of(model, example, [after])[after]
    anatomy = dissect(model, example)
    reasons = legal(model, after, calls, anatomy, unwrappable(model, example, [after]))
    reason = reasons["residual" if method == "random" or (fade and method == "net2net") else method]
    if reason:
        raise NotZero(reason)
    output, made = behind(model, after, calls, anatomy)
    ends_in = _follows_activation(anatomy, after)[0] if method == "net2net" else ""
    made = _description(made, method, seed, fade, layers, ends_in)
    draw = zlib.crc32(f"{seed}/{after}".encode())
    insert = _insert(model, after, made)
    edits = (
        _rotations(model.get_submodule(after), insert.renamed(after), made["channels"], draw) if method == "netmorph" else []
    )
    block = apply_insert(model, insert, journal)
    if made.get("soft"):
        _check_backward(model, block, example)
    insert = replace(insert, start=_start(block, Call((output,), output), after, method, fade, (made["channels"], draw)))
    return Plan((), tuple(edits), seed=seed, inserts=(insert,))


def _description(
    surrounded: dict[str, Any], method: str, seed: int, fade: int | None, layers: int, ends_in: str
) -> dict[str, Any]:
    """The description of the module to build. surrounded: by `behind`. ends_in: the idempotent activation before it, if any."""
    if method in RESIDUAL:
        hidden = max(surrounded["channels"] + surrounded["channels"] % 2, LEAST_HIDDEN)
        return {"kind": "residual", **surrounded, "hidden": hidden, "layers": layers, "seed": seed}
    usual = surrounded["activation"]
    if method == "net2net":
        return {"kind": "layer", **surrounded, "activation": ends_in or usual, "soft": 0 if ends_in else fade or 0}
    split = {"kernel": 1, "norm": False, "soft": fade or 0, "leading": True, "activation": usual if fade else ""}
    return {"kind": "layer", **surrounded, **split}


def _insert(model: nn.Module, after: str, made: Mapping[str, Any]) -> Insert:
    """The insert that puts a new module behind another."""
    parent, _, key = after.rpartition(".")
    container, description = model.get_submodule(parent), tuple(sorted(made.items()))
    if stands_alone(container):
        return Insert(after, 1, -1, "1", "", 0, made=description, wraps=True)
    at = list(container._modules).index(key) + 1
    prefix, first = numbering(container) or ("", 0)
    return Insert(parent, at, -1, f"{prefix}{first + at}", prefix, first, made=description)


def _start(block: nn.Module, given: Call, after: str, method: str, fade: int | None, matrix: tuple[int, int]) -> Start:
    """The start of a new module. given: its input, which it should return unchanged."""
    if method == "random":
        return Start(gates=("branch",) if fade else (), steps=fade or 0)
    if method in RESIDUAL:
        identity = identity_of(block, given, faded=fade is not None)
        writes = resolved(identity.anatomy, identity.zeroing)
        return Start(writes=writes, gates=("branch",) if fade else (), steps=fade or 0)
    return Start(identity=after) if method == "net2net" else Start(rotation=matrix)


def _rotations(layer: nn.Module, name: str, side: int, draw: int) -> list[Edit]:
    """Rotations of a layer that the new layer behind it undoes. name: the layer's name after the insert."""
    axis = 1 if isinstance(layer, tuple(TRANSPOSED.values())) else 0
    edits: list[Edit] = [Rotation(f"{name}.weight", axis, side, draw)]
    return edits if layer.bias is None else [*edits, Rotation(f"{name}.bias", 0, side, draw)]


def _check_backward(model: nn.Module, block: nn.Module, example: Example) -> None:
    """Raise NotZero if the model's code changes a new activation's output in place, which breaks the backward pass."""
    ramps = [module.gate for module in block.modules() if isinstance(module, PActivation)]
    before = [ramp.done for ramp in ramps]
    try:
        with untouched(model), torch.enable_grad():
            for ramp in ramps:
                ramp.done = ramp.steps
            loss = sum(output.sum() for output in outputs_in(call(model, example)) if output.requires_grad)
            if isinstance(loss, Tensor):
                torch.autograd.grad(loss, [p for p in block.parameters() if p.requires_grad], allow_unused=True)
    except RuntimeError as error:
        if "inplace" in str(error):
            raise NotZero(
                "the code behind it changes its output in place, which breaks the backward pass of an activation there"
            ) from None
        raise
    finally:
        for ramp, done in zip(ramps, before, strict=True):
            ramp.done = done
