"""`outgrow grow FILE --model TARGET`: grow the model in a file of `outgrow.save`, in memory.

The file holds weights and growths, not the model's code: `--model` names the small model that they are loaded into, as for
`outgrow inspect`. The new file records all growths, and the progress of a fade (`--fade`).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outgrow.cli.model_names import CommandError, named_model

if TYPE_CHECKING:
    from outgrow.transforms.all_transforms import Transform

OF_DIRECTORIES = {
    "training_state": "which has no training state",
    "dtype": "whose model keeps its type",
    "shard_size": "which stays one file",
    "jobs": "whose model is grown in memory",
    "example": "whose inputs are described by --input",
}


def run_grow_file(args: argparse.Namespace, requests: Sequence[Transform]) -> str:
    """The output of the command for a file. Options of directories are refused."""
    import outgrow

    _check(args)
    model, example = named_model(args.model, args.shapes, args.batch or 2, None)
    outgrow.load(model, args.checkpoint)
    growth = outgrow.grow(model, example, *faded(requests, args.fade), seed=args.seed, check=args.verify != "none")
    lines = [str(growth)]
    if args.dry_run:
        return "\n".join([*lines, "nothing was written (--dry-run)"])
    outgrow.save(model, args.out)
    lines.append(f"written: {args.out}; outgrow.load(model, path) reads it into a newly built {args.model}")
    if args.checkpoint.endswith((".pt", ".pth")):
        lines.append("the optimizer and the position of the run are not in it: it holds weights and growths")
    return "\n".join(lines)


def faded(requests: Sequence[Transform], steps: int | None) -> list[Any]:
    """Requests with a fade, unless they have one of their own."""
    if steps is None:
        return list(requests)
    return [replace(one, fade=steps) if getattr(one, "fade", steps) is None else one for one in requests]


def _check(args: argparse.Namespace) -> None:
    if args.model is None:
        raise CommandError(
            f"{args.checkpoint} is a file: add --model TARGET, the small model that it was grown from (timm:NAME or "
            "MODULE:CALLABLE), if outgrow.save has written it; of a Transformers checkpoint, name the directory"
        )
    for name, reason in OF_DIRECTORIES.items():
        if getattr(args, name) not in (None, False):
            option = f"--{name.replace('_', '-')}"
            raise CommandError(
                f"{option} is for directories of Transformers, and {args.checkpoint} is a file, {reason}: leave it out"
            )
    if args.out is None and not args.dry_run:
        raise CommandError("--out FILE is missing: the new file (or --dry-run to write nothing)")
    if args.out is not None and os.path.exists(args.out):
        raise CommandError(f"{args.out} exists: name another file, or delete this one")
