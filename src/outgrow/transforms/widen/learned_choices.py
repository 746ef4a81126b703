"""The volumes of a widening whose new values are learned, and refusals of volumes where nothing can be learned."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from outgrow.analysis.find_connections import NoConnection, connection_of
from outgrow.analysis.unit_states import State
from outgrow.analysis.volumes import Anatomy
from outgrow.apply.learned_values import Learning
from outgrow.errors import MethodError, Problem
from outgrow.growth_plan.plan import Insertion, Plan
from outgrow.methods.learned import LearnedInit, learned_name
from outgrow.model.connections import is_transposed
from outgrow.model.walk_modules import module_at
from outgrow.transforms.widen.make_plan import Choice


def learnings_of(model: nn.Module, anatomy: Anatomy, choices: Sequence[Choice], plan: Plan) -> tuple[Learning, ...]:
    """What is learned for each choice with a learned init; MethodError with all reasons if that is impossible anywhere."""
    found: list[Learning] = []
    problems: list[Problem] = []
    for choice in choices:
        init = choice.method.init
        if not isinstance(init, LearnedInit):
            continue
        try:
            found.append(_learning(model, anatomy, choice, init, plan))
        except NoConnection as reason:
            problems.append(Problem(choice.volume.name, str(reason)))
    if problems:
        fit = ", ".join(repr(learning.volume) for learning in found[:5]) + (" …" if len(found) > 5 else "")
        others = f"; of the selected volumes, it fits {fit}" if fit else ""
        name = next(choice.method.init.name for choice in choices if isinstance(choice.method.init, LearnedInit))
        way_out = f"instead: grow these with a drawn init such as init='std', in a Widen of their own{others}"
        raise MethodError(f"init={name} can't be learned for {len(problems)} of the volumes; {way_out}", problems)
    return tuple(found)


def _learning(model: nn.Module, anatomy: Anatomy, choice: Choice, init: LearnedInit, plan: Plan) -> Learning:
    volume = choice.volume
    slots = {(slot.tensor, slot.axis) for slot in volume.slots}
    drawn = [
        edit
        for edit in plan.edits
        if isinstance(edit, Insertion)
        and edit.fill == "free"
        and (edit.tensor, edit.axis) in slots
        and edit.init.partition("*")[0] == learned_name(init, edit.tensor, edit.axis)
    ]
    if not drawn:
        raise NoConnection(f"{choice.method.name} leaves no values free there, so init= has no effect")
    if choice.method.state is State.ZERO and choice.verdict.stuck:
        raise NoConnection(
            f"with zero writers nothing would be learned: {choice.verdict.stuck}; NetMorph(zero='readers') is alive"
        )
    connection = connection_of(model, anatomy, volume)
    known = {f"{connection.writer}.weight": 1, f"{connection.writer}.bias": 1}
    known |= {f"{reader.path}.weight": reader.length for reader in connection.readers}
    others = [edit.tensor for edit in drawn if edit.tensor not in known]
    if others:
        raise NoConnection(f"its values in {others[0]} are free too, and no init is learned for them")
    free = {_side(model, edit) for edit in drawn}
    if not free & set(init.sides):
        sides = " and ".join(init.sides)
        raise NoConnection(f"{choice.method.name} does not leave the {sides} free that {init!r} computes, so it has no effect")
    counts = {(max(edit.draws) + 1) // known[edit.tensor] for edit in drawn}
    if len(counts) != 1:
        raise NoConnection("its writer and its readers have different numbers of free values")
    return Learning(volume.name, init, connection, counts.pop())


def _side(model: nn.Module, edit: Insertion) -> str:
    """Whether an edit adds rows or columns to the weight of a layer, or to its bias."""
    path, _, own = edit.tensor.rpartition(".")
    transposed = own == "weight" and is_transposed(module_at(model, path))
    return "rows" if edit.axis == int(transposed) else "columns"
