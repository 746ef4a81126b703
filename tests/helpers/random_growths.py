"""Growths of random networks by every method, compared with the ungrown network."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings

import outgrow

ORDINARY, EXHAUSTIVE = 60, 10_000
METHODS: dict[str, Any] = {
    "auto": "auto",
    "r2r": "r2r",
    "net2net": "net2net",
    "netmorph": "netmorph",
    "mean": "mean",
    "r2r he": outgrow.R2R(init="he", scale=0.5),
    "r2r copy": outgrow.R2R(init="copy"),
    "net2net random": outgrow.Net2Net(mapping="random", split="random"),
    "netmorph writers": outgrow.NetMorph(zero="writers"),
    "netmorph copy": outgrow.NetMorph(init="copy"),
}


def run(cases: int) -> Any:
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    return settings(max_examples=cases, derandomize=True, deadline=None, database=None, suppress_health_check=quiet)
