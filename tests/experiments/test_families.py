"""The experiment on families: all arms run, and those of a question spend the same FLOPs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.families import ARMS, GOES_ON, Arms, Language, cost, main, task_of

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def arms() -> Arms:
    return Arms(task_of("digits", "cpu", Path(), 4), seed=0)


@pytest.mark.parametrize("question", ARMS)
def test_arms_of_a_question_spend_the_same(question: str, arms: Arms) -> None:
    found = {name: arm(arms) for name, arm in ARMS[question].items()}
    sizes = 4 if question == "four sizes" else 2
    assert all(len(errors) == sizes and all(0 <= error <= 100 for error in errors) for errors, _ in found.values())
    spent = [flops for _, flops in found.values()]
    assert max(spent) <= 1.15 * min(spent)  # numbers of steps are whole
    assert cost(arms.task, question) == pytest.approx(max(spent), rel=0.15)


def test_costs_are_those_of_the_products(arms: Arms) -> None:
    channels, images = 4, arms.task.batch
    convolutions = 9 * (64 * channels + 16 * channels * 2 * channels)  # 8 × 8 and 4 × 4 places
    assert arms.task.costs[0] == 3 * 2 * images * (convolutions + 2 * channels * 10)


def test_the_sizes_of_the_language_model_differ_in_heads_and_hidden_units(monkeypatch: pytest.MonkeyPatch) -> None:
    from experiments import families
    from experiments.lm.text import shakespeare

    monkeypatch.setattr(families, "source_code", shakespeare)
    task = Language(2, "cpu")
    requests = [task.growth(number) for number in range(4)]
    assert [[request.to for request in growth] for growth in requests] == [[2**k, 96 * 2**k] for k in range(1, 5)]
    x, y = task.drawn(0)
    assert x.shape == y.shape == (task.batch, task.context)


def test_runs_are_made_in_pieces_and_kept_apart_from_those_of_another_configuration(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    options = ["--results", str(path), "--seeds", "1", "--arms", "apart"]
    assert main([*options, "--steps", "3", "--minutes", "0"]) == GOES_ON
    assert not path.exists()
    assert main([*options, "--steps", "3"]) == 0
    found = json.loads(path.read_text())
    assert [(run["question"], run["arm"]) for run in found["runs"]] == [(question, "apart") for question in ARMS]
    path.write_text(json.dumps({**found, "runs": found["runs"][:1]}))
    assert main([*options, "--steps", "3"]) == 0
    again = json.loads(path.read_text())["runs"]
    assert [run["measures"] for run in again] == [run["measures"] for run in found["runs"]]
    with pytest.raises(SystemExit, match="another configuration"):
        main([*options, "--steps", "4"])
    assert json.loads(path.read_text())["runs"] == again


def test_an_interrupted_training_of_several_members_is_a_continued_one(arms: Arms) -> None:
    """`run` twice is `run` once: rates and batches go on where the first call has ended."""
    found = []
    for parts in ((4,), (1, 3)):
        family = arms._family()
        training = arms._training(family, 4)
        for steps in parts:
            training.run(list(family).copy, steps)
        found.append(family.state_dict())
    assert all(bool((one == other).all()) for one, other in zip(*(state.values() for state in found), strict=True))
