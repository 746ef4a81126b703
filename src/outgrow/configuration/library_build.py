"""The model that its library would build at the planned sizes, before anything has grown.

A plan that changes the ε of norms can be saved with the library only if a configuration expresses every ε. A library may also
compute factors from a size: Gemma multiplies its embeddings by √hidden_size, T5 divides its last states by √d_model. Both are
found by building the model from its configuration twice, at the present sizes and at the planned ones, on the meta device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from outgrow.analysis.analyse import watch
from outgrow.apply.apply_plan import apply_setting
from outgrow.configuration.follow_sizes import TRIES, described, guesses, try_setting
from outgrow.configuration.rebuild_from_config import NAME, RebuiltDiffers, built, compare_epsilons
from outgrow.growth_plan.plan import Plan, Setting
from outgrow.history.growths_on_model import history
from outgrow.model.example import Example
from outgrow.model.journal import Journal
from outgrow.model.module_paths import joined_path
from outgrow.model.sandbox import tensors_of
from outgrow.trace.operators import Op, Ref, Trace

Factor = tuple[float, float]  # before and after
SAME = 1e-6  # relative; a library may keep a factor in single precision


@dataclass(frozen=True)
class LibraryBuild:
    """What a library makes of the planned sizes.

    epsilons: whether a configuration expresses every ε of the plan. scalars: by the number of the operator. buffers: by name,
    those that are not saved, and are multiplied as a whole.
    """

    epsilons: bool = True
    scalars: Mapping[int, Factor] = field(default_factory=dict)
    buffers: Mapping[str, Factor] = field(default_factory=dict)


def library_build(model: nn.Module, example: Example, trace: Trace, plan: Plan) -> LibraryBuild | None:
    """What the library builds at the sizes of a plan; None if the model has no configuration, or none describes these sizes."""
    paths = described(model)
    found = [one for path in paths if (one := _at_path(model, path, example, trace, plan)) is not None]
    if not paths or len(found) < len(paths):
        return None
    return LibraryBuild(
        all(one.epsilons for one in found),
        {index: factor for one in found for index, factor in one.scalars.items()},
        {name: factor for one in found for name, factor in one.buffers.items()},
    )


def _at_path(model: nn.Module, path: str, example: Example, trace: Trace, plan: Plan) -> LibraryBuild | None:
    """The same for the part of a model that has a configuration of its own."""
    part = model.get_submodule(path)
    try:
        before = built(part)
    except RebuiltDiffers:
        return None
    fitting: nn.Module | None = None
    for other in _builds(model, path, plan):
        if _expresses(model, part, plan, other):
            fitting, epsilons = other, True
            break
        fitting, epsilons = fitting or other, False
    if fitting is None:
        return None
    scalars = _scalars(fitting, example, trace) if not path else {}
    return LibraryBuild(epsilons, scalars, _buffers(part, before, fitting, path))


def _builds(model: nn.Module, path: str, plan: Plan) -> Iterator[nn.Module]:
    """Models with the planned shapes, built from the configurations that are likeliest."""
    part, shapes = model.get_submodule(path), _shapes(model, path, plan)
    for guess in itertools.islice(guesses(model, path, [*history(model), plan]), TRIES):
        with Journal() as journal:
            try:
                for (holder, name), (old, new) in guess.items():
                    try_setting(model, Setting(holder, NAME, old, new, name), journal)
                other = built(part)
            except RebuiltDiffers:
                continue
            finally:
                journal.undo()
        if {name: tuple(tensor.shape) for name, tensor in other.state_dict().items()} == shapes:
            yield other


def _shapes(model: nn.Module, path: str, plan: Plan) -> dict[str, tuple[int, ...]]:
    """The planned shapes of the tensors in a part's state dict."""
    tensors = tensors_of(model)
    after = plan.shapes({name: tensor.shape for name, tensor in tensors.items()})
    names = {id(tensor): name for name, tensor in tensors.items()}
    part = model.get_submodule(path)
    held = [*part.named_parameters(remove_duplicate=False), *part.named_buffers(remove_duplicate=False)]
    saved = part.state_dict().keys()
    return {name: after.get(names[id(tensor)], tuple(tensor.shape)) for name, tensor in held if name in saved}


def _expresses(model: nn.Module, part: nn.Module, plan: Plan, other: nn.Module) -> bool:
    """Whether every ε of a built model is that of the plan."""
    with Journal() as journal:
        try:
            for setting in plan.settings:
                if type(setting.new) is float:
                    apply_setting(model, setting, journal)
            compare_epsilons(other, part, {})
        except RebuiltDiffers:
            return False
        finally:
            journal.undo()
    return True


def _scalars(other: nn.Module, example: Example, trace: Trace) -> dict[int, Factor]:
    """Factors in the code of the built model that differ from those in the trace; none if it runs other operators."""
    try:
        ops = watch(other, example, both_modes=len(trace.passes) > 1).ops
    except Exception:  # it needs values that are not there: the comparison after the growth reports a difference
        return {}
    if [op.name for op in ops] != [op.name for op in trace.ops]:
        return {}
    pairs = ((old.index, scalar_of(old), scalar_of(new)) for old, new in zip(trace.ops, ops, strict=True))
    return {index: (old, new) for index, old, new in pairs if old and new and not math.isclose(old, new, rel_tol=SAME)}


def scalar_of(op: Op) -> float | None:
    """The scalar by which an operator multiplies or divides; None for other operators."""
    match op.name.removesuffix("_"), op.args:
        case (("aten.mul" | "aten.div"), (Ref(), int() | float() as scalar, *_)):
            return float(scalar)
    return None


def _buffers(part: nn.Module, before: nn.Module, after: nn.Module, path: str) -> dict[str, Factor]:
    """Buffers that are not saved, and that the library multiplies by one factor.

    The values before are the model's own, which may have been rounded to another dtype than the library's.
    """
    found: dict[str, Factor] = {}
    for place, module in after.named_modules():
        there = before.get_submodule(place)._buffers
        for name in module._non_persistent_buffers_set:
            factor = _factor(there.get(name), module._buffers.get(name))
            own = part.get_submodule(place)._buffers.get(name)
            if factor is not None and own is not None and not own.is_meta and own.numel() == 1:
                factor = float(own), factor[1]
            if factor is not None:
                found[joined_path(path, place, name)] = factor
    return found


def _factor(before: Tensor | None, after: Tensor | None) -> Factor | None:
    """Two values whose quotient is that of all values of two tensors; None if there is none, or if they are equal."""
    if before is None or after is None or before.shape != after.shape or not before.is_floating_point():
        return None
    if before.is_meta or after.is_meta or not before.numel():
        return None
    a, b = before.double().flatten(), after.double().flatten()
    where = int(a.abs().argmax())
    quotient = b[where] / a[where]
    if not torch.allclose(b, a * quotient, rtol=SAME, atol=0.0) or math.isclose(float(quotient), 1.0, rel_tol=SAME):
        return None
    return float(a[where]), float(b[where])


def buffers_now(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that the model's library computes at the present sizes, by name, with values even if the model has none."""
    found: dict[str, Tensor] = {}
    for path in described(model):
        try:
            found |= _with_values(built(model.get_submodule(path)), path)
        except RebuiltDiffers:
            continue
    return found


def buffers_at(model: nn.Module, plan: Plan) -> dict[str, Tensor]:
    """The buffers that the model's library computes at the sizes of a plan; none if no configuration describes these."""
    builds = ((path, next(_builds(model, path, plan), None)) for path in described(model))
    return {name: buffer for path, other in builds if other is not None for name, buffer in _with_values(other, path).items()}


def _with_values(part: nn.Module, path: str) -> dict[str, Tensor]:
    return {joined_path(path, name): buffer for name, buffer in part.named_buffers() if not buffer.is_meta}


def unsaved_buffers(model: nn.Module) -> Sequence[str]:
    """Names of the floating-point buffers that are not saved."""
    return [
        joined_path(path, name)
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
        if (buffer := module._buffers.get(name)) is not None and buffer.is_floating_point()
    ]
