"""Copy a block to insert it as a new block: with its tensors and settings, but without the user's hooks.

`copy.deepcopy` copies hooks too. A function that records the outputs of its block would then record the new block in the same
list; a recording object would be copied unnoticed, with its whole contents; and the handle of a hook removes it from the old
block only. So hooks are not copied, except for those that are part of the model: torch's own (weight norm, spectral norm,
pruning), those of Transformers (which records hidden states with them) and methods of the model's modules. The library would
have registered all of these in a model built with the new block.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from types import MethodType
from typing import Any

from torch import Tensor, nn

LIBRARIES = ("torch.", "transformers.")  # whose hooks are part of a model

HOOKS = {  # each with the dicts that hold options of the same hooks
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_backward_hooks": (),
    "_backward_pre_hooks": (),
}


def copy_of_block(block: nn.Module, model: nn.Module, shared: bool = False) -> nn.Module:
    """A deep copy of a block of a model; for its hooks see above. shared: it uses the block's own tensors."""
    instead: dict[int, Any] = {id(vars(one)[name]): OrderedDict() for one in block.modules() for name in HOOKS}
    for value in (value for one in block.modules() for value in vars(one).values() if isinstance(value, Tensor)):
        if not value.is_leaf:  # computed from parameters in the last pass, as by pruning: torch can't copy it
            instead[id(value)] = value.detach().clone()
    if shared:
        instead.update({id(tensor): tensor for tensor in (*block.parameters(), *block.buffers())})
    new = copy.deepcopy(block, instead)
    copies = dict(new.named_modules(remove_duplicate=False))
    pairs = [(module, copies[path]) for path, module in block.named_modules() if path in copies]
    twins, own = {id(old): module for old, module in pairs}, {id(module) for module in model.modules()}
    for old, module in pairs:
        for name, more in HOOKS.items():
            kept = {key: _for(hook, twins) for key, hook in vars(old)[name].items() if _is_part(hook, own)}
            setattr(module, name, OrderedDict(kept))
            for other in more:
                setattr(module, other, OrderedDict((key, value) for key, value in vars(old)[other].items() if key in kept))
    return new


def _is_part(hook: Any, own: set[int]) -> bool:
    """Whether a hook belongs to the model; own: ids of its modules."""
    kinds = (getattr(hook, "__module__", None), *(kind.__module__ for kind in type(hook).__mro__))
    return id(getattr(hook, "__self__", None)) in own or any(str(kind).startswith(LIBRARIES) for kind in kinds)


def _for(hook: Any, twins: dict[int, nn.Module]) -> Any:
    """The hook itself or, for a method of a module in the block, the same method of the module's copy."""
    twin = twins.get(id(getattr(hook, "__self__", None)))
    return hook if twin is None else MethodType(hook.__func__, twin)
