"""Population-based training of Ray Tune that changes sizes: a trial restores another one's checkpoint, and grows to its size.

    def train(config):
        model = build()                                  # the smallest size, in every trial
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
        sizes = [outgrow.Widen("0", to=config["width"])]
        outgrow.ray.restore(model, example, sizes, optimizer)
        for group in optimizer.param_groups:             # a checkpoint brings the rates of the trial that wrote it
            group["lr"] = config["lr"]
        while True:
            …
            outgrow.ray.report({"loss": loss}, model, optimizer)

When the scheduler replaces a trial by a better one, Ray starts `train` again with the winner's checkpoint and a changed
configuration. `restore` gives the newly built model the winner's shapes and values, and the optimizer its state, then grows
both exactly to the sizes of the configuration. A size is never reduced: where the winner is larger, its size stays. Ray is
imported only inside a trial of Ray.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from torch import nn

from outgrow.engine.grow import grow
from outgrow.errors import CheckpointError, MissingError, SizeError
from outgrow.model.example import Example
from outgrow.model.unwrap import as_list
from outgrow.recipes.find_stack import stacks_in
from outgrow.requests import Deepen, Widen
from outgrow.saving.atomic_write import Path
from outgrow.saving.trained_state import read_trained, write_trained
from outgrow.transforms.widen.choose_volumes import requested
from outgrow.transforms.widen.list_volumes import volumes
from outgrow.wrong_arguments import usage

FILE = "outgrow.pt"


def _tune() -> Any:
    try:
        return import_module("ray.tune")
    except ImportError as error:
        raise MissingError(f"outgrow.ray needs Ray Tune: pip install outgrow[ray] ({error})") from error


@usage("outgrow.ray.restore(model, example, [outgrow.Widen('0', to=config['width'])], optimizer)")
def restore(
    model: nn.Module,
    example: Example,
    sizes: Sequence[Widen | Deepen],
    optimizer: Any = None,
    *,
    checkpoint: Any = None,
    seed: int = 0,
) -> Any:
    """Load the checkpoint of the trial, if it has one, and grow the model exactly to its own sizes. Returns `extra` or None.

    Args:
        model: newly built, at the size from which all trials start.
        example: an input of the model, as for `outgrow.grow`.
        sizes: of this trial's configuration: `outgrow.Widen(…, to=…)` and `outgrow.Deepen(layers=…)`. What is as large
            already is left as it is.
        optimizer: one or several, made for this model; their state is restored and grows too. Set learning rates after this
            call.
        checkpoint: a checkpoint of Ray, or a folder; by default that of the trial (`ray.tune.get_checkpoint()`).
        seed: for the values that growths draw.

    Example:
        >>> import torch, outgrow
        >>> def build():
        ...     return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> x, winner, folder = torch.randn(5, 4), build(), tempfile.mkdtemp()
        >>> growth = outgrow.widen(winner, x, "0", to=12)
        >>> write_trained(os.path.join(folder, FILE), winner, [])
        >>> model = build()
        >>> restore(model, x, [Widen("0", to=16)], checkpoint=folder)
        >>> model[0].out_features, torch.allclose(model(x), winner(x), atol=1e-5)
        (16, True)
    """
    optimizers, extra = as_list(optimizer), None
    for request in sizes:
        _check(request)
    found = checkpoint if checkpoint is not None else _tune().get_checkpoint()
    if hasattr(found, "as_directory"):
        with found.as_directory() as folder:
            extra = _read(folder, model, optimizers)
    elif found is not None:
        extra = _read(found, model, optimizers)
    for request in sizes:
        wanted = _beyond(model, example, request)
        if wanted is not None:
            grow(model, example, wanted, optimizer=optimizers or None, seed=seed)
    return extra


@usage("outgrow.ray.report({'loss': loss}, model, optimizer)")
def report(metrics: dict[str, Any], model: nn.Module, optimizer: Any = None, *, extra: Any = None) -> None:
    """Report metrics and the number of parameters to Ray Tune, with a checkpoint of the model, its growths and its optimizers.

    extra: further plain values and tensors, which `restore` returns.
    """
    tune = _tune()
    count = sum(parameter.numel() for parameter in model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        write_trained(os.path.join(folder, FILE), model, as_list(optimizer), extra)
        tune.report({"parameters": count, **metrics}, checkpoint=tune.Checkpoint.from_directory(folder))


def _read(folder: Path, model: nn.Module, optimizers: Sequence[Any]) -> Any:
    path = os.path.join(os.fspath(folder), FILE)
    if not os.path.exists(path):
        raise CheckpointError(f"the checkpoint holds no file {FILE}: write checkpoints with outgrow.ray.report")
    return read_trained(path, model, optimizers)


def _check(request: Any) -> None:
    if isinstance(request, Widen) and request.to is not None:
        return
    if isinstance(request, Deepen) and not request.after:
        return
    raise SizeError(
        f"{request!r} does not say the size at the end: write outgrow.Widen(…, to=…) or outgrow.Deepen(layers=…), since the "
        "checkpoint may be of any size"
    )


def _beyond(model: nn.Module, example: Example, request: Widen | Deepen) -> Widen | Deepen | None:
    """The part of a request that is larger than the model; None if nothing is. What can't grow is left to the growth."""
    if isinstance(request, Deepen):
        stacks = stacks_in(model)
        lengths = [stacks[request.stack]] if request.stack in stacks else list(stacks.values())
        return None if len(lengths) == 1 and lengths[0] >= (request.layers or 0) else request
    chosen = [volume for volume in volumes(model, example, request.outputs) if volume.growable and requested(volume, request)]
    smaller = [volume.name for volume in chosen if volume.size < (request.to or 0)]
    if chosen and not smaller:
        return None
    return request if len(smaller) == len(chosen) else replace(request, where=tuple(smaller))
