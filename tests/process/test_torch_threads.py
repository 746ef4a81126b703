"""Operators use one thread inside the context, in new threads too."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from outgrow.process.torch_threads import one_thread


def test_the_number_of_threads_is_one_and_then_as_before() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(torch.get_num_threads).result() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
