"""Loss after a growth: does training go on as if nothing had happened when a network is grown half-way?

A ResNetCifar-10(1/4) and a small pre-norm ViT are trained on CIFAR-10 to half of a cosine schedule. There they are copied, with
optimizer and schedule. Every arm grows such a copy, the optimizer along with it, and trains on with the same batches; a twin
goes on as it is. Measured for each arm and seed:

- the loss of the next batch just before and just after the growth, in eval and in train mode;
- the training loss of each of the 50 steps that follow; the mean over the first 20, divided by the twin's, must not exceed 1.1;
- the share of new weights that a gradient reached and that moved within those 50 steps, which must be at least 95%;
- the error that the growth itself reports, parameters before and after, and its seconds.

    python -m benchmarks.spike --data DIR --device cuda    # all of it; writes results/spike.json and docs/results/spike.md
    python -m benchmarks.spike --data DIR --seeds 1 --epochs 1 --models resnet --only "deepen*" --out some.json
    python -m benchmarks.spike --table                     # only write docs/results/spike.md again
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import outgrow
from benchmarks.cifar_batches import Batches
from benchmarks.learning import Learning
from benchmarks.spike_arms import FACTOR, TWIN, Arm, arms_of
from benchmarks.spike_models import ViT, resnet
from benchmarks.spike_page import LIMITS, page, verdicts
from experiments.setting.data import DataError, cifar10

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "spike.json"
PAGE = HERE.parent / "docs" / "results" / "spike.md"

MODELS: dict[str, Callable[[], nn.Module]] = {"resnet": resnet, "vit": ViT}
OPTIMIZERS: dict[str, dict[str, dict[str, float]]] = {
    "resnet": {"adamw": {"lr": 4e-3, "weight_decay": 0.05}, "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}},
    "vit": {"adamw": {"lr": 1e-3, "weight_decay": 0.05}},
}
KINDS: dict[str, Any] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


@dataclass(frozen=True)
class Settings:
    """How long to train, and how to look at it."""

    epochs: float = 16.0
    batch: int = 128
    warmup: float = 0.05
    steps: int = 50  # after the growth
    compared: int = 20  # of these, whose mean loss is compared with the twin's


@dataclass
class Training:
    """A training under way; a deep copy of it is one of its own."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    step: int = 0

    def run(self, batches: Batches, steps: int, look: Callable[[], None] = lambda: None) -> Tensor:
        """Train on and return the losses."""
        losses = []
        self.model.train()
        for _ in range(steps):
            images, labels = batches(self.step)
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(images), labels)
            loss.backward()
            look()
            self.optimizer.step()
            self.schedule.step()
            self.step += 1
            losses.append(loss.detach())
        return torch.stack(losses)


class Cosine:
    """A linear warm-up, then half a cosine down to zero: a factor on the learning rate for each step."""

    def __init__(self, steps: int, warmup: float) -> None:
        self.steps, self.warm = steps, max(1, round(warmup * steps))

    def __call__(self, step: int) -> float:
        if step < self.warm:
            return (step + 1) / self.warm
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - self.warm) / max(1, self.steps - self.warm))))


def begin(model: str, optimizer: str, seed: int, steps: int, settings: Settings, device: str) -> Training:
    """A fresh network with its optimizer; norms and biases do not decay."""
    torch.manual_seed(seed)
    network = MODELS[model]().to(device)
    how = OPTIMIZERS[model][optimizer]
    layers = [parameter for parameter in network.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in network.parameters() if parameter.ndim <= 1]
    made = KINDS[optimizer]([{"params": layers}, {"params": others, "weight_decay": 0.0}], **how)
    return Training(network, made, torch.optim.lr_scheduler.LambdaLR(made, Cosine(steps, settings.warmup)))


@torch.no_grad()
def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor], train: bool) -> float:
    """The loss of a batch; the model's running statistics stay as they are."""
    return float(F.cross_entropy(copy.deepcopy(model).train(train)(batch[0]), batch[1]))


def measure(start: Training, arm: Arm, batches: Batches, seed: int, settings: Settings) -> dict[str, Any]:
    """Grow a copy of a training and let it go on."""
    training = copy.deepcopy(start)
    batch = batches(start.step)
    result: dict[str, Any] = {"arm": arm.name, "kind": arm.kind, "group": arm.group}
    before = [loss_of(start.model, batch, train) for train in (False, True)]
    learning = None
    if arm.transforms:
        example, _ = batches(start.step - 1)
        try:
            growth = outgrow.grow(training.model, example, *arm.transforms, optimizer=training.optimizer, seed=seed)
        except outgrow.GrowthError as error:
            return {**result, "refused": str(error.problems[0] if error.problems else error).partition("\n")[0]}
        learning = Learning(training.model, growth.plan)
        result |= {
            "preserving": growth.preserving,
            "error": growth.max_error,
            "tolerance": growth.tolerance,
            "parameters": list(growth.parameters),
            "volumes": [f"{c.volume}: {c.old} → {c.new}, {c.method}" for c in growth.plan.changes],
            "grow_seconds": round(growth.seconds, 3),
        }
    after = [loss_of(training.model, batch, train) for train in (False, True)]
    started = time.perf_counter()
    losses = training.run(batches, settings.steps, learning.look if learning else lambda: None).tolist()
    return {
        **result,
        "eval_loss": [before[0], after[0]],
        "train_loss": [before[1], after[1]],
        "mean": sum(losses[: settings.compared]) / settings.compared,
        **(learning.shares() if learning else {}),
        "seconds": round(time.perf_counter() - started, 3),
        "losses": [round(loss, 5) for loss in losses],
    }


def measure_all(
    images: Tensor, labels: Tensor, models: Sequence[str], seeds: int, settings: Settings, device: str, only: str = "*"
) -> list[dict[str, Any]]:
    """Every model, optimizer and seed; a result for each arm, which is compared with the twin of the same training."""
    results: list[dict[str, Any]] = []
    for model, optimizer in [(name, optimizer) for name in models for optimizer in OPTIMIZERS[name]]:
        arms = [arm for arm in arms_of(model) if arm is TWIN or fnmatchcase(f"{arm.kind} {arm.name}", only)]
        for seed in range(seeds):
            started = time.perf_counter()
            batches = Batches(images, labels, settings.batch, seed, device)
            steps = round(settings.epochs * batches.per_epoch)
            start = begin(model, optimizer, seed, steps, settings, device)
            loss = float(start.run(batches, steps // 2)[-20:].mean())
            say(f"{model}, {optimizer}, seed {seed}: loss {loss:.3f} after {start.step} steps, {since(started)}")
            twin = 0.0
            for number, arm in enumerate(arms, start=1):
                result = measure(start, arm, batches, seed, settings)
                if arm is TWIN:
                    twin = result["mean"]
                if "mean" in result:
                    result["ratio"] = result["mean"] / twin
                results.append({"model": model, "optimizer": optimizer, "seed": seed, **result})
                outcome = f"× {result['ratio']:.3f}" if "ratio" in result else "refused"
                learned = f", {result['learned']:.1%} learned" if "learned" in result else ""
                say(f"  [{number}/{len(arms)}] {arm.kind} {arm.name}: {outcome}{learned}, {since(started)}")
    return results


def since(start: float) -> str:
    return f"{time.perf_counter() - start:.0f} s"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def machine(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else f"CPU, {torch.get_num_threads()} threads"


def number_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "from source"


def report(arguments: argparse.Namespace, settings: Settings, results: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    models = " ".join(arguments.models)
    return {
        "command": f"python -m benchmarks.spike --data DIR --device {arguments.device} --seeds {arguments.seeds} "
        f"--epochs {arguments.epochs:g} --batch {arguments.batch} --steps {arguments.steps} --models {models}",
        "versions": {name: number_of(name) for name in ("torch", "numpy", "outgrow")},
        "machine": {"python": platform.python_version(), "device": machine(arguments.device)},
        "configuration": {**asdict(settings), "factor": FACTOR, "seeds": arguments.seeds, "optimizers": OPTIMIZERS},
        "limits": LIMITS,
        "seconds": round(seconds, 1),
        "results": results,
    }


def write(path: Path, data: dict[str, Any]) -> None:
    """JSON with one line a result, so that a diff shows which changed."""
    rest = json.dumps({key: value for key, value in data.items() if key != "results"}, indent=1)
    rows = ",\n".join(json.dumps(result) for result in data["results"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(rest.removesuffix("\n}") + ',\n "results": [\n' + rows + "\n]}\n")


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="where the folder cifar-10-batches-bin is")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=Settings.epochs, help="of the whole schedule, half of which is run")
    parser.add_argument("--batch", type=int, default=Settings.batch)
    parser.add_argument("--steps", type=int, default=Settings.steps, help="after the growth")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--only", default="*", help="arms whose kind and name match, e.g. 'deepen*'")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--table", action="store_true", help="only write docs/results/spike.md again from the committed results"
    )
    arguments = parser.parse_args(given)
    warnings.filterwarnings("ignore")
    if not arguments.table:
        if arguments.data is None:
            parser.error("--data DIR is needed: the folder that holds cifar-10-batches-bin")
        torch.backends.cudnn.allow_tf32 = False  # its rounding would hide what a growth adds
        torch.backends.cudnn.deterministic = True
        started = time.perf_counter()
        compared = min(Settings.compared, arguments.steps)
        settings = Settings(arguments.epochs, arguments.batch, steps=arguments.steps, compared=compared)
        try:
            data = cifar10(arguments.data)
        except DataError as error:
            raise SystemExit(str(error)) from error
        results = measure_all(
            data.images, data.labels, arguments.models, arguments.seeds, settings, arguments.device, arguments.only
        )
        write(arguments.out, report(arguments, settings, results, time.perf_counter() - started))
    found = json.loads((RESULTS if arguments.table else arguments.out).read_text())
    if arguments.table or arguments.out == RESULTS:
        PAGE.write_text(page(found))
    cells = [
        (row.model, row.optimizer, row.kind, row.name, f"{row.mean:.3f}", f"{row.learned:.1%}", row.verdict)
        for row in verdicts(found)
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(7)]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
