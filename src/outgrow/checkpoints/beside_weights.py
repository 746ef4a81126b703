"""What goes beside the weights of a grown checkpoint: configuration, tokenizer and other files, the plan, and a model card."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from outgrow.checkpoints.checkpoint_report import TRAINING, notes_on
from outgrow.checkpoints.plan_checkpoint import CheckpointPlan
from outgrow.checkpoints.read_checkpoint import CONFIG, PICKLES
from outgrow.transforms.all_transforms import described

CARD, PLAN = "README.md", "outgrow_plan.json"
WRITTEN = (CONFIG, CARD, PLAN)
WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".msgpack", ".h5", ".onnx", ".gguf", *PICKLES)
KEPT_FIELDS = r"(?m)^(?:license|license_name|license_link|language|pipeline_tag):[^\n\S]*\S.*$"


def copied_files(folder: str) -> tuple[list[str], list[str]]:
    """Names of the files to copy from an old checkpoint, and of those to leave behind."""
    copied: list[str] = []
    left: list[str] = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name in WRITTEN or entry.name.startswith("."):
            continue
        other = not entry.is_file() or entry.name.endswith(WEIGHT_FILES) or entry.name.startswith(TRAINING)
        if other and entry.name.endswith((".safetensors", ".safetensors.index.json")) and entry.name.startswith("model"):
            continue
        (left if other else copied).append(entry.name)
    return copied, left


def write_beside(plan: CheckpointPlan, folder: str, card: str) -> None:
    """Write everything but the weights into the directory of the new checkpoint; the configuration last."""
    for name in copied_files(plan.checkpoint.folder)[0]:
        shutil.copyfile(os.path.join(plan.checkpoint.folder, name), os.path.join(folder, name))
    with open(os.path.join(folder, PLAN), "w", encoding="utf-8") as file:
        json.dump(plan_record(plan), file, indent=1, ensure_ascii=False)
    with open(os.path.join(folder, CARD), "w", encoding="utf-8") as file:
        file.write(card)
    config: Any = plan.model.config
    config.save_pretrained(folder)


def plan_record(plan: CheckpointPlan) -> dict[str, Any]:
    """The plan as JSON values, after those of earlier growths of the same checkpoint."""
    path = os.path.join(plan.checkpoint.folder, PLAN)
    earlier: list[Any] = []
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            earlier = json.load(file).get("growths", [])
    growth = {
        "from": os.path.basename(os.path.abspath(plan.checkpoint.folder)),
        "requests": [described(request) for request in plan.requests],
        "outgrow": package_version(),
        "parameters": list(plan.growth.parameters),
        "plan": plan.plan.to_json(),
    }
    return {"growths": [*earlier, growth]}


def model_card(plan: CheckpointPlan, command: str, checks: Sequence[str]) -> str:
    """The model card. checks: lines about measured errors."""
    base, kept = os.path.basename(os.path.abspath(plan.checkpoint.folder)), _kept_fields(plan.checkpoint.folder)
    fields = ["library_name: transformers", f"base_model: {_yaml(_base_name(plan) or base)}", "tags:", "- outgrow"]
    before, after = plan.growth.parameters
    lines = [
        "---",
        *fields,
        *kept,
        "---",
        "",
        f"# {base}, grown",
        "",
        f"A checkpoint of `{type(plan.model).__name__}` with {after:,} parameters, grown from one with {before:,} by "
        f"outgrow {package_version()} without changing what it computes{' (new outputs apart)' if plan.gains else ''}.",
        "It is a plain checkpoint: it loads without outgrow.",
        "",
        "```text",
        command,
        "```",
        "",
        *(f"- {described(request)}" for request in plan.requests),
        *(f"- {note}" for note in notes_on(plan)),
        *(f"- {check}" for check in checks),
        f"- the plan, with every new entry and the seed ({plan.seed}), is in `{PLAN}`",
        "",
    ]
    return "\n".join(lines)


def _base_name(plan: CheckpointPlan) -> str:
    name = plan.checkpoint.config.get("_name_or_path")
    return name if isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name) else ""


def _kept_fields(folder: str) -> list[str]:
    """Lines of the old card's header that also hold for the grown model."""
    path = os.path.join(folder, CARD)
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8", errors="replace") as file:
        found = re.match(r"---\n(.*?)\n---", file.read(), re.S)
    return re.findall(KEPT_FIELDS, found.group(1)) if found else []


def _yaml(text: str) -> str:
    return text if re.fullmatch(r"[\w][\w./-]*", text) else json.dumps(text)


def package_version() -> str:
    try:
        return version("outgrow")
    except PackageNotFoundError:
        return "(not installed)"
