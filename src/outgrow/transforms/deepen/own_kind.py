"""Deepen by a new block of the same kind as its siblings, which is the identity at first.

    y = x + f(x),   f = 0 with dense weights (see `exactness/zero_output.py`)

The new block is a copy of a sibling, so the model stays one that its own library could have built. Its branches are made zero
by pairing units ("r2r"; behind a batch norm by γ = β = 0, "r2r-paper" pairs there too). "copy" keeps the copied weights (layer
stacking) and "random" draws new ones: neither keeps the function, and reports say so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from outgrow.analysis.volumes import Anatomy
from outgrow.apply.apply_plan import apply_setting
from outgrow.apply.insert_modules import CONTAINERS, apply_insert, counters, numbering, renumbering, signature
from outgrow.configuration.per_layer import contradiction, depth_settings, layer_lists
from outgrow.errors import MethodError, Problem, SelectionError, TraceError
from outgrow.exactness.identity_blocks import Identity, check_skip_activations, dissect_alone, identity_of
from outgrow.exactness.zero_output import NotZero, resolved
from outgrow.growth_plan.module_starts import Start
from outgrow.growth_plan.plan import Change, Insert, Plan, joined
from outgrow.model.example import Example, outputs_in
from outgrow.model.journal import Journal
from outgrow.model.meta_copy import calls_without_values
from outgrow.model.module_calls import Call
from outgrow.model.module_paths import joined_path
from outgrow.modules.blocks import Parallel
from outgrow.optimizers.new_parameters import LEARNS, is_frozen
from outgrow.requests import Deepen
from outgrow.text.plurals import counted
from outgrow.transforms.deepen.new_layers import PLAIN_LAYERS, is_activation, plain_plan
from outgrow.transforms.site_and_step import Site, Step

OWN_KIND_METHODS = ("r2r", "r2r-paper")
NOT_RUN = "the model's code does not run a block that is added there"


@dataclass(frozen=True, eq=False)
class Template:
    """A child of a container to copy, and how to make the copy the identity."""

    index: int
    identity: Identity | None


Templates = Sequence[Template]


@dataclass(frozen=True, eq=False)
class SiblingKinds:
    """A cache by kind of block: its anatomy, and how it is made the identity, or why it can't be."""

    anatomies: dict[Any, Anatomy] = field(default_factory=dict)
    identities: dict[Any, Identity | str] = field(default_factory=dict)
    children: dict[str, list[Any]] = field(default_factory=dict)  # by the path of a container: the kind of each child
    same: dict[Any, Any] = field(default_factory=dict)  # one object for equal kinds, to save memory
    patterns: dict[Any, tuple[int | None, list[int]]] = field(default_factory=dict)  # by container and shape

    def of_children(self, path: str, container: nn.Module) -> list[Any]:
        """The kind of each child of a container."""
        if path not in self.children:
            counted = counters(container)
            kinds = [None if child is None else signature(child, counted) for child in container._modules.values()]
            self.children[path] = [self.same.setdefault(kind, kind) for kind in kinds]
        return self.children[path]

    def pattern(
        self, path: str, container: nn.Module, found: dict[str, list[Call]], shape: list[tuple[int, ...]]
    ) -> tuple[int | None, list[int]]:
        """The period of a container's children that keep a shape, and for each child, the number of children of its kind."""
        key = path, tuple(shape)
        if key not in self.patterns:
            kinds = [_without_dropout(kind) for kind in self.of_children(path, container)]
            calls = [found[joined_path(path, name)] for name in container._modules]
            period = _period([kind if _keeps(one, shape) else None for kind, one in zip(kinds, calls, strict=True)])
            counts = Counter(kinds)
            self.patterns[key] = period, [counts[kind] for kind in kinds]
        return self.patterns[key]

    def identity(self, kind: Any, block: nn.Module, given: Call, request: Deepen) -> Identity:
        """How a block of this kind is made the identity; NotZero with the reason if it can't be."""
        key = kind, request.method == "r2r-paper", request.fade is not None
        if key not in self.identities:
            try:
                if kind not in self.anatomies:
                    self.anatomies[kind] = dissect_alone(block, given)
                self.identities[key] = identity_of(block, given, *key[1:], anatomy=self.anatomies[kind])
            except NotZero as reason:
                self.identities[key] = str(reason)
        found = self.identities[key]
        if isinstance(found, str):
            raise NotZero(found)
        return found


def containers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that contain blocks, by path."""
    return [(path, module) for path, module in model.named_modules() if _holds_blocks(module)]


def blocks_and_layers(model: nn.Module) -> list[str]:
    """Paths of modules that a new block may follow: children of containers, layers and activations."""
    blocks = [joined_path(path, key) for path, module in containers(model) for key in module._modules]
    layers = [path for path, module in model.named_modules() if isinstance(module, PLAIN_LAYERS) or is_activation(module)]
    return [path for path in dict.fromkeys((*blocks, *layers)) if path]


def _holds_blocks(module: nn.Module) -> bool:
    """Whether a module is a container of torch's, or has children of one class only (which it probably runs in turn)."""
    kinds = {type(child) for child in module.children()}
    if isinstance(module, Parallel):
        return False
    return (isinstance(module, CONTAINERS) and bool(kinds)) or (len(kinds) == 1 and len(module._modules) > 1)


def plans_behind(site: Site, request: Deepen) -> Step:
    """The plans that put new modules behind another one, with their starting values."""
    model, example = site.model, site.example
    if request.after not in dict(model.named_modules(remove_duplicate=False)):
        names = [*blocks_and_layers(model), *[""] * 9]
        listed = ", ".join(filter(None, names[:8])) + (" …" if names[8] else "")
        what = f"the model has no module {request.after!r}"
        raise SelectionError(f"{what}: outgrow.places(model, example) lists the places; candidates are {listed or 'none'}")
    container = model.get_submodule(request.after.rpartition(".")[0])
    reasons = []
    if request.method not in ("residual", "net2net", "netmorph") and request.layers is None:
        try:
            if not _holds_blocks(container):
                raise NotZero(f"its parent is a {type(container).__name__}, not an nn.Sequential or nn.ModuleList")
            with site.trial() as journal:
                return Step(own_kind(model, example, request, site.seed, journal))
        except NotZero as reason:
            reasons.append(f"no block of the model's own kind can follow it: {reason}")
    if request.method in ("auto", "r2r", "residual", "net2net", "netmorph", "random") or request.fade:
        try:
            with site.trial() as journal:
                return Step((_plain(model, example, request, site.seed, journal),))
        except NotZero as reason:
            reasons += [str(reason)] if not any(str(reason) in known for known in reasons) else []
    instead = "outgrow.places(model, example) lists the places, and the exact methods there"
    if request.fade is None and (request.method == "net2net" or any("not idempotent" in reason for reason in reasons)):
        instead += "; with fade= any activation is exact"
    if request.fade is None and any("post-norm" in reason for reason in reasons):
        instead += "; with fade= a copy of the block is exact: it fades in as a whole"
    raise MethodError("the model can't be deepened there", [Problem(request.after, "; ".join(reasons), instead)])


def _plain(model: nn.Module, example: Example, request: Deepen, seed: int, journal: Journal) -> Plan:
    """The plan of new layers behind a module. Each is put into the model for a trial, so that the next can be planned."""
    plans: list[Plan] = []
    after, method = request.after, {"auto": "r2r", "copy": "r2r"}.get(request.method, request.method)
    if request.layers is not None and method == "r2r":
        method = "residual"
    for step in range(request.count):
        plan = plain_plan(model, example, after, method, seed + step, journal, request.fade, request.layers or 2)
        plans.append(plan)
        after = plan.renamed(after)
    shown = "random" if request.fade and method == "r2r" else method  # a ResidualBlock with drawn weights, not a pair
    name = f"{shown}, faded in over {counted(request.fade, 'step')}" if request.fade else shown
    change = Change(f"behind {request.after}", 0, request.count, name, request.exact)
    return replace(joined(plans), changes=(change,), seed=seed)


def own_kind(
    model: nn.Module, example: Example, request: Deepen, seed: int, journal: Journal, known: Templates | None = None
) -> tuple[Plan, ...]:
    """Plans for copies of the model's own blocks, one per copy, since settings use the names after the copies before.

    The copies are put into the model for a trial, with the tensors of their siblings, to see whether its code runs them.
    known: the blocks to copy, if they are known already; then no trial run is made.
    """
    container_path, _, key = request.after.rpartition(".")
    container = model.get_submodule(container_path)
    found = block_calls(model, example, container_path) if known is None else {}
    templates = known or [template_for(model, found, request, step, SiblingKinds()) for step in range(request.count)]
    place = list(container._modules).index(key)
    return put_copies(model, example, container_path, [(place, each) for each in templates], found, request, seed, journal)


def block_calls(model: nn.Module, example: Example, container: str) -> dict[str, list[Call]]:
    """The calls of the children of a container, by path."""
    names = model.get_submodule(container)._modules
    return calls_without_values(model, example, [joined_path(container, name) for name in names])


def put_copies(
    model: nn.Module,
    example: Example,
    container_path: str,
    copies: Sequence[tuple[int, Template]],
    found: dict[str, list[Call]],
    request: Deepen,
    seed: int,
    journal: Journal,
) -> tuple[Plan, ...]:
    """Plans that put copies of blocks behind blocks of the same container.

    copies: for each, the index of the block that it follows, ascending, and what is copied; both as they are now. found: calls
    of the blocks; if it is empty, no trial run is made.
    """
    container = model.get_submodule(container_path)
    keys = list(container._modules)
    before = len(keys)
    plans: list[Plan] = []
    counted = counters(container)
    lists, order = layer_lists(model, container_path), list(range(before))
    for step, (place, template) in enumerate(copies):
        at, source = place + 1 + step, template.index + sum(other < template.index for other, _ in copies[:step])
        prefix, number = numbering(container) or (None, 0)
        start = _start(template, request, seed + step)
        insert = Insert(container_path, at, source, _key(container, at, keys[place]), prefix, number, start=start)
        settings = depth_settings(model, insert, len(container._modules))
        order.insert(at, order[source])
        apply_insert(model, insert, journal, shared=True)
        settings += renumbering(model, container_path, counted)
        for setting in settings:
            apply_setting(model, setting, journal)
        plans.append(Plan((), (), tuple(settings), seed, inserts=(insert,)))
    if wrong := contradiction(model, container_path, lists, order):
        raise NotZero(wrong)
    thawed = any(is_frozen(model.get_submodule(path)) for path in joined(plans).new_blocks)
    change = Change(
        container_path or "the model", before, len(container._modules), request.named, request.exact, LEARNS if thawed else ""
    )
    if found:
        _check_called(model, example, joined(plans), [path for path, calls in found.items() if calls])
    return (*plans[:-1], replace(plans[-1], changes=(change,)))


def _start(template: Template, request: Deepen, seed: int) -> Start:
    """The start of a copied block."""
    draw, identity = seed if request.method == "random" else None, template.identity
    if identity is None:
        return Start(draw)
    gates, soft = (identity.gates, identity.soft) if request.fade else ((), ())
    writes, whole = resolved(identity.anatomy, identity.zeroing, seed), bool(request.fade and identity.whole)
    return Start(draw, writes, gates=gates, soft=soft, whole=whole, steps=request.fade or 0)


def _key(container: nn.Module, at: int, after: str) -> str:
    called = numbering(container)
    if called is not None:
        return f"{called[0]}{called[1] + at}"
    number = 1
    while f"{after}_{number}" in container._modules:
        number += 1
    return f"{after}_{number}"


def template_for(
    model: nn.Module,
    found: dict[str, list[Call]],
    request: Deepen,
    step: int,
    known: SiblingKinds,
    preferred: int | None = None,
) -> Template:
    """The sibling to copy: the nearest one at the new block's position in the repeating order of kinds.

    preferred: the index of the block to copy, if it is of the kind that belongs there.
    """
    path, _, key = request.after.rpartition(".")
    container = model.get_submodule(path)
    children = dict(container._modules)
    index = list(children).index(key)
    kinds = known.of_children(path, container)
    here = found[request.after]
    if len(here) != 1:
        raise NotZero("the example does not run it" if not here else f"it runs {len(here)} times in one pass")
    shape = _shapes(here[0].output)
    names = [joined_path(path, name) for name in children]
    period, usual = known.pattern(path, container, found, shape)  # a first block may differ from all others
    reasons: dict[str, str] = {}
    off = [period is not None and (i - index - 1 - step) % period != 0 for i in range(len(kinds))]
    place = index if period is not None else index + 1
    odd = _first_is_odd(kinds)
    candidates = sorted(
        range(len(kinds)), key=lambda i: (off[i], odd and i == 0, -usual[i], i != preferred, abs(i - place), i > index)
    )
    for candidate in candidates:
        name = names[candidate]
        block, calls = list(children.values())[candidate], found[name]
        fits = len(calls) == 1 and _shapes(calls[0].output) == shape
        in_turn = period is not None and not off[candidate] and _keeps(here, shape)  # kinds alternate
        if block is None or not fits or (type(block) is not type(children[key]) and not in_turn):
            continue
        if not request.exact and block._modules and _keeps(calls, shape):
            return Template(candidate, None)
        mark = (kinds[candidate], shape[0] if shape else ())
        try:
            identity = known.identity(mark, block, calls[0], request)
            check_skip_activations(identity, container.get_submodule(key), here[0])
        except NotZero as reason:
            reasons[name] = str(reason)
            continue
        return Template(candidate, identity)
    raise NotZero(reasons.get(request.after) or next(iter(reasons.values()), "no block of its kind keeps its shape"))


def _shapes(output: Any) -> list[tuple[int, ...]]:
    """The shape of the first tensor of an output or example."""
    return [tuple(tensor.shape) for tensor in outputs_in(output)][:1]


def _keeps(calls: Sequence[Call], shape: list[tuple[int, ...]]) -> bool:
    return len(calls) == 1 and _shapes(calls[0].output) == shape == _shapes(calls[0].example)


def _without_dropout(kind: Any) -> Any:
    """A block's kind without its dropout and nn.Identity modules: libraries put nn.Identity where a dropout rate is zero."""
    if kind is None:
        return None
    return tuple(entry for entry in kind if entry[1] is not nn.Identity and not _is_dropout(entry[1]))


def _is_dropout(module_class: type) -> bool:
    name = module_class.__name__.lower()
    return "drop" in name or name == "stochasticdepth"


def _period(kinds: Sequence[Any]) -> int | None:
    """The number of blocks after which their kinds repeat (Swin shifts every other window); None if they do not.

    kinds: None stands for a block that is ignored. If blocks differ in settings only, all of them count as one period; not if
    one has other tensors (T5's first block): then a kind must occur again.
    """
    tensors = {tuple((path, held) for path, _, held, _ in kind if held) for kind in kinds if kind is not None}
    for period in range(1, len(kinds)):
        pairs = [(a, b) for a, b in zip(kinds, kinds[period:], strict=False) if a is not None and b is not None]
        if all(a == b for a, b in pairs) and (pairs or len(tensors) <= 1):
            return period
    if _first_is_odd(kinds):
        return _period([None, *kinds[1:]])
    return len(kinds) if len(tensors) <= 1 else None


def _first_is_odd(kinds: Sequence[Any]) -> bool:
    """Whether the first block has all tensors of another one and more, or lacks some, so that others are rather copied.

    T5's first block computes the positions for all, and ModernBERT's has no norm.
    """
    held = [None if kind is None else _tensors(kind) for kind in kinds]
    first = held[0] if held else None
    return first is not None and any(other is not None and (first < other or other < first) for other in held[1:])


def _tensors(kind: Any) -> frozenset[Any]:
    return frozenset((path, held) for path, _, tensors, _ in kind for held in tensors)


def _check_called(model: nn.Module, example: Example, plan: Plan, before: Sequence[str]) -> None:
    """Raise NotZero if the model's code does not run the new blocks, or no longer runs all others, as with fixed indices."""
    new = plan.new_blocks
    reason = NOT_RUN
    try:
        called = calls_without_values(model, example, [*new, *map(plan.renamed, before)])
    except TraceError as error:
        called, reason = {"": []}, f"with one more block there {str(error).splitlines()[0]}"
    if not all(called.values()):
        raise NotZero(reason)
