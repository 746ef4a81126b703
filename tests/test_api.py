"""`import outgrow` loads no optional package, and every public name has a docstring with a running example."""

from __future__ import annotations

import ast
import doctest
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import outgrow

TREE = ast.parse(Path(outgrow.__file__).with_name("api.py").read_text())
NAMES = [alias.asname or alias.name for node in TREE.body if isinstance(node, ast.ImportFrom) for alias in node.names]
OPTIONAL = (
    "timm",
    "torchvision",
    "transformers",
    "rich",
    "matplotlib",
    "sklearn",
    "lightning",
    "hypothesis",
    "pytest",
    "optuna",
    "ray",
)


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_loads_no_optional_package() -> None:
    loaded = python(
        "import torch, sys; before = set(sys.modules); import outgrow; outgrow.grow; print(*(set(sys.modules) - before))"
    ).split()
    assert "outgrow.growth_plan.plan" in loaded
    assert not {name.partition(".")[0] for name in loaded} & set(OPTIONAL)


def test_importing_changes_no_setting_of_torch() -> None:
    facts = "(torch.get_rng_state().sum().item(), torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled())"
    assert python(f"import torch; before = {facts}; import outgrow; print(before == {facts})").strip() == "True"


def test_the_public_names_are_those_that_the_package_lists() -> None:
    assert sorted(outgrow.__all__) == sorted(NAMES) == sorted(dir(outgrow))
    assert callable(outgrow.grow)  # the function, not the module of that name
    assert {"volumes", "widen", "grow", "save", "load"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_a_docstring_with_an_example_that_runs(name: str) -> None:
    thing = getattr(outgrow, name)
    assert thing.__doc__
    assert not thing.__doc__.startswith(f"{name}(")  # a dataclass without a docstring gets its signature
    module = sys.modules[thing.__module__]
    (test,) = doctest.DocTestFinder(recurse=False).find(thing, name, module=module)
    assert test.examples, f"{thing.__module__}.{name} shows no example"
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(test, out=lambda text: None)
    assert runner.summarize(verbose=False).failed == 0


def test_the_package_is_pickled_by_its_name_so_that_functions_which_use_it_can_be_sent_to_other_processes() -> None:
    assert pickle.loads(pickle.dumps(outgrow)) is outgrow
