"""Optimizers that were not passed to outgrow: a growth must not affect them, unless their state is certainly stale."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

import outgrow
from outgrow.errors import StaleOptimizerError
from outgrow.model.other_optimizers import WeakNotes, held_parameters, state_of
from outgrow.modules.gates import CLOCK
from outgrow.modules.gates import _after_step as after_fade
from outgrow.optimizers.stale import _before_step as before_step
from outgrow.runs.step_counts import _after_step as after_step

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Make = Callable[[Any], Any]


def network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def train(model: nn.Module, optimizer: Any, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()


def after_growth(make: Make, grown: bool) -> tuple[nn.Module, Any]:
    """Train with an optimizer created after a growth, on the grown model or on another one."""
    model, other = network(), network(1)
    outgrow.widen(model, X, "0", by=4)
    trained = model if grown else other
    optimizer = make(trained.parameters())
    train(trained, optimizer)
    again = make(trained.parameters())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(trained, again)
    return trained, again


def timm_lookahead(parameters: Any) -> Any:
    from timm.optim.lookahead import Lookahead

    return Lookahead(Adam(parameters), k=2)


def timm_novograd(parameters: Any) -> Any:
    from timm.optim import NvNovoGrad

    return NvNovoGrad(parameters, lr=1e-2)


def of_pytorch_optimizer(name: str, wraps: bool = False, **options: Any) -> Make:
    def make(parameters: Any) -> Any:
        import pytorch_optimizer

        kind = getattr(pytorch_optimizer, name)
        return kind(Adam(parameters), **options) if wraps else kind(parameters, **options)

    return make


def galore(parameters: Any) -> Any:
    """With a rank of 8, its moments have the shape that the first layer's weight had before the growth."""
    import pytorch_optimizer

    group = {"params": list(parameters), "rank": 8, "update_proj_gap": 5, "scale": 1.0, "projection_type": "std"}
    return pytorch_optimizer.GaLore([group])


LIBRARIES: dict[str, Make] = {
    "timm's Lookahead": timm_lookahead,
    "timm's NovoGrad": timm_novograd,
    "Lookahead": of_pytorch_optimizer("Lookahead", wraps=True),
    "OrthoGrad": of_pytorch_optimizer("OrthoGrad", wraps=True),
    "NovoGrad": of_pytorch_optimizer("NovoGrad"),
    "Amos": of_pytorch_optimizer("Amos"),
    "GaLore": galore,
}


@pytest.mark.parametrize("grown", [False, True], ids=["other model", "grown model"])
@pytest.mark.parametrize("name", LIBRARIES)
def test_optimizers_of_libraries_step_freely_after_a_growth(name: str, grown: bool) -> None:
    model, _ = after_growth(LIBRARIES[name], grown)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


class Strange(Optimizer):
    """Keeps its parameters under an unusual name."""

    def __init__(self, parameters: Any) -> None:
        self.own, self.steps = list(parameters), 0
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

    @Optimizer.profile_hook_step
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1


class Raising(Strange):
    @property
    def param_groups(self) -> Any:
        raise RuntimeError("not yet")

    @property
    def state(self) -> Any:
        raise RuntimeError("not yet")


class Unhashable(Strange):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("can't be compared")


class Listed(Strange):
    """Groups and state of unusual types."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.param_groups, self.state = [self.own], self.own  # type: ignore[assignment]


class Slotted:
    """Can't be referenced weakly."""

    __slots__ = ("param_groups", "state")


@pytest.mark.parametrize("kind", [Strange, Raising, Unhashable, Listed])
def test_no_hook_raises_for_objects_that_can_not_be_read(kind: type[Strange]) -> None:
    model = network()
    outgrow.deepen(model, X, "1", fade=3)
    outgrow.Run(model, X, Adam(model.parameters()), [], quiet=True)  # counts the steps of all optimizers
    optimizer = kind(network().parameters())
    optimizer.step()
    assert optimizer.steps == 1


def test_hooks_ignore_objects_other_than_optimizers() -> None:
    outgrow.deepen(network(), X, "1", fade=3)
    odd = Slotted()
    for thing in (odd, None, 3, object(), "optimizer", [], {}):
        for hook in (before_step, after_step, after_fade):
            hook(thing, (), {})  # type: ignore[arg-type]
    assert held_parameters(odd) == []
    assert state_of(odd, X) == {}
    assert len(CLOCK.moving) >= 0


class Momentum(Optimizer):
    """A foreign optimizer whose state has the parameter's shape."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in held_parameters(self):
            gathered = self.state[parameter].setdefault("gathered", torch.zeros_like(parameter))
            assert parameter.grad is not None
            parameter.sub_(gathered.mul_(0.9).add_(parameter.grad), alpha=0.01)


def test_a_foreign_optimizer_with_tensors_from_before_the_growth_is_stopped() -> None:
    model = network()
    optimizer = Momentum(model.parameters())
    train(model, optimizer)
    outgrow.widen(model, X, "0", by=4)
    with pytest.raises(StaleOptimizerError, match=r"0.weight: 'gathered' has shape \(8, 4\), the parameter \(12, 4\)"):
        train(model, optimizer, 1)
    train(model, Momentum(model.parameters()))
    optimizer.state.clear()
    train(model, optimizer)


def test_state_created_after_the_growth_may_have_the_former_shape() -> None:
    class Projected(Momentum):
        """Its moments are smaller than the parameter and happen to have its former shape."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in held_parameters(self):
                size = min(len(parameter), 8)
                gathered = self.state[parameter].setdefault("gathered", torch.zeros_like(parameter[:size]))
                assert parameter.grad is not None
                parameter[:size].sub_(gathered.mul_(0.9).add_(parameter.grad[:size]), alpha=0.01)

    model, _ = after_growth(Projected, grown=True)
    assert tuple(model[0].weight.shape) == (12, 4)  # type: ignore[index, union-attr]


def test_classes_derived_from_torchs_are_stopped_before_a_fused_kernel_reads_past_the_end() -> None:
    class Own(Adam):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    for kind in (Own, type("Named", (Adam,), {})):
        model = network()
        optimizer = kind(model.parameters(), fused=True)
        train(model, optimizer)
        past = copy.deepcopy(optimizer.state_dict())
        outgrow.widen(model, X, "0", by=4)
        new = kind(model.parameters(), fused=True)
        train(model, new)
        new.load_state_dict(past)
        with pytest.raises(StaleOptimizerError):
            train(model, new, 1)


def test_loading_old_state_twice_is_noticed_too() -> None:
    """The state of the first load may have the memory address of the state that was checked."""
    model = network()
    optimizer = Adam(model.parameters())
    train(model, optimizer)
    past = copy.deepcopy(optimizer.state_dict())
    outgrow.widen(model, X, "0", by=4, optimizer=optimizer)
    train(model, optimizer)
    good = copy.deepcopy(optimizer.state_dict())
    for _ in range(20):
        optimizer.load_state_dict(copy.deepcopy(good))
        train(model, optimizer, 1)
        optimizer.load_state_dict(copy.deepcopy(good))
        optimizer.load_state_dict(copy.deepcopy(past))
        with pytest.raises(StaleOptimizerError):
            train(model, optimizer, 1)


def test_notes_are_by_identity_and_keep_nothing_alive() -> None:
    def tensors() -> Iterator[Tensor]:
        yield from (torch.zeros(2) for _ in range(3))

    notes, kept = WeakNotes(), torch.zeros(2)
    notes.put(kept, "kept")
    for tensor in tensors():
        notes.put(tensor, "gone")
    del tensor
    notes.put(3, "has no weak references")
    assert [note for _, note in notes] == ["kept"]
    assert (notes.get(kept), notes.get(torch.zeros(2), "none"), len(notes)) == ("kept", "none", 1)
