"""Training of segments: those of one shape together, parents before children, and on from where an interrupted run stopped.

    all segments → those whose parents are done → of these, the cheapest shape → a fleet → until one of it ends → …

Small shapes come first, so that when the turn of a larger one comes all its networks are there, and in a fleet those with the
longest way to go, so that none of them is left alone in the end: fleets are as large as can be.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from experiments.setting.data import Data, batches
from experiments.setting.flops import step_flops
from experiments.setting.growing import grow_model
from experiments.setting.models import SmallConv
from experiments.setting.segments import Segment
from experiments.training.store import Store

BATCH = 128


@dataclass
class Curve:
    """What a segment measured: an entry before the first step and one an epoch, counted from the segment's own beginning.

    `seconds` are the network's share of the time that its fleet took.
    """

    epoch: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    test_loss: list[float] = field(default_factory=list)
    train_loss: list[float | None] = field(default_factory=list)
    flops: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)  # losses of the first hundred, unless only the end is looked at
    last: list[float] = field(default_factory=list)  # losses of the last thirty, likewise
    growth: dict[str, Any] = field(default_factory=dict)
    open: list[float] = field(default_factory=list)  # steps since the last entry, their losses and their seconds, summed up

    def spend(self, losses: Tensor, seconds: float) -> None:
        """Some more steps, for the next entry."""
        new = len(losses), float(losses.sum()), seconds
        self.open = [one + more for one, more in zip(self.open or (0, 0.0, 0.0), new, strict=True)]

    def close(self, epoch: float, accuracy: Any, test_loss: Any, flops: float) -> None:
        """An entry for all that was spent since the last."""
        steps, lost, seconds = self.open
        self.open = []
        self.add(epoch, accuracy, test_loss, lost / steps, flops, self.seconds[-1] + seconds)

    def add(self, epoch: float, accuracy: Any, test_loss: Any, train_loss: Any, flops: float, seconds: float) -> None:
        self.epoch.append(round(epoch, 4))
        self.accuracy.append(round(float(accuracy), 6))
        self.test_loss.append(round(float(test_loss), 5))
        self.train_loss.append(None if train_loss is None else round(float(train_loss), 5))
        self.flops.append(flops)
        self.seconds.append(round(seconds, 4))


@dataclass(eq=False)
class Trainee:
    """A network on its way through a segment."""

    segment: Segment
    model: nn.Module
    optimizer: torch.optim.Optimizer
    curve: Curve
    done: int = 0  # steps of this segment
    flops: int = 0  # of one step
    filters: dict[str, Tensor] = field(default_factory=dict)  # of a SmallConv's first layer: before and after its growth

    def length(self, per_epoch: int) -> int:
        return round(self.segment.stage.epochs * per_epoch)

    def ahead(self, per_epoch: int) -> int:
        """Steps until it is to be looked at, or ends."""
        looks, left = self.segment.stage.looks, self.length(per_epoch) - self.done
        if not looks:
            return left
        every = max(1, per_epoch // looks)
        return min(every - self.done % every, left)

    def rates(self, steps: int, per_epoch: int) -> list[float]:
        """Learning rates of the next steps."""
        stage, before = self.segment.stage, 0
        for earlier in reversed(self.segment.stages[:-1]):
            if earlier.span != stage.span:
                break
            before += round(earlier.epochs * per_epoch)
        start, span = before + self.done, round(stage.span * per_epoch)
        return [rate_at(start + step, span, stage.rate) for step in range(steps)]


def rate_at(step: int, length: int, peak: float) -> float:
    """The learning rate at a step of a cosine; where its length is zero it stays."""
    if not length:
        return peak
    warm = max(1, length // 20)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, length - warm)))


def optimizer_for(model: nn.Module, segment: Segment) -> torch.optim.Optimizer:
    stage = segment.stage
    if segment.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=stage.rate, weight_decay=stage.decay)
    return torch.optim.Adam(model.parameters(), lr=stage.rate, weight_decay=stage.decay, amsgrad=True)


def filters_of(model: nn.Module, when: str) -> dict[str, Tensor]:
    """The first layer of a SmallConv."""
    return {when: model.conv1.weight.detach().half().clone()} if isinstance(model, SmallConv) else {}


class Training:
    """All that is to be trained, and how.

    Args:
        segments: parents before children.
        engine: makes an engine from models, optimizers and streams: `eager.Eager` or `fused.fleet.Fleet`.
        shape: what models must share to be in one fleet.
        store: where states and curves are kept.
        tell: is called as work goes on, with the epochs that were trained (of all networks together) and a line of text.
        limit: the most networks of a fleet; fewer, if they do not fit into the device's memory.
        until: a time (of `time.monotonic`) at which to stop, with all states written.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        data: Data,
        engine: Callable[..., Any],
        shape: Callable[[nn.Module], Any],
        store: Store,
        tell: Callable[[float, str], None] = lambda done, text: None,
        limit: int = 100,
        until: float = float("inf"),
        batch: int = BATCH,
    ) -> None:
        self.segments, self.data, self.engine, self.shape, self.store = list(segments), data, engine, shape, store
        self.tell, self.limit, self.until, self.batch = tell, limit, until, batch
        self.per_epoch = len(data.labels) // batch
        self.trainees: dict[Segment, Trainee] = {}
        self.shapes: dict[Any, Any] = {}
        self.costs: dict[Any, int] = {}

    def run(self) -> bool:
        """Train all; whether all is done."""
        while not all(self.store.is_done(segment) for segment in self.segments):
            if time.monotonic() > self.until:
                for one in self.trainees.values():
                    self._write(one)
                return False
            self._train(self._next())
        return True

    def epochs_left(self) -> float:
        """Of all segments together, less the steps that are made already."""
        return sum(map(self._left, self.segments)) / self.per_epoch

    def _next(self) -> list[Trainee]:
        """Networks of the cheapest shape among those that can be trained now, the longest runs first."""
        ready: dict[Any, list[Segment]] = {}
        for segment in self.segments:
            if not self.store.is_done(segment) and (segment.parent is None or self.store.is_done(segment.parent)):
                ready.setdefault((self._shape(segment), segment.optimizer, segment.flips), []).append(segment)
        cheapest = min(ready, key=lambda key: self.costs[key[0]])
        return [self._trainee(segment) for segment in sorted(ready[cheapest], key=self._left, reverse=True)[: self.limit]]

    def _trainee(self, segment: Segment) -> Trainee:
        if segment not in self.trainees:
            self.trainees[segment] = self._begin(segment)
        return self.trainees[segment]

    def _left(self, segment: Segment) -> int:
        done = self.trainees[segment].done if segment in self.trainees else self.store.steps(segment)
        return round(segment.stage.epochs * self.per_epoch) - done

    def _shape(self, segment: Segment) -> Any:
        """The shape of its network, which the first one of its kind tells."""
        kind = (
            segment.net,
            tuple((stage.grow.what, stage.grow.factor, stage.grow.method) for stage in segment.stages if stage.grow),
        )
        if kind not in self.shapes:
            self.shapes[kind] = self.shape(self._trainee(segment).model)
        return self.shapes[kind]

    def _begin(self, segment: Segment) -> Trainee:
        """A network at the beginning of a segment (grown, if that is how it begins), or where it was left."""
        saved = self.store.state(segment)
        if saved is not None:
            model, optimizer = self._restore(segment, saved)
            return self._priced(Trainee(segment, model, optimizer, Curve(**saved["curve"]), saved["done"], 0, saved["filters"]))
        stage, curve, filters = segment.stage, Curve(), {}
        if segment.parent is None:
            model = segment.net.build(segment.seed)
            optimizer = optimizer_for(model, segment)
        else:
            model, optimizer = self._copy_of(segment.parent)
            if stage.grow is not None:
                started = time.perf_counter()
                filters = filters_of(model, "before")
                growth = grow_model(model, self._example(), stage.grow, optimizer, segment.seed)
                curve.growth = {
                    "parameters": list(growth.parameters),
                    "error": growth.max_error,
                    "preserving": growth.preserving,
                    "seconds": time.perf_counter() - started,
                    "plan": str(growth.plan),
                }
                filters |= filters_of(model, "after")
            if stage.state == "fresh":
                optimizer = optimizer_for(model, segment)
        return self._priced(Trainee(segment, model, optimizer, curve, filters=filters))

    def _priced(self, trainee: Trainee) -> Trainee:
        shape = self.shape(trainee.model)
        if shape not in self.costs:
            self.costs[shape] = step_flops(trainee.model, self.data.images.shape[1:])[0] * self.batch
        trainee.flops = self.costs[shape]
        return trainee

    def _example(self) -> Tensor:
        """Eight images of the training set, as networks see them."""
        return (self.data.images[:8].float() / 255 - self.data.mean[:, None, None]) / self.data.deviation[:, None, None]

    def _copy_of(self, segment: Segment) -> tuple[nn.Module, torch.optim.Optimizer]:
        """A finished network and its optimizer, to go on from."""
        saved = self.store.state(segment)
        assert saved is not None
        return self._restore(segment, saved)

    def _restore(self, segment: Segment, saved: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The network of a saved segment: its growth is made once more, from the same network, and then its numbers loaded."""
        if segment.parent is None:
            model = segment.net.build(segment.seed)
        else:
            model, optimizer = self._copy_of(segment.parent)
            if segment.stage.grow is not None:
                grow_model(model, self._example(), segment.stage.grow, optimizer, segment.seed)
                for _ in range(min(segment.stage.grow.fade, saved["done"])):
                    optimizer.step()  # without gradients: nothing moves but what fades in
        model.load_state_dict(saved["model"])
        optimizer = optimizer_for(model, segment)
        optimizer.load_state_dict(saved["optimizer"])
        return model, optimizer

    def _train(self, trainees: list[Trainee]) -> None:
        """Train a fleet until the first of its networks ends its segment; write down those that have."""
        try:
            engine = self._aboard(trainees)
            ahead = self._prepare(engine, trainees)
        except torch.OutOfMemoryError as error:
            if len(trainees) == 1:
                raise
            self.limit = len(trainees) // 2
            traceback.clear_frames(error.__traceback__)  # they hold what is to be freed
            torch.cuda.empty_cache()
            self.tell(0.0, f"{len(trainees)} networks at once do not fit into the device's memory: {self.limit} from here on")
            return
        ended: list[Trainee] = []
        while not ended:
            self._some_steps(engine, trainees, ahead)
            ended = [one for one in trainees if one.done >= one.length(self.per_epoch)]
            if time.monotonic() > self.until:
                break
            ahead = [] if ended else self._prepare(engine, trainees)
        engine.land()
        for one in ended:
            one.filters |= filters_of(one.model, "end")
            self._write(one)
            del self.trainees[one.segment]

    def _aboard(self, trainees: list[Trainee]) -> Any:
        """An engine with these networks, and with their accuracy before the first step."""
        keys = list(dict.fromkeys(self._stream(one) for one in trainees))
        engine = self.engine(
            [one.model for one in trainees],
            [one.optimizer for one in trainees],
            [keys.index(self._stream(one)) for one in trainees],
            self.batch,
            factors=[one.segment.stage.new_rate for one in trainees],
            fades=[(one.done, one.segment.stage.grow.fade if one.segment.stage.grow else 0) for one in trainees],
        )
        engine.feed(self.data.images, self.data.labels, self.data.mean, self.data.deviation)
        engine.examine(self.data.test_images, self.data.test_labels)
        if any(not one.curve.epoch for one in trainees):
            accuracy, test_loss = engine.evaluate()
            for place, one in enumerate(trainees):
                if not one.curve.epoch:
                    one.curve.add(0.0, accuracy[place], test_loss[place], None, 0.0, 0.0)
        return engine

    def _write(self, one: Trainee) -> None:
        finished = one.done >= one.length(self.per_epoch)
        self.store.write(one.segment, one.model, one.optimizer, vars(one.curve), one.done, finished, one.filters)

    def _stream(self, trainee: Trainee) -> tuple[int, int, int]:
        """Seed, epoch, and step within it: networks that share these see the same batches. Every stage begins a new epoch."""
        epoch, step = divmod(trainee.done, self.per_epoch)
        return trainee.segment.seed, 10_000 * (len(trainee.segment.stages) - 1) + epoch, step

    def _prepare(self, engine: Any, trainees: list[Trainee]) -> list[int]:
        """Get ready for steps until the first is to be looked at, or ends; an epoch at most. How far it is for each of them."""
        self.started = time.perf_counter()
        ahead = [one.ahead(self.per_epoch) for one in trainees]
        steps = min(*ahead, self.per_epoch)
        rows = [self._batches(*stream, steps) for stream in dict.fromkeys(self._stream(one) for one in trainees)]
        order = torch.stack([chosen for chosen, _ in rows])
        flips = torch.stack([mirrored for _, mirrored in rows]) if trainees[0].segment.flips else None
        rates = torch.tensor([one.rates(steps, self.per_epoch) for one in trainees])
        decays = torch.tensor([[one.segment.stage.decay] * steps for one in trainees])
        engine.begin(order, rates, decays, flips)
        return ahead

    def _some_steps(self, engine: Any, trainees: list[Trainee], ahead: Sequence[int]) -> None:
        """All of them on, as was prepared."""
        steps = min(*ahead, self.per_epoch)
        losses = engine.run().cpu()
        spent = time.perf_counter() - self.started
        accuracy, test_loss = engine.evaluate() if steps in ahead else (None, None)
        for place, one in enumerate(trainees):
            curve = one.curve
            curve.spend(losses[place], spent / len(trainees))
            if one.segment.stage.looks:
                curve.steps += [round(value, 8) for value in losses[place, : max(0, 100 - one.done)].tolist()]
                curve.last = [*curve.last, *(round(value, 8) for value in losses[place].tolist())][-30:]
            one.done += steps
            if ahead[place] == steps:
                curve.close(one.done / self.per_epoch, accuracy[place], test_loss[place], float(one.done) * one.flops)
        seen = [one.curve.accuracy[-1] for one in trainees if len(one.curve.accuracy) > 1]
        state = f"best {100 * max(seen):.1f} %" if seen else f"training loss {losses.mean():.2f}"
        self.tell(steps * len(trainees) / self.per_epoch, f"{len(trainees)} × {trainees[0].segment.net}, {state}")

    def _batches(self, seed: int, epoch: int, start: int, steps: int) -> tuple[Tensor, Tensor]:
        """What a stream sees in its next steps, which may begin in one epoch and end in the next."""
        epochs = range(epoch, epoch + -(-(start + steps) // self.per_epoch))
        made = [batches(seed, number, len(self.data.labels), self.batch, self.per_epoch) for number in epochs]
        order, flips = (torch.cat(parts)[start : start + steps] for parts in zip(*made, strict=True))
        return order, flips
