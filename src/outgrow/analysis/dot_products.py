"""Dot products written as a product and a sum: (x * w).sum(-1) = Σ over u of w[u]·x[u], as a layer reads x.

As two operators, w would scale the units, and the sum over scaled units would allow no growth. As one operator, w is a reader,
and its new entries can cancel. Graph attention (GAT) computes its scores like this.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from outgrow.analysis.effects import Contract, Fused, Reduce

if TYPE_CHECKING:
    from outgrow.analysis.interpret_trace import Reading


def fuse_dots(reading: Reading) -> None:
    """Turn a product with a parameter whose only use is a sum over units into a contraction at the sum."""
    maker = {output: op.index for op in reading.trace.ops for output in op.outputs}
    uses = Counter(ref.value for op in reading.trace.ops for ref in op.refs)
    for index, effect in enumerate(reading.effects):
        if not isinstance(effect, Reduce) or effect.how != "sum" or uses[effect.input] > 1:
            continue
        first = maker.get(effect.input)
        product = None if first is None or effect.input in reading.trace.outputs else reading.effects[first]
        if first is None or not isinstance(product, Contract) or product.contracted or product.divide:
            continue
        weights = [side for side in (product.left, product.right) if reading.constant[side.value]]
        if len(weights) == 1 and any(set(block.axes) & effect.axes for block in weights[0].layout):
            reading.effects[first] = Fused()
            reading.effects[index] = Contract(product.left, product.right, effect.axes)
