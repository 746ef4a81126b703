"""The output of the command line for models, checkpoints and schedules."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import outgrow
from outgrow.growth_plan.plan import Plan
from outgrow.saving.save_load import describe
from tests.helpers.commands import SCHEDULE, Run, row


def test_a_function_that_returns_a_model(run: Run) -> None:
    code, text, _ = run("inspect", "given_models:chain", "--input", "5")
    assert code == 0
    assert row(text, "given_models:chain: Sequential, example (2, 5) float32")
    assert row(text, "0")[:5] == ["0", "6", "width", "0 + 4 more", "1.up + 4 more"]
    assert row(text, "1.up + 3 alike")[:5] == ["1.up + 3 alike", "10", "mlp", "1.up", "1.down"]
    assert "r2r" in row(text, "1.up + 3 alike")[5]
    assert row(text, "5") == ["5", "2", "outputs", "5", "–"]  # no module reads it
    assert "it is an output of the model" in text
    parameters = 5 * 6 + 6 + 4 * (6 * 10 + 10 + 10 * 6 + 6) + 6 * 2 + 2
    assert text.splitlines()[-1] == f"7 volumes, 5 can grow; {parameters} parameters"
    assert row(text, "1")[1].startswith("r2r, r2r-paper, residual")


def test_all_shows_every_volume_and_every_module(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    _, text, _ = run("inspect", "given_models:chain", "--input", "5", "--all")
    assert not re.search(r"\+ \d+ (alike|more)", text)
    for number in range(1, 5):
        assert row(text, f"{number}.up")[:5] == [f"{number}.up", "10", "mlp", f"{number}.up", f"{number}.down"]
    assert row(text, "0")[3:5] == ["0, 1.down, 2.down, 3.down, 4.down", "1.up, 2.up, 3.up, 4.up, 5"]


def test_inspect_as_json_agrees_with_the_library(run: Run) -> None:
    code, text, _ = run("inspect", "given_models:ready", "--input", "4", "--json")
    facts = json.loads(text)
    import given_models

    volumes = outgrow.volumes(given_models.ready, torch.zeros(2, 4))
    assert code == 0
    assert facts["parameters"] == 4 * 8 + 8 + 8 * 3 + 3
    printed = [(v["name"], v["size"], v["kind"], v["growable"], tuple(v["methods"]), v["reason"]) for v in facts["volumes"]]
    assert printed == [(v.name, v.size, v.kind, v.growable, v.methods, v.reason) for v in volumes]
    (hidden,) = [v for v in facts["volumes"] if v["growable"]]
    assert (hidden["name"], hidden["size"], hidden["writers"], hidden["readers"]) == ("0", 8, ["0"], ["2"])


@pytest.mark.parametrize(
    ("arguments", "example"),
    [
        (("given_models:words",), "(2, 3) int64"),
        (("given_models:words", "--input", "5", "--dtype", "int64", "--batch", "4"), "(4, 5) int64"),
        (("given_models:keywords",), "x=(2, 3) float32, y=(2, 4) float32"),
        (("given_models:Two", "--input", "3", "--shape", "4,"), "(2, 3) float32, (2, 4) float32"),
        (("given_models:Two", "--input", "(3)", "--input", "4", "--dtype", "float64"), "(2, 3) float64, (2, 4) float64"),
        (("given_models:keywords", "--dtype", "float64"), "x=(2, 3) float64, y=(2, 4) float64"),
    ],
)
def test_examples_come_from_the_model_or_from_the_options(arguments: tuple[str, ...], example: str, run: Run) -> None:
    code, text, errors = run("inspect", *arguments)
    assert (code, errors) == (0, "")
    assert text.splitlines()[0].endswith(f", example {example}")


def test_tables_are_no_wider_than_the_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for width in (70, 100, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        _, text, _ = run("inspect", "given_models:chain", "--input", "5", "--all")
        assert max(map(len, text.splitlines())) <= width


def test_a_checkpoint_alone_shows_its_growths_and_tensors(checkpoint: Path, run: Run) -> None:
    code, text, _ = run("inspect", "grown.safetensors")
    assert code == 0
    assert text.splitlines()[0] == "grown.safetensors: Sequential, grown 2 times"
    growths = [re.split(r"  +", line) for line in text.splitlines() if "→" in line]
    assert growths == [["0", "8 → 12", "r2r"], ["0", "12 → 13", "random (does not preserve)"]]
    assert row(text, "2.weight") == ["2.weight", "3×13", "F32"]
    assert f"4 tensors, {4 * 13 + 13 + 13 * 3 + 3} values" in text.splitlines()[-1]


def test_a_checkpoint_as_json(checkpoint: Path, run: Run) -> None:
    facts = json.loads(run("inspect", str(checkpoint), "--json")[1])
    assert facts["tensors"]["0.weight"] == {"dtype": "F32", "shape": [13, 4]}
    plans = [Plan.from_json(plan) for plan in facts["histories"][""]]
    assert tuple(plans) == describe(checkpoint).histories[""]


def test_inspecting_a_checkpoint_compares_its_checksums(checkpoint: Path, run: Run, tmp_path: Path) -> None:
    assert "; checksums match; " in run("inspect", str(checkpoint))[1].splitlines()[-1]
    assert json.loads(run("inspect", str(checkpoint), "--json")[1])["verified"] is True
    earlier = Path(__file__).parents[1] / "files" / "model-0.1.0.safetensors"
    assert "; checksums are missing: an earlier version wrote the file; " in run("inspect", str(earlier))[1]
    data = bytearray(checkpoint.read_bytes())
    data[-1] ^= 1  # in the last tensor
    checkpoint.write_bytes(data)
    for more in ((), ("--json",), ("--model", "given_models:ready", "--input", "4")):
        code, text, errors = run("inspect", str(checkpoint), *more)
        assert (code, text) == (2, "")
        assert "is damaged" in errors
        assert "2.weight: the checksum is" in errors
        assert "--no-checksums" in errors
        code, text, errors = run("inspect", str(checkpoint), "--no-checksums", *more)
        assert (code, errors) == (0, "")
        assert ("; checksums not compared; " in text) == (more == ())


def test_inspecting_a_runs_file_compares_its_checksums(run: Run, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    outgrow.Run(model, torch.zeros(2, 4), torch.optim.SGD(model.parameters(), lr=0.1), [], quiet=True).save(tmp_path / "run.pt")
    assert "; checksums match; " in run("inspect", "run.pt")[1]
    data = (tmp_path / "run.pt").read_bytes()
    values = model[2].weight.detach().numpy().tobytes()
    (tmp_path / "run.pt").write_bytes(data.replace(values, bytes([values[0] ^ 1]) + values[1:]))
    code, text, errors = run("inspect", "run.pt")
    assert (code, text) == (2, "")
    assert "2.weight: the checksum is" in errors
    assert "; checksums not compared; " in run("inspect", "run.pt", "--no-checksums")[1]


def test_a_checkpoint_with_its_model_shows_the_grown_volumes(checkpoint: Path, run: Run) -> None:
    code, text, _ = run("inspect", "grown.safetensors", "--model", "given_models:ready", "--input", "4")
    assert code == 0
    assert row(text, "0")[:5] == ["0", "13", "–", "0", "2"]
    assert text.splitlines()[-1] == f"3 volumes, 1 can grow; {4 * 13 + 13 + 13 * 3 + 3} parameters"


def test_transforms_of_one_call_are_one_growth(run: Run, tmp_path: Path) -> None:
    torch.manual_seed(0)  # with some weights the last ReLU gives zeros only, and errors are relative to outputs
    model, x = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.ReLU()), torch.randn(2, 1, 9, 9)
    outgrow.grow(model, x, outgrow.Widen("0", to=6), outgrow.Kernel("0", (9, 5)), outgrow.Deepen("3"))
    outgrow.deepen(model, x, "3", count=2)
    outgrow.save(model, tmp_path / "grown.safetensors")
    _, text, _ = run("inspect", str(tmp_path / "grown.safetensors"))
    assert text.splitlines()[0].endswith("Sequential, grown 2 times")
    assert [line for line in text.splitlines() if line.startswith("growth")] == ["growth 1", "growth 2"]
    sizes = [re.split(r"  +", line)[:2] for line in text.splitlines() if "→" in line]
    assert sizes == [["0 (kernel)", "3×3 → 9×5"], ["0", "4 → 6"], ["behind 3", "0 → 1"], ["behind 3", "0 → 2"]]


def test_compare_agrees_with_the_library(run: Run) -> None:
    code, text, _ = run("compare", "given_models:ready", "0", "--input", "4")
    assert code == 0
    assert row(text, "new channels") == ["new channels", "even", "any", "any", "any"]
    code, text, _ = run("compare", "given_models:ready", "0", "--input", "4", "--json")
    facts = json.loads(text)
    assert facts["widen"]["r2r"]["free"] == 8  # one pair: four inputs, a bias, three outputs
    assert facts["deepen"]["r2r"]["preserving"] == "yes"


def test_compare_suggests_similar_names_and_compares_grown_checkpoints(run: Run, checkpoint: Path) -> None:
    code, _, errors = run("compare", "given_models:chain", "1.upp", "--input", "5")
    assert code == 2
    assert "no volume and no module is called '1.upp'" in errors
    assert "1.up," in errors
    code, text, _ = run("compare", str(checkpoint), "0", "--model", "given_models:ready", "--input", "4", "--json")
    assert code == 0
    assert json.loads(text)["widen"]["r2r"]["tried"] == "13 → 15"
    code, _, errors = run("compare", str(checkpoint), "0")
    assert (code, errors.count("\n")) == (2, 1)
    assert "--model" in errors


def test_timeline_agrees_with_the_library(run: Run, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(SCHEDULE)
    options = ("timeline", "plan.toml", "--model", "given_models:ready", "--input", "4")
    code, printed, _ = run(*options, "--svg", "plan.svg")
    assert code == 0
    assert "val_loss has not" in printed
    assert "0: 8 → 16" in printed
    assert max(map(len, printed.splitlines())) <= 90
    assert (tmp_path / "plan.svg").read_text("utf-8").startswith("<svg")
    stages = json.loads(run(*options, "--json")[1])["stages"]
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    first = outgrow.widen(model, torch.zeros(2, 4), "0", to=16)
    second = outgrow.deepen(model, torch.zeros(2, 4), "1", method="net2net")
    assert [stage["parameters"] for stage in stages] == [*first.parameters, second.parameters[1]]
    assert [stage["flops"] for stage in stages] == [*first.flops, second.flops[1]]
