"""Train one member alone, at the cost of that member: an optimizer has its parameters and its part of the state meanwhile.

A plain step updates whole parameters, whichever member was trained. For a member alone, each of its parameters becomes a tensor
of its own with a gradient of its own size, on the memory of the shared parameter w, and so does the state s of the optimizer:

    w_small = w[rows][:, columns],   s_small = s[rows][:, columns],   step(w_small, gradient, s_small)

This is the step of the stand-alone network. All other entries of w and s stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer

from outgrow.errors import OptimizerError, Problem
from outgrow.families.member import Member
from outgrow.families.own_parameter import PLAIN_STEP, REFUSED, OwnParameter
from outgrow.optimizers.grow_optimizers import refusal
from outgrow.optimizers.lookup import known, name_of, way_out
from outgrow.optimizers.quantised import is_encoded
from outgrow.optimizers.wrappers import held_by, unwrapped

Owned = Mapping[int, OwnParameter]  # by id of the shared parameter
DIVISIBLE = ("entries", "weights", "scalar")  # kinds of state of which a member has a part


class Alone:
    """The contexts in which one member is trained alone; what they need is kept from one to the next."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self._kept: WeakKeyDictionary[Optimizer, dict[int, OwnParameter]] = WeakKeyDictionary()  # by the number of the part
        self._copies: list[OwnParameter] = []  # inside a context

    @contextmanager
    def context(self, optimizers: Sequence[Any], largest: nn.Module, others: Sequence[nn.Module]) -> Iterator[nn.Module]:
        """The member's module with parameters of its own, which the optimizers hold in place of the shared ones.

        largest: the largest member, which has all shared parameters. others: further members.
        """
        plain = unwrapped(optimizers)
        check_divisible([optimizer for optimizer in plain if optimizer not in self._kept], largest)
        own = self._own(plain)
        self._copies = [one for one in own.values() if one.copied]
        with ExitStack() as stack:
            stack.callback(_drop_gradients, own)
            stack.callback(self._copies.clear)
            stack.callback(self.write_back)
            for optimizer in plain:
                stack.enter_context(_lent(optimizer, own, largest))
            for module in (largest, *others) if self._copies else ():
                stack.callback(module.register_forward_pre_hook(self.write_back, prepend=True).remove)
                stack.callback(module.register_state_dict_pre_hook(self.write_back).remove)
            yield stack.enter_context(self.member.holding([one.parameter for one in own.values()]))

    def write_back(self, *_: Any) -> None:
        """Bring the shared parameters up to date inside a context; also a hook of the other members."""
        for one in self._copies:
            one.write()

    def _own(self, optimizers: Sequence[Optimizer]) -> dict[int, OwnParameter]:
        holders = {id(one): (optimizer, dense) for optimizer in optimizers for one, dense in _held_by(optimizer)}
        found: dict[int, OwnParameter] = {}
        for number, part in enumerate(self.member.parts):
            shared = part.shared
            optimizer, dense = holders.get(id(shared), (None, False))
            kept = {} if optimizer is None else self._kept.setdefault(optimizer, {})
            one = kept.get(number)
            if one is not None and one.fits(part, dense):
                one.read()
            else:
                one = OwnParameter(part, dense)
                if not dense:  # a copy of any size: no memory is kept for it
                    kept[number] = one
            shared.grad = None
            found[id(shared)] = one
        return found

    def __reduce__(self) -> Any:
        return Alone, (self.member,)


def _drop_gradients(own: Owned) -> None:
    for one in own.values():
        one.parameter.grad = None


def check_divisible(optimizers: Sequence[Optimizer], largest: nn.Module) -> None:
    """Raise if an optimizer is another model's, or keeps state of which a member has no part."""
    if not optimizers:
        return
    shared, problems = {id(parameter) for parameter in largest.parameters()}, []
    for optimizer in optimizers:
        kind, about = type(optimizer).__name__, known(optimizer)
        whole = refusal(optimizer)
        others = [rule.word for rule in about.rules.values() if rule.kind not in DIVISIBLE]
        if not any(id(parameter) in shared for parameter in held_by(optimizer)):
            reason = "this optimizer belongs to another model: it holds none of the family's parameters"
            problems.append(Problem(kind, reason, "pass the optimizer that was made from family.parameters()"))
        elif about.refusal:
            problems.append(Problem(kind, about.refusal, f"{way_out(optimizer).partition(';')[0]}; or {PLAIN_STEP}"))
        elif whole is not None:
            problems.append(Problem(kind, whole.reason, PLAIN_STEP))
        elif others or any(is_encoded(optimizer, state) for state in optimizer.state.values()):
            what = f"its state ({others[0]})" if others else "its quantised state"
            problems.append(Problem(kind, f"{what} belongs to whole parameters, and a member has no part of it", PLAIN_STEP))
    if problems:
        raise OptimizerError(REFUSED, problems)


def _held_by(optimizer: Optimizer) -> Iterator[tuple[Tensor, bool]]:
    """Parameters, and whether compiled code may update them, which ignores strides: of torch, that is `fused=True`."""
    ours = name_of(type(optimizer)).startswith("torch.")
    for group in optimizer.param_groups:
        dense = not ours or bool(group.get("fused"))
        for parameter in group["params"]:
            yield parameter, dense


@contextmanager
def _lent(optimizer: Optimizer, own: Owned, largest: nn.Module) -> Iterator[None]:
    """An optimizer that holds the member's own parameters, and its part of the state; the lists and dicts stay the same."""
    about, state, before = known(optimizer), optimizer.state, dict(optimizer.state)
    lists = [(group["params"], list(group["params"])) for group in optimizer.param_groups]
    held = {id(original): original for _, originals in lists for original in originals}
    shared = {key: original for key, original in held.items() if key in own}
    unused = {id(one) for one in largest.parameters()} - own.keys() if len(shared) < len(held) else set()
    lent = {key: value for key, value in before.items() if id(key) not in shared and id(key) not in unused}
    for key, original in shared.items():
        if original in before:
            lent[own[key].parameter] = own[key].state_of(about, before[original])
    for key in unused & held.keys():
        held[key].grad = None
    for parameters, originals in lists:
        parameters[:] = [own[id(one)].parameter if id(one) in shared else one for one in originals if id(one) not in unused]
    _refill(state, lent)
    try:
        yield
    finally:
        after = dict(state)
        for parameters, originals in lists:
            parameters[:] = originals
        made = {id(own[key].parameter) for key in shared}
        _refill(state, before | {key: value for key, value in after.items() if id(key) not in made})
        for key, original in shared.items():
            if own[key].parameter in after:
                own[key].return_state(about, state.setdefault(original, {}), after[own[key].parameter])


def _refill(state: dict[Any, Any], values: Mapping[Any, Any]) -> None:
    state.clear()
    state.update(values)
