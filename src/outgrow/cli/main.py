"""The command line: list what can grow in a model, compare methods, preview a schedule, grow a checkpoint on the disk, search.

    outgrow inspect timm:resnet18
    outgrow inspect mycode.models:build --input 3,32,32
    outgrow inspect grown.safetensors [--model timm:resnet18]     (or run.pt, as Run.save writes it)
    outgrow inspect CHECKPOINT                                    (a directory of Transformers)
    outgrow compare timm:resnet18 layer1.0.conv1
    outgrow timeline schedule.toml --model timm:resnet18 [--svg timeline.svg]
    outgrow grow CHECKPOINT --widen mlp=1.5 --deepen layers=24 --out NEW
    outgrow search worker mycode.search:describe --study NAME --storage search.log

torch, timm and rich are imported only where they are needed. rich is optional: it formats tables on a terminal.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from outgrow.cli.grow_command import add_grow
from outgrow.cli.model_names import CommandError, input_shape, named_model, prepare_transformers
from outgrow.cli.plugins import load_plugins
from outgrow.cli.search_command import add_search
from outgrow.text.passwords import hide_passwords
from outgrow.text.plurals import counted
from outgrow.text.tables import WIDTH, make_table

if TYPE_CHECKING:
    from torch import nn

    from outgrow.analysis.volumes import Volume
    from outgrow.growth_plan.plan import Change, Plan
    from outgrow.saving.weights_file import Description
    from outgrow.transforms.deepen.places import Place

DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "bool")


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"outgrow: {hide_passwords(message)} ({self.prog} --help shows the usage)\n")


class ShowVersion(argparse.Action):
    """Look up the version only if `--version` is given."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        from importlib.metadata import version

        print(f"outgrow {version('outgrow')}")
        parser.exit()


def make_parser() -> Parser:
    """The parser of all commands and options."""
    parser = Parser(prog="outgrow", description="Grow PyTorch networks without changing what they compute.")
    parser.add_argument("--version", action=ShowVersion, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    inspect = commands.add_parser(
        "inspect",
        help="list the volumes of a model, or the growths and tensors of a checkpoint",
        description="List the volumes of a model: size, modules that write and read it, methods that can grow it, and the "
        "reasons why others can't; and the places where the model can be deepened. For a file of outgrow.save without --model: "
        "its growths and tensors. For a directory of Transformers: the kinds of units and stacks that can grow, the steps that "
        "work, and whether its configuration can express the result.",
    )
    _add_target(inspect)
    given = "for a directory of Transformers: a file with inputs of the model, as for outgrow grow"
    inspect.add_argument("--example", metavar="FILE", help=given)
    inspect.add_argument("--all", action="store_true", help="print one row per volume, and nothing shortened")
    inspect.set_defaults(run=run_inspect)
    compare = commands.add_parser(
        "compare",
        help="compare R2R, Net2Net and NetMorph for one volume or module of a model",
        description="Compare R2R, Net2Net and NetMorph for one volume or module of a model: the requirements of each method, "
        "and its effect on outputs and gradients, found by testing the operators there and by growing copies of the model.",
    )
    _add_target(compare)
    compare.add_argument("where", metavar="WHERE", help="name of a volume or module, as listed by outgrow inspect")
    compare.set_defaults(run=run_compare)
    timeline = commands.add_parser(
        "timeline",
        help="preview the stages of a training run with a growth schedule",
        description="Show the stages of a training run with a growth schedule: sizes, parameters and FLOPs, computed without "
        "training. An event that can't be carried out is an error.",
    )
    timeline.add_argument("schedule", metavar="SCHEDULE", help="a .toml or .json file")
    timeline.add_argument("--model", metavar="TARGET", required=True, help="timm:NAME, or MODULE:CALLABLE (or an attribute)")
    timeline.add_argument("--svg", metavar="FILE", help="also write a picture")
    _add_input(timeline)
    timeline.set_defaults(run=run_timeline)
    add_grow(commands)
    add_search(commands)
    return parser


def _add_target(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "target",
        metavar="TARGET",
        help="timm:NAME, MODULE:CALLABLE (or a module's attribute), a file written by outgrow.save or Run.save, or a "
        "directory of Transformers",
    )
    command.add_argument("--model", metavar="TARGET", help="for a checkpoint: the small model to load it into (timm:NAME, …)")
    command.add_argument(
        "--no-checksums",
        dest="checksums",
        action="store_false",
        help="for a checkpoint: do not compare its contents with its checksums, e.g. because they were changed on purpose",
    )
    _add_input(command)


def _add_input(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--input",
        "--shape",
        dest="shapes",
        action="append",
        type=input_shape,
        metavar="N,N,…",
        help="shape of an input without the batch, e.g. 3,224,224; repeat it for each input",
    )
    command.add_argument("--batch", type=_positive, default=2, metavar="N", help="batch size of the inputs (2)")
    command.add_argument("--dtype", choices=DTYPES, help="type of the inputs, and of the model if floating-point (float32)")
    command.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a batch size: write a positive integer")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit code.

    Example:
        >>> main(["inspect", "torch.nn:Identity", "--input", "3"])
        torch.nn:Identity: Identity, example (2, 3) float32
        <BLANKLINE>
        0 volumes, 0 can grow; 0 parameters
        0
    """
    args = make_parser().parse_args(argv)
    try:
        print(args.run(args))
        sys.stdout.flush()
    except BrokenPipeError:  # the reading process, e.g. `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt as stopped:
        if str(stopped):
            print(f"\noutgrow: {stopped}", file=sys.stderr)
        return 130
    except Exception as error:
        print(f"outgrow: {_message(error, hasattr(args, 'input'))}", file=sys.stderr)
        return 2
    return 0


def _message(error: Exception, from_options: bool = True) -> str:
    """The text of an error; for errors that are not outgrow's own, with the name of the class.

    from_options: whether the example comes from options.
    """
    from outgrow.errors import ExampleError, GrowthError

    text = str(error).strip()
    if isinstance(error, ExampleError):
        place = "; ".join(f"{problem.where}: {problem.reason}" for problem in error.problems)
        return f"{text.splitlines()[0]} ({place}): change {'--input, --batch or --dtype' if from_options else 'the example'}"
    own = isinstance(error, (CommandError, GrowthError))
    return hide_passwords(text if own else f"{type(error).__name__}: {text}".rstrip(": "))


def run_inspect(args: argparse.Namespace) -> str:
    """The output of `outgrow inspect`."""
    if os.path.isdir(args.target):
        return _inspect_directory(args)
    if args.example is not None:
        raise CommandError(f"--example is for a directory of Transformers; for {args.target} write --input 3,224,224")
    if _is_file(args.target):
        if args.target.endswith((".toml", ".json")):
            raise CommandError(
                f"{args.target} is no checkpoint; if it is a schedule, outgrow timeline {args.target} --model TARGET shows it"
            )
        from outgrow.saving.save_load import describe

        about = describe(args.target, checksums=args.checksums, values=args.model is None)
        if args.model is None:
            return _checkpoint_json(about) if args.json else _checkpoint_text(about, args.checksums)
    elif args.model is not None:
        raise CommandError(
            f"--model requires a checkpoint (a file of outgrow.save or Run.save) as TARGET, and {args.target} is a model: "
            "leave --model out"
        )
    return _inspect_model(args)


def _inspect_directory(args: argparse.Namespace) -> str:
    """What can grow in a Transformers checkpoint, and whether the result can be saved."""
    from outgrow.checkpoints.inspect_checkpoint import inspect_checkpoint

    if args.model is not None or args.shapes:
        raise CommandError(
            f"{args.target} is a directory with the configuration of its model: leave --model and --input out (--example FILE "
            "names inputs)"
        )
    load_plugins()
    prepare_transformers()
    found = inspect_checkpoint(args.target, args.example)
    return json.dumps(found.to_json(), indent=2, ensure_ascii=False) if args.json else str(found)


def run_compare(args: argparse.Namespace) -> str:
    """The output of `outgrow compare`."""
    import outgrow

    if _is_file(args.target) != (args.model is not None):
        raise CommandError(
            "a checkpoint (a file of outgrow.save or Run.save) as TARGET requires --model, and --model requires a checkpoint"
        )
    comparison = outgrow.compare(*_model_of(args), args.where)
    return json.dumps(comparison.to_json(), indent=2, ensure_ascii=False) if args.json else str(comparison)


def run_timeline(args: argparse.Namespace) -> str:
    """The output of `outgrow timeline`."""
    from outgrow.runs.schedule import Schedule
    from outgrow.runs.timeline import timeline

    load_plugins()  # a schedule may name a method that a plugin registers
    schedule = Schedule.from_file(args.schedule)  # report its mistakes before a model is built
    found = timeline(*named_model(args.model, args.shapes, args.batch, args.dtype), schedule)
    if args.svg is not None:
        found.svg(args.svg)
    if args.json:
        return json.dumps(found.to_json(), indent=2, ensure_ascii=False)
    return found.table(shutil.get_terminal_size((WIDTH, 24)).columns)


def _model_of(args: argparse.Namespace) -> tuple[nn.Module, Any]:
    """The model of a command, with the weights of the checkpoint if there is one, and an example input."""
    import outgrow

    load_plugins()
    model, example = named_model(args.model or args.target, args.shapes, args.batch, args.dtype)
    return (outgrow.load(model, args.target, checksums=args.checksums) if args.model else model), example


def _is_file(target: str) -> bool:
    return target.endswith(".safetensors") or os.path.exists(target)


def _inspect_model(args: argparse.Namespace) -> str:
    import outgrow
    from outgrow.model.example import describe_example

    model, example = _model_of(args)
    volumes, places = outgrow.volumes(model, example), outgrow.places(model, example)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if args.json:
        facts = [{"name": v.name, "size": v.size, "kind": v.kind, "unit": v.unit or None,
                  "writers": _modules(v, "writes"), "readers": _modules(v, "reads"),
                  "growable": v.growable, "methods": list(v.methods), "reason": v.reason} for v in volumes]  # fmt: skip
        about = {"target": args.target, "model": type(model).__qualname__, "parameters": parameters, "volumes": facts,
                 "places": [{"name": p.name, "methods": list(p.methods), "reason": p.reason} for p in places]}  # fmt: skip
        return json.dumps(about, indent=2, ensure_ascii=False)
    title = f"{args.target}: {type(model).__qualname__}, example {describe_example(example)}"
    growable = sum(volume.growable for volume in volumes)
    noun = "volume" if len(volumes) == 1 else "volumes"
    closing = f"{len(volumes)} {noun}, {growable} can grow; {parameters:,} parameters"
    return "\n\n".join([title, *_volume_tables(volumes, full=args.all), *_place_tables(places, full=args.all), closing])


def _modules(volume: Volume, role: str) -> list[str]:
    """Names of the modules that write or read a volume; for a parameter of the model itself, the parameter's name."""
    return list(dict.fromkeys(s.tensor.rpartition(".")[0] or s.tensor for s in volume.slots if s.role == role))


def _volume_tables(volumes: Sequence[Volume], full: bool) -> list[str]:
    """A table with one row per volume, and a table of reasons.

    Unless `full`, volumes that differ only in the number of their block share one row.
    """
    from outgrow.methods.group_reasons import grouped_reasons

    groups: dict[object, list[Volume]] = {}
    for volume in volumes:
        lists = len(_modules(volume, "writes")), len(_modules(volume, "reads"))
        texts = _blockless(volume.name), _blockless(volume.reason)
        alike = (*texts, volume.size, volume.kind, volume.unit, volume.methods, *lists)
        groups.setdefault(volume.name if full else alike, []).append(volume)
    rows, reasons, units = [], [], []
    for first, *others in groups.values():
        name = f"{first.name} + {len(others)} alike" if others else first.name
        modules = [", ".join(m) if full else _shortened(m) for m in (_modules(first, "writes"), _modules(first, "reads"))]
        rows.append((name, str(first.size), first.kind or "–", *modules, ", ".join(first.methods) or "–"))
        if first.reason:
            reasons.append((name, grouped_reasons(first.reason)))
        if first.unit:
            units.append((name, first.unit))
    header = ("volume", "size", "kind", "written by", "read by", "grows by")
    tables = (header, rows), (("volume", "one unit is"), units), (("volume", "why not"), reasons)
    return [make_table(columns, lines) for columns, lines in tables if lines]


def _place_tables(places: Sequence[Place], full: bool) -> list[str]:
    """A table of the modules behind which a block can be inserted: one of the model's own kind or, with `full`, any."""
    groups: dict[object, list[Place]] = {}
    for place in places:
        if full or place.own:
            groups.setdefault(place.name if full else (_blockless(place.name), place.methods), []).append(place)
    rows = [
        (f"{first.name} + {len(others)} alike" if others else first.name, ", ".join(first.methods) or f"– {first.reason}")
        for first, *others in groups.values()
    ]
    return [make_table(("place", "deepened by"), rows)] if rows else []


def _blockless(text: str) -> str:
    """Replace the numbers of blocks in names: blocks.3.mlp → blocks.N.mlp."""
    return re.sub(r"(?<=\.)\d+(?![\w])|(?<![\w.#])\d+(?=\.[a-zA-Z])", "N", text)


def _shortened(modules: Sequence[str], most: int = 2) -> str:
    if len(modules) <= most:
        return ", ".join(modules)
    return f"{modules[0]} + {len(modules) - 1} more"


def _checkpoint_text(about: Description, checksums: bool) -> str:
    from outgrow.growth_plan.plan import COLUMNS

    growths = [(place, changes) for place, plans in about.histories.items() for changes in _changes(plans)]
    parts = [f"{about.path}: {about.model}, grown {len(growths)} {'time' if len(growths) == 1 else 'times'}"]
    for number, (place, changes) in enumerate(growths, 1):
        of_part = f" (of the module {place} alone)" if place else ""
        parts.append(f"growth {number}{of_part}\n" + make_table(COLUMNS, [change.row for change in changes]))
    rows = [(name, "×".join(map(str, shape)) or "scalar", dtype) for name, (dtype, shape) in about.tensors.items()]
    rows += [(alias, f"the same as {name}", "") for alias, name in about.aliases.items()]
    parts.append(make_table(("tensor", "shape", "type"), rows))
    compared = "match" if about.verified else "are missing: an earlier version wrote the file" if checksums else "not compared"
    parts.append(
        f"{counted(len(about.tensors), 'tensor')}, {_count_values(about):,} values; checksums {compared}; add --model to see "
        "what can grow"
    )
    return "\n\n".join(parts)


def _changes(plans: Sequence[Plan]) -> list[list[Change]]:
    """The changes of each growth."""
    from outgrow.history.growths_on_model import growths

    return [[change for plan in growth for change in plan.changes] for growth in growths(plans)]


def _count_values(about: Description) -> int:
    return sum(math.prod(shape) for _, shape in about.tensors.values())


def _checkpoint_json(about: Description) -> str:
    histories = {place: [plan.to_json() for plan in plans] for place, plans in about.histories.items()}
    tensors = {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in about.tensors.items()}
    facts = {"path": about.path, "model": about.model, "histories": histories, "tensors": tensors, "aliases": about.aliases,
             "verified": about.verified}  # fmt: skip
    return json.dumps(facts, ensure_ascii=False)
