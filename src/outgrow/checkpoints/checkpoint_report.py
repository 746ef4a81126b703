"""The report of a planned or grown checkpoint, and sizes of files as text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from outgrow.checkpoints.compare_checkpoints import Comparison
from outgrow.checkpoints.plan_checkpoint import CheckpointPlan
from outgrow.errors import CheckpointError
from outgrow.growth_plan.plan import COLUMNS, Change
from outgrow.text.tables import table
from outgrow.transforms.widen.notes import OUTPUTS, RESCALED, ROUNDED
from outgrow.verify.outputs import HALF

TRAINING = ("optimizer", "scheduler", "trainer_state", "training_args", "rng_state", "scaler")  # first parts of names
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, eq=False)
class CheckpointGrowth:
    """The report of a grown checkpoint. comparison: None if nothing was compared."""

    plan: CheckpointPlan
    out: str
    shards: tuple[str, ...]
    comparison: Comparison | None
    seconds: float
    left: tuple[str, ...] = ()  # files of the old directory that were not copied
    training: tuple[str, ...] = ()  # files of the training state that were grown or copied
    state_bytes: int = 0  # of the optimizer's state

    def __str__(self) -> str:
        written = self.plan.bytes + self.state_bytes
        rate = written / max(self.seconds, 1e-9) / 1e6
        lines = [
            summary(self.plan),
            f"written: {self.out}, {sizes(self.plan.bytes)} in {len(self.shards)} "
            f"{'file' if len(self.shards) == 1 else 'files'}, {self.seconds:.1f} s ({rate:,.0f} MB/s)",
            f"compared: {self.comparison}" if self.comparison is not None else "compared: no (--verify none)",
        ]
        lines += [f"training state: {sizes(self.state_bytes)}, {', '.join(self.training)}"] if self.training else []
        state = [name for name in self.left if name.startswith(TRAINING)]
        others = [name for name in self.left if name not in state]
        lines += [f"training state not copied (--training-state grows it too): {', '.join(state)}"] if state else []
        lines += [f"not copied: {', '.join(others)}"] if others else []
        lines += [f"not used by the model: {', '.join(self.plan.names.ignored[:3])}"] if self.plan.names.ignored else []
        return "\n".join(lines)


def bytes_of(size: int | str) -> int:
    """A size in bytes, from a number or a text.

    Example:
        >>> bytes_of("1.5GB"), bytes_of("4 KiB")
        (1500000000, 4096)
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    if isinstance(size, bool) or found is None or found.group(2).upper() not in UNITS or not float(found.group(1)):
        raise CheckpointError(f"{size!r} is not a size: write e.g. '5GB' or '500MB'")
    return int(float(found.group(1)) * UNITS[found.group(2).upper()])


def sizes(count: int) -> str:
    """A number of bytes as text.

    Example:
        >>> sizes(1_530_000_000), sizes(999)
        ('1.53 GB', '999 bytes')
    """
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


def summary(plan: CheckpointPlan) -> str:
    """The plan with parameters, FLOPs and bytes, before and after."""
    growth = plan.growth
    lines = [table(COLUMNS, changes_in_short(growth.plan.changes)), ""]
    lines.append(_change("parameters", *growth.parameters))
    lines.append(_change("FLOPs", *growth.flops) + f", of a pass on {plan.inputs}")
    lines.append(f"weights: {sizes(plan.checkpoint.bytes)} → {sizes(plan.bytes)}")
    return "\n".join([*lines, *notes_on(plan)])


def notes_on(plan: CheckpointPlan) -> list[str]:
    """Lines about the configuration, rescaled tensors, and outputs that are not preserved."""
    half = (plan.dtype or plan.checkpoint.dtype) in HALF
    found = [note for note in plan.growth.notes if note.startswith(("config: ", RESCALED, OUTPUTS))]
    return [f"{note}; {ROUNDED} half precision" if half and note.startswith(RESCALED) else note for note in found]


def _change(what: str, before: int, after: int) -> str:
    return f"{what}: {before:,} → {after:,} (× {after / max(before, 1):.2f})"


def changes_in_short(changes: tuple[Change, ...]) -> list[tuple[str, str, str]]:
    """Rows of a table of changes; volumes that differ only in the number of their block share a row.

    Example:
        >>> changes_in_short((Change("h.0.mlp", 4, 6, "r2r"), Change("h.1.mlp", 4, 6, "r2r")))
        [('h.0.mlp + 1 alike', '4 → 6', 'r2r')]
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for change in changes:
        name, *rest = change.row
        groups.setdefault((re.sub(r"(?<=\.)\d+(?=\.|$)", "N", name), *rest), []).append(name)
    return [
        (f"{first} + {len(others)} alike" if others else first, size, method)
        for (_, size, method), (first, *others) in groups.items()
    ]
