"""What can grow in a checkpoint, before it grows: `outgrow.inspect_checkpoint`, and `outgrow inspect DIRECTORY`."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outgrow.checkpoints.build_on_meta import build_on_meta, class_of, config_of
from outgrow.checkpoints.checkpoint_report import sizes
from outgrow.checkpoints.example_file import GivenExample, given_example
from outgrow.checkpoints.growth_options import GrowthOption, cut_to_few_layers, find_options
from outgrow.checkpoints.read_checkpoint import Checkpoint, read_checkpoint, read_config
from outgrow.checkpoints.training_state import OPTIMIZER, training_files
from outgrow.methods.group_reasons import grouped_reasons
from outgrow.text.plurals import counted
from outgrow.text.tables import make_table
from outgrow.wrong_arguments import usage

HEADER = ("what", "size", "steps", "fields of the configuration")


@dataclass(frozen=True)
class CheckpointOptions:
    """What can grow in a checkpoint. files: number of files with weights (0 if there is only a configuration), and their bytes.

    options: kinds of units and lengths of stacks, each with the steps that work and the reason if there are none.
    """

    folder: str
    model: str
    parameters: int
    files: tuple[int, int]
    training_state: tuple[str, ...]
    options: tuple[GrowthOption, ...]

    def __getitem__(self, request: str) -> GrowthOption:
        """The option of a kind of units, or of a stack."""
        return next(option for option in self.options if option.request == request)

    def __str__(self) -> str:
        rows = [(one.name, _sizes(one), one.steps or "–", one.config or "–")
                for one in self.options]  # fmt: skip
        units = [(one.name, one.unit) for one in self.options if one.unit]
        reasons = [(one.name, grouped_reasons(one.reason)) for one in self.options if one.reason]
        tables = (HEADER, rows), (("what", "one unit is"), units), (("what", "why not"), reasons)
        parts = [self._title(), *(make_table(header, lines) for header, lines in tables if lines)]
        return "\n\n".join([*parts, _explained(self.options)])

    def _title(self) -> str:
        count, size = self.files
        weights = f"{sizes(size)} in {counted(count, 'file')}" if count else "no weights, only a configuration"
        lines = [f"{self.folder}: {self.model}, {self.parameters:,} parameters, {weights}"]
        if OPTIMIZER in self.training_state:
            lines.append(f"training state (--training-state grows it too): {', '.join(self.training_state)}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        options = [{**dataclasses.asdict(option), "savable": option.savable} for option in self.options]
        data: dict[str, Any] = json.loads(json.dumps({**dataclasses.asdict(self), "options": options}))
        return data


def _sizes(option: GrowthOption) -> str:
    return ", ".join(f"{size:,}" for size in option.sizes)


def _explained(options: tuple[GrowthOption, ...]) -> str:
    """How to write the first step that works as a command."""
    first = next((option for option in options if option.savable and option.request in ("mlp", "heads", "width")), None)
    sizes_in = "Sizes that work were found by trials on the configuration, cut to a few layers; "
    if first is None:
        return sizes_in + "growths that no configuration describes are possible in memory: outgrow.grow and outgrow.save"
    step = first.steps.partition(" (")[0].replace("× ", "x").replace(",", "")
    return sizes_in + f"e.g. outgrow grow CHECKPOINT --widen {first.request}={step} --out NEW"


@usage("outgrow.inspect_checkpoint('llama')")
def inspect_checkpoint(checkpoint: str | os.PathLike[str], example: GivenExample | None = None) -> CheckpointOptions:
    """What can grow in a Transformers checkpoint, by which steps, and whether the result can be saved; nothing is grown.

    Only config.json is read, and the headers of the weights if there are any: a model of any size takes seconds.

    Args:
        checkpoint: a directory with config.json.
        example: arguments of the forward method by name, or a file with them, as for `outgrow.grow_checkpoint`.

    Example:
        >>> inspect_checkpoint("nowhere")
        Traceback (most recent call last):
        ...
        outgrow.errors.CheckpointError: nowhere: there is no such directory
    """
    folder = os.fspath(checkpoint)
    found = _described(folder)
    kind, config = class_of(found), config_of(found)
    parameters = sum(parameter.numel() for parameter in build_on_meta(kind, config).parameters())
    options = find_options(cut_to_few_layers(kind, config, given_example(example, kind)))
    files = len(found.files), found.bytes
    return CheckpointOptions(folder, kind.__name__, parameters, files, tuple(training_files(folder)), tuple(options))


def _described(folder: str) -> Checkpoint:
    """The checkpoint; without tensors if the directory has no weights."""
    if os.path.isdir(folder) and not any(name.endswith((".safetensors", ".bin")) for name in os.listdir(folder)):
        config: Mapping[str, Any] = read_config(folder)
        return Checkpoint(folder, config, {})
    return read_checkpoint(folder)
