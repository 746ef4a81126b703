"""The functions and kernels of one growth on a GPU, by time.

python -m benchmarks.cuda_profile            # every volume of a Llama with 0.6 B parameters
python -m benchmarks.cuda_profile --small    # a tiny one, also on a CPU
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import pstats
import time
import warnings
from typing import Any
from unittest.mock import patch

from benchmarks.cuda import Setting, planned


def main() -> None:
    from torch.profiler import ProfilerActivity, profile

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny model, also without a GPU")
    setting = Setting(parser.parse_args().small)
    warnings.filterwarnings("ignore")
    run, optimizer = planned(setting, next(iter(setting.models)), "everything × 1.5")
    for _ in range(4):
        seconds, memory = carried_out(setting, run, optimizer, contextlib.nullcontext())
        print(f"{1e3 * seconds:.1f} ms, of which memory from the driver: {1e3 * memory:.1f} ms")
    functions = cProfile.Profile()
    carried_out(setting, run, optimizer, functions)
    pstats.Stats(functions).sort_stats("tottime").print_stats(30)
    on_gpu = setting.device == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as kernels:
        carried_out(setting, run, optimizer, contextlib.nullcontext())
    order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    print(kernels.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=60))


def carried_out(setting: Setting, run: Any, optimizer: Any, around: Any) -> tuple[float, float]:
    """Carry the planned growth out and undo it; returns its seconds, and those that go into memory from the driver."""
    from outgrow.apply.device_memory import reserve
    from outgrow.engine.carry_out import Work

    memory: list[float] = []
    work = Work(run.model, [], [optimizer], run.example)
    setting.release()

    def timed(*given: Any) -> None:
        start = time.perf_counter()
        reserve(*given)
        memory.append(time.perf_counter() - start)

    with patch("outgrow.engine.carry_out.reserve", timed), around:
        seconds, _ = setting.clock(lambda: [work.carry_out(step) for step in run._ready[0].steps])
    work.journal.undo()
    return seconds, sum(memory)


if __name__ == "__main__":
    main()
