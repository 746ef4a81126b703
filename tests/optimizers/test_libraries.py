"""Optimizers of other libraries follow a growth, or are refused with the reason.

The truth is a twin that is trained alike and not grown: right after a growth that leaves existing weights and gradients as they
are, existing entries must make the update that they make in the twin.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.errors import OptimizerError
from outgrow.growth_plan.plan import Insertion, Plan

Make = Callable[[nn.Module], Any]


def of(module: str, name: str, **settings: Any) -> Make:
    return lambda model: getattr(importlib.import_module(module), name)(model.parameters(), **settings)


def wrapped(module: str, name: str, base: Make) -> Make:
    return lambda model: getattr(importlib.import_module(module), name)(base(model))


def sam(model: nn.Module) -> Any:
    return importlib.import_module("pytorch_optimizer").SAM(model.parameters(), torch.optim.AdamW, lr=1e-3)


ADAM: Make = of("torch.optim", "Adam", lr=1e-3)
PO = "pytorch_optimizer"
ENTRYWISE: dict[str, Make] = {
    "schedule-free AdamW": of("schedulefree", "AdamWScheduleFree", lr=1e-2),
    "schedule-free SGD": of("schedulefree", "SGDScheduleFree", lr=1e-2),
    "schedule-free RAdam": of("schedulefree", "RAdamScheduleFree", lr=1e-2),
    "MADGRAD": of("timm.optim", "MADGRAD", lr=1e-3),
    "Lookahead of timm": wrapped("timm.optim", "Lookahead", ADAM),
    "Lookahead": wrapped(PO, "Lookahead", ADAM),
    "Lookahead that pulls momenta back": lambda model: importlib.import_module(PO).Lookahead(
        ADAM(model), k=3, pullback_momentum="pullback"
    ),
    "AccSGD": of(PO, "AccSGD"),
    "SOAP": of(PO, "SOAP", lr=1e-3),
    "timm's Adan": of("timm.optim", "Adan", lr=1e-3),
    "LaProp": of("timm.optim", "LaProp", lr=1e-3),
}
COUPLED: dict[str, Make] = {  # what they do to one entry depends on the others, by a norm or an estimate for all
    "SAM": sam,
    "Shampoo": of(PO, "Shampoo", lr=1e-3),
    "Adafactor of big vision": of("timm.optim", "AdafactorBigVision", lr=1e-3, min_dim_size_to_factor=4),
    "Prodigy": of("prodigyopt", "Prodigy"),
    "Muon": lambda model: importlib.import_module("timm.optim").Muon(model.parameters(), lr=1e-3),
    "AdaShift": of(PO, "AdaShift", lr=1e-3),
    "Adafactor of timm": of("timm.optim", "Adafactor", lr=1e-3, min_dim_size_to_factor=4),
}


def network(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, width), nn.Tanh(), nn.Linear(width, width + 2), nn.ReLU(), nn.Linear(width + 2, 3, bias=False)
    )


class Training:
    def __init__(self, make: Make, model: nn.Module | None = None, steps: int = 15) -> None:
        self.model = (network() if model is None else model).double()
        self.optimizer = make(self.model)
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()
        self.generator = torch.Generator().manual_seed(1)
        for _ in range(steps):
            self.step()

    def step(self) -> dict[str, Tensor]:
        """Make a step; returns the update of each parameter."""
        x, y = (torch.randn(16, size, generator=self.generator).to(next(self.model.parameters()).dtype) for size in (5, 3))

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = (self.model(x) - y).pow(2).mean() * 10
            loss.backward()
            return loss

        before = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        closure()
        self.optimizer.step(closure) if type(self.optimizer).__name__ == "SAM" else self.optimizer.step()
        return {name: parameter.detach() - before[name] for name, parameter in self.model.named_parameters()}


def example() -> Tensor:
    return torch.randn(2, 5, generator=torch.Generator().manual_seed(5)).double()


def is_new(plan: Plan, name: str, update: Tensor) -> Tensor:
    new = torch.zeros(update.shape, dtype=torch.bool)
    for edit in plan.edits:
        if isinstance(edit, Insertion) and edit.tensor == name:
            new.index_fill_(edit.axis, torch.tensor(edit.at), True)
    return new


def widened(make: Make, method: str) -> tuple[Plan, dict[str, Tensor], dict[str, Tensor], Training]:
    twin, grown = Training(make), Training(make)
    growth = outgrow.widen(grown.model, example(), "*", factor=1.5, method=method, optimizer=grown.optimizer)
    torch.manual_seed(3)
    truth = twin.step()
    torch.manual_seed(3)
    return growth.plan, truth, grown.step(), grown


@pytest.mark.parametrize("method", ["r2r", "netmorph"])
@pytest.mark.parametrize("name", ENTRYWISE)
def test_existing_entries_make_the_update_that_they_make_without_the_growth(name: str, method: str) -> None:
    plan, truth, updates, grown = widened(ENTRYWISE[name], method)
    for key, update in updates.items():
        new, scale = is_new(plan, key, update), float(truth[key].abs().max())
        torch.testing.assert_close(update[~new], truth[key].flatten(), rtol=1e-6, atol=1e-9 * scale)
        if new.any():
            assert update[new].abs().max() < 4 * scale
    for _ in range(3):
        assert all(update.isfinite().all() for update in grown.step().values())


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_optimizers_go_on_much_as_they_were(name: str) -> None:
    plan, truth, updates, grown = widened(COUPLED[name], "r2r")
    for key, update in updates.items():
        new, size = is_new(plan, key, update), truth[key].norm()
        assert 0.5 < update[~new].norm() / size < 2
        assert torch.cosine_similarity(update[~new], truth[key].flatten(), dim=0) > 0.7
        if new.any():
            assert update[new].pow(2).mean().sqrt() < 4 * truth[key].pow(2).mean().sqrt()
    for _ in range(3):
        assert all(update.isfinite().all() for update in grown.step().values())


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("method", ["r2r", "net2net", "netmorph"])
def test_all_three_sequences_of_a_schedule_free_optimizer_stay_the_networks_that_they_were(method: str, mode: str) -> None:
    """The parameters hold y while training, and x for evaluation; z is in the state."""

    def outputs() -> list[Tensor]:
        kept = {name: training.optimizer.state[parameter]["z"] for name, parameter in training.model.named_parameters()}
        result = [torch.func.functional_call(training.model, kept, example())]
        for other in ("train", "eval", mode):
            getattr(training.optimizer, other)()
            result.append(training.model(example()))
        return [output.detach() for output in result]

    training = Training(ENTRYWISE["schedule-free AdamW"])
    getattr(training.optimizer, mode)()
    before = outputs()
    assert (before[0] - before[1]).abs().max() > 1e-3
    assert (before[1] - before[2]).abs().max() > 1e-3
    outgrow.widen(training.model, example(), "*", factor=1.5, method=method, optimizer=training.optimizer)
    for now, then in zip(outputs(), before, strict=True):
        torch.testing.assert_close(now, then, rtol=1e-9, atol=1e-9)
    training.optimizer.train()
    training.step()


def test_slow_weights_of_both_lookaheads_stay_the_network_that_they_were() -> None:
    for name, key in (("Lookahead", "slow_params"), ("Lookahead of timm", "lookahead_slow_buff")):
        training = Training(ENTRYWISE[name])
        holder = training.optimizer if name == "Lookahead" else training.optimizer._base_optimizer

        def slow(training: Training = training, holder: Any = holder, key: str = key) -> Tensor:
            weights = {name: holder.state[parameter][key] for name, parameter in training.model.named_parameters()}
            return torch.func.functional_call(training.model, weights, example())

        before = slow()
        outgrow.widen(training.model, example(), "*", factor=1.5, method="net2net", optimizer=training.optimizer)
        torch.testing.assert_close(slow(), before, rtol=1e-9, atol=1e-9)


def test_preconditioners_and_anchored_weights_follow_no_copies_and_say_so() -> None:
    for name, reason in (
        ("SOAP", "can't follow units that are copies"),
        ("MADGRAD", "recomputes the weights from their starting"),
    ):
        training = Training(ENTRYWISE[name])
        before = [parameter.detach().clone() for parameter in training.model.parameters()]
        with pytest.raises(OptimizerError, match=reason):
            outgrow.widen(training.model, example(), "*", factor=2, method="net2net", optimizer=training.optimizer)
        assert all(torch.equal(a, b) for a, b in zip(before, training.model.parameters(), strict=True))
        training.step()


def test_weights_of_the_optimizer_s_own_follow_no_fade_and_no_rates_of_new_units() -> None:
    for name in ("schedule-free AdamW", "Lookahead of timm"):
        training = Training(ENTRYWISE[name], steps=3)
        with pytest.raises(OptimizerError, match=r"weights of its own(.|\n)*leave fade= out"):
            outgrow.widen(training.model, example(), "0", by=2, fade=5, optimizer=training.optimizer)
        outgrow.widen(training.model, example(), "0", by=2, optimizer=training.optimizer)
        with pytest.raises(OptimizerError, match=r"weights of its own(.|\n)*leave new_lr="):
            outgrow.Pace(training.model, training.optimizer).set({1: 2.0})
        training.step()


def test_refused_classes_say_why_and_unknown_ones_how_to_describe_them() -> None:
    for make, reason in ((of(PO, "Conda"), "basis of its own"), (of(PO, "FTRL"), "sum of all gradients")):
        training = Training(make, steps=2)
        with pytest.raises(OptimizerError, match=reason):
            outgrow.widen(training.model, example(), "*", factor=2, optimizer=training.optimizer)


def test_eight_bit_moments_of_bitsandbytes_are_carried_within_their_own_error() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    make: Make = lambda model: bitsandbytes.optim.Adam8bit(model.parameters(), lr=1e-3)  # noqa: E731
    exact: Make = lambda model: bitsandbytes.optim.Adam(model.parameters(), lr=1e-3)  # noqa: E731
    models = [Training(kind, network(64).float(), steps=0) for kind in (make, exact)]
    for training in models:
        training.model.float()
        for _ in range(10):
            training.step()
        outgrow.widen(training.model, example().float(), "*", factor=1.5, method="r2r", optimizer=training.optimizer)
    low, high = (training.optimizer.state[training.model[2].weight] for training in models)
    assert low["state1"].dtype == torch.uint8
    assert low["state1"].shape == high["state1"].shape == models[0].model[2].weight.shape
    updates = [training.step() for training in models]
    for name in updates[0]:
        assert torch.cosine_similarity(updates[0][name].flatten(), updates[1][name].flatten(), dim=0) > 0.95


@pytest.mark.filterwarnings("ignore")  # torchao's import and torch's caches warn
@pytest.mark.parametrize(("name", "likeness"), [("Adam8bit", 0.99), ("Adam4bit", 0.9), ("AdamFp8", 0.99)])
def test_moments_of_torchao_in_few_bits_are_carried_within_their_own_error(name: str, likeness: float) -> None:
    """The truth is Adam in full precision, which a growth carries exactly."""
    kinds = (getattr(importlib.import_module("torchao.optim"), name), torch.optim.Adam)
    with torch.compiler.set_stance("force_eager"):  # the step compiles itself, which takes long
        models = [Training(lambda model, kind=kind: kind(model.parameters(), lr=1e-3), network(64), steps=0) for kind in kinds]
        for training in models:
            training.model.float()
            for _ in range(5):
                training.step()
            outgrow.widen(training.model, example().float(), "0", to=128, method="r2r", optimizer=training.optimizer)
            outgrow.widen(training.model, example().float(), "2", to=128, method="net2net", optimizer=training.optimizer)
        state = models[0].optimizer.state[models[0].model[2].weight]
        assert type(state["exp_avg"]).__module__.startswith("torchao")
        assert state["exp_avg"].shape == (128, 128)
        updates = [training.step() for training in models]
        for key in updates[0]:
            assert torch.cosine_similarity(updates[0][key].flatten(), updates[1][key].flatten(), dim=0) > likeness
        outgrow.widen(models[0].model, example().float(), "2", to=129, method="netmorph", optimizer=models[0].optimizer)
        whole_blocks = state["exp_avg"].numel() % models[0].optimizer.block_size == 0  # torchao quantises nothing else
        assert (type(state["exp_avg"]) is not Tensor) == whole_blocks
        models[0].step()


@pytest.mark.parametrize("name", ["GaLore", "Fira", "AdamWSN", "Prodigy"])
def test_healthy_optimizers_whose_state_has_other_shapes_step_on_a_grown_model_and_after_loading(name: str) -> None:
    def make() -> Any:
        matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        if name == "Prodigy":
            return importlib.import_module("prodigyopt").Prodigy(matrices, slice_p=3)
        low = {"rank": 2, "update_proj_gap": 10, "scale": 1.0, "projection_type": "std", "sn": True}
        return getattr(importlib.import_module(PO), name)([{"params": matrices, **low}], lr=1e-3)

    model = network()
    outgrow.widen(model, example().float(), "*", factor=2)
    first = Training(lambda _: make(), model, steps=3)
    second = Training(lambda _: make(), model, steps=0)
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.step()
    setting = {"Prodigy": "slice_p=3", "AdamWSN": "sn=True"}.get(name, "rank=2")
    with pytest.raises(OptimizerError, match=f"{name}'s state can't grow: with {setting}, "):
        outgrow.widen(model, example(), "*", factor=2, optimizer=second.optimizer)
