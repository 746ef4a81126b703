"""Results as files: one JSON an arm, with all that made it. Figures, tables and the report are drawn from these files alone."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from experiments.setting.appendix_b import appendix_b_arms
from experiments.setting.arms import Arm, paper_arms
from experiments.setting.more_arms import more_arms
from experiments.setting.segments import segments_of
from experiments.training.store import Store

FORMAT = 1
FILTERS = "filters.safetensors"
ALIKE = ("data", "engine", "precision", "device")  # what all seeds of a file share


class ResultsError(Exception):
    """A results file that can't be read, or that belongs to something else."""


def file_name(arm: str) -> str:
    return arm.replace("(", "-").replace(")", "") + ".json"


def facts(device: str) -> dict[str, Any]:
    """What the numbers depend on besides the arm."""
    name = (
        torch.cuda.get_device_name(device)
        if torch.device(device).type == "cuda"
        else platform.processor() or platform.machine()
    )
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "numpy", "outgrow"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"versions": versions, "device": name}


def write_arm(folder: Path, arm: Arm, seeds: Sequence[int], store: Store, made_by: dict[str, Any]) -> None:
    """Write the results of one arm, unless the file there is of another experiment. Other seeds that it has are kept."""
    path = folder / file_name(arm.name)
    check_same(path, arm, made_by)
    old = read_file(path) if path.exists() else {"curves": {}, "command": made_by["command"]}
    curves: dict[str, Any] = dict(old["curves"])
    commands = dict.fromkeys([*old["command"].split("; "), made_by["command"]])
    for seed in seeds:
        states = [store.state(segment) for segment in segments_of(arm, seed)]
        curves[str(seed)] = [finished(state["curve"]) for state in states[arm.own :] if state is not None]
    curves = {str(seed): curves[str(seed)] for seed in sorted(map(int, curves))}
    made_by = {**made_by, "command": "; ".join(commands)}
    content = {"format": FORMAT, "arm": asdict(arm), "seeds": [int(seed) for seed in curves], **made_by, "curves": curves}
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content) + "\n", encoding="utf-8")
    part.replace(path)


def finished(curve: dict[str, Any]) -> dict[str, Any]:
    """A curve without what is kept only until its next entry."""
    return {name: values for name, values in curve.items() if name != "open"}


def check_same(path: Path, arm: Arm, made_by: Mapping[str, Any]) -> None:
    """Refuse to write over results of another description or version, or to put seeds beside them that were made otherwise."""
    if not path.exists():
        return
    old = read_file(path)
    if old["arm"] != known_by(old["arm"], json.loads(json.dumps(asdict(arm)))):
        raise ResultsError(f"{path} holds results of {arm.name} by another description: name another folder with --results")
    other = [f"{name} {old[name]}, now {made_by[name]}" for name in ALIKE if name in made_by and old.get(name) != made_by[name]]
    if other:
        raise ResultsError(f"{path} holds results that were made otherwise ({'; '.join(other)}): name another with --results")


def known_by(old: Any, new: Any) -> Any:
    """A description without the fields that an older one does not have, as long as they are at their defaults."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [known_by(one, other) for one, other in zip(old, new, strict=True)]
    if isinstance(old, dict) and isinstance(new, dict):
        return {name: known_by(old.get(name), value) for name, value in new.items() if name in old or value not in (0, 0.0)}
    return new


def missing(folder: Path, arm: Arm, seeds: Sequence[int], made_by: Mapping[str, Any]) -> list[int]:
    """The seeds whose results are not there yet; those that are must be of this experiment."""
    path = folder / file_name(arm.name)
    check_same(path, arm, made_by)
    there = read_file(path)["seeds"] if path.exists() else []
    return [seed for seed in seeds if seed not in there]


def read_file(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found = content["format"]
        wrong = flaw(content) if found == FORMAT else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        found, wrong = FORMAT, f"{type(error).__name__}: {error}"
    if found != FORMAT:
        raise ResultsError(
            f"{path} is of format {found}, and this version reads {FORMAT}: make the results anew in another folder"
        )
    if wrong:
        raise ResultsError(f"{path} is no results file of these experiments ({wrong}): take it out of that folder")
    return content


def flaw(content: Mapping[str, Any]) -> str | None:
    """What is wrong in a file of this format; None if nothing is."""
    seeds, curves = content["seeds"], content["curves"]
    if not isinstance(content["arm"]["name"], str):
        return "the arm's name is no text"
    if not isinstance(content["command"], str):
        return "the command is no text"
    if not filled(seeds) or not all(type(seed) is int for seed in seeds):
        return "the seeds are no list of whole numbers"
    if not set(curves) <= set(map(str, seeds)):
        return "there are curves of seeds that are not listed"
    return next((f"seed {seed} has no curve" for seed in seeds if not is_curve(curves.get(str(seed)))), None)


def is_curve(stages: Any) -> bool:
    """Whether these are stages, each with the accuracies that it had."""
    return filled(stages) and all(isinstance(stage, dict) and filled(stage.get("accuracy")) for stage in stages)


def filled(values: Any) -> bool:
    return isinstance(values, list) and bool(values)


def read_all(folder: Path) -> dict[str, dict[str, Any]]:
    """The results of all arms in a folder, by name."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ResultsError(f"there are no results in {folder}: run `python -m experiments` first")
    contents = [read_file(path) for path in files]
    return {content["arm"]["name"]: content for content in contents}


def read_paper(folder: Path) -> dict[str, dict[str, Any]]:
    """The results of the paper's arms in a folder; others beside them are left out."""
    results, names = read_all(folder), {arm.name for arm in (*paper_arms(), *more_arms(), *appendix_b_arms())}
    found = {name: content for name, content in results.items() if name in names}
    if not found:
        raise ResultsError(f"the results in {folder} are not of the paper's arms ({next(iter(results))} is none of them)")
    return found


def unusable(error: OSError) -> str:
    """A sentence on a path that can't be written or read."""
    return f"{error.filename or 'a file'} can't be written or read: {error.strerror or error}"


def write_filters(folder: Path, arm: Arm, seeds: Sequence[int], store: Store) -> None:
    """The first layers of a VIZ arm: before and after the growth, and at the end; beside those of others."""
    tensors: dict[str, Tensor] = {}
    for seed in seeds if arm.test == "VIZ" else ():
        state = store.state(segments_of(arm, seed)[-1])
        for when, weights in (state or {"filters": {}})["filters"].items():
            tensors[f"{arm.name}/{seed}/{when}"] = weights.contiguous()
    if tensors:
        path = folder / FILTERS
        part = path.with_suffix(".part")
        save_file((load_file(path) if path.exists() else {}) | tensors, part)
        part.replace(path)
