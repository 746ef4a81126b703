"""Results as files: one JSON per arm, with everything that made it. Pages and figures are drawn from these files alone."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from experiments.lm.arms import Arm, Setting

FORMAT = 1


def facts(device: str) -> dict[str, Any]:
    """The machine and the versions."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine()
    versions = {"python": platform.python_version()}
    for package in ("torch", "numpy", "outgrow"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"device": name, "versions": versions}


def file_of(folder: Path, arm: str) -> Path:
    return folder / f"{arm}.json"


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """All arms of a folder by name."""
    found = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json")))
    return {content["arm"]["name"]: content for content in found}


def has(folder: Path, arm: Arm, seed: int) -> bool:
    """Whether an arm has been run with a seed. A file of another description is an error."""
    path = file_of(folder, arm.name)
    if not path.exists():
        return False
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["arm"] != plain(arm):
        raise ValueError(f"{path} has the results of another description of {arm.name}: move it away, or name another folder")
    return str(seed) in content["seeds"]


def plain(arm: Arm) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(asdict(arm)))
    return made


def add(folder: Path, arm: Arm, seed: int, legs: list[dict[str, Any]], setting: Setting, made_by: Mapping[str, Any]) -> None:
    """Write the legs of one seed beside those of others."""
    path = file_of(folder, arm.name)
    old = json.loads(path.read_text(encoding="utf-8"))["seeds"] if path.exists() else {}
    seeds = {**old, str(seed): {**made_by, "legs": legs}}
    content = {"format": FORMAT, "arm": plain(arm), "setting": asdict(setting), "seeds": dict(sorted(seeds.items()))}
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content) + "\n", encoding="utf-8")
    part.replace(path)
