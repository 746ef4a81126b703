"""The page about the no-spike benchmark, from its results."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

LIMITS = {"ratio": 1.1, "learned": 0.95}
TITLES = {"resnet": "ResNetCifar-10(1/4)", "vit": "ViT"}
OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD with momentum"}


@dataclass(frozen=True)
class Row:
    """An arm over all seeds."""

    model: str
    optimizer: str
    kind: str
    name: str
    group: str
    preserving: bool
    growth: str  # parameters, as a factor
    jump: float  # of the loss at the growth: the worst of all seeds, eval and train mode
    ratios: tuple[float, ...]
    learned: float  # the worst seed's share of new weights
    refused: str = ""

    @property
    def mean(self) -> float:
        return sum(self.ratios) / max(len(self.ratios), 1)

    @property
    def verdict(self) -> str:
        """What preserves the function must pass on the mean of the seeds, and on the worst one."""
        if self.refused:
            return "refused"
        if not self.preserving:
            return "–"
        words = []
        if self.mean > LIMITS["ratio"]:
            words.append("SPIKE")
        elif max(self.ratios) > LIMITS["ratio"]:
            words.append("spike in the worst seed")
        if self.learned < LIMITS["learned"]:
            words.append("DEAD")
        return ", ".join(words) or "pass"


def verdicts(data: dict[str, Any]) -> list[Row]:
    arms: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for result in data["results"]:
        key = tuple(result[part] for part in ("model", "optimizer", "kind", "arm", "group"))
        if result["group"] != "twin":
            arms.setdefault(key, []).append(result)
    return [_row(key, results) for key, results in arms.items()]


def _row(key: tuple[str, ...], results: list[dict[str, Any]]) -> Row:
    model, optimizer, kind, name, group = key
    refused = next((result["refused"] for result in results if "refused" in result), "")
    if refused:
        return Row(model, optimizer, kind, name, group, False, "", 0.0, (), 0.0, refused)
    jumps = [abs(after - before) for result in results for before, after in (result["eval_loss"], result["train_loss"])]
    old, new = results[0]["parameters"]
    return Row(
        model,
        optimizer,
        kind,
        name,
        group,
        all(result["preserving"] for result in results),
        f"{new / old:.2f}",
        max(jumps),
        tuple(result["ratio"] for result in results),
        min(result["learned"] for result in results),
    )


def _table(rows: list[Row]) -> Iterator[str]:
    yield "| growth | method | | parameters × | loss jumps by | next 20 steps × twin | new weights that learn | |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for row in rows:
        if row.refused:
            yield f"| {row.kind} | {row.name} | {row.group} | | | | | refused: {row.refused.replace('|', '/')} |"
            continue
        spread = f"{row.mean:.2f} ({min(row.ratios):.2f}–{max(row.ratios):.2f})"
        yield (
            f"| {row.kind} | {row.name} | {row.group} | {row.growth} | {row.jump:.0e} | {spread} | {row.learned:.1%} "
            f"| {row.verdict} |"
        )


def page(data: dict[str, Any]) -> str:
    rows = verdicts(data)
    settings = data["configuration"]
    versions = ", ".join(f"{name} {number}" for name, number in data["versions"].items())
    judged = [row for row in rows if row.preserving and row.group == "ours"]
    passed = sum(row.verdict == "pass" for row in judged)
    text = f"""
Made by `make spike` from `benchmarks/results/spike.json`; `benchmarks/spike.py` describes what is done and how it is measured.
{versions}; {data["machine"]["device"]}; {settings["seeds"]} seeds. Grown after half of {settings["epochs"]:g} epochs of
CIFAR-10 in batches of {settings["batch"]}: widths × {settings["factor"]:g}, a block more behind the last one of each stage, or
kernels of 5 × 5. “Widen mlp” widens the hidden layers of the MLPs only.

**{passed} of {len(judged)} growths that preserve the function pass**: the mean training loss over the next
{settings["compared"]} steps is at most {LIMITS["ratio"]:g} × that of a twin that was not grown, in every seed, and at least
{LIMITS["learned"]:.0%} of the new weights got a gradient and moved within {settings["steps"]} steps.

“Paper” are forms as the paper prints them, beside ours; “baseline” does not preserve the function. “Loss jumps by” is the
difference just before and after the growth on one batch: the worst of all seeds, in eval and in train mode. Ratios are the mean
of the seeds, with the best and the worst in brackets. Of the weights that learn, the worst seed is shown.

It is not so everywhere. All of these networks have norms and are far from fitting their images. In the network of the paper’s
figure 4, one convolution and two linear layers without norms, which is widened when its training loss is low, the loss of the
next 20 steps is more than ten times as high after an exact growth by R2R or NetMorph, with a fresh Adam and even more so with a
carried one: “Exact is not enough” in the report (`make report`) has the figures.
"""
    paragraphs = [textwrap.fill(" ".join(paragraph.split()), 128) for paragraph in text.split("\n\n")]
    lines = ["# Loss after a growth", *paragraphs]
    for model, optimizer in dict.fromkeys((row.model, row.optimizer) for row in rows):
        own = [row for row in rows if (row.model, row.optimizer) == (model, optimizer)]
        lines += [f"## {TITLES[model]}, {OPTIMIZERS[optimizer]}", "\n".join(_table(own))]
    return "\n\n".join(lines) + "\n"
