"""Small searches, and worker processes that can be killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import alembic.command  # noqa: F401  (imported once by the server from which workers are forked, as are those below)
import optuna
import optuna.storages._rdb.models  # noqa: F401
import torch
from torch import Tensor, nn

import outgrow
from outgrow.errors import SearchError
from outgrow.search.artifacts import Models, open_store
from outgrow.search.records import COMPLETE, Record
from outgrow.search.search import run_search
from outgrow.search.storages import load_study

SPACE = outgrow.Space(factors=(1.5, 2), deepen="1", shrink=0.3, parameters=400)
TRIALS = 8


def inputs(seed: int = 0, count: int = 32) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))


def small() -> nn.Sequential:
    """The parent of all searches here; other weights in every call, as in worker processes that do not seed."""
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(model: nn.Module, optimizer: Any, trial: Any) -> dict[str, float]:
    """A few steps on random batches."""
    loss = torch.zeros(())
    for _ in range(4):
        x = torch.randn(32, 4)
        optimizer.zero_grad()
        loss = (model(x)[:, 0] - x.prod(1)).square().mean()
        loss.backward()
        optimizer.step()
    return {"error": loss.item()}


def describe(trials: int = TRIALS) -> outgrow.Search:
    """The target of worker processes."""
    return outgrow.Search(small(), inputs(), SPACE, train, ["error", "parameters"], sgd, trials=trials, lease=3.0, attempts=50)


def sized() -> nn.Module:
    """Not a search."""
    return small()


def _work(storage: str, artifacts: str, trials: int, study: str) -> None:
    torch.set_num_threads(1)
    search = describe(trials)
    search.artifacts = artifacts
    run_search(search, study, storage, quiet=True)


class Proxy:
    """A proxy of Optuna in front of a database, in threads of this process, until the end of the context."""

    def __init__(self, storage: Any, port: int = 0) -> None:
        from optuna.storages._grpc.server import make_server  # the public call does not return

        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            self.port = port or probe.getsockname()[1]
        self.url = f"grpc://localhost:{self.port}"
        self._server = make_server(storage, "localhost", self.port)

    def __enter__(self) -> str:
        self._server.start()
        return self.url

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()


class Workers:
    """Worker processes on one storage, forked from a server that has imported everything."""

    def __init__(self, storage: str, artifacts: Path, trials: int, study: str = "killed") -> None:
        self.trials, self.storage, self.artifacts, self.study = trials, storage, os.fspath(artifacts), study
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.helpers.searches"])
        self.running: list[BaseProcess] = []

    def start(self) -> BaseProcess:
        process = self._context.Process(target=_work, args=(self.storage, self.artifacts, self.trials, self.study))
        process.start()
        self.running.append(process)
        return process

    def kill(self, process: BaseProcess) -> None:
        process.kill()
        process.join()
        self.running.remove(process)

    def join(self, seconds: float) -> list[int | None]:
        for process in self.running:
            process.join(seconds)
        return [process.exitcode for process in self.running]


def wait_for_another_trial(storage: Any, begun: int, study: str = "killed") -> int:
    """Wait until more trials have begun than before, or all have ended; returns how many have begun."""
    for _ in range(3000):
        with contextlib.suppress(SearchError):  # no study yet
            trials = load_study(storage, study).get_trials(deepcopy=False)
            now = sum(trial.state.name != "WAITING" for trial in trials)
            if now > begun or (trials and now == len(trials)):
                return now
        time.sleep(0.02)
    raise AssertionError("the workers do not begin trials")


def check_records(records: list[Record], trials: int, folder: Path) -> None:
    """Every trial has exactly one result, with a model that its parent's model and its growth lead to."""
    assert {record.state for record in records} <= {COMPLETE, "FAIL"}  # none is left running or waiting
    done = {record.slot: record for record in records if record.state == COMPLETE}
    assert len(done) == sum(record.state == COMPLETE for record in records) == trials
    models = Models(small(), sgd, open_store(folder / "models"))
    by_number = {record.number: record for record in records}
    for record in done.values():
        model, _ = models.load(record)
        assert sum(p.numel() for p in model.parameters()) == record.parameters
        assert record.slot == 0 or by_number[record.parent or 0].state == COMPLETE
