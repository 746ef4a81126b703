"""One family of four sizes beside four networks trained apart, and a teacher trained together with its student.

    python -m experiments.families                                          # digits, on a CPU; writes results/families.json
    python -m experiments.families --preset cifar --device cuda --data data # CIFAR-10; writes results/families-cifar.json
    python -m experiments.families --preset gpt --device cuda               # a language model; writes results/families-gpt.json

The image networks are plain convolutions with batch norms, whose channels nest. In the language model (`experiments/lm/gpt.py`)
heads and hidden units nest. All arms of a question spend the same FLOPs (of products, forward and backward, as torch counts
them). Each training has one cosine of the learning rate:

    four sizes            apart      each of the four networks alone, N steps each
                          family     a step adds up the gradients of all four sizes: N steps
                          drawn      the same, of a family whose new units are drawn (`method="random"`) instead of paired
                          sandwich   a step takes the largest, the smallest and one between: more steps

    teacher and student   apart      both from scratch, N steps each
                          in turn    the teacher for N steps; then a grown copy, the student, for N steps
                          together   the teacher for N/2 steps; then a family, and both in every step, for what is left

The second question is that of §5.3 of the paper. Runs that the result file holds are not repeated.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import outgrow
from experiments.lm.gpt import Size
from experiments.lm.gpt import build as build_gpt
from experiments.lm.text import batch, source_code
from experiments.setting.data import cifar10, digits

HERE = Path(__file__).parent / "results"
TEACHER, STUDENT = 1, 3  # of the four sizes


class Images:
    """Convolutions with batch norms on images; the measure is the error on test images in percent."""

    measure = "test error in percent"

    def __init__(self, data: Any, channels: Sequence[int], stages: int, steps: int, rate: float, device: str) -> None:
        self.name, self.steps, self.rate, self.batch, self.device = data.name, steps, rate, 64, device
        self.channels, self.stages = channels, stages
        mean, deviation = (each.view(1, -1, 1, 1) for each in (data.mean, data.deviation))
        halves = (data.images, data.labels), (data.test_images, data.test_labels)
        self.train, self.test = (
            (((images.float() / 255 - mean) / deviation).to(device), labels.to(device)) for images, labels in halves
        )

    def build(self, number: int, seed: int) -> nn.Module:
        layers: list[nn.Module] = []
        before = self.train[0].shape[1]
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for stage in range(self.stages):
                width = self.channels[number] * 2**stage
                layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
                before = width
            return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10)).to(self.device)

    def growth(self, number: int, **options: Any) -> list[Any]:
        return [outgrow.Widen(str(4 * stage), to=self.channels[number] * 2**stage, **options) for stage in range(self.stages)]

    def drawn(self, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randint(len(self.train[1]), (self.batch,), generator=generator).to(self.device)
        images = self.train[0][chosen]
        if self.name != "digits" and int(torch.randint(2, (), generator=generator)):
            images = images.flip(3)
        return images, self.train[1][chosen]

    @torch.no_grad()
    def measured(self, model: nn.Module) -> float:
        model.eval()
        wrong = [(model(x).argmax(1) != y).float().sum() for x, y in zip(*(t.split(500) for t in self.test), strict=True)]
        model.train()
        return 100 * float(sum(wrong)) / len(self.test[1])

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)


class Language:
    """The language model on source code; the measure is the loss on held-out text in nats per byte."""

    measure = "loss on held-out text in nats per byte"

    def __init__(self, steps: int, device: str) -> None:
        self.text, self.steps, self.rate, self.batch, self.context = source_code().to(device), steps, 1e-3, 64, 256
        self.sizes, self.name, self.device = [Size(6, 384, 2**k, 96 * 2**k, 64) for k in range(1, 5)], self.text.name, device

    def build(self, number: int, seed: int) -> nn.Module:
        return build_gpt(self.sizes[number], self.context, seed).to(self.device)

    def growth(self, number: int, **options: Any) -> list[Any]:
        size = self.sizes[number]
        kinds = {"heads": size.heads, "mlp": size.hidden}
        return [outgrow.Widen(kind=kind, to=to, **options) for kind, to in kinds.items()]

    def drawn(self, seed: int) -> tuple[Tensor, Tensor]:
        return batch(self.text.train, self.batch, self.context, seed)

    @torch.no_grad()
    def measured(self, model: nn.Module) -> float:
        losses = [self.loss(model, *batch(self.text.held_out, self.batch, self.context, 10**9 + n)) for n in range(40)]
        return float(sum(losses)) / len(losses)

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


Task = Images | Language


class Training:
    """A model or family with its optimizer, on a learning rate that warms up and falls along a cosine."""

    def __init__(self, task: Task, model: nn.Module, steps: int, seed: int) -> None:
        self.task, self.model, self.steps, self.seed, self.done = task, model, steps, seed, 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate, weight_decay=0.01)

    def run(self, members: Callable[[], Sequence[nn.Module]], steps: int) -> None:
        for _ in range(steps):
            self._step(members())

    def _step(self, members: Sequence[nn.Module]) -> None:
        warm = max(1, self.steps // 20)
        factor = min((self.done + 1) / warm, 0.5 * (1 + math.cos(math.pi * self.done / self.steps)))
        for group in self.optimizer.param_groups:
            group["lr"] = self.task.rate * factor
        x, y = self.task.drawn(self.seed * 10**6 + self.done)
        self.optimizer.zero_grad()
        for member in members:
            (self.task.loss(member, x, y) / len(members)).backward()
        self.optimizer.step()
        self.done += 1


class Arms:
    """All arms for one seed; each returns the measures of its sizes, the smallest first, and the FLOPs that it has spent."""

    def __init__(self, task: Task, seed: int) -> None:
        self.task, self.seed, self.steps = task, seed, task.steps
        self.example = task.drawn(0)[0][:4]

    @cached_property
    def costs(self) -> list[int]:
        """FLOPs of a training step of each size: a forward pass, and two times that for the backward pass."""
        found = []
        for number in range(4):
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                self.task.build(number, 0)(self.task.drawn(0)[0])
            found.append(3 * counter.get_total_flops())
        return found

    def cost(self, *numbers: int) -> int:
        return sum(self.costs[number] for number in numbers)

    def _training(self, model: nn.Module, steps: int) -> Training:
        return Training(self.task, model, steps, self.seed)

    def apart(self, *numbers: int) -> tuple[list[float], int]:
        found, numbers = [], numbers or (0, 1, 2, 3)
        for number in numbers:
            model = self.task.build(number, self.seed)
            self._training(model, self.steps).run([model].copy, self.steps)
            found.append(self.task.measured(model))
        return found, self.steps * self.cost(*numbers)

    def _family(self, **options: Any) -> outgrow.Family:
        sizes = (self.task.growth(number, **options) for number in (1, 2, 3))
        return outgrow.Family(self.task.build(0, self.seed), self.example, *sizes, seed=self.seed)

    def family(self, **options: Any) -> tuple[list[float], int]:
        family = self._family(**options)
        self._training(family, self.steps).run(lambda: list(family), self.steps)
        return [self.task.measured(member) for member in family], self.steps * self.cost(0, 1, 2, 3)

    def drawn(self) -> tuple[list[float], int]:
        return self.family(method="random")

    def sandwich(self) -> tuple[list[float], int]:
        family, generator = self._family(), torch.Generator().manual_seed(self.seed)
        usual = self.cost(0, 3) + self.cost(1, 2) / 2
        steps = round(self.steps * self.cost(0, 1, 2, 3) / usual)
        self._training(family, steps).run(lambda: family.sandwich(generator), steps)
        return [self.task.measured(member) for member in family], round(steps * usual)

    def both_apart(self) -> tuple[list[float], int]:
        return self.apart(TEACHER, STUDENT)

    def _transforms(self) -> list[Any]:
        """From the teacher to the student."""
        return self.task.growth(STUDENT)

    def in_turn(self) -> tuple[list[float], int]:
        model = self.task.build(TEACHER, self.seed)
        self._training(model, self.steps).run([model].copy, self.steps)
        student = copy.deepcopy(model)
        outgrow.grow(student, self.example, *self._transforms(), seed=self.seed)
        self._training(student, self.steps).run([student].copy, self.steps)
        return [self.task.measured(one) for one in (model, student)], self.steps * self.cost(TEACHER, STUDENT)

    def together(self) -> tuple[list[float], int]:
        alone, both = self.steps // 2, self.cost(TEACHER, STUDENT)
        rest = round((self.steps * both - alone * self.cost(TEACHER)) / both)
        model = self.task.build(TEACHER, self.seed)
        training = self._training(model, alone + rest)
        training.run([model].copy, alone)
        family = outgrow.Family(model, self.example, self._transforms(), optimizer=training.optimizer, seed=self.seed)
        training.run(lambda: list(family), rest)
        return [self.task.measured(member) for member in family], alone * self.cost(TEACHER) + rest * both


ARMS: dict[str, dict[str, Callable[[Arms], tuple[list[float], int]]]] = {
    "four sizes": {"apart": Arms.apart, "family": Arms.family, "drawn": Arms.drawn, "sandwich": Arms.sandwich},
    "teacher and student": {"apart": Arms.both_apart, "in turn": Arms.in_turn, "together": Arms.together},
}


def task_of(preset: str, device: str, data: Path, steps: int | None) -> Task:
    if preset == "gpt":
        return Language(steps or 5000, device)
    if preset == "cifar":
        return Images(cifar10(data), (16, 32, 64, 128), 4, steps or 20_000, 2e-3, device)
    return Images(digits(), (4, 6, 10, 16), 2, steps or 600, 1e-2, device)


def runs_of(task: Task, known: list[Any], seeds: int) -> Iterator[dict[str, Any]]:
    """The runs that are not known yet, one by one."""
    done = {(run["question"], run["arm"], run["seed"]) for run in known}
    for seed in range(seeds):
        for question, arms in ARMS.items():
            for name, arm in arms.items():
                if (question, name, seed) not in done:
                    started = time.process_time()
                    found, flops = arm(Arms(task, seed))
                    print(question, name, seed, found, f"{time.process_time() - started:.0f} s", file=sys.stderr, flush=True)
                    yield {"question": question, "arm": name, "seed": seed, "measures": found, "flops": flops}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=("digits", "cifar", "gpt"), default="digits")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", type=Path, default=Path("data"), help="the folder of CIFAR-10")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="another number N of steps, for a trial")
    parser.add_argument("--results", type=Path, help="the file to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = task_of(options.preset, options.device, options.data, options.steps)
    path = options.results or HERE / ("families.json" if options.preset == "digits" else f"families-{options.preset}.json")
    about = {
        "command": f"python -m experiments.families --preset {options.preset} --device {options.device}",
        "versions": {name: version(name) for name in ("torch", "numpy", "scikit-learn", "outgrow")},
        "machine": {"python": platform.python_version(), "system": platform.platform(), "device": options.device},
        "configuration": {"data": task.name, "steps": task.steps, "batch": task.batch, "rate": task.rate, "optimizer": "AdamW"},
        "measure": task.measure,
        "parameters": [sum(p.numel() for p in task.build(number, 0).parameters()) for number in range(4)],
    }
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    runs = known.get("runs", []) if known.get("configuration") == about["configuration"] else []
    for run in runs_of(task, runs, options.seeds):
        runs = [*runs, run]
        path.write_text(json.dumps({**about, "runs": runs}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
