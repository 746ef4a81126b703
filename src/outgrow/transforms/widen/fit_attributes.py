"""Fit the model's Python attributes to its new tensors: sizes that modules keep.

A table covers the layers of torch.nn. For everything else the grown model runs on meta tensors (no arithmetic, no memory), and
each operator is compared with the trace, whose shapes after the growth are predicted. At the first operator that disagrees, the
module whose code was running must hold the old size in an integer attribute. A repair counts only if the run then gets further;
a repair of one module is also tried on its sisters of the same class. If no attribute explains the clash, the code ties two
sizes to each other, and `Clash` names the operator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from outgrow.apply.apply_plan import apply_setting
from outgrow.apply.final_positions import edits_by_tensor
from outgrow.apply.grow_tensor import fill_values, grown
from outgrow.growth_plan.plan import Plan, Setting
from outgrow.model.example import Example, call, tensors_in
from outgrow.model.inner_gradients import GRADIENT
from outgrow.model.journal import Journal
from outgrow.model.known_values import KnownConstants, KnownShapes, on_meta
from outgrow.model.meta_operators import ShapeCache
from outgrow.model.sandbox import elementary, substituted, tensors_of, untouched
from outgrow.model.walk_modules import module_at, set_mode
from outgrow.modules.fold import Fold
from outgrow.trace.operators import FOLD, Op, Trace, refs_in
from outgrow.trace.record import Watcher
from outgrow.transforms.widen.layer_attributes import known_settings
from outgrow.transforms.widen.predict_shapes import Prediction

ROUNDS = 400
RETURNS = 4  # repairs that are given up for others
NEARBY = 40  # operators of the clashing module that are searched for sizes that change
INDEXED = {"aten.gather", "aten.scatter", "aten.scatter_add", "aten.scatter_reduce"}
SCALING = {"aten.mul", "aten.div", "aten.add", "aten.sub", "aten.rsub", "aten.embedding"}  # the last: its padding index


@dataclass(frozen=True)
class Clash:
    """The first operator at which the grown model differs from the prediction."""

    index: int
    module: str
    found: str
    scalar: tuple[float, float] | None = None  # the scalar that the code uses, and the one that it should use


class Disagreement(Exception):
    """Stops a run at the first clash. scalar: the scalar that the code uses and the one that it should, if they differ."""

    def __init__(self, found: str, scalar: tuple[float, float] | None = None) -> None:
        super().__init__(found)
        self.scalar = scalar


class Checker(Watcher):
    """Compares a run with the predicted trace, operator by operator."""

    def __init__(self, trace: Trace, prediction: Prediction, shapes: ShapeCache) -> None:
        super().__init__()
        self.trace, self.prediction, self.shapes, self.gradients = trace, prediction, shapes, trace.gradients
        self.idle_peers = trace.idle_peers
        self.expected = [op for op in trace.ops if op.name != "outgrow.write_through_view"]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.inside:
            return func(*args, **(kwargs or {}))
        made = self.substitute(func, args, kwargs or {})
        if made is not NotImplemented:
            return made
        op = self._next(str(func.overloadpacket))
        self._check_scalars(op, args)
        if op.name == "aten.convolution" and args[6] and args[0].shape[1] != args[1].shape[0]:
            raise Disagreement("Invalid channel dimensions")  # torch does not check this on the meta device
        if op.name.removesuffix("_") in INDEXED:
            self._check_index(op, args)
        if op.name == "aten.constant_pad_nd" and list(args[1]) != (want := self.prediction.padding(op)):
            raise Disagreement(f"it pads by {tuple(args[1])} where {tuple(want)} would keep units at their positions")
        result = self.shapes.call(func, args, kwargs or {})
        self._check_shapes(op, result)
        return result

    def _check_index(self, op: Op, args: Any) -> None:
        """Raise if an index covered a whole tensor and no longer does: torch would silently leave the rest out."""
        source = 3 if len(args) > 3 and isinstance(args[3], Tensor) else 0
        before = [self.trace.values[op.args[at].value].shape for at in (source, 2)]
        for axis, (full, chosen) in enumerate(zip(*before, strict=False)):
            if full == chosen and args[source].shape[axis] != args[2].shape[axis]:
                raise Disagreement(f"{op.name} has an index of {args[2].shape[axis]} for {args[source].shape[axis]} units")

    def folded(self, path: str, fold: Fold, x: Tensor, result: Tensor) -> None:
        self._check_shapes(self._next(FOLD), result)

    def differentiated(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        self._check_shapes(self._next(GRADIENT), results)

    def _next(self, name: str) -> Op:
        if self.count >= len(self.expected):
            raise Disagreement("more operators than before")
        op = self.expected[self.count]
        if name != op.name:
            raise Disagreement(f"{name} instead of {op.name}")
        return op

    def _check_shapes(self, op: Op, result: Any) -> None:
        for tensor, value in zip(tensors_in(result), op.outputs, strict=False):
            if value not in self.prediction.anatomy.consumers or self.prediction.anatomy.reading.uniform[value]:
                continue
            want = self.prediction.shape(value)
            if 0 in want and 0 in tensor.shape:  # an empty part carries no labels
                continue
            repeated = self.prediction.anatomy.reading.repeated.get(value, ())
            differ = [a != b for axis, (a, b) in enumerate(zip(tensor.shape, want, strict=False)) if axis not in repeated]
            if (any(differ) or tensor.ndim != len(want)) and (tensor.is_floating_point() or tensor.is_complex()):
                raise Disagreement(f"{op.name} gives {tuple(tensor.shape)} where {want} should be")
        self.count += 1

    def _check_scalars(self, op: Op, args: Any) -> None:
        """Raise if a scalar that the code computes (from a width, say) changes; the ε of a norm and scales of scores may."""
        old, new = self.prediction.eps.get(op.index) or self.prediction.scalars.get(op.index, (0.0, 0.0))
        for before, now in zip(op.args, args, strict=False):
            if isinstance(before, float) or (isinstance(before, (int, float)) and op.name in SCALING):
                moves = bool(old) and math.isclose(before, old, rel_tol=1e-6)  # torch may pass an ε on in single precision
                want, tolerance = (new, 1e-6) if moves else (before, 1e-9)
                nans = math.isnan(want) and math.isnan(now)  # a mask, say
                if not nans and not math.isclose(float(now), want, rel_tol=tolerance, abs_tol=1e-300):
                    raise Disagreement(f"{op.name} uses {float(now):.6g} where {want:.6g} should be", (float(now), want))


class Fitter:
    """Runs a model with other shapes and settings, without changing it."""

    def __init__(self, model: nn.Module, example: Example, trace: Trace) -> None:
        self.model, self.example, self.trace = model, example, trace
        shapes = KnownShapes if trace.known else ShapeCache
        self.shapes = shapes()  # shared by all runs, which differ in a few attributes only
        self._last: tuple[Plan, dict[str, Tensor]] | None = None  # meta tensors of the last plan, for its next run

    def run(self, plan: Plan, settings: Sequence[Setting], prediction: Prediction) -> Clash | None:
        """The first clash between the run and the prediction; None if there is none."""
        checker = Checker(self.trace, prediction, self.shapes)
        journal = Journal()
        try:
            for setting in settings:
                apply_setting(self.model, setting, journal)
            tensors, example = self._grown(plan), self.example
            if self.trace.meta:
                example = on_meta(example)
            for training in self.trace.passes:
                with (
                    untouched(self.model, not self.trace.meta),
                    elementary(),
                    substituted(self.model, tensors),
                    checker.watching(self.model),
                    KnownConstants() if self.trace.known else nullcontext(),
                ):
                    set_mode(self.model, training)
                    call(self.model, example)
        except Exception as error:
            index = min(checker.count, len(checker.expected) - 1)
            op = checker.expected[index]
            found = str(error).split("\n")[0] or type(error).__name__
            return Clash(op.index, op.module, found, error.scalar if isinstance(error, Disagreement) else None)
        finally:
            journal.undo()
        return None

    def _grown(self, plan: Plan) -> dict[str, Tensor]:
        """Tensors of the new shapes: on the meta device, or with values if the model's code reads values."""
        if self._last is not None and self._last[0] is plan:
            return self._last[1]
        old = {name: tensor.detach() for name, tensor in tensors_of(self.model).items()}
        if self.trace.meta:
            shapes = plan.shapes({name: tensor.shape for name, tensor in old.items()})
            made = {name: tensor.new_empty(shapes.get(name, tensor.shape), device="meta") for name, tensor in old.items()}
            self._last = plan, made
            return made
        new = {name: tensor.clone() for name, tensor in old.items()}
        for name, edits in edits_by_tensor(plan).items():
            new[name] = grown(old[name], edits)
            fill_values(new[name], old[name], edits, old, plan.seed, {})
        for name, tensor in tensors_of(self.model).items():
            new[name].requires_grad_(tensor.requires_grad)  # torch chooses its operators by this, too
        return new


def fit(fitter: Fitter, plan: Plan, prediction: Prediction, past: int | None = None) -> tuple[list[Setting], Clash | None]:
    """Settings that make the model run at its new shapes, and the clash that no setting resolves, if there is one.

    past: an operator; the search ends at the first clash behind it. Clashes move forward, except if a repair of the same module
    was wrong: Phi-3 multiplies two sizes, and if both are equal, either of them could have grown.
    """
    model = fitter.model
    before = {name: tuple(tensor.shape) for name, tensor in tensors_of(model).items()}
    shapes = plan.shapes(before)
    settings = [*known_settings(model, before, shapes, prediction), *plan.settings]
    clash = fitter.run(plan, settings, prediction)
    rounds, returns = 0, 0
    trail: list[tuple[list[Setting], Clash, Setting]] = []  # before each repair: the settings, the clash, the repair
    wrong: set[Setting] = set()  # repairs after which the same module has a clash that nothing resolves
    furthest: tuple[list[Setting], Clash] | None = None
    while clash is not None and (past is None or clash.index <= past):
        for extra in _repairs(model, clash, prediction, settings):
            if extra and extra[0] in wrong:
                continue
            rounds += 1
            tried = fitter.run(plan, [*settings, *extra], prediction)
            if tried is None or tried.index > clash.index:
                trail += [(settings, clash, extra[0])] if extra else []
                settings, clash = [*settings, *extra], tried
                break
        else:
            furthest = furthest or (settings, clash)
            if not trail or trail[-1][1].module != clash.module or returns >= RETURNS:
                return furthest
            returns += 1
            settings, clash, repair = trail.pop()
            wrong.add(repair)
        if rounds > ROUNDS:
            return furthest or (settings, clash)
    return settings, clash


def _repairs(model: nn.Module, clash: Clash, prediction: Prediction, settings: Sequence[Setting]) -> Iterator[list[Setting]]:
    """Candidate repairs for a clash, most likely first: attributes equal to a size that changes there, with sister modules."""
    taken = {(s.module, s.name, s.item) for s in settings}
    if clash.scalar is not None:
        yield from _scales(model, clash.module, *clash.scalar, taken)
    same = [op.index for op in prediction.anatomy.reading.trace.ops if op.module == clash.module]
    later = [index for index in same if index >= clash.index][:NEARBY] or [clash.index]
    seen: set[tuple[str | int, str, Any, int]] = set()
    single = _settings_at(model, clash.module, prediction, later, taken, seen)
    for setting in single:
        sisters = list(_sisters(model, setting, clash, prediction, taken))
        if sisters:
            yield [setting, *sisters]
    yield from ([setting] for setting in single)
    own = [setting for setting in single if isinstance(_place(model, setting), str)]
    yield from ([one, two] for i, one in enumerate(own) for two in own[i + 1 :] if one.name != two.name)
    earlier = [index for index in same if index < clash.index][-NEARBY:]  # two sizes of which the code takes the ratio
    before = _settings_at(model, clash.module, prediction, earlier, taken, seen)
    yield from ([one, two] for one in own for two in before if one.name != two.name and isinstance(_place(model, two), str))


def _scales(
    model: nn.Module, path: str, found: float, wanted: float, taken: set[tuple[str, str, Any]]
) -> Iterator[list[Setting]]:
    """Settings of floats that modules of a class keep, such as 1/√size: a scalar, or its square (torch takes the root)."""
    kind = type(module_at(model, path))
    for power in (1, 2):
        for name, value in vars(module_at(model, path)).items():
            if type(value) is float and math.isclose(value, found**power, rel_tol=1e-6):
                alike = [p for p, module in model.named_modules() if type(module) is kind and vars(module).get(name) == value]
                yield [Setting(p, name, value, wanted**power) for p in alike if (p, name, None) not in taken]


def _settings_at(
    model: nn.Module,
    path: str,
    prediction: Prediction,
    indices: Sequence[int],
    taken: set[tuple[str, str, Any]],
    seen: set[tuple[str | int, str, Any, int]],
) -> list[Setting]:
    """Settings for attributes of a module and those around it that equal sizes which change at some operators.

    Attributes with a setting (`taken`), and settings found before (`seen`, which is added to), are left out.
    """
    owners = [path]
    while owners[-1]:
        owners.append(owners[-1].rpartition(".")[0])
    found: list[Setting] = []
    for index in indices:
        for old, new in _changes_at(prediction, index):
            for setting in (setting for owner in owners for setting in _attributes(model, owner, old, new)):
                key = (_place(model, setting), setting.name, setting.item, new)
                if key not in seen and not _taken(setting.module, setting, taken):
                    seen.add(key)
                    found.append(setting)
    return found


def _taken(module: str, setting: Setting, taken: set[tuple[str, str, Any]]) -> bool:
    """Whether a setting for an attribute exists already: for the same item, or for the whole attribute."""
    return bool({(module, setting.name, setting.item), (module, setting.name, None)} & taken)


def _changes_at(prediction: Prediction, index: int) -> list[tuple[int, int]]:
    """Sizes that change at an operator, before and after: of its results and operands, and numbers of groups."""
    op = prediction.anatomy.reading.trace.ops[index]
    changes: dict[tuple[int, int], None] = {}
    grouped = prediction.groups(index)
    if grouped is not None and grouped[0] != grouped[1]:
        changes[grouped] = None
    for value in (*op.outputs, *(ref.value for ref in refs_in((op.args, op.kwargs)))):
        old, new = prediction.anatomy.reading.trace.values[value].shape, prediction.shape(value)
        for before, after in zip(old, new, strict=True):
            if before != after:
                changes[before, after] = None
    return list(changes)


def _attributes(model: nn.Module, path: str, old: int, new: int) -> Iterator[Setting]:
    """Settings for integer attributes of a module that equal `old`, also inside tuples, lists, dicts and, last, configurations.

    A configuration counts because code may read it as it runs: Phi-3 splits q, k and v by `config.num_attention_heads`.
    """
    public = {name: value for name, value in vars(module_at(model, path)).items() if not name.startswith("_")}
    for name, value in public.items():
        if type(value) is int and value == old:
            yield Setting(path, name, old, new)
        elif isinstance(value, (tuple, list)) and type(value) in (tuple, list):
            for item, entry in enumerate(value):
                if type(entry) is int and entry == old:
                    yield Setting(path, name, old, new, item)
        elif type(value) is dict:
            for key, entry in value.items():
                if isinstance(key, str) and type(entry) is int and entry == old:
                    yield Setting(path, name, old, new, key)
    for name, value in public.items():
        for key, entry in vars(value).items() if _is_config(value) else ():
            if type(entry) is int and entry == old and not key.startswith("_"):
                yield Setting(path, name, old, new, key)


def _is_config(value: object) -> bool:
    """Whether an attribute is a configuration, which the modules of a model share."""
    return hasattr(value, "to_dict") and hasattr(value, "__dict__")


def _place(model: nn.Module, setting: Setting) -> str | int:
    """What a setting changes: a module, by its path, or a configuration, by its identity."""
    value = vars(module_at(model, setting.module)).get(setting.name)
    return id(value) if setting.item is not None and _is_config(value) else setting.module


def _sisters(
    model: nn.Module, setting: Setting, clash: Clash, prediction: Prediction, taken: set[tuple[str, str, Any]]
) -> Iterator[Setting]:
    """The same attribute of other modules of the same class, with the size that changes at the same place of their code."""
    trace = prediction.anatomy.reading.trace
    here = [op.index for op in trace.ops if op.module == clash.module]
    if clash.index not in here or isinstance(_place(model, setting), int):
        return
    place = here.index(clash.index)
    kind = type(module_at(model, setting.module))
    running = type(module_at(model, clash.module))
    steps_up = len(clash.module.split(".")) - len(setting.module.split(".")) if setting.module else len(clash.module.split("."))
    by_module: dict[str, list[int]] = {}
    for op in trace.ops:
        by_module.setdefault(op.module, []).append(op.index)
    for path, ops in by_module.items():
        if path == clash.module or type(module_at(model, path)) is not running or place >= len(ops):
            continue
        owner = ".".join(path.split(".")[: len(path.split(".")) - steps_up]) if steps_up else path
        module = module_at(model, owner)
        if type(module) is not kind or _taken(owner, setting, taken):
            continue
        value = vars(module).get(setting.name)
        current = value[setting.item] if setting.item is not None and value is not None else value
        changes = [change for index in ops[place : place + NEARBY] for change in _changes_at(prediction, index)]
        matches = [new for old, new in changes if old == current]
        if matches:
            yield Setting(owner, setting.name, current, setting.new if setting.new in matches else matches[0], setting.item)
