"""Work in the background: an engine enqueues its steps on a CUDA stream of its own, so that several share the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Found = list[tuple[Tensor, Tensor]]


class Background:
    """`start`, `ready` and `finish` for an engine that has `run` and `_evaluations`, whose results stay on the device."""

    run: Callable[[], tuple[Tensor, Tensor]]
    _evaluations: Callable[[], Found]

    def work_on(self, device: Any) -> None:
        self.side = torch.cuda.Stream(device) if torch.device(device).type == "cuda" else None
        self.mark: torch.cuda.Event | None = None

    def start(self, evaluate: bool) -> None:
        """Begin the prepared steps, and an evaluation after them."""
        with self._beside():
            self.begun_work = *self.run(), self._evaluations() if evaluate else []
            if self.side is not None:
                self.mark = torch.cuda.Event()
                self.mark.record()

    def ready(self) -> bool:
        """Whether what was begun is done."""
        return self.mark is None or self.mark.query()

    def finish(self) -> tuple[Tensor, Tensor, Found]:
        """Losses and accuracies of the prepared steps, and the evaluation after them, if it was wanted."""
        if self.mark is not None:
            self.mark.synchronize()
        losses, right, evaluated = self.begun_work
        return losses.cpu(), right.cpu(), on_the_host(evaluated)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        if self.side is None:
            yield
            return
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            yield


def on_the_host(found: Found) -> Found:
    return [(accuracy.cpu(), loss.cpu()) for accuracy, loss in found]


def captured(step: Callable[[], None], device: Any, changed: Callable[[], Sequence[Tensor]]) -> Callable[[], None]:
    """A step as one CUDA graph, where there are graphs; what compiling it has changed is put back.

    It is recorded on the present stream, unless that is the default one: what the step finds there, such as views that are part
    of an autograd graph, may belong to no other stream.
    """
    if torch.device(device).type != "cuda":
        return step
    saved = [(tensor, tensor.clone()) for tensor in changed()]
    present = torch.cuda.current_stream(device)
    side = torch.cuda.Stream(device) if present == torch.cuda.default_stream(device) else present
    side.wait_stream(present)
    with torch.cuda.stream(side):
        step()
    present.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step()
    before = {id(tensor) for tensor, _ in saved}
    for tensor in changed():
        if id(tensor) not in before:
            tensor.zero_()  # state of an optimizer that its first step has made
    for tensor, value in saved:
        tensor.copy_(value)
    return graph.replay
