"""A member's parameter as a tensor of its own, with its part of an optimizer's state.

Both are views of the shared tensors: a step on them is a step on the member's entries. Where entries are not evenly spaced, or
where compiled code of an optimizer expects dense tensors, they are copies, which are written back. So are small matrices:
copying them costs less than computing with strides. Views are kept for the next time, since making them takes longer than an
update of a small tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from outgrow.errors import OptimizerError, Problem
from outgrow.families.shared_entries import Part
from outgrow.optimizers.grow_state import has_tensors
from outgrow.optimizers.lookup import Known
from outgrow.optimizers.state_rules import StateRule

REFUSED = "an optimizer can't train a member alone"
PLAIN_STEP = "train it by a plain step, without family.alone: that updates whole parameters"
SMALL = 2**16  # values of a matrix up to which it is copied


class OwnParameter:
    """The tensor of a part, and parts of states. dense: whether all of them have to be dense."""

    def __init__(self, part: Part, dense: bool) -> None:
        shared = part.shared.detach()
        self.part, self.dense, self._pointer = part, dense, shared.data_ptr()
        values = part.of(shared)
        if not values.is_contiguous() and (dense or values.numel() <= SMALL):
            values = values.contiguous()
        self.copied = not _aliased(values, shared)
        self.parameter = nn.Parameter(values, requires_grad=part.shared.requires_grad)
        self._views: dict[Any, tuple[Tensor, Tensor]] = {}  # of state tensors, with these, by key

    def fits(self, part: Part, dense: bool) -> bool:
        """Whether it can be used again for a part."""
        shared = part.shared
        same = self.part is part and self._pointer == shared.data_ptr() and self.parameter.dtype == shared.dtype
        return same and self.dense == dense and self.parameter.requires_grad == shared.requires_grad

    def read(self) -> None:
        """Take the present values of the shared parameter, if this is a copy."""
        if self.copied:
            self.parameter.detach().copy_(self.part.of(self.part.shared.detach()))

    def write(self) -> None:
        """Bring the shared parameter up to date, if this is a copy."""
        if self.copied:
            self.part.write(self.part.shared.detach(), self.parameter.detach())

    def state_of(self, about: Known, whole: Mapping[Any, Any]) -> dict[Any, Any]:
        """The member's part of the state of the shared parameter."""
        return {key: self._state(about, key, value, whole) for key, value in whole.items()}

    def _state(self, about: Known, key: Any, value: Any, whole: Mapping[Any, Any]) -> Any:
        known, view = self._views.get(key, (None, None))
        if known is value and view is not None:
            return view
        if per_entry(about, self.part.whole, key, whole) is None:
            return value
        view = self.part.of(value)
        if self.dense or not _aliased(view, value):
            return view.contiguous() if not _aliased(view, value) else view.clone(memory_format=torch.contiguous_format)
        self._views[key] = value, view
        return view

    def return_state(self, about: Known, whole: dict[Any, Any], now: Mapping[Any, Any]) -> None:
        """Bring the state of the shared parameter up to date. What is new is made whole."""
        for key, value in now.items():
            known, view = self._views.get(key, (None, None))
            if value is view and known is whole.get(key):
                continue
            rule = per_entry(about, self.part.shape, key, now)
            if rule is None:
                whole[key] = value
                continue
            if not isinstance(whole.get(key), Tensor):
                whole[key] = _started(rule, self.part, value)
            if not _aliased(value, whole[key]):
                self.part.write(whole[key], value)


def per_entry(about: Known, shape: tuple[int, ...], key: Any, state: Mapping[Any, Any]) -> StateRule | None:
    """The rule of a state with one value per entry of a parameter of this shape; None for scalars, and what holds no tensor."""
    rule, value = about.rule(key, state), state[key]
    if rule is not None and rule.kind == "scalar":
        return None
    if not isinstance(value, Tensor) and not has_tensors(value):
        return None
    if rule is None or not isinstance(value, Tensor) or value.shape != shape:
        reason = f"its state {key!r} does not have the shape of a parameter, and a member has no part of it"
        raise OptimizerError(REFUSED, [Problem(about.name, reason, PLAIN_STEP)])
    return rule


def _started(rule: StateRule, part: Part, value: Tensor) -> Tensor:
    """The state of a whole parameter of which only a member's part is known; the rest starts like that of new units."""
    if rule.kind == "weights":
        return part.shared.detach().to(value.dtype, copy=True)
    whole = torch.zeros_like(part.shared, dtype=value.dtype, device=value.device, requires_grad=False)
    return whole.fill_(value.mean()) if rule.start == "mean" and value.numel() else whole


def _aliased(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
