"""The plan: every edit that a growth will make, frozen and printable before any number changes.

An *insertion* opens new positions along one axis of one tensor and says what goes there; a *rescaling* multiplies existing
numbers; a *setting* changes a size (or an ε) that a module keeps as a Python attribute; a *graft*, made before all else, routes
a skip through a folded residual. Insertions of one tensor are made in order, each on the result of the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from outgrow.growth_plan.module_starts import Start
from outgrow.text.tables import table

COLUMNS = ("volume", "size", "method")
FILL_NAMES = ("free", "zero", "one", "mean", "rowmean", "spread", "copy")  # what new entries may hold: see `Insertion`
LONGEST = 2**28  # entries along an axis: a bound for what a damaged file may claim


@dataclass(frozen=True)
class Insertion:
    """New positions along an axis, and the rule that fills them.

    fill: "free" (drawn: entry k is `signs[k]` times draw number `draws[k]`), "zero", "one", "mean" (of the `members` of its
    run, weighted by the tensor `weights` if one is named), "rowmean" (of all that a row of the weight holds), "spread" (the
    same mean plus or minus draws with the mean square of the row's deviations), or "copy" (of old position `sources[k]`,
    times `signs[k]`).
    """

    tensor: str
    axis: int
    size: int  # before
    at: tuple[int, ...]  # positions of the new entries, counted afterwards
    sources: tuple[int, ...]  # for each, the old position of the unit it is modelled on
    fill: str
    draws: tuple[int, ...] = ()
    signs: tuple[float, ...] = ()
    members: tuple[int, ...] = ()  # old positions that belong to the volume: run by run, unit by unit
    runs: int = 1  # how often the units repeat along the axis
    length: int = 1  # how many neighbouring positions a unit has in a run
    weights: str = ""
    keep: tuple[float, ...] = ()  # factor for each member, if copies share its part
    gradient: tuple[float, ...] = ()  # factor for the gradient of each new entry that is a copy
    gradient_keep: tuple[float, ...] = ()  # factor for the gradient of each member
    init: str = "std"
    noise: float = 0.0
    fade: int = 0  # over how many optimizer steps the values come in; they start at zero

    @property
    def new_size(self) -> int:
        return self.size + len(self.at)


@dataclass(frozen=True)
class Rescaling:
    """Multiply all existing numbers of a tensor: w → factor·(w + offset) − offset, for code that uses w + offset."""

    tensor: str
    factor: float
    offset: float = 0.0


@dataclass(frozen=True)
class Rotation:
    """Multiply a tensor along an axis by the transpose of an orthogonal matrix, which a new layer behind it undoes."""

    tensor: str
    axis: int
    side: int  # of the matrix
    draw: int  # the number that it is drawn from


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
    """Route the skip of a sum through a new `Fold`, as yet the identity."""

    block: str  # path of the module whose code makes the sum
    module: str  # path of the Fold: a new child of the block, or an nn.Identity whose place it takes
    sum: int  # which of the sums in the block's code; −1 if an nn.Identity is replaced
    operand: int  # which side of the sum is the skip
    size: int  # channels of the skip
    dim: int  # and their axis

    def __str__(self) -> str:
        return f"{self.module}: folds the skip of {self.block or 'the model'}"


@dataclass(frozen=True)
class Insert:
    """A new child of a container. Those behind it get the next number, if they have numbers.

    It is a copy of one of the other children, or built from a description. A module that stands alone is put into an
    nn.Sequential of its own first (`wraps`), or into an `outgrow.Parallel` (`beside` too): it is then called 0 there.
    """

    container: str  # its path; "" is the model itself
    at: int  # where among the children the new one stands
    copy_of: int  # which child it is a copy of, counted before; −1 if it is built
    key: str  # its name
    prefix: str | None = None  # children are called by this and consecutive numbers, the first of which is `first`
    first: int = 0
    made: tuple[tuple[str, Any], ...] = ()
    wraps: bool = False
    beside: bool = False
    start: Start = field(default=Start(), compare=False, repr=False)  # not saved: a file holds the values themselves

    @property
    def path(self) -> str:
        return f"{self.container}.{self.key}" if self.container else self.key

    def renamed(self, name: str) -> str:
        """What a module or tensor is called afterwards."""
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
        """What a module or tensor was called before; None for the new module and all that is in it."""
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
    """One volume's growth, in words and numbers. Blocks are counted; a kernel has a size an axis."""

    volume: str
    old: int | tuple[int, ...]
    new: int | tuple[int, ...]
    method: str
    exact: bool = True
    note: str = ""

    @property
    def row(self) -> tuple[str, str, str]:
        """What a table tells."""
        sizes = ["×".join(map(str, size)) if isinstance(size, tuple) else str(size) for size in (self.old, self.new)]
        return self.volume, " → ".join(sizes), self.method + ("" if self.exact else " (does not preserve)")


@dataclass(frozen=True)
class Plan:
    """What a growth does, in order. One that does several things may be several plans."""

    changes: tuple[Change, ...]
    edits: tuple[Edit, ...]
    settings: tuple[Setting, ...] = ()
    seed: int = 0
    grafts: tuple[Graft, ...] = ()
    inserts: tuple[Insert, ...] = ()
    continues: bool = False  # it belongs to the same growth as the plan before it

    def renamed(self, name: str) -> str:
        """What a module or tensor of the model before is called afterwards."""
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
        """Paths of the new modules, by the names that they have in the end."""
        paths = []
        for index, insert in enumerate(self.inserts):
            path = insert.path
            for later in self.inserts[index + 1 :]:
                path = later.renamed(path)
            paths.append(path)
        return paths

    def shapes(self, before: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that change, afterwards."""
        shapes: dict[str, list[int]] = {}
        for edit in self.edits:
            if isinstance(edit, Insertion):
                shapes.setdefault(edit.tensor, list(before[edit.tensor]))[edit.axis] = edit.new_size
        return {name: tuple(shape) for name, shape in shapes.items()}

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values; `from_json` gives back an equal plan, to the last bit and type."""
        return {
            "seed": self.seed,
            "changes": [{**vars(c), "old": _plain(c.old), "new": _plain(c.new)} for c in self.changes],
            "edits": [_pack(edit) for edit in self.edits],
            "settings": [
                {**vars(setting), "old": _plain(setting.old), "new": _plain(setting.new)} for setting in self.settings
            ],
            **({"grafts": [asdict(graft) for graft in self.grafts]} if self.grafts else {}),
            **({"inserts": [_unstarted(insert) for insert in self.inserts]} if self.inserts else {}),
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


def _unstarted(insert: Insert) -> dict[str, Any]:
    values = asdict(replace(insert, start=Start()))
    return {name: value for name, value in values.items() if name != "start"}


def recorded(plan: Plan) -> Plan:
    """A plan as a history keeps it: without the starts of new modules, whose values are in the model."""
    return replace(plan, inserts=tuple(replace(insert, start=Start()) for insert in plan.inserts))


def joined(plans: Sequence[Plan]) -> Plan:
    """Plans that were carried out one after the other, as one to look at."""
    if len(plans) == 1:
        return plans[0]
    names = ("changes", "edits", "settings", "grafts", "inserts")
    parts: dict[str, Any] = {name: tuple(item for plan in plans for item in getattr(plan, name)) for name in names}
    return Plan(seed=plans[0].seed, **parts)


def noted(plan: Plan, note: str) -> Plan:
    """A plan with a remark on each of its changes."""
    return replace(plan, changes=tuple(replace(change, note=note) for change in plan.changes))


def renamed(name: str, plans: Sequence[Plan]) -> str:
    """What a module or tensor is called after further growths."""
    for plan in plans:
        name = plan.renamed(name)
    return name


def _pack(edit: Edit) -> dict[str, Any]:
    """Fields as JSON values, without those that are empty by default."""
    values = {field.name: getattr(edit, field.name) for field in fields(edit)}
    usual = {field.name: repr(field.default) for field in fields(edit)}  # repr tells 0 from 0.0 and −0.0
    packed = {key: value for key, value in values.items() if value or repr(value) != usual[key] or isinstance(edit, Rotation)}
    return {key: _runs(value) if isinstance(value, tuple) else value for key, value in packed.items()}


def _unpack(data: Mapping[str, Any]) -> Edit:
    values: dict[str, Any] = {key: _expand(value) if isinstance(value, list) else value for key, value in data.items()}
    kind = Rescaling if "factor" in values else Rotation if "draw" in values else Insertion
    if kind is Insertion and values.get("fill") not in FILL_NAMES:
        raise ValueError(
            f"new entries of {values.get('tensor')} are to be {values.get('fill')!r}, and not {', '.join(FILL_NAMES)}"
        )
    return kind(**values)


def _runs(numbers: Sequence[float]) -> list[list[float]]:
    """Runs as [first, step, count]: positions are mostly ranges, factors mostly equal.

    Only whole numbers make runs with a step: adding a step to a float would round.
    """
    runs: list[list[float]] = []
    for number in numbers:
        if runs and type(number) is type(runs[-1][0]):
            first, step, count = runs[-1]
            if type(number) is int and (count == 1 or number == first + step * count):
                runs[-1][1:] = [number - first if count == 1 else step, count + 1]
                continue
            if repr(number) == repr(first) and not step:
                runs[-1][2] += 1
                continue
        runs.append([number, 0, 1])
    return runs


def _expand(runs: Sequence[Sequence[float]]) -> tuple[Any, ...]:
    if sum(count for _, _, count in runs) > LONGEST:
        raise ValueError("a list of positions is longer than any axis: the file is damaged")
    return tuple(first + step * index if step else first for first, step, count in runs for index in range(int(count)))


def _plain(value: Any) -> Any:
    """A setting's value as JSON: tuples, which are usual, as lists; lists and dicts marked as such."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, list):
        return {"list": [_plain(item) for item in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _plain(item) for key, item in value.items()}}
    raise TypeError(f"a setting of {type(value).__name__} can't be written as JSON: {value!r}")


def _from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_from_plain(item) for item in value)
    if isinstance(value, dict) and "list" in value:
        return [_from_plain(item) for item in value["list"]]
    if isinstance(value, dict):
        return {key: _from_plain(item) for key, item in value["dict"].items()}
    return value
