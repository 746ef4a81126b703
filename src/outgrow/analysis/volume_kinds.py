"""The kind of a volume: what its units are for, found from their roles in the trace.

    heads      units along which attention runs in parallel (see `analysis/attention_products.py`)
    head_dim   units that q·kᵀ sums over, and those of v
    width      a stream: units that residual sums add to (see `analysis/residual_sums.py`)
    experts    units that a router ranks, and the leading axis of stacked weights of which it chooses some
    vocab      rows of a table that the model's integer input indexes, and those of the head that returns one entry per row
               for each index (or for more positions), tied to the table or not
    outputs    rows of the last weight: units that the model returns and no weight reads
    mlp        hidden units: weights that read a stream write them, weights that read them write into the stream again

A volume is of the first kind in this order that fits; it is of no kind (None) if none does.

Hidden units are on a path of weights from a stream back to it, with a nonlinear function on the way, that visits no volume
twice and no head. So both hidden layers of a bottleneck are of kind mlp, whereas the units of a squeeze-and-excitation branch,
which read hidden units and scale the same ones, are of no kind.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from outgrow.analysis.attention_products import BATCHED, attention_kinds, attention_units, find_attentions
from outgrow.analysis.effects import Contract, Ignore, Map, Move, PerUnit, Scale, Shift
from outgrow.analysis.labels import Layout
from outgrow.analysis.residual_sums import ResidualSum, find_residual_sums, is_nonlinear
from outgrow.analysis.rules import experts
from outgrow.analysis.volumes import Anatomy
from outgrow.trace.operators import Op, Ref, refs_in

BARE = -1
KINDS = ("mlp", "heads", "head_dim", "width", "experts", "vocab", "outputs")

RANKING = ("aten.topk", "aten.sort", "aten.argmax", "aten.max")
CHOOSING = ("aten.select", "aten.unbind", "aten.index", "aten.index_select")  # one or more entries of an axis
LOOKUPS = ("aten.embedding", "aten._embedding_bag", "aten._embedding_bag_forward_only", "aten.index", "aten.index_select")
KEEPS_INTEGERS = {  # operators whose results hold the integers of their inputs, possibly moved, clamped or shifted
    f"aten.{name}"
    for name in """
        view _unsafe_view reshape expand slice select clone alias detach _to_copy lift_fresh permute t transpose unsqueeze
        squeeze add sub clamp clamp_min clamp_max where masked_fill flip roll cat stack split unbind index copy constant_pad_nd
    """.split()
}


def set_kinds(anatomy: Anatomy) -> None:
    """Set the kind of each volume, and what one of its units is where that is more than its kind says."""
    attentions = find_attentions(anatomy)
    found = attention_kinds(anatomy, attentions)
    for number, unit in attention_units(anatomy, attentions, found).items():
        volume = anatomy.volumes[number]
        volume.unit, volume.form, volume.grain = str(unit), unit.form, unit.heads or unit.features
    for number, kind in _with_others(anatomy, found).items():
        anatomy.volumes[number].kind = kind


def _with_others(anatomy: Anatomy, found: dict[int, str]) -> dict[int, str]:
    """The kinds of all volumes that have one, by their numbers. found: those in attention."""
    sums = find_residual_sums(anatomy, found.keys())
    flow = _flow(anatomy, sums)
    candidates = (
        ("width", flow.streams),
        ("experts", _experts(anatomy, flow)),
        ("vocab", _vocabularies(anatomy, flow)),
        ("outputs", _outputs(anatomy, flow)),
    )
    for kind, numbers in candidates:
        found = {**dict.fromkeys(numbers, kind), **found}
    return {**dict.fromkeys(_hidden(flow, sums, found), "mlp"), **found}


@dataclass
class _Flow:
    """Volumes, and the weights between them: `after[a]` are the volumes written by weights that read volume a.

    BARE stands for all streams whose size comes from the model's input. They are read by no volume's units, and `bare` are the
    volumes by which blocks write into them.
    """

    streams: frozenset[int]
    bare: frozenset[int]
    ends: frozenset[int]  # where paths of hidden units end: streams, BARE, and what projection shortcuts read
    after: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    before: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    written: set[int] = field(default_factory=set)  # by a weight
    read: set[int] = field(default_factory=set)  # by a weight, or summed over in a product of activations
    nonlinear: set[int] = field(default_factory=set)  # some nonlinear function acts on its units
    stacked: set[int] = field(default_factory=set)  # axis of a weight along which products run in parallel


def _flow(anatomy: Anatomy, sums: list[ResidualSum]) -> _Flow:
    streams, bare, read_by_shortcuts = (
        frozenset(volume for one in sums for volume in getattr(one, name)) for name in ("volumes", "bare", "source")
    )
    flow = _Flow(streams, bare, streams | read_by_shortcuts | {BARE})
    for op, effect in zip(anatomy.reading.trace.ops, anatomy.reading.effects, strict=True):
        if all(anatomy.reading.constant[output] for output in op.outputs):
            continue
        if isinstance(effect, Contract) and effect.contracted:
            _add_product(anatomy, flow, op, effect)
        elif is_nonlinear(anatomy, op):
            flow.nonlinear |= _volumes(anatomy, anatomy.reading.layouts[op.outputs[0]])
        elif isinstance(effect, Ignore):  # an operator without a rule may read anything
            flow.read |= {number for ref in op.refs for number in _volumes(anatomy, anatomy.reading.layout(ref))}
    return flow


def _add_product(anatomy: Anatomy, flow: _Flow, op: Op, effect: Contract) -> None:
    sides = effect.left, effect.right
    constant = [anatomy.reading.constant[side.value] for side in sides]
    for side in sides:
        flow.read |= _volumes(anatomy, _on(side.layout, effect.contracted))
    if constant[0] == constant[1]:
        return
    weight, other = (sides[0], sides[1]) if constant[0] else (sides[1], sides[0])
    batch = {0} if op.name in BATCHED else set()
    shared = {axis for block in other.layout for axis in block.axes} - effect.contracted | batch
    sources = _volumes(anatomy, _on(other.layout, effect.contracted)) or {BARE}
    targets = _volumes(anatomy, tuple(block for block in weight.layout if not set(block.axes) & (effect.contracted | shared)))
    flow.stacked |= _volumes(anatomy, _on(weight.layout, shared)) - sources
    flow.written |= targets
    gated = targets & flow.streams and _is_gate(anatomy, op, targets & flow.streams)
    for source in sources:
        for target in () if gated else targets:
            flow.after[source].add(target)
            flow.before[target].add(source)


def _is_gate(anatomy: Anatomy, op: Op, volumes: set[int]) -> bool:
    """Whether a product with a weight only makes factors for other activations with the same units, by a nonlinear function.

    Squeeze and excitation of a stream does that: it scales what a block writes, and writes nothing itself.
    """
    reading, gates = anatomy.reading, False
    todo, seen = [(op.outputs[0], False)], {op.outputs[0]}
    while todo:
        value, nonlinear = todo.pop()
        for index in anatomy.consumers.get(value, ()):
            user, effect = reading.trace.ops[index], reading.effects[index]
            if isinstance(effect, Contract) and not effect.contracted:
                other = effect.left if effect.right.value == value else effect.right
                if not reading.constant[other.value] and _volumes(anatomy, other.layout) & volumes:
                    if not nonlinear:
                        return False
                    gates = True
                    continue
            elif not isinstance(effect, (Move, Map, Shift, Scale, PerUnit)):
                return False
            new = [output for output in user.outputs if output not in seen]
            seen.update(new)
            todo += [(output, nonlinear or is_nonlinear(anatomy, user)) for output in new]
    return gates


def _on(layout: Layout, axes: Collection[int]) -> Layout:
    return tuple(block for block in layout if not set(block.axes).isdisjoint(axes))


def _volumes(anatomy: Anatomy, layout: Layout) -> set[int]:
    return {number for block in layout for number in anatomy.volumes_by_label.of(block.labels)}


def _experts(anatomy: Anatomy, flow: _Flow) -> set[int]:
    """Units that a router ranks, and stacked weights with as many entries along an axis that is chosen from."""
    ops = anatomy.reading.trace.ops
    routers, chosen, grouped = set[int](), set[int](), set[int]()
    for op in ops:
        if op.name in RANKING:
            ranked = _volumes(anatomy, anatomy.reading.layouts[op.args[0].value]) & flow.written - flow.read - flow.streams
            if ranked and _weighs(anatomy, op):
                routers |= ranked
        elif op.name in experts.RULES:
            grouped |= _volumes(anatomy, _on(anatomy.reading.layout(op.args[1]), [0]))
        elif op.name in CHOOSING and isinstance(op.args[0], Ref):
            value = anatomy.reading.trace.values[op.args[0].value]
            if value.name and len(value.shape) > 2:
                chosen |= _volumes(anatomy, _on(anatomy.reading.layouts[value.index], [0]))
    sizes = {anatomy.volumes[number].count for number in routers}
    return routers | grouped | {n for n in chosen | flow.stacked if anatomy.volumes[n].count in sizes and n not in flow.written}


def _weighs(anatomy: Anatomy, op: Op) -> bool:
    """Whether results of an operator are factors of activations, as the weights of chosen experts are."""
    seen, todo = set(op.outputs), list(op.outputs)
    while todo:
        for index in anatomy.consumers.get(todo.pop(), ()):
            effect = anatomy.reading.effects[index]
            user = anatomy.reading.trace.ops[index]
            if isinstance(effect, Contract) or user.name in experts.RULES:
                return True
            new = [value for value in user.outputs if value not in seen]
            seen.update(new)
            todo.extend(new)
    return False


def _vocabularies(anatomy: Anatomy, flow: _Flow) -> set[int]:
    """Tables that an integer input indexes, and the heads that return one entry per row of such a table for each index.

    Of several tables that write one volume, the largest: others hold types or positions.
    """
    tables: dict[frozenset[int], set[int]] = defaultdict(set)
    lookups: dict[int, set[int]] = defaultdict(set)  # for each table, how many indices look it up at once
    for op in anatomy.reading.trace.ops:
        if op.name in LOOKUPS and anatomy.reading.constant[op.args[0].value] and _indexed_by_input(anatomy, op):
            layout = anatomy.reading.layout(op.args[0])
            rows, columns = (_volumes(anatomy, _on(layout, axes)) for axes in ([0], range(1, 9)))
            tables[frozenset(columns)] |= rows
            for number in rows:
                lookups[number].add(_entries(anatomy, refs_in(op.args[1:])[0].value))
    found = {number for rows in tables.values() for number in _largest(anatomy, rows)}
    fewest = {anatomy.volumes[number].count: min(lookups[number]) for number in found}  # indices, by the size of their table
    for number, values in _returned(anatomy).items():
        size = anatomy.volumes[number].count
        per_index = size in fewest and any(_entries(anatomy, value) >= size * fewest[size] for value in values)
        if per_index and number in flow.written - flow.read:
            found.add(number)
    return found


def _entries(anatomy: Anatomy, value: int) -> int:
    return math.prod(anatomy.reading.trace.values[value].shape)


def _returned(anatomy: Anatomy) -> dict[int, list[int]]:
    """For each volume that the model returns, the outputs with its units."""
    found: dict[int, list[int]] = defaultdict(list)
    for value in anatomy.reading.trace.outputs:
        for number in _volumes(anatomy, anatomy.reading.layouts[value]):
            found[number].append(value)
    return found


def _largest(anatomy: Anatomy, numbers: set[int]) -> set[int]:
    most = max((anatomy.volumes[number].count for number in numbers), default=0)
    return {number for number in numbers if anatomy.volumes[number].count == most}


def _indexed_by_input(anatomy: Anatomy, op: Op) -> bool:
    values = anatomy.reading.trace.values
    todo = [ref.value for ref in refs_in(op.args[1:])]
    seen = set(todo)
    while todo:
        value = values[todo.pop()]
        if value.kind == "input" and not value.floating and not value.boolean:
            return True
        maker = anatomy.maker.get(value.index)
        if maker is not None and maker.name.removesuffix("_") in KEEPS_INTEGERS:
            new = [ref.value for ref in maker.refs if ref.value not in seen]
            seen.update(new)
            todo.extend(new)
    return False


def _outputs(anatomy: Anatomy, flow: _Flow) -> set[int]:
    return (_returned(anatomy).keys() & flow.written) - flow.read


def _hidden(flow: _Flow, sums: list[ResidualSum], known: dict[int, str]) -> Iterator[int]:
    """Volumes on a path of weights from a stream back to it, or to one that a projection shortcut connects with it."""
    shortcuts = {(source, volume) for one in sums for source in one.source for volume in one.volumes}
    free = (flow.after.keys() & flow.before.keys() & flow.nonlinear) - known.keys() - flow.ends
    for volume in free:
        into, out = (_reached(volume, edges, flow, known) for edges in (flow.before, flow.after))
        sources, targets = _streams(into, flow), _streams(out, flow)
        back = sources & targets or any((source, target) in shortcuts for source in sources for target in targets)
        loops = into & out - flow.ends - {volume}
        if back and not any(_enclosed(volume, other, flow, known) for other in loops):
            yield volume


def _streams(numbers: set[int], flow: _Flow) -> set[int]:
    return numbers & flow.ends | ({BARE} if numbers & flow.bare else set())


def _reached(start: int, edges: dict[int, set[int]], flow: _Flow, known: dict[int, str], without: int = -2) -> set[int]:
    """What a path leads to through volumes of no kind; streams end it."""
    seen, todo = {start}, [start]
    while todo:
        for number in edges.get(todo.pop(), set()) - seen - {without}:
            if number in flow.ends or number not in known:
                seen.add(number)
                todo.extend([] if number in flow.ends else [number])
    return seen


def _enclosed(volume: int, other: int, flow: _Flow, known: dict[int, str]) -> bool:
    """Whether all paths between a volume and streams, there and back, lead through the same other volume."""
    return not any(_streams(_reached(volume, edges, flow, known, other), flow) for edges in (flow.before, flow.after))
