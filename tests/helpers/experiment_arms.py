"""An arm of the experiments for tests."""

from __future__ import annotations

from experiments.setting.arms import paper_arms
from tests.helpers.experiment_runs import short

ARM = short(paper_arms()[3])
