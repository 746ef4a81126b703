"""A smaller member of a family: the model's modules at an earlier size, which compute with entries of shared parameters.

A member is made right before a growth, as a copy of the model: its own modules, settings, configuration and buffers (so that
each size has its own batch statistics), but the model's own parameters. The growth enlarges these in place. From then on the
member's modules hold views of them, renewed before every forward pass: a view belongs to the autograd graph of its pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from outgrow.errors import GrowthError
from outgrow.families.shared_entries import Kept, parts_of
from outgrow.model.copy_block import copy_of_block

Places = list[tuple[nn.Module, str, int]]  # modules and names of parameters, with the number of their part


HOOKS = "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"


class Member:
    """The modules of one size, and the entries of the shared parameters that they compute with."""

    def __init__(self, model: nn.Module) -> None:
        """A member of the model's present size; `grown` follows the model's next growth."""
        parts = parts_of(model)
        self.module = copied(model, {})
        self.parts = list(parts.values())
        numbers = {key: number for number, key in enumerate(parts)}
        self._places: Places = [
            (module, key, numbers[id(parameter)])
            for module in self.module.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._recurrent = [module for module in self.module.modules() if isinstance(module, nn.RNNBase)]
        self._views: list[Any] = [None] * len(self._places)  # what `install` has put there
        self._fixed = self._alone = False
        self.module.register_forward_pre_hook(self.renew, prepend=True)
        self.module.register_state_dict_pre_hook(self)
        self.module.register_load_state_dict_pre_hook(self)
        self.module.register_load_state_dict_post_hook(self.loaded)

    def __call__(self, module: nn.Module, *_: Any) -> None:
        """The hook before state dicts, since copying has put the shared parameters there."""
        if not self._fixed:
            self.install()

    def renew(self, module: nn.Module, *_: Any) -> None:
        """The hook before each forward pass. Tensors that other code has put there (`torch.func.functional_call`) stay."""
        if not self._fixed:
            ours = {id(one) for one in (*self._views, *(part.shared for part in self.parts))}
            before, views = self._present(), self._views
            self.install()
            if any(id(one) not in ours for one in before):
                kept = [id(one) in ours for one in before]
                self._set([new if own else old for own, new, old in zip(kept, self._views, before, strict=True)])
                self._views = [new if own else view for own, new, view in zip(kept, self._views, views, strict=True)]

    @torch.no_grad()
    def loaded(self, module: nn.Module, *_: Any) -> None:
        """The hook after `load_state_dict`, which has written to views, but also to parts that are copies."""
        if not self._fixed:
            for number, value in {number: module._parameters[key] for module, key, number in self._places}.items():
                shared = self.parts[number].shared
                if value is not None and value.untyped_storage().data_ptr() != shared.untyped_storage().data_ptr():
                    self.parts[number].write(shared, value)

    def grown(self, kept: Kept) -> None:
        """Keep computing with the same entries after a growth of the shared parameters."""
        self.parts = [part.grown(kept) for part in self.parts]
        self.install()

    def install(self) -> None:
        """Give the modules their parts of the shared parameters, as they are now."""
        with torch.inference_mode(False), torch.enable_grad():
            self._put([part.value for part in self.parts])
        self._views = self._present()

    def release(self) -> None:
        """Give the modules the shared parameters themselves, which can be copied; `install` is needed before they run."""
        self._put([part.shared for part in self.parts])

    @contextmanager
    def fixed(self) -> Iterator[nn.Module]:
        """The member's modules with their present tensors, which other code may substitute inside the context."""
        self.install()
        self._fixed = True
        try:
            yield self.module
        finally:
            self._fixed = False

    @contextmanager
    def holding(self, values: Sequence[Tensor]) -> Iterator[nn.Module]:
        """The member's modules with other tensors inside the context, one per part."""
        before = self._present()
        self._put(values)
        self._fixed = self._alone = True
        try:
            yield self.module
        finally:
            self._fixed = self._alone = False
            self._set(before)

    def _present(self) -> list[Any]:
        return [module._parameters[key] for module, key, _ in self._places]

    def _put(self, values: Sequence[Tensor]) -> None:
        self._set([values[number] for _, _, number in self._places])

    def _set(self, values: Sequence[Any]) -> None:
        for (module, key, _), value in zip(self._places, values, strict=True):
            module._parameters[key] = value
        for recurrent in self._recurrent:
            recurrent._flat_weights = [recurrent._parameters.get(name) for name in recurrent._flat_weights_names]

    @property
    def parameters(self) -> int:
        """The number of values in its parameters."""
        return sum(torch.Size(part.shape).numel() for part in self.parts)

    def extracted(self) -> nn.Module:
        """A copy with parameters of its own."""
        own = {id(part.shared): _parameter(part.value, part.shared.requires_grad) for part in self.parts}
        before = self._present()
        self.release()
        try:
            return copied(self.module, own)
        finally:
            self._set(before)

    def __getstate__(self) -> dict[str, Any]:
        if self._alone:
            raise GrowthError("a member that is trained alone can't be copied: copy it by family.extract, or after the context")
        self.release()  # views can be neither copied nor pickled
        return {**vars(self), "_views": [None] * len(self._places)}


def extracted(model: nn.Module) -> nn.Module:
    """A copy of a model with parameters of its own, without gradients."""
    return copied(model, {id(tensor): _parameter(tensor, tensor.requires_grad) for tensor in model.parameters()})


def _parameter(value: Tensor, trained: bool) -> nn.Parameter:
    return nn.Parameter(value.detach().clone(memory_format=torch.preserve_format), requires_grad=trained)


def copied(model: nn.Module, parameters: Mapping[int, nn.Parameter]) -> nn.Module:
    """A copy of a model with buffers of its own. parameters: to put in place of the model's own, by id; others are shared."""
    hooks: list[Any] = [vars(model)[name] for name in HOOKS]
    kept = [dict(one) for one in hooks]
    for one in hooks:
        for number in [number for number, hook in one.items() if _is_ours(hook)]:
            del one[number]
    try:
        new = copy_of_block(model, model, shared=True)
    finally:
        for one, before in zip(hooks, kept, strict=True):
            one.update(before)
    buffers: dict[int, Tensor] = {}
    for module in new.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = parameters.get(id(parameter), parameter)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffers.setdefault(id(buffer), buffer.detach().clone())
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [module._parameters.get(name) for name in module._flat_weights_names]
            if parameters:
                module.flatten_parameters()
    return new


def _is_ours(hook: Any) -> bool:
    """Whether a hook belongs to a member, and not to the model."""
    hook = getattr(hook, "hook", hook)  # torch wraps some
    return type(getattr(hook, "__self__", hook)).__module__.startswith("outgrow.families.")
