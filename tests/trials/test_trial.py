"""`outgrow.trial` against plain loops on copies; the given model, optimizer and random state are untouched."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import nn

import outgrow
from outgrow.errors import GrowthError
from tests.helpers.small_runs import WIDEN, X, batch, mlp

DEEPER = outgrow.Deepen("blocks.0", fade=2)
CANDIDATES = {"wider": WIDEN, "both": [WIDEN, DEEPER], "nowhere": outgrow.Widen("nowhere", by=2)}


def step(model: nn.Module, optimizer: Any, index: int) -> torch.Tensor:
    x, y = batch(index)
    x = x + 0.1 * torch.randn_like(x)  # the same in all candidates
    loss = nn.functional.cross_entropy(nn.functional.dropout(model(x), 0.2), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def in_training() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model in training: its optimizer has state."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)  # replaces optimizer.step
    for index in range(3):
        step(model, optimizer, index)
    return model, optimizer


def by_hand(transforms: list[Any], steps: int, seed: int = 0, fresh: bool = False) -> list[float]:
    """The losses of a candidate in a plain loop, with a model of its own."""
    torch.manual_seed(1)
    model, optimizer = in_training()
    if transforms:
        outgrow.grow(model, X, *transforms, optimizer=optimizer, seed=seed)
    if fresh:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for index in range(steps):
        torch.manual_seed(seed * 1_000_003 + index)
        losses.append(step(model, optimizer, index).item())
    return losses


@pytest.fixture
def given() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    return in_training()


def test_losses_are_those_of_plain_loops_on_copies(given: Any) -> None:
    model, optimizer = given
    result = outgrow.trial(model, X, CANDIDATES, step, 6, optimizer=optimizer, quiet=True)
    assert list(result.control.losses) == by_hand([], 6)
    assert list(result["wider"].losses) == by_hand([WIDEN], 6)
    assert list(result["both"].losses) == by_hand([WIDEN, DEEPER], 6)
    assert "nowhere" in result["nowhere"].refused
    assert not result["nowhere"].losses
    grown = outgrow.grow(copy.deepcopy(model), X, WIDEN)
    assert (result.control.parameters, result["wider"].parameters) == grown.parameters
    assert (result.control.flops, result["wider"].flops) == grown.flops


def test_model_optimizer_and_random_state_are_untouched(given: Any) -> None:
    model, optimizer = given
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    torch.manual_seed(7)
    random = torch.get_rng_state()
    outgrow.trial(model, X, CANDIDATES, step, 3, optimizer=optimizer, quiet=True)
    assert torch.equal(torch.get_rng_state(), random)
    after = (model.state_dict(), optimizer.state_dict())
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert step(model, optimizer, 3) > 0  # and it goes on


def test_a_function_makes_new_optimizers_and_seeds_decide(given: Any) -> None:
    def made(model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.02)

    results = [outgrow.trial(given[0], X, [WIDEN], step, 4, optimizer=made, seed=seed, quiet=True) for seed in (2, 2, 3)]
    assert results[0] == results[1] != results[2]
    (candidate,) = results[0].candidates
    assert candidate.name == "Widen 'blocks.0.up' to 12"
    assert list(candidate.losses) == by_hand([WIDEN], 4, seed=2, fresh=True)


def test_several_optimizers_and_none(given: Any) -> None:
    model = given[0]
    halves = [list(model.parameters())[::2], list(model.parameters())[1::2]]
    optimizers = [torch.optim.SGD(half, lr=0.1, momentum=0.9) for half in halves]

    def both(model: nn.Module, optimizers: Any, index: int) -> torch.Tensor:
        step(model, optimizers[0], index)
        return step(model, optimizers[1], index)

    def without(model: nn.Module, optimizer: None, index: int) -> float:
        assert optimizer is None
        return nn.functional.cross_entropy(model(batch(index)[0]), batch(index)[1]).item()

    assert (
        len(outgrow.trial(model, X, [WIDEN], both, 2, optimizer=optimizers, quiet=True)["Widen 'blocks.0.up' to 12"].losses)
        == 2
    )
    untrained = outgrow.trial(model, X, [WIDEN], without, 2, quiet=True)
    torch.testing.assert_close(untrained.candidates[0].losses, untrained.control.losses)  # the growth is exact


def test_copied_state_is_that_of_a_schedule(given: Any) -> None:
    model, optimizer = given
    stack = outgrow.Deepen(layers=4, stack="blocks", method="copy")
    losses = {
        state: outgrow.trial(model, X, [stack], step, 3, optimizer=optimizer, state=state, quiet=True).candidates[0].losses
        for state in ("carry", "copy")
    }
    assert losses["carry"][0] == losses["copy"][0]  # before the first update
    assert losses["carry"][1:] != losses["copy"][1:]


def test_the_table_and_json(given: Any) -> None:
    model, optimizer = given
    candidates = {**CANDIDATES, "random": outgrow.Widen("blocks.0.up", to=12, method="random")}
    result = outgrow.trial(model, X, candidates, step, 1, optimizer=optimizer, quiet=True)
    text = str(result)
    assert "refused: nowhere: no volume is called 'nowhere'" in text
    assert "not grown" in text
    assert "still fading in for 1 step" in text
    assert "not exact" in text
    data = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert data["best"] == result.best
    assert [one["name"] for one in data["candidates"]] == list(candidates)
    assert data["candidates"][2]["loss"] is None
    with pytest.raises(KeyError, match="the trial has wider, both"):
        result["wide"]


def test_a_progress_bar_counts_the_steps_of_all_candidates(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def track(items: range, describe: Any, total: int) -> Any:
        for item in items:
            yield item
            seen.append(describe())
        assert total == len(seen)

    monkeypatch.setattr("outgrow.trials.trial.track", track)
    outgrow.trial(given[0], X, CANDIDATES, step, 2, optimizer=given[1])
    assert len(seen) == 2 * 4
    assert seen[0] == "trial: not grown"


def test_a_step_that_trains_the_given_model_is_detected(given: Any) -> None:
    model, optimizer = given
    with pytest.raises(GrowthError, match="instead of the copies"):
        outgrow.trial(model, X, [WIDEN], lambda twin, other, index: step(model, optimizer, index), 2, optimizer=optimizer)


def fails(model: nn.Module, optimizer: Any, index: int) -> Any:
    if model.blocks[0].up.out_features == 12:
        raise ValueError("too wide")
    return 1.0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"candidates": {}}, "write transforms, or lists of them, by name"),
        ({"candidates": "wider"}, "write transforms, or lists of them, by name"),
        ({"candidates": {"wider": 3}}, "3 is no transform"),
        ({"candidates": {"wider": []}}, "pass at least one transform"),
        ({"candidates": {"not grown": WIDEN}}, "is the name of the control"),
        ({"step": None}, "is no function"),
        ({"steps": 0}, "steps=0"),
        ({"state": "fresh"}, "write 'carry' or 'copy'"),
        ({"step": lambda model, optimizer, index: None}, "return the loss"),
        ({"step": fails}, r"step 0 of \"Widen 'blocks.0.up' to 12\" has failed: ValueError: too wide"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_mistakes(given: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(GrowthError, match=text):
        outgrow.trial(given[0], X, **{"candidates": [WIDEN], "step": step, "steps": 2, "optimizer": given[1], **options})


def test_an_optimizer_with_attributes_of_its_own_is_copied_with_them(given: Any) -> None:
    class Scaled(torch.optim.SGD):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.scale = 0.5

    def scaled(model: nn.Module, optimizer: Any, index: int) -> torch.Tensor:
        return step(model, optimizer, index) * optimizer.scale

    optimizer = Scaled(given[0].parameters(), lr=0.1)
    result = outgrow.trial(given[0], X, [WIDEN], scaled, 2, optimizer=optimizer, quiet=True)
    assert len(result.control.losses) == 2


def test_wrong_optimizers_are_refused_with_what_to_pass() -> None:
    model, _ = in_training()
    wrong: list[tuple[Any, str]] = [
        ("adam", "'adam' is no optimizer"),
        (torch.optim.SGD(mlp().parameters(), lr=0.1), "holds no parameter of the model"),
        (torch.optim.SGD, "optimizer= has failed: TypeError"),
        (lambda model: None, "optimizer= has returned nothing"),
    ]
    for optimizer, message in wrong:
        with pytest.raises(GrowthError, match=message) as error:
            outgrow.trial(model, X, CANDIDATES, step, steps=2, optimizer=optimizer, quiet=True)
        assert "optimizer=lambda model: torch.optim.AdamW(model.parameters())" in str(error.value)
    with pytest.raises(GrowthError, match="step gets no optimizer: pass optimizer= to the trial"):
        outgrow.trial(model, X, CANDIDATES, step, steps=2, quiet=True)


def test_schedules_are_no_candidates() -> None:
    model, optimizer = in_training()
    schedule = outgrow.Schedule([outgrow.At(step=2, grow=[WIDEN])])
    with pytest.raises(GrowthError, match=r"candidates: a schedule is no transform: pass it to outgrow\.Run"):
        outgrow.trial(model, X, {"later": schedule}, step, optimizer=optimizer, quiet=True)


def test_accumulated_gradients_are_copied_too(given: Any) -> None:
    model, optimizer = given
    optimizer.zero_grad()

    def accumulate(model: nn.Module, optimizer: Any, index: int) -> torch.Tensor:
        x, y = batch(index)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if index % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    accumulate(model, optimizer, 3)
    trial = outgrow.trial(model, X, {"wider": WIDEN}, accumulate, steps=4, optimizer=optimizer, quiet=True)
    assert list(trial.control.losses) == [accumulate(model, optimizer, index).item() for index in range(4)]


def test_a_step_that_trains_nothing_is_noted(given: Any) -> None:
    model, optimizer = given
    fresh = torch.optim.SGD(mlp().parameters(), lr=0.1)

    def elsewhere(model: nn.Module, optimizer: Any, index: int) -> torch.Tensor:
        return step(model, fresh, index)

    trial = outgrow.trial(model, X, {"wider": WIDEN}, elsewhere, steps=2, optimizer=optimizer, quiet=True)
    assert trial.control.note == "not trained: no parameter has changed"
    assert not outgrow.trial(model, X, {"wider": WIDEN}, step, steps=2, optimizer=optimizer, quiet=True).control.note
