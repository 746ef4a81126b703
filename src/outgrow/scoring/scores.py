"""How much new units would lower the loss, for each volume, per added FLOP.

Let new units have rows of zero, and columns of the existing columns' mean norm r along the singular vectors of the largest
singular values s_1 ≥ s_2 ≥ … of the connection's matrix (see `model/connections.py`). One step of gradient descent with rate η
on their rows lowers the loss by η·gain to first order,

    gain = r² Σ s_i²   over as many i as there are new units

and no units with columns of these norms do better (U. Evci et al., 2022: GradMax). It counts activations as if σ(a) ≈ a.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from outgrow.analysis.analyse import dissect
from outgrow.analysis.find_connections import NoConnection, columns_of, connection_of
from outgrow.analysis.unit_states import State, Verdict
from outgrow.analysis.volumes import Anatomy, Volume
from outgrow.errors import MethodError, SizeError, TraceError
from outgrow.methods.r2r import R2R
from outgrow.model.batches import drawn_again
from outgrow.model.check_arguments import check_model
from outgrow.model.compiled import uncompiled
from outgrow.model.connections import Connection, Loss, Observed, check_batches, loss_of, observe
from outgrow.model.example import Example
from outgrow.model.sandbox import untouched
from outgrow.model.unwrap import bare
from outgrow.scoring.effective_rank import effective_rank, numerical_rank, singular_values
from outgrow.scoring.new_blocks import score_places
from outgrow.scoring.ranking import Score, Scores
from outgrow.scoring.silent_units import Silent, silent_units
from outgrow.trace.flops import count_flops
from outgrow.transforms.widen.make_plan import Choice
from outgrow.transforms.widen.predict_shapes import Prediction
from outgrow.wrong_arguments import usage

USUAL = "outgrow.scores(model, batches, lambda model, batch: criterion(model(batch[0]), batch[1]))"


@usage(USUAL)
@uncompiled()
def scores(
    model: nn.Module, batches: Iterable[Any], loss: Loss, example: Example | None = None, factor: float = 1.25
) -> Scores:
    """Score each volume and each place: how much new units or a new block would lower the loss, per FLOP that they add.

    The loss and its gradient are computed on all batches in the model's present mode: once for volumes that one linear layer or
    convolution writes, several times for gated MLPs, heads and residual streams, and once for places, the last two on grown
    copies of the model. The model itself, its buffers and gradients and the random state stay as they are. Volumes and blocks
    without a score are listed with the reason.

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
    example = _first_inputs(model, batches, loss) if example is None else example
    anatomy = dissect(model, example)
    new = {volume.name: max(round(volume.count * (factor - 1)), 1) for volume in anatomy.volumes if not volume.pinned}
    plain, refused = _plain_scores(model, anatomy, batches, loss, new)
    others, refused = _other_scores(model, anatomy, example, batches, loss, {name: new[name] for name in refused})
    found, no_place = score_places(model, example, batches, loss)
    volumes = sorted([*plain, *others], key=lambda score: -score.gain_per_flop)
    return Scores(tuple(volumes), refused, tuple(sorted(found, key=lambda score: -score.gain_per_flop)), no_place)


def _plain_scores(
    model: nn.Module, anatomy: Anatomy, batches: Iterable[Any], loss: Loss, new: Mapping[str, int]
) -> tuple[list[Score], dict[str, str]]:
    """Scores of volumes with one writer, and reasons against the others."""
    connections: dict[str, Connection] = {}
    refused: dict[str, str] = {}
    for volume in anatomy.volumes:
        if volume.name in new:
            try:
                connections[volume.name] = connection_of(model, anatomy, volume)
            except NoConnection as reason:
                refused[volume.name] = str(reason)
    observed = observe(model, connections, batches, loss, ("matrix", "units"))
    refused |= {name: one.problem for name, one in observed.items() if one.problem}
    scores = [
        _plain_score(model, anatomy, volume, connections[volume.name], observed[volume.name], new[volume.name])
        for volume in anatomy.volumes
        if volume.name in connections and volume.name not in refused
    ]
    return scores, refused


def _plain_score(model: nn.Module, anatomy: Anatomy, volume: Volume, connection: Connection, seen: Observed, new: int) -> Score:
    assert seen.matrix is not None
    assert seen.units is not None
    values = torch.linalg.svdvals(seen.matrix.double().cpu())
    norm = float(columns_of(model, connection).double().norm(dim=1).mean())
    gain, activations = norm**2 * float(values[:new].square().sum()), singular_values(seen.units)
    return Score(
        volume.name,
        volume.size,
        new,
        gain,
        _added_flops(anatomy, volume, new),
        tuple(values.tolist()),
        effective_rank(activations),
        numerical_rank(activations),
        volume.kind,
    )


def _other_scores(
    model: nn.Module, anatomy: Anatomy, example: Example, batches: Iterable[Any], loss: Loss, new: Mapping[str, int]
) -> tuple[list[Score], dict[str, str]]:
    """Scores of volumes that several tensors write, on grown copies: one per kind, and one per stream."""
    groups: dict[str, dict[str, tuple[Volume, int]]] = {}
    for volume in anatomy.volumes:
        if volume.name in new:
            group = volume.name if volume.kind == "width" else f"kind {volume.kind}"
            groups.setdefault(group, {})[volume.name] = volume, new[volume.name]
    silent: dict[str, Silent] = {}
    refused: dict[str, str] = {}
    for wanted in groups.values():
        found, reasons = silent_units(model, example, wanted, batches, loss)
        silent |= found
        refused |= reasons
    scores = [
        Score(
            volume.name,
            volume.size,
            new[volume.name],
            silent[volume.name].gain,
            _added_flops(anatomy, volume, new[volume.name]),
            silent[volume.name].values,
            None,
            None,
            volume.kind,
            volume.grain,
        )
        for volume in anatomy.volumes
        if volume.name in silent
    ]
    return scores, refused


def _added_flops(anatomy: Anatomy, volume: Volume, new: int) -> int:
    trace = anatomy.reading.trace
    grown = Prediction(anatomy, [Choice(volume, new, R2R(), Verdict(State.ANY))])
    return count_flops(trace, grown.shape) - count_flops(trace, [value.shape for value in trace.values].__getitem__)


def _as_example(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Example:
    """The arguments of a call: a tuple, or a dict by name."""
    if not args or not kwargs:
        return kwargs or args
    names = inspect.signature(module.forward).parameters.values()
    if any(name.kind in (name.POSITIONAL_ONLY, name.VAR_POSITIONAL) for name in names):
        what = f"arguments both by position and by name to {type(module).__name__}, whose forward does not name all of them"
        raise TraceError(f"loss(model, batch) passes {what}: pass example=, or all arguments by name")
    bound = inspect.signature(module.forward).bind(*args).arguments
    return {**bound, **kwargs}


def _first_inputs(model: nn.Module, batches: Iterable[Any], loss: Loss) -> Example:
    """What the loss passes to the model for the first batch."""
    found: list[Example] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not found:
            found.append(_as_example(module, args, kwargs))

    with untouched(model), drawn_again(batches, 0):
        handle = model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            for batch in batches:
                loss_of(loss, model, batch)
                break
            else:
                raise MethodError("there are no batches: pass a list of at least one batch")
        finally:
            handle.remove()
    if not found:
        raise TraceError("loss(model, batch) did not call the model: pass example=, or a loss that calls model(…)")
    return found[0]
