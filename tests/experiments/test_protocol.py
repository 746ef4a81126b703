"""The arms of the honest comparison: equal budgets, and settings that the tuning has chosen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.reading.result_files import ResultsError, file_name
from experiments.setting import protocol
from tests.helpers.tuned_arms import TUNED


def test_the_honest_comparison_spends_equal_flops() -> None:
    """Whatever way to the big network, a budget is a budget; and every run ends with its rate at zero."""
    arms = protocol.protocol_arms(TUNED)
    for arm in arms:
        budget = float(arm.name.split("@")[1])
        net, spent = arm.net, 0.0
        for number, stage in enumerate(arm.stages):
            net = protocol.grown(net, stage.grow) if stage.grow else net
            spent += stage.epochs * protocol.cost(net) if number >= arm.own else 0.0
        assert spent == pytest.approx(budget * protocol.cost(protocol.BIG)), arm.name
        assert net == (arm.net if "-small-" in arm.name else protocol.BIG)
        lengths = sum(stage.epochs for stage in arm.stages if stage.span == arm.stages[-1].span)
        assert lengths == pytest.approx(arm.stages[-1].span), arm.name
    assert len({arm.name for arm in arms}) == len(arms)


def test_tuning_and_sweep(tmp_path: Path) -> None:
    """What was best for a kind of run is what the sets after it are made with."""
    for number, arm in enumerate(protocol.tuning_arms()):
        curve = {"accuracy": [0.9 if arm.name.endswith("scratch@2-0.002-0.2") else 0.001 * number]}
        curves = {"0": [curve], "1": [curve]}
        content = {"format": 1, "arm": {"name": arm.name}, "seeds": [0, 1], "command": "made up", "curves": curves}
        (tmp_path / file_name(arm.name)).write_text(json.dumps(content))
    tuned = protocol.chosen_by(tmp_path)
    assert tuned["scratch"][2] == protocol.Chosen(0.002, 0.2)
    assert tuned["scratch"][1] == protocol.Chosen(0.032, 0.5)  # the last one
    assert tuned["widen-reuse"][4] == protocol.Chosen(0.016, 0.5)
    assert [protocol.at({"A": {1: "a", 4: "b"}}, "A", budget) for budget in (1, 4, 16)] == ["a", "b", "b"]  # type: ignore[dict-item]
    used = {arm.name: arm.stages[-1].rate for arm in protocol.protocol_arms(tuned)}
    assert (used["EQ-scratch@2"], used["EQ-scratch@4"], used["EQ-scratch@32"]) == (0.002, 0.032, 0.032)
    arms = {arm.name: arm for arm in protocol.sweep_arms(tuned)}
    plain, slow = (arms[f"SWEEP-widen-reuse-rate-{value}"].stages[-1] for value in (1.0, 0.2))
    assert plain.rate == 0.016
    assert slow == replace(plain, rate=pytest.approx(0.0032))
    assert arms["SWEEP-deepen-nothing-new_rate-4.0"].stages[-1].new_rate == 4
    with pytest.raises(ResultsError, match="run python -m experiments --set tuning first"):
        protocol.chosen_by(tmp_path / "nowhere")
    next(tmp_path.glob("*.json")).unlink()
    with pytest.raises(ResultsError, match="run python -m experiments --set tuning first"):
        protocol.chosen_by(tmp_path)
