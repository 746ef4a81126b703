"""Results as files: one JSON per arm, with its description, the setting, the versions and the command that made it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.widening_steps.arms import Arm, Setting

FORMAT = 1
FOLDER = Path(__file__).parents[1] / "results" / "widening-steps"


def described(arm: Arm, setting: Setting) -> dict[str, Any]:
    """What a result belongs to, as JSON has it."""
    made: dict[str, Any] = json.loads(json.dumps({"arm": asdict(arm), "setting": asdict(setting)}))
    return made


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """All arms of a folder by name."""
    found = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json")))
    return {content["arm"]["name"]: content for content in found if "arm" in content}


def known(folder: Path, arm: Arm, setting: Setting) -> dict[str, Any]:
    """The results of an arm by seed; those of another description are an error."""
    path = folder / f"{arm.name}.json"
    if not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if {key: content[key] for key in ("arm", "setting")} != described(arm, setting):
        raise SystemExit(f"{path} has results of another description of {arm.name}: name another folder with --results")
    found: dict[str, Any] = content["seeds"]
    return found


def add(folder: Path, arm: Arm, setting: Setting, seed: int, result: Mapping[str, Any]) -> None:
    """Write the result of one seed beside those of others."""
    seeds = {**known(folder, arm, setting), str(seed): dict(result)}
    by_number = dict(sorted(seeds.items(), key=lambda item: int(item[0])))
    write(folder / f"{arm.name}.json", {"format": FORMAT, **described(arm, setting), "seeds": by_number})


def write(path: Path, content: Mapping[str, Any]) -> None:
    """The whole file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content) + "\n", encoding="utf-8")
    part.replace(path)
