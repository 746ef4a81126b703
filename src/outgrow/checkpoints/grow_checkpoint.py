"""Grow a checkpoint on the disk: `outgrow.grow_checkpoint`, the engine of the command `outgrow grow`.

    headers and configuration → plan on the meta device → tensors streamed into a draft → verification → rename

The draft is a directory beside the new one. It has no config.json until all weights are complete, and takes the new name at
the very end, by one rename. After an interruption the same call goes on from the draft.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable

import torch

from outgrow.checkpoints.beside_weights import copied_files, model_card, plan_record, write_beside
from outgrow.checkpoints.build_on_meta import class_of
from outgrow.checkpoints.checkpoint_report import CheckpointGrowth, bytes_of, sizes
from outgrow.checkpoints.compare_checkpoints import MODES, Comparison, compare
from outgrow.checkpoints.example_file import GivenExample, given_example
from outgrow.checkpoints.plan_checkpoint import CheckpointPlan, plan_checkpoint
from outgrow.checkpoints.read_checkpoint import INDEX, read_checkpoint
from outgrow.checkpoints.stream_tensors import Stream
from outgrow.checkpoints.tensor_bytes import open_files
from outgrow.checkpoints.training_state import TrainingState, read_training_state, training_files
from outgrow.checkpoints.write_shards import DONE, Advance, Draft, Shard, index_of, lay_out, locked, write_shards
from outgrow.errors import CheckpointError, VerifyError
from outgrow.model.example import Example
from outgrow.transforms.all_transforms import Transform
from outgrow.wrong_arguments import usage

SUFFIX = ".outgrow-draft"
SPARE = 2**24  # bytes for the files beside the weights
Path = str | os.PathLike[str]


@usage("outgrow.grow_checkpoint('small', outgrow.Widen('*.mlp.*', factor=1.5), out='large')")
def grow_checkpoint(
    checkpoint: Path,
    *transforms: Transform,
    out: Path,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    shard_size: int | str = "5GB",
    jobs: int = 1,
    verify: str = "brief",
    training_state: bool = False,
    example: GivenExample | None = None,
    command: str = "",
    progress: Callable[[int], Advance] | None = None,
) -> CheckpointGrowth:
    """Grow a Transformers checkpoint on the disk into a larger one that computes the same, and loads without outgrow.

    Only one tensor at a time is in memory, whatever the size of the model. With the same seed, the values are those that
    `outgrow.grow` gives the loaded model (in float32, rounded once if the checkpoint has fewer bits).

    Args:
        checkpoint: a directory with config.json and safetensors files.
        transforms: what to grow, as for `outgrow.grow`; exact methods without fades.
        out: the new directory. It must not exist, or be empty. It appears when everything is complete.
        seed: for drawn values.
        dtype: of the new floating-point tensors; by default that of the old ones.
        shard_size: largest size of a file, in bytes or as text ("5GB", "500MB").
        jobs: tensors that are computed at the same time.
        verify: "brief" compares the old and the new model cut to a few layers with their real weights, "full" compares the
            whole models, "none" nothing.
        training_state: also grow the optimizer's state of a Trainer's checkpoint, and copy the other files of the training
            state, so that `Trainer.train(resume_from_checkpoint=out)` goes on.
        example: arguments of the forward method by name, or a file with them (.safetensors, or .pt with a dict of tensors); by
            default the inputs follow from the configuration. Parts of the model that it does not run do not grow.
        command: for the model card.
        progress: called with the total number of bytes; returns a function that is called with the bytes that were written.

    Example:
        >>> grow_checkpoint("nowhere", out="large")
        Traceback (most recent call last):
        ...
        outgrow.errors.CheckpointError: nowhere: there is no such directory
    """
    if verify not in MODES:
        raise CheckpointError(f"verify={verify!r}: write one of {', '.join(map(repr, MODES))}")
    if type(jobs) is not int or jobs < 1:
        raise CheckpointError(f"jobs={jobs!r}: write a number of threads, a whole number above 0")
    limit, started = bytes_of(shard_size), time.perf_counter()
    old = read_checkpoint(checkpoint)
    target = check_out(out)
    inputs = given_example(example, class_of(old))
    plan = plan_checkpoint(old, transforms, seed, inputs, dtype)
    state = read_training_state(plan) if training_state else None
    state_bytes = 0 if state is None else state.bytes
    shards = lay_out(plan.tensors, limit)
    draft = Draft(target + SUFFIX, _identity(plan, shards, training_state))
    with locked(draft.folder):
        try:
            _check_disk(plan.bytes + state_bytes, draft)
            _write(plan, draft, shards, jobs, progress(plan.bytes + state_bytes) if progress else _no_progress, state)
            comparison = _finish(plan, draft, shards, target, verify, inputs, command)
        except BaseException as error:
            raise _with_way_out(error, draft, shards) from error
    names = tuple(shard.name for shard in shards)
    taken = training_files(old.folder) if state is not None else []
    left = tuple(name for name in copied_files(old.folder)[1] if name not in taken)
    seconds = time.perf_counter() - started
    return CheckpointGrowth(plan, target, names, comparison, seconds, left, tuple(taken), state_bytes)


def _no_progress(size: int) -> None:
    """No progress is shown."""


def _write(
    plan: CheckpointPlan,
    draft: Draft,
    shards: list[Shard],
    jobs: int,
    advance: Advance,
    state: TrainingState | None,
) -> None:
    """Write the weights into the draft, and then the training state, which is always written from its beginning."""
    draft.begin(shards)
    with open_files(plan.checkpoint.files) as files:
        stream = Stream(plan, files, jobs)
        write_shards(draft, shards, stream.write, stream.memory, jobs, advance)
    if state is not None:
        state.write(draft.folder, advance)


def _finish(
    plan: CheckpointPlan, draft: Draft, shards: list[Shard], target: str, verify: str, example: Example | None, command: str
) -> Comparison | None:
    """Compare, write the files beside the weights, and give the draft its name."""
    index = index_of(shards)
    if index is not None:
        with open(os.path.join(draft.folder, INDEX), "wb") as file:
            file.write(index)
    comparison = compare(plan, draft.folder, verify, example)
    if comparison is not None and not comparison.agrees:
        raise VerifyError(f"the grown checkpoint does not compute the same: {comparison}")
    checks = [] if comparison is None else [str(comparison)]
    write_beside(plan, draft.folder, model_card(plan, command or "outgrow.grow_checkpoint(…)", checks))
    os.unlink(os.path.join(draft.folder, DONE))
    os.replace(draft.folder, target)
    return comparison


def _identity(plan: CheckpointPlan, shards: list[Shard], training_state: bool) -> str:
    """A text that is equal only for the same growth of the same files."""
    files = [(path, os.path.getsize(path), os.stat(path).st_mtime_ns) for path in plan.checkpoint.files]
    headers = [shard.header[8:].decode() for shard in shards]
    text = json.dumps([plan_record(plan), files, [shard.name for shard in shards], headers, training_state], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def check_out(out: Path) -> str:
    """The path of the new directory; CheckpointError unless it can be created."""
    target = os.path.abspath(os.fspath(out))
    if os.path.isdir(target) and os.listdir(target):
        raise CheckpointError(f"{out} exists and is not empty: name another directory, or delete this one")
    if os.path.exists(target) and not os.path.isdir(target):
        raise CheckpointError(f"{out} is a file: name a directory")
    if not os.path.isdir(os.path.dirname(target)):
        raise CheckpointError(f"{out}: there is no directory {os.path.dirname(target)}: create it first")
    return target


def _check_disk(size: int, draft: Draft) -> None:
    free = shutil.disk_usage(os.path.dirname(draft.folder)).free + _used(draft.folder)
    if free < size + SPARE:
        raise CheckpointError(
            f"the disk of {os.path.dirname(draft.folder)} has {sizes(free)} left, and the new checkpoint needs "
            f"{sizes(size + SPARE)}: free some space, or name a directory on another disk"
        )


def _used(folder: str) -> int:
    """Bytes that files of a directory take on the disk."""
    if not os.path.isdir(folder):
        return 0
    return sum(getattr(entry.stat(), "st_blocks", 0) * 512 for entry in os.scandir(folder) if entry.is_file())


def _with_way_out(error: BaseException, draft: Draft, shards: list[Shard]) -> BaseException:
    """An error with the state of the draft: what is there, and how to go on."""
    if isinstance(error, VerifyError):
        shutil.rmtree(draft.folder, ignore_errors=True)
        return error
    if not os.path.isdir(draft.folder) or not os.listdir(draft.folder):
        return error
    total = sum(tensor.size for shard in shards for tensor, _ in shard.places.values())
    made = sum(tensor.size for shard in shards for tensor, _ in shard.places.values() if tensor.name in draft.done)
    state = (
        f"{sizes(made)} of {sizes(total)} are in {draft.folder}, which is not a checkpoint: the same command goes on from "
        "there; delete it to give up"
    )
    if isinstance(error, KeyboardInterrupt):
        return KeyboardInterrupt(f"stopped; {state}")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CheckpointError(f"the disk is full; {state}")
    if isinstance(error, (CheckpointError, OSError)):
        return CheckpointError(f"{error}; {state}")
    return error
