"""Options of `outgrow grow` from a file: `--plan FILE.toml`.

    widen = ["mlp=1.5", "heads=x2"]        # as on the command line
    deepen = "layers=24"
    out = "large"
    training-state = true

A file can hold every option under its name, as a text, a number, true, or a list. Requests with settings that the command line
has no form for are tables under `grow`, as in a schedule (`grow = [{ widen = "*", kind = "mlp", factor = 1.5 }]`); a schedule
file with one `[[growth]]` works too. Options on the command line replace those of the file; requests are added.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from outgrow.cli.model_names import CommandError

if TYPE_CHECKING:
    from outgrow.transforms.all_transforms import Transform

TABLES = ("grow", "growth")


def options_in(path: str, parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[Transform]]:
    """The options of a file, checked by the parser of the command line, and its requests in tables."""
    from outgrow.runs.schedule_files import read_table

    data = read_table(path)
    if not isinstance(data, Mapping):
        raise CommandError(f"{path} is not a table of options: write e.g. widen = 'mlp=1.5'")
    known = {option.removeprefix("--"): action for option, action in parser._option_string_actions.items()}
    names = [name for name in known if name not in ("h", "-h", "help", "plan")]
    arguments: list[str] = []
    for key, value in data.items():
        name = key.replace("_", "-")
        if key in TABLES:
            continue
        if name not in names:
            near = difflib.get_close_matches(name, [*names, *TABLES], n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise CommandError(f"{path}: there is no option {key!r}: {hint}options are {', '.join([*names, 'grow'])}")
        arguments += _arguments(path, name, value, takes_value=known[name].nargs != 0)
    return parser.parse_args(arguments), _requests(path, data)


def _arguments(path: str, name: str, value: Any, takes_value: bool) -> list[str]:
    """An option of a file as arguments of the command line."""
    if not takes_value:
        if not isinstance(value, bool):
            raise CommandError(f"{path}: {name} = {value!r}: write true or false")
        return [f"--{name}"] if value else []
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, (str, int, float)) and not isinstance(one, bool) for one in values):
        raise CommandError(f"{path}: {name} = {value!r}: write a text or a number, or a list of them")
    return [f"--{name}={one}" for one in values]


def _requests(path: str, data: Mapping[str, Any]) -> list[Transform]:
    """The requests of the tables `grow`, or of a schedule with one growth."""
    from outgrow.runs.schedule_files import from_dict

    if all(name in data for name in TABLES):
        raise CommandError(f"{path} has both grow and growth: leave one of them out")
    if "grow" in data:
        return list(from_dict({"growth": [{"epoch": 1, "grow": data["grow"]}]}, path).events[0].grow)
    if "growth" not in data:
        return []
    events = list(from_dict({"growth": data["growth"]}, path))
    if len(events) != 1:
        raise CommandError(f"{path} describes {len(events)} growths, and a checkpoint is grown once: leave one")
    return list(events[0].grow)


def merged(given: argparse.Namespace, planned: argparse.Namespace, lists: Sequence[str]) -> argparse.Namespace:
    """The options of the command line with those of a file where it has none; lists are joined, the file's first."""
    found = argparse.Namespace(**vars(given))
    for name, value in vars(planned).items():
        own = getattr(given, name)
        setattr(found, name, [*value, *own] if name in lists else value if own is None or own is False else own)
    return found
