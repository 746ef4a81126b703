"""The command `outgrow grow`: a checkpoint directory goes in, a larger one that computes the same comes out.

    outgrow grow SMALL --widen mlp=1.5 --widen heads=+2 --widen width=1024 --deepen layers=24 --out LARGE

`--widen WHAT=SIZE`: WHAT is a kind of units (mlp, heads, width, …) or a pattern of module names; SIZE is a factor with a
decimal point (1.5, 2.0) or a cross (x2), a number of new units with a plus (+2), or the new size (1024). `--deepen layers=24`
is the new length of the main stack, `--deepen PATH=+2` adds two blocks behind a module.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from outgrow.cli.grow_saved_file import run_grow_file
from outgrow.cli.model_names import CommandError, input_shape, prepare_transformers
from outgrow.cli.plan_file import merged, options_in
from outgrow.cli.plugins import load_plugins

if TYPE_CHECKING:
    from outgrow.transforms.all_transforms import Transform

DESCRIPTION = """\
Grow a checkpoint into a larger one that computes the same.

CHECKPOINT is a directory of Transformers (config.json and safetensors, in one file or shards), which may be a Trainer's:
tensors are streamed, so that memory does not depend on the size of the model, and the result loads without outgrow. Or it is a
file of outgrow.save, whose model (--model) is grown in memory. outgrow inspect CHECKPOINT shows what can grow."""
EPILOG = """\
WHAT is a kind of units (mlp, heads, head_dim, width, experts, vocab, outputs) or a pattern of module names ('*.mlp.*').
SIZE is a factor with a decimal point or a cross (1.5, x2), a number of new units (+2), or the new size (1024).

  outgrow grow small --widen mlp=1.5 --widen heads=x2 --deepen layers=24 --out large
  outgrow grow run/checkpoint-1000 --deepen layers=24 --training-state --out grown
  outgrow grow model.safetensors --model mycode:build --widen '*=1.5' --fade 200 --out larger.safetensors
  outgrow grow small --plan plan.toml --dry-run"""
NO_FADE = (
    "a fade needs optimizer steps, and a gate that is no part of a plain checkpoint: leave it out (the methods for checkpoints "
    "are exact without it), or fade in during training, with outgrow.transformers.Grow and fade= in its requests; a file of "
    "outgrow.save can hold a fade"
)
SHARD_SIZE = "5GB"
LISTS = ("widen", "deepen")
DTYPES = ("float32", "float16", "bfloat16", "float64")
SIZE = r"(?P<times>[x×])?(?P<plus>\+)?(?P<number>\d+(?:\.\d+)?)"
MOST_JOBS = 4  # unless more are requested
EVERY = 0.2  # seconds between two updates of the bar
Subparsers = Any  # argparse has no public name for it


def add_grow(commands: Subparsers) -> None:
    """Add the command to the parser."""
    grow = commands.add_parser(
        "grow",
        help="grow a checkpoint on the disk into a larger one that computes the same",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = "a directory of Transformers (also of a Trainer), or a file of outgrow.save with --model"
    grow.add_argument("checkpoint", metavar="CHECKPOINT", help=kinds)
    add_options(grow)
    grow.set_defaults(run=run_grow)


def add_options(grow: argparse.ArgumentParser) -> None:
    """Add all options; their defaults are None, so that a plan file can set them."""
    grow.add_argument("--out", metavar="NEW", help="the new directory or file; it must not exist, or be an empty directory")
    what = "mlp=1.5 (factor), heads=+2 (more), width=1024 (new size); instead of a kind, a pattern of module names"
    grow.add_argument("--widen", action="append", default=[], metavar="WHAT=SIZE", help=what)
    where = "layers=24 (length of the main stack), PATH=24 (of the stack of that name), or PATH.3=+2 (blocks behind a module)"
    grow.add_argument("--deepen", action="append", default=[], metavar="WHAT=SIZE", help=where)
    plan = (
        "a .toml or .json file with any of these options (widen = ['mlp=1.5']), or requests as in a schedule (grow = [{ … }])"
    )
    grow.add_argument("--plan", metavar="FILE", help=plan)
    grow.add_argument("--method", metavar="NAME", help="method for all requests (default: the first exact one)")
    named = "preserve only this output of the model, e.g. logits (may be repeated; default: all outputs)"
    grow.add_argument("--outputs", action="append", metavar="NAME", help=named)
    fade = "a file of outgrow.save: new parts fade in over so many optimizer steps; a directory can't hold a fade"
    grow.add_argument("--fade", metavar="STEPS", type=int, help=fade)
    grow.add_argument("--seed", type=int, metavar="N", help="seed of drawn values (0)")
    grow.add_argument("--dtype", choices=DTYPES, help="type of the new weights (that of the old ones)")
    grow.add_argument("--shard-size", metavar="SIZE", help=f"largest size of a file ({SHARD_SIZE})")
    grow.add_argument("--jobs", type=int, metavar="N", help=f"tensors computed at the same time ({_cores()})")
    compared = "compare the models cut to a few layers (brief, the default), whole (full), or not at all (none)"
    given = "inputs of the model: a .safetensors file, or a .pt file with a dict of tensors (default: made for the model)"
    grow.add_argument("--example", metavar="FILE", help=given)
    grow.add_argument("--verify", choices=("brief", "full", "none"), help=compared)
    kept = "a Trainer's checkpoint: also grow the optimizer's state, so that training resumes from NEW"
    grow.add_argument("--training-state", action="store_true", help=kept)
    grow.add_argument("--dry-run", action="store_true", help="print the plan, sizes, FLOPs and needed disk, and write nothing")
    grow.add_argument("--quiet", action="store_true", help="no progress bar")
    model = "a file of outgrow.save: the small model that it was grown from, timm:NAME or MODULE:CALLABLE"
    grow.add_argument("--model", metavar="TARGET", help=model)
    shape = "with --model: shape of an input without the batch, e.g. 3,224,224; repeat it for each input"
    grow.add_argument("--input", dest="shapes", action="append", type=input_shape, metavar="N,N,…", help=shape)
    grow.add_argument("--batch", type=int, metavar="N", help="with --model: batch size of the inputs (2)")


def _cores() -> int:
    return min(os.cpu_count() or 1, MOST_JOBS)


def settled(given: argparse.Namespace) -> tuple[argparse.Namespace, list[Transform]]:
    """All options, from the command line, the plan file, or their defaults; and the requests."""
    args, requests = given, list[Any]()
    if given.plan is not None:
        parser = argparse.ArgumentParser(prog=given.plan, add_help=False, allow_abbrev=False, exit_on_error=False)
        add_options(parser)
        parser.error = _raise  # type: ignore[method-assign]
        try:
            planned, requests = options_in(given.plan, parser)
        except argparse.ArgumentError as error:
            raise CommandError(f"{given.plan}: {error}") from error
        args = merged(given, planned, LISTS)
    requests += requests_of(args)
    if not requests:
        raise CommandError("nothing to grow: write --widen mlp=1.5, --deepen layers=24 or --plan FILE")
    args.seed, args.verify = args.seed or 0, args.verify or "brief"
    return args, requests


def _raise(message: str) -> NoReturn:
    raise CommandError(message)


def run_grow(args: argparse.Namespace) -> str:
    """The output of `outgrow grow`."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # large pages for torch, which is not imported yet: a quarter less time
    load_plugins()
    args, requests = settled(args)
    return (run_grow_file if os.path.isfile(args.checkpoint) else _run_grow_directory)(args, requests)


def _run_grow_directory(args: argparse.Namespace, requests: Sequence[Transform]) -> str:
    from outgrow.checkpoints.checkpoint_report import bytes_of, sizes, summary
    from outgrow.checkpoints.grow_checkpoint import check_out, grow_checkpoint
    from outgrow.checkpoints.plan_checkpoint import plan_checkpoint
    from outgrow.checkpoints.read_checkpoint import read_checkpoint
    from outgrow.checkpoints.training_state import read_training_state
    from outgrow.checkpoints.write_shards import lay_out

    prepare_transformers()
    if args.fade is not None:
        raise CommandError(f"--fade {args.fade}: {NO_FADE}")
    if args.model is not None or args.shapes or args.batch:
        raise CommandError(f"{args.checkpoint} is no file of outgrow.save: leave --model, --input and --batch out")
    shard_size, jobs = args.shard_size or SHARD_SIZE, args.jobs if args.jobs is not None else _cores()
    dtype = None if args.dtype is None else _dtype(args.dtype)
    if args.dry_run:
        limit = bytes_of(shard_size)
        planned = plan_checkpoint(read_checkpoint(args.checkpoint), requests, args.seed, args.example, dtype)
        state = read_training_state(planned).bytes if args.training_state else 0
        if args.out is not None:
            check_out(args.out)
        files = len(lay_out(planned.tensors, limit))
        largest = f"largest tensor: {sizes(planned.largest)}"
        disk = f"needed disk: {sizes(planned.bytes + state)} in {files} {'file' if files == 1 else 'files'}; {largest}"
        return "\n".join([summary(planned), disk, "nothing was written (--dry-run)"])
    if args.out is None:
        raise CommandError("--out DIR is missing: the directory of the new checkpoint (or --dry-run to write nothing)")
    growth = grow_checkpoint(
        args.checkpoint,
        *requests,
        out=args.out,
        seed=args.seed,
        dtype=dtype,
        shard_size=shard_size,
        jobs=jobs,
        verify=args.verify,
        training_state=args.training_state,
        example=args.example,
        command=written(args),
        progress=None if args.quiet or not sys.stderr.isatty() else progress_bar,
    )
    return str(growth)


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


def written(args: argparse.Namespace) -> str:
    """The command again, for the model card: directories by their last names."""
    parts = ["outgrow", "grow", _last(args.checkpoint)]
    for option, values in (("--widen", args.widen), ("--deepen", args.deepen), ("--outputs", args.outputs or [])):
        for value in values:
            parts += [option, value]
    for option in ("plan", "method", "dtype"):
        if getattr(args, option) is not None:
            parts += [f"--{option}", str(getattr(args, option))]
    parts += ["--example", _last(args.example)] if args.example is not None else []
    parts += ["--training-state"] if args.training_state else []
    parts += ["--seed", str(args.seed)] if args.seed else []
    return shlex.join([*parts, "--out", _last(args.out)])


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2] or path


def requests_of(args: argparse.Namespace) -> list[Transform]:
    """The requests of the options `--widen` and `--deepen`."""
    method = {} if args.method is None else {"method": args.method}
    kept = {} if args.outputs is None else {"outputs": args.outputs}
    found = [widen_request(text, **method, **kept) for text in args.widen]
    return found + [deepen_request(text, **method) for text in args.deepen]


def widen_request(text: str, **more: Any) -> Transform:
    """A request to widen, from `WHAT=SIZE`.

    Example:
        >>> widen_request("*.mlp.*=1.5").summary, widen_request("h.0.mlp=+4").summary, widen_request("a=x2").summary
        ("Widen '*.mlp.*' × 1.5", "Widen 'h.0.mlp' by 4", "Widen 'a' × 2")
    """
    from outgrow.requests import Widen

    what, size = _split(text, "--widen mlp=1.5, --widen heads=+2 or --widen width=1024")
    return Widen(**_selection(what), **size, **more)


def _selection(what: str) -> dict[str, Any]:
    """A kind of units, if there is one of that name (`heads:query` adds a form of unit), or a pattern of names."""
    from outgrow import requests

    kinds = getattr(requests, "KINDS", ())
    kind, colon, unit = what.partition(":")
    if colon and kind in kinds:
        return {"kind": kind, "unit": unit}
    return {"kind": what} if what in kinds else {"where": what}


def deepen_request(text: str, **more: Any) -> Transform:
    """A request to deepen, from `layers=N`, `STACK=N` or `MODULE=+N`.

    Example:
        >>> deepen_request("model.layers.3=+2").summary, deepen_request("encoder.block=24").summary
        ("Deepen after 'model.layers.3' + 2", "Deepen 'encoder.block' to 24 layers")
    """
    from outgrow.requests import Deepen

    what, size = _split(text, "--deepen layers=24 or --deepen model.layers.3=+2")
    if what == "layers":
        if "to" not in size:
            raise CommandError(f"--deepen {text}: write the new number of layers, e.g. layers=24")
        return Deepen(layers=size["to"], **more)
    if "to" in size and not what.rpartition(".")[2].isdecimal():
        return Deepen(layers=size["to"], stack=what, **more)
    if "by" not in size:
        raise CommandError(f"--deepen {text}: write how many blocks to add behind {what}, e.g. {what}=+2")
    return Deepen(after=what, count=size["by"], **more)


def _split(text: str, examples: str) -> tuple[str, dict[str, Any]]:
    """What to grow, and how far: a factor, a number of new units, or a size."""
    what, equals, amount = text.rpartition("=")
    found = re.fullmatch(SIZE, amount)
    if not what or not equals or found is None or (found["times"] and found["plus"]):
        raise CommandError(f"{text!r} is not of the form WHAT=SIZE: write e.g. {examples}")
    number = found["number"]
    if found["times"] or "." in number:
        if found["plus"]:
            raise CommandError(f"{text!r}: a number of new units is whole, e.g. {what}=+2")
        return what, {"factor": float(number)}
    return what, {"by" if found["plus"] else "to": int(number)}


def progress_bar(total: int) -> Callable[[int], None]:
    """A bar on the terminal with the rate and the remaining time; returns the function that advances it."""
    started, state = time.monotonic(), {"done": 0, "shown": 0.0}

    def advance(size: int) -> None:
        state["done"] += size
        now = time.monotonic()
        if now - state["shown"] >= EVERY or state["done"] >= total:
            state["shown"] = now
            sys.stderr.write("\r" + bar(int(state["done"]), total, now - started) + "\x1b[K")
            sys.stderr.write("\n" if state["done"] >= total else "")
            sys.stderr.flush()

    return advance


def bar(done: int, total: int, seconds: float, width: int = 24) -> str:
    """The text of the bar.

    Example:
        >>> bar(2_000_000_000, 8_000_000_000, 4.0)
        '██████                    25%  2.0 of 8.0 GB  500 MB/s  12 s left'
    """
    share = done / max(total, 1)
    rate = done / max(seconds, 1e-9)
    left = (total - done) / max(rate, 1e-9)
    shown = f"{left / 3600:.1f} h" if left >= 3600 else f"{left / 60:.0f} min" if left >= 120 else f"{left:.0f} s"
    filled = "█" * int(share * width)
    return f"{filled:<{width}} {share:4.0%}  {done / 1e9:.1f} of {total / 1e9:.1f} GB  {rate / 1e6:.0f} MB/s  {shown} left"
