"""What can grow in a Transformers model, by which steps, and whether its configuration can express the result: found by trials.

Each trial grows the model on the meta device, exactly as a checkpoint is planned, and checks that a model built from the new
configuration has the shapes of the grown one. Trials run on the model cut to a few layers, one or two of each sort in a stack,
so their time does not depend on the length of the stacks.

Configurations often demand that one size divides another. So the steps +1, +2, +4, +8, the configuration's numbers of heads
and twice the size are tried. A step counts as one that can be repeated if three times the step works as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from outgrow.analysis.volume_kinds import KINDS
from outgrow.analysis.volumes import Volume
from outgrow.checkpoints.build_on_meta import build_on_meta, without_weights
from outgrow.checkpoints.cut_models import Cut, cut_config
from outgrow.checkpoints.plan_checkpoint import grow_on_meta
from outgrow.checkpoints.standard_examples import example_for
from outgrow.configuration.per_layer import COUNTS, PER_LAYER
from outgrow.errors import CheckpointError, GrowthError, SizeError
from outgrow.growth_plan.plan import Plan
from outgrow.model.example import Example
from outgrow.model.known_values import on_meta
from outgrow.requests import Deepen, Widen
from outgrow.transforms.all_transforms import Transform
from outgrow.transforms.widen.list_volumes import volumes as list_volumes

ALL_TOKENS = 2**62
FEW = 2  # layers of a cut stack, unless it has more sorts of layers
AGAIN = 3  # times a step, to see whether it can be repeated
STEPS = (1, 2, 4, 8)
RETURNED = "it is an output of the model"
OUTPUTS = (("logits",), ("logits_per_image", "logits_per_text"))  # names under which models return what they compute


@dataclass(frozen=True)
class Trial:
    """The result of a trial: the reason why it is refused, or "" and the fields of the configuration that change."""

    reason: str
    saved: str = ""
    methods: tuple[str, ...] = ()
    for_its_size: bool = False  # whether another size may work: the configuration can't express it, or units come in groups


@dataclass(frozen=True)
class GrowthOption:
    """A way to grow a checkpoint, as `--widen` or `--deepen` of the command would do it.

    request: e.g. "mlp", or "layers" for the length of a stack. sizes: at present. unit: what one unit is, if that is more than
    the word says. steps: sizes that work, e.g. "+1" (any multiple), "+8 (not every multiple)" or "× 2"; "" if none was found.
    config: the fields that change. reason: why it can't grow, or can't be saved. outputs: if not empty, only these outputs of
    the model are preserved.
    """

    request: str
    where: str
    sizes: tuple[int, ...]
    unit: str
    steps: str
    methods: tuple[str, ...]
    config: str
    reason: str
    outputs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The request, with the option that it needs on the command line."""
        options = " ".join(f"--outputs {name}" for name in self.outputs)
        return f"{self.request} ({options})" if options else self.request

    @property
    def savable(self) -> bool:
        """Whether a grown checkpoint can be written."""
        return bool(self.steps)


@dataclass(frozen=True, eq=False)
class CutModel:
    """A class and a configuration of few layers. stacks: path and whole length of each stack that the configuration counts."""

    kind: Any
    config: Any
    stacks: tuple[tuple[str, int], ...]
    example: Example | None = None

    def build(self) -> nn.Module:
        return build_on_meta(self.kind, self.config)

    def inputs(self, model: nn.Module) -> Example:
        return example_for(model) if self.example is None else self.example

    def trial(self, *requests: Transform) -> Trial:
        """Grow a new model of the configuration."""
        model = self.build()
        try:
            growth, _ = grow_on_meta(self.kind, model, self.inputs(model), requests)
        except CheckpointError as error:
            reason = _first_line(error)
            return Trial("exact, but " + (reason[:1].lower() + reason[1:]), for_its_size=True)
        except GrowthError as error:
            return Trial(_first_line(error), for_its_size=isinstance(error, SizeError))
        return Trial("", _fields(growth.plan), tuple(dict.fromkeys(change.method for change in growth.plan.changes)))


def _fields(plan: Plan) -> str:
    """Names of the fields of configurations that have other values after a growth; several steps may set one field."""
    first: dict[Any, Any] = {}
    last: dict[Any, Any] = {}
    for setting in plan.settings:
        if setting.name == "config":
            first.setdefault((setting.module, setting.item), setting.old)
            last[setting.module, setting.item] = setting.new
    return ", ".join(dict.fromkeys(str(field[1]) for field, new in last.items() if new != first[field]))


def _first_line(error: GrowthError) -> str:
    """The reason of an error: that of its first problem, if it has any."""
    return error.problems[0].reason if error.problems else str(error).partition("\n")[0]


def cut_to_few_layers(kind: Any, config: Any, example: Example | None = None) -> CutModel:
    """A model with one or two layers of each sort; the whole one if its configuration can't be cut."""
    whole = build_on_meta(kind, config)
    stacks = tuple(_stacks(whole, _counts(config.to_dict())))
    cuts = [Cut(path, count, _kept(whole, path, count, config, FEW + n)) for n, (path, count) in enumerate(stacks)]
    try:
        few = CutModel(kind, cut_config(config, cuts, ALL_TOKENS), stacks, example)
        few.build()
    except Exception:
        return CutModel(kind, config, stacks, example)
    return few


def _counts(data: dict[str, Any]) -> set[int]:
    nested = [_counts(value) for value in data.values() if isinstance(value, dict)]
    return {value for name, value in data.items() if name in COUNTS and type(value) is int}.union(*nested)


def _stacks(model: nn.Module, counts: set[int]) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for path, module in model.named_modules():
        inner = any(path.startswith(f"{other}.") for other, _ in found)
        if isinstance(module, nn.ModuleList) and len(module) in counts and not inner:
            found.append((path, len(module)))
    return found


def _kept(model: nn.Module, path: str, count: int, config: Any, few: int) -> tuple[int, ...]:
    """The first layer of each sort, and at least `few` layers, so that the lengths of several stacks differ.

    Layers are of the same sort if their shapes and their items of the configuration agree.
    """
    lists = [
        value
        for part in (config, *vars(config).values())
        for name, value in (vars(part) if hasattr(part, "__dict__") else {}).items()
        if isinstance(value, (list, tuple)) and len(value) == count and any(word in name for word in PER_LAYER)
    ]
    sorts: dict[Any, int] = {}
    layers = list(model.get_submodule(path).children())
    for number, layer in enumerate(layers):
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in layer.named_parameters())
        sorts.setdefault((shapes, *(str(values[number]) for values in lists)), number)
    others = [number for number in range(count) if number not in sorts.values()]
    return tuple(sorted([*sorts.values(), *others[: max(0, few - len(sorts))]]))


def find_options(cut: CutModel) -> list[GrowthOption]:
    """All kinds of units that a model has, and the lengths of its stacks."""
    model = cut.build()
    with without_weights(cut.kind):
        volumes = list_volumes(model, on_meta(cut.inputs(model)))
    of_kind = {kind: [volume for volume in volumes if volume.kind == kind] for kind in KINDS}
    found = [_widening(cut, kind, own) for kind, own in of_kind.items() if own]
    by_name = {option.request: option for option in found}
    width, heads = by_name.get("width"), by_name.get("heads")
    if width is not None and not width.savable and RETURNED in width.reason:
        others = (_widening(cut, "width", of_kind["width"], names) for names in OUTPUTS)
        found += [option for option in others if option.savable][:1]
    if width is not None and heads is not None and not (width.savable and heads.savable):
        found += _both(cut, width, heads)
    lengths = {path: len(list(model.get_submodule(path).children())) for path, _ in cut.stacks}
    several = len(cut.stacks) > 1
    return found + [_deepening(cut, path, count, lengths[path], several) for path, count in cut.stacks]


def _widening(cut: CutModel, kind: str, volumes: Sequence[Volume], outputs: tuple[str, ...] = ()) -> GrowthOption:
    sizes = tuple(sorted({volume.size for volume in volumes}))
    where = volumes[0].name + (f" + {len(volumes) - 1} more" if len(volumes) > 1 else "")
    unit = next((volume.unit for volume in volumes if volume.unit), "")
    can_grow = outputs or any(volume.growable or volume.extendable for volume in volumes)
    if any(volume.rotary for volume in volumes):
        trial = cut.trial(Widen(kind=kind, factor=2.0))
        steps = "" if trial.reason else "× 2"
    else:
        steps, trial = smallest_step(cut, kind, sizes, None if can_grow else Trial(volumes[0].reason), outputs or None)
    return GrowthOption(kind, where, sizes, unit, steps, trial.methods, trial.saved, trial.reason, outputs)


def smallest_step(
    cut: CutModel, kind: str, sizes: Sequence[int], first: Trial | None = None, outputs: tuple[str, ...] | None = None
) -> tuple[str, Trial]:
    """The smallest step that works, as text, and its trial; or "" and the first refusal.

    first: a refusal that is known without a trial; then only twice the size is tried.
    """
    others = {*STEPS, *_head_counts(cut.config.to_dict())}
    candidates = [1, *sorted(step for step in others if 1 < step < min(sizes))]
    for step in candidates if first is None else ():
        trial = cut.trial(Widen(kind=kind, by=step, outputs=outputs))
        first = first or trial
        if not trial.reason:
            again = trial if step == 1 else cut.trial(Widen(kind=kind, by=AGAIN * step, outputs=outputs))
            return (f"+{step:,}" if not again.reason else f"+{step:,} (not every multiple)"), trial
        if not trial.for_its_size:  # refused for reasons that do not depend on the size, or only whole copies are exact
            break
    trial = cut.trial(Widen(kind=kind, factor=2.0, outputs=outputs))
    return ("× 2", trial) if not trial.reason else ("", first or trial)


def _head_counts(data: dict[str, Any]) -> set[int]:
    nested = [_head_counts(value) for value in data.values() if isinstance(value, dict)]
    found = {value for name, value in data.items() if str(name).endswith(("heads", "n_head")) and type(value) is int}
    return found.union(*nested)


def _both(cut: CutModel, width: GrowthOption, heads: GrowthOption) -> list[GrowthOption]:
    """Width and heads together, where a configuration ties them."""
    sizes = (*width.sizes, *heads.sizes)
    where = f"{width.where}; {heads.where}"
    for outputs in (None, *OUTPUTS) if RETURNED in width.reason else (None,):
        trial = cut.trial(Widen(kind="width", factor=2.0, outputs=outputs), Widen(kind="heads", factor=2.0))
        if not trial.reason:
            both = "× 2 (both)"
            return [GrowthOption("width and heads", where, sizes, "", both, trial.methods, trial.saved, "", outputs or ())]
    return []


def _deepening(cut: CutModel, path: str, count: int, now: int, several: bool) -> GrowthOption:
    trial = cut.trial(Deepen(layers=now + 1, stack=path))
    twice = cut.trial(Deepen(layers=2 * now, stack=path)) if trial.reason else trial
    steps = "+1" if not trial.reason else "× 2" if not twice.reason else ""
    found = trial if not trial.reason or twice.reason else twice
    name = f"layers of {path}" if several else "layers"
    return GrowthOption(name, path, (count,), "", steps, found.methods, found.saved, found.reason)
