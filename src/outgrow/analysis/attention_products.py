"""Attention: two products of activations, of which the second multiplies with a result of the first.

    scores = q·kᵀ,    output = f(scores)·v

f is anything without a weight, or with weights that mix heads alone: a softmax, a mask, a soft cap. Units on an axis that
both factors share and the product keeps are heads. Units that q·kᵀ sums over are features of a head, and so are those that v
adds to the output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from outgrow.analysis.effects import Contract, Operand
from outgrow.analysis.labels import Labels
from outgrow.analysis.roles import READS

if TYPE_CHECKING:
    from outgrow.analysis.volumes import Anatomy, Volume

HEADS, HEAD_DIM = "heads", "head_dim"
GROUP, QUERY = "group", "query"  # forms of a unit of heads, where query heads share keys and values
WITH_KEYS, PER_KEY = " with the key and value head that they share", ", one for each key and value head"
BATCHED = ("aten.bmm", "aten.baddbmm")  # products with an axis 0 that both factors share and the result keeps

Found = Iterator[tuple[int, str]]
Place = tuple[frozenset[int], int, frozenset[int]]  # axes of a block, the number of a volume, axes along which its units lie


@dataclass(frozen=True)
class Attention:
    """The operators of the two products, by their indices, and the values between them."""

    first: int
    second: int
    scores: frozenset[int]
    mixed: frozenset[int] = frozenset()  # volumes of heads that weights between the products mix


def attention_kinds(anatomy: Anatomy, attentions: list[Attention]) -> dict[int, str]:
    """For each volume in attention, by its number: whether its units are heads or features of a head."""
    found: dict[int, str] = {}
    for attention in attentions:
        mixed = ((number, HEADS) for number in attention.mixed)
        for number, kind in (*_in_scores(anatomy, attention), *_in_output(anatomy, attention), *mixed):
            if found.get(number) != HEAD_DIM:
                found[number] = kind
    return found


@dataclass(frozen=True)
class AttentionUnit:
    """One unit of a volume in attention, where it is more than a single head or a single feature of each head.

    heads: how many query heads it adds; 0 for features. form: "group" (query heads with the key and value head that they
    share) or "query" (one more query head for each key and value head); "" if no heads share keys.
    """

    heads: int = 0
    form: str = ""
    features: int = 1

    def __str__(self) -> str:
        if self.heads > 1:
            return f"{self.heads} query heads{WITH_KEYS if self.form == GROUP else PER_KEY}"
        return f"{self.features} features of each head" if self.features > 1 else ""


def attention_units(anatomy: Anatomy, attentions: list[Attention], kinds: dict[int, str]) -> dict[int, AttentionUnit]:
    """What one unit is, for volumes of heads and for volumes whose units are several features of each head."""
    found: dict[int, AttentionUnit] = {}
    repeats = anatomy.reading.ties.repeats
    repeated = np.unique(anatomy.root[np.concatenate(repeats)]) if repeats else np.zeros(0, dtype=np.int64)
    for attention in attentions:
        first, second = (_product(anatomy, index)[0] for index in (attention.first, attention.second))
        for side in (first.left, first.right):
            for block in side.layout:
                axes = [place for place, axis in enumerate(block.axes) if axis in first.contracted]
                for number in anatomy.volumes_by_label.of(block.labels) if axes else ():
                    if kinds[number] == HEAD_DIM:
                        line = next(_lines(block.labels, axes[0]))
                        features = int(np.count_nonzero(anatomy.units(anatomy.volumes[number], line) == 0))
                        found |= {number: AttentionUnit(features=features)} if features > 1 else {}
        (value, axis) = (second.right.value, 2) if second.left.value in attention.scores else (second.left.value, 1)
        shape = anatomy.reading.trace.values[value].shape
        for _, number, along in _units(anatomy, second.left if axis == 2 else second.right) if len(shape) == 3 else ():
            heads = _columns(anatomy, number) // shape[axis]
            shared = 0 not in along or bool(np.isin(repeated, anatomy.volumes[number].classes).any())
            if kinds.get(number) == HEADS and (heads > 1 or shared):
                found[number] = AttentionUnit(max(heads, 1), QUERY if shared else GROUP)
    return found


def _columns(anatomy: Anatomy, number: int) -> int:
    """How many columns of the weight that reads a volume belong to one unit."""
    volume = anatomy.volumes[number]
    owners, counts = np.unique(volume.births.owner[volume.labels], return_counts=True)
    for owner, count in zip(owners.tolist(), counts.tolist(), strict=True):
        origin = volume.births.origins[owner]
        if READS in volume.births.roles.get((origin.tensor, origin.axis), ()):
            return int(count) // volume.count
    return 0


def find_attentions(anatomy: Anatomy) -> list[Attention]:
    """All attentions, in the order of their first products."""
    reading, found = anatomy.reading, list[Attention]()
    products = {index for index, effect in enumerate(reading.effects) if is_product_of_activations(anatomy, effect)}
    for index in sorted(products):
        outputs = reading.trace.ops[index].outputs
        between, todo, seconds, heads = set(outputs), list(outputs), set[int](), set[int]()
        while todo:
            for user in anatomy.consumers.get(todo.pop(), ()):
                effect = reading.effects[user]
                if isinstance(effect, Contract) and effect.contracted:
                    seconds |= {user} & products
                    mixed = set[int]() if user in products else _mixed_heads(anatomy, index, effect, heads)
                    heads |= mixed
                    if not mixed:
                        continue
                new = [value for value in reading.trace.ops[user].outputs if value not in between]
                between.update(new)
                todo.extend(new)
        found += [Attention(index, second, frozenset(between), frozenset(heads)) for second in sorted(seconds)]
    return found


def _mixed_heads(anatomy: Anatomy, first: int, effect: Contract, known: set[int]) -> set[int]:
    """The heads that a weight reads and writes, if scores have no other units that it reads ("talking heads")."""
    product, shared = _product(anatomy, first)
    own = {number for side in (product.left, product.right) for _, number, along in _units(anatomy, side) if along & shared}
    read, written = set[int](), set[int]()
    for side in (effect.left, effect.right):
        for block in side.layout:
            numbers = anatomy.volumes_by_label.of(block.labels)
            if not effect.contracted.isdisjoint(block.axes):
                if any(block.labels.size != anatomy.volumes[number].count for number in numbers):
                    return set()  # it also reads the features of the heads: it is the layer behind attention
                read.update(numbers)
            elif anatomy.reading.constant[side.value]:
                written.update(numbers)
    return read | written if read and read <= own | known else set()


def is_product_of_activations(anatomy: Anatomy, effect: object) -> bool:
    """Whether an operator sums over products of two tensors that both depend on the model's input."""
    if not isinstance(effect, Contract) or not effect.contracted:
        return False
    return not any(anatomy.reading.constant[side.value] for side in (effect.left, effect.right))


def _in_scores(anatomy: Anatomy, attention: Attention) -> Found:
    product, shared = _product(anatomy, attention.first)
    for side in (product.left, product.right):
        for axes, number, along in _units(anatomy, side):
            if along & product.contracted:
                yield number, HEAD_DIM
            elif along & shared or axes & product.contracted:  # the latter: query heads that share a key head
                yield number, HEADS
            elif axes & shared:  # attention between features: a score belongs to a pair of features
                yield number, HEAD_DIM


def _in_output(anatomy: Anatomy, attention: Attention) -> Found:
    product, shared = _product(anatomy, attention.second)
    for side in (product.left, product.right):
        for _, number, along in _units(anatomy, side):
            if along & shared:
                yield number, HEADS
            elif side.value not in attention.scores and not along & product.contracted:
                yield number, HEAD_DIM


def _product(anatomy: Anatomy, index: int) -> tuple[Contract, frozenset[int]]:
    """The product of an operator, and the axes that both factors share and the result keeps."""
    effect = anatomy.reading.effects[index]
    assert isinstance(effect, Contract)
    left, right = (frozenset(axis for block in side.layout for axis in block.axes) for side in (effect.left, effect.right))
    batch = {0} if anatomy.reading.trace.ops[index].name in BATCHED else set[int]()
    return effect, ((left & right) | batch) - effect.contracted


def _units(anatomy: Anatomy, side: Operand) -> Iterator[Place]:
    """For each block of a factor and each volume in it: the block's axes, the volume, the axes along which its units lie."""
    for block in side.layout:
        lines = [list(_lines(block.labels, place)) for place in range(len(block.axes))]
        for number in anatomy.volumes_by_label.of(block.labels):
            volume = anatomy.volumes[number]
            along = [
                axis for axis, some in zip(block.axes, lines, strict=True) if any(map(partial(_vary, anatomy, volume), some))
            ]
            yield frozenset(block.axes), number, frozenset(along)


def _lines(labels: Labels, axis: int) -> Iterator[Labels]:
    """The labels along an axis at the first and last index of all others: enough to see whether units change along it."""
    for corner in (0, -1):
        yield labels[tuple(slice(None) if place == axis else corner for place in range(labels.ndim))]


def _vary(anatomy: Anatomy, volume: Volume, labels: Labels) -> bool:
    ids = anatomy.units(volume, labels)
    return bool((ids != ids[0]).any())
