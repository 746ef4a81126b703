"""`outgrow grow`: options become requests, and a checkpoint is grown or refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from outgrow import Deepen, Widen
from outgrow.cli.grow_command import bar, deepen_request, widen_request
from outgrow.cli.main import main
from outgrow.cli.model_names import CommandError
from tests.helpers.checkpoints import save_small, tensors_in

pytest.importorskip("transformers")


def test_options_become_requests() -> None:
    assert widen_request("*.mlp.*=1.5") == Widen("*.mlp.*", factor=1.5)
    assert widen_request("*.mlp.*=x2") == Widen("*.mlp.*", factor=2.0)
    assert widen_request("a.b=+4", method="net2net") == Widen("a.b", by=4, method="net2net")
    assert widen_request("a.b=1024") == Widen("a.b", to=1024)
    assert widen_request("mlp=1.5") == Widen(kind="mlp", factor=1.5)
    assert widen_request("heads=+2") == Widen(kind="heads", by=2)
    assert widen_request("width=1024") == Widen(kind="width", to=1024)
    assert deepen_request("layers=24") == Deepen(layers=24)
    assert deepen_request("model.layers.3=+2") == Deepen(after="model.layers.3", count=2)
    assert deepen_request("encoder.block=24") == Deepen(layers=24, stack="encoder.block")


@pytest.mark.parametrize("text", ["mlp", "mlp=", "=2", "mlp=two", "mlp=x+2", "mlp=+1.5", "mlp=-3"])
def test_a_wrong_size_is_reported_with_the_right_form(text: str) -> None:
    with pytest.raises(CommandError, match=r"write e\.g\.|whole"):
        widen_request(text)


def test_a_checkpoint_is_grown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_small("llama", tmp_path / "old")
    arguments = ["grow", str(tmp_path / "old"), "--widen", "*.mlp.*=1.5", "--deepen", "model.layers.0=+1"]
    assert main([*arguments, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "model.layers.0.mlp.gate_proj + 3 alike" in shown
    assert "num_hidden_layers 4 → 5" in shown
    assert "needed disk: " in shown
    assert {path.name for path in tmp_path.iterdir()} == {"old"}
    assert main([*arguments, "--out", str(tmp_path / "new"), "--dtype", "bfloat16", "--jobs", "2"]) == 0
    assert "compared: error" in capsys.readouterr().out
    assert {value.dtype for value in tensors_in(tmp_path / "new").values()} == {torch.bfloat16}
    card = (tmp_path / "new" / "README.md").read_text()
    assert "outgrow grow old --widen '*.mlp.*=1.5' --deepen model.layers.0=+1 --dtype bfloat16 --out new" in card


def test_kinds_and_the_length_of_the_stack_say_what_grows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_small("llama", tmp_path / "old")
    arguments = ["--widen", "mlp=1.5", "--widen", "heads=x2", "--widen", "width=24", "--deepen", "layers=6"]
    assert main(["grow", str(tmp_path / "old"), *arguments, "--out", str(tmp_path / "new")]) == 0, capsys.readouterr().err
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    sizes = ("intermediate_size", "num_attention_heads", "hidden_size", "num_hidden_layers", "max_position_embeddings")
    assert [config[name] for name in sizes] == [36, 8, 24, 6, 64]
    assert "compared: error" in capsys.readouterr().out


def test_a_stream_that_is_also_returned_grows_if_other_outputs_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    save_small("t5", tmp_path / "old")
    assert main(["grow", old, "--widen", "width=1.5", "--out", new, "--quiet"]) == 2
    assert "name them, e.g. outputs='logits'" in capsys.readouterr().err
    assert main(["grow", old, "--widen", "width=1.5", "--outputs", "logits", "--out", new, "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert "outputs: logits preserved; not compared: encoder_last_hidden_state (2, 8, 16) → (2, 8, 24)" in shown
    assert "rescaled, so that the ε of norms stays: × 1.225: shared.weight" in shown
    assert json.loads((tmp_path / "new" / "config.json").read_text())["d_model"] == 24
    assert "--outputs logits" in (tmp_path / "new" / "README.md").read_text()


def test_requests_come_from_a_file_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_small("llama", tmp_path / "old")
    (tmp_path / "plan.toml").write_text('[[growth]]\nepoch = 1\ngrow = [{ widen = "*.mlp.*", to = 30 }]\n')
    assert main(["grow", str(tmp_path / "old"), "--plan", str(tmp_path / "plan.toml"), "--dry-run"]) == 0
    assert "24 → 30" in capsys.readouterr().out


PLAN = """
widen = ["mlp=1.5"]
grow = [{ deepen = "", layers = 5, order = "stack" }]
seed = 3
dtype = "bfloat16"
shard-size = "8KB"
jobs = 2
verify = "none"
quiet = true
"""


def test_a_plan_file_holds_every_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_small("llama", tmp_path / "old")
    (tmp_path / "plan.toml").write_text(PLAN + f'out = "{tmp_path}/planned"\n')
    command = ["grow", str(tmp_path / "old")]
    assert main([*command, "--plan", str(tmp_path / "plan.toml")]) == 0, capsys.readouterr().err
    assert "compared: no" in capsys.readouterr().out
    planned = tensors_in(tmp_path / "planned")
    assert {value.dtype for value in planned.values()} == {torch.bfloat16}
    assert len(list((tmp_path / "planned").glob("*.safetensors"))) > 1
    assert json.loads((tmp_path / "planned" / "config.json").read_text())["num_hidden_layers"] == 5
    replaced = ["--seed", "0", "--out", str(tmp_path / "other"), "--widen", "width=24"]
    assert main([*command, "--plan", str(tmp_path / "plan.toml"), *replaced]) == 0, capsys.readouterr().err
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    assert (config["hidden_size"], config["intermediate_size"]) == (24, 36)
    assert json.loads((tmp_path / "other" / "outgrow_plan.json").read_text())["growths"][0]["plan"]["seed"] == 0


WRONG_PLANS = {
    "option": ('wident = "mlp=1.5"', "there is no option 'wident': did you mean 'widen'?"),
    "choice": ('verify = "some"', "invalid choice: 'some'"),
    "type": ('seed = "many"', "invalid int value: 'many'"),
    "flag": ("training-state = 1", "training-state = 1: write true or false"),
    "table": ("seed = { a = 1 }", "write a text or a number"),
    "request": ("grow = [{ widen = '*', factr = 2 }]", "there is no key 'factr'"),
    "both": ("grow = []\ngrowth = []", "both grow and growth"),
    "two growths": ("[[growth]]\nepoch = 1\ngrow = [{ widen = '*', to = 9 }]\n" * 2, "a schedule|2 growths"),
}


@pytest.mark.parametrize("case", WRONG_PLANS)
def test_a_mistake_in_a_plan_file_names_the_file(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, reason = WRONG_PLANS[case]
    (tmp_path / "plan.toml").write_text(text)
    assert main(["grow", str(tmp_path), "--plan", str(tmp_path / "plan.toml"), "--dry-run"]) == 2
    shown = capsys.readouterr().err
    assert re.search(reason, shown)
    assert "plan.toml" in shown


WRONG = {
    "nothing to grow": ([], "nothing to grow"),
    "no directory": (["--widen", "*.mlp.*=1.5"], "--out DIR is missing"),
    "a fade": (
        ["--widen", "*.mlp.*=1.5", "--fade", "9", "--out", "new"],
        "outgrow.transformers.Grow and fade= in its requests",
    ),
    "a model": (
        ["--widen", "*.mlp.*=1.5", "--model", "timm:resnet18", "--out", "new"],
        "leave --model, --input and --batch out",
    ),
    "a place": (["--deepen", "model.layers.0=3", "--out", "new"], r"model.layers.0=+2"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_one_line_and_exit_code_2(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options, reason = WRONG[case]
    assert main(["grow", str(tmp_path), *options]) == 2
    assert reason in capsys.readouterr().err


def test_ctrl_c_stops_with_code_130_and_the_same_command_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from outgrow.checkpoints.stream_tensors import Stream

    save_small("llama", tmp_path / "old")
    command = ["grow", str(tmp_path / "old"), "--widen", "mlp=1.5", "--verify", "none", "--out", str(tmp_path / "new")]
    real, calls = Stream.values, []

    def pressed_at_the_tenth(self: Stream, tensor: Any) -> Any:
        calls.append(tensor)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return real(self, tensor)

    monkeypatch.setattr(Stream, "values", pressed_at_the_tenth)
    assert main(command) == 130
    assert re.search(r"outgrow: stopped; .* is not a checkpoint: the same command goes on from there", capsys.readouterr().err)
    assert not (tmp_path / "new").exists()
    assert main(command) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"old", "new"}


def test_the_bar_shows_rate_and_remaining_time() -> None:
    assert bar(10**9, 10**12, 1.0).endswith("1.0 of 1000.0 GB  1000 MB/s  17 min left")
    assert bar(0, 10**9, 0.0).endswith("h left")
