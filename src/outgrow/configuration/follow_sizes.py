"""Update a model's configuration to its new sizes, so that its own library builds the grown model from it.

Transformers builds a model from the fields of `model.config`. After a growth some of these need other values: a width, a number
of heads, the ε of the norms. New values are guessed from the sizes that grew, the old values and the names of the fields. A
guess counts only if it is right: a model that is rebuilt from it (on the meta device, so at no cost) has the same tensors, and
the same outputs with the model's own weights. If no guess is right (one layer of many has grown, say), the configuration stays
unchanged, and the report says so.

No code here depends on Transformers: a configuration is an attribute `config` of a module that has a method `to_dict`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from outgrow.analysis.attention_products import HEAD_DIM as KIND_OF_HEAD_SIZES
from outgrow.analysis.attention_products import HEADS as KIND_OF_HEADS
from outgrow.apply.apply_plan import apply_setting
from outgrow.configuration.explain_differences import Guess, explained, shown
from outgrow.configuration.lists_and_ratios import new_lists, new_ratios
from outgrow.configuration.numbers_of_outputs import LABELS, VOCABULARY, is_new_outputs, more_labels
from outgrow.configuration.rebuild_from_config import NAME, Pairs, RebuiltDiffers, modules_of_both, rebuilt, stale_sizes
from outgrow.errors import TraceError
from outgrow.growth_plan.plan import Change, Plan, Setting, renamed
from outgrow.model.example import Example
from outgrow.model.journal import Journal
from outgrow.model.module_calls import Call, calls_of
from outgrow.model.module_paths import joined_path
from outgrow.modules.gates import gates_of
from outgrow.verify.outputs import Evaluation

WIDTHS = ("hidden", "intermediate", "inner", "ffn", "d_ff", "embd", "embed", "d_model", "dim", "proj", "pooler_output")
NO_WIDTHS = ("layers", "head_dim", "position")
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
GROUPS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")  # groups of heads that share keys and values
STREAMS = ("hidden_size", "n_embd", "d_model", "dim")
FOURFOLD = ("n_inner", "intermediate_size", "ffn_dim")  # None means four times the stream
HEAD = "head_dim"  # None, or no such field, means stream / heads
HEAD_SCALES = ("query_pre_attn_scalar",)  # fields that may hold it too, where scores are divided by its root
HEAD_ELSEWHERE = ("d_kv", "kv_channels", "qk_nope_head_dim")  # other fields that hold it
TRIES = 16


def follow(
    model: nn.Module, example: Example, plans: Sequence[Plan], journal: Journal, shared: Evaluation | None = None
) -> tuple[list[Setting], dict[str, str]]:
    """Update the configurations of a model that has just grown; returns the settings made, and reasons of failures by path.

    plans: all plans so far, oldest first, including those just carried out. shared: a pass of the model, which is also used to
    check its outputs.
    """
    settings: list[Setting] = []
    failures: dict[str, str] = {}
    for path in (path for path in described(model) if _grew(path, plans)):
        try:
            settings += _settled(model, path, example, plans, journal, None if path else shared)
        except RebuiltDiffers as reason:
            failures[path] = str(reason)
    return settings, failures


def changed(settings: Sequence[Setting]) -> str:
    """Every changed field of a configuration with its old and new value, in one line; empty if nothing changed."""
    fields: dict[str, tuple[Any, Any]] = {}
    for setting in settings:
        if setting.name == NAME:
            name = str(setting.item)
            fields[name] = fields.get(name, (setting.old, None))[0], setting.new
    return ", ".join(f"{name} {shown(old)} → {shown(new)}" for name, (old, new) in fields.items() if old != new)


def described(model: nn.Module) -> list[str]:
    """Paths of the outermost modules with a configuration."""
    paths: list[str] = []
    for path, module in model.named_modules():
        if hasattr(vars(module).get(NAME), "to_dict") and not any(_within(path, outer) for outer in paths):
            paths.append(path)
    return paths


def _grew(path: str, plans: Sequence[Plan]) -> bool:
    places = [place for plan in plans for place in (*(e.tensor for e in plan.edits), *(i.container for i in plan.inserts))]
    return any(_within(place, path) for place in places)


def _within(name: str, path: str) -> bool:
    return not path or name == path or name.startswith(f"{path}.")


def _settled(
    model: nn.Module, path: str, example: Example, plans: Sequence[Plan], journal: Journal, shared: Evaluation | None
) -> list[Setting]:
    """The settings of the first guess that is right; if there is none, raises with the reason against the closest guess."""
    part = model.get_submodule(path)
    run = _call(model, path, example) if shared is None else shared
    sure = run is not None and not gates_of(part)  # unfinished fades: outputs can't be compared
    steady, sizes = _steady(part, path, plans), _pairs(path, plans).sizes
    failures: list[tuple[Guess, RebuiltDiffers]] = []
    for guess in itertools.islice(guesses(model, path, plans), TRIES):  # without outputs, tensors and layers decide
        trial = Journal()
        journal.note(trial.undo)
        settings = list(_settings(model, guess))
        try:
            for setting in settings:
                try_setting(model, setting, trial)
            other = rebuilt(part, steady, run, sure, sizes)
        except RebuiltDiffers as reason:
            trial.undo()
            _changed(shared)
            failures.append((guess, reason))
            continue
        if shared is not None and sure and not shared.kept:  # by rounding, or because its code reads the new fields?
            trial.undo()
            _changed(shared)
            return _settled(model, path, example, plans, journal, None)
        copies = _copies(model, path, other, guess)
        if copies:
            _changed(shared)
        more = [*copies, *_stale(path, part, other, sizes)]  # the pass in train mode comes after these and checks them
        for setting in more:
            apply_setting(model, setting, journal)
        return [*settings, *more]
    try:
        rebuilt(part, steady, run, outputs=sure)
    except RebuiltDiffers as reason:
        raise RebuiltDiffers(explained([*failures, ({}, reason)], steady)) from reason
    return []


def _settings(model: nn.Module, guess: Guess) -> Iterator[Setting]:
    """The settings that a guess needs: those that a widening has made, since the forward pass reads the field, are there."""
    for (holder, name), (_, new) in guess.items():
        present = vars(vars(model.get_submodule(holder))[NAME]).get(name)
        if present != new:
            yield Setting(holder, NAME, present, new, name)


def _call(model: nn.Module, path: str, example: Example) -> Call | None:
    try:
        return next(iter(calls_of(model, example, [path])[path]), None)
    except TraceError:  # it no longer runs: the comparison of outputs reports that
        return None


def _changed(shared: Evaluation | None) -> None:
    """Discard a shared pass after a change of the configuration, which the model's code may read."""
    if shared is not None:
        shared.forget()


def try_setting(model: nn.Module, setting: Setting, journal: Journal) -> None:
    """Try a setting; the library may check a value when it is set, and raise."""
    try:
        apply_setting(model, setting, journal)
    except Exception as error:
        raise RebuiltDiffers(f"{setting.item} can't be {setting.new}: {(str(error).splitlines() or [''])[0]}") from error


def _steady(part: nn.Module, path: str, plans: Sequence[Plan]) -> dict[tuple[str, str], float]:
    """Present values of floats (an ε) that growths have set: they hardly change outputs, so they are compared themselves."""
    found: dict[tuple[str, str], float] = {}
    for number, plan in enumerate(plans):
        for setting in plan.settings:
            place = renamed(setting.module, plans[number + 1 :])
            if type(setting.new) is float and setting.item is None and _within(place, path):
                place = place.removeprefix(path).removeprefix(".")
                found[place, setting.name] = vars(part.get_submodule(place)).get(setting.name, math.nan)
    return found


def guesses(model: nn.Module, path: str, plans: Sequence[Plan]) -> Iterator[Guess]:
    """Guesses for the new configurations, most likely first: the first one changes every field that may have changed."""
    options: dict[tuple[str, str], tuple[Any, list[Any]]] = {}
    configs = _configs(model, path)
    for holder, config in configs.items():
        before = _before(model, config, plans[-1:])
        for name, (old, values) in _options(config, before, _pairs(holder, plans)).items():
            options[holder, name] = old, values
    for picked in itertools.product(*(values for _, values in options.values())):
        chosen = dict(zip(options, picked, strict=True))
        yield {
            (holder, name): (old, chosen[holder, name])
            for (holder, name), (old, _) in options.items()
            if chosen[holder, name] != (_default(vars(configs[holder]), name, chosen, holder) if old is None else old)
        }


def _before(model: nn.Module, config: Any, plans: Sequence[Plan]) -> dict[str, Any]:
    """The fields of a configuration before plans: a widening has set those that the forward pass reads."""
    fields = dict(vars(config))
    for plan in reversed(plans):
        for setting in plan.settings:
            if setting.name == NAME and vars(model.get_submodule(setting.module)).get(NAME) is config:
                fields[str(setting.item)] = setting.old
    return fields


def _configs(model: nn.Module, path: str) -> dict[str, Any]:
    """A module's configuration and those inside it, by the path of a module that holds them."""
    inside: list[Any] = [vars(model.get_submodule(path))[NAME]]
    for config in inside:
        inside += [value for value in vars(config).values() if hasattr(value, "to_dict") and hasattr(value, "__dict__")]
    found: dict[str, Any] = {}
    for holder, module in model.get_submodule(path).named_modules(prefix=path):
        config = vars(module).get(NAME)
        if any(config is one for one in inside) and all(config is not one for one in found.values()):
            found[holder] = config
    return found


@dataclass(frozen=True)
class _Grown:
    """Values inside a module before and after growths: sizes of volumes, floats, and numbers of outputs."""

    changes: tuple[Change, ...]
    floats: Pairs
    outputs: Pairs

    @property
    def sizes(self) -> Pairs:
        return self._of(lambda kind: True)

    @property
    def heads(self) -> Pairs:
        """Those that a number of heads can follow. Plans of earlier versions have no kinds."""
        return self._of(lambda kind: kind in (None, KIND_OF_HEADS))

    @property
    def head_sizes(self) -> Pairs:
        return self._of(lambda kind: kind in (None, KIND_OF_HEAD_SIZES))

    @property
    def widths(self) -> Pairs:
        return self._of(lambda kind: kind not in (KIND_OF_HEADS, KIND_OF_HEAD_SIZES))

    def _of(self, wanted: Callable[[str | None], bool]) -> Pairs:
        return [(c.old, c.new) for c in self.changes if wanted(c.kind) and type(c.old) is int and type(c.new) is int]


def _pairs(holder: str, plans: Sequence[Plan]) -> _Grown:
    grown = [c for plan in plans if not plan.inserts for c in plan.changes if _within(c.volume, holder)]
    settings = [s for plan in plans for s in plan.settings if type(s.new) is float and _within(s.module, holder)]
    return _Grown(
        tuple(c for c in grown if not is_new_outputs(c)),
        [(setting.old, setting.new) for setting in settings],
        [(c.old, c.new) for c in grown if is_new_outputs(c) and type(c.old) is int and type(c.new) is int],
    )


def _options(config: Any, fields: Mapping[str, Any], grown: _Grown) -> dict[str, tuple[Any, list[Any]]]:
    """For each field: its previous value, and its possible new values. A previous value of None follows from other fields.

    fields: the previous values.
    """
    options: dict[str, tuple[Any, list[Any]]] = {}
    widths = {name: value for name, value in fields.items() if _is_width(name) and type(value) in (int, list, tuple)}
    heads = next((fields[name] for name in HEADS if type(fields.get(name)) is int), 0)
    for name, value in fields.items():
        new: list[Any] = []
        if type(value) is int and name.endswith(("heads", *HEADS, *GROUPS)):
            shared = name.endswith(GROUPS) and heads != value
            counts = _reached(heads, grown.heads) if shared and heads else _reached(value, grown.heads)
            new = [value * count // heads for count in counts] if shared and heads else counts
        elif isinstance(value, dict) and name in LABELS:
            if reached := _reached(len(value), grown.outputs):
                options[name] = value, [more_labels(value, reached[-1])]
        elif type(value) is int and VOCABULARY in name:
            new = _reached(value, grown.outputs)
        elif type(value) is int and name in (HEAD, *HEAD_ELSEWHERE, *HEAD_SCALES):
            new = _reached(value, grown.head_sizes)
        elif type(value) is int and _is_width(name):
            new = _reached(value, grown.widths)
        elif type(value) is float and "eps" in name:
            new = _reached(value, grown.floats)
        elif name.endswith(("heads", *HEADS, *GROUPS)):
            new = new_lists(value, partial(_reached, pairs=grown.heads))
        elif _is_width(name):
            new = new_lists(value, partial(_reached, pairs=grown.widths))
        else:
            new = new_ratios(name, value, widths, partial(_reached, pairs=grown.widths))
        if new:
            options[name] = value, [one for at, one in enumerate([*new, value]) if one not in [*new, value][:at]]
    for name in (*FOURFOLD, HEAD):
        unset = fields.get(name) is None and (name in fields or (name == HEAD and not hasattr(type(config), HEAD)))
        unset = unset and not (name == HEAD and any(own in fields for own in HEAD_ELSEWHERE))
        usual = _default(fields, name) if unset else None
        if usual is not None:
            options[name] = None, [*_reached(usual, grown.head_sizes if name == HEAD else grown.widths), usual]
    return options


def _is_width(name: str) -> bool:
    return any(word in name for word in WIDTHS) and not any(word in name for word in NO_WIDTHS)


def _reached(value: float, pairs: Pairs) -> list[Any]:
    """The values that a size may have after one growth or several."""
    found = [value]
    for one in found:
        found += [new for old, new in pairs if old == one and new not in found]
    return list(dict.fromkeys(found[1:]))


def _default(
    fields: Mapping[str, Any], name: str, chosen: Mapping[tuple[str, str], Any] | None = None, holder: str = ""
) -> int | None:
    """The value that an unset field has by default, given the present values of other fields, or the chosen ones."""

    def value_of(names: Sequence[str]) -> int:
        own = next((name for name in names if type(fields.get(name)) is int), "")
        value: int = (chosen or {}).get((holder, own), fields.get(own, 0))
        return value

    stream, heads = value_of(STREAMS), value_of(HEADS)
    return (4 * stream or None) if name != HEAD else stream // heads if stream and heads else None


def _stale(path: str, part: nn.Module, other: nn.Module, sizes: Pairs) -> list[Setting]:
    """Settings of sizes that the forward pass does not read, as in the rebuilt model."""
    found = stale_sizes(part, other, sizes)
    return [Setting(joined_path(path, place), name, old, new) for (place, name), (old, new) in found.items()]


def _copies(model: nn.Module, path: str, other: nn.Module, guess: Guess) -> list[Setting]:
    """Settings of copies of the configuration that parts of the model hold, as in the rebuilt model."""
    settings: list[Setting] = []
    part = model.get_submodule(path)
    known = [vars(part)[NAME]]
    for place, mine, module in modules_of_both(part, other):
        whole, here, there = joined_path(path, place), vars(mine).get(NAME), vars(module).get(NAME)
        if hasattr(here, "to_dict") and all(here is not one for one in known):
            known.append(here)
            for name in dict.fromkeys(name for _, name in guess):
                old, new = getattr(here, name, None), getattr(there, name, None)
                if old != new:
                    settings.append(Setting(whole, NAME, old, new, name))
    return settings
