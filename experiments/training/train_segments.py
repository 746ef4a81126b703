"""Training of segments: those of one shape together, parents before children, and on from where an interrupted run stopped.

    all segments → those whose parents are done → of these, the cheapest shape → a fleet → until one of it ends → …

Small shapes come first, so that when the turn of a larger one comes all its networks are there, and in a fleet those with the
longest way to go, so that none of them is left alone in the end: fleets are as large as can be. Where an engine can do so,
fleets of several shapes are trained side by side: a small one alone would leave most of the device idle.
"""

from __future__ import annotations

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
from experiments.setting.segments import Segment
from experiments.training.store import Store
from experiments.training.trainee import Curve, Trainee, filters_of, optimizer_for

BATCH = 128


@dataclass(eq=False)
class Flight:
    """A fleet under way: its networks, how far it is for each of them to its next evaluation, and since when."""

    trainees: list[Trainee]
    engine: Any
    ahead: list[int] = field(default_factory=list)
    started: float = 0.0
    collected: bool = False  # what it has measured is in the curves already

    @property
    def size(self) -> Any:
        return self.trainees[0].segment.size


class Training:
    """All that is to be trained, and how.

    Args:
        segments: parents before children.
        engine: makes an engine from models, optimizers and streams: `eager.Eager` or `fused.fleet.Fleet`.
        shape: what models must share to be in one fleet.
        store: where states and curves are kept.
        tell: is called as work goes on, with the epochs that were trained (of all networks together) and a line of text.
        limit: the most networks of a fleet; fewer, if they do not fit into the device's memory.
        together: the most fleets that are trained side by side, by an engine that works in the background.
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
        together: int = 1,
        until: float = float("inf"),
        batch: int = BATCH,
    ) -> None:
        self.segments, self.data, self.engine, self.shape, self.store = list(segments), data, engine, shape, store
        self.tell, self.limit, self.together, self.until, self.batch = tell, limit, together, until, batch
        self.per_epoch = len(data.labels) // batch
        self.trainees: dict[Segment, Trainee] = {}
        self.shapes: dict[Any, Any] = {}
        self.costs: dict[Any, int] = {}

    def run(self) -> bool:
        """Train all; whether all is done."""
        flights: list[Flight] = []
        changed = True  # since it was seen that no other fleet can begin
        while flights or not all(self.store.is_done(segment) for segment in self.segments):
            if time.monotonic() > self.until:
                for flight in flights:
                    self._collect(flight, len(flights))
                    self._land(flight)
                for one in self.trainees.values():
                    self._write(one)
                return all(self.store.is_done(segment) for segment in self.segments)
            while changed and len(flights) < self.together:
                segments = self._next(flights)
                changed = bool(segments)
                flights += self._depart([self._trainee_beside(flights, segment) for segment in segments])
            if flights:
                flight = self._first_ready(flights)
                self._collect(flight, len(flights))
                if self._ended(flight) or time.monotonic() > self.until:
                    self._land(flight)
                    flights.remove(flight)
                    changed = True
                else:
                    self._go_on(flight)
        return True

    def _trainee_beside(self, flights: Sequence[Flight], segment: Segment) -> Trainee:
        """A network for the next fleet. Growths take a while: fleets that are ready go on meanwhile."""
        for flight in flights:
            if not flight.collected and flight.engine.ready():
                self._collect(flight, len(flights))
                if not self._ended(flight):
                    self._go_on(flight)
        return self._trainee(segment)

    def epochs_left(self) -> float:
        """Of all segments together, less the steps that are made already."""
        return sum(map(self._left, self.segments)) / self.per_epoch

    def _next(self, flights: Sequence[Flight] = ()) -> list[Segment]:
        """Segments of the cheapest shape among those that can be trained now, the longest runs first.

        Beside other fleets only shapes that wait for no network of another shape: later, their fleets are larger.
        """
        waiting, ready = set(), dict[Any, list[Segment]]()
        under_way = {one.segment for flight in flights for one in flight.trainees}
        for segment in self.segments:
            if self.store.is_done(segment) or segment in under_way:
                continue
            if segment.parent is None or self.store.is_done(segment.parent):
                ready.setdefault((self._shape(segment), segment.optimizer, segment.flips, segment.size), []).append(segment)
            elif segment.parent.size != segment.size:
                waiting.add(segment.size)
        if flights:
            busy = {flight.size for flight in flights}
            ready = {key: found for key, found in ready.items() if key[-1] not in waiting | busy}
        if not ready:
            return []
        cheapest = min(ready, key=lambda key: (key[-1] in waiting, self.costs[key[0]]))
        return sorted(ready[cheapest], key=self._left, reverse=True)[: self.limit]

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
        model, optimizer = self._start_of(segment)
        if stage.grow is not None:
            filters = filters_of(model, "before")
            curve.growth = grow_model(model, self._example(), stage.grow, optimizer, segment.seed)
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

    def _start_of(self, segment: Segment) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The network and the optimizer that a segment goes on from: its parent's at the end, or new ones."""
        if segment.parent is None:
            model = segment.net.build(segment.seed)
            return model, optimizer_for(model, segment)
        saved = self.store.state(segment.parent)
        assert saved is not None
        return self._restore(segment.parent, saved)

    def _restore(self, segment: Segment, saved: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The network of a saved segment: its growth is made once more, from the same network, and then its numbers loaded."""
        model, optimizer = self._start_of(segment)
        if segment.stage.grow is not None:
            grow_model(model, self._example(), segment.stage.grow, optimizer, segment.seed)
            for _ in range(min(segment.stage.grow.fade, saved["done"])):
                optimizer.step()  # without gradients: nothing moves but what fades in
        model.load_state_dict(saved["model"])
        optimizer = optimizer_for(model, segment)
        optimizer.load_state_dict(saved["optimizer"])
        return model, optimizer

    def _depart(self, trainees: list[Trainee]) -> list[Flight]:
        """A fleet that has begun its first steps; none, where there are no networks or too little memory on the device."""
        if not trainees:
            return []
        try:
            flight = Flight(trainees, self._aboard(trainees))
            self._go_on(flight)
        except torch.OutOfMemoryError as error:
            if len(trainees) == 1:
                raise
            self.limit = len(trainees) // 2
            traceback.clear_frames(error.__traceback__)  # they hold what is to be freed
            torch.cuda.empty_cache()
            self.tell(0.0, f"{len(trainees)} networks at once do not fit into the device's memory: {self.limit} from here on")
            return []
        return [flight]

    def _first_ready(self, flights: Sequence[Flight]) -> Flight:
        """The first fleet whose prepared steps are made, after as long a wait as it takes."""
        while len(flights) > 1:
            for flight in flights:
                if flight.collected or flight.engine.ready():
                    return flight
            time.sleep(0.001)
        return flights[0]

    def _ended(self, flight: Flight) -> list[Trainee]:
        return [one for one in flight.trainees if one.done >= one.length(self.per_epoch)]

    def _land(self, flight: Flight) -> None:
        """Networks back to the host; those that have ended their segments are written down."""
        flight.engine.land()
        for one in self._ended(flight):
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
        engine.examine(*self.data.examined)
        if any(not one.curve.epoch for one in trainees):
            evaluated = engine.evaluate()
            for place, one in enumerate(trainees):
                if not one.curve.epoch:
                    one.curve.add(0.0, entries(evaluated, place), (None, None), 0.0, 0.0)
        return engine

    def _write(self, one: Trainee) -> None:
        finished = one.done >= one.length(self.per_epoch)
        self.store.write(one.segment, one.model, one.optimizer, vars(one.curve), one.done, finished, one.filters)

    def _stream(self, trainee: Trainee) -> tuple[int, int, int]:
        """Seed, epoch, and step within it: networks that share these see the same batches. Every stage begins a new epoch."""
        epoch, step = divmod(trainee.done, self.per_epoch)
        return trainee.segment.seed, 10_000 * (len(trainee.segment.stages) - 1) + epoch, step

    def _go_on(self, flight: Flight) -> None:
        """Begin the steps until the first evaluation or end of one of the networks; an epoch at most."""
        trainees, flight.started, flight.collected = flight.trainees, time.perf_counter(), False
        flight.ahead = [one.ahead(self.per_epoch) for one in trainees]
        steps = min(*flight.ahead, self.per_epoch)
        rows = [self._batches(*stream, steps) for stream in dict.fromkeys(self._stream(one) for one in trainees)]
        order = torch.stack([chosen for chosen, _ in rows])
        flips = torch.stack([mirrored for _, mirrored in rows]) if trainees[0].segment.flips else None
        rates = torch.tensor([one.rates(steps, self.per_epoch) for one in trainees])
        decays = torch.tensor([[one.segment.stage.decay] * steps for one in trainees])
        flight.engine.begin(order, rates, decays, flips)
        flight.engine.start(evaluate=steps in flight.ahead)

    def _collect(self, flight: Flight, others: int = 1) -> None:
        """What the steps that were begun have measured, as soon as they are made; `others`: fleets that shared the device."""
        if flight.collected:
            return
        trainees, flight.collected = flight.trainees, True
        losses, right, evaluated = flight.engine.finish()
        steps = losses.shape[1]
        spent = (time.perf_counter() - flight.started) / others
        for place, one in enumerate(trainees):
            one.add_steps(losses[place], right[place], spent / len(trainees))
            if flight.ahead[place] == steps:
                one.curve.close(one.done / self.per_epoch, entries(evaluated, place), float(one.done) * one.flops)
        seen = [one.curve.accuracy[-1] for one in trainees if len(one.curve.accuracy) > 1]
        state = f"best {100 * max(seen):.1f} %" if seen else f"training loss {losses.mean():.2f}"
        self.tell(steps * len(trainees) / self.per_epoch, f"{len(trainees)} × {trainees[0].segment.net}, {state}")

    def _batches(self, seed: int, epoch: int, start: int, steps: int) -> tuple[Tensor, Tensor]:
        """What a stream sees in its next steps, which may begin in one epoch and end in the next."""
        epochs = range(epoch, epoch + -(-(start + steps) // self.per_epoch))
        made = [batches(seed, number, len(self.data.labels), self.batch, self.per_epoch) for number in epochs]
        order, flips = (torch.cat(parts)[start : start + steps] for parts in zip(*made, strict=True))
        return order, flips


def entries(evaluated: Sequence[tuple[Tensor, Tensor]], place: int) -> list[tuple[Tensor, Tensor]]:
    """Accuracy and loss of one network on each set."""
    return [(accuracy[place], loss[place]) for accuracy, loss in evaluated]
