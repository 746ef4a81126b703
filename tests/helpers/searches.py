"""Small searches, and worker processes that can be killed."""

from __future__ import annotations

import multiprocessing
import os
import socket
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import alembic.command  # noqa: F401  (imported once by the server from which workers are forked, as are those below)
import optuna
import optuna.storages._rdb.models  # noqa: F401
import torch
from torch import Tensor, nn

import outgrow
from outgrow.search.search import run_search

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
