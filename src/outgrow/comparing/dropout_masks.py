"""Does randomness make equal new units differ in train mode? Dropout draws a mask per unit, so equal units get other masks.

With such a mask, pairs and copies preserve the function in expectation only. Zeros stay zero under any mask, and units that are
read by zero columns may have any value. A mask that is equal for all units (stochastic depth drops whole samples) is harmless.
"""

from __future__ import annotations

from outgrow.analysis.unit_states import Carried, Refused, State
from outgrow.analysis.volumes import Anatomy, Volume
from outgrow.exactness.propagate_states import Walk
from outgrow.exactness.unit_places import UnitPlaces
from outgrow.trace.evaluate_operator import base_name
from outgrow.trace.operators import Op

RANDOM = """
    native_dropout bernoulli rrelu_with_noise rand randn rand_like randn_like normal uniform exponential random multinomial
""".split()


def random_module(anatomy: Anatomy, volume: Volume, state: State) -> str | None:
    """The first module whose random values differ between new units that must stay equal; None if there is none.

    anatomy: of a model that was traced in train mode too.
    """
    walk = Walk(anatomy, volume, state)
    try:
        walk.run()
    except Refused:
        return None
    reading = anatomy.reading
    masks: set[int] = set()  # random values that do not depend on the example
    for op in reading.trace.ops:
        taken = {ref.value for ref in op.refs}
        equal = [value for value in taken if walk.findings.known.get(value, Carried(None)).state in (State.PAIR, State.COPY)]
        if equal and (
            _is_random(op) or any(_one_a_unit(walk.places, mask, value) for mask in masks & taken for value in equal)
        ):
            return op.module
        others = [value for value in taken - masks if not reading.uniform[value] and not reading.constant[value]]
        if _is_random(op) or (masks & taken and not others):
            masks.update(op.outputs)
    return None


def _is_random(op: Op) -> bool:
    return base_name(op) in RANDOM


def _one_a_unit(places: UnitPlaces, mask: int, value: int) -> bool:
    """Whether a mask has a value for each unit: more than one entry along an axis of the units."""
    values = places.reading.trace.values
    behind = len(values[mask].shape) - len(values[value].shape)  # shapes are aligned at their ends
    along = [axis + behind for axis in places.axes(places.reading.layouts[value])]
    return any(axis >= 0 and values[mask].shape[axis] > 1 for axis in along)
