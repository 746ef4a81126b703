"""Fade in new blocks: their outputs are multiplied by a gate that goes from 0 to 1 over some optimizer steps, then is removed.

    branch:      y → λ·y                     a copied block starts as the identity and ends as itself
    block:       x → x + λ·(block(x) − x)    the same for a block without such branches, as one with a norm after its sum
    activation:  x → (1 − λ)·x + λ·ψ(x)      NetMorph's P-activation: any ψ is legal where it is inserted

At λ = 0 the growth is exact for any block; there is no jump later, since λ increases by 1/steps per step. A gate advances when
an optimizer with parameters of its block has made a step. It is not part of the state dict: `outgrow.save` writes the progress
of each gate, and `outgrow.load` restores it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import FrameType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from outgrow.errors import MethodError, SizeError
from outgrow.model.other_optimizers import held_parameters
from outgrow.modules.fade_warnings import stop_warning, warn_when_written
from outgrow.wrong_arguments import usage

WHOLE_BLOCK = ":block"  # ends the key of a gate around a block, in `gates_of` and in files; no path of a module ends so


class Gate:
    """A factor λ from 0 to 1 that increases with optimizer steps. A copy of a model has its own gates, with their own steps."""

    def __init__(self, owner: nn.Module, steps: int, done: int = 0) -> None:
        self.owner, self.steps, self.done = owner, steps, done
        self.held: list[nn.Module] = []  # modules whose outputs it multiplies
        self.clock: nn.Parameter | None = None  # of the owner or, if that is not trained, of the model around it
        self.level = torch.tensor(done / steps, device=self.device)  # a tensor, so that a compiled model is not recompiled
        CLOCK.watch(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        CLOCK.watch(self)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):  # attention also returns its weights
            return (output[0] * self.level.to(output[0]), *output[1:])
        return output * self.level.to(output)

    @property
    def device(self) -> torch.device:
        """Where its level is kept: a level on the host would make every forward pass on a GPU wait for the pass before it."""
        beside = self.clock if self.clock is not None else next(self.owner.parameters(), None)
        return torch.device("cpu") if beside is None or beside.is_meta else beside.device

    def moves_with(self, held: AbstractSet[int]) -> bool:
        """Whether it advances when an optimizer with these parameters makes a step."""
        clock = next(self.owner.parameters(), None) if self.clock is None else self.clock
        return id(clock) in held

    def follow_training_of(self, model: nn.Module) -> None:
        """Advance with the optimizer that trains the owner or, if the owner is frozen or has no parameters, the model."""
        own = [p for p in self.owner.parameters() if p.requires_grad]
        self.clock = next((p for p in (*own, *model.parameters()) if p.requires_grad), None)

    def advance(self) -> None:
        """Advance by one step; after the last step the gate is removed."""
        self.done += 1
        if self.level.device != self.device:  # the model has moved
            self.level = self.level.to(self.device)
        self.level.fill_(min(self.done / self.steps, 1.0))
        if self.done >= self.steps:
            self.open()

    def attach(self, module: nn.Module) -> None:
        """Multiply a module's output by the gate."""
        module.register_forward_hook(self)
        self.held.append(module)
        warn_when_written(module)

    def open(self) -> None:
        for module in self.held:
            _remove_hooks(module, [key for key, hook in module._forward_hooks.items() if hook is self])
            if not any(isinstance(hook, Gate) for hook in module._forward_hooks.values()):
                stop_warning(module)


class BlockGate(Gate):
    """The gate around a block: x → x + λ·(block(x) − x), x being the first tensor of floats that the block is given."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:  # type: ignore[override]
        given = (*args, *kwargs.values())
        x = next(one for one in given if isinstance(one, Tensor) and one.is_floating_point())
        made = output[0] if isinstance(output, tuple) else output
        mixed = x + self.level.to(made) * (made - x)
        return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

    def attach(self, module: nn.Module) -> None:
        """Put the gate around a block, before hooks that record its output."""
        module.register_forward_hook(self, prepend=True, with_kwargs=True)
        self.held.append(module)
        warn_when_written(module)


def _remove_hooks(module: nn.Module, keys: Sequence[int]) -> None:
    for key in keys:
        del module._forward_hooks[key]
        module._forward_hooks_with_kwargs.pop(key, None)


@usage("outgrow.PActivation(torch.nn.Tanh(), steps=100)")
class PActivation(nn.Module):
    """(1 − λ)·x + λ·ψ(x), with λ going from 0 to 1 in training; then it is the plain activation.

    If a growth has inserted it, λ advances with the optimizer that trains the block around it, and the activation replaces it
    in the end; if it was inserted by hand, λ advances with any optimizer.

    Example:
        >>> soft = PActivation(nn.Tanh(), steps=10)
        >>> bool(torch.equal(soft(torch.ones(3)), torch.ones(3))), soft.level
        (True, 0.0)
    """

    def __init__(self, activation: nn.Module, steps: int, done: int = 0) -> None:
        super().__init__()
        if not isinstance(activation, nn.Module):
            raise MethodError(f"activation={activation!r}: pass a module, e.g. torch.nn.Tanh()")
        if type(steps) is not int or steps < 1:
            raise SizeError(f"steps={steps!r}: write a number of optimizer steps, a whole number above 0")
        self.activation = activation
        self.gate = Ramp(self, steps, done)
        warn_when_written(self)

    @property
    def level(self) -> float:
        return float(self.gate.level)

    def forward(self, x: Tensor) -> Tensor:
        level = self.gate.level.to(x)
        activated: Tensor = self.activation(x.clone() if getattr(self.activation, "inplace", False) else x)
        result = activated if self.gate.done >= self.gate.steps else x + level * (activated - x)
        return result

    def extra_repr(self) -> str:
        return f"level={self.level:g} of 1"


class Ramp(Gate):
    """The gate of a P-activation, which the activation replaces in the end."""

    def __init__(self, owner: nn.Module, steps: int, done: int = 0) -> None:
        super().__init__(owner, steps, done)
        self.places: list[tuple[nn.Module, str]] = []  # parent modules of the P-activation and its copies, and its name there

    def moves_with(self, held: AbstractSet[int]) -> bool:
        """A P-activation that was inserted by hand advances with any optimizer."""
        return not self.places or super().moves_with(held)

    def open(self) -> None:
        for parent, key in self.places:
            child = parent._modules[key]
            if isinstance(child, PActivation):
                _replace_by_activation(parent, key, child)
            elif child is not None:  # another growth has wrapped it into an nn.Sequential
                for module in list(child.modules()):
                    for name, part in list(module._modules.items()):
                        if isinstance(part, PActivation) and part.gate is self:
                            _replace_by_activation(module, name, part)


def _replace_by_activation(parent: nn.Module, key: str, soft: PActivation) -> None:
    """Replace a P-activation by its activation, and move the gates on its output to the activation."""
    parent._modules[key] = soft.activation
    for gate in [hook for hook in soft._forward_hooks.values() if isinstance(hook, Gate)]:
        gate.attach(soft.activation)


class Moving(Protocol):
    """A fade that advances with optimizer steps until it is done."""

    steps: int
    done: int

    def moves_with(self, held: AbstractSet[int]) -> bool: ...

    def advance(self) -> None: ...


class Clock:
    """The fades in progress. Like the watch for stale optimizers it is global, since torch calls the hook for every optimizer
    of the process. It keeps nothing alive."""

    def __init__(self) -> None:
        # in the order in which they began, on which the rounding of sums depends
        self.moving: WeakKeyDictionary[Moving, None] = WeakKeyDictionary()
        self.started = False

    def watch(self, one: Moving) -> None:
        if one.done < one.steps:
            self.moving[one] = None
            if not self.started:
                register_optimizer_step_post_hook(_after_step)
                self.started = True


CLOCK = Clock()


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if CLOCK.moving and _only_initialises_state():
        return
    held = {id(parameter) for parameter in held_parameters(optimizer)} if CLOCK.moving else set()
    moving = [one for reference in CLOCK.moving.keyrefs() if (one := reference()) is not None]  # the loop may add others
    for one in [one for one in moving if one.moves_with(held)]:
        one.advance()
        if one.done >= one.steps:
            CLOCK.moving.pop(one, None)


def _only_initialises_state() -> bool:
    """Whether a step only creates optimizer state: torch's distributed checkpoints make one with learning rate zero before they
    load state, which only the call stack distinguishes from a real one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_init_optim_state":
        frame = frame.f_back
    return frame is not None


def close_gates(model: nn.Module, blocks: Sequence[nn.Module], paths: Sequence[str], steps: int) -> None:
    """Put gates on the outputs of some modules of a block and of its averaged copies; they advance with the first block."""
    for path in paths:
        gate = Gate(blocks[0], steps)
        gate.follow_training_of(model)
        for block in blocks:
            gate.attach(block.get_submodule(path))


def close_around(model: nn.Module, blocks: Sequence[nn.Module], steps: int) -> None:
    """Put one gate around a block and its averaged copies; it advances with the first block."""
    gate = BlockGate(blocks[0], steps)
    gate.follow_training_of(model)
    for block in blocks:
        gate.attach(block)


def soften(blocks: Sequence[nn.Module], paths: Sequence[str], steps: int) -> None:
    """Put P-activations in place of activations of a new block and of its averaged copies."""
    for block in blocks:
        for path in paths:
            parent, _, key = path.rpartition(".")
            children = block.get_submodule(parent)._modules
            activation = children[key]
            assert activation is not None
            children[key] = PActivation(activation, steps).train(activation.training)


def link_ramps(blocks: Sequence[nn.Module]) -> None:
    """Register the parents of P-activations; those of averaged copies share the gate of the first block's."""
    for path, module in list(blocks[0].named_modules()):
        if isinstance(module, PActivation):
            parent, _, key = path.rpartition(".")
            module.gate.owner = blocks[0]
            for block in blocks:
                twin = block.get_submodule(path)
                assert isinstance(twin, PActivation)
                twin.gate = module.gate
                module.gate.places.append((block.get_submodule(parent), key))


def gates_of(model: nn.Module) -> dict[str, Gate]:
    """Gates of fades in progress, by the path of the module, or of the P-activation's activation, that they multiply.

    The key of a gate around a block is the block's path with `WHOLE_BLOCK` behind it.
    """
    found: dict[str, Gate] = {}
    for path, module in model.named_modules():
        for hook in module._forward_hooks.values():
            if isinstance(hook, Gate):
                found[path + WHOLE_BLOCK * isinstance(hook, BlockGate)] = hook
        if isinstance(module, PActivation):
            found[f"{path}.activation"] = module.gate
    return {path: gate for path, gate in found.items() if gate.done < gate.steps}


def without_gates(block: nn.Module) -> None:
    """Remove the gates from a copy of a block; P-activations get gates of their own, at the same progress."""
    for module in block.modules():
        if isinstance(module, PActivation):
            module.gate = Ramp(block, module.gate.steps, module.gate.done)
        _take_off(module)
    link_ramps([block])


def _take_off(module: nn.Module) -> None:
    _remove_hooks(module, [key for key, hook in module._forward_hooks.items() if isinstance(hook, Gate)])
    if not isinstance(module, PActivation):
        stop_warning(module)


def share_gates(model: nn.Module, copy: nn.Module) -> None:
    """Make a copy of a model (an average of its weights) share the model's gates; only the model's steps count."""
    twins = dict(copy.named_modules())
    soft = {path: module for path, module in model.named_modules() if isinstance(module, PActivation)}
    gates = {path: gate for path, gate in gates_of(model).items() if path.removesuffix(".activation") not in soft}
    for path in gates:
        _take_off(twins[path.removesuffix(WHOLE_BLOCK)])
    for path, gate in gates.items():
        gate.attach(twins[path.removesuffix(WHOLE_BLOCK)])
    for path, module in soft.items():
        twin, parent = twins[path], path.rpartition(".")
        assert isinstance(twin, PActivation)
        twin.gate = module.gate
        module.gate.places.append((twins[parent[0]], parent[2]))


def restore_gates(model: nn.Module, levels: Mapping[str, tuple[int, int]]) -> None:
    """Restore gates to their progress: (steps made, total steps) by path. P-activations that are not listed are done.

    The model may have been trained further since, so that gates have advanced or plain activations have replaced P-activations.
    """
    modules = dict(model.named_modules())
    for path in [path for path in levels if path.removesuffix(WHOLE_BLOCK) not in modules]:
        soft = path.removesuffix(".activation")
        parent, _, key = soft.rpartition(".")
        modules[parent]._modules[key] = PActivation(modules[soft], levels[path][1]).train(modules[soft].training)
    modules = dict(model.named_modules())
    for module in modules.values():
        _take_off(module)
    activations = {f"{path}.activation" for path, module in modules.items() if isinstance(module, PActivation)}
    for key in [key for key in levels if key not in activations]:
        path = key.removesuffix(WHOLE_BLOCK)
        gate = (Gate if key == path else BlockGate)(_owner(model, path), levels[key][1], levels[key][0])
        gate.follow_training_of(model)
        gate.attach(modules[path])
    for path, module in modules.items():
        if isinstance(module, PActivation):
            parent, _, key = path.rpartition(".")
            done, steps = levels.get(f"{path}.activation", (1, 1))
            module.gate.owner, module.gate.places = _owner(model, path), [(model.get_submodule(parent), key)]
            module.gate.done, module.gate.steps = done, steps
            module.gate.level.fill_(done / steps)
            CLOCK.watch(module.gate)
            if done >= steps:
                module.gate.open()


def _owner(model: nn.Module, path: str) -> nn.Module:
    """The innermost module with parameters around a path, with whose optimizer a gate advances."""
    while path and not any(True for _ in model.get_submodule(path).parameters()):
        path = path.rpartition(".")[0]
    return model.get_submodule(path)
