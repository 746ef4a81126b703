"""Choose the volumes that a request names, with a size and a method for each, and sizes for volumes tied to one ratio."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import numpy as np

from outgrow.analysis.attention_products import HEAD_DIM
from outgrow.analysis.labels import RETURNED
from outgrow.analysis.peft_adapters import RANK, is_rank
from outgrow.analysis.roles import WRITES
from outgrow.analysis.slot_positions import irregular
from outgrow.analysis.unit_states import State, Verdict
from outgrow.analysis.volume_kinds import KINDS
from outgrow.analysis.volumes import Anatomy, Volume
from outgrow.errors import MethodError, Problem, SelectionError, SizeError
from outgrow.exactness.propagate_states import judge
from outgrow.exactness.scale_equations import Payment
from outgrow.methods.all_methods import EXTENDING, candidates
from outgrow.methods.base import Method
from outgrow.methods.net2net import Net2Net
from outgrow.requests import MOST_NEW_UNITS, Skip, Widen, is_glob
from outgrow.text.plurals import counted
from outgrow.transforms.widen.choose_heads import one_form
from outgrow.transforms.widen.make_plan import Choice
from outgrow.transforms.widen.new_outputs import OLD_ENTRIES, extended
from outgrow.transforms.widen.rotary_pairs import WHOLE_FACTORS, between

MENTIONED = 4  # modules that an error mentions
WHOLE = 1e-9  # rounding of size × factor, relative to the size
SAME = "the nearest possible size is the present one"
NEW_MODELS = {  # kinds that only a new model has more of: the reason, and the way out
    "experts": (
        "a new expert would take the place of one that is chosen now, or change the weights of all: more of them are exact "
        "only if all experts have copies or slices, and more are chosen per token, which is another setting of the model",
        "outgrow.upcycle(model, example, experts=…) returns a new model with more experts",
    )
}


def matches(volume: Volume, pattern: str) -> bool:
    """Whether a pattern selects a volume: by its name, or by the paths of all modules that write it."""
    writers = volume.writers
    return fnmatchcase(volume.name, pattern) or (bool(writers) and all(fnmatchcase(path, pattern) for path in writers))


def select(volumes: Sequence[Volume], patterns: Sequence[str]) -> list[tuple[Volume, bool]]:
    """The volumes that patterns select, each with whether it was named exactly."""
    chosen: dict[str, tuple[Volume, bool]] = {}
    for pattern in patterns:
        named = [volume for volume in volumes if volume.name == pattern]
        found = named or [volume for volume in volumes if matches(volume, pattern)]
        if not found:
            raise SelectionError(
                f"no volume is called {pattern!r} or written only by modules of that name", _belonging(pattern, volumes)
            )
        for volume in found:
            exact = not is_glob(pattern)
            chosen[volume.name] = (volume, exact or chosen.get(volume.name, (volume, False))[1])
    return list(chosen.values())


def requested(volume: Volume, request: Widen) -> bool:
    """Whether a request selects a volume."""
    return request.kind in (None, volume.kind) and any(matches(volume, pattern) for pattern in request.patterns)


def selected(anatomy: Anatomy, request: Widen) -> list[tuple[Volume, bool]]:
    """The volumes that a request selects by name and kind, each with whether it was named exactly."""
    if request.kind is None:
        return select(anatomy.volumes, request.patterns)
    alike = [volume for volume in anatomy.volumes if volume.kind == request.kind]
    if not alike:
        raise SelectionError(
            f"no volume is of kind {request.kind!r}: select by name instead, where='NAME', as outgrow.volumes lists them",
            _kinds_there_are(anatomy),
        )
    found = [(volume, exact) for volume, exact in select(anatomy.volumes, request.patterns) if volume.kind == request.kind]
    if not found:
        names = ", ".join(volume.name for volume in alike[:MENTIONED]) + (", …" if len(alike) > MENTIONED else "")
        way_out = "leave where= out, or write one that matches some of them"
        raise SelectionError(
            f"no volume of kind {request.kind!r} matches {request.where!r}", [Problem("", f"of this kind are {names}", way_out)]
        )
    return found


def _kinds_there_are(anatomy: Anatomy) -> list[Problem]:
    """One line per kind in the model: how many volumes are of this kind; if none of them can grow, why."""
    problems = []
    for kind in (kind for kind in KINDS if any(volume.kind == kind for volume in anatomy.volumes)):
        alike = [volume for volume in anatomy.volumes if volume.kind == kind]
        reasons = [_choice(anatomy, volume, Widen(factor=2, kind=kind), {})[1] for volume in alike]
        found = f"{counted(len(alike), 'volume')}, e.g. {alike[0].name}"
        found += f"; none of them can grow: {reasons[0]}" if all(reasons) else ""
        problems.append(Problem(f"kind={kind!r}", found))
    way_out = "select volumes by name: outgrow.volumes(model, example) lists them"
    return problems or [Problem("", "no volume of this model has a kind", way_out)]


def _belonging(pattern: str, volumes: Sequence[Volume]) -> list[Problem]:
    """Problems that name the volumes of the modules that a pattern matches; similar names if it matches none."""
    found: dict[str, dict[str, str]] = {}  # module → volume → role of the module
    for volume in volumes:
        for slot in volume.slots:
            path = slot.tensor.rpartition(".")[0]
            if fnmatchcase(path, pattern):
                found.setdefault(path, {}).setdefault(volume.name, slot.role)
    if not found:
        near = ", ".join(_nearest(pattern, [volume.name for volume in volumes]))
        return [Problem("", f"similar names: {near}", "outgrow.volumes(model, example) lists them all")]
    problems = []
    for path, roles in list(found.items())[:MENTIONED]:
        written = [name for name, role in roles.items() if role == WRITES] or list(roles)
        parts = ", ".join(f"{role} {name}" for name, role in roles.items())
        problems.append(Problem(path, f"no volume has its name: it {parts}", f"write {written[0]!r}"))
    return problems


def _nearest(pattern: str, names: Sequence[str]) -> list[str]:
    import difflib

    return difflib.get_close_matches(pattern.strip("*."), names, n=5, cutoff=0.2) or list(names[:5])


def choose(
    anatomy: Anatomy,
    request: Widen,
    taken: Sequence[Choice] = (),
    barred: Mapping[str, str] | None = None,
    without: Mapping[tuple[str, State], str] | None = None,
    payments: Mapping[str, Payment] | None = None,
) -> tuple[list[Choice], list[Skip]]:
    """Volumes, sizes and methods for one request, and the volumes that are skipped.

    taken: choices of earlier requests. barred: volumes that can't grow, with the reason. without: volumes and states of new
    units that do not go together, with the reason. payments: volumes whose writers pay, if possible, so that no ε changes.
    """
    choices: list[Choice] = []
    skipped: list[Skip] = []
    problems: list[Problem] = []
    used: list[Volume] = []
    user = np.full(len(anatomy.root), -1, dtype=np.int64)  # by class: index of the volume in `used` that contains it, or −1

    def use(volume: Volume) -> None:
        user[volume.classes] = len(used)
        used.append(volume)

    for choice in taken:
        use(choice.volume)

    def choice_of(volume: Volume) -> tuple[Choice | None, str]:
        if volume.name in (barred or {}):
            return None, (barred or {})[volume.name]
        return _choice(anatomy, volume, request, without or {})

    wanted, errors = one_form(request, selected(anatomy, request), choice_of)
    for volume, exact in wanted:
        rivals = user[volume.classes]
        rival = used[int(rivals[rivals >= 0].min())] if rivals.max() >= 0 else None
        if volume.name in (barred or {}):
            reason = (barred or {})[volume.name]
        elif not exact and request.kind not in EXTENDING and is_rank(volume, request.patterns):
            reason = RANK
        elif rival is not None:
            reason = f"it is another direction of {rival.name}, which grows already"
            if rival.name == volume.name:
                raise SelectionError(f"{volume.name} is selected by two transforms of one growth: name it once")
        else:
            try:
                found, reason = _choice(anatomy, volume, request, without or {}, payments or {})
            except SizeError as error:
                errors.append(error)
                continue
            if found is not None:
                choices.append(found)
                use(volume)
                continue
        if exact or request.kind == "vocab":  # a table and its head keep one size
            instead = _by_another_method(anatomy, volume, request, without or {}) if volume.name not in (barred or {}) else ""
            problems.append(Problem(volume.name, reason, instead or _instead(anatomy, volume, request)))
        else:
            skipped.append(Skip(volume.name, volume.size, reason))
    if errors:
        raise errors[0]
    if problems:
        raise MethodError(f"{len(problems)} of the named volumes can't grow", problems)
    if not choices:
        named, refused = {volume.name: volume for volume in anatomy.volumes}, {skip.volume for skip in skipped}
        reasons = [
            Problem(skip.volume, skip.reason, _way_out(anatomy, named[skip.volume], request.kind, refused)) for skip in skipped
        ]
        what = f"kind={request.kind!r}" if request.kind else repr(request.where)
        if request.kind in NEW_MODELS:
            reasons = [Problem(what, *NEW_MODELS[request.kind]), *(Problem(skip.volume, skip.reason) for skip in skipped[:3])]
        raise MethodError(f"nothing that {what} selects can grow by method {_name(request.method)}", reasons[:20])
    return choices, skipped


def _by_another_method(anatomy: Anatomy, volume: Volume, request: Widen, without: Mapping[tuple[str, State], str]) -> str:
    """The way out for a volume that grows by another method than the requested one; empty if there is none."""
    if request.method == "auto":
        return ""
    try:
        found, _ = _choice(anatomy, volume, replace(request, method="auto"), without)
    except SizeError:
        return ""
    return f"write method='auto', which takes {found.method.name} there" if found is not None else ""


def _instead(anatomy: Anatomy, volume: Volume, request: Widen) -> str:
    """What to select instead of a volume that can't grow."""
    if request.kind in EXTENDING:
        return ""
    return _way_out(anatomy, volume, request.kind) or "select others by a glob, which skips volumes that can't grow"


def _way_out(anatomy: Anatomy, volume: Volume, kind: str | None = None, refused: Collection[str] = ()) -> str:
    """How a volume can grow nevertheless, or other volumes at the same place; empty if there are none.

    kind: that of the request. refused: further volumes that it can't have.
    """
    if volume.rotary:
        return "" if kind == HEAD_DIM else WHOLE_FACTORS
    if volume.pinned == RETURNED and volume.readers and len(anatomy.reading.trace.outputs) > 1:
        return "if other outputs are the ones that matter, name them, e.g. outputs='logits': the rest may change its size"
    others = _other_volumes(volume, anatomy.volumes, refused)
    if volume.extendable and volume.kind in EXTENDING:
        return f"write kind={volume.kind!r} to append entries to the model's outputs" + (f"; {others}" if others else "")
    return others


def _other_volumes(volume: Volume, volumes: Sequence[Volume], refused: Collection[str] = ()) -> str:
    """The other volumes that are named after a volume's module, or that it writes; empty if there are none."""
    module = volume.name.partition("#")[0]
    weights = {slot.tensor for one in volumes for slot in one.slots if slot.tensor.rpartition(".")[0] == module}
    others = [
        one.name
        for one in volumes
        if one is not volume
        and not one.pinned
        and one.name not in refused
        and (one.name.partition("#")[0] == module or any(s.role == WRITES and s.tensor in weights for s in one.slots))
    ]
    return f"{module} has other volumes: {', '.join(others)}" if others else ""


def _name(method: str | Method) -> str:
    return method if isinstance(method, str) else method.name


def _verdict(
    anatomy: Anatomy,
    volume: Volume,
    state: State,
    without: Mapping[tuple[str, State], str],
    payments: Mapping[str, Payment],
) -> tuple[Verdict, str]:
    """The verdict on a state, and why it is refused. If writers are to pay and that is possible, no ε changes."""
    verdict = judge(anatomy, volume, state)
    refusal = verdict.refusal or without.get((volume.name, state), "")
    if verdict.eps and not verdict.refusal and volume.name in payments:
        paid = judge(anatomy, volume, state, payments[volume.name])
        if not paid.refusal:
            return paid, ""
        refusal = refusal and f"{refusal}; and if its writers are rescaled instead: {paid.refusal}"
    return verdict, refusal


def _choice(
    anatomy: Anatomy,
    volume: Volume,
    request: Widen,
    without: Mapping[tuple[str, State], str],
    payments: Mapping[str, Payment] | None = None,
) -> tuple[Choice | None, str]:
    """The first method that is exact here and reaches the size, else the first that comes near it; or why there is none."""
    if request.kind in EXTENDING and volume.extendable:
        volume = extended(volume)
    if volume.rotary and request.kind == HEAD_DIM:
        volume = between(volume, request)
    if volume.pinned:
        return None, (request.kind in EXTENDING and volume.obstacle) or volume.pinned
    problem = irregular(anatomy, volume)
    if problem is not None:
        return None, problem.reason
    reasons: list[str] = []
    stuck: list[str] = []
    misfits: list[SizeError] = []
    near: Choice | None = None  # reaches a size near the one that a factor requests
    methods = candidates(request.method, request.fade, request.kind)
    for method in methods:
        verdict, refusal = _verdict(anatomy, volume, method.state, without, payments or {})
        if refusal and method.exact:
            reasons.append(f"{method.name}: {refusal}{OLD_ENTRIES if request.kind in EXTENDING else ''}")
            continue
        if verdict.stuck and len(methods) > 1:  # allowed if requested explicitly: the report has a note then
            stuck.append(f"{method.name}: {verdict.stuck}")
            continue
        step = volume.count if verdict.multiples or volume.rotary else method.step
        automatic = request.method == "auto" and isinstance(method, Net2Net)
        try:
            new = _new_units(volume, request, step, method, rounding=not automatic)
        except SizeError as error:
            misfits.append(error)
            continue
        if new and _is_requested(volume, request, new):
            return Choice(volume, new, method, verdict), ""
        if new:
            near = near or Choice(volume, new, method, verdict)
            continue
        if automatic and verdict.multiples:
            reasons.append(f"{method.name}: exact only as whole copies of all {volume.size} units (factor=2, 3, …)")
        else:
            reasons.append(f"{method.name}: {SAME}")
    if near is not None:
        return near, ""
    if misfits:
        raise misfits[0]
    if reasons and all(reason.endswith(SAME) for reason in reasons):
        return None, f"{SAME}: write a larger factor, or by={volume.grain} or more"
    return None, "; ".join(dict.fromkeys(reasons + stuck))


def _is_requested(volume: Volume, request: Widen, new: int) -> bool:
    """Whether a number of new units gives the requested size. A factor that gives no whole number of units requests no size."""
    if request.factor is None:
        return True
    wanted = volume.count * (request.factor - 1)
    return abs(wanted - round(wanted)) > WHOLE * volume.count or new == round(wanted)


def _new_units(volume: Volume, request: Widen, step: int, method: Method, rounding: bool) -> int:
    """The number of units to add: a factor is rounded to a possible size, an explicit size must be possible itself."""
    size, least = volume.size, step * volume.grain
    if request.factor is not None:
        wanted = size * (request.factor - 1)
        if wanted > MOST_NEW_UNITS:
            raise SizeError(
                f"{volume.name} has a size of {size}: factor={request.factor:g} would add more than {MOST_NEW_UNITS:,}"
            )
        times = int(wanted / least + 0.5)
        return times * step if rounding or times * least == round(wanted) else 0
    gain = request.by if request.by is not None else (request.to or 0) - size
    if gain <= 0:
        raise SizeError(f"{volume.name} has size {size} already: to={request.to} would not grow it")
    if gain > MOST_NEW_UNITS:
        raise SizeError(f"{volume.name} has a size of {size}: it can't gain more than {MOST_NEW_UNITS:,} at once")
    if gain % least == 0:
        return gain // volume.grain
    if not rounding:
        return 0
    low, high = size + gain // least * least, size + (gain // least + 1) * least
    nearest = f"size is {high}" if low == size else f"sizes are {low} and {high}"
    raise SizeError(
        f"{volume.name} can't grow from {size} to {size + gain} by {method.name}: it adds {least} at a time; "
        f"the nearest possible {nearest}"
    )


def proportional(group: Sequence[Choice], ratio: float) -> list[Choice] | None:
    """New sizes for volumes that the code ties to one ratio: the nearest that suit all of them; None if there are none."""
    small = min(group, key=lambda choice: choice.volume.count)
    steps = {id(c): c.volume.count if c.verdict.multiples or c.volume.rotary else c.method.step for c in group}
    best: list[int] | None = None
    for new in range(steps[id(small)], 3 * small.volume.count + 1, steps[id(small)]):
        news = [new * choice.volume.count / small.volume.count for choice in group]
        if any(n != int(n) or int(n) % steps[id(c)] for n, c in zip(news, group, strict=True)):
            continue
        distance = abs(new / small.volume.count - (ratio - 1))
        if best is None or distance < abs(best[group.index(small)] / small.volume.count - (ratio - 1)):
            best = [int(n) for n in news]
    if best is None:
        return None
    return [Choice(c.volume, n, c.method, c.verdict) for c, n in zip(group, best, strict=True)]
