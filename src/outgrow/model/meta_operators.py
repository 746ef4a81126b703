"""Operators on meta tensors, with cached results: equal operators on equal shapes give equal shapes.

Meta tensors have no values, so a result is determined by its geometry (shape, strides, dtype). Torch computes many of these in
Python, a batch norm in a millisecond; networks repeat their blocks, so a cache is much faster.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

aten = torch.ops.aten
Geometry = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
REPLACES_MEMORY = ("aten::set_", "aten::resize_", "aten::resize_as_")  # in-place operators that do more than write values


class ShapeCache:
    """Calls operators, with cached geometries of their results.

    Cached are operators that return new meta tensors, and those that write into their first argument and keep its geometry: on
    meta tensors a repeated write has no effect.
    """

    def __init__(self) -> None:
        self.cached: dict[Any, bool] = {}  # operator → whether its results are cached
        self.known: dict[Hashable, tuple[type, list[Geometry]] | None] = {}  # None: the result is the first argument

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        key = self._key(func, args, kwargs)
        if key in self.known:
            known = self.known[key]
            if known is None:
                return args[0]
            with torch._C._DisableTorchDispatch():  # not seen by outer modes, which would handle it like an operator
                tensors = [torch.empty_strided(size, stride, dtype=d, device="meta") for size, stride, d in known[1]]
            return tensors[0] if known[0] is Tensor else known[0](tensors)
        made = SHAPE_FORMULAS[func](*args) if key is not None and func in SHAPE_FORMULAS and not kwargs else None
        result: Any = func(*args, **kwargs) if made is None else made
        if key is not None and args and result is args[0]:
            if _part(result) == key[1][0]:
                self.known[key] = None
        elif key is not None:
            tensors = [result] if type(result) is Tensor else result
            if type(tensors) in (list, tuple) and all(_plain(item) for item in tensors):
                self.known[key] = type(result), [_geometry(tensor) for tensor in tensors]
        return result

    def _key(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """All that the result depends on, as a key; None if it may depend on more."""
        if func not in self.cached:
            self.cached[func] = _returns_new_tensors(func._schema) or writes_into_first(func._schema)
        if not self.cached[func]:
            return None
        try:
            return func, tuple(map(_part, args)), tuple((name, _part(value)) for name, value in kwargs.items())
        except _Uncacheable:
            return None


def _returns_new_tensors(schema: Any) -> bool:
    return all(item.alias_info is None for item in (*schema.arguments, *schema.returns))


def writes_into_first(schema: Any) -> bool:
    """Whether an operator is the in-place form of another: it writes into its first argument alone, and returns that."""
    aliased = [item.alias_info for item in schema.arguments]
    written = bool(aliased) and aliased[0] is not None and aliased[0].is_write and not any(aliased[1:])
    returned = [item.alias_info is not None and item.alias_info.is_write for item in schema.returns]
    return written and returned == [True] and schema.name not in REPLACES_MEMORY


def _batch_norm(x: Tensor, *rest: Any) -> tuple[Tensor, ...] | None:
    vectors = [vector for vector in rest if isinstance(vector, Tensor)]
    if not _contiguous_floats(x, *vectors) or any(vector.shape != x.shape[1:2] for vector in vectors):
        return None
    return torch.empty_like(x), x.new_empty(x.shape[1:2]), x.new_empty(x.shape[1:2])


def _layer_norm(x: Tensor, normal: Sequence[int], *rest: Any) -> tuple[Tensor, ...] | None:
    weights = [weight for weight in rest if isinstance(weight, Tensor)]
    if not _contiguous_floats(x, *weights) or any(
        list(item.shape) != list(normal) for item in (x[(0,) * (x.ndim - len(normal))], *weights)
    ):
        return None
    statistic = [*x.shape[: -len(normal)], *(1 for _ in normal)]
    return torch.empty_like(x), x.new_empty(statistic), x.new_empty(statistic)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    first = tensors[0]
    rest = [(*tensor.shape[:dim], *tensor.shape[dim:][1:]) for tensor in tensors]
    if (
        dim < 0
        or not _contiguous_floats(*tensors)
        or any(shape != rest[0] or tensor.ndim != first.ndim for tensor, shape in zip(tensors, rest, strict=True))
    ):
        return None
    return first.new_empty([*first.shape[:dim], sum(tensor.shape[dim] for tensor in tensors), *first.shape[dim + 1 :]])


def _addmm(bias: Tensor, left: Tensor, right: Tensor) -> Tensor | None:
    if (
        not _contiguous_floats(bias, left)
        or right.dtype != left.dtype
        or left.shape[1:] != right.shape[:1]
        or bias.shape != right.shape[1:]
    ):
        return None
    return left.new_empty([left.shape[0], right.shape[1]])


def _grouped_mm(x: Tensor, weight: Tensor, *rest: Any) -> Tensor | None:
    """(rows, in) by (experts, in, out). Torch describes bfloat16 only, although its kernels take float16 and float32 too."""
    if x.dtype not in (torch.float16, torch.float32) or weight.dtype != x.dtype or (x.ndim, weight.ndim) != (2, 3):
        return None
    outer, step = weight.shape[2], 16 // x.element_size()
    found = [distance for tensor in (x, weight) if (distance := _distance(tensor)) % step]
    if x.shape[1] != weight.shape[1] or found:
        instead = f" ({-(-found[0] // step) * step} instead of {found[0]})" if found else ""
        raise RuntimeError(
            f"_grouped_mm takes no {tuple(x.shape)} by {tuple(weight.shape)}: rows must begin at multiples of 16 bytes, so the "
            f"sizes of experts in {x.dtype} must be multiples of {step}{instead}"
        )
    return torch.empty_strided((len(x), outer), (-(-outer // step) * step, 1), dtype=x.dtype, device="meta")


def _distance(matrix: Tensor) -> int:
    """The distance of rows in memory, or of columns if the matrix is transposed, counted in values."""
    (high, wide), (down, right) = matrix.shape[-2:], matrix.stride()[-2:]
    return right if down == 1 and right >= max(1, high) else down if right == 1 and down >= max(1, wide) else 1


def _contiguous_floats(*tensors: Tensor) -> bool:
    """Whether tensors are contiguous and of one common type, so that no type promotion or memory format matters."""
    return all(t.is_contiguous() and t.numel() and t.dtype == tensors[0].dtype for t in tensors) and tensors[0].dtype in (
        torch.float32,
        torch.float64,
    )


SHAPE_FORMULAS: dict[Any, Callable[..., Any]] = {  # the slowest operators; they return None for uncommon cases
    aten.native_batch_norm.default: _batch_norm,
    aten.native_layer_norm.default: _layer_norm,
    aten.cat.default: _cat,
    aten.addmm.default: _addmm,
}
if hasattr(aten, "_grouped_mm"):
    SHAPE_FORMULAS[aten._grouped_mm.default] = _grouped_mm  # one that torch describes in part


class _Uncacheable(Exception):
    """An argument that is not described by its geometry."""


def _plain(tensor: Any) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.is_meta and tensor.layout is torch.strided


def _geometry(tensor: Tensor) -> Geometry:
    return tensor.shape, tensor.stride(), tensor.dtype


def _part(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        if not _plain(value):
            raise _Uncacheable
        return _geometry(value)
    if isinstance(value, (list, tuple)):
        return type(value), *map(_part, value)
    if not isinstance(value, Hashable):
        raise _Uncacheable
    return type(value), value  # 1 and 1.0 are equal, and promote differently
