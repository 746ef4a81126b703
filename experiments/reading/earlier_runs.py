"""Results that were made from an earlier description of their arms: which ones, and what has changed since.

Arms are corrected when the paper's source is read better; results stay as they were run until all is run again. A report
names the difference, so that nobody takes one for the other.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from typing import Any

from experiments.reading.curves import Results
from experiments.setting.appendix_b import appendix_b_arms
from experiments.setting.arms import Arm, paper_arms
from experiments.setting.more_arms import more_arms


def width(net: dict[str, Any]) -> str:
    return f"{int(64 * net['r'])}/{int(128 * net['r'])} channels" if net["kind"] == "resnet" else str(net["kind"])


def differences(content: dict[str, Any], arm: Arm) -> list[str]:
    """What differs between a result's description and today's, in words."""
    old, new = content["arm"], asdict(arm)
    found = []
    if width(old["net"]) != width(new["net"]):
        found.append(f"{width(old['net'])} instead of {width(new['net'])}")
    if old["net"]["blocks"] != new["net"]["blocks"]:
        found.append("another depth")
    before, after = ([[stage[key] for key in ("rate", "decay", "state")] for stage in one["stages"]] for one in (old, new))
    if before != after:
        found.append("other rates or weight decays")
    return found


def earlier(results: Results) -> dict[str, list[str]]:
    """Names of arms by what differs from today's description."""
    today = {arm.name: arm for arm in (*paper_arms(), *more_arms(), *appendix_b_arms())}
    found: dict[str, list[str]] = defaultdict(list)
    for name, content in results.items():
        for difference in differences(content, today[name]) if name in today else ():
            found[difference].append(name)
    return dict(found)


def some(names: list[str], most: int = 4) -> str:
    """12 arms (NCT-DeepenTeacher, NCT-R2DeeperR, …)"""
    rest = ", …" if len(names) > most else ""
    return f"{len(names)} arm{'s' * (len(names) > 1)} ({', '.join(names[:most])}{rest})"


def notes(results: Results) -> list[str]:
    """Sentences for the report and the documentation; none where all results are of today's arms."""
    made = [f"Run earlier, with {what}: {some(names)}." for what, names in earlier(results).items()]
    whole = [name for name, content in results.items() if content["data"] == "CIFAR-10"]
    if whole:
        made.append(
            f"Run earlier, without a validation set: {some(whole)}. These networks were trained on all 50,000 images; the "
            "author held 1,000 training images out."
        )
    missing = sorted({arm.name for arm in (*more_arms(), *appendix_b_arms())} - set(results))
    if missing:
        made.append(f"Described, but not among these results: {some(missing)}.")
    return made
