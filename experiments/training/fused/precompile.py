"""Kernels of all shapes compiled at once, by two processes for each shape, into the cache that Triton keeps on disk.

One after the other they take longer than the training of a small fleet, and the device waits meanwhile. One process compiles
what a step needs, the other what an evaluation needs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from experiments.setting.models import ResNetCifar, SmallConv
from experiments.setting.segments import Segment

STEPS = 2
PARTS = ("steps", "evaluation")


def model_of(kind: str, r: float, blocks: int, residual: bool) -> nn.Module:
    """A network of the shape that `Segment.size` describes."""
    return SmallConv(round(16 * 8 * r)) if kind == "small" else ResNetCifar(r, blocks, residual)


def precompile(
    segments: Iterable[Segment], images: Sequence[int], batch: int, device: str, precision: str
) -> Callable[[], None]:
    """Begin to compile what these segments need; returns what waits until the first of them can begin.

    `images`: how many there are in each set of the evaluation.
    """
    wanted = [one for one in segments if one.size[0] in ("resnet", "small")]
    kinds = {(*one.size, one.optimizer, one.flips) for one in wanted}
    later = {one.size for one in wanted if one.parent is not None and one.parent.size != one.size}
    first = []
    for kind, r, blocks, residual, optimizer, flips in sorted(kinds) if len(kinds) > 1 else ():
        words = [kind, str(r), str(int(blocks)), str(int(residual)), optimizer, str(int(flips)), str(batch), device, precision]
        for part in PARTS:
            command = [sys.executable, "-m", "experiments.training.fused.precompile", part, *words, *map(str, images)]
            process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            first += [process] if (kind, r, blocks, residual) not in later else []

    def wait() -> None:
        while first:
            first.pop().wait()  # one that fails leaves its kernels to be compiled where they are needed

    return wait


def compile_shape(
    part: str, model: nn.Module, optimizer: str, flips: bool, batch: int, images: Sequence[int], **where: Any
) -> None:
    """Two steps, or an evaluation, of one network, on images that are zero."""
    from experiments.training.fused.fleet import Fleet

    made = torch.optim.AdamW(model.parameters()) if optimizer == "adamw" else torch.optim.Adam(model.parameters(), amsgrad=True)
    sets = [(torch.zeros(number, 3, 32, 32, dtype=torch.uint8), torch.zeros(number, dtype=torch.long)) for number in images]
    fleet = Fleet([model], [made], [0], batch, **where)
    fleet.feed(*sets[0], torch.full((3,), 0.5), torch.full((3,), 0.25))
    fleet.examine(*sets)
    if part == "evaluation":
        fleet.evaluate()
        return
    order = torch.zeros(1, STEPS, batch, dtype=torch.long)
    fleet.begin(order, torch.zeros(1, STEPS), torch.zeros(1, STEPS), order if flips else None)
    fleet.run()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.training.fused.precompile", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    for name, kind in (("kind", str), ("r", float), ("blocks", int), ("residual", int), ("optimizer", str), ("flips", int)):
        parser.add_argument(name, type=kind)
    for name, kind in (("batch", int), ("device", str), ("precision", str)):
        parser.add_argument(name, type=kind)
    parser.add_argument("images", type=int, nargs="+")
    told = parser.parse_args(arguments)
    model = model_of(told.kind, told.r, told.blocks, bool(told.residual))
    where = {"device": told.device, "precision": told.precision}
    compile_shape(told.part, model, told.optimizer, bool(told.flips), told.batch, told.images, **where)
    return 0


if __name__ == "__main__":
    sys.exit(main())
