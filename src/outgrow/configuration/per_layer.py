"""Update the fields of a configuration that describe a stack of layers, after one more layer was inserted.

Transformers' configurations describe a stack in several ways: by a count (`num_hidden_layers`), by a count per stage
(`depths`), by a list with an item per layer (`layer_types`), by a list of layer numbers (`mlp_only_layers`), by the number of
the first layer of another kind (`first_k_dense_replace`), or by a pattern from which a list follows (`attn_layer_period`).
Counts and lists are set; a list that follows from a pattern can only be compared with the actual layers. Code reads such lists
while it runs, so a stack that contradicts its own lists is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from outgrow.growth_plan.plan import Insert, Setting

COUNTS = (
    *("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth", "num_blocks", "encoder_layers", "decoder_layers"),
    *("num_encoder_layers", "num_decoder_layers", "layers", "num_transformer_layers"),
)
SIDES = ("decoder", "encoder")
LAYER_NUMBERS = (  # endings of names of lists of layer numbers
    "mlp_only_layers",
    "moe_layers",
    "cross_attention_layers",
    "layer_ids",
    "indexes",
    "indices",
    "idxs",
)
OUTPUTS = "out_indices"  # of a backbone: after how many layers outputs are taken; a new layer changes the end of the list only
FIRST = ("first_k_dense_replace", "num_dense_layers", "max_window_layers")  # how many layers come before those of another kind
PER_LAYER = ("layer", "block", "indexer_types")  # in names of lists with an item per layer
FEATURE = "feature"  # vision_feature_layer selects outputs, and does not describe layers

Lists = Mapping[tuple[str, str], tuple[Any, ...]]  # path of the module that holds a configuration, name → an item per layer


def depth_settings(model: nn.Module, insert: Insert, old: int) -> list[Setting]:
    """Settings of the configurations for one more layer in a container of `old` layers."""
    settings: list[Setting] = []
    for path, config in configs_above(model, insert.container):
        for name, new in _new_values(model, path, config, insert, old).items():
            settings.append(Setting(path, "config", vars(config)[name], new, name))
    return settings


def configs_above(model: nn.Module, container: str) -> list[tuple[str, Any]]:
    """The configurations that describe a container, each with the path of the outermost module around it that holds it."""
    found: dict[int, tuple[str, Any]] = {}
    path = container
    while True:
        config = vars(model.get_submodule(path)).get("config")
        if config is not None and hasattr(config, "__dict__"):
            found[id(config)] = path, config
        if not path:
            return list(found.values())
        path = path.rpartition(".")[0]


def _new_values(model: nn.Module, path: str, config: Any, insert: Insert, old: int) -> dict[str, Any]:
    """New values of the fields that change."""
    staged = _stage(model, path, config, insert, old)
    if staged:
        return staged
    counts = _counts(path, config, insert, old)
    news: dict[str, Any] = dict.fromkeys(counts, old + 1)
    for name, value in vars(config).items():
        if name.endswith(LAYER_NUMBERS) and name.lstrip("_") != OUTPUTS and _is_list_of(value, int):
            news[name] = type(value)(_shifted(value, insert))
        elif name in FIRST and type(value) is int and 0 <= value <= old:
            news[name] = value + (insert.copy_of < value and insert.at <= value)
        elif _is_per_layer(name, value, old):
            news[name] = _longer(value, insert)
            if name == "attention_layers" and "attention_types" in vars(config):  # GPT-Neo's short form of the same list
                news["attention_types"] = [[list(news[name]), 1]]
    return {name: new for name, new in news.items() if new != vars(config)[name]}


def _stage(model: nn.Module, path: str, config: Any, insert: Insert, old: int) -> dict[str, Any]:
    """The new list of layer counts per stage, if the configuration has one and the container is a stage."""
    parts = insert.container.split(".")
    for index, part in enumerate(parts):
        stages = model.get_submodule(".".join(parts[:index]))
        if not part.isdecimal() or len(".".join(parts[:index])) < len(path):
            continue
        for name, value in vars(config).items():
            fits = _is_list_of(value, int) and len(value) == len(stages._modules) and value[int(part)] == old
            if fits and any(word in name for word in ("depth", *PER_LAYER)):
                new = list(value)
                new[int(part)] += 1
                return {name: type(value)(new)}
    return {}


def _counts(path: str, config: Any, insert: Insert, old: int) -> list[str]:
    """Names of the fields that count the layers; if encoder and decoder have a count each, only that of the right side.

    An encoder or decoder with a configuration of its own (T5's copies) counts its layers by the general names, too.
    """
    side = next((side for side in SIDES if side in insert.container.split(".")), "")
    inside = side in path.split(".")
    own = [name for name in vars(config) if side and not inside and side in name and name.endswith("layers")]
    others = [name for name in COUNTS if not side or not any(s in name for s in SIDES if s != side or not inside)]
    return [name for name in own or others if type(vars(config).get(name)) is int and vars(config)[name] == old]


def _is_list_of(value: Any, *kinds: type) -> bool:
    return type(value) in (list, tuple) and bool(value) and all(type(item) in kinds for item in value)


def _is_per_layer(name: str, value: Any, old: int) -> bool:
    """Whether a field has one item per layer: strings, switches (0 and 1 too) or floats; other integers may number layers."""
    if not any(word in name for word in PER_LAYER) or FEATURE in name or name.endswith(LAYER_NUMBERS):
        return False
    return (
        _is_list_of(value, str, bool, int, float)
        and len(value) == old
        and not (set(value) - {0, 1} and _is_list_of(value, int))
    )


def _longer(value: Any, insert: Insert) -> Any:
    return type(value)([*value[: insert.at], value[insert.copy_of], *value[insert.at :]])


def _shifted(numbers: Sequence[int], insert: Insert) -> list[int]:
    """Layer numbers after an insert: those behind the new layer move up, and the new layer is listed if its source is."""
    moved = [number + (number >= insert.at) for number in numbers if number >= 0]
    negative = [number for number in numbers if number < 0]
    return sorted([*moved, *([insert.at] if insert.copy_of in numbers else [])]) + negative


def layer_lists(model: nn.Module, container: str) -> Lists:
    """All lists with one item per child of a container in the present configurations, including derived ones."""
    count = len(model.get_submodule(container)._modules)
    found: dict[tuple[str, str], tuple[Any, ...]] = {}
    for path, config in configs_above(model, container):
        for name, value in _layer_fields(config):
            whole = _is_list_of(value, str, bool, int, float) and len(value) == count
            if whole and (_is_per_layer(name, value, count) or name not in vars(config)):
                found[path, name] = tuple(value)
    return found


def _layer_fields(config: Any) -> Iterator[tuple[str, Any]]:
    """Attributes and properties that may hold an item per layer."""
    derived = {name for kind in type(config).__mro__ for name, held in vars(kind).items() if isinstance(held, property)}
    for name in sorted({*vars(config), *derived}):
        if any(word in name for word in PER_LAYER) and FEATURE not in name and not name.startswith("_"):
            try:
                yield name, getattr(config, name)
            except Exception:  # a property that does not apply to this model
                continue


def contradiction(model: nn.Module, container: str, before: Lists, order: Sequence[int]) -> str:
    """The first layer that a configuration describes wrongly, as a reason; empty if there is none.

    before: the lists before the growth. order: for each layer, the number of the old layer that it is or copies.
    """
    after = layer_lists(model, container)
    for (path, name), old in before.items():
        wanted, found = [old[index] for index in order], after.get((path, name), ())
        if len(found) != len(wanted):
            continue
        wrong = next((i for i, (one, other) in enumerate(zip(wanted, found, strict=True)) if one != other), None)
        if wrong is not None:
            period = _period(found)  # at least one more block than before: these may be less than one period
            instead = f"; add a multiple of {period} blocks at once (count={period}), to continue the pattern" if period else ""
            return (
                f"the configuration's {name}, which follows a pattern, would describe block {wrong} as {found[wrong]!r}, but "
                f"it would be {wanted[wrong]!r}, and the model's code reads the configuration{instead}"
            )
    return ""


def _period(items: Sequence[Any]) -> int:
    return next((p for p in range(1, len(items)) if all(a == b for a, b in zip(items, items[p:], strict=False))), 0)
