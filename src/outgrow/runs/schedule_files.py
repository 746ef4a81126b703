"""Read and write schedules as TOML and JSON, with plain dicts as the intermediate form.

    [[growth]]
    epoch = 25      # or step = 10_000, or share = 0.4 (of the run), or when = { rule = "plateau", metric = "val_loss" }
    grow = [{ widen = "*", factor = 1.5 }, { deepen = "layer3.1", count = 2, fade = 200 }]
    lr = 0.2

Events are one array, in order. A transform is a table; one key is its kind (`widen`, `deepen`, `kernel`, `branch` or one added
with `outgrow.register_transform`), with the place as its value. All other keys are fields of the transform's class; fields that
are left out have their defaults. A method with options is written as `{ name = "r2r", init = "he" }`. Python functions, as a
trigger or an init, can't be written.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from outgrow.errors import GrowthError, ScheduleError
from outgrow.methods.all_methods import method_classes
from outgrow.methods.base import Method
from outgrow.methods.learned import LearnedInit
from outgrow.runs import triggers
from outgrow.runs.schedule import At, Event, Schedule, When
from outgrow.saving.atomic_write import check_path, write_plain
from outgrow.transforms.all_transforms import Transform, kind_of, kinds

FIXED = ("step", "epoch", "share")
TIMES = (*FIXED, "when")
OPTIONS = tuple(each.name for each in dataclasses.fields(Event) if each.name != "grow")


def to_dict(schedule: Schedule) -> dict[str, Any]:
    """A schedule as plain data: dicts, lists, strings and numbers.

    Example:
        >>> from outgrow import Widen
        >>> to_dict(Schedule([At(epoch=25, grow=[Widen("*", factor=1.5)], lr=0.2)]))
        {'growth': [{'epoch': 25, 'grow': [{'widen': '*', 'factor': 1.5}], 'lr': 0.2}]}
    """
    return {"growth": [_event_out(event, f"growth {number}") for number, event in enumerate(schedule, 1)]}


def _event_out(event: At | When, place: str) -> dict[str, Any]:
    if isinstance(event, At):
        time: dict[str, Any] = {name: _plain(value) for name in FIXED if (value := getattr(event, name)) is not None}
    else:
        name = _named(triggers.TRIGGERS, event.rule)
        if name is None:
            known = " and ".join(triggers.TRIGGERS)
            raise ScheduleError(
                f"{place}: {event.rule!r} is Python code, which a file can't hold: use one of the named triggers, {known}"
            )
        time = {"when": {"rule": name, **_options_out(event.rule)}}
    grow = [_transform_out(one, f"{place}, transform {number}") for number, one in enumerate(event.grow, 1)]
    options = {name: value for name, value in _options_out(event).items() if name in OPTIONS}
    return {**time, "grow": grow, **options}


def _transform_out(transform: Transform, place: str) -> dict[str, Any]:
    kind = kind_of(transform)
    if kind is None:
        raise ScheduleError(f"{place}: {transform!r} is not a registered transform")
    options = _options_out(transform)
    options.pop(kind.place, None)
    method = getattr(transform, "method", None)
    if isinstance(method, Method):
        name = _named(method_classes(), method)
        if name is None:
            way_out = f"register it with outgrow.register_method('…', {type(method).__name__})"
            raise ScheduleError(f"{place}: {method!r} is a method without a name, which a file can't hold: {way_out}")
        if callable(method.init):
            inits = "name one ('std', 'he', 'xavier', 'copy'), or keep the schedule in Python"
            raise ScheduleError(f"{place}: init={method.init!r} is a function, which a file can't hold: {inits}")
        if isinstance(method.init, LearnedInit):
            way_out = "name an init ('std', 'he', 'xavier', 'copy'), or keep the schedule in Python"
            raise ScheduleError(f"{place}: init={method.init!r} is learned from batches, which a file can't hold: {way_out}")
        options["method"] = {"name": name, **_options_out(method)}
    entry = {kind.name: _plain(getattr(transform, kind.place)), **options}
    unwritable = [name for name, value in entry.items() if not isinstance(value, (bool, int, float, str, list, dict))]
    if unwritable:
        found = entry[unwritable[0]]
        raise ScheduleError(f"{place}: {unwritable[0]} = {found!r} can't be written: files hold numbers, strings and lists")
    return entry


def _named(table: Mapping[str, Any], thing: Any) -> str | None:
    return next((name for name, kind in table.items() if type(thing) is kind), None)


def _options_out(thing: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults."""
    values = {each.name: (getattr(thing, each.name), each.default) for each in dataclasses.fields(thing)}
    return {name: _plain(value) for name, (value, default) in values.items() if value != default}


def _plain(value: Any) -> Any:
    """A value with numpy's numbers as Python's, and sequences as lists."""
    if isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    return [_plain(item) for item in value] if isinstance(value, Collection) else value


def from_dict(data: Mapping[str, Any], source: str = "") -> Schedule:
    """The schedule from plain data; error messages begin with `source`, e.g. the path of a file.

    Example:
        >>> from_dict({"growth": [{"epoch": 25, "grow": [{"deepen": "layer3.1"}]}]})
        Schedule(events=(At(epoch 25: Deepen after 'layer3.1' + 1),))
    """
    where = f"{source}: " if source else ""
    if not isinstance(data, Mapping):
        raise ScheduleError(f"{where}a schedule is a table with the key 'growth', not {data!r}")
    _check_keys(data, ("growth",), where.removesuffix(": ") or "the schedule")
    entries = data.get("growth")
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise ScheduleError(f"{where}'growth' must be a list of tables, one per growth: in TOML, start each with [[growth]]")
    events = [_event(entry, f"{where}growth {number}") for number, entry in enumerate(entries, 1)]
    try:
        return Schedule(events)
    except GrowthError as error:
        raise ScheduleError(f"{where}{error}") from error


def _event(entry: Any, place: str) -> At | When:
    entry = _table(entry, place, "{ epoch = 25, grow = [{ widen = '*', factor = 1.5 }] }")
    _check_keys(entry, (*TIMES, "grow", *OPTIONS), place)
    times = [name for name in TIMES if name in entry]
    if len(times) != 1:
        found = " and ".join(times) or "none"
        raise ScheduleError(f"{place}: exactly one of 'epoch', 'step', 'share' and 'when' is required, and it has {found}")
    if "grow" not in entry:
        raise ScheduleError(f"{place}: 'grow' is missing, e.g. grow = [{{ widen = '*', factor = 1.5 }}]")
    grow = entry["grow"] if isinstance(entry["grow"], list) else [entry["grow"]]
    options = {name: _no_table(value, name, place) for name, value in entry.items() if name in OPTIONS}
    options["grow"] = [_transform(one, f"{place}, transform {number}") for number, one in enumerate(grow, 1)]
    if times == ["when"]:
        trigger = _built(
            triggers.TRIGGERS, entry["when"], "rule", f"{place}, when", "{ rule = 'plateau', metric = 'val_loss' }"
        )
        return _made(When, {"rule": trigger, **options}, place)  # type: ignore[no-any-return]
    return _made(At, {times[0]: _no_table(entry[times[0]], times[0], place), **options}, place)  # type: ignore[no-any-return]


def _transform(entry: Any, place: str) -> Transform:
    entry = _table(entry, place, "{ widen = '*', factor = 1.5 }")
    known = {kind.name: kind for kind in kinds()}
    named = [name for name in known if name in entry]
    if len(named) != 1:
        found = f"it has {' and '.join(named)}" if named else _hint(entry, known) or "it has none of them"
        raise ScheduleError(f"{place}: a transform has one of the keys {_listed(known)}, with the place as its value; {found}")
    kind = known[named[0]]
    place = f"{place} ({kind.name})"
    _check_keys(entry, (kind.name, *kind.options), place)
    values = {kind.place if key == kind.name else key: value for key, value in entry.items()}
    for key, value in entry.items():
        if key == "method" and isinstance(value, Mapping) and kind.methods:
            values[key] = _built(method_classes(), value, "name", f"{place}, method", "{ name = 'r2r', init = 'he' }")
        else:
            _no_table(value, key, place)
    return _made(kind.request, values, place)


def _built(table: Mapping[str, Any], entry: Any, key: str, place: str, usual: str) -> Any:
    """A trigger or method from a table with its name and options."""
    entry = _table(entry, place, usual)
    name = entry.get(key)
    if key not in entry:
        raise ScheduleError(f"{place}: '{key}' is missing; {_hint(entry, (key,)) or f'write e.g. {usual}'}")
    if not isinstance(name, str) or name not in table:
        raise ScheduleError(f"{place}: {key} = {name!r}: {_near(str(name), table)}write one of {_listed(table)}")
    kind = table[name]
    _check_keys(entry, (key, *(each.name for each in dataclasses.fields(kind))), f"{place} ({name})")
    options = {option: _no_table(value, option, place) for option, value in entry.items() if option != key}
    return _made(kind, options, f"{place} ({name})")


def _made(kind: Any, options: Mapping[str, Any], place: str) -> Any:
    """An object of a class; errors of its constructor are raised with the place in the file."""
    needed = [each.name for each in dataclasses.fields(kind) if each.default is dataclasses.MISSING]
    missing = [name for name in needed if name not in options]
    if missing:
        raise ScheduleError(f"{place}: {_listed(missing)} is missing")
    try:
        return kind(**options)
    except (GrowthError, TypeError, ValueError) as error:
        raise ScheduleError(f"{place}: {error}") from error


def _table(entry: Any, place: str, usual: str) -> Mapping[str, Any]:
    if not isinstance(entry, Mapping):
        raise ScheduleError(f"{place}: {entry!r} is not a table: write e.g. {usual}")
    return entry


def _no_table(value: Any, name: str, place: str) -> Any:
    if isinstance(value, Mapping):
        raise ScheduleError(f"{place}: {name} is a table, {dict(value)!r}: write a single value")
    return value


def _check_keys(entry: Mapping[str, Any], known: Collection[str], place: str) -> None:
    unknown = [key for key in entry if key not in known]
    if unknown:
        raise ScheduleError(
            f"{place}: there is no key {unknown[0]!r}: {_near(unknown[0], known)}keys here are {_listed(known)}"
        )


def _hint(entry: Mapping[str, Any], known: Collection[str]) -> str:
    """A suggestion for the first misspelt key of a table."""
    hints = ((key, _near(key, known).strip()) for key in entry)
    return next((f"for {key!r}, {hint}" for key, hint in hints if hint), "")


def _near(word: Any, known: Collection[str]) -> str:
    near = difflib.get_close_matches(str(word).lower(), known, n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def _listed(names: Collection[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def read(path: str | os.PathLike[str]) -> Schedule:
    """Read a schedule from a .toml or .json file."""
    check_path(path, "outgrow.Schedule.from_file('schedule.toml')", ScheduleError)
    return from_dict(read_table(path), str(path))


def read_table(path: str | os.PathLike[str]) -> Any:
    """The contents of a .toml or .json file as plain data."""
    path = Path(path)
    kind = _kind(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
        return _parse_toml(text) if kind == "TOML" else json.loads(text, object_pairs_hook=_once)
    except OSError as error:
        raise ScheduleError(f"{path} can't be read: {error.strerror or error}") from error
    except ValueError as error:  # raised by both parsers, and by decoding
        raise ScheduleError(f"{path} is not valid {kind}: {error}") from error
    except RecursionError as error:
        raise ScheduleError(f"{path} is not a schedule: its brackets are nested too deeply") from error


def write(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Write a schedule to a .toml or .json file."""
    check_path(path, "schedule.to_file('schedule.toml')", ScheduleError)
    path, data = Path(path), to_dict(schedule)
    try:
        text = (
            to_toml(data) if _kind(path) == "TOML" else json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        )
        encoded = text.encode()
    except ValueError as error:
        raise ScheduleError(f"{path}: the schedule can't be written as {_kind(path)}: {error}") from error
    write_plain(path, encoded, ScheduleError)


def _kind(path: Path) -> str:
    kinds = {".toml": "TOML", ".json": "JSON"}
    if path.suffix.lower() not in kinds:
        raise ScheduleError(f"{path}: the name of a schedule file must end in .toml or .json")
    return kinds[path.suffix.lower()]


def _parse_toml(text: str) -> Any:
    for parser in ("tomllib", "tomli"):  # tomllib is new in Python 3.11
        try:
            return import_module(parser).loads(text)
        except ImportError:
            continue
    raise ScheduleError("this Python has no parser for TOML: pip install tomli, or write the schedule as JSON")


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = [key for key in keys if keys.count(key) > 1]
    if twice:
        raise ValueError(f"the key {twice[0]!r} occurs twice")
    return dict(pairs)


def to_toml(data: Mapping[str, Any]) -> str:
    """The result of `to_dict` as TOML.

    Example:
        >>> from outgrow import Branch, Kernel
        >>> print(to_toml(to_dict(Schedule([At(step=9, grow=[Kernel("conv1", (3, 5)), Branch("layer2")])]))), end="")
        [[growth]]
        step = 9
        grow = [{ kernel = "conv1", size = [3, 5] }, { branch = "layer2" }]
    """
    tables = ["".join(f"{key} = {_value(value)}\n" for key, value in entry.items()) for entry in data["growth"]]
    return "\n".join(f"[[growth]]\n{table}" for table in tables) or "growth = []\n"


def _value(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace(
            "\x7f", "\\u007F"
        )  # JSON and TOML escape all other characters alike
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + " }"
    return "[" + ", ".join(map(_value, value)) + "]" if isinstance(value, list) else repr(value)
