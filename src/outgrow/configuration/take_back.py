"""Changes of a configuration that do not make it describe the grown model are taken back: all of them or none.

A deepening changes a configuration before anybody knows whether the result describes the model. If it does not, the old values
are restored, unless the model's code reads one of them in its forward pass (Llama reads how many layers it runs).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from outgrow.apply.apply_plan import apply_setting
from outgrow.configuration.rebuild_from_config import NAME
from outgrow.growth_plan.plan import Plan, Setting
from outgrow.model.example import Example
from outgrow.model.journal import Journal
from outgrow.model.meta_copy import calls_without_values


def take_back(
    models: Sequence[nn.Module], example: Example, plans: Sequence[Plan], paths: Sequence[str], journal: Journal
) -> list[Plan]:
    """Plans without their changes of configurations at these paths and below, which are undone on all models.

    models: the model first, then its averaged copies. Nothing is undone where the forward pass reads one of the changed fields.
    """
    for path in paths:
        made = [setting for plan in plans for setting in plan.settings if _concerns(setting, path)]
        if not made or _read_in_forward(models[0], example, made):
            continue
        for setting in reversed(made):
            for model in models:
                apply_setting(model, replace(setting, old=setting.new, new=setting.old), journal)
        plans = [replace(plan, settings=tuple(s for s in plan.settings if not _concerns(s, path))) for plan in plans]
    return list(plans)


def _concerns(setting: Setting, path: str) -> bool:
    return setting.name == NAME and (not path or setting.module == path or setting.module.startswith(f"{path}."))


def _read_in_forward(model: nn.Module, example: Example, made: Sequence[Setting]) -> bool:
    kinds = {type(vars(model.get_submodule(setting.module))[NAME]) for setting in made}
    with _recorded(kinds) as names:
        try:
            calls_without_values(model, example, [])
        except Exception:  # reported where the model is compared with what it was
            return True
    for kind in kinds:  # Transformers' other names of fields, such as num_hidden_layers for num_layers
        names |= {own for other, own in getattr(kind, "attribute_map", {}).items() if other in names}
    return any(str(setting.item).lstrip("_") in names or setting.item in names for setting in made)


@contextmanager
def _recorded(kinds: set[type]) -> Iterator[set[str]]:
    """Names of attributes that are read from objects of these classes."""
    names: set[str] = set()
    own = {kind: vars(kind).get("__getattribute__") for kind in kinds}
    try:
        for kind in kinds:
            _record(kind, names)
        yield names
    finally:
        for kind, before in own.items():
            if before is None and "__getattribute__" in vars(kind):
                del kind.__getattribute__
            elif before is not None:
                kind.__getattribute__ = before  # type: ignore[method-assign]


def _record(kind: Any, names: set[str]) -> None:
    plain = kind.__getattribute__

    def recording(self: Any, name: str) -> Any:
        names.add(name)
        return plain(self, name)

    kind.__getattribute__ = recording
