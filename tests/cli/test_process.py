"""The command line in a separate process: its imports, its stand-ins for torchvision, and its exit codes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import lean, row

ROOT = Path(__file__).parents[2]


def test_timm_models_build_by_name_also_where_torchvision_lacks_its_operators() -> None:
    done = lean("import outgrow.cli.main as c, sys; sys.exit(c.main(sys.argv[1:]))", "inspect", "timm:resnet18", "--batch", "1")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "timm:resnet18: ResNet, example (1, 3, 224, 224) float32"
    assert row(done.stdout, "layer4.0.conv1 + 1")[1:5] == ["512", "mlp", "layer4.0.conv1", "layer4.0.conv2"]
    assert row(done.stdout, "fc")[1] == "1000"
    assert lines[-1].endswith("12 can grow; 11,689,512 parameters")  # three streams besides the stem's, eight inner volumes


@pytest.mark.exhaustive
def test_a_users_model_builds_if_its_imports_include_torchvision(tmp_path: Path) -> None:
    (tmp_path / "with_torchvision.py").write_text(
        "import torch, torchvision\nfrom torch import nn\n"
        "def build():\n"
        "    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)), torch.zeros(1, 3)\n"
    )
    done = lean(f"import os, outgrow.cli.main as c; os.chdir({str(tmp_path)!r}); c.main(['inspect', 'with_torchvision:build'])")
    assert (done.returncode, done.stderr) == (0, "")
    assert row(done.stdout, "0")[1] == "5"


@pytest.mark.exhaustive
def test_a_users_model_builds_if_its_imports_include_transformers(tmp_path: Path) -> None:
    (tmp_path / "with_llama.py").write_text(
        "import torch\nfrom transformers import LlamaConfig, LlamaModel\n"
        "def build():\n"
        "    c = LlamaConfig(vocab_size=20, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2)\n"
        "    return LlamaModel(c), torch.zeros(1, 3, dtype=torch.int64)\n"
    )
    done = lean(f"import os, outgrow.cli.main as c, sys; os.chdir({str(tmp_path)!r}); c.main(['inspect', 'with_llama:build'])")
    noise = ("torchao", "_pytree")  # messages of packages that Transformers imports
    assert [line for line in done.stderr.splitlines() if not any(word in line for word in noise)] == []
    assert row(done.stdout, "layers.0.mlp.gate_proj")[1] == "12"


def test_python_m_outgrow_prints_the_version_of_the_project() -> None:
    (version,) = re.findall(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    done = subprocess.run([sys.executable, "-m", "outgrow", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"outgrow {version}\n"


ALONE = """
import sys, time, types
package = types.ModuleType("outgrow")
package.__path__ = [sys.argv[1]]
sys.modules["outgrow"] = package  # the command line without the imports of `outgrow` itself
start = time.perf_counter()
import outgrow.cli.main
try:
    outgrow.cli.main.main(sys.argv[2:])
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


def test_a_closed_pipe_is_not_an_error(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "outgrow", "inspect", str(checkpoint)]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
