"""An independent judge of growths: it shares no code with outgrow's own check.

Old and new model run on inputs that the growth never saw, in eval and train mode with dropout off; the yardstick is how far the
old model's outputs move when each of its weights moves to a neighbouring float.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

RELATIVE, MULTIPLE = 1e-11, 10.0


def without_dropout(model: nn.Module) -> nn.Module:
    """A copy without dropout."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            module.dropout = 0.0
    return twin


@torch.no_grad()
def outputs(model: nn.Module, x: Any, training: bool) -> Tensor:
    """Outputs of a copy without dropout; the model's running statistics are unchanged."""
    twin = without_dropout(model).train(training)
    return twin(*x) if isinstance(x, tuple) else twin(x)


@torch.no_grad()
def jiggled(model: nn.Module, seed: int) -> nn.Module:
    """A copy with every weight moved to the next float, up or down at random."""
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*twin.parameters(), *twin.buffers()):
        if tensor.is_floating_point():
            up = torch.rand(tensor.shape, generator=generator) < 0.5
            far = torch.where(up, torch.inf, -torch.inf).to(tensor)
            tensor.copy_(torch.nextafter(tensor, far))
    return twin


def distance(one: Tensor, other: Tensor) -> float:
    """Largest difference, relative to the largest value of `one`."""
    assert one.shape == other.shape
    assert bool(torch.isfinite(one).all()), "the old model's outputs are not finite: choose another example"
    assert bool(torch.isfinite(other).all()), "the grown model's outputs are not finite"
    return float((one - other).abs().max() / one.abs().max().clamp_min(1e-300))


class Passes:
    """Forward passes on one copy of a model without dropout. After each pass the copy is as before."""

    def __init__(self, model: nn.Module) -> None:
        self.twin = without_dropout(model)

    @torch.no_grad()
    def outputs(self, x: Any, training: bool) -> Tensor:
        parts = [part for module in self.twin.modules() for part in (vars(module), module._buffers)]
        before = [(part, dict(part)) for part in parts]
        values = [(buffer, buffer.clone()) for buffer in self.twin.buffers()]
        self.twin.train(training)
        result = self.twin(*x) if isinstance(x, tuple) else self.twin(x)
        result = result.clone()  # it may be a view of a buffer
        for part, entries in before:
            part.clear()
            part.update(entries)
        for buffer, value in values:
            buffer.copy_(value)
        return result


def assert_same_function(
    old: nn.Module, new: nn.Module, examples: Sequence[Any], modes: Sequence[bool] = (False, True)
) -> None:
    """Check that outputs agree. `modes`: False for eval mode, True for train mode."""
    ungrown, grown = Passes(old), Passes(new)
    for x in examples:
        for training in modes:
            want, now = ungrown.outputs(x, training), grown.outputs(x, training)
            off = distance(want, now)
            if off <= RELATIVE:
                continue
            moved = max(distance(want, outputs(jiggled(old, seed), x, training)) for seed in range(3))
            if off > MULTIPLE * moved:  # cancelling terms leave rounding errors: use the grown network's own sensitivity
                moved = max(distance(now, outputs(jiggled(new, seed), x, training)) for seed in range(3))
            mode = "train" if training else "eval"
            assert off <= MULTIPLE * moved, f"the outputs moved by {off:.1e} in {mode} mode; one ulp moves them by {moved:.1e}"


def assert_learns(model: nn.Module, x: Any) -> None:
    """A backward pass runs, and gives finite gradients to all parameters."""
    twin = copy.deepcopy(model).train()
    twin.zero_grad()
    output = twin(*x) if isinstance(x, tuple) else twin(x)
    output.square().mean().backward()
    for name, parameter in twin.named_parameters():
        assert parameter.grad is not None, f"no gradient reaches {name}"
        assert parameter.grad.shape == parameter.shape
        assert bool(torch.isfinite(parameter.grad).all()), f"the gradient of {name} is not finite"


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything that a refused growth must leave alone, as plain data."""
    state: dict[str, Any] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        state[f"tensor {name}"] = (id(tensor), tuple(tensor.shape), tensor.detach().numpy().tobytes())
    for path, module in model.named_modules():
        hooks = [(id(hook), getattr(hook, "done", None)) for hook in module._forward_hooks.values()]  # among them gates
        state[f"module {path}"] = (id(module), type(module), module.training, hooks)
        for name, value in vars(module).items():
            if not name.startswith("_"):
                state[f"attribute {path}.{name}"] = (id(value), value.done) if name == "gate" else copy.deepcopy(value)
    return state


def random_states() -> tuple[Any, ...]:
    numpy = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), numpy[1].tobytes(), numpy[2], random.getstate()


def names_and_kinds(model: nn.Module) -> tuple[Any, ...]:
    """Properties that widening never changes: the state's names, the modules' classes, modes and order."""
    return tuple(model.state_dict()), tuple((path, type(module), module.training) for path, module in model.named_modules())


@torch.no_grad()
def shake(model: nn.Module, seed: int = 0) -> nn.Module:
    """Move every parameter and buffer of a library's model away from where it was initialised; variances stay positive."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        if name.endswith("running_var"):
            tensor.mul_(1 + noise.abs())
        elif isinstance(tensor, nn.Parameter) or name.endswith("running_mean"):
            tensor.add_(0.5 * noise * max(float(tensor.std(correction=0)), 0.05))
        else:  # masks and tables keep their zeros and infinities
            tensor.mul_(1 + 0.1 * noise)
    return model


def newborn(plan: Any, name: str, shape: torch.Size) -> Tensor:
    """A mask of the entries of a tensor that a plan has added."""
    mask = torch.zeros(shape, dtype=torch.bool)
    ages: dict[int, list[bool]] = {}  # by axis, for each position whether it is new
    for edit in plan.edits:
        if edit.tensor == name and hasattr(edit, "at"):
            before = iter(ages.get(edit.axis, [False] * edit.size))
            fresh = set(edit.at)
            ages[edit.axis] = [at in fresh or next(before) for at in range(edit.size + len(fresh))]
    for axis, flags in ages.items():
        mask |= torch.tensor(flags).view([-1 if a == axis else 1 for a in range(len(shape))])
    return mask


def gradient_shares(model: nn.Module, plan: Any, batches: Sequence[Tensor]) -> tuple[float, float]:
    """Shares of the new and of the old weights that get a gradient in a few steps of training on a copy in float32."""
    twin = copy.deepcopy(model).float().train()
    optimizer = torch.optim.SGD(twin.parameters(), lr=1e-3)
    seen = {name: torch.zeros(parameter.shape, dtype=torch.bool) for name, parameter in twin.named_parameters()}
    for batch in batches:
        optimizer.zero_grad()
        output = twin(batch.float())
        (output * torch.linspace(-1.0, 1.0, output.numel()).view_as(output)).mean().backward()
        for name, parameter in twin.named_parameters():
            if parameter.grad is not None:
                assert bool(torch.isfinite(parameter.grad).all()), f"the gradient of {name} is not finite"
                seen[name] |= parameter.grad != 0
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
    counts = torch.zeros(2, 2)
    for name, flags in seen.items():
        new = newborn(plan, name, flags.shape)
        counts += torch.tensor([[(flags & new).sum(), new.sum()], [(flags & ~new).sum(), (~new).sum()]])
    return float(counts[0, 0] / counts[0, 1]), float(counts[1, 0] / counts[1, 1])
