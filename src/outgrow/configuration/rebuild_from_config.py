"""Rebuild a model with its own class, from its configuration as the library would read it from a file, and compare the two.

If the rebuilt model has the same tensors, the same settings in each layer, and the same outputs with the model's own weights,
then the library can save and load the model. The rebuilt model has no memory for weights, so it costs little.
"""

from __future__ import annotations

import copy
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
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
from outgrow.model.module_paths import joined_path
from outgrow.model.sandbox import random_state
from outgrow.verify.outputs import FLOOR, Evaluation, epsilon, error

NAME = "config"
INITIALISERS = frozenset({"normal_", "uniform_", "trunc_normal_", "kaiming_uniform_", "kaiming_normal_", "zeros_", "ones_"})
SPECIAL_FLOAT = "__float__"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
STACKS = (nn.ModuleList, nn.Sequential)
Layers = Mapping[str, Mapping[tuple[str, str], Any]]  # child of a stack → (path inside it, attribute) → value
Pairs = Sequence[tuple[float, float]]  # sizes before and after
Steady = Mapping[tuple[str, str], float]  # (path, attribute) → a float that must be the same


class RebuiltDiffers(Exception):
    """The rebuilt model differs from the model; the message says where."""

    agreement: float = 1  # how much agrees: of several attempts, the one with the highest value explains best


class Unbuildable(RebuiltDiffers):
    """The model can't be built from the configuration alone; the message says why."""

    agreement = 0


class OtherEpsilon(RebuiltDiffers):
    """An ε of the rebuilt model differs from the model's."""

    agreement = 2

    def __init__(self, place: str, found: float, needed: float) -> None:
        super().__init__(f"{place} would be {found:.3g} instead of {needed:.3g}")
        self.place, self.found, self.needed = place, found, needed


class OtherResults(RebuiltDiffers):
    """The rebuilt model has the tensors and every ε of the model, but its layers or its outputs differ."""

    agreement = 3


_SHAPES_SUFFICE: ContextVar[bool] = ContextVar("shapes_suffice", default=False)


@contextmanager
def shapes_suffice() -> Iterator[None]:
    """A context in which outputs on the meta device are compared by their shapes, for models without values."""
    token = _SHAPES_SUFFICE.set(True)
    try:
        yield
    finally:
        _SHAPES_SUFFICE.reset(token)


class EmptyOnMeta(TorchFunctionMode):
    """Puts weights, which modules create empty and fill later, on the meta device; computed tables keep their values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in INITIALISERS:
            filled = args[0] if args else (kwargs or {}).get("tensor")
            if isinstance(filled, Tensor) and filled.is_meta:  # there is nothing to fill
                return filled
        return func(*args, **{**(kwargs or {}), **({"device": "meta"} if func is torch.empty else {})})


def rebuilt(part: nn.Module, steady: Steady, run: Call | Evaluation | None, outputs: bool, sizes: Pairs = ()) -> nn.Module:
    """The model that a module's class builds from its configuration; raises `RebuiltDiffers` if it is not the same.

    run: a call of the module, or a pass of the whole model. outputs: whether outputs are compared. sizes: of volumes,
    before and after growths; an integer attribute of a layer may differ as they do (see `stale_sizes`).
    """
    other = built(part)
    _compare_tensors(other, part)
    _compare_unsaved(other, part)
    for _, mine, module in modules_of_both(part, other):
        for name in module._parameters:
            module._parameters[name] = mine._parameters[name]
        for name, buffer in module._buffers.items():
            computed = name in module._non_persistent_buffers_set
            module._buffers[name] = _unrounded(buffer, mine._buffers[name]) if computed else mine._buffers[name]
    compare_epsilons(other, part, steady)
    stacks = [path for path, module in part.named_modules() if isinstance(module, STACKS) and len(module) > 1]
    fresh = {path: _layers(other, path) for path in stacks}
    there = _outputs(other, run) if run is not None else None
    for path in stacks:
        _compare_layers(_layers(part, path), fresh[path], _layers(other, path), path, sizes)
    if outputs and (run is None or there is None or not _agrees(run, there)):
        raise OtherResults("its outputs would differ")
    return other


def modules_of_both(part: nn.Module, other: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """The modules that a model and the rebuilt one have in common.

    A forward pass may exchange modules: BigBird-Pegasus takes full attention, with a dropout of its own, for short inputs.
    """
    there = dict(other.named_modules(remove_duplicate=False))
    for path, module in part.named_modules():
        if path in there:
            yield path, module, there[path]


def exchanged(part: nn.Module) -> str:
    """The first module of another class than in a newly built model, in words; empty if there is none."""
    try:
        other = built(part)
    except RebuiltDiffers:
        return ""
    for path, module, new in modules_of_both(part, other):
        here, there = (base_of(one).__name__ for one in (module, new))
        if here != there:
            return f"{path} is a {here} here, and a {there} in a new model"
    return ""


@torch.no_grad()
def _compare_unsaved(other: nn.Module, part: nn.Module) -> None:
    """Raise if parameters that the library makes itself, and does not save (Marian's positions), would have other values."""
    patterns, make = getattr(part, "_keys_to_ignore_on_save", None) or (), getattr(other, "_init_weights", None)
    for name, mine in part.named_parameters():
        if mine.is_meta or not callable(make) or not any(re.search(pattern, name) for pattern in patterns):
            continue
        path, _, own = name.rpartition(".")
        module = other.get_submodule(path)
        module._parameters[own] = nn.Parameter(torch.zeros(mine.shape), False)
        make(module)
        if not torch.allclose(module._parameters[own].to(mine), mine, rtol=1e-3, atol=1e-5):  # type: ignore[union-attr]
            raise RebuiltDiffers(f"{name} is not saved, and the library would make other values")


def _unrounded(new: Tensor | None, mine: Tensor | None) -> Tensor | None:
    """A buffer that is not saved, as the library computes it; the model's own, if the two differ in their rounding only.

    A model that was built in float32 and converted to float64 holds buffers that are rounded to float32.
    """
    if new is None or mine is None:
        return new
    moved = new.to(mine)
    if new.shape != mine.shape or not mine.is_floating_point() or new.is_meta or mine.is_meta:
        return moved
    rounding = 2 * max(torch.finfo(torch.float32).eps, torch.finfo(mine.dtype).eps)
    return mine if torch.allclose(moved, mine, rtol=rounding, atol=0.0) else moved


def built(part: nn.Module) -> nn.Module:
    """The model that a module's class builds from its configuration; `Unbuildable` with the reason if it can't."""
    try:
        with warnings.catch_warnings(), EmptyOnMeta(), _default_dtype(part):
            warnings.simplefilter("ignore")
            return with_adapters(base_of(part)(_reloaded(vars(part)[NAME])), part)
    except Exception as error:  # its constructor needs more than the configuration, or its library refuses such sizes
        reason = " ".join(line.strip() for line in str(error).splitlines()[:2])  # a validator's first line is its name only
        raise Unbuildable(f"{base_of(part).__name__} can't be built from it: {type(error).__name__}: {reason}") from error


@contextmanager
def _default_dtype(part: nn.Module) -> Iterator[None]:
    """A context in which new tensors have the dtype of the model, as when its library loads it: tables are rounded alike."""
    usual, own = torch.get_default_dtype(), next((p.dtype for p in part.parameters() if p.is_floating_point()), None)
    try:
        torch.set_default_dtype(own if own in DTYPES else usual)
        yield
    finally:
        torch.set_default_dtype(usual)


def _reloaded(config: Any) -> Any:
    """A configuration as its library would read it from a file, with private attributes (the attention kernel, say) copied."""
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


def _compare_tensors(other: nn.Module, part: nn.Module) -> None:
    here, there = ({name: tuple(tensor.shape) for name, tensor in module.state_dict().items()} for module in (part, other))
    if here != there:
        reason = RebuiltDiffers(_first_difference(here, there))
        reason.agreement = sum(there.get(name) == shape for name, shape in here.items()) / len({**here, **there})
        raise reason


def _first_difference(here: Mapping[str, tuple[int, ...]], there: Mapping[str, tuple[int, ...]]) -> str:
    for name, shape in here.items():
        if name not in there:
            return f"{name} would be missing"
        if there[name] != shape:
            return f"{name} would have the shape {there[name]} instead of {shape}"
    return f"there would be {next(name for name in there if name not in here)} too"


def compare_epsilons(other: nn.Module, part: nn.Module, steady: Steady) -> None:
    """Compare values that growths have set, and every ε: outputs hardly show them."""
    needed = dict(steady)
    for path, module, twin in modules_of_both(part, other):
        for name, value in vars(module).items():
            if "eps" in name and type(value) is float and type(vars(twin).get(name)) is float:
                needed[path, name] = value
    for (path, name), value in needed.items():
        found = vars(other.get_submodule(path)).get(name, math.nan)
        if not math.isclose(found, value, rel_tol=1e-9):
            raise OtherEpsilon(joined_path(path, name), found, value)


def _layers(model: nn.Module, path: str) -> Layers:
    stack = model.get_submodule(path)
    return {key: _settings(child) for key, child in stack.named_children()}


def stale_sizes(part: nn.Module, other: nn.Module, sizes: Pairs) -> dict[tuple[str, str], tuple[int, int]]:
    """Integers that no code of the forward pass reads, such as T5's `inner_dim`: (path, attribute) → old and new value.

    They differ from those of the rebuilt model by the ratio of a growth.
    """
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for path, module, twin in modules_of_both(part, other):
        there = vars(twin)
        for name, value in vars(module).items():
            if not name.startswith("_") and _in_ratio(value, there.get(name), sizes):
                found[path, name] = value, there[name]
    return found


def _in_ratio(one: Any, other: Any, sizes: Pairs) -> bool:
    """Whether two integers differ by the ratio of sizes before and after a growth."""
    whole = type(one) is type(other) is int and one != other and one > 1
    return whole and any(one * after == other * before for before, after in sizes)


def _compare_layers(here: Layers, fresh: Layers, run: Layers, path: str, sizes: Pairs) -> None:
    """Compare the layers of a stack in the attributes in which they differ from each other.

    An attribute that is equal in all layers that have it may be the user's own setting (gradient checkpointing, say, which new
    layers have in their class only), or a size that no code reads, and is ignored. Code may set attributes while it runs
    (Swin's windows): a layer may equal that of the rebuilt model before or after a run.
    """
    for key in dict.fromkeys(key for layers in (here, fresh) for layer in layers.values() for key in layer):
        mine, new, used = ([layer.get(key) for layer in layers.values()] for layers in (here, fresh, run))
        same_layers = _given(mine) == _given(new) or not any(_given(new))
        if mine in (new, used) or (same_layers and _uniform(mine) and _uniform(new)):
            continue
        differ = [i for i, (one, other) in enumerate(zip(mine, new, strict=True)) if one != other]
        if all(_in_ratio(mine[i], new[i], sizes) for i in differ):
            continue
        index = differ[0]
        place = joined_path(path, list(here)[index], *key)
        raise OtherResults(f"{place} would be {new[index]} instead of {mine[index]}")


def _uniform(values: list[Any]) -> bool:
    """Whether values are equal, except for those of layers that have none."""
    found = [value for value, given in zip(values, _given(values), strict=True) if given]
    return all(value == found[0] for value in found)


def _given(values: list[Any]) -> list[bool]:
    return [value is not None for value in values]


def _settings(layer: nn.Module) -> dict[tuple[str, str], Any]:
    """The classes and plain attributes of a layer's modules, except for dropout rates."""
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


def _outputs(other: nn.Module, run: Call | Evaluation) -> list[Tensor] | None:
    """The outputs of the rebuilt model; None if it does not run. Attributes that its code sets stay set."""
    try:
        with random_state(), torch.no_grad():
            if isinstance(run, Evaluation):
                return list(run.of(other, tree_map_only(Tensor, torch.clone, run.example)))
            other.eval()
            return [tensor for tensor in outputs_in(call(other, run.example)) if tensor.is_floating_point()]
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
    """The outputs of the model itself; None if it does not run, which the comparison of outputs reports."""
    if isinstance(run, Call):
        return [tensor for tensor in outputs_in(run.output) if tensor.is_floating_point()]
    try:
        return list(run.outputs())
    except Exception:
        return None
