"""Growths in checkpoints of `torch.distributed.checkpoint`: the saved dict holds the growth history, as a tensor.

`dcp.load` fills existing tensors, so the model must have its grown shapes before. That takes two additional calls:

    dcp.save({"model": …, "optim": …, **history_state(model)}, checkpoint_id=path)

    regrow(model, path)                      # shapes: read only the history, replay it, shard again what was sharded
    optimizer = AdamW(model.parameters())
    dcp.load({"model": …, "optim": …}, checkpoint_id=path)      # values

The history is JSON in a uint8 tensor under the key `outgrow.history`. Further tensors hold the values that no state dict has:
buffers with persistent=False that a growth has changed, and the remaining changes of faded widenings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outgrow.apply.weight_fades import STORED
from outgrow.distributed.fsdp import gathered
from outgrow.errors import CheckpointError
from outgrow.model.unwrap import bare
from outgrow.saving.atomic_write import Path
from outgrow.saving.growths_in_state_dict import KEY, all_entries, unpack
from outgrow.saving.replay_growths import BUFFER
from outgrow.saving.reshape_for_checkpoint import reshaping


def history_state(model: nn.Module) -> dict[str, Tensor]:
    """The growths of a model for a distributed checkpoint, besides its state dict: a few small tensors.

    Example:
        >>> import outgrow
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> growth = outgrow.widen(model, torch.zeros(1, 4), "0", to=12)
        >>> {name: tensor.dtype for name, tensor in history_state(model).items()}
        {'outgrow.history': torch.uint8}
    """
    return all_entries(bare(model))


def regrow(model: nn.Module, path: Path) -> nn.Module:
    """Give a newly built small model the shapes of a distributed checkpoint; load its values after this.

    Call it on every rank, before the optimizer is made. DistributedDataParallel wrappers stay usable, and a model that was
    sharded with `outgrow.shard` is sharded again. Returns the model.

    Raises CheckpointError, and leaves the model unchanged, if the checkpoint has no growth history or does not fit.
    """
    state, inner = _read(path), bare(model)
    with gathered([inner], []) as shards, reshaping(inner) as journal:
        unpack(inner, state, journal)
        shards.again()
    return model


def _read(path: Path) -> dict[str, Tensor]:
    """The growth history and its tensors; nothing else is read."""
    from torch.distributed.checkpoint import filesystem, state_dict_loader

    try:
        stored = filesystem.FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:
        raise CheckpointError(f"{path} can't be read as a distributed checkpoint: {type(error).__name__}: {error}") from error
    if KEY not in stored:
        raise CheckpointError(
            f"{path} has no growth history: save it with dcp.save({{…, **outgrow.dcp.history_state(model)}}, …)"
        )
    sizes: dict[str, Any] = {name: each for name, each in stored.items() if name == KEY or name.startswith((STORED, BUFFER))}
    tensors: dict[str, Any] = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in sizes.items()}
    state_dict_loader.load(tensors, checkpoint_id=path)
    return tensors
