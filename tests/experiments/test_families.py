"""The experiment on families: all arms run, and those of a question spend the same FLOPs."""

from __future__ import annotations

import pytest

from experiments.families import ARMS, Arms, Language, task_of

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def arms() -> Arms:
    from pathlib import Path

    return Arms(task_of("digits", "cpu", Path(), 4), seed=0)


@pytest.mark.parametrize("question", ARMS)
def test_arms_of_a_question_spend_the_same(question: str, arms: Arms) -> None:
    found = {name: arm(arms) for name, arm in ARMS[question].items()}
    sizes = 4 if question == "four sizes" else 2
    assert all(len(errors) == sizes and all(0 <= error <= 100 for error in errors) for errors, _ in found.values())
    spent = [flops for _, flops in found.values()]
    assert max(spent) <= 1.15 * min(spent)  # numbers of steps are whole


def test_costs_are_those_of_the_products(arms: Arms) -> None:
    channels, images = 4, arms.task.batch
    convolutions = 9 * (64 * channels + 16 * channels * 2 * channels)  # 8 × 8 and 4 × 4 places
    assert arms.costs[0] == 3 * 2 * images * (convolutions + 2 * channels * 10)


def test_the_sizes_of_the_language_model_differ_in_heads_and_hidden_units(monkeypatch: pytest.MonkeyPatch) -> None:
    from experiments import families
    from experiments.lm.text import shakespeare

    monkeypatch.setattr(families, "source_code", shakespeare)
    task = Language(2, "cpu")
    requests = [task.growth(number) for number in range(4)]
    assert [[request.to for request in growth] for growth in requests] == [[2**k, 96 * 2**k] for k in range(1, 5)]
    x, y = task.drawn(0)
    assert x.shape == y.shape == (task.batch, task.context)
