"""Which running trials still have a living worker."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from outgrow.search.leases import Lease, Observer, is_alive, place, start_of

pytest.importorskip("optuna")


def trial(lease: dict[str, Any] | None) -> Any:
    return SimpleNamespace(number=1, user_attrs={} if lease is None else {"lease": lease})


def test_a_killed_process_of_this_machine_is_noticed_at_once() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    about = {"owner": "a", "place": place(), "process": process.pid, "started": start_of(process.pid), "beat": 0}
    assert is_alive(process.pid, about["started"])
    assert not is_alive(process.pid, "another start") or not os.path.isdir("/proc")
    assert not Observer(60).stale(trial(about))
    process.kill()
    time.sleep(0.05)
    assert Observer(60).stale(trial(about)) or not os.path.isdir("/proc")  # not yet collected
    process.wait()
    assert Observer(60).stale(trial(about))


def test_elsewhere_a_lease_must_be_renewed() -> None:
    now = [0.0]
    observer = Observer(10, clock=lambda: now[0])
    about = {"owner": "a", "place": "elsewhere", "process": 1, "started": "", "beat": 0}
    for now[0] in (0, 9, 18):
        assert not observer.stale(trial({**about, "beat": now[0]}))
    now[0] = 29
    assert observer.stale(trial({**about, "beat": 18}))
    assert not observer.stale(trial({**about, "owner": "b", "beat": 18}))  # taken up again
    fresh = Observer(10, clock=lambda: now[0])
    assert not fresh.stale(trial(None))  # killed before it wrote a lease
    now[0] = 40
    assert fresh.stale(trial(None))


def test_a_lease_is_renewed_until_its_trial_ends() -> None:
    import optuna

    written: list[dict[str, Any]] = []

    def write(lease: dict[str, Any]) -> None:
        written.append(lease)
        if len(written) == 2:
            raise ConnectionError  # for a moment
        if len(written) > 4:
            raise optuna.exceptions.UpdateFinishedTrialError

    with Lease(write, every=0.01) as lease:
        start = time.monotonic()
        while not lease.lost and time.monotonic() - start < 10:
            time.sleep(0.01)
    assert lease.lost
    assert [one["beat"] for one in written] == list(range(5))
    assert {one["owner"] for one in written} == {lease.owner}
