"""Carry a plan out on a model, with a journal from which everything can be restored bit for bit.

Parameters keep their identity (`set_`): ties, hooks and the optimizer's references survive. The old storage is kept until the
journal is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outgrow.apply.collected_writes import Writes
from outgrow.apply.fills import Generators, Init
from outgrow.apply.final_positions import edits_by_tensor as edits_by_tensor
from outgrow.apply.gradient_hooks import hooks_kept
from outgrow.apply.grow_tensor import deviations, fill_values, grown, grown_moment, needs_deviation
from outgrow.growth_plan.plan import Edit, Plan, Setting
from outgrow.model.journal import Journal
from outgrow.model.sandbox import tensors_of
from outgrow.model.walk_modules import module_at

Edits = Sequence[Edit]


@torch.no_grad()
def apply_plan(
    model: nn.Module,
    plan: Plan,
    inits: Mapping[str, Init],
    journal: Journal,
    like: Mapping[str, Tensor] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    olds: Mapping[str, Tensor] | None = None,
) -> None:
    """Grow the model's tensors and gradients, and set its attributes.

    tensors: the model's tensors by name, if the caller has them already. olds: the same, detached.
    like: if this model is a copy, the original's tensors, perhaps on another device: the copy gets the values drawn there.
    """
    tensors = tensors_of(model) if tensors is None else tensors
    olds = {name: tensor.detach() for name, tensor in tensors.items()} if olds is None else olds
    by_tensor = edits_by_tensor(plan)
    drawn = [name for name, edits in by_tensor.items() if needs_deviation(edits) and not olds[name].is_meta]
    spread = dict(zip(drawn, deviations([olds[name] for name in drawn]), strict=True))
    writes, generators = Writes(), Generators()
    news = {name: grown(olds[name], edits, writes) for name, edits in by_tensor.items()}
    writes.make()
    for name, edits in by_tensor.items():
        tensor, new = tensors[name], news[name]
        device = None if like is None else like[name].device
        fill_values(new, olds[name], edits, olds, plan.seed, inits, spread.get(name, 0.0), device, generators)
        gradient = None
        if tensor.grad is not None:
            before = tensor.grad.to_dense() if tensor.grad.is_sparse else tensor.grad
            gradient = grown_moment(before, edits, power=1, fresh="zero", writes=writes)
        _replace(tensor, olds[name], new, gradient, journal)
    writes.make()
    modules = dict(model.named_modules(remove_duplicate=False))
    for setting in plan.settings:
        _set(modules[setting.module], setting, journal)
    for module in modules.values():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def _replace(tensor: Tensor, old: Tensor, new: Tensor, gradient: Tensor | None, journal: Journal) -> None:
    """Give a tensor new values and a new gradient; call it with gradient recording off."""
    old_gradient = tensor.grad

    def put(value: Tensor, grad: Tensor | None) -> None:
        with hooks_kept(tensor):
            tensor.grad = None
            tensor.set_(value)  # type: ignore[call-overload]
            if grad is not None:
                tensor.grad = grad

    def put_back() -> None:
        with torch.no_grad():
            put(old, old_gradient)

    journal.note(put_back)
    put(new, gradient)


def apply_setting(model: nn.Module, setting: Setting, journal: Journal) -> None:
    """Set one attribute (or one item of a tuple, list or dict that an attribute holds)."""
    _set(module_at(model, setting.module), setting, journal)


def _set(module: nn.Module, setting: Setting, journal: Journal) -> None:
    before = vars(module)[setting.name]
    after: Any = setting.new
    if setting.item is None:
        pass
    elif isinstance(setting.item, int) and isinstance(before, (tuple, list)):
        items = list(before)
        items[setting.item] = setting.new
        after = type(before)(items)
    elif isinstance(before, dict):
        after = {**before, setting.item: setting.new}
    elif isinstance(setting.item, str):  # an object with settings as attributes, such as a configuration of Transformers
        journal.note(_restorer(before))
        return setattr(before, setting.item, setting.new)
    journal.note(lambda: vars(module).__setitem__(setting.name, before))
    vars(module)[setting.name] = after


def _restorer(config: Any) -> Callable[[], None]:
    """A function that restores all present attributes of a configuration object, and the contents of lists and dicts there.

    All attributes, because setting one of them may change others (properties with setters, aliases).
    """
    attributes = dict(vars(config))
    contents = [(value, type(value)(value)) for value in attributes.values() if type(value) in (dict, list)]

    def restore() -> None:
        vars(config).clear()
        vars(config).update(attributes)
        for value, before in contents:
            value.clear()
            value.extend(before) if isinstance(value, list) else value.update(before)

    return restore
