"""Helpers for tests with several processes: a small task, a comparison of ranks bit for bit, and the launcher.

Run as a module on each rank, `tests.helpers.processes NAME …` calls the functions of those names in `ddp_workers.py`,
`fsdp_workers.py` or `trainer_workers.py`, with gloo on the CPU.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

RANKS, TIMEOUT = 2, 300.0
ROOT, MODULE = str(Path(__file__).parents[2]), "tests.helpers.processes"
WORKERS = ("tests.helpers.ddp_workers", "tests.helpers.fsdp_workers", "tests.helpers.trainer_workers")
USED = {  # modules that worker functions import, so that the ranks share them
    "in_lightning": ("lightning.pytorch",),
    "in_accelerate": ("accelerate",),
    "in_the_trainer": ("transformers.trainer", "tests.helpers.transformers_trainer"),
    "hooks": ("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook", "torch.distributed.optim"),
    "fully_sharded": ("torch.distributed.fsdp", "torch.distributed.tensor"),
    "checkpoints": ("torch.distributed.checkpoint.state_dict",),
}


def launch(*names: str) -> None:
    """Run worker functions on two ranks; a failure on any rank raises here.

    A new process imports the libraries, which takes seconds, and forks the ranks. Their environment is that of `torchrun`.
    """
    if not hasattr(os, "fork"):
        import pytest

        pytest.skip("the ranks of these tests are forked, and this platform has no os.fork")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environment["PYTHONPATH"] = os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_RUN_ID": "tests"}
    environment |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "GROUP_RANK": "0"}
    with tempfile.TemporaryFile("w+") as printed:
        command = [sys.executable, "-m", MODULE, *names]
        process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            status: object = process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            status = f"none after {TIMEOUT:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # a rank whose partner has failed would wait for it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        assert status == 0, f"exit status {status}:\n{printed.read()}"


def fork_ranks(work: Callable[[], None]) -> None:
    """Run a function in one forked process per rank, until all have ended or one has failed."""
    ranks = set()
    for rank in range(RANKS):
        process = os.fork()
        if not process:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            try:
                work()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)  # torch's threads are sometimes not joined at the exit of the interpreter, which then aborts
        ranks.add(process)
    while ranks:
        process, status = os.wait()
        ranks.discard(process)
        if status:
            sys.exit(1)


def batches(count: int, seed: int = 0, samples: int = 8) -> list[tuple[Tensor, Tensor]]:
    """A task that can be learned: the classes of random points under a fixed random map."""
    generator = torch.Generator().manual_seed(seed)
    teacher = torch.randn(4, 3, generator=torch.Generator().manual_seed(99))
    points = [torch.randn(samples, 4, generator=generator) for _ in range(count)]
    return [(x, (x @ teacher).argmax(dim=1)) for x in points]


def share(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """This rank's part of a batch."""
    x, y = batch
    return x[dist.get_rank() :: RANKS], y[dist.get_rank() :: RANKS]


def same_everywhere(tensors: Iterable[Tensor]) -> bool:
    """Whether all ranks have the same bits."""
    result = True
    for tensor in tensors:
        all_of_them = [torch.empty_like(tensor.detach()) for _ in range(RANKS)]
        dist.all_gather(all_of_them, tensor.detach().contiguous())
        result &= all(torch.equal(one, all_of_them[0]) for one in all_of_them)
    return result


def hand_mean(module: nn.Module, loss: Tensor) -> list[Tensor]:
    """Gradients averaged over the ranks by hand, without a wrapper."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    means = [torch.zeros_like(p) if g is None else g.clone() for p, g in zip(parameters, gradients, strict=True)]
    for mean in means:
        dist.all_reduce(mean)
    return [mean / RANKS for mean in means]


def refusal(call: object, *args: object, **options: object) -> str:
    """The text of the error that a call must raise."""
    from outgrow import GrowthError

    try:
        call(*args, **options)  # type: ignore[operator]
    except GrowthError as error:
        return str(error)
    raise AssertionError("this should have been refused")


def run_all(names: Iterable[str]) -> None:
    """Call worker functions by their names, on this rank."""
    from tests.helpers import ddp_workers, fsdp_workers, trainer_workers

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in names:
        next(getattr(file, name) for file in (ddp_workers, fsdp_workers, trainer_workers) if hasattr(file, name))()
        print(f"rank {dist.get_rank()} is done with {name}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    for module in (*WORKERS, *(module for name in sys.argv[1:] for module in USED.get(name, ()))):
        importlib.import_module(module)
    gc.freeze()  # the ranks share the objects of the libraries, and never search them for garbage
    fork_ranks(lambda: run_all(sys.argv[1:]))
    print("all done", flush=True)
