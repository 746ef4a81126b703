"""Deepen where a model has no blocks of its own: behind a layer or an activation of a plain network.

    r2r        y → y + f(y),  f a residual block's branch, zero with dense weights                    (R2DeeperR)
    residual   the same behind blocks of any kind: r2r looks for one of the model's own there
    net2net    y → ψ(I y),    exact where y = ψ(…) with an idempotent ψ, so that ψ(y) = y              (Net2DeeperNet)
    netmorph   W x → Q (Qᵀ W) x,  one layer as two dense ones, Q an orthogonal matrix                 (NetMorph)

In an nn.Sequential the new module is one child more. Elsewhere the module that it follows is put into an nn.Sequential of its
own, and the plan tells the names.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outgrow.apply import Journal
from outgrow.blocks import CONVOLUTIONS, LINEAR, TRANSPOSED, make_identity, make_rotation
from outgrow.fill import rotation
from outgrow.plan import Edit, Insert, Plan, Rotation
from outgrow.residual import by_itself, idempotent, identity_of
from outgrow.rules.elementwise import UNARY, plain
from outgrow.structure import Call, apply_insert, calls_of, numbering
from outgrow.trace import Example, outputs_in
from outgrow.training.fade import close_gates, link_ramps
from outgrow.zeroing import NotZero, carry_out

LEAST = 16  # hidden units of a residual block: a few pairs alone may all be dead behind a ReLU
METHODS = ("r2r", "residual", "net2net", "netmorph")
RESIDUAL = ("r2r", "residual", "random")  # the last does not preserve the function, if it does not fade in
LAYERS = (nn.Linear, *CONVOLUTIONS.values(), *TRANSPOSED.values())
SIMPLE = "ReLU GELU SiLU Tanh Sigmoid Hardswish Hardsigmoid ELU SELU CELU LeakyReLU Softplus Mish ReLU6 Softsign".split()
ACTIVATIONS = {"relu": "ReLU"}  # idempotent ones, by the class that computes them


def behind(model: nn.Module, path: str, calls: Sequence[Call]) -> tuple[Tensor, dict[str, Any]]:
    """What a module puts out, and a description of a layer that could follow it; NotZero with the reason if none could."""
    if len(calls) != 1:
        raise NotZero("the example does not run it" if not calls else f"it runs {len(calls)} times in one pass")
    output, given = calls[0].output, calls[0].example
    if not isinstance(given, tuple) or len(given) != 1:
        raise NotZero("it is called with more than one argument")
    if not isinstance(output, Tensor) or not output.is_floating_point() or output.ndim < 2:
        raise NotZero("it puts out no tensor of features")
    layer: Any = next((module for module in _up_to(model, path) if isinstance(module, LAYERS)), None)
    if layer is None:
        raise NotZero("no layer comes before it")
    dims = LINEAR if isinstance(layer, nn.Linear) else len(layer.kernel_size)
    if dims and (output.ndim != dims + 2 or output.shape[1] != layer.out_channels):
        dims = LINEAR
    activation, norm = surroundings(model, path, dims)
    kernel = 3 if dims and min(output.shape[2:]) > 1 else 1
    channels = output.shape[1] if dims else output.shape[-1]
    return output, {"channels": channels, "dims": dims, "kernel": kernel, "norm": norm, "activation": activation}


def _up_to(model: nn.Module, path: str) -> list[nn.Module]:
    """Modules from the last part of one back to the model's first."""
    modules = list(model.named_modules())
    last = max(index for index, (name, _) in enumerate(modules) if name == path or name.startswith(f"{path}."))
    return [module for _, module in reversed(modules[: last + 1])]


def surroundings(model: nn.Module, path: str, dims: int) -> tuple[str, bool]:
    """The activation that is usual before a module's end, and whether batch norms are usual beside it."""
    activation = next((type(module).__name__ for module in _up_to(model, path) if is_activation(module)), "ReLU")
    beside = model.get_submodule(path.rpartition(".")[0]).modules()
    return activation, dims > 0 and any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in beside)


def is_activation(module: nn.Module) -> bool:
    """An activation of torch's that has no parameters, and needs no arguments to be made again."""
    return type(module).__name__ in SIMPLE and type(module) is getattr(nn, type(module).__name__)


def legal(model: nn.Module, path: str, calls: Sequence[Call]) -> dict[str, str]:
    """For each method, why it is not exact behind a module; empty if it is."""
    try:
        behind(model, path, calls)
    except NotZero as reason:
        return dict.fromkeys(METHODS, str(reason))
    module = model.get_submodule(path)
    bare = type(module) is nn.Sequential or not len(module._modules)
    return {
        "r2r": "" if bare else "it is a block of another kind (method='residual' puts an outgrow.ResidualBlock there)",
        "residual": "",
        "net2net": _follows_activation(module, calls[0])[1],
        "netmorph": _can_be_split(model, module),
    }


def _follows_activation(module: nn.Module, given: Call) -> tuple[str, str]:
    """The idempotent activation that a module ends in; or why an identity layer with one can't follow it."""
    try:
        anatomy = by_itself(module, given)
    except NotZero as reason:
        return "", str(reason)
    value = next(iter(anatomy.reading.trace.outputs), -1)
    op = anatomy.maker.get(value)
    if op is None or plain(op) not in UNARY:
        return "", "it does not end in an activation: an identity layer behind it would need one that changes nothing there"
    if not idempotent(op):
        return "", f"its activation {op.name} is not idempotent: ψ(ψ(x)) is not ψ(x)"
    if plain(op) not in ACTIVATIONS:
        return "", f"an identity layer is followed by a ReLU here, and {op.name} is another activation"
    return ACTIVATIONS[plain(op)], ""


def _can_be_split(model: nn.Module, module: nn.Module) -> str:
    if not isinstance(module, LAYERS):
        return "it is no linear layer or convolution that could be split in two"
    if getattr(module, "groups", 1) > 1:
        return "it is a grouped convolution, which can't be the product of two dense ones"
    owners = [m for m in model.modules() if any(p is module.weight for p in m.parameters(recurse=False))]
    if len(owners) > 1 or hasattr(module, "parametrizations"):
        return "its weight is shared or parametrized"
    return ""


def plain_step(
    models: Sequence[nn.Module],
    example: Example,
    after: str,
    method: str,
    seed: int,
    journal: Journal,
    fade: int | None,
    layers: int = 2,
) -> tuple[Plan, list[tuple[str, str]]]:
    """Put one new module behind another, in a model and its averaged copies; raises NotZero with the reason if it can't be.

    fade: over how many steps its branch, or its activation, sets in. An activation that does is legal whatever it is.
    layers: of a residual block.
    """
    model = models[0]
    calls = calls_of(model, example, [after])[after]
    reason = legal(model, after, calls)["residual" if method == "random" else method]
    if reason and not (fade and method == "net2net" and calls):
        raise NotZero(reason)
    output, made = behind(model, after, calls)
    module = model.get_submodule(after)
    if method in RESIDUAL:
        hidden = max(made["channels"] + made["channels"] % 2, LEAST)
        made = {"kind": "residual", **made, "hidden": hidden, "layers": layers, "seed": seed}
    elif method == "net2net":
        ends_in = _follows_activation(module, calls[0])[0]
        made = {"kind": "layer", **made, "activation": ends_in or made["activation"], "soft": 0 if ends_in else fade or 0}
    else:
        made = {"kind": "layer", **made, "kernel": 1, "norm": False, "soft": fade or 0, "leading": True}
        made["activation"] = made["activation"] if fade else ""
    parent, _, key = after.rpartition(".")
    container = model.get_submodule(parent)
    if type(container) is nn.Sequential and numbering(container) is not None:
        at = list(container._modules).index(key) + 1
        prefix, first = numbering(container) or ("", 0)
        insert = Insert(parent, at, -1, f"{prefix}{first + at}", prefix, first, made=tuple(sorted(made.items())))
    else:
        insert = Insert(after, 1, -1, "1", "", 0, made=tuple(sorted(made.items())), wraps=True)
    seen = _batch(model, example, after, output)
    draw = zlib.crc32(f"{seed}/{after}".encode())
    blocks = [apply_insert(one, insert, journal) for one in models]
    for block in blocks:
        if method == "random":
            continue
        if method in RESIDUAL:
            identity = identity_of(block, Call((output,), output), faded=fade is not None)
            carry_out(block, identity.anatomy, identity.zeroing)
        elif method == "net2net":
            assert isinstance(block, nn.Sequential)
            make_identity(block, seen)
        else:
            assert isinstance(block, nn.Sequential)
            make_rotation(block, rotation(made["channels"], draw))
    if fade and method in RESIDUAL:
        close_gates(blocks, ["branch"], fade)
    link_ramps(blocks)
    edits: list[Edit] = []
    if method == "netmorph":
        axis = 1 if isinstance(module, tuple(TRANSPOSED.values())) else 0
        name = insert.renamed(after)
        edits.append(Rotation(f"{name}.weight", axis, made["channels"], draw))
        if module.bias is not None:
            edits.append(Rotation(f"{name}.bias", 0, made["channels"], draw))
    return Plan((), tuple(edits), seed=seed, inserts=(insert,)), [(insert.path, insert.renamed(after))]


def _batch(model: nn.Module, example: Example, path: str, output: Tensor) -> Tensor:
    """What a module puts out in train mode: the statistics of that batch make a batch norm the identity in both modes."""
    try:
        with torch.no_grad():
            found = calls_of(model, example, [path], training=True)[path][0].output
        return next(iter(outputs_in(found)))
    except Exception:  # batch norm on a single value: eval mode must do
        return output
