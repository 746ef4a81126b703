"""Every way and every budget tuned for itself: equal effort, equal budgets, and runs that are there already are found."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from experiments.__main__ import main
from experiments.figures import RESULTS
from experiments.reading.result_files import file_name, missing, read_all
from experiments.setting import own_tuning, protocol
from experiments.setting.own_tuning import KINDS, any_choice, chosen, description, own_arms
from experiments.setting.protocol import Chosen, tuning_name
from experiments.training.trainee import rates_of
from tests.helpers.experiment_runs import some_data
from tests.helpers.tuned_arms import TUNED

KEPT = RESULTS.parent


def test_every_line_spends_its_budget_and_ends_at_zero() -> None:
    for line, by_budget in own_tuning.line_arms(any_choice()).items():
        for budget, arm in by_budget.items():
            net, spent = arm.net, 0.0
            for number, stage in enumerate(arm.stages):
                net = protocol.grown(net, stage.grow) if stage.grow else net
                spent += stage.epochs * protocol.cost(net) if number >= arm.own else 0.0
            assert spent == pytest.approx(budget * protocol.cost(protocol.BIG)), arm.name
            assert net == (arm.net if "-small-" in line else protocol.BIG)
            last = round(arm.stages[-1].epochs * 390) - 1
            assert rates_of(arm.stages, last, 1, 390)[0] < 1e-3 * arm.stages[-1].rate, arm.name


def test_the_effort_is_the_same_for_all() -> None:
    """Six pairs for every kind at every budget up to 8, of the same list for all kinds of an account, and three beyond."""
    grid = {tuning_name(*one) for one in protocol.GRID}
    there = Counter(name.rsplit("@")[0] + "@" + name.split("@")[1].split("-")[0] for name in grid)
    made = [arm.name for arm in own_tuning.tuning_arms({})]
    assert not grid & set(made)
    assert len(set(map(file_name, made))) == len(made)
    for kind in KINDS:
        for budget in kind.budgets:
            names = {tuning_name(kind.name, budget, *pair) for pair in kind.pairs(budget)}
            narrowed = budget > 8 and 8 in kind.budgets
            assert len(names) == (6 if budget <= 8 or narrowed else 3)
            assert names <= grid | set(made)
            assert names <= set(made) or there[f"TUNE-{kind.name}@{budget}"] == 24
            if narrowed and kind.name in protocol.KINDS and kind.line.startswith("EQ"):
                assert len(own_tuning.tried(read_all(KEPT / "tuning"), kind, budget)) == 3
    assert len({kind.line for kind in KINDS}) == len({kind.name for kind in KINDS}) == len(KINDS)


def made_up(scores: dict[str, dict[int, float]]) -> dict[str, Any]:
    def curves(by_seed: dict[int, float]) -> dict[str, Any]:
        return {str(seed): [{"accuracy": [0.1, score]}] for seed, score in by_seed.items()}

    return {name: {"seeds": list(by_seed), "curves": curves(by_seed)} for name, by_seed in scores.items()}


def test_the_best_pair_by_the_seeds_of_its_budget() -> None:
    kind = next(kind for kind in KINDS if kind.name == "widen-flops")
    names = [tuning_name(kind.name, 8, *pair) for pair in kind.pairs(8)]
    scores = {name: {0: 0.5, 1: 0.5} for name in names}
    scores[names[2]] = {0: 0.9, 1: 0.3}  # the mean counts
    scores[names[4]] = {0: 0.6, 1: 0.7, 2: 0.0}  # a third seed counts nowhere
    assert chosen(made_up(scores)) == {kind.name: {8: Chosen(*kind.pairs(8)[4])}}
    assert chosen(made_up({**scores, names[0]: {0: 1.0}})) == {}  # the second seed of one pair is not there yet
    other = tuning_name("scratch", 8, 8e-3, 0.2)
    assert set(chosen(made_up({**scores, other: {0: 0.5, 1: 0.5}}))) == {kind.name}  # scratch lacks five pairs
    del scores[names[5]]
    assert chosen(made_up(scores)) == {}


def test_long_budgets_try_what_was_best_at_eight() -> None:
    kind, reused = (next(kind for kind in KINDS if kind.name == name) for name in ("widen-flops", "widen-reuse-random"))
    pairs = kind.pairs(8)
    at_eight = {
        tuning_name(kind.name, 8, *pair): {0: mean, 1: mean} for pair, mean in zip(pairs, (1, 6, 2, 5, 4, 3), strict=True)
    }
    made = {arm.name for arm in own_tuning.tuning_arms(made_up(at_eight))}
    left = {tuning_name(kind.name, 16, *pairs[number]) for number in (1, 3, 4)}
    assert {name for name in made if name.startswith(f"TUNE-{kind.name}@16-")} == left
    of_reused = {name for name in made if name.startswith(f"TUNE-{reused.name}@16-")}
    assert of_reused == {tuning_name(reused.name, 16, *pair) for pair in ((4e-3, 0.2), (8e-3, 0.2), (1.6e-2, 0.05))}
    at_sixteen = {tuning_name(kind.name, 16, *pairs[number]): {0: number} for number in (1, 3, 4)}
    assert chosen(made_up(at_eight | at_sixteen))[kind.name] == {8: Chosen(*pairs[1]), 16: Chosen(*pairs[4])}


def test_the_kept_tuning_chooses_for_the_budgets_that_it_has() -> None:
    own = chosen(read_all(KEPT / "tuning"))
    assert own["scratch"][8] == Chosen(8e-3, 0.2)
    assert set(own) >= {"scratch", "small-widen", "widen-nothing", "deepen-nothing", "widen-reuse", "widen-on"}


def test_runs_that_are_there_are_found_by_their_description() -> None:
    """All kept files of the comparison have the descriptions that arms have now; such arms are not trained again."""
    kept = {name: one for name, one in read_all(KEPT / "protocol").items() if not name.startswith(own_tuning.PREFIX)}
    tuned = protocol.chosen_by(KEPT / "tuning")
    now = {arm.name: description(asdict(arm)) for arm in protocol.protocol_arms(tuned)}
    assert {name: description(one["arm"]) for name, one in kept.items()} == now
    own: dict[str, dict[float, Chosen]] = {"scratch": {8: tuned["scratch"][8], 16: tuned["scratch"][8], 32: Chosen(0.5, 0.5)}}
    assert [arm.name for arm in own_arms(own, tuned)] == ["OWN-EQ-scratch@32"]
    first = protocol.protocol_arms(tuned)[0]
    assert description(asdict(replace(first, name="other"))) == description(asdict(first))
    changed = replace(first, stages=(replace(first.stages[0], rewarm=0.1),))
    assert description(asdict(changed)) != description(asdict(first))


@pytest.mark.parametrize("which", ["tuning", "protocol"])
def test_kept_results_are_not_trained_again(which: str) -> None:
    arms = protocol.tuning_arms() if which == "tuning" else protocol.protocol_arms(protocol.chosen_by(KEPT / "tuning"))
    kept = read_all(KEPT / which)
    assert not [arm.name for arm in arms if missing(KEPT / which, arm, [0, 1], kept[arm.name])]


def test_names_of_files_are_their_own() -> None:
    arms = [*protocol.protocol_arms(TUNED), *own_arms(any_choice(), TUNED)]
    assert len({file_name(arm.name) for arm in arms}) == len(arms)


def test_the_command_trains_them_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = replace(some_data(256, 10), name="CIFAR-10")
    monkeypatch.setattr("experiments.__main__.cifar10", lambda folder: data)
    monkeypatch.setattr(type(data), "held_out", lambda self: self)
    folders = ["--work", str(tmp_path / "work"), "--results", str(tmp_path / "results")]
    names = ["TUNE-deepen-nothing@16-0.008-0.2", "TUNE-deepen-rewarm@16-0.008-0.2"]
    short = [replace(arm, stages=tuple(replace(one, epochs=1) for one in arm.stages)) for arm in own_tuning.tuning_arms({})]
    monkeypatch.setattr("experiments.setting.own_tuning.tuning_arms", lambda results: short)
    assert main(["--set", "tuning", *names, *folders]) == 0
    assert capsys.readouterr().out.startswith("2 arms, 1 seed: 3 pieces of training, 3 left")  # one small network for both
    assert main(["--set", "tuning", *names, *folders]) == 0
    assert "0 left" in capsys.readouterr().out
    found = [json.loads((tmp_path / "results" / file_name(name)).read_text()) for name in names]
    assert [len(one["curves"]["0"]) for one in found] == [2, 2]
    assert found[0]["curves"]["0"][0]["flops"] == found[1]["curves"]["0"][0]["flops"]
