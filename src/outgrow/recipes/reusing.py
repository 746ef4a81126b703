"""A trained small model is there, and a larger one is wanted: grow it once, before the first step, and train it further.

The evidence is in experiments/results/protocol (five paired seeds; docs/does-it-pay.md has the tables): ResNets on CIFAR-10,
doubled in width or deepened from 10 to 18 layers, trained for one to sixteen epochs after the growth.
"""

from __future__ import annotations

from typing import Any

from outgrow.errors import SizeError
from outgrow.requests import Deepen, Widen
from outgrow.wrong_arguments import usage

# Committed results: RE-widen-*@* and RE-deepen-*@* in experiments/results/protocol, 5 seeds each; OWN-* where there is one.
WIDEN_METHOD = "netmorph"  # 0.6 to 0.8 points above r2r at 4, 8 and 16 epochs; at 1 and 2 the same within 0.2
DEEPEN_METHOD = "r2r"  # none is more accurate at 1, 2, 4 and 16 epochs; at 8, copies are 0.2 points ahead


@usage("outgrow.recipes.reuse(factor=2)")
def reuse(*, factor: float | None = None, layers: int | None = None, stack: str | None = None) -> list[Any]:
    """Transforms that make a trained model larger, for one growth before it is trained further.

    Pass them to `outgrow.grow(model, example, *transforms)`, or as `first=` to `outgrow.transformers.Grow`. Then train with a
    warm-up and a decay to zero, as for a new model.

    Evidence: ResNets on CIFAR-10, five seeds, in docs/does-it-pay.md. Doubled in width, the grown network beats training from
    scratch at budgets up to eight epochs, and the small network, trained further, from two epochs on. Deepened, it beats
    scratch up to sixteen epochs, but the small network, trained further, only at sixteen. Factors other than two, both at once,
    and other models: not known.

    Args:
        factor: the ratio of the new width to the old one.
        layers: the new number of blocks of the model's stack.
        stack: the path of the stack, if the model has several.

    Example:
        >>> import outgrow, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> print(outgrow.grow(model, torch.zeros(1, 4), *reuse(factor=2)).plan)
        volume  size    method
        ──────  ──────  ────────
        0       8 → 16  netmorph
    """
    if factor is None and layers is None:
        raise SizeError("say how large: factor= (of the width), layers= (the new number of blocks), or both")
    made: list[Any] = [] if factor is None else [Widen("*", factor=factor, method=WIDEN_METHOD)]
    if layers is not None:
        made.append(Deepen(layers=layers, method=DEEPEN_METHOD, stack=stack))
    return made
