"""The fused engine of the experiments computes what the plain loop computes: see `tests/helpers/fused_cases.py`.

On a machine with a GPU its kernels are compiled; elsewhere Triton's interpreter runs them, slowly, on the CPU.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SLOW = [
    pytest.param(name, marks=pytest.mark.exhaustive) for name in ("residual", "several", "plain", "small", "faded", "drifting")
]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the fused engine needs Triton: pip install triton")
@pytest.mark.parametrize("case", SLOW)
def test_fused_and_eager_agree(case: str) -> None:
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    environment = {**os.environ, **interpreted, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.fused_cases", case], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
