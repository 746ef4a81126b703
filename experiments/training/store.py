"""What has been trained, kept on disk: one file a segment, whole or not at all, so that interrupted runs can go on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.setting.segments import Segment

FORMAT = 3


class StoreError(Exception):
    """A file that can't be read, or that belongs to something else."""


class Store:
    """`about` tells what states depend on besides their segments (data, engine, precision); those of another are refused."""

    def __init__(self, folder: Path, about: Mapping[str, str] | None = None) -> None:
        self.folder, self.about = folder, dict(about or {})
        self.folder.mkdir(parents=True, exist_ok=True)
        self._known: dict[str, tuple[bool, int]] = {}

    def path(self, segment: Segment) -> Path:
        return self.folder / f"{segment.key}.pt"

    def is_done(self, segment: Segment) -> bool:
        return self._about(segment)[0]

    def steps(self, segment: Segment) -> int:
        """How many were made when it was written last."""
        return self._about(segment)[1]

    def _about(self, segment: Segment) -> tuple[bool, int]:
        if segment.key not in self._known:
            saved = self.state(segment)
            self._known[segment.key] = (saved["finished"], saved["done"]) if saved else (False, 0)
        return self._known[segment.key]

    def state(self, segment: Segment) -> dict[str, Any] | None:
        """What was written for a segment, finished or not; None if there is nothing."""
        path = self.path(segment)
        if not path.exists():
            return None
        try:
            saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            found = saved.get("format")
        except Exception as error:  # whatever torch makes of a file that is cut off, or none of its own
            raise StoreError(
                f"{path} can't be read ({type(error).__name__}): delete it, and its piece is trained anew"
            ) from error
        if found != FORMAT:
            raise StoreError(
                f"{path} was written by another version of these experiments (format {found}, this is {FORMAT}): "
                "name another folder with --work, or delete that one"
            )
        other = [
            f"{name} {was}, now {self.about[name]}" for name, was in saved["about"].items() if self.about.get(name, was) != was
        ]
        if other:
            raise StoreError(f"{path} was trained otherwise ({'; '.join(other)}): name another folder with --work")
        return saved

    def write(
        self,
        segment: Segment,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        curve: dict[str, Any],
        done: int,
        finished: bool,
        filters: dict[str, Tensor],
    ) -> None:
        content = {
            "format": FORMAT,
            "about": self.about,
            "segment": repr(asdict(segment)),
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "curve": dict(curve),
            "done": done,
            "finished": finished,
            "filters": filters,
        }
        part = self.path(segment).with_suffix(".part")
        torch.save(content, part)
        os.replace(part, self.path(segment))
        self._known[segment.key] = finished, done
