"""A fleet: networks of one shape that are trained together, each with its own seed, rate and weight decay.

Networks come in and go out as plain modules with plain optimizers, so that anything (a growth, say) can be done to them between
two epochs; in between they are rows of a few large tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from experiments.training.background import Background, Found, captured, on_the_host
from experiments.training.fused import backward, forward
from experiments.training.fused.network import EPSILON, Layout, Network
from experiments.training.fused.rows import (
    biases_of,
    drifts_of,
    held_back,
    layers_of,
    paces_of,
    parameters_of,
    row_of,
    shape_of,
    write_row,
)
from experiments.training.fused.small import SmallLayout, SmallNetwork

BETAS, ADAM_EPSILON = (0.9, 0.999), 1e-8
BLOCK = 512
ROOM = 512  # steps that tables have room for, at least
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class Fleet(Background):
    """Training of several networks in one program.

    Args:
        models: networks of one shape, on the host.
        optimizers: `torch.optim.Adam` or `AdamW` of each, whose state goes in (and comes out again by `land`).
        streams: for each network, the number of the stream of batches that it is trained on.
        precision: of products: "tf32", torch's default for convolutions, or "ieee".
        factors: for each network, on the updates of what its last growth has brought.
        fades: for each network, how many steps ago what its last growth has brought began to come in, and over how many.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        streams: Sequence[int],
        batch: int,
        device: Any = "cuda",
        precision: str = "tf32",
        factors: Sequence[float] = (),
        fades: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.models, self.optimizers = list(models), list(optimizers)
        shape, size = shape_of(models[0]), (len(models), max(streams) + 1, batch, device, precision)
        self.network: Any = SmallNetwork(SmallLayout(shape), *size) if isinstance(shape, int) else Network(Layout(shape), *size)
        self.layout = self.network.layout
        self.batch, self.device, self.precision = batch, device, precision
        self.amsgrad = optimizers[0].param_groups[0]["amsgrad"]
        self.decoupled = isinstance(optimizers[0], torch.optim.AdamW)
        self.network.streams.copy_(torch.tensor(list(streams), dtype=torch.int32))
        self.base, self.stride, self.count = (table.to(device) for table in self.layout.tables())
        self.moments = [torch.zeros_like(self.network.parameters) for _ in MOMENTS]
        self.steps = [(0, 0)] * len(models)  # that the oldest and the youngest of its parameters have made
        self.late = torch.zeros(self.network.parameters.shape, dtype=torch.int8, device=device)
        self.paced = any(factor != 1 for factor in factors)
        self.pace = torch.ones_like(self.network.parameters) if self.paced else self.network.parameters
        for number, factor in enumerate(factors if self.paced else ()):
            self.pace[number].copy_(row_of(paces_of(self.models[number], factor)))
        self.ahead = 0  # steps that were prepared
        self.fades = list(fades)
        self.fading = any(done < over for done, over in fades)
        if self.fading:
            closed = torch.stack([held_back(model) * bool(over) for model, (_, over) in zip(self.models, fades, strict=True)])
            over, begun = torch.tensor([[max(over, 1.0), float(done)] for done, over in fades]).unbind(1)
            self.closed, self.over, self.begun = closed.to(device), over.to(device), begun.to(device)
            self.network.gates = torch.ones_like(self.closed)
            self.drifts = torch.stack([row_of(drifts_of(model)) for model in self.models]).to(device)
        self.made = 0  # steps, since boarding
        self.work_on(device)
        self.tables: dict[str, Tensor] = {}
        self.graph: Callable[[], None] | None = None
        self._board()
        self.mixed = any(old != young for old, young in self.steps)

    def _board(self) -> None:
        """Take over weights, running statistics and moments."""
        for number, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            parameters = parameters_of(model)
            self.network.parameters[number].copy_(row_of([parameter.detach() for parameter in parameters]))
            if self.layout.norms:
                norms = [norm for _, norm in layers_of(model)]
                means = torch.cat([norm.running_mean for norm in norms])  # type: ignore[misc]
                self.network.running_mean[number].copy_(means - biases_of(model))
                self.network.running_var[number].copy_(torch.cat([norm.running_var for norm in norms]))  # type: ignore[misc]
            state = [optimizer.state.get(parameter, {}) for parameter in parameters]
            made = [int(values.get("step", 0)) for values in state]
            old, young = self.steps[number] = max(made), min(made)
            assert set(made) <= {old, young}, "there are parameters of more than two ages"
            if old:
                for buffer, name in zip(self.moments, MOMENTS[: 2 + self.amsgrad], strict=False):
                    rows = [values.get(name, torch.zeros_like(p)) for p, values in zip(parameters, state, strict=True)]
                    buffer[number].copy_(row_of(rows))
                marks = [torch.full(p.shape, steps < old) for p, steps in zip(parameters, made, strict=True)]
                self.late[number].copy_(row_of(marks))

    @torch.no_grad()
    def land(self) -> None:
        """Give weights, running statistics and moments back to the models and their optimizers."""
        network = self.network
        rows = [tensor.cpu() for tensor in (network.parameters, network.running_mean, network.running_var, *self.moments)]
        for number, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            weights, mean, var, *moments = (tensor[number] for tensor in rows)
            done, over = self.fades[number] if self.fading else (0, 0)
            for _ in range(min(self.made, over - done)):
                optimizer.step()  # without gradients: nothing moves but what fades in
            parameters, norms = parameters_of(model), [norm for _, norm in layers_of(model)]
            write_row(weights, parameters)
            for parameter in model.parameters():
                optimizer.state[parameter].setdefault("step", torch.zeros(())).add_(self.made)
            write_row(mean + biases_of(model), [norm.running_mean for norm in norms])  # type: ignore[misc]
            write_row(var, [norm.running_var for norm in norms])  # type: ignore[misc]
            for name, row in zip(MOMENTS, moments, strict=True):
                if name == MOMENTS[2] and not self.amsgrad:
                    continue
                for parameter in model.parameters():
                    optimizer.state[parameter].setdefault(name, torch.zeros_like(parameter))
                write_row(row, [optimizer.state[parameter][name] for parameter in parameters])

    def feed(self, images: Tensor, labels: Tensor, mean: Tensor, deviation: Tensor) -> None:
        """The data set, `images`: (number, channel, row, column) as bytes."""
        self.images, self.labels = images.to(self.device), labels.to(self.device, torch.int64)
        self.mean, self.deviation = mean.to(self.device), deviation.to(self.device)

    def begin(self, order: Tensor, rates: Tensor, decays: Tensor, flips: Tensor | None = None) -> None:
        """Get ready for some steps. `order`: (stream, step, sample); `rates`, `decays`: (network, step)."""
        steps = order.shape[1]
        time = torch.tensor(self.steps, dtype=torch.float64).T.reshape(-1, 1) + torch.arange(1, steps + 1)  # old, then young
        tables = {
            "order": order.int(),
            "sizes": (rates.double().repeat(2, 1) / (1 - BETAS[0] ** time)).float(),
            "roots": (1 - BETAS[1] ** time).sqrt().float(),
            "decays": (decays.double() * rates.double() if self.decoupled else decays).float(),
            "losses": torch.zeros(len(self.models), steps),
            "right": torch.zeros(len(self.models), steps),
            "flips": torch.zeros(1, dtype=torch.int8) if flips is None else flips.to(torch.int8),
            "clock": torch.zeros(1, dtype=torch.int32),
        }
        self.mirrored = flips is not None
        if not self.tables or steps > self.tables["order"].shape[1]:  # else the graph of before has room for these steps
            room = max(steps, ROOM)
            long = {
                name: (len(table), room, *table.shape[2:]) if table.ndim > 1 else table.shape for name, table in tables.items()
            }
            self.tables = {
                name: torch.zeros(long[name], dtype=table.dtype, device=self.device) for name, table in tables.items()
            }
            self.graph = None
        for name, table in tables.items():
            self.tables[name][:, :steps].copy_(table) if table.ndim > 1 else self.tables[name].copy_(table)
        if self.fading:
            self.begun += self.ahead
        self.ahead = steps
        self.made += steps
        self.steps = [(old + steps, young + steps) for old, young in self.steps]
        if self.graph is None:
            with products_in(self.precision):
                self.graph = self._capture(self.step, self.tables["clock"])

    def step(self) -> None:
        """One step of all networks; nothing in it looks at a number."""
        network, layout, tables = self.network, self.layout, self.tables
        losses, clock, steps = tables["losses"], tables["clock"], tables["order"].shape[1]
        self._open_gates()
        self._gather(tables["order"], clock, self.images, self.labels, tables["flips"], self.mirrored)
        network.forward(train=True)
        network.head(True, steps, clock, losses, tables["right"], losses)
        network.backward()
        backward.adam[(-(-layout.parameters // BLOCK), network.nets)](
            network.parameters, network.gradients, self.base, self.stride, self.count, *self.moments, self.pace, self.late,
            tables["sizes"], tables["roots"], tables["decays"], clock, layout.parameters, layout.gradients, steps, *BETAS,
            ADAM_EPSILON, BLOCK, self.amsgrad, self.decoupled, self.paced, self.mixed,
        )  # fmt: skip
        if self.fading:
            network.parameters.addcmul_(self.drifts, (self.begun + clock < self.over).float()[:, None])
        clock.add_(1)

    def _open_gates(self) -> None:
        """As far as they are open after the steps made by now."""
        if self.fading:
            level = ((self.begun + self.tables.get("clock", 0)) / self.over).clamp(max=1.0)
            self.network.gates.copy_(1 - self.closed * (1 - level[:, None]))

    def _gather(self, order: Tensor, clock: Tensor, images: Tensor, labels: Tensor, flips: Tensor, mirrored: bool) -> None:
        size = images[0].numel()
        forward.gather[(-(-size // 64), order.shape[0])](
            images, labels, order, flips, clock, self.network.images, self.network.labels, self.mean,
            self.deviation, order.shape[1], size, images.shape[-1], self.batch, 64, mirrored,
        )  # fmt: skip

    def run(self) -> tuple[Tensor, Tensor]:
        """All prepared steps: the loss of each batch and the share of it that was classified correctly, (network, step)."""
        assert self.graph is not None, "begin comes first"
        with products_in(self.precision):
            for _ in range(self.ahead):
                self.graph()
        return self.tables["losses"][:, : self.ahead], self.tables["right"][:, : self.ahead]

    def _capture(self, step: Callable[[], None], clock: Tensor) -> Callable[[], None]:
        network = self.network
        state = [network.parameters, network.running_mean, network.running_var, *self.moments, clock]
        return captured(step, self.device, lambda: state)

    def examine(self, *sets: tuple[Tensor, Tensor]) -> None:
        """The data sets of `evaluate`, one behind the other, each filled up to whole batches with images that don't count."""
        self.sizes = [len(labels) for _, labels in sets]
        orders, counts, start = [], [], 0
        for size in self.sizes:
            places = torch.arange(-(-size // self.batch) * self.batch)
            orders.append(start + places.clamp(max=size - 1))
            counts.append((places < size).float())
            start += size
        self.valid = torch.cat(counts).to(self.device)
        self.test_order = torch.cat(orders).int().view(1, -1, self.batch).to(self.device)
        self.test_images = torch.cat([images for images, _ in sets]).to(self.device)
        self.test_labels = torch.cat([labels for _, labels in sets]).to(self.device, torch.int64)
        self.same = torch.zeros_like(self.network.streams)
        self.right, self.lost = (torch.zeros(len(self.models), device=self.device) for _ in range(2))
        self.test_clock = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.test_graph: Callable[[], None] | None = None

    def evaluate(self) -> Found:
        """For each set of `examine`: accuracy and mean loss of each network, with running statistics."""
        return on_the_host(self._evaluations())

    def _evaluations(self) -> Found:
        network, layout = self.network, self.layout
        if layout.norms:
            self._open_gates()
            gamma, beta = network.affine().unbind(1)
            network.scale.copy_(gamma * (network.running_var + EPSILON).rsqrt())
            network.shift.copy_(beta - network.running_mean * network.scale)
        with products_in(self.precision):
            if self.test_graph is None:
                self.test_graph = self._capture(self._test_step, self.test_clock)
            self.test_clock.zero_()
            found = []
            for size in self.sizes:
                self.right.zero_()
                self.lost.zero_()
                for _ in range(-(-size // self.batch)):
                    self.test_graph()
                found.append((self.right / size, self.lost / size))
        return found

    def _test_step(self) -> None:
        network, streams = self.network, self.network.streams
        network.streams = self.same  # all look at the same images
        try:
            self._gather(self.test_order, self.test_clock, self.test_images, self.test_labels, self.same, False)
            network.forward(train=False)
            network.head(False, self.test_order.shape[1], self.test_clock, self.lost, self.right, self.valid)
        finally:
            network.streams = streams
        self.test_clock.add_(1)


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Let torch's own matrix products be as precise as the kernels are."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
