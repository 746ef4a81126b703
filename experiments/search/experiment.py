"""One seed of the experiment: its searches and its final trainings, each of which goes on where it was interrupted."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import outgrow
from experiments.lm.results import facts
from experiments.search.images import Images
from experiments.search.keep import prune
from experiments.search.network import Parent, start_over
from experiments.search.settings import Setting
from experiments.search.training import Steps, error, sgd
from experiments.setting.data import Data

GOES_ON = 3  # exit status if time is up
NO_TIME = 1e-9  # minutes in which no trial is begun
SAVED_EVERY = 20.0  # seconds of a final training that are lost at most


class OutOfTime(Exception):
    """The time of this piece is up."""


class Interrupted(BaseException):
    """A trial began after the end of this piece: like a keyboard interrupt, it leaves the trial to the next piece."""


class Clock:
    """The end of this piece; a signal may bring it forward."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes

    @property
    def over(self) -> bool:
        return time.monotonic() > self.end

    def stop(self, *_: Any) -> None:
        self.end = time.monotonic()


class Experiment:
    """whole: the data. work: a folder in which interrupted arms go on."""

    def __init__(self, setting: Setting, seed: int, device: str, whole: Data, work: Path, clock: Clock) -> None:
        self.setting, self.seed, self.device, self.work, self.clock = setting, seed, device, work, clock
        self.chosen_by = Images.of(whole.held_out(setting.held_out), device)
        self.images = Images.of(whole, device)
        self.example = self.images.test_x[:2].contiguous()
        self.parent = self.fresh()
        work.mkdir(parents=True, exist_ok=True)

    def fresh(self) -> nn.Module:
        """The parent with the random weights of this seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return Parent(self.setting.width, self.example.shape[1]).to(self.device)

    @property
    def parent_flops(self) -> float:
        """Of the parent's training on an image: forward and backward pass, three times the forward pass."""
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            self.fresh()(self.example)
        return 3 * counter.get_total_flops() / len(self.example)

    def search(self, inherit: bool) -> outgrow.SearchResult:
        """The search, continued; OutOfTime if it is not done."""

        def train(model: nn.Module, optimizer: Any, trial: Any) -> float:
            if self.clock.over:
                raise Interrupted
            epochs = self.setting.each if trial.user_attrs["slot"] else self.setting.first
            if not inherit:
                start_over(model, [optimizer])
            steps = Steps(model, optimizer, self.chosen_by)
            for epoch in range(epochs):
                steps.epoch(trial.user_attrs["seed"], epoch, epochs)
            return error(model, self.chosen_by)

        if self.clock.over:
            raise OutOfTime
        setting, log = self.setting, self.work / f"{'growth' if inherit else 'fresh'}.log"

        def go_on(minutes: float) -> outgrow.SearchResult:
            return outgrow.search(
                self.parent,
                self.example,
                outgrow.Space(factors=(1.5, 2), moves=setting.moves, parameters=setting.parameters),
                train,
                "error",
                "cifar",
                storage=log,
                optimizer=sgd,
                sampler="hill",
                trials=setting.trials,
                population=setting.children,
                seed=self.seed,
                minutes=minutes,
            )

        end_running(go_on(NO_TIME).study)
        try:
            result = go_on(max((self.clock.end - time.monotonic()) / 60, NO_TIME))
        except Interrupted as reason:
            raise OutOfTime from reason
        prune(result, Path(f"{log}-artifacts"), setting.trials, setting.children)
        if len(result.records) < setting.trials:
            raise OutOfTime
        return result

    def finish(self, arm: str, model: nn.Module, optimizer: Any, epochs: int) -> tuple[float, float]:
        """Train on all images for so many epochs; the test error, and the seconds that it took in all pieces."""
        path, done, before = self.path(arm), 0, 0.0
        if path.exists():
            state = torch.load(path, map_location=self.device, weights_only=True)
            done, before = state["epochs"], state["seconds"]
            model = outgrow.load(self.fresh(), self.weights(arm, done))
            optimizer = sgd(model)
            optimizer.load_state_dict(state["optimizer"])
        steps = Steps(model, optimizer, self.images, final=True)
        started = saved = time.monotonic()
        for epoch in range(done, epochs):
            steps.epoch(self.seed, epoch, epochs)
            left = epoch + 1 < epochs
            if left and (self.clock.over or time.monotonic() - saved > SAVED_EVERY):
                self.wait()
                saved = time.monotonic()
                self.save(arm, model, {"epochs": epoch + 1, "seconds": before + saved - started}, optimizer)
            if left and self.clock.over:
                raise OutOfTime
        wrong = error(model, self.images)
        return wrong, before + time.monotonic() - started

    def wait(self) -> None:
        """For the device, which may be an epoch behind."""
        if self.images.y.is_cuda:
            torch.cuda.synchronize(self.images.y.device)

    def save(self, arm: str, model: nn.Module, about: dict[str, Any], optimizer: Any) -> None:
        """Write an interrupted final training; whenever this is killed, a whole one is there."""
        weights, part = self.weights(arm, about["epochs"]), self.path(arm).with_suffix(".part")
        outgrow.save(model, weights)
        torch.save({**about, "optimizer": optimizer.state_dict()}, part)
        part.replace(self.path(arm))
        self.remove(arm, but=weights)

    def remove(self, arm: str, but: Path | None = None) -> None:
        """Remove the files of a final training. but: of weights, which stays."""
        if but is None:
            self.path(arm).unlink(missing_ok=True)
        for path in self.work.glob(f"{arm}-*.safetensors"):
            if path != but:
                path.unlink()

    def path(self, arm: str) -> Path:
        """The file of an interrupted final training, without its weights."""
        return self.work / f"{arm}.pt"

    def weights(self, arm: str, epochs: int) -> Path:
        """The file of the weights after so many epochs."""
        return self.work / f"{arm}-{epochs}.safetensors"

    def flops(self, result: outgrow.SearchResult) -> float:
        """FLOPs of all trials of a search."""
        epochs = [self.setting.first if not record.slot else self.setting.each for record in result.records]
        per_image = [3 * record.flops / len(self.example) for record in result.records]
        return sum(e * f * self.chosen_by.per_epoch for e, f in zip(epochs, per_image, strict=True))

    def run(self, arm: str) -> dict[str, Any]:
        """The result of an arm."""
        result = self.search(inherit=arm != "fresh")
        if self.clock.over:
            raise OutOfTime
        model, optimizer = result.load_with_optimizer()
        best = result.best
        per_epoch = 3 * best.flops / len(self.example) * self.images.per_epoch
        spent, epochs = self.flops(result), self.setting.last
        if arm == "scratch":
            with torch.random.fork_rng(devices=[self.images.y.device] if self.images.y.is_cuda else []):
                torch.manual_seed(self.seed)
                start_over(model, [optimizer])
            epochs += round(spent / per_epoch)
            spent = 0.0
        wrong, seconds = self.finish(arm, model, optimizer, epochs)
        return {
            "arm": arm,
            "seed": self.seed,
            "setting": asdict(self.setting),
            **facts(self.device),
            "parameters": best.parameters,
            "flops": spent + epochs * per_epoch,
            "epochs": epochs,
            "test_error": wrong,
            "search_seconds": round(sum(record.seconds for record in result.records), 1) if arm != "scratch" else 0.0,
            "final_seconds": round(seconds, 1),
            "search": by_slot(result.to_json()),
        }


def end_running(study: Any) -> None:
    """End trials that a killed process has left behind, so that they are taken up again first.

    Nothing else works on these studies. `outgrow.search` would wait for a sign of life where the process was another machine's.
    """
    for trial in study.get_trials(deepcopy=False):
        if trial.state.name == "RUNNING":
            study.tell(trial.number, state=type(trial.state).FAIL)


def by_slot(search: dict[str, Any]) -> dict[str, Any]:
    """A search whose trials are numbered by their slots: Optuna's numbers depend on which of them were interrupted."""
    slots = {trial["number"]: trial["slot"] for trial in search["trials"]}
    names = ("number", "parent", "shrunk_from")
    trials = [trial | {name: slots[trial[name]] for name in names if name in trial} for trial in search["trials"]]
    return {**search, "trials": trials}
