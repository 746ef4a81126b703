"""Read a file of `Run.save`: completely, to continue the run, or only its model.

The file holds the weights with the growth history (see `saving/growths_in_state_dict.py`), so that `outgrow.load` and `outgrow
inspect` accept it like a file of `outgrow.save`. It is read by `torch.load(weights_only=True)`: nothing in it can run code.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from outgrow.distributed.fsdp import gathered
from outgrow.errors import CheckpointError
from outgrow.model.unwrap import unwrapped_module
from outgrow.saving.atomic_write import Path, check_path
from outgrow.saving.checksums import TABLE, check_seal
from outgrow.saving.growth_record import EARLIER, GrowthRecord, check_version
from outgrow.saving.growths_in_state_dict import KEY, record_in
from outgrow.saving.model_contents import not_finite, unique
from outgrow.saving.replay_growths import refuse
from outgrow.saving.reshape_for_checkpoint import reshaping
from outgrow.saving.run_state import load_weights
from outgrow.saving.torch_files import load_safely
from outgrow.saving.weights_file import Description, opened

PLAIN = "model.load_state_dict(torch.load(path, weights_only=True)) loads a state dict, from a pickle file that you trust"

DIVERGED = "go back to a file from before training diverged (run.load); run.save(path, finite=False) writes the run as it is"

OTHERS = {  # a key in files of another kind, and the use of such a file
    "pytorch-lightning_version": "it is a Lightning checkpoint. trainer.fit(model, ckpt_path=path) resumes from it, and "
    "outgrow.lightning.load(model, path) loads only its weights",
    "luggage": "it belongs to a checkpoint folder of a Trainer or of Accelerate, and holds only the growths. Resume from its "
    "folder with trainer.train(resume_from_checkpoint=folder) or accelerator.load_state(folder)",
}


def read_run(path: Path, checksums: bool = True, families: bool = False) -> dict[str, Any]:
    """Read a file of `Run.save`. checksums: compare its contents with the checksums in it, if it has any.

    families: also read a file of `Family.save`, which has the same entries and those of its smaller members.
    """
    check_path(path, "run.load('run.pt')")
    if os.path.isdir(path):
        raise CheckpointError(f"{path} is a folder: name the file in it that Run.save wrote")
    if not os.path.isfile(path):
        raise CheckpointError(f"{path}: there is no such file")
    try:
        _refuse_weights(path)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror or error}") from error
    try:
        state = load_safely(path)
    except Exception as error:
        raise CheckpointError(
            f"{path} is damaged, or was not written by Run.save ({type(error).__name__}: {error}). {PLAIN}"
        ) from error
    facts = state if isinstance(state, dict) else {}
    for key, explanation in OTHERS.items():
        if key in facts:
            raise CheckpointError(f"{path} was not written by Run.save: {explanation}")
    if "outgrow" not in facts:
        raise CheckpointError(f"{path} was not written by Run.save, so it holds no run. {PLAIN}")
    if "family" in facts and not families:
        raise CheckpointError(f"{path} was written by Family.save: outgrow.Family.load(model, path) continues from it")
    check_version(facts.get("version"), os.fspath(path))
    if checksums:
        check_seal(facts, path)
    return facts


def _refuse_weights(path: Path) -> None:
    """Raise if a file is safetensors, whatever its name: such a file begins with the length of its header, which is JSON."""
    with open(path, "rb") as file:
        if file.read(9)[8:] != b"{":
            return
    with opened(path) as weights:
        ours = "outgrow" in (weights.metadata() or {})
    if ours:
        raise CheckpointError(
            f"{path} was written by outgrow.save, and not by Run.save: it holds a model and its growths, but no optimizer and "
            "no step to continue from. outgrow.load(model, path) loads the model; make its optimizer and its run after that"
        )
    raise CheckpointError(
        f"{path} holds only weights, and no run: "
        "model.load_state_dict(safetensors.torch.load_file(path)) loads them into a model of their shapes"
    )


def load_model(model: nn.Module, path: Path, checksums: bool = True) -> nn.Module:
    """Give a model, newly built or already grown, the shapes and weights of a run's model; returns the model."""
    inner, state = unwrapped_module(model), dict(_model_in(path, checksums)[0])
    refuse(f"{path} holds values that are not finite", not_finite(inner, _tensors(state)), EARLIER)
    with gathered([inner], []) as shards, reshaping(inner, path) as journal:
        try:
            load_weights(inner, state, journal)
            shards.again()
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
    return model


def refuse_not_finite(models: Sequence[nn.Module], path: Path, way_out: str = DIVERGED) -> None:
    """Raise if a model holds NaN or infinity: it must not overwrite the file of a run or a family."""
    for model in map(unwrapped_module, models):
        bad = not_finite(model, _tensors(model.state_dict()))
        refuse(f"{path} was not written: the model holds values that are not finite", bad, way_out)


def describe_run(path: Path, checksums: bool = True) -> Description:
    """The description of the model in a run's file, which is read completely."""
    state, kind, verified = _model_in(path, checksums)
    own, aliases = unique({name: value for name, value in _tensors(state).items() if name != KEY})
    record = record_in(state, os.fspath(path)) if KEY in state else GrowthRecord(kind)
    tensors = {name: (_kind(value), tuple(value.shape)) for name, value in own.items()}
    about = Description(os.fspath(path), record.model, record.histories, tensors, aliases, record.gates, record.drifts)
    return replace(about, verified=verified)


def _model_in(path: Path, checksums: bool = True) -> tuple[dict[str, Any], str, bool]:
    """The state dict of the model in a run's file, the name of its class, and whether checksums were compared."""
    state = read_run(path, checksums, families=True)
    if not isinstance(state.get("model"), dict):
        raise CheckpointError(f"{path} is damaged: it holds no model: {EARLIER}")
    return state["model"], str(state.get("class", "a model")), checksums and TABLE in state


def _tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _kind(value: Tensor) -> str:
    """Safetensors' name of a dtype: float32 is F32, int64 I64, bool BOOL."""
    name = str(value.dtype).removeprefix("torch.")
    for long, short in (("bfloat", "BF"), ("complex", "C"), ("float", "F"), ("uint", "U"), ("int", "I")):
        if name.startswith(long):
            return short + name.removeprefix(long).upper()
    return name.upper()
