"""Rules from outside the package: `outgrow.rule`.

A rule of this package moves labels (`interpret_trace.Rule`). A user's rule is simpler: a reference function in plain PyTorch,
whose operators are analysed in place of the user's operator (see `model/reference_operators.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from outgrow.analysis.rules.all_rules import RULES
from outgrow.errors import RuleError
from outgrow.model.reference_operators import BUILT_IN, REFERENCES, Reference

F = TypeVar("F", bound=Callable[..., Any])
EXAMPLE = "outgrow.rule('mylib::fused_gelu', like=torch.nn.functional.gelu)"


@overload
def rule(*operators: str, like: Callable[..., Any], replace: bool = False) -> None: ...


@overload
def rule(*operators: str, replace: bool = False) -> Callable[[F], F]: ...


def rule(*operators: str, like: Callable[..., Any] | None = None, replace: bool = False) -> Any:
    """Describe what an operator computes, so that units can be followed through it.

    For operators of your own (made by `torch.library`, or by an extension in C++), and for operators of PyTorch for which
    outgrow has no rule. The description is a function in plain PyTorch that takes the operator's arguments and computes the
    same: tensors come by position, settings behind the last tensor by name. It runs in the operator's place only while the
    model is traced. Write `like=` if there is such a function already; otherwise decorate one.

    The operator itself still runs in training and in the check of outputs, which refuses a growth if the description is wrong.

    Args:
        operators: names, each as "namespace::name". They must exist: define or import them first.
        like: the function, for all of them. Without it the result is a decorator.
        replace: whether an earlier description, or a rule of outgrow's own, is replaced; refused otherwise.

    Example:
        >>> import outgrow, torch
        >>> from torch import Tensor, nn
        >>> @torch.library.custom_op("doctest::gated", mutates_args=())
        ... def gated(x: Tensor, gate: Tensor) -> Tensor:
        ...     return x * gate.sigmoid()
        >>> @outgrow.rule("doctest::gated")
        ... def reference(x: Tensor, gate: Tensor) -> Tensor:
        ...     return x * torch.sigmoid(gate)
        >>> class Gated(nn.Module):
        ...     def __init__(self) -> None:
        ...         super().__init__()
        ...         self.value, self.gate, self.out = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 2)
        ...     def forward(self, x: Tensor) -> Tensor:
        ...         return self.out(gated(self.value(x), self.gate(x)))
        >>> model = Gated().eval().requires_grad_(False)
        >>> growth = outgrow.widen(model, torch.randn(3, 4), "value", to=12)
        >>> growth.preserving, model.gate.weight.shape
        (True, torch.Size([12, 4]))
    """
    if not operators or not all(isinstance(operator, str) for operator in operators):
        raise RuleError(f"outgrow.rule takes names of operators, not {operators!r}: write e.g. {EXAMPLE}")
    names = [_checked(operator, replace) for operator in operators]

    def decorate(function: F) -> F:
        if not callable(function):
            raise RuleError(f"{function!r} is no function: a rule is a function of the operator's arguments, e.g. {EXAMPLE}")
        for operator, name in zip(operators, names, strict=True):
            REFERENCES[name] = Reference(operator, function)
        return function

    if like is None:
        return decorate
    decorate(like)
    return None


def _checked(operator: str, replace: bool) -> str:
    """The name of an operator in a trace, if a rule for it makes sense."""
    namespace, colons, short = operator.partition("::")
    if not colons or not namespace or not short or "." in short or "." in namespace:
        plain = (operator if colons else operator.replace(".", "::", 1)).partition(".")[0]
        hint = f"{plain!r}, for all its overloads" if "::" in plain else "'mylib::fused_gelu'"
        raise RuleError(f"operator {operator!r}: write namespace::name, e.g. {hint}")
    packet = _packet(operator, namespace, short)
    name = f"{namespace}.{short}"
    if name in REFERENCES and not replace:
        raise RuleError(
            f"operator {operator} has a rule already, {REFERENCES[name].label}: "
            f"outgrow.rule({operator!r}, replace=True) replaces it"
        )
    own = {*RULES, *(str(operator.overloadpacket) for operator in BUILT_IN)}
    if (name in own or name.removesuffix("_") in own) and not replace:
        raise RuleError(
            f"outgrow has a rule for {operator} of its own: outgrow.rule({operator!r}, replace=True) is used in its place"
        )
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    if all(getattr(packet, overload).has_kernel_for_dispatch_key(key) for overload in packet.overloads()):
        raise RuleError(
            f"operator {operator} needs no rule: it is made of other operators, and outgrow traces these. "
            "outgrow.volumes(model, example) names the one that has no rule"
        )
    return name


def _packet(operator: str, namespace: str, short: str) -> Any:
    operators = getattr(torch.ops, namespace)
    try:
        return getattr(operators, short)
    except (AttributeError, RuntimeError):
        start = f"{namespace}::"
        known = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith(start)}
        near = difflib.get_close_matches(operator, known, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise RuleError(
            f"there is no operator {operator}{hint}: define it, or import the library that does, before its rule"
        ) from None
