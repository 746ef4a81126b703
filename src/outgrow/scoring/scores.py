"""How much new units would lower the loss, for each volume, per added FLOP.

Let new units have rows of zero, and columns of the existing columns' mean norm r along the singular vectors of the largest
singular values s_1 ≥ s_2 ≥ … of the connection's matrix (see `model/connections.py`). One step of gradient descent with rate η
on their rows lowers the loss by η·gain to first order,

    gain = r² Σ s_i²   over as many i as there are new units

and no units with columns of these norms do better (U. Evci et al., 2022: GradMax). It counts activations as if σ(a) ≈ a.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from outgrow.analysis.analyse import dissect
from outgrow.analysis.find_connections import NoConnection, columns_of, connection_of
from outgrow.analysis.unit_states import State, Verdict
from outgrow.analysis.volumes import Anatomy, Volume
from outgrow.errors import SizeError, TraceError
from outgrow.methods.learned import singular
from outgrow.methods.r2r import R2R
from outgrow.model.check_arguments import check_model
from outgrow.model.compiled import uncompiled
from outgrow.model.connections import Connection, Loss, Observed, check_batches, observe
from outgrow.model.example import Example
from outgrow.model.sandbox import untouched
from outgrow.model.unwrap import bare
from outgrow.scoring.effective_rank import effective_rank, numerical_rank, singular_values
from outgrow.text.tables import plain_table, rounded
from outgrow.trace.flops import count_flops
from outgrow.transforms.widen.make_plan import Choice
from outgrow.transforms.widen.predict_shapes import Prediction
from outgrow.wrong_arguments import usage

USUAL = "outgrow.scores(model, batches, lambda model, batch: criterion(model(batch[0]), batch[1]))"
WIDTH = 118


@dataclass(frozen=True)
class Score:
    """One volume. new: the number of new units that are scored. flops: what they add to one pass on the example.

    gain: the decrease of the loss per learning rate, to first order. singular_values: of the connection's matrix, the largest
    first. rank, numerical_rank: of the units' activations, by entropy, and as the number of singular values above 1% of the
    largest.
    """

    volume: str
    size: int
    new: int
    gain: float
    flops: int
    singular_values: tuple[float, ...]
    rank: float
    numerical_rank: int

    @property
    def gain_per_flop(self) -> float:
        return self.gain / max(self.flops, 1)


@dataclass(frozen=True, repr=False)
class Scores:
    """The result of `scores`: volumes, the best per FLOP first, and reasons for volumes without a score.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> batches = [(torch.randn(16, 4), torch.randn(16, 2))]
        >>> found = scores(model, batches, lambda model, batch: (model(batch[0]) - batch[1]).square().mean())
        >>> found["0"].new, found["0"].flops, found.best
        (2, 384, '0')
    """

    volumes: tuple[Score, ...]
    refused: dict[str, str]

    def __getitem__(self, volume: str) -> Score:
        return next(score for score in self.volumes if score.volume == volume)

    @property
    def best(self) -> str:
        """The volume with the largest gain per FLOP."""
        if not self.volumes:
            raise SizeError("no volume has a score: " + "; ".join(f"{name}: {why}" for name, why in self.refused.items()))
        return self.volumes[0].volume

    def __str__(self) -> str:
        header = ("volume", "size", "gain", "FLOPs", "gain per GFLOP", "rank of activations")
        rows = [
            (
                score.volume,
                f"{score.size} → {score.size + score.new}",
                f"{score.gain:.3g}",
                f"+{rounded(score.flops)}",
                f"{1e9 * score.gain_per_flop:.3g}",
                f"{score.rank:.1f} of {score.size}",
            )
            for score in self.volumes
        ]
        return "\n".join([plain_table(header, rows, WIDTH), *(f"{name}: {reason}" for name, reason in self.refused.items())])

    __repr__ = __str__

    def to_json(self) -> dict[str, Any]:
        """The scores as plain JSON values."""
        data: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        for score, row in zip(self.volumes, data["volumes"], strict=True):
            row["gain_per_flop"] = score.gain_per_flop
        return data


@usage(USUAL)
@uncompiled()
def scores(
    model: nn.Module, batches: Iterable[Any], loss: Loss, example: Example | None = None, factor: float = 1.25
) -> Scores:
    """Score each volume: how much new units would lower the loss, per FLOP that they add.

    The loss and its gradient are computed once per batch, in the model's present mode. The model, its buffers and gradients and
    the random state stay as they are. Volumes that one linear layer or convolution writes are scored; the others are listed
    with the reason.

    Args:
        model: any module that runs on the example.
        batches: a list of batches, or a DataLoader; a few hundred samples in all are usually enough.
        loss: a function of (model, batch) that calls the model and returns the loss.
        example: inputs of the model, for its analysis and for FLOPs; by default, what the loss passes to it first.
        factor: the growth that is scored, as in `outgrow.Widen`.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> batches = [(torch.randn(16, 4), torch.randn(16, 2)) for _ in range(3)]
        >>> found = scores(model, batches, lambda model, batch: (model(batch[0]) - batch[1]).square().mean())
        >>> sorted(score.volume for score in found.volumes), found.refused
        (['0', '2'], {})
    """
    check_batches(batches, loss, USUAL)
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 1 < factor < float("inf"):
        raise SizeError(f"factor={factor!r}: write a number above 1, e.g. factor=1.25")
    model = bare(model)
    check_model(model)
    anatomy = dissect(model, _first_inputs(model, batches, loss) if example is None else example)
    connections: dict[str, Connection] = {}
    refused: dict[str, str] = {}
    for volume in anatomy.volumes:
        if volume.pinned:
            continue
        try:
            connections[volume.name] = connection_of(model, anatomy, volume)
        except NoConnection as reason:
            refused[volume.name] = str(reason)
    observed = observe(model, connections, batches, loss, ("matrix", "units"))
    refused |= {name: one.problem for name, one in observed.items() if one.problem}
    found = [
        _score(model, anatomy, volume, connections[volume.name], observed[volume.name], factor)
        for volume in anatomy.volumes
        if volume.name in connections and volume.name not in refused
    ]
    return Scores(tuple(sorted(found, key=lambda score: -score.gain_per_flop)), refused)


def _score(model: nn.Module, anatomy: Anatomy, volume: Volume, connection: Connection, seen: Observed, factor: float) -> Score:
    assert seen.matrix is not None
    assert seen.units is not None
    new = max(round(volume.count * (factor - 1)), 1)
    values = singular(seen.matrix)[1]
    norm = float(columns_of(model, connection).double().norm(dim=1).mean())
    trace = anatomy.reading.trace
    grown = Prediction(anatomy, [Choice(volume, new, R2R(), Verdict(State.ANY))])
    flops = count_flops(trace, grown.shape) - count_flops(trace, [value.shape for value in trace.values].__getitem__)
    activations = singular_values(seen.units)
    return Score(
        volume.name,
        volume.size,
        new,
        norm**2 * float(values[:new].square().sum()),
        flops,
        tuple(values.tolist()),
        effective_rank(activations),
        numerical_rank(activations),
    )


def _first_inputs(model: nn.Module, batches: Iterable[Any], loss: Loss) -> Example:
    """What the loss passes to the model for the first batch."""
    found: list[Example] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not found:
            found.append(args if not kwargs else dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments))

    with untouched(model):
        handle = model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            for batch in batches:
                loss(model, batch)
                break
        finally:
            handle.remove()
    if not found:
        raise TraceError("loss(model, batch) did not call the model: pass example=, or a loss that calls model(…)")
    return found[0]
