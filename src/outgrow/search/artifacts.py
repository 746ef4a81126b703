"""The models of trials, with their growths and the state of their optimizers, in an artifact store of Optuna.

An artifact is a file like those of `Run.save`: `outgrow.load(parent, file)` grows the search's parent to the model in it. It is
written completely before the trial ends, so that a complete trial always has one.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from outgrow.errors import CheckpointError, SearchError
from outgrow.model.unwrap import as_list, bare
from outgrow.saving.run_file import read_run
from outgrow.saving.trained_state import read_trained, write_trained
from outgrow.search.objectives import DivergedError
from outgrow.search.records import Record
from outgrow.search.storages import optuna
from outgrow.text.passwords import hide_passwords

FILE = "model.pt"


class GoneError(SearchError):
    """The artifact of a trial is not in the store, or is damaged."""


class StoreError(SearchError):
    """The artifact store can't be reached, or is full."""


class MisfitError(SearchError):
    """This worker's description of the search is not the one that the study's models were made with."""


def open_store(artifacts: Any) -> Any:
    """An artifact store of Optuna; a path is a folder, which is created."""
    if isinstance(artifacts, str) and "://" in artifacts:
        raise SearchError(
            f"artifacts={hide_passwords(artifacts)!r} is no folder: pass an artifact store of Optuna, e.g. "
            "optuna.artifacts.Boto3ArtifactStore('my-bucket')"
        )
    if not isinstance(artifacts, (str, os.PathLike)):
        if not hasattr(artifacts, "open_reader"):
            raise SearchError(f"artifacts is of type {type(artifacts).__name__}: pass a folder, or an artifact store of Optuna")
        return artifacts
    try:
        os.makedirs(artifacts, exist_ok=True)
    except OSError as error:
        raise SearchError(f"the folder {artifacts} for the models of trials can't be created: {error.strerror}") from error
    return optuna().artifacts.FileSystemArtifactStore(base_path=os.fspath(artifacts))


@dataclass(frozen=True)
class Models:
    """Build, save and load models of trials. build_optimizer: from a model to one optimizer or several, or None."""

    parent: nn.Module
    build_optimizer: Callable[[nn.Module], Any] | None
    store: Any

    def fresh(self) -> tuple[nn.Module, Any]:
        """A copy of the search's parent, and an optimizer for it."""
        model = copy.deepcopy(bare(self.parent))
        if self.build_optimizer is None:
            return model, None
        try:
            return model, self.build_optimizer(model)
        except Exception as error:
            raise SearchError(
                f"optimizer= makes no optimizer of the model ({type(error).__name__}: {error}): pass e.g. "
                "lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)"
            ) from error

    def load(self, record: Record) -> tuple[nn.Module, Any]:
        """The model of a trial with its optimizer, from the artifact; GoneError if that is missing or damaged."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, FILE)
            self.fetch(record, path)
            model, optimizer = self.fresh()
            try:
                read_trained(path, model, as_list(optimizer))
            except CheckpointError as error:
                self._refuse_damaged(record, path)
                reason = str(error).rstrip(".")
                raise MisfitError(
                    f"the model of trial {record.number} does not fit this search: {reason}. The study is as it was: continue "
                    "it with the parent and the optimizer that it was begun with, or name another study"
                ) from error
        return model, optimizer

    def _refuse_damaged(self, record: Record, path: str) -> None:
        """Raise GoneError if the file of a trial can't be read at all, whatever the parent is."""
        try:
            read_run(path)
        except CheckpointError as error:
            raise GoneError(
                f"the model of trial {record.number} is damaged: the artifact {record.artifact} in {self.where} can't be read; "
                "restore it. The study is as it was"
            ) from error

    def fetch(self, record: Record, path: str) -> None:
        """Copy the artifact of a trial to a file."""
        library = optuna()
        if not record.artifact:
            raise GoneError(f"trial {record.number} ({record.state.lower()}) has no model")
        Path(path).unlink(missing_ok=True)
        try:
            library.artifacts.download_artifact(artifact_store=self.store, file_path=path, artifact_id=record.artifact)
        except library.artifacts.exceptions.ArtifactNotFound as error:
            raise GoneError(
                f"the model of trial {record.number} is gone: there is no artifact {record.artifact} in {self.where}; restore "
                "it, or pass the artifacts= that the other workers of the study have. The study is as it was"
            ) from error
        except Exception as error:
            raise StoreError(
                f"the model of trial {record.number} can't be read from {self.where} ({_in_words(error)}): the study is as it "
                "was; start the same command again when that is back"
            ) from error

    @property
    def where(self) -> str:
        """The place of the artifacts in words."""
        folder = getattr(self.store, "_base_path", None)
        return f"the folder {folder}" if folder is not None else f"the {type(self.store).__name__}"

    def save(self, model: nn.Module, optimizer: Any, trial: Any) -> str:
        """Put a model into the store, and return the artifact's name; DivergedError if it holds NaN or infinity."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, FILE)
            try:
                write_trained(path, model, as_list(optimizer))
            except CheckpointError as error:
                if "not finite" not in str(error):
                    raise
                found = "; ".join(f"{problem.where}: {problem.reason}" for problem in error.problems)
                raise DivergedError(f"training diverged: the model holds values that are not finite ({found})") from error
            store = _Writing(self.store, self.where)
            name: str = optuna().artifacts.upload_artifact(artifact_store=store, file_path=path, study_or_trial=trial)
        return name


@dataclass(frozen=True)
class _Writing:
    """A store whose errors are told apart from those of the storage, in which its artifacts are listed."""

    store: Any
    where: str

    def write(self, name: str, content: Any) -> None:
        try:
            self.store.write(name, content)
        except Exception as error:
            raise StoreError(
                f"a model can't be written to {self.where} ({_in_words(error)}): the study is as it was, and the trial is left "
                "to others; start the same command again when that is possible"
            ) from error


def _in_words(error: Exception) -> str:
    return hide_passwords(f"{type(error).__name__}: {error}".removesuffix(": "))
