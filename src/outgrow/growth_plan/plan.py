"""The plan: every edit that a growth will make, frozen and printable before any value changes.

An *insertion* adds positions along one axis of one tensor and says how they are filled; a *rescaling* multiplies existing
values; a *setting* changes a size (or an ε) that a module keeps as a Python attribute; a *graft*, carried out first, routes a
skip through a folded residual. Insertions into one tensor are made in order, each into the result of the previous one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from outgrow.growth_plan.module_starts import Start
from outgrow.text.tables import table

COLUMNS = ("volume", "size", "method")
FILL_NAMES = ("free", "zero", "one", "mean", "rowmean", "spread", "copy")  # how new entries are filled: see `Insertion`
LONGEST = 2**28  # entries along an axis: a bound that protects against damaged files


@dataclass(frozen=True)
class Insertion:
    """New positions along an axis, and the rule that fills them.

    fill: "free" (drawn: entry k is `signs[k]` times draw number `draws[k]`), "zero", "one" (times `signs[k]`, if there are
    any), "mean" (of the `members` of its run, weighted by the tensor `weights` if one is named), "rowmean" (of all entries in a
    row of the weight), "spread" (the same mean plus or minus draws with the mean square of the row's deviations), or "copy" (of
    old position `sources[k]`, times `signs[k]`).
    """

    tensor: str
    axis: int
    size: int  # before
    at: tuple[int, ...]  # positions of the new entries in the grown tensor
    sources: tuple[int, ...]  # for each new entry, the old position of the unit that it is derived from
    fill: str
    draws: tuple[int, ...] = ()
    signs: tuple[float, ...] = ()
    members: tuple[int, ...] = ()  # old positions that belong to the volume, ordered by run, then by unit
    runs: int = 1  # number of times that the units repeat along the axis
    length: int = 1  # number of adjacent positions per unit in a run
    weights: str = ""
    keep: tuple[float, ...] = ()  # factor for each member, if its value is split with copies
    gradient: tuple[float, ...] = ()  # factor for the gradient of each copied entry
    gradient_keep: tuple[float, ...] = ()  # factor for the gradient of each member
    init: str = "std"
    noise: float = 0.0
    fade: int = 0  # number of optimizer steps over which the values fade in from zero

    @property
    def new_size(self) -> int:
        return self.size + len(self.at)


@dataclass(frozen=True)
class Rescaling:
    """Multiply all existing values of a tensor: w → factor·(w + offset) − offset, for code that uses w + offset."""

    tensor: str
    factor: float
    offset: float = 0.0


@dataclass(frozen=True)
class Rotation:
    """Multiply a tensor along an axis by the transpose of an orthogonal matrix, which the new layer after it undoes."""

    tensor: str
    axis: int
    side: int  # of the matrix
    draw: int  # seed of the matrix


Edit = Insertion | Rescaling | Rotation


@dataclass(frozen=True)
class Setting:
    """Set a Python attribute of a module: `module.name`, or an item of it if `item` is given."""

    module: str
    name: str
    old: Any
    new: Any
    item: int | str | None = None

    def __str__(self) -> str:
        place = f"{self.module}.{self.name}" + ("" if self.item is None else f"[{self.item!r}]")
        return f"{place}: {self.old} → {self.new}"


@dataclass(frozen=True)
class Graft:
    """Route the skip of a sum through a new `Fold`, which is the identity at first."""

    block: str  # path of the module whose code computes the sum
    module: str  # path of the Fold: a new child of the block, or an nn.Identity that it replaces
    sum: int  # index of the sum in the block's code; −1 if an nn.Identity is replaced
    operand: int  # index of the skip among the operands of the sum
    size: int  # channels of the skip
    dim: int  # axis of the channels

    def __str__(self) -> str:
        return f"{self.module}: folds the skip of {self.block or 'the model'}"


@dataclass(frozen=True)
class Insert:
    """A new child of a container. Numbered children after it are renumbered.

    It is a copy of one of the other children, or built from a description. A module without such a container is wrapped into
    an nn.Sequential first (`wraps`), or into an `outgrow.Parallel` (`beside` too), under the name 0.
    """

    container: str  # its path; "" is the model itself
    at: int  # index of the new child
    copy_of: int  # index (before the insert) of the child that it is a copy of; −1 if it is built
    key: str  # its name
    prefix: str | None = None  # children are named by this and consecutive numbers from `first` on
    first: int = 0
    made: tuple[tuple[str, Any], ...] = ()
    wraps: bool = False
    beside: bool = False
    start: Start = field(default=Start(), compare=False, repr=False)  # not saved: a file contains the values themselves

    @property
    def path(self) -> str:
        return f"{self.container}.{self.key}" if self.container else self.key

    def renamed(self, name: str) -> str:
        """The name of a module or tensor afterwards."""
        outer = f"{self.container}." if self.container else ""
        if self.wraps:
            inside = name == self.container or name.startswith(outer)
            return f"{outer}0{name.removeprefix(self.container)}" if inside else name
        child, dot, rest = name.removeprefix(outer).partition(".")
        number = child.removeprefix(self.prefix or "")
        if self.prefix is None or not name.startswith(outer) or not child.startswith(self.prefix) or not number.isdecimal():
            return name
        moved = int(number) >= self.first + self.at
        return f"{outer}{self.prefix}{int(number) + moved}{dot}{rest}"

    def former(self, name: str) -> str | None:
        """The name of a module or tensor before; None for the new module and everything inside it."""
        outer = f"{self.container}." if self.container else ""
        if name == self.path or name.startswith(f"{self.path}."):
            return None
        if self.wraps:
            inside = name == f"{outer}0" or name.startswith(f"{outer}0.")
            return self.container + name.removeprefix(f"{outer}0") if inside else name
        child, dot, rest = name.removeprefix(outer).partition(".")
        number = child.removeprefix(self.prefix or "")
        if self.prefix is None or not name.startswith(outer) or not child.startswith(self.prefix) or not number.isdecimal():
            return name
        moved = int(number) > self.first + self.at
        return f"{outer}{self.prefix}{int(number) - moved}{dot}{rest}"


@dataclass(frozen=True)
class Change:
    """The growth of one volume, as reports show it. For blocks, sizes are counts; a kernel has one size per axis."""

    volume: str
    old: int | tuple[int, ...]
    new: int | tuple[int, ...]
    method: str
    exact: bool = True
    note: str = ""
    kind: str | None = None  # of the volume: "mlp", "heads", …

    @property
    def row(self) -> tuple[str, str, str]:
        """The cells of its row in a table."""
        sizes = ["×".join(map(str, size)) if isinstance(size, tuple) else str(size) for size in (self.old, self.new)]
        return self.volume, " → ".join(sizes), self.method + ("" if self.exact else " (does not preserve)")


@dataclass(frozen=True)
class Plan:
    """The edits of a growth, in order. A growth with several steps may have several plans."""

    changes: tuple[Change, ...]
    edits: tuple[Edit, ...]
    settings: tuple[Setting, ...] = ()
    seed: int = 0
    grafts: tuple[Graft, ...] = ()
    inserts: tuple[Insert, ...] = ()
    continues: bool = False  # part of the same growth as the previous plan

    def renamed(self, name: str) -> str:
        """The new name of a module or tensor of the model before the growth."""
        for insert in self.inserts:
            name = insert.renamed(name)
        return name

    def __str__(self) -> str:
        return "\n".join(
            [
                table(COLUMNS, (change.row for change in self.changes)),
                *(f"{change.volume}: {change.note}" for change in self.changes if change.note),
                *map(str, self.grafts),
                *(f"{path}: a new block" for path in sorted(self.new_blocks)),
            ]
        )

    @property
    def new_blocks(self) -> list[str]:
        """Paths of the new modules after all inserts."""
        paths = []
        for index, insert in enumerate(self.inserts):
            path = insert.path
            for later in self.inserts[index + 1 :]:
                path = later.renamed(path)
            paths.append(path)
        return paths

    def shapes(self, before: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
        """New shapes of the tensors that change shape."""
        shapes: dict[str, list[int]] = {}
        for edit in self.edits:
            if isinstance(edit, Insertion):
                shapes.setdefault(edit.tensor, list(before[edit.tensor]))[edit.axis] = edit.new_size
        return {name: tuple(shape) for name, shape in shapes.items()}

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values; `from_json` returns an equal plan, to the last bit and type."""
        return {
            "seed": self.seed,
            "changes": [_packed_change(change) for change in self.changes],
            "edits": [_pack(edit) for edit in self.edits],
            "settings": [
                {**vars(setting), "old": _plain(setting.old), "new": _plain(setting.new)} for setting in self.settings
            ],
            **({"grafts": [asdict(graft) for graft in self.grafts]} if self.grafts else {}),
            **({"inserts": [_without_start(insert) for insert in self.inserts]} if self.inserts else {}),
            **({"continues": True} if self.continues else {}),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Plan:
        return Plan(
            tuple(Change(**{**c, "old": _from_plain(c["old"]), "new": _from_plain(c["new"])}) for c in data["changes"]),
            tuple(_unpack(edit) for edit in data["edits"]),
            tuple(Setting(**{**s, "old": _from_plain(s["old"]), "new": _from_plain(s["new"])}) for s in data["settings"]),
            data["seed"],
            tuple(Graft(**graft) for graft in data.get("grafts", ())),
            tuple(Insert(**{**insert, "made": tuple(map(tuple, insert["made"]))}) for insert in data.get("inserts", ())),
            bool(data.get("continues", False)),
        )


def _packed_change(change: Change) -> dict[str, Any]:
    values = {**vars(change), "old": _plain(change.old), "new": _plain(change.new)}
    return {name: value for name, value in values.items() if name != "kind" or value is not None}


def _without_start(insert: Insert) -> dict[str, Any]:
    values = asdict(replace(insert, start=Start()))
    return {name: value for name, value in values.items() if name != "start"}


def recorded(plan: Plan) -> Plan:
    """A plan as stored in a history: without the starts of new modules, whose values are in the model."""
    return replace(plan, inserts=tuple(replace(insert, start=Start()) for insert in plan.inserts))


def joined(plans: Sequence[Plan]) -> Plan:
    """Plans that were carried out one after the other, as one plan to print."""
    if len(plans) == 1:
        return plans[0]
    names = ("changes", "edits", "settings", "grafts", "inserts")
    parts: dict[str, Any] = {name: tuple(item for plan in plans for item in getattr(plan, name)) for name in names}
    return Plan(seed=plans[0].seed, **parts)


def noted(plan: Plan, note: str) -> Plan:
    """A plan with a remark on each of its changes."""
    return replace(plan, changes=tuple(replace(change, note=note) for change in plan.changes))


def renamed(name: str, plans: Sequence[Plan]) -> str:
    """The name of a module or tensor after further growths."""
    for plan in plans:
        name = plan.renamed(name)
    return name


def _pack(edit: Edit) -> dict[str, Any]:
    """Fields as JSON values, except for empty defaults."""
    values = {field.name: getattr(edit, field.name) for field in fields(edit)}
    defaults = {field.name: repr(field.default) for field in fields(edit)}  # repr distinguishes 0 from 0.0 and −0.0
    packed = {
        key: value for key, value in values.items() if value or repr(value) != defaults[key] or isinstance(edit, Rotation)
    }
    return {key: _runs(value) if isinstance(value, tuple) else value for key, value in packed.items()}


def _unpack(data: Mapping[str, Any]) -> Edit:
    values: dict[str, Any] = {key: _expand(value) if isinstance(value, list) else value for key, value in data.items()}
    kind = Rescaling if "factor" in values else Rotation if "draw" in values else Insertion
    if kind is Insertion and values.get("fill") not in FILL_NAMES:
        raise ValueError(
            f"new entries of {values.get('tensor')} have the unknown fill {values.get('fill')!r}; known: "
            f"{', '.join(FILL_NAMES)}"
        )
    return kind(**values)


def _runs(values: Sequence[float]) -> list[list[float]]:
    """Run-length encode as [first, step, count]: positions are mostly ranges, factors mostly equal.

    Only integers form runs with a step: adding a step to a float would round.
    """
    runs: list[list[float]] = []
    for value in values:
        if runs and type(value) is type(runs[-1][0]):
            first, step, count = runs[-1]
            if type(value) is int and (count == 1 or value == first + step * count):
                runs[-1][1:] = [value - first if count == 1 else step, count + 1]
                continue
            if repr(value) == repr(first) and not step:
                runs[-1][2] += 1
                continue
        runs.append([value, 0, 1])
    return runs


def _expand(runs: Sequence[Sequence[float]]) -> tuple[Any, ...]:
    if sum(count for _, _, count in runs) > LONGEST:
        raise ValueError("a list of positions is longer than any axis: the file is damaged")
    return tuple(first + step * index if step else first for first, step, count in runs for index in range(int(count)))


def _plain(value: Any) -> Any:
    """A setting's value as JSON: tuples (the usual case) as lists; lists and dicts with a marker."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, list):
        return {"list": [_plain(item) for item in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _plain(item) for key, item in value.items()}}
    if isinstance(value, dict) and all(type(key) is int for key in value):
        return {"numbered": [[key, _plain(item)] for key, item in value.items()]}
    raise TypeError(f"a setting of {type(value).__name__} can't be written as JSON: {value!r}")


def _from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_from_plain(item) for item in value)
    if isinstance(value, dict) and "list" in value:
        return [_from_plain(item) for item in value["list"]]
    if isinstance(value, dict) and "numbered" in value:
        return {key: _from_plain(item) for key, item in value["numbered"]}
    if isinstance(value, dict):
        return {key: _from_plain(item) for key, item in value["dict"].items()}
    return value
