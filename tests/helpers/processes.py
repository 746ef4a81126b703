"""Helpers for tests with several processes: a small task, a comparison of ranks bit for bit, and the launcher.

Run as a module on each rank, `tests.helpers.processes NAME …` calls the functions of those names in `ddp_workers.py`,
`fsdp_workers.py` or `trainer_workers.py`, with gloo on the CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist
from torch import Tensor, nn

RANKS, TIMEOUT = 2, 300.0
ROOT, MODULE = str(Path(__file__).parents[2]), "tests.helpers.processes"


def launch(*names: str) -> None:
    """Run worker functions in two processes, which take seconds to start; a failure on any rank raises here.

    The environment is that of `torchrun`, whose own process would take as long to start as a rank.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environment["PYTHONPATH"] = os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_RUN_ID": "tests"}
    environment |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "GROUP_RANK": "0"}
    with ExitStack() as stack:
        ranks = []
        for rank in map(str, range(RANKS)):
            printed = stack.enter_context(tempfile.TemporaryFile("w+"))
            command = [sys.executable, "-m", MODULE, *names]
            own = {**environment, "RANK": rank, "LOCAL_RANK": rank}
            process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, env=own)
            stack.callback(_end, process)
            ranks.append((process, printed))
        end = time.monotonic() + TIMEOUT
        while any(process.poll() is None for process, _ in ranks) and not any(process.returncode for process, _ in ranks):
            assert time.monotonic() < end, _texts(ranks)
            time.sleep(0.1)
        assert not any(process.returncode for process, _ in ranks), _texts(ranks)


def _end(process: subprocess.Popen[bytes]) -> None:
    """A rank whose partner has failed would wait for it."""
    process.kill()
    process.wait()


def _texts(ranks: Iterable[tuple[subprocess.Popen[bytes], IO[str]]]) -> str:
    texts = []
    for process, printed in ranks:
        printed.seek(0)
        texts.append(f"exit status {process.returncode}:\n{printed.read()}")
    return "\n".join(texts)


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


if __name__ == "__main__":
    from tests.helpers import ddp_workers as workers
    from tests.helpers import fsdp_workers as shard_workers
    from tests.helpers import trainer_workers

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in sys.argv[1:]:
        next(getattr(file, name) for file in (workers, shard_workers, trainer_workers) if hasattr(file, name))()
        print(f"rank {dist.get_rank()} is done with {name}", flush=True)
        dist.barrier()
    dist.destroy_process_group()
    print("all done", flush=True)
    os._exit(0)  # torch's threads are sometimes not joined at the exit of the interpreter, which then aborts
