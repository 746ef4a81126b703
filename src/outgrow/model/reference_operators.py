"""Operators with a reference function in plain PyTorch: users' custom operators, and some of PyTorch.

Units can't be followed through a custom operator, since only its signature is known. Its reference function takes the same
arguments and computes the same result with operators of PyTorch. While a model is traced, the reference runs instead of the
operator, and the trace contains the operators of the reference. Otherwise the operator itself runs: in training, and when
outputs are compared before and after a growth, so that a wrong reference leads to a refusal there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from outgrow.errors import RuleError
from outgrow.model.composed_operators import COMPOSED


@dataclass(frozen=True)
class Reference:
    """A user's operator and the function that computes the same."""

    operator: str  # as PyTorch writes it: mylib::op
    function: Callable[..., Any]

    @property
    def label(self) -> str:
        """The name of the function in errors."""
        function = self.function
        name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or repr(function)
        module = getattr(function, "__module__", None)
        return f"{module}.{name}" if module else str(name)


# Global on purpose: `outgrow.rule` registers operators for the whole process, by their names in a trace (mylib.op).
REFERENCES: dict[str, Reference] = {}
BUILT_IN = {operator: Reference(operator._schema.name, function) for operator, function in COMPOSED.items()}


class Substitute:
    """Runs references instead of their operators, for one dispatch mode."""

    def __init__(self, mode: TorchDispatchMode) -> None:
        self.mode = mode
        self.running: list[Reference] = []

    def __call__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of an operator's reference; NotImplemented for an operator without one."""
        if not REFERENCES and not self.running and func not in BUILT_IN:
            return NotImplemented
        reference = REFERENCES.get(str(func.overloadpacket)) or BUILT_IN.get(func)
        if reference is not None:
            return self._run(reference, func, args, kwargs)
        if not self.running:
            return NotImplemented
        with self.mode:  # below autograd, PyTorch does not decompose its composite operators
            return func.decompose(*args, **kwargs)

    def _run(self, reference: Reference, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if reference in self.running:
            raise RuleError(
                f"the rule of operator {reference.operator} calls the operator itself: {reference.label} has to compute the "
                "same with other operators"
            )
        given, settings = _arguments(func, args, kwargs)
        self.running.append(reference)
        try:
            with self.mode:
                result = _apart(func, reference.function(*given, **settings), args)
        except RuleError:
            raise
        except Exception as error:
            raise RuleError(
                f"the rule of operator {reference.operator} failed: {reference.label}{_described(given, settings)} raised "
                f"{type(error).__name__}: {error}"
            ) from error
        finally:
            self.running.pop()
        return _checked(reference, func, result, args, kwargs)


def _arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments up to the last tensor by position, the settings after it by name."""
    last = max((index + 1 for index, arg in enumerate(args) if _has_tensors(arg)), default=0)
    names = [argument.name for argument in func._schema.arguments]
    return list(args[:last]), {**dict(zip(names[last:], args[last:], strict=False)), **kwargs}


def _has_tensors(argument: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(argument))


def _apart(func: Any, result: Any, args: Sequence[Any]) -> Any:
    """The result without memory shared with arguments (unless the operator's own result shares it), as autograd requires."""
    if any(item.alias_info is not None for item in func._schema.returns):
        return result
    memory = {_memory(leaf) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
    return tree_map_only(Tensor, lambda tensor: tensor.clone() if _memory(tensor) in memory else tensor, result)


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else -id(tensor)


def _checked(reference: Reference, func: Any, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compare shapes and types with those of the operator's own results, if the operator runs on such tensors."""
    want = _own(func, args, kwargs)
    found = _geometry(result)
    if want is not None and want != found:
        raise RuleError(
            f"the rule of operator {reference.operator} returns something else than the operator: {reference.label} returns "
            f"{_shown(found)}, and the operator {_shown(want)}"
        )
    return result


Geometry = tuple[tuple[tuple[int, ...], torch.dtype] | str, ...]


def _own(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Geometry | None:
    if func._schema.is_mutable:  # it would write twice
        return None
    try:
        return _geometry(func(*args, **kwargs))
    except Exception:
        if any(leaf.is_meta for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)):
            return None  # it has no implementation for meta tensors
        raise


def _geometry(result: Any) -> Geometry:
    leaves = [] if result is None else tree_leaves(result)
    return tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves)


def _shown(geometry: Geometry) -> str:
    parts = [part if isinstance(part, str) else f"{part[0]} {str(part[1]).removeprefix('torch.')}" for part in geometry]
    return " and ".join(parts) or "nothing"


def _described(args: Sequence[Any], settings: Mapping[str, Any]) -> str:
    """A call as an error shows it: tensors by their shapes."""
    parts = [_value(arg) for arg in args] + [f"{name}={_value(value)}" for name, value in settings.items()]
    return f"({', '.join(parts)})"


def _value(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"tensor of {tuple(value.shape)}"
    return f"[{', '.join(map(_value, value))}]" if isinstance(value, (list, tuple)) else repr(value)
