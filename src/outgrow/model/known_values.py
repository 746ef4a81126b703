"""Keep the values of integers and masks in passes on the meta device, so that code that reads them runs there too.

Code such as `if padding.any():` or `positions.max().item()` mostly reads integers and masks of the example, or those that it
computes from sizes: they depend on no weight. In a pass with `KnownShapes` such a meta tensor has an equal tensor on the CPU,
with values. A meta tensor is *known* if it holds integers or booleans, and

    - it is a tensor of the example (see `on_meta`), or
    - a factory made it (`arange`, `ones`, …; `torch.tensor` in a pass with `KnownConstants`), or
    - an operator without randomness computed it from known tensors only.

Integer arithmetic gives the same values on every device, so what the code reads is what it reads in a pass on the model itself.
Masks are also made of floats (`torch.ones(batch, length)`, `(1 - mask) * -1e9`). Such a tensor is known if a factory of a
constant made it, or an operator that moves values, or rounds once as IEEE arithmetic demands (`FLOATS`), computed it from known
tensors only. Other floating-point results are not known, and floats of the example are not. Anything else that reads values
fails, as it does without this file.

A known mask may select from a tensor that is not known (`states[mask]`): then the shape of the result is known.

A write in place into known memory is carried out on the values too, if it writes known values. Otherwise the memory is known
no longer, through none of its views. Writes into tensors of the example are errors: the next pass would read other values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map, tree_map_only

from outgrow.model.meta_operators import REPLACES_MEMORY, ShapeCache, writes_into_first
from outgrow.model.shared_memory import storage_of

LARGEST = 2**18  # entries of a tensor that is computed with; larger ones are unknown
ATTRIBUTE = "_outgrow_known"
META = torch.device("meta")
FACTORIES = ("aten::arange", "aten::zeros", "aten::ones", "aten::full", "aten::scalar_tensor", "aten::eye")
OF_A_SHAPE = (  # operators that use the shape of their first argument, not its values
    "aten::new_zeros",
    "aten::new_ones",
    "aten::new_full",
    "aten::zeros_like",
    "aten::ones_like",
    "aten::full_like",
)


FLOATS = {  # operators whose floating-point results are the same on every device; in place too
    *("aten::zeros", "aten::ones", "aten::full", "aten::scalar_tensor", "aten::eye", *OF_A_SHAPE),
    *("aten::_to_copy", "aten::clone", "aten::lift_fresh", "aten::copy", "aten::fill", "aten::masked_fill", "aten::where"),
    *("aten::cat", "aten::stack", "aten::repeat", "aten::index_select", "aten::index", "aten::gather", "aten::flip"),
    *("aten::index_put", "aten::index_fill", "aten::slice_scatter", "aten::select_scatter"),
    *("aten::constant_pad_nd", "aten::tril", "aten::triu", "aten::upsample_nearest1d", "aten::upsample_nearest2d"),
    *("aten::neg", "aten::abs", "aten::add", "aten::sub", "aten::rsub", "aten::mul", "aten::clamp"),
}


class ValuesUnavailable(RuntimeError):
    """Raised where values would no longer be those of a pass on the model itself."""


@dataclass(eq=False)
class Memory:
    """The memory that a known tensor shares with its views."""

    of_example: bool = False
    known: bool = True


@dataclass(frozen=True, eq=False)
class Known:
    """The values of a meta tensor."""

    values: Tensor
    memory: Memory


def on_meta(tree: Any) -> Any:
    """An example with its tensors replaced by meta tensors; integers and masks are known."""
    return tree_map_only(Tensor, _input_on_meta, tree)


def _input_on_meta(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return tensor
    without = tensor.to("meta")
    if _exact(tensor) and type(tensor) is Tensor and tensor.numel() <= LARGEST:
        setattr(without, ATTRIBUTE, Known(tensor.detach().to("cpu", copy=True), Memory(of_example=True)))
    return without


def _exact(tensor: Tensor) -> bool:
    """Whether a tensor holds integers or booleans, which all devices compute alike."""
    dtype = tensor.dtype
    plain = tensor.layout is torch.strided and not tensor.is_quantized
    return plain and not dtype.is_floating_point and not dtype.is_complex


def _known(tensor: Tensor) -> Known | None:
    """The values of a tensor, if they are known; a tensor on the CPU has its own."""
    if not tensor.is_meta:
        return Known(tensor, Memory()) if tensor.device.type == "cpu" and _exact(tensor) else None
    found: Known | None = getattr(tensor, ATTRIBUTE, None)
    return found if found is not None and found.memory.known else None


class KnownConstants(TorchFunctionMode):
    """Lets the values of `torch.tensor([…], device=meta)` be known: torch hands on only the result, which has none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and not any(isinstance(arg, Tensor) for arg in args[:1]):
            device = kwargs.get("device")
            if device is not None and torch.device(device) == META:
                return func(*tree_map_only(Tensor, Tensor.item, args), **{**kwargs, "device": "cpu"}).to(META)
        return func(*args, **kwargs)


class KnownShapes(ShapeCache):
    """Calls operators on meta tensors with cached geometries, and on the values of known tensors."""

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        tensors = [*_tensors(args), *_tensors(kwargs.values())]
        found = [_known(tensor) for tensor in tensors]
        known = [one for tensor, one in zip(tensors, found, strict=True) if one is not None and tensor.is_meta]
        schema = func._schema
        made = schema.name in FACTORIES if not tensors else schema.name in OF_A_SHAPE
        copied = bool(tensors) and None not in found and torch.device(kwargs.get("device") or "cpu") == META
        if not known and not copied and not (made and _is_meta(args, kwargs)):
            return super().call(func, args, kwargs)
        if any(one.memory.of_example for one in _written(func, args, kwargs)) or (known and schema.name in REPLACES_MEMORY):
            raise ValuesUnavailable(f"{schema.name} changes integers that other passes read")
        small = func.is_view or all(tensor.numel() <= LARGEST for tensor in tensors)
        if not made and (None in found or not small or torch.Tag.nondeterministic_seeded in func.tags):
            return self._unknown(func, args, kwargs)
        with _disable_current_modes(), torch.no_grad():
            return self._computed(func, args, kwargs)

    def _unknown(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call an operator whose results are not known; memory that it writes into no longer is."""
        for written in _written(func, args, kwargs):
            written.memory.known = False
        if func is torch.ops.aten.index.Tensor:
            args = (args[0], _without_masks(args[1]))
        return super().call(func, args, kwargs)

    def _computed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        dynamic = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        if _leaves_meta(kwargs):
            return _call_with_values(func, args, kwargs).clone()
        if dynamic:
            values = _call_with_values(func, args, kwargs)
            result = tree_map_only(Tensor, lambda one: one.to("meta"), values)
            _attach(result, values, args, kwargs, _exact)
            return result
        result = super().call(func, args, kwargs)
        results = list(_tensors([result]))
        writes = func._schema.is_mutable
        if writes and not writes_into_first(func._schema):
            for written in _written(func, args, kwargs):
                written.memory.known = False
        elif (
            writes
            or func.is_view
            or all(one.numel() <= LARGEST and _same_everywhere(func, args, kwargs, one) for one in results)
        ):
            _attach(result, _call_with_values(func, args, kwargs), args, kwargs, partial(_same_everywhere, func, args, kwargs))
        return result


def _same_everywhere(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor) -> bool:
    """Whether an operator computes a result from known values that is the same on every device."""
    if _exact(result):
        return True
    if not result.is_floating_point() or kwargs.get("alpha", 1) != 1:  # a sum of products may be rounded once or twice
        return False
    if func.is_view:
        return func is not torch.ops.aten.view.dtype
    name = func._schema.name.removesuffix("_")
    adds = name == "aten::index_put" and (any(args[3:]) or kwargs.get("accumulate", False))
    return name in FLOATS and not adds


def _without_masks(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Indices with known masks replaced by the positions that they select."""
    found: list[Tensor | None] = []
    for index in indices:
        known = None if index is None or index.dtype is not torch.bool else _known(index)
        if known is None:
            found.append(index)
        else:
            with _disable_current_modes():
                found += [places.to(META) for places in known.values.nonzero(as_tuple=True)]
    return found


def _tensors(items: Any) -> Iterator[Tensor]:
    for item in items:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from _tensors(item)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Known]:
    """The known tensors that an operator writes into."""
    if not func._schema.is_mutable:
        return
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (one for tensor in _tensors([given]) if tensor.is_meta and (one := _known(tensor)) is not None)


def _is_meta(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a factory is called for the meta device."""
    device = kwargs.get("device")
    return torch.device(device) == META if device is not None else any(tensor.is_meta for tensor in _tensors(args))


def _leaves_meta(kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator copies to a device with values, as for `.tolist()`."""
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "cpu"


def _call_with_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    given, named = (tree_map(_with_values, part) for part in (tuple(args), dict(kwargs)))
    return func(*given, **named)


def _with_values(item: Any) -> Any:
    """An argument with values instead of meta tensors; one whose values do not matter becomes an empty tensor."""
    if isinstance(item, Tensor):
        known = _known(item)
        return known.values if known is not None else torch.empty(item.shape, dtype=item.dtype)
    return torch.device("cpu") if isinstance(item, torch.device) and item == META else item


def _attach(result: Any, values: Any, args: Sequence[Any], kwargs: Mapping[str, Any], same: Callable[[Tensor], bool]) -> None:
    """Make results known by their values; views share the memory of what they are views of."""
    sources = {storage_of(one.values): one.memory for t in (*_tensors(args), *_tensors(kwargs.values())) if (one := _known(t))}
    for tensor, held in zip(_tensors([result]), _tensors([values]), strict=True):
        memory = sources.get(storage_of(held)) or Memory()
        if same(tensor) and tensor.shape == held.shape:
            setattr(tensor, ATTRIBUTE, Known(held, memory))
        else:
            memory.known = False  # a view as another type: writes through it would not be seen
