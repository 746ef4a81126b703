"""The result of `outgrow.scores`: volumes and places, the best per FLOP first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from outgrow.errors import SizeError
from outgrow.text.tables import plain_table, rounded

WIDTH = 118


@dataclass(frozen=True)
class Score:
    """One volume. new: the number of new units that are scored. flops: what they add to one pass on the example.

    gain: the decrease of the loss per learning rate, to first order. singular_values: of the connection's matrix, the largest
    first; those that new units use, where the matrix is not built (see `scoring/silent_units.py`). rank, numerical_rank: of the
    units' activations, by entropy, and as the number of singular values above 1% of the largest; None where they are not
    measured.
    """

    volume: str
    size: int
    new: int
    gain: float
    flops: int
    singular_values: tuple[float, ...]
    rank: float | None
    numerical_rank: int | None
    kind: str | None = None
    grain: int = 1  # what one unit adds to the size

    @property
    def gain_per_flop(self) -> float:
        return self.gain / max(self.flops, 1)


@dataclass(frozen=True)
class PlaceScore:
    """One place: a copy of one of the model's blocks behind `place`. zeroed: its tensors that are zero at first.

    gain: the decrease of the loss per learning rate, to first order, by training the zeroed tensors. flops: of the new block.
    """

    place: str
    gain: float
    flops: int
    zeroed: tuple[str, ...]

    @property
    def gain_per_flop(self) -> float:
        return self.gain / max(self.flops, 1)


@dataclass(frozen=True, repr=False)
class Scores:
    """The result of `scores`: volumes, the best per FLOP first, and reasons for volumes without a score; the same for places.

    Example:
        >>> import torch, outgrow
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> batches = [(torch.randn(16, 4), torch.randn(16, 2))]
        >>> found = outgrow.scores(model, batches, lambda model, batch: (model(batch[0]) - batch[1]).square().mean())
        >>> found["0"].new, found["0"].flops, found.best
        (2, 384, '0')
    """

    volumes: tuple[Score, ...]
    refused: dict[str, str]
    places: tuple[PlaceScore, ...] = ()
    refused_places: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Score | PlaceScore:
        for score in self.volumes:
            if score.volume == name:
                return score
        for place in self.places:
            if place.place == name:
                return place
        raise KeyError(self._missing(name))

    def _missing(self, name: str) -> str:
        for reasons in (self.refused, self.refused_places):
            if name in reasons:
                return f"{name!r} has no score: {reasons[name]}"
        known = [*(score.volume for score in self.volumes), *(place.place for place in self.places)]
        return f"no volume or place with a score is called {name!r}: there are {', '.join(known) or 'none'}"

    @property
    def best(self) -> str:
        """The volume with the largest gain per FLOP."""
        if not self.volumes:
            raise SizeError("no volume has a score: " + "; ".join(f"{name}: {why}" for name, why in self.refused.items()))
        return self.volumes[0].volume

    @property
    def best_place(self) -> str:
        """The place with the largest gain per FLOP."""
        if not self.places:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.refused_places.items())
            raise SizeError(f"no place has a score: {reasons or 'the model has no blocks that could be copied'}")
        return self.places[0].place

    def __str__(self) -> str:
        parts = [_volumes(self.volumes)] if self.volumes or not self.places else []
        parts += [f"{name}: {reason}" for name, reason in self.refused.items()]
        if self.places:
            parts += [*([""] if parts else []), _places(self.places)]
        parts += [f"behind {name}: {reason}" for name, reason in self.refused_places.items()]
        return "\n".join(parts)

    __repr__ = __str__

    def to_json(self) -> dict[str, Any]:
        """The scores as plain JSON values."""
        data: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        for score, row in zip(self.volumes, data["volumes"], strict=True):
            row["gain_per_flop"] = score.gain_per_flop
        for place, row in zip(self.places, data["places"], strict=True):
            row["gain_per_flop"] = place.gain_per_flop
        return data


def _volumes(scores: Sequence[Score]) -> str:
    header = ("volume", "size", "gain", "FLOPs", "gain per GFLOP", "rank of activations")
    rows = [
        (
            score.volume,
            f"{score.size} → {score.size + score.new * score.grain}",
            *_figures(score),
            "–" if score.rank is None else f"{score.rank:.1f} of {score.size}",
        )
        for score in scores
    ]
    return plain_table(header, rows, WIDTH)


def _places(scores: Sequence[PlaceScore]) -> str:
    rows = [(f"behind {score.place}", *_figures(score), ", ".join(score.zeroed)) for score in scores]
    return plain_table(("new block", "gain", "FLOPs", "gain per GFLOP", "zero at first"), rows, WIDTH)


def _figures(score: Score | PlaceScore) -> tuple[str, str, str]:
    return f"{score.gain:.3g}", f"+{rounded(score.flops)}", f"{1e9 * score.gain_per_flop:.3g}"
