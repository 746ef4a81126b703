"""The plain loop as a CUDA graph: torch's own modules and optimizers, a step of all networks as one launch.

For networks that have no kernels of their own in the fused engine. Networks of a fleet are captured side by side, each on a
stream of its own, so that the device works on many of them at once; nothing is computed otherwise than by `eager.Eager`. A
launch takes as long as it has kernels, so there are few: torch's fused optimizer, and images with their channels last, which
convolutions need not rearrange. Without CUDA the same steps are made one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from experiments.training.background import Background, Found, captured, on_the_host
from experiments.training.eager import Eager, move

ROOM = 512  # steps that tables have room for, at least


class Graphs(Background, Eager):
    piece = 5_000

    def __init__(self, *what: Any, **more: Any) -> None:
        Eager.__init__(self, *what, **more)
        self.work_on(self.device)
        assert not self.paces, "rates of their own for new units are not supported here: use the eager engine"
        self.tables: dict[str, Tensor] = {}
        self.replay: Callable[[], None] | None = None
        self.sides = [torch.cuda.Stream(self.device) if self.side is not None else None for _ in self.models]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["capturable"], group["fused"], group["foreach"] = self.side is not None, True, None
                group["lr"] = torch.tensor(float(group["lr"]), device=self.device)
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            arrange(model, optimizer, torch.channels_last)
            for state in optimizer.state.values():
                state["step"] = state["step"].to(self.device)

    def begin(self, order: Tensor, rates: Tensor, decays: Tensor, flips: Tensor | None = None) -> None:
        assert flips is None, "mirrored images are not supported here: use the eager engine"
        steps = self.ahead = order.shape[1]
        tables = {
            "order": order,
            "rates": rates,
            "losses": torch.zeros(len(self.models), steps),
            "right": torch.zeros(len(self.models), steps),
        }
        if not self.tables or steps > self.tables["order"].shape[1]:
            self.tables = {
                name: torch.zeros(len(table), max(steps, ROOM), *table.shape[2:], dtype=table.dtype, device=self.device)
                for name, table in tables.items()
            }
            self.clock = torch.zeros(1, dtype=torch.long, device=self.device)
            self.replay = None
        for name, table in tables.items():
            self.tables[name][:, :steps].copy_(table)
        self.clock.zero_()
        self._set_decays(decays)
        if self.replay is None:
            self.replay = captured(self.step, self.device, self._changed)

    def _set_decays(self, decays: Tensor) -> None:
        """Weight decays are constants of a graph: one for each network, until its fleet lands."""
        for row, optimizer in zip(decays, self.optimizers, strict=True):
            assert bool((row == row[0]).all()), "a weight decay that changes in a stage is not supported here"
            for group in optimizer.param_groups:
                group["weight_decay"] = float(row[0])

    def _changed(self) -> list[Tensor]:
        """All that a step changes, as far as it is there yet."""
        found = [self.clock]
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            found += [*model.parameters(), *model.buffers()]
            found += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        return [tensor.detach() if tensor.requires_grad else tensor for tensor in found]

    def step(self) -> None:
        """One step of all networks."""
        for number, side in enumerate(self.sides):
            if side is None:
                self._step_of(number)
                continue
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._step_of(number)
        for side in self.sides:
            if side is not None:
                torch.cuda.current_stream().wait_stream(side)
        self.clock.add_(1)

    def _step_of(self, number: int) -> None:
        model, optimizer, stream = self.models[number], self.optimizers[number], self.streams[number]
        model.train()
        chosen = self.tables["order"][stream].index_select(0, self.clock)[0]
        x, target = self.prepared(self.images.index_select(0, chosen)), self.labels.index_select(0, chosen)
        for group in optimizer.param_groups:
            group["lr"].copy_(self.tables["rates"][number].index_select(0, self.clock)[0])
        logits = model(x.contiguous(memory_format=torch.channels_last))
        loss = self.loss(logits, target)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        right = (logits.argmax(1) == target).float().mean()
        for name, value in (("losses", loss.detach()), ("right", right)):
            self.tables[name][number].index_copy_(0, self.clock, value[None].float())

    def run(self) -> tuple[Tensor, Tensor]:
        assert self.replay is not None, "begin comes first"
        for _ in range(self.ahead):
            self.replay()
        return self.tables["losses"][:, : self.ahead], self.tables["right"][:, : self.ahead]

    def _evaluations(self) -> Found:
        return Eager.evaluate(self)

    def evaluate(self) -> Found:
        return on_the_host(self._evaluations())

    def land(self) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            optimizer.zero_grad(set_to_none=True)
            model.cpu()
            move(optimizer, "cpu")
            arrange(model, optimizer, torch.contiguous_format)
            for group in optimizer.param_groups:
                group["capturable"], group["fused"], group["lr"] = False, None, float(group["lr"])
            for state in optimizer.state.values():
                state["step"] = state["step"].cpu()


def arrange(model: nn.Module, optimizer: torch.optim.Optimizer, order: torch.memory_format) -> None:
    """Weights of convolutions, and what the optimizer keeps beside them, in this order of axes in memory."""
    model.to(memory_format=order)
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim == 4:
                state[name] = value.contiguous(memory_format=order)
