"""One family of four sizes beside four networks trained apart, and a teacher trained together with its student.

    python -m experiments.families                                          # digits, on a CPU; writes results/families.json
    python -m experiments.families --preset cifar --device cuda --data data # CIFAR-10; writes results/families-cifar.json
    python -m experiments.families --preset gpt --device cuda               # a language model; writes results/families-gpt.json
    python -m experiments.families --preset gpt --device cuda --minutes 9   # a piece; exit status 3: the same command goes on

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

The second question is that of §5.3 of the paper. Runs that the result file holds are not repeated, so that a run is what is
lost if a command is stopped; with --minutes, none is begun that would take longer than the time that is left.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import outgrow
from experiments.family_steps import Training, own_stream, precision
from experiments.lm.gpt import Size
from experiments.lm.gpt import build as build_gpt
from experiments.lm.text import batch_at, places, source_code
from experiments.setting.data import cifar10, digits

HERE = Path(__file__).parent / "results"
TEACHER, STUDENT = 1, 3  # of the four sizes
GOES_ON = 3  # exit status if time is up


class Measured:
    """What all tasks have in common."""

    name: str
    steps: int
    batch: int
    rate: float
    build: Callable[[int, int], nn.Module]
    drawn: Callable[[int], tuple[Tensor, Tensor]]

    @property
    def configuration(self) -> dict[str, Any]:
        return {"data": self.name, "steps": self.steps, "batch": self.batch, "rate": self.rate, "optimizer": "AdamW"}

    @cached_property
    def costs(self) -> list[int]:
        """FLOPs of a training step of each size: a forward pass, and two times that for the backward pass."""
        found = []
        for number in range(4):
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                self.build(number, 0)(self.drawn(0)[0])
            found.append(3 * counter.get_total_flops())
        return found


class Images(Measured):
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

    def places(self, seed: int) -> Tensor:
        """The numbers of a batch's images, and behind them whether they are mirrored."""
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randint(len(self.train[1]), (self.batch,), generator=generator)
        mirrored = torch.randint(2, (1,), generator=generator) if self.name != "digits" else torch.zeros(1, dtype=torch.long)
        return torch.cat([chosen, mirrored])

    def taken(self, places: Tensor) -> tuple[Tensor, Tensor]:
        chosen, mirrored = places[:-1], places[-1] > 0
        images = self.train[0][chosen]
        if self.name != "digits":
            images = torch.where(mirrored, images.flip(3), images)
        if images.is_cuda:
            images = images.contiguous(memory_format=torch.channels_last)
        return images, self.train[1][chosen]

    def drawn(self, seed: int) -> tuple[Tensor, Tensor]:
        return self.taken(self.places(seed).to(self.device))

    @torch.no_grad()
    def measured(self, model: nn.Module) -> float:
        model.eval()
        wrong = [(model(x).argmax(1) != y).float().sum() for x, y in zip(*(t.split(2_000) for t in self.test), strict=True)]
        model.train()
        return 100 * float(sum(wrong)) / len(self.test[1])

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)


class Language(Measured):
    """The language model on source code; the measure is the loss on held-out text in nats per byte."""

    measure = "loss on held-out text in nats per byte"

    def __init__(self, steps: int, device: str) -> None:
        self.text, self.steps, self.rate, self.batch, self.context = source_code().to(device), steps, 1e-3, 64, 256
        self.sizes, self.name, self.device = [Size(6, 384, 2**k, 96 * 2**k, 64) for k in range(1, 5)], self.text.name, device

    @property
    def configuration(self) -> dict[str, Any]:
        return {**super().configuration, "text": self.text.hash}

    def build(self, number: int, seed: int) -> nn.Module:
        return build_gpt(self.sizes[number], self.context, seed).to(self.device)

    def growth(self, number: int, **options: Any) -> list[Any]:
        size = self.sizes[number]
        kinds = {"heads": size.heads, "mlp": size.hidden}
        return [outgrow.Widen(kind=kind, to=to, **options) for kind, to in kinds.items()]

    def places(self, seed: int) -> Tensor:
        return places(self.text.train, self.batch, self.context, seed)

    def taken(self, places: Tensor) -> tuple[Tensor, Tensor]:
        return batch_at(self.text.train, places, self.context)

    def drawn(self, seed: int) -> tuple[Tensor, Tensor]:
        return self.taken(self.places(seed).to(self.device))

    @torch.no_grad()
    def measured(self, model: nn.Module) -> float:
        drawn = [places(self.text.held_out, self.batch, self.context, 10**9 + number) for number in range(40)]
        with precision(self.device):
            losses = [
                self.loss(model, *batch_at(self.text.held_out, starts, self.context))
                for starts in torch.stack(drawn).to(self.device)
            ]
        return float(sum(losses)) / len(losses)

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


Task = Images | Language


class Arms:
    """All arms for one seed; each returns the measures of its sizes, the smallest first, and the FLOPs that it has spent."""

    def __init__(self, task: Task, seed: int) -> None:
        self.task, self.seed, self.steps = task, seed, task.steps
        self.example = task.drawn(0)[0][:4]

    def cost(self, *numbers: int) -> int:
        return sum(self.task.costs[number] for number in numbers)

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
        self._training(family, self.steps).run(list(family).copy, self.steps)
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
        training.run(list(family).copy, rest)
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


Run = dict[str, Any]


def left_of(known: Sequence[Run], seeds: int, names: Sequence[str]) -> list[tuple[str, str, int]]:
    """Question, arm and seed of the runs that are not known yet; all of a seed before the next one."""
    done = {(run["question"], run["arm"], run["seed"]) for run in known}
    runs = [(question, arm, seed) for seed in range(seeds) for question, arms in ARMS.items() for arm in arms]
    return [run for run in runs if run not in done and (not names or run[1] in names)]


def made(task: Task, question: str, arm: str, seed: int) -> Run:
    """A run, with the seconds that it took."""
    started = time.monotonic()
    with own_stream(task.device):
        found, flops = ARMS[question][arm](Arms(task, seed))
    seconds = round(time.monotonic() - started, 3)
    print(f"{question}, {arm}, seed {seed}: {found}; {seconds} s, {flops / seconds / 1e12:.3g} TFLOP/s", flush=True)
    return {"question": question, "arm": arm, "seed": seed, "measures": found, "flops": flops, "seconds": seconds}


def cost(task: Task, question: str) -> float:
    """FLOPs that each arm of a question spends."""
    return task.steps * sum(task.costs[number] for number in (range(4) if question == "four sizes" else (TEACHER, STUDENT)))


def speed(known: Sequence[Run], question: str) -> float | None:
    """FLOP/s of the slowest run of a question."""
    return min(
        (run["flops"] / run["seconds"] for run in known if run["question"] == question and "seconds" in run), default=None
    )


def write(path: Path, content: Any) -> None:
    """Write results, completely or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def known_runs(path: Path, configuration: dict[str, Any]) -> list[Run]:
    """The runs of a file; an error if they were made with another configuration."""
    if not path.exists():
        return []
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["configuration"] != configuration:
        raise SystemExit(f"{path} has runs of another configuration: name another file with --results")
    runs: list[Run] = content["runs"]
    return runs


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    new.add_argument("--preset", choices=("digits", "cifar", "gpt"), default="digits")
    new.add_argument("--device", default="cpu")
    new.add_argument("--data", type=Path, default=Path("data"), help="the folder of CIFAR-10")
    new.add_argument("--seeds", type=int, default=5)
    new.add_argument("--arms", nargs="*", default=[], metavar="ARM", help="only arms of these names")
    new.add_argument("--steps", type=int, help="another number N of steps, for a trial")
    new.add_argument("--minutes", type=float, default=math.inf, help=f"begin no run that takes longer; exit status {GOES_ON}")
    new.add_argument("--results", type=Path, help="the file to write")
    return new


def main(given: Sequence[str] | None = None) -> int:
    options, started = parser().parse_args(given), time.monotonic()
    torch.set_num_threads(1)
    task = task_of(options.preset, options.device, options.data, options.steps)
    path = options.results or HERE / ("families.json" if options.preset == "digits" else f"families-{options.preset}.json")
    about = {
        "command": f"python -m experiments.families --preset {options.preset} --device {options.device}",
        "versions": versions(),
        "machine": {"python": platform.python_version(), "system": platform.platform(), "device": device_name(options.device)},
        "configuration": task.configuration,
        "measure": task.measure,
        "parameters": [sum(p.numel() for p in task.build(number, 0).parameters()) for number in range(4)],
    }
    runs = known_runs(path, task.configuration)
    left = left_of(runs, options.seeds, options.arms)
    for question in ARMS:
        number, flops = sum(run[0] == question for run in left), cost(task, question)
        took = speed(runs, question)
        print(
            f"{question}: {number} runs of {flops / 1e15:.3g} PFLOP each, "
            + (f"about {flops / took:.0f} s each, as those before" if took else f"{flops / 1e14:.0f} s each at 100 TFLOP/s"),
            flush=True,
        )
    for question, arm, seed in left:
        took = speed(runs, question)
        expected = cost(task, question) / took if took else 0.0
        if time.monotonic() - started + expected > 60 * options.minutes:
            print("time is up; the same command goes on")
            return GOES_ON
        runs = [*runs, made(task, question, arm, seed)]
        write(path, {**about, "runs": runs})
    return 0


def versions() -> dict[str, str]:
    """Of the packages that are installed here."""
    found = {}
    for name in ("torch", "numpy", "scikit-learn", "outgrow"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


if __name__ == "__main__":
    sys.exit(main())
