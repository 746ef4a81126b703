"""Errors of the command line: one or a few lines with the mistake and the way out, and no traceback."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import outgrow
from tests.helpers.commands import MODELS, SCHEDULE, Run

MISTAKES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no command": ((), ("COMMAND",)),
    "unknown command": (("shrink",), ("shrink", "inspect")),
    "unknown option": (("inspect", "given_models:ready", "--inputs=3", "--x"), ("--x",)),
    "no such thing": (("inspect", "nothing"), ("nothing", "neither a file nor a model", "timm:resnet18")),
    "no such file": (("inspect", "no.safetensors"), ("no.safetensors", "no such file")),
    "folder": (("inspect", "."), ("is not a Transformers checkpoint", "config.json")),
    "text file": (("inspect", "given_models.py"), ("given_models.py", "not a safetensors file")),
    "no such module": (("inspect", "no_such_module:f"), ("no_such_module",)),
    "broken module": (("inspect", "broken_models:f"), ("broken_models", "SyntaxError")),
    "no such attribute": (("inspect", "given_models:nothing"), ("nothing",)),
    "not a model": (("inspect", "given_models:number"), ("number", "int")),
    "gives no model": (("inspect", "builtins:dict"), ("dict", "(model, example)")),
    "fails": (("inspect", "given_models:fails"), ("fails", "ValueError", "out of luck")),
    "wants arguments": (("inspect", "given_models:wants"), ("wants", "size")),
    "no example": (("inspect", "given_models:ready"), ("--input",)),
    "wrong example": (("inspect", "given_models:ready", "--input", "5"), ("does not run", "shapes")),
    "shape": (("inspect", "given_models:ready", "--input", "3,x"), ("3,x", "3,224,224")),
    "zero in a shape": (("inspect", "given_models:ready", "--input", "3,0"), ("3,0", "3,224,224")),
    "batch": (("inspect", "given_models:ready", "--input", "4", "--batch", "0"), ("batch",)),
    "dtype": (("inspect", "given_models:ready", "--input", "4", "--dtype", "float12"), ("float12", "float64")),
    "model without checkpoint": (("inspect", "given_models:ready", "--model", "timm:resnet18"), ("--model", "checkpoint")),
    "other model": (
        ("inspect", "grown.safetensors", "--model", "given_models:chain", "--input", "5"),
        ("grown.safetensors", "does not fit", "0.weight"),
    ),
    "no timm model": (("inspect", "timm:resnet1000"), ("resnet1000", "resnet10t", "did you mean")),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_reported_without_a_traceback(case: str, run: Run, checkpoint: Path) -> None:
    arguments, words = MISTAKES[case]
    code, text, errors = run(*arguments)
    assert (code, text) == (2, "")
    assert errors.startswith("outgrow: ")
    assert "Traceback" not in errors
    assert errors.count("\n") == 1 or case == "other model"
    for word in words:
        assert word in errors, errors


def test_a_refusal_with_several_reasons_keeps_its_lines(run: Run, checkpoint: Path) -> None:
    exec(MODELS, names := {})
    with pytest.raises(outgrow.GrowthError) as caught:
        outgrow.load(names["chain"](), checkpoint)
    assert str(caught.value).count("\n  - ") > 1
    _, _, errors = run("inspect", str(checkpoint), "--model", "given_models:chain", "--input", "5")
    assert errors == f"outgrow: {caught.value}\n"


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (SCHEDULE.replace("widen", "widne"), "plan.toml: growth 1, transform 1: .* did you mean 'widen'?"),
        (SCHEDULE.replace('deepen = "1"', 'deepen = "9"'), "event 2, when val_loss .*: the model has no module '9'"),
    ],
)
def test_timeline_reports_mistakes_in_one_line(schedule: str, message: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(schedule)
    code, printed, complaint = run("timeline", "plan.toml", "--model", "given_models:ready", "--input", "4")
    assert (code, printed, complaint.count("\n")) == (2, "", 1)
    assert re.search(message, complaint)
