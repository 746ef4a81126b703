"""Which optimizers follow a growth: each one is trained, grown and compared with a twin that was not grown.

Two runs of the same training are made, bit for bit alike; one is grown, and both make the next step on the same batch. The
gradients of existing entries are then the same in both (R2R, NetMorph, a new block that is the identity), so that

    old    existing entries must make the update that they make in the twin: their largest difference, in largest updates
    new    new entries must not leap: the size (root mean square) of their first update, in sizes of the largest update that
           the existing entries of the same tensor (of the block that was copied) have made so far

A copy of a unit (Net2Net) gets a known share of its source's gradient at every past step. For

    copies the state after such a growth is compared with one that is gathered by brute force: the network of every past step is
           grown by the same plan, and an optimizer of the same class sees its gradients.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import outgrow
from outgrow.apply.apply_plan import apply_plan
from outgrow.growth_plan.plan import Insertion, Plan
from outgrow.model.journal import Journal
from outgrow.optimizers.grow_state import state_tensors_in
from outgrow.optimizers.lookup import known
from outgrow.optimizers.wrappers import held_by, unwrapped

Make = Callable[[nn.Module], Any]
LONG, SHORT = 100, 5  # steps before a growth


@dataclass
class Result:
    """What was found out about one optimizer."""

    library: str
    name: str
    kind: str = ""
    error: str = ""  # of the library, or of the machine
    double: bool = True  # precision
    refused: str = ""  # widening by R2R, which every known optimizer can follow
    no_copies: str = ""
    old: float = 0.0
    new: float = 0.0
    copies: float = 0.0
    block_old: float = 0.0
    block_new: float = 0.0
    cosine: float = 1.0  # of old updates
    ratio: float = 1.0  # of their sizes, to those of the twin: the one that is farthest from one
    remarks: list[str] = field(default_factory=list)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 8), nn.Linear(8, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(torch.relu(self.fc1(x)))


class Net(nn.Module):
    """A convolution, a batch norm, residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.stem = nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Linear(4, 6)
        self.blocks, self.head = nn.Sequential(Block(6), Block(6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(torch.relu(self.norm(self.conv(x))).flatten(1))))


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 6, bias=False), nn.Tanh(), nn.Linear(6, 4, bias=False), nn.ReLU(), nn.Linear(4, 3, bias=False)
    )


class Training:
    """A model, its optimizer, and batches; twice the same if made twice."""

    def __init__(self, make: Make, build: Callable[[], nn.Module], steps: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.model = build().to(dtype)
        shape = (2, 3, 3) if isinstance(self.model, Net) else (5,)
        generator = torch.Generator().manual_seed(1)
        count = steps + 4
        self.inputs = torch.randn(count, 16, *shape, generator=generator).to(dtype)
        self.targets = torch.randn(count, 16, 3, generator=generator).to(dtype)
        self.optimizer = make(self.model)
        self.hessian = any(word in type(self.optimizer).__name__.lower() for word in ("hess", "sophia"))
        if hasattr(self.optimizer, "train") and hasattr(self.optimizer, "eval"):
            self.optimizer.train()
        self.now = 0
        self.past: list[dict[str, Tensor]] = []
        self.largest: dict[str, float] = {}  # size of the largest update of each parameter so far
        torch.manual_seed(2)
        for _ in range(steps):
            self.past.append({name: tensor.clone() for name, tensor in self.model.state_dict().items()})
            self.step()

    def loss(self) -> Tensor:
        return (self.model(self.inputs[self.now]) - self.targets[self.now]).pow(2).mean() * 10

    def step(self) -> None:
        def closure() -> Tensor:
            self.model.zero_grad()
            loss = self.loss()
            loss.backward(create_graph=self.hessian)
            return loss

        before = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        loss = float(closure())
        name = type(self.optimizer).__name__
        if name == "AliG":
            self.optimizer.step(lambda: loss)
        elif "SAM" in name or name == "LBFGS":
            self.optimizer.step(closure)
        else:
            self.optimizer.step()
        self.now += 1
        for name, parameter in self.model.named_parameters():
            parameter.grad = None
            self.largest[name] = max(self.largest.get(name, 0.0), size(parameter.detach() - before[name]))

    def next_updates(self) -> dict[str, Tensor]:
        """What the next step adds to each parameter."""
        before = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        torch.manual_seed(3)
        self.step()
        return {name: parameter.detach() - before[name] for name, parameter in self.model.named_parameters()}


def positions(plan: Plan, name: str, shape: tuple[int, ...]) -> Tensor:
    """True where a tensor has new entries; each axis grows once at most."""
    new = torch.zeros(shape, dtype=torch.bool)
    for edit in plan.edits:
        if isinstance(edit, Insertion) and edit.tensor == name:
            new.index_fill_(edit.axis, torch.tensor(edit.at), True)
    return new


def size(values: Tensor) -> float:
    return float(values.double().pow(2).mean().sqrt()) if values.numel() else 0.0


def compared(
    result: Result, twin: Training, updates: dict[str, Tensor], grown: Training, plan: Plan, added: set[str]
) -> tuple[float, float]:
    """The next step of both: the difference of old updates, and the size of new ones."""
    old = new = 0.0
    former = {plan.renamed(name): name for name in updates}
    for name, update in grown.next_updates().items():
        if not update.isfinite().all():
            raise FloatingPointError(f"the update of {name} is not finite")
        if name in added:
            new = max(new, size(update) / max(twin.largest["blocks.0." + name.split(".", 2)[2]], 1e-30))
            continue
        true, fresh = updates[former[name]].flatten(), positions(plan, name, tuple(update.shape))
        mine, sizes = update[~fresh], (size(update[~fresh]), size(true))
        if fresh.any():
            new = max(new, size(update[fresh]) / max(twin.largest[former[name]], 1e-30))
        if sizes != (0.0, 0.0):
            old = max(old, float((mine - true).abs().max()) / max(float(true.abs().max()), 1e-30))
        if min(sizes) > 0:
            result.ratio = max(result.ratio, sizes[0] / sizes[1], key=lambda ratio: abs(math.log(ratio)))
            result.cosine = min(result.cosine, float(torch.cosine_similarity(mine.double(), true.double(), dim=0)))
    return old, new


def replayed(result: Result, make: Make, dtype: torch.dtype) -> float:
    """How far the state of copies is from one that is gathered on the grown networks of all past steps."""
    training = Training(make, perceptron, SHORT, dtype)
    if "SAM" in result.kind or result.kind == "AliG":
        return math.nan  # they need the loss itself, not gradients alone
    growth = outgrow.widen(
        training.model,
        training.inputs[0],
        "*",
        factor=1.6,
        method=outgrow.Net2Net(split="random", mapping="random"),
        optimizer=training.optimizer,
    )
    plan = growth.plan
    model = perceptron().to(dtype)
    replay: Any = None
    for number, weights in enumerate(training.past):
        small = perceptron().to(dtype)
        small.load_state_dict(weights)
        apply_plan(small, plan, {}, Journal())
        loss = (small(training.inputs[number]) - training.targets[number]).pow(2).mean() * 10
        loss.backward(create_graph=training.hessian)
        if replay is None:
            model = small
            torch.manual_seed(0)
            replay = make(model)
            if hasattr(replay, "train"):
                replay.train()
            torch.manual_seed(2)
        else:
            for mine, theirs in zip(model.parameters(), small.parameters(), strict=True):
                mine.data.copy_(theirs.data)
                mine.grad = theirs.grad
        replay.step()
    worst = 0.0
    for one, true in zip(unwrapped([training.optimizer]), unwrapped([replay]), strict=True):
        about = known(one)
        for mine, theirs in zip(held_by(one), held_by(true), strict=True):
            for key, value in one.state.get(mine, {}).items():
                rule = about.rule(key)
                if rule is None or rule.kind not in ("entries", "factor"):
                    continue
                for found, wanted in zip(state_tensors_in(value), state_tensors_in(true.state[theirs][key]), strict=True):
                    scale = max(float(wanted.double().abs().max()), 1e-30)
                    error = float((found.double() - wanted.double()).abs().max()) / scale
                    if error > 1e-4:
                        result.remarks.append(f"{key} differs by {error:.2g}")
                    worst = max(worst, error)
    return worst


def examine(library: str, name: str, make: Make, dtype: torch.dtype = torch.float64) -> Result:
    """Everything about one optimizer."""
    result = Result(library, name, double=dtype == torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twin, wider, deeper = (Training(make, Net, LONG, dtype) for _ in range(3))
        result.kind = type(twin.optimizer).__name__
        before = {name: tensor.clone() for name, tensor in twin.model.state_dict().items()}
        if any(not torch.equal(tensor, wider.model.state_dict()[name]) for name, tensor in before.items()):
            result.remarks.append("two equal runs differ")
        try:
            growth = outgrow.widen(wider.model, wider.inputs[0], "*", factor=2, method="r2r", optimizer=wider.optimizer)
        except outgrow.GrowthError as error:
            result.refused = error.problems[0].reason if error.problems else str(error)
            return result
        updates = twin.next_updates()
        result.old, result.new = compared(result, twin, updates, wider, growth.plan, set())
        try:
            result.copies = replayed(result, make, dtype)
        except outgrow.GrowthError as error:
            result.no_copies = error.problems[0].reason if error.problems else str(error)
        growth = outgrow.deepen(deeper.model, deeper.inputs[0], "blocks.0", optimizer=deeper.optimizer)
        added = {name for name, _ in deeper.model.named_parameters() if name.startswith("blocks.1.")}
        result.block_old, result.block_new = compared(result, twin, updates, deeper, growth.plan, added)
        for _ in range(2):
            wider.step()
            deeper.step()
    return result
