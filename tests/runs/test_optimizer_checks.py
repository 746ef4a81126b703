"""Optimizers that can't follow the growths of a run are refused before training starts, or their state is reset."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

import outgrow
from outgrow.errors import OptimizerError, VerifyError

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
WIDEN, DEEPEN = outgrow.Widen("0", by=4), outgrow.Deepen(after="1", method="net2net")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


class Recalling(Optimizer):
    """An optimizer of an unknown class; it counts steps in its group, under a key without a default."""

    def __init__(self, params: Any, lr: float = 0.1, scale: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "scale": scale})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                gathered = self.state[parameter].setdefault("gathered", torch.zeros_like(parameter))
                gathered.add_(parameter.grad)
                parameter.sub_(gathered / group["step"], alpha=group["lr"] * group["scale"])


class Forgetful(Optimizer):
    """An optimizer of an unknown class without state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"])


def lookahead(parameters: Any) -> Any:
    import pytorch_optimizer

    return pytorch_optimizer.Lookahead(torch.optim.Adam(parameters, lr=0.01), k=2)


def timm_lookahead(parameters: Any) -> Any:
    from timm.optim.lookahead import Lookahead

    return Lookahead(torch.optim.SGD(parameters, lr=0.1, momentum=0.9), k=2)


def schedule_free(parameters: Any) -> Any:
    import schedulefree

    optimizer = schedulefree.AdamWScheduleFree(parameters, lr=0.01)
    optimizer.train()
    return optimizer


def prodigy(parameters: Any) -> Any:
    import prodigyopt

    return prodigyopt.Prodigy(parameters)


FRESH: dict[str, Any] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),  # makes its state in its constructor
    "LBFGS": lambda parameters: LBFGS(parameters, max_iter=3),
    "Recalling": Recalling,
    "Lookahead": lookahead,
    "timm's Lookahead": timm_lookahead,
    "schedule-free": schedule_free,
    "Prodigy": prodigy,
}


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        if isinstance(optimizer, LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def run_of(model: nn.Module, optimizer: Any, *growths: Any, **options: Any) -> outgrow.Run:
    events = [outgrow.At(step=number, grow=[growth], **options) for number, growth in enumerate(growths, 3)]
    return outgrow.Run(model, X, optimizer, events, quiet=True)


@pytest.mark.parametrize("growth", [WIDEN, DEEPEN], ids=["widen", "deepen"])
@pytest.mark.parametrize("kind", [Recalling, LBFGS])
def test_an_optimizer_that_can_not_follow_is_refused_before_its_first_step(kind: Any, growth: Any) -> None:
    model = network()
    with pytest.raises(OptimizerError, match=rf"step 3, {kind.__name__}: [\s\S]*instead: .*write state='fresh' in the events"):
        run_of(model, kind(model.parameters()), growth)
    assert model[0].out_features == 8


def test_an_optimizer_without_state_is_not_refused() -> None:
    model = network()
    optimizer = Forgetful(model.parameters())
    run = run_of(model, optimizer, WIDEN, DEEPEN)
    for _ in range(5):
        train(model, optimizer, 1)
        run.step()
    assert len(run.records) == 2


def test_methods_that_an_optimizer_can_not_follow_are_found_in_the_dry_run() -> None:
    import pytorch_optimizer

    model = network()
    optimizer = pytorch_optimizer.MADGRAD(model.parameters())
    run_of(model, optimizer, WIDEN)
    with pytest.raises(OptimizerError, match="can't follow units that are copied"):
        run_of(model, optimizer, outgrow.Widen("0", by=4, method="net2net"))


def test_of_several_optimizers_only_those_are_checked_whose_parameters_grow() -> None:
    model = nn.Sequential(*network(), nn.ReLU(), nn.Linear(2, 2))
    optimizers = [torch.optim.Adam(model[:3].parameters()), LBFGS(model[4].parameters())]
    run_of(model, optimizers, WIDEN)
    with pytest.raises(OptimizerError, match="LBFGS"):
        run_of(model, optimizers, outgrow.Widen("2", by=4))


def test_advice_in_a_run_can_be_followed_there() -> None:
    """State under an unknown key is found only at the growth."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = run_of(model, optimizer, WIDEN)
    for _ in range(2):
        train(model, optimizer, 1)
        run.step()
    optimizer.state[model[0].weight]["own"] = torch.zeros(8, 4)
    train(model, optimizer, 1)
    with pytest.raises(OptimizerError, match=r"'own'[\s\S]*write state='fresh'") as caught:
        run.step()
    assert "make a new optimizer" not in str(caught.value)
    assert model[0].out_features == 8


@pytest.mark.parametrize("name", FRESH)
def test_a_fresh_start_is_that_of_a_new_optimizer(name: str) -> None:
    """The reference is a loop by hand, in which a new optimizer is made after each growth."""
    model, twin = network(), network()
    optimizer = FRESH[name](model.parameters())
    run = run_of(model, optimizer, WIDEN, DEEPEN, state="fresh")
    by_hand = FRESH[name](twin.parameters())
    for step in range(1, 7):
        train(model, optimizer, 1)
        run.step()
        train(twin, by_hand, 1)
        if step == 3:
            outgrow.grow(twin, X, WIDEN, seed=0)
        if step == 4:
            outgrow.grow(twin, X, DEEPEN, seed=1)
        if step in (3, 4):
            by_hand = FRESH[name](twin.parameters())
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(one, other), step


def test_a_failed_growth_brings_the_state_back(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    model = network()
    optimizer = LBFGS(model.parameters(), max_iter=3)
    run = run_of(model, optimizer, WIDEN, state="fresh")
    for _ in range(2):
        train(model, optimizer, 1)
        run.step()
    train(model, optimizer, 1)
    before, count = copy.deepcopy(optimizer.state_dict()["state"]), optimizer._numel_cache

    def fail(*given: Any) -> None:
        raise VerifyError("no")

    monkeypatch.setattr(importlib.import_module("outgrow.verify.outputs"), "check", fail)
    with pytest.raises(VerifyError):
        run.step()
    assert optimizer._numel_cache == count is not None
    after = optimizer.state_dict()["state"]
    assert after[0].keys() == before[0].keys()
    assert torch.equal(after[0]["prev_flat_grad"], before[0]["prev_flat_grad"])


def test_settings_stay_when_an_optimizer_starts_again() -> None:
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.3, "tag": "mine"}, {"params": model[2].parameters(), "scale": 0.5}]
    optimizer = Recalling(groups)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    events = [outgrow.At(step=3, grow=[WIDEN], state="fresh")]
    run = outgrow.Run(model, X, optimizer, events, scheduler, quiet=True)
    for _ in range(4):
        train(model, optimizer, 1)
        scheduler.step()
        run.step()
    first, second = optimizer.param_groups
    assert (first["tag"], second["scale"], first["step"], second["step"]) == ("mine", 0.5, 1, 1)
    assert first["lr"] == pytest.approx(0.003)


def prodigy_of_every_fourth(parameters: Any) -> Any:
    import prodigyopt

    return prodigyopt.Prodigy(parameters, slice_p=4)


def galore(parameters: Any) -> Any:
    import pytorch_optimizer

    group = {"params": list(parameters), "rank": 2, "update_proj_gap": 5, "scale": 1.0, "projection_type": "std"}
    return pytorch_optimizer.GaLore([group])


def soap(parameters: Any) -> Any:
    import pytorch_optimizer

    return pytorch_optimizer.SOAP(parameters)


COPIES = outgrow.Widen("0", by=4, method="net2net")
SETTINGS: dict[str, tuple[Any, Any, str]] = {
    "part of the entries": (prodigy_of_every_fourth, WIDEN, "with slice_p=4, it keeps every n-th entry"),
    "part of the entries, a new block": (prodigy_of_every_fourth, DEEPEN, "with slice_p=4, it keeps every n-th entry"),
    "a basis of low rank": (galore, WIDEN, "with rank=2, it projects gradients"),
    "a basis of low rank, a new block": (galore, DEEPEN, "with rank=2, it projects gradients"),
    "matrices and copies": (soap, COPIES, "can't follow units that are copie"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_and_methods_that_forbid_a_growth_are_found_before_training_and_at_the_growth(name: str) -> None:
    """Before, a run was refused at its growth only, and a new block got state that made the next step crash."""
    make, growth, reason = SETTINGS[name]
    model = network()
    with pytest.raises(OptimizerError, match=rf"step 3(.|\n)*{reason}(.|\n)*state='fresh'"):
        run_of(model, make(model.parameters()), growth)
    optimizer = make(model.parameters())
    train(model, optimizer, 2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(OptimizerError, match=reason):
        outgrow.grow(model, X, growth, optimizer=optimizer)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    train(model, optimizer, 1)
    fresh = network()
    optimizer = make(fresh.parameters())
    run = run_of(fresh, optimizer, growth, state="fresh")
    for _ in range(5):
        train(fresh, optimizer, 1)
        run.step()
    assert len(run.records) == 1


def test_of_several_optimizers_those_are_checked_whose_groups_new_blocks_join() -> None:
    """A block behind an activation joins the groups of the layer before it, also if that layer has moved since the start."""
    for events in ([DEEPEN], [DEEPEN, outgrow.Deepen(after="1", method="net2net")]):
        model = nn.Sequential(*network(), nn.ReLU(), nn.Linear(2, 2))
        body, head = model[:3].parameters(), model[4].parameters()
        run_of(model, [torch.optim.Adam(body), LBFGS(head)], *events)
        body, head = model[:3].parameters(), model[4].parameters()
        with pytest.raises(OptimizerError, match="LBFGS"):
            run_of(model, [LBFGS(body), torch.optim.Adam(head)], *events)
    model = nn.Sequential(*network(), nn.ReLU(), nn.Linear(2, 2))
    body, head = model[:3].parameters(), model[4].parameters()
    later = [DEEPEN, outgrow.Widen("3", by=2)]  # at the start, the layer is called 2
    with pytest.raises(OptimizerError, match=r"step 4, LBFGS"):
        run_of(model, [torch.optim.Adam(body), LBFGS(head)], *later)
