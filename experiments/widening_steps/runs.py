"""One run: an arm with one seed, on its way from epoch to epoch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from experiments.widening_steps.arms import Arm, Setting, image_flops
from experiments.widening_steps.growing import grow
from experiments.widening_steps.images import Images, table_of
from experiments.widening_steps.network import ResNet20, build
from experiments.widening_steps.results import described
from experiments.widening_steps.steps import Computing, Steps, accuracy_and_loss, sgd

EXACT = 1e-3  # the most by which an exact growth may change the test loss, relative to it
ROUNDS = 4 / 3  # learning on a batch: a training step, and products that cost no more than another forward pass


@dataclass
class Curve:
    """What a run has measured. seconds: its share of the time of all networks that were trained beside it, and its growths."""

    train_loss: list[float] = field(default_factory=list)  # means of epochs
    epochs: list[int] = field(default_factory=list)  # epochs that were made at each test
    accuracy: list[float] = field(default_factory=list)
    test_loss: list[float] = field(default_factory=list)
    growths: list[dict[str, Any]] = field(default_factory=list)
    factors: list[list[float]] = field(
        default_factory=list
    )  # of the rates, by cohort, at the end of each stage: means of layers
    flops: float = 0.0
    seconds: float = 0.0


class Run:
    """A network with its optimizer, `epoch` epochs of which are made."""

    def __init__(self, arm: Arm, seed: int, setting: Setting, how: Computing, work: Path) -> None:
        self.arm, self.seed, self.setting, self.how = arm, seed, setting, how
        self.path = work / f"{arm.name}-{seed}.pt"
        self.about = {**described(arm, setting), "precision": how.products, "layout": how.layout}
        self.epoch, self.curve = 0, Curve()
        self.model: ResNet20 | None = None
        self.steps: Steps | None = None
        self.optimizer: Any = None
        self.dropped = False  # its loss is not finite

    @property
    def ended(self) -> bool:
        return self.dropped or self.epoch >= self.arm.epochs

    @property
    def per_epoch(self) -> int:
        return self.images.labels.shape[0] // self.setting.batch

    def board(self, images: Images) -> None:
        """Get ready for the next epoch: with a new network, one from its file, or after a growth."""
        self.images = images
        if self.model is None:
            self.begin()
        assert self.model is not None
        width = self.arm.stages[self.arm.stage_at(self.epoch)][0]
        if self.model.conv1.out_channels != width:
            self.grow(width)
        if self.steps is None:
            self.steps = Steps(self.model, self.optimizer, images, self.setting, self.how, self.arm.rates)
        self.steps.begin(table_of(self.setting, self.seed, self.epoch, len(images.labels)), self.rates())

    def begin(self) -> None:
        """From its file, if it was begun; it is written by `save` alone, so that it may contain whole objects."""
        if self.path.exists():
            saved = torch.load(self.path, map_location=self.how.device, weights_only=False)
            if saved["about"] != self.about:
                raise SystemExit(f"{self.path} was trained otherwise: name another folder with --work")
            self.model, self.optimizer = saved["model"], saved["optimizer"]
            self.epoch, self.curve = saved["epoch"], Curve(**saved["curve"])
            return
        setting = self.setting
        self.model = build(self.arm.stages[0][0], setting.channels, setting.blocks, self.seed).to(self.how.device)
        self.optimizer = sgd(self.model, setting)
        self.test()

    def save(self) -> None:
        if self.model is None or self.ended:
            return
        content = {"about": self.about, "epoch": self.epoch, "curve": vars(self.curve)}
        content |= {"model": self.model, "optimizer": self.optimizer}
        part = self.path.with_suffix(".part")
        torch.save(content, part)
        part.replace(self.path)

    def rates(self) -> torch.Tensor:
        """Of the steps of the next epoch: a linear rise, then a cosine down to zero at the end of the run."""
        total, rise = self.arm.epochs * self.per_epoch, self.setting.rise * self.per_epoch
        steps = range(self.epoch * self.per_epoch, (self.epoch + 1) * self.per_epoch)
        shares = [(min(1.0, (step + 1) / rise), max(0, step - rise) / (total - rise)) for step in steps]
        return torch.tensor([self.setting.rate * up * 0.5 * (1 + math.cos(math.pi * down)) for up, down in shares])

    def grow(self, width: int) -> None:
        assert self.model is not None
        curve, old = self.curve, self.model.conv1.out_channels
        table = table_of(self.setting, self.seed, 1_000_000 + self.epoch, len(self.images.labels))
        learn_from = self.setting.learn_from
        batches = [self.images.batch(one) for one in table[:learn_from].to(self.how.device)]
        before = curve.test_loss[-1]
        record = grow(self.model, self.optimizer, self.arm, width, batches, 1_000 * self.seed + self.epoch)
        self.test()
        after = curve.test_loss[-1]
        if self.arm.method != "random" and not abs(after - before) <= EXACT * before:
            raise AssertionError(f"{self.arm.name}, seed {self.seed}: a growth took the test loss from {before} to {after}")
        curve.growths.append({"epoch": self.epoch, **record, "loss_before": before, "loss_after": after})
        curve.seconds += record["seconds"]
        if self.arm.method == "gradmax":
            curve.flops += ROUNDS * learn_from * self.setting.batch * image_flops(self.setting, old)

    def close(self, seconds: float) -> None:
        """Take down an epoch that was made, and the network's share of its time."""
        assert self.steps is not None
        assert self.model is not None
        loss, stage = float(self.steps.lost) / self.per_epoch, self.arm.stage_at(self.epoch)
        self.epoch += 1
        self.curve.train_loss.append(round(loss, 5) if math.isfinite(loss) else -1.0)
        self.curve.flops += self.per_epoch * self.setting.batch * image_flops(self.setting, self.arm.stages[stage][0])
        self.curve.seconds += seconds
        self.dropped = not math.isfinite(loss)
        over = self.ended or self.arm.stage_at(self.epoch) != stage
        if over or self.epoch % self.setting.every == 0:
            self.test()
        if over:
            if self.steps.cohort_rates is not None:
                self.curve.factors.append(self.steps.cohort_rates.means())
            self.steps = None
            self.save()

    def test(self) -> None:
        assert self.model is not None
        accuracy, loss = accuracy_and_loss(self.model, self.images)
        self.curve.epochs.append(self.epoch)
        self.curve.accuracy.append(accuracy)
        self.curve.test_loss.append(loss)

    def result(self) -> dict[str, Any]:
        """What is kept, without values that JSON can't hold."""
        assert self.model is not None
        losses = [round(loss, 6) if math.isfinite(loss) else None for loss in self.curve.test_loss]
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        facts = {"parameters": parameters, "diverged": self.dropped, "final_accuracy": self.curve.accuracy[-1]}
        return {**facts, **vars(self.curve), "test_loss": losses, "seconds": round(self.curve.seconds, 2)}

    def leave(self) -> None:
        """Free the memory of a run that has ended, and its file."""
        self.model = self.optimizer = self.steps = None
        self.path.unlink(missing_ok=True)
