"""Search on CIFAR-10 by growth, and its baselines; each arm and seed writes one result file.

    python -m experiments.search --setting h200 --device cuda --data DATA --minutes 9     one piece; exit status 3: again
    python -m experiments.search --setting tiny                                             digits on the CPU, to try it out

Arms: `growth` (trials inherit weights and optimizer state), `fresh` (the same space and trials, but each trial starts over
with new weights), `scratch` (the architecture that `growth` found, with new weights, trained for the FLOPs of its search and
final training). Trials are compared on held-out training images. The best one is then trained on all of them, and tested once.
The setting for one H200 has not been run yet; its epochs and trials are guesses.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import outgrow
from experiments.search.network import Parent, start_over
from experiments.search.training import Images, error, sgd, train_epoch
from experiments.setting.data import cifar10, digits

RESULTS = Path(__file__).parents[1] / "results" / "search"
ARMS = ("growth", "fresh", "scratch")
GOES_ON = 3  # exit status if time is up


@dataclass(frozen=True)
class Setting:
    """The size of an experiment. first: epochs of the parent; each: of a trial; last: of the final training."""

    trials: int
    children: int
    first: int
    each: int
    last: int
    width: int
    held_out: int
    parameters: int


SETTINGS = {"h200": Setting(33, 8, 10, 5, 60, 16, 5_000, 8_000_000), "tiny": Setting(3, 2, 1, 1, 2, 4, 200, 20_000)}


class OutOfTime(Exception):
    """The time of this piece is up."""


class Experiment:
    """One seed of the experiment. work: a folder in which interrupted arms go on."""

    def __init__(self, setting: Setting, seed: int, device: str, data: Path, work: Path, minutes: float) -> None:
        self.setting, self.seed, self.work, self.end = setting, seed, work, time.monotonic() + 60 * minutes
        torch.manual_seed(seed)
        whole = digits() if setting is SETTINGS["tiny"] else cifar10(data)
        self.chosen_by = Images.of(whole.held_out(setting.held_out), device)
        self.images = Images.of(whole, device)
        self.parent = Parent(setting.width, self.images.x.shape[1]).to(device)
        self.example = self.images.x[:2]
        work.mkdir(parents=True, exist_ok=True)

    def search(self, inherit: bool) -> outgrow.SearchResult:
        """The search, continued; OutOfTime if it is not done."""

        def train(model: nn.Module, optimizer: Any, trial: Any) -> float:
            epochs = self.setting.each if trial.user_attrs["slot"] else self.setting.first
            if not inherit:
                start_over(model, [optimizer])
            for epoch in range(epochs):
                train_epoch(model, optimizer, self.chosen_by, epoch, epochs)
            return error(model, self.chosen_by)

        space = outgrow.Space(factors=(1.5, 2), moves=2, parameters=self.setting.parameters)
        result = outgrow.search(
            self.parent,
            self.example,
            space,
            train,
            "error",
            "cifar",
            storage=self.work / f"{'growth' if inherit else 'fresh'}.log",
            optimizer=sgd,
            sampler="hill",
            trials=self.setting.trials,
            population=self.setting.children,
            seed=self.seed,
            minutes=(self.end - time.monotonic()) / 60,
        )
        if len(result.records) < self.setting.trials:
            raise OutOfTime
        return result

    def finish(self, arm: str, model: nn.Module, optimizer: Any, epochs: int) -> float:
        """Train on all images for so many epochs, with a file after each; the test error."""
        path, done = self.work / f"{arm}.pt", 0
        if path.exists():
            state = torch.load(path, map_location=self.images.x.device, weights_only=True)
            fresh = Parent(self.setting.width, self.images.x.shape[1]).to(self.images.x.device)
            model, done = outgrow.load(fresh, self.weights(arm, state["epochs"])), state["epochs"]
            optimizer = sgd(model)
            optimizer.load_state_dict(state["optimizer"])
        for epoch in range(done, epochs):
            if time.monotonic() > self.end:
                raise OutOfTime
            train_epoch(model, optimizer, self.images, epoch, epochs, final=True)
            outgrow.save(model, self.weights(arm, epoch + 1))
            torch.save({"epochs": epoch + 1, "optimizer": optimizer.state_dict()}, path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)
            self.weights(arm, epoch).unlink(missing_ok=True)
        return error(model, self.images)

    def weights(self, arm: str, epochs: int) -> Path:
        """The file of the model after so many epochs of its final training."""
        return self.work / f"{arm}-{epochs}.safetensors"

    def flops(self, result: outgrow.SearchResult) -> float:
        """FLOPs of all trials of a search: forward and backward pass on each image, three times the forward pass."""
        epochs = [self.setting.first if not record.slot else self.setting.each for record in result.records]
        per_image = [3 * record.flops / len(self.example) for record in result.records]
        return sum(e * f * len(self.chosen_by.y) for e, f in zip(epochs, per_image, strict=True))

    def run(self, arm: str) -> dict[str, Any]:
        """The result of an arm."""
        result = self.search(inherit=arm != "fresh")
        model, optimizer = result.load_with_optimizer()
        best = result.best
        per_epoch = 3 * best.flops / len(self.example) * len(self.images.y)
        spent, epochs = self.flops(result), self.setting.last
        if arm == "scratch":
            start_over(model, [optimizer])
            epochs += round(spent / per_epoch)
            spent = 0.0
        wrong = self.finish(arm, model, optimizer, epochs)
        facts = {"arm": arm, "seed": self.seed, "setting": asdict(self.setting), "device": str(self.example.device)}
        sizes = {
            "parameters": best.parameters,
            "flops": spent + epochs * per_epoch,
            "epochs": epochs,
        }
        seconds = sum(record.seconds for record in result.records)
        return {**facts, **sizes, "test_error": wrong, "search_seconds": seconds, "search": result.to_json()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m experiments.search", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setting", choices=tuple(SETTINGS), default="tiny")
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds 0 to N − 1 (1)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", type=Path, default=Path("data"), help="the folder of CIFAR-10's binary files")
    parser.add_argument("--work", type=Path, default=Path("work/search"), help="where interrupted arms go on")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where result files are written")
    parser.add_argument(
        "--minutes", type=float, default=1e6, help="begin no epoch of a final training, and no trial, after that"
    )
    args = parser.parse_args(argv)
    for seed in range(args.seeds):
        work = args.work / f"{args.setting}-{seed}"
        experiment = None
        for arm in args.arms:
            path = args.out / f"{args.setting}-{arm}-{seed}.json"
            if path.exists():
                continue
            experiment = experiment or Experiment(SETTINGS[args.setting], seed, args.device, args.data, work, args.minutes)
            try:
                facts = experiment.run(arm)
            except OutOfTime:
                print(f"{arm}, seed {seed}: time is up; the same command goes on")
                return GOES_ON
            args.out.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(facts, indent=1), encoding="utf-8")
            print(f"{arm}, seed {seed}: test error {facts['test_error']:.2%}, {facts['parameters']:,} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
