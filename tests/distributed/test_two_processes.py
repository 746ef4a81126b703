"""Growth in two real processes, with gloo on the CPU (see `processes.py`)."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.processes import launch


def test_wrappers_stay_usable_and_ranks_equal_over_growths() -> None:
    launch("data_parallel", "accumulation", "unlike", "examples", "brief_checks", "hooks")


@pytest.mark.skipif(torch.__version__.startswith("2.6"), reason="fully_shard of torch 2.6 runs on GPUs only")
def test_sharded_models_grow_as_one_process_does_and_are_saved() -> None:
    launch("fully_sharded", "sharded_run", "sharded_refusals", "sharded_fades", "checkpoints", "saves_whole")


def test_trainers_of_other_libraries_grow_equally_on_all_ranks_and_can_be_resumed() -> None:
    launch("rules", "in_lightning", "in_accelerate", "in_the_trainer")
