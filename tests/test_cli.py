"""The command line: what it prints, how it fails, and what it does not import."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import outgrow
from outgrow import tables
from outgrow.cli import main
from outgrow.plan import Plan
from outgrow.training.checkpoint import describe

ROOT = Path(__file__).parent.parent
MODELS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 7), nn.Linear(4, 7)
    def forward(self, x, y):
        return (self.a(x) * self.b(y)).sum(1)

def chain():
    return nn.Sequential(nn.Linear(5, 6), *(Block() for _ in range(4)), nn.Linear(6, 2))

def words():
    return nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 2)), torch.zeros(2, 3, dtype=torch.int64)

def keywords():
    return Two(), {"x": torch.zeros(2, 3), "y": torch.zeros(2, 4)}

def fails():
    raise ValueError("out of luck")

def wants(size):
    return nn.Linear(size, size)

ready = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
number = 7
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in a folder of its own: exit code, what was printed, and what was complained."""
    (tmp_path / "given_models.py").write_text(MODELS)
    (tmp_path / "broken_models.py").write_text("this is no Python")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setenv("COLUMNS", "90")
    for name in ("given_models", "broken_models"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def command(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(arguments)
        except SystemExit as stop:
            code = int(str(stop.code))
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return command


def row(text: str, name: str) -> list[str]:
    """The cells of a table's row, found by its first cell."""
    line = next(line for line in text.splitlines() if re.split(r"  +", line)[0] == name)
    return re.split(r"  +", line)


def test_a_function_that_returns_a_model(run: Run) -> None:
    code, text, _ = run("inspect", "given_models:chain", "--input", "5")
    assert code == 0
    assert row(text, "given_models:chain: Sequential, example (2, 5) float32")
    assert row(text, "0")[:4] == ["0", "6", "0 + 4 more", "1.up + 4 more"]
    assert row(text, "1.up + 3 alike")[:4] == ["1.up + 3 alike", "10", "1.up", "1.down"]
    assert "r2r" in row(text, "1.up + 3 alike")[4]
    assert row(text, "5") == ["5", "2", "5", "–"]  # nobody reads it
    assert "it is an output of the model" in text
    parameters = 5 * 6 + 6 + 4 * (6 * 10 + 10 + 10 * 6 + 6) + 6 * 2 + 2
    assert text.splitlines()[-1] == f"7 volumes, 5 can grow; {parameters} parameters"
    assert row(text, "1")[1].startswith("r2r, r2r-paper, residual")


def test_all_shows_every_volume_and_every_module(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    _, text, _ = run("inspect", "given_models:chain", "--input", "5", "--all")
    assert not re.search(r"\+ \d+ (alike|more)", text)
    for number in range(1, 5):
        assert row(text, f"{number}.up")[:4] == [f"{number}.up", "10", f"{number}.up", f"{number}.down"]
    assert row(text, "0")[2:4] == ["0, 1.down, 2.down, 3.down, 4.down", "1.up, 2.up, 3.up, 4.up, 5"]


def test_json_tells_what_the_library_does(run: Run) -> None:
    code, text, _ = run("inspect", "given_models:ready", "--input", "4", "--json")
    facts = json.loads(text)
    import given_models

    volumes = outgrow.volumes(given_models.ready, torch.zeros(2, 4))
    assert code == 0
    assert facts["parameters"] == 4 * 8 + 8 + 8 * 3 + 3
    told = [(v["name"], v["size"], v["growable"], tuple(v["methods"]), v["reason"]) for v in facts["volumes"]]
    assert told == [(v.name, v.size, v.growable, v.methods, v.reason) for v in volumes]
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


@pytest.fixture
def checkpoint(tmp_path: Path, run: Run) -> Path:
    """A grown `ready`, saved."""
    exec(MODELS, names := {})
    model = names["ready"]
    outgrow.widen(model, torch.zeros(2, 4), "0", to=12, method="r2r")
    outgrow.widen(model, torch.zeros(2, 4), "0", to=13, method="random")
    outgrow.save(model, tmp_path / "grown.safetensors")
    return tmp_path / "grown.safetensors"


def test_a_checkpoint_alone_shows_its_growths_and_tensors(checkpoint: Path, run: Run) -> None:
    code, text, _ = run("inspect", "grown.safetensors")
    assert code == 0
    assert text.splitlines()[0] == "grown.safetensors: Sequential, grown 2 times"
    growths = [re.split(r"  +", line) for line in text.splitlines() if "→" in line]
    assert growths == [["0", "8 → 12", "r2r"], ["0", "12 → 13", "random (does not preserve)"]]
    assert row(text, "2.weight") == ["2.weight", "3×13", "F32"]
    assert f"4 tensors, {4 * 13 + 13 + 13 * 3 + 3} numbers" in text.splitlines()[-1]


def test_a_checkpoint_as_json(checkpoint: Path, run: Run) -> None:
    facts = json.loads(run("inspect", str(checkpoint), "--json")[1])
    assert facts["tensors"]["0.weight"] == {"dtype": "F32", "shape": [13, 4]}
    plans = [Plan.from_json(plan) for plan in facts["histories"][""]]
    assert tuple(plans) == describe(checkpoint).histories[""]


def test_a_checkpoint_with_its_model_shows_the_grown_volumes(checkpoint: Path, run: Run) -> None:
    code, text, _ = run("inspect", "grown.safetensors", "--model", "given_models:ready", "--input", "4")
    assert code == 0
    assert row(text, "0")[:4] == ["0", "13", "0", "2"]
    assert text.splitlines()[-1] == f"3 volumes, 1 can grow; {4 * 13 + 13 + 13 * 3 + 3} parameters"


MISTAKES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no command": ((), ("COMMAND",)),
    "unknown command": (("grow",), ("grow", "inspect")),
    "unknown option": (("inspect", "given_models:ready", "--inputs=3", "--x"), ("--x",)),
    "no such thing": (("inspect", "nothing"), ("nothing", "no such file", "timm:resnet18")),
    "no such file": (("inspect", "no.safetensors"), ("no.safetensors", "no such file")),
    "folder": (("inspect", "."), ("folder",)),
    "text file": (("inspect", "given_models.py"), ("given_models.py", "no safetensors file")),
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
def test_a_mistake_is_told_without_a_traceback(case: str, run: Run, checkpoint: Path) -> None:
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


def test_transforms_of_one_call_are_one_growth(run: Run, tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.ReLU()), torch.randn(2, 1, 9, 9)
    outgrow.grow(model, x, outgrow.Widen("0", to=6), outgrow.Kernel("0", (9, 5)), outgrow.Deepen("3"))
    outgrow.deepen(model, x, "3", count=2)
    outgrow.save(model, tmp_path / "grown.safetensors")
    _, text, _ = run("inspect", str(tmp_path / "grown.safetensors"))
    assert text.splitlines()[0].endswith("Sequential, grown 2 times")
    assert [line for line in text.splitlines() if line.startswith("growth")] == ["growth 1", "growth 2"]
    sizes = [re.split(r"  +", line)[:2] for line in text.splitlines() if "→" in line]
    assert sizes == [["0 (kernel)", "3×3 → 9×5"], ["0", "4 → 6"], ["behind 3", "0 → 1"], ["behind 3", "0 → 2"]]


def test_compare_tells_what_the_library_does(run: Run) -> None:
    code, text, _ = run("compare", "given_models:ready", "0", "--input", "4")
    assert code == 0
    assert row(text, "new channels") == ["new channels", "even", "any", "any", "any"]
    code, text, _ = run("compare", "given_models:ready", "0", "--input", "4", "--json")
    facts = json.loads(text)
    assert facts["widen"]["r2r"]["free"] == 8  # one pair: four inputs, a bias, three outputs
    assert facts["deepen"]["r2r"]["preserving"] == "yes"


def test_compare_tells_the_names_that_come_near_and_compares_grown_checkpoints(run: Run, checkpoint: Path) -> None:
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


def lean(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, without the tests' stand-ins for torchvision."""
    environment = {**os.environ, "COLUMNS": "110", "PYTHONWARNINGS": "", **environment}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment, check=False
    )


SCHEDULE = """
[[growth]]
epoch = 5
grow = [{ widen = "0", to = 16 }]

[[growth]]
when = { rule = "plateau", metric = "val_loss" }
grow = [{ deepen = "1", method = "net2net" }]
"""


def test_timeline_tells_what_the_library_does(run: Run, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (SCHEDULE.replace("widen", "widne"), "plan.toml: growth 1, transform 1: .* did you mean 'widen'?"),
        (SCHEDULE.replace('deepen = "1"', 'deepen = "9"'), "event 2, when val_loss .*: the model has no module '9'"),
    ],
)
def test_timeline_tells_mistakes_in_one_line(schedule: str, message: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(schedule)
    code, printed, complaint = run("timeline", "plan.toml", "--model", "given_models:ready", "--input", "4")
    assert (code, printed, complaint.count("\n")) == (2, "", 1)
    assert re.search(message, complaint)


def test_timm_models_build_by_name_also_where_torchvision_lacks_its_operators() -> None:
    done = lean("import outgrow.cli as c, sys; sys.exit(c.main(sys.argv[1:]))", "inspect", "timm:resnet18", "--batch", "1")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "timm:resnet18: ResNet, example (1, 3, 224, 224) float32"
    assert row(done.stdout, "layer4.0.conv1 + 1 alike")[:4] == [
        "layer4.0.conv1 + 1 alike",
        "512",
        "layer4.0.conv1",
        "layer4.0.conv2",
    ]
    assert row(done.stdout, "fc")[1] == "1000"
    assert lines[-1].endswith("12 can grow; 11,689,512 parameters")  # three streams besides the stem's, eight inner volumes


def test_so_do_models_of_the_users_own_that_import_torchvision_along_the_way(tmp_path: Path) -> None:
    (tmp_path / "with_llama.py").write_text(
        "import torch\nfrom transformers import LlamaConfig, LlamaModel\n"
        "def build():\n"
        "    c = LlamaConfig(vocab_size=20, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2)\n"
        "    return LlamaModel(c), torch.zeros(1, 3, dtype=torch.int64)\n"
    )
    done = lean(f"import os, outgrow.cli as c, sys; os.chdir({str(tmp_path)!r}); c.main(['inspect', 'with_llama:build'])")
    assert done.stderr == ""
    assert row(done.stdout, "layers.0.mlp.gate_proj")[1] == "12"


def test_python_m_outgrow_tells_the_version_of_the_project() -> None:
    (version,) = re.findall(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    done = subprocess.run([sys.executable, "-m", "outgrow", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"outgrow {version}\n"


ALONE = """
import sys, time, types
package = types.ModuleType("outgrow")
package.__path__ = [sys.argv[1]]
sys.modules["outgrow"] = package  # the command line without what `import outgrow` itself brings
start = time.perf_counter()
import outgrow.cli
try:
    outgrow.cli.main(sys.argv[2:])
finally:
    print("\\nloaded:", *sorted({name.partition(".")[0] for name in sys.modules}))
    print("seconds:", time.perf_counter() - start)
"""


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_import_neither_torch_nor_anything_optional(argument: str) -> None:
    done = lean(ALONE, str(ROOT / "src" / "outgrow"), argument)
    assert done.returncode == 0, done.stderr
    assert ("inspect" if argument == "--help" else "outgrow") in done.stdout
    *_, loaded, seconds = done.stdout.splitlines()
    assert not {"torch", "numpy", "timm", "rich", "safetensors", "transformers"} & set(loaded.split())
    assert float(seconds.split()[1]) < 0.9  # 0.05 s on an idle machine


def test_a_reader_that_leaves_early_is_no_error(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "outgrow", "inspect", str(checkpoint)]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


cells = st.text("ab.0 ", max_size=60) | st.sampled_from(["layer1.0.conv2 + 3 more", "r2r, net2net", ""])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(cells, cells, cells), max_size=5), st.integers(44, 150))
def test_a_plain_table_fits_and_loses_nothing(rows: list[tuple[str, str, str]], width: int) -> None:
    text = tables.plain_table(("one", "two", "three"), rows, width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert lines[1].replace("─", "").strip() == ""
    for letter in "ab.0":
        assert text.count(letter) == sum(cell.count(letter) for row in rows for cell in row)


def bare(text: str) -> str:
    """Text without colours."""
    return "\n".join(line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines())


def test_rich_tables_hold_the_same_and_rich_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    header, rows = ("volume", "size"), [("layer1.0.conv1", "64"), ("[bold]x", "8")]
    plain, rich = tables.plain_table(header, rows, 60), bare(tables.rich_table(header, rows, 60))
    assert (
        rich.replace("─", " ").split()
        == plain.replace("─", " ").split()
        == ["volume", "size", "layer1.0.conv1", "64", "[bold]x", "8"]
    )
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    assert rich != plain
    assert bare(tables.make_table(header, rows)) == rich
    monkeypatch.setitem(sys.modules, "rich", None)
    for name in [name for name in sys.modules if name.startswith("rich.")]:
        monkeypatch.setitem(sys.modules, name, None)
    assert tables.make_table(header, rows) == plain
