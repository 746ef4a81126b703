"""Grow the training state beside a Trainer's weights: optimizer.pt follows the growth, the other files are copied.

Moments of new entries and blocks start as `outgrow.grow` starts them in memory (see `optimizers/state_rules.py`): the edits of
each parameter act on its moments. Parameters are numbered as an optimizer numbers them that a Trainer makes for the grown
model, so `Trainer.train(resume_from_checkpoint=NEW)` goes on without outgrow. The scheduler has one value per group of
parameters, and a growth keeps the groups.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outgrow.apply.grow_tensor import grown_moment
from outgrow.checkpoints.build_on_meta import build_on_meta, class_of, config_of
from outgrow.checkpoints.new_values import Copied, Stored, Value, origin
from outgrow.checkpoints.optimizer_file import OptimizerFile, load_plain, read_optimizer_file
from outgrow.checkpoints.optimizer_groups import check_order, grown_groups, names_of, numbered, rules_of, trainer_groups
from outgrow.checkpoints.plan_checkpoint import CheckpointPlan
from outgrow.checkpoints.read_checkpoint import StoredTensor
from outgrow.checkpoints.tensor_bytes import Files, open_files, read_tensor
from outgrow.checkpoints.tensor_names import first_names
from outgrow.checkpoints.write_torch_file import LaterTensor, write_torch_file
from outgrow.errors import CheckpointError
from outgrow.optimizers.state_rules import StateRule

OPTIMIZER, SCHEDULER, STATE = "optimizer.pt", "scheduler.pt", "trainer_state.json"
COPIED = r"scheduler\.pt|training_args\.bin|rng_state(_\d+)?\.pth|scaler\.pt"
BEST = ("best_metric", "best_model_checkpoint", "best_global_step")
SHARDED: Mapping[str, str] = {
    r"global_step\d+|zero_pp_rank_.*": "DeepSpeed has written it in parts, one per process",
    r"optimizer_\d+|optimizer\.bin|pytorch_model_fsdp.*": "FSDP has written it in a format of its own",
    r"rank\d+-of-\d+-optimizer\.pt|optimizer\.pt_.*": "it is in parts, one per process",
}
UNSHARDED = "resume once without sharding and save, or grow during training with the callback outgrow.transformers.Grow"


def training_files(folder: str) -> list[str]:
    """Names of the files with training state in a Trainer's checkpoint that a growth takes along."""
    return sorted(name for name in os.listdir(folder) if name in (OPTIMIZER, STATE) or re.fullmatch(COPIED, name))


@dataclass(frozen=True, eq=False)
class TrainingState:
    """The training state of a planned growth, checked. values: of each new parameter; groups: names of the new parameters."""

    plan: CheckpointPlan
    file: OptimizerFile
    rules: Mapping[str, StateRule]
    numbers: Mapping[str, int]  # of the old parameters
    values: Mapping[str, Value]
    groups: Sequence[Sequence[str]]

    @property
    def bytes(self) -> int:
        """Bytes of the new optimizer.pt."""
        with open_files(()) as files:
            tensors = [value for state in self._state(files).values() for value in state.values()]
        return sum(value.size for value in tensors if isinstance(value, LaterTensor))

    def write(self, folder: str, advance: Callable[[int], None] = lambda size: None) -> None:
        """Write all files with training state into the directory of the new checkpoint."""
        old = self.plan.checkpoint.folder
        with open_files((self.file.path,)) as files:
            tree = {"state": self._state(files), "param_groups": numbered(_later(self.file.groups, files), self._names)}
            write_torch_file(os.path.join(folder, OPTIMIZER), tree, advance)
        for name in training_files(old):
            if name not in (OPTIMIZER, STATE):
                shutil.copyfile(os.path.join(old, name), os.path.join(folder, name))
        _write_progress(os.path.join(old, STATE), os.path.join(folder, STATE))

    @property
    def _names(self) -> list[list[str]]:
        return [list(group) for group in self.groups]

    def _state(self, files: Files) -> dict[int, dict[str, Any]]:
        """The new state by number of the parameter. Parameters without state (of new blocks) get theirs at their first step."""
        found = {}
        for number, name in enumerate(name for group in self.groups for name in group):
            old = self.file.state.get(self.numbers[origin(self.values[name])])
            if old and not (self._counts_per_parameter and _is_new(self.values[name])):
                found[number] = {key: self._entry(key, value, self.values[name], files) for key, value in old.items()}
        return found

    @property
    def _counts_per_parameter(self) -> bool:
        return any(rule.word == "step count" for rule in self.rules.values())

    def _entry(self, key: str, stored: Any, value: Value, files: Files) -> Any:
        rule = self.rules[key]
        if not isinstance(stored, StoredTensor) or rule.kind == "scalar":
            return _later(stored, files)
        shape = _shape_after(value, stored.shape)
        return LaterTensor(stored.dtype, shape, partial(_moment, value, stored, rule, files))


def read_training_state(plan: CheckpointPlan) -> TrainingState:
    """Read and check the training state of a checkpoint that is to be grown; CheckpointError with the reason."""
    folder = plan.checkpoint.folder
    _check_files(folder)
    file = read_optimizer_file(os.path.join(folder, OPTIMIZER))
    model = build_on_meta(class_of(plan.checkpoint), config_of(plan.checkpoint))
    rules = rules_of(file) if file.state else {}
    names = names_of(file, model, rules)
    check_order(names, model, file.path)
    _check_scheduler(os.path.join(folder, SCHEDULER), len(file.groups))
    state, first = plan.model.state_dict(keep_vars=True), first_names(plan.model)
    values = {first[id(state[tensor.alias])]: tensor.value for tensor in plan.tensors}
    groups = grown_groups(names, plan.model, {name: origin(value) for name, value in values.items()})
    if names == trainer_groups(model) and groups != trainer_groups(plan.model):
        raise CheckpointError(f"{file.path}: a Trainer would group the parameters of the grown model in another way")
    numbers = {name: number for number, name in enumerate(name for group in names for name in group)}
    return TrainingState(plan, file, rules, numbers, values, groups)


def _check_files(folder: str) -> None:
    names = sorted(os.listdir(folder))
    for pattern, reason in SHARDED.items():
        found = [name for name in names if re.fullmatch(pattern, name)]
        if found:
            raise CheckpointError(f"{folder}: its training state can't be grown ({found[0]}: {reason}): {UNSHARDED}")
    if OPTIMIZER not in names:
        raise CheckpointError(
            f"{folder} has no {OPTIMIZER}, so there is no training state to grow: name a Trainer's checkpoint directory "
            "(saved without save_only_model), or leave --training-state (training_state=True) out"
        )
    for name, use in ((SCHEDULER, "neither it nor the optimizer"), (STATE, "no progress")):
        if name not in names:
            raise CheckpointError(
                f"{folder} has no {name}: a Trainer that resumes would load {use} from it: copy the checkpoint again, or leave "
                "--training-state (training_state=True) out"
            )


def _check_scheduler(path: str, groups: int) -> None:
    """Raise unless a scheduler's state can be read, and belongs to an optimizer with as many groups."""
    state = load_plain(path)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} does not contain the state dict of a scheduler")
    rates = state.get("base_lrs")
    if isinstance(rates, list) and len(rates) != groups:
        raise CheckpointError(f"{path} has learning rates for {len(rates)} groups, and {OPTIMIZER} has {groups}")


def _write_progress(old: str, new: str) -> None:
    """Copy trainer_state.json without its best model, whose weights a grown model can't load."""
    with open(old, encoding="utf-8") as file:
        data = json.load(file)
    data.update({name: None for name in BEST if name in data})
    with open(new, "w", encoding="utf-8") as file:
        file.write(json.dumps(data, indent=2, sort_keys=True) + "\n")


def _later(value: Any, files: Files) -> Any:
    """A value of the old file for the new one."""
    if isinstance(value, StoredTensor):
        return LaterTensor(value.dtype, value.shape, partial(read_tensor, files, value))
    if isinstance(value, dict):
        return {key: _later(item, files) for key, item in value.items()}
    return type(value)(_later(item, files) for item in value) if isinstance(value, (list, tuple)) else value


def _is_new(value: Value) -> bool:
    """Whether a parameter belongs to a new block."""
    return isinstance(value, Copied) or (not isinstance(value, Stored) and _is_new(value.source))


def _shape_after(value: Value, shape: tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(value, Stored):
        return shape
    before = _shape_after(value.source, shape)
    return before if isinstance(value, Copied) else value.edits.shape_from(before)


@torch.no_grad()
def _moment(value: Value, stored: StoredTensor, rule: StateRule, files: Files) -> Tensor:
    """A parameter's state under one key: that of its origin, through the edits that the parameter has been through."""
    if isinstance(value, Stored):
        return read_tensor(files, stored)
    old = _moment(value.source, stored, rule, files)
    if isinstance(value, Copied):  # as `add_new_parameters` starts it where steps are not counted per parameter
        return torch.full_like(old, old.float().mean().item() if rule.start == "mean" else 0.0)
    return grown_moment(old, value.edits, rule.power, rule.start)
