"""The training of legs: one after the other, with their states on disk, so that an interrupted study goes on.

On a GPU blocks are compiled and steps are replayed as a graph, except while copies of blocks fade in (then some blocks have
gates and others do not), while new entries have a rate of their own, and with Muon. The time that compilation takes is not
counted, since it depends on what was compiled before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.lm.arms import Setting
from experiments.lm.gpt import GPT, build, size_of, training_flops
from experiments.lm.growing import grow_model, now
from experiments.lm.legs import Leg
from experiments.lm.new_entries import NewEntries
from experiments.lm.replays import Replays, update
from experiments.lm.text import Text, batch, batch_at, places

LOOKS = (0, 25, 50, 100, 200, 400)  # steps after a growth at which the held-out loss is measured
EVERY = 10  # steps per entry of the training loss
Log = Callable[[str], None]


class OutOfTime(Exception):
    """The study stops here; finished legs are kept."""


@dataclass
class Curve:
    """What a leg measured; steps are those of the whole run. `seconds` are those of its training and of its growth."""

    first: int
    last: int
    size: str
    step_flops: int
    train: list[float] = field(default_factory=list)  # means of ten steps each
    held_out: dict[int, float] = field(default_factory=dict)
    seconds: float = 0.0
    growth: dict[str, Any] | None = None


@dataclass
class Training:
    """Legs of one setting. `until`: a time (of `time.monotonic`) at which to stop."""

    setting: Setting
    text: Text
    device: str
    folder: Path
    until: float | None = None
    backend: str | None = None  # of torch.compile
    replays: bool = False  # steps as graphs, where they can be
    log: Log = print
    finished: int = 0  # legs, in this process

    def curve(self, leg: Leg) -> dict[str, Any] | None:
        """What a leg measured, if it has been trained."""
        path = self.folder / f"{leg.key}.pt"
        if not path.exists():
            return None
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["curve"]
        return found

    def run(self, leg: Leg) -> dict[str, Any]:
        """Train a leg, or read what it has measured."""
        known = self.curve(leg)
        if known is not None:
            return known
        if leg.first == 0 and leg.trunk.trained:
            for earlier in leg.trunk.finished:
                self.run(earlier)
        model, optimizers = self.start(leg)
        curve = Curve(leg.first, leg.last, "", 0)
        new = None
        if leg.growth is not None:
            before = self.loss(model)
            shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
            example = batch(self.text.train, 2, min(self.setting.context, 128), 0)[0]
            curve.growth = grow_model(model, example, leg.growth, optimizers, leg.trunk.seed)
            curve.growth["before"] = before
            curve.seconds = curve.growth["seconds"]
            if leg.growth.state == "fresh":
                optimizers = make_optimizers(model, leg, self.device)
            if leg.growth.state == "rewarmed":
                new = NewEntries(model, shapes)
                new.reset(optimizers)
        size = size_of(model)
        curve.size, curve.step_flops = str(size), training_flops(size, self.setting.batch, self.setting.context)
        self.train(model, optimizers, leg, curve, new)
        self.write(leg, model, optimizers, curve)
        return vars(curve)

    def start(self, leg: Leg) -> tuple[GPT, list[torch.optim.Optimizer]]:
        """The model and the optimizers at a leg's first step, before its growth."""
        if leg.needs is None:
            model = build(leg.trunk.start, self.setting.context, leg.trunk.seed).to(self.device)
            return model, make_optimizers(model, leg, self.device)
        saved = torch.load(self.folder / f"{leg.needs}.pt", map_location=self.device, weights_only=True)
        size = type(leg.trunk.start)(**saved["size"])
        model = build(size, self.setting.context, 0).to(self.device)
        model.load_state_dict(saved["model"])
        optimizers = make_optimizers(model, leg, self.device)
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        return model, optimizers

    def train(
        self, model: GPT, optimizers: list[torch.optim.Optimizer], leg: Leg, curve: Curve, new: NewEntries | None = None
    ) -> None:
        looks = {leg.first + look for look in LOOKS if leg.growth is not None and leg.first + look < leg.last}
        losses: list[Tensor] = []
        starts = self.starts(leg)
        plain = leg.first + (leg.growth.fade or 0) if leg.growth is not None else leg.first  # steps before it are not compiled
        alike = plain if new is None else max(plain, leg.first + self.setting.fade)  # steps before it are not replayed
        replays: Replays | None = None
        started = self.clock()
        for step in range(leg.first, leg.last):
            if (self.backend is not None and step == plain) or (self.replays and step == alike):
                curve.seconds += self.clock() - started
                if self.backend is not None and step == plain:
                    self.compile(model, starts[0])
                if self.replays and step == alike and leg.trunk.optimizer == "adamw":
                    rates = [self.rate(leg, later) for later in range(step, leg.last)]
                    replays = Replays(model, optimizers, partial(self.gradients, model), starts[step - leg.first :], rates)
                started = self.clock()
            if step in looks:
                curve.seconds += self.clock() - started
                curve.held_out[step] = self.loss(model)
                started = self.clock()
            if step % 50 == 0 and self.until is not None and time.monotonic() > self.until:
                raise OutOfTime
            if replays is not None:
                replays.replay()
                continue
            rising = (step + 1 - leg.first) / self.setting.fade
            with nullcontext() if new is None or rising >= 1 else new.slowed(rising):
                losses.append(self.step(model, optimizers, starts[step - leg.first], self.rate(leg, step)))
        curve.seconds += self.clock() - started
        means = torch.cat([*(loss[None] for loss in losses), *([] if replays is None else [replays.end()])]).split(EVERY)
        curve.train = [round(float(part.mean()), 4) for part in means]
        curve.held_out[leg.last] = self.loss(model)
        self.log(
            f"{curve.size}: steps {leg.first}–{leg.last}, held-out loss {curve.held_out[leg.last]:.4f}, {curve.seconds:.1f} s"
        )

    def rate(self, leg: Leg, step: int) -> float:
        if leg.falls is not None and step >= leg.falls:
            return leg.trunk.rate * (leg.last - step) / (leg.last - leg.falls)
        return leg.trunk.rate * min(1.0, (step + 1) / self.setting.warm_up)

    def starts(self, leg: Leg) -> Tensor:
        """Where the sequences of each step begin in the text, (step, sample), on the device: none is sent there later."""
        seeds = [leg.trunk.seed * 1_000_003 + step for step in range(leg.first, leg.last)]
        found = [places(self.text.train, self.setting.batch, self.setting.context, seed) for seed in seeds]
        return torch.stack(found).to(self.text.train.device)

    def compile(self, model: GPT, starts: Tensor) -> None:
        """Compile the blocks, which share their code, for passes of a training step."""
        for block in model.blocks:
            block.compile(backend=self.backend, dynamic=False)
        self.gradients(model, starts)
        model.zero_grad(set_to_none=True)

    def gradients(self, model: GPT, starts: Tensor) -> Tensor:
        """The loss of a step's batch, and its gradients."""
        model.train()
        seen, wanted = batch_at(self.text.train, starts, self.setting.context)
        with self.precision():
            loss = F.cross_entropy(model(seen).flatten(0, 1).float(), wanted.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def step(self, model: GPT, optimizers: list[torch.optim.Optimizer], starts: Tensor, rate: float) -> Tensor:
        loss = self.gradients(model, starts)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        update(model, optimizers)
        model.zero_grad(set_to_none=True)
        return loss.detach()

    @torch.no_grad()
    def loss(self, model: GPT, batches: int = 32) -> float:
        """The mean loss on the same held-out bytes each time, by uncompiled blocks."""
        model.eval()
        found = []
        with torch.compiler.set_stance("force_eager" if self.backend else "default"), self.precision():
            for number in range(batches):
                seen, wanted = batch(self.text.held_out, self.setting.batch, self.setting.context, number)
                found.append(F.cross_entropy(model(seen).flatten(0, 1).float(), wanted.flatten()))
        return float(torch.stack(found).mean())

    def precision(self) -> Any:
        return torch.autocast("cuda", torch.bfloat16) if self.device.startswith("cuda") else nullcontext()

    def clock(self) -> float:
        return now(self.device)

    def write(self, leg: Leg, model: GPT, optimizers: list[torch.optim.Optimizer], curve: Curve) -> None:
        content: dict[str, Any] = {"curve": vars(curve)}
        if leg.falls is None or leg.kept:
            size = size_of(model)
            content |= {"size": vars(size), "model": model.state_dict(), "optimizers": [one.state_dict() for one in optimizers]}
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / f"{leg.key}.part"
        torch.save(content, part)
        part.replace(self.folder / f"{leg.key}.pt")
        self.finished += 1


def make_optimizers(model: GPT, leg: Leg, device: str) -> list[torch.optim.Optimizer]:
    """AdamW; or Muon for the matrices of the blocks, with AdamW for the rest. Vectors and the embedding do not decay."""
    trunk = leg.trunk
    inner = [p for name, p in model.named_parameters() if p.dim() > 1 and name.startswith("blocks.")]
    head = [model.head.weight]
    plain = [p for name, p in model.named_parameters() if p.dim() == 1 or name.startswith("embedding")]
    muon = trunk.optimizer == "muon"
    groups = [
        {"params": head if muon else [*inner, *head], "weight_decay": trunk.decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=trunk.rate, betas=(0.9, 0.95), fused=device.startswith("cuda"))
    if not muon:
        return [adam]
    return [torch.optim.Muon(inner, lr=trunk.rate, weight_decay=trunk.decay, adjust_lr_fn="match_rms_adamw"), adam]
