"""A twin of a model, built by the model's own class from its configuration as a file would hold it.

If the twin has the same tensors, its layers have the same settings each, and it computes the same with the model's own weights,
then the library's way of saving and loading brings the model back. The twin has no memory for weights, so it costs little.
"""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from outgrow.analysis.peft_adapters import with_adapters
from outgrow.apply.fold_skips import base_of
from outgrow.model.example import call, outputs_in
from outgrow.model.module_calls import Call
from outgrow.model.sandbox import random_state
from outgrow.verify.outputs import FLOOR, Evaluation, epsilon, error

NAME = "config"
INITIALS = frozenset({"normal_", "uniform_", "trunc_normal_", "kaiming_uniform_", "kaiming_normal_", "zeros_", "ones_"})
SPECIAL_FLOAT = "__float__"
STACKS = (nn.ModuleList, nn.Sequential)
Layers = Mapping[str, Mapping[tuple[str, str], Any]]  # child of a stack → path within it, attribute → value
Steady = Mapping[tuple[str, str], float]  # path, attribute → a value with a fraction that must be the same


class DiffersFromTwin(Exception):
    """The twin is not the model all over; the message says where."""


class Unbuildable(DiffersFromTwin):
    """The configuration alone does not make a model; the message says why."""


_SHAPES_SUFFICE: ContextVar[bool] = ContextVar("shapes_suffice", default=False)


@contextmanager
def shapes_suffice() -> Iterator[None]:
    """Compare outputs without values by their shapes: for models of which nobody has values."""
    token = _SHAPES_SUFFICE.set(True)
    try:
        yield
    finally:
        _SHAPES_SUFFICE.reset(token)


class _Hollow(TorchFunctionMode):
    """Gives weights, which modules make empty and fill later, no memory; tables that they compute are real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in INITIALS:
            filled = args[0] if args else (kwargs or {}).get("tensor")
            if isinstance(filled, Tensor) and filled.is_meta:  # there is nothing to fill
                return filled
        return func(*args, **{**(kwargs or {}), **({"device": "meta"} if func is torch.empty else {})})


def rebuilt(part: nn.Module, steady: Steady, run: Call | Evaluation | None, outputs: bool) -> nn.Module:
    """What a module's class builds from its configuration; raises `Unlike` if that is not the module all over.

    run: a call of the module, or a pass of the whole model. outputs: whether its outputs are to be compared.
    """
    twin = _built(part)
    _compare_tensors(twin, part)
    for path, module in twin.named_modules():
        mine = part.get_submodule(path)
        for name in module._parameters:
            module._parameters[name] = mine._parameters[name]
        for name, buffer in module._buffers.items():
            own = name in module._non_persistent_buffers_set and buffer is not None
            module._buffers[name] = buffer.to(mine._buffers[name]) if own and buffer is not None else mine._buffers[name]
    for (path, name), value in steady.items():
        found = vars(twin.get_submodule(path)).get(name, math.nan)
        if not math.isclose(found, value, rel_tol=1e-9):
            raise DiffersFromTwin(f"{path}.{name} would be {found:.3g} instead of {value:.3g}")
    stacks = [path for path, module in part.named_modules() if isinstance(module, STACKS) and len(module) > 1]
    fresh = {path: _layers(twin, path) for path in stacks}
    there = _outputs(twin, run) if run is not None else None
    for path in stacks:
        _compare_layers(_layers(part, path), fresh[path], _layers(twin, path), path)
    if outputs and (run is None or there is None or not _agrees(run, there)):
        raise DiffersFromTwin("its outputs would differ")
    return twin


def _built(part: nn.Module) -> nn.Module:
    try:
        with warnings.catch_warnings(), _Hollow():
            warnings.simplefilter("ignore")
            return with_adapters(base_of(part)(_reloaded(vars(part)[NAME])), part)
    except Exception as error:  # it is built from more than its configuration, or its library allows no such sizes
        reason = (str(error).splitlines() or [""])[0]
        raise Unbuildable(f"{base_of(part).__name__} can't be built from it: {type(error).__name__}: {reason}") from error


def _reloaded(config: Any) -> Any:
    """A configuration as its library would read it from a file; but for what is not written, how attention is computed, say."""
    read, write = getattr(type(config), "from_dict", None), getattr(config, "to_json_string", None)
    written = config.to_dict() if write is None else _special_floats(json.loads(write()))
    new = copy.deepcopy(config) if read is None else read(written)
    pairs = [(config, new)]
    for old, other in pairs:
        for name, value in vars(old).items():
            if name.startswith("_"):
                vars(other)[name] = copy.deepcopy(value)
            elif hasattr(value, "to_dict") and hasattr(value, "__dict__"):
                pairs.append((value, vars(other)[name]))
    return new


def _special_floats(written: Any) -> Any:
    """Decode ∞ and NaN, which Transformers writes to a file as {"__float__": "Infinity"} and decodes as it reads the file."""
    if isinstance(written, dict):
        tag = written.get(SPECIAL_FLOAT)
        if len(written) == 1 and isinstance(tag, str):
            return float(tag)
        return {name: _special_floats(value) for name, value in written.items()}
    return [_special_floats(item) for item in written] if isinstance(written, list) else written


def _compare_tensors(twin: nn.Module, part: nn.Module) -> None:
    here, there = ({name: tuple(tensor.shape) for name, tensor in module.state_dict().items()} for module in (part, twin))
    if here == there:
        return
    for name, shape in here.items():
        if name not in there:
            raise DiffersFromTwin(f"{name} would be missing")
        if there[name] != shape:
            raise DiffersFromTwin(f"{name} would have the shape {there[name]} instead of {shape}")
    raise DiffersFromTwin(f"there would be {next(name for name in there if name not in here)} too")


def _layers(model: nn.Module, path: str) -> Layers:
    stack = model.get_submodule(path)
    return {key: _settings(child) for key, child in stack.named_children()}


def _compare_layers(here: Layers, fresh: Layers, run: Layers, path: str) -> None:
    """Compare the layers of a stack in attributes by which those of one kind differ from those of another.

    What all layers of the model have alike may be the user's own setting (gradient checkpointing, say) and is left alone. Code
    may set attributes while it runs (Swin's windows): a layer may be as a new twin's is, or as that of one that has run.
    """
    for key in dict.fromkeys(key for layers in (here, fresh) for layer in layers.values() for key in layer):
        mine, new, used = ([layer.get(key) for layer in layers.values()] for layers in (here, fresh, run))
        if mine in (new, used) or (_uniform(mine) and _uniform(new)):
            continue
        index = next(i for i, (one, other) in enumerate(zip(mine, new, strict=True)) if one != other)
        place = ".".join(filter(None, (path, list(here)[index], *key)))
        raise DiffersFromTwin(f"{place} would be {new[index]} instead of {mine[index]}")


def _uniform(values: list[Any]) -> bool:
    return all(value == values[0] for value in values)


def _settings(layer: nn.Module) -> dict[tuple[str, str], Any]:
    """A layer's kind and place: classes, and plain attributes but for rates of dropout."""
    found: dict[tuple[str, str], Any] = {}
    for path, module in layer.named_modules():
        if "drop" in path:
            continue
        found[path, "class"] = base_of(module).__name__
        for name, value in vars(module).items():
            if isinstance(value, (FunctionType, BuiltinFunctionType)):
                value = value.__qualname__
            plain = type(value) in (bool, int, float, str, tuple, list) and "drop" not in name
            if plain and name != "training" and not name.startswith("_") and not isinstance(module, nn.Dropout):
                found[path, name] = value
    return found


def _outputs(twin: nn.Module, run: Call | Evaluation) -> list[Tensor] | None:
    """What a twin puts out; None if it does not run. Attributes that its code sets stay set."""
    try:
        with random_state(), torch.no_grad():
            if isinstance(run, Evaluation):
                return list(run.of(twin, tree_map_only(Tensor, torch.clone, run.example)))
            twin.eval()
            return [tensor for tensor in outputs_in(call(twin, run.example)) if tensor.is_floating_point()]
    except Exception:
        return None


def _agrees(run: Call | Evaluation, there: list[Tensor]) -> bool:
    here = _outputs_of(run)
    if here is None:
        return False
    if _SHAPES_SUFFICE.get() and any(tensor.is_meta for tensor in (*here, *there)):
        return [tensor.shape for tensor in here] == [tensor.shape for tensor in there]
    return error(here, there) <= FLOOR * epsilon(here)


def _outputs_of(run: Call | Evaluation) -> list[Tensor] | None:
    """What the model itself puts out; None if it does not run, which is reported where it is compared with what it was."""
    if isinstance(run, Call):
        return [tensor for tensor in outputs_in(run.output) if tensor.is_floating_point()]
    try:
        return list(run.outputs())
    except Exception:
        return None
