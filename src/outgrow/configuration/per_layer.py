"""What a configuration says about a stack of layers, and what it says after one more was put in.

Transformers' configurations describe a stack in several ways: by a count (`num_hidden_layers`), by a count per stage
(`depths`), by a list with an item per layer (`layer_types`), by a list of layer numbers (`mlp_only_layers`), by the number of
the first layer of another kind (`first_k_dense_replace`), or by a pattern from which a list follows (`attn_layer_period`).
Counts and lists are set; what follows from a pattern can only be compared with the layers as they are. Code reads such lists
while it runs, so a stack that its own lists contradict is refused.
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
NUMBERS = (
    "mlp_only_layers",
    "moe_layers",
    "cross_attention_layers",
    "layer_ids",
    "indexes",
    "indices",
    "idxs",
)  # lists of them
OUTPUTS = "out_indices"  # of a backbone: after how many layers outputs are taken; a new layer changes the end of the list only
FIRST = ("first_k_dense_replace", "num_dense_layers", "max_window_layers")  # how many layers come before those of another kind
PER_LAYER = ("layer", "block")  # in names of lists with an item per layer
FEATURE = "feature"  # vision_feature_layer: which outputs are taken, not what a layer is

Lists = Mapping[tuple[str, str], tuple[Any, ...]]  # path of the module that holds a configuration, name → an item per layer


def depth_settings(model: nn.Module, insert: Insert, old: int) -> list[Setting]:
    """What configurations say otherwise once a layer is put into a container of `old` layers."""
    settings: list[Setting] = []
    for path, config in configs_above(model, insert.container):
        for name, new in _news(model, path, config, insert, old).items():
            settings.append(Setting(path, "config", vars(config)[name], new, name))
    return settings


def configs_above(model: nn.Module, container: str) -> list[tuple[str, Any]]:
    """The configurations that describe a container, each with the outermost of the modules around it that hold it."""
    found: dict[int, tuple[str, Any]] = {}
    path = container
    while True:
        config = vars(model.get_submodule(path)).get("config")
        if config is not None and hasattr(config, "__dict__"):
            found[id(config)] = path, config
        if not path:
            return list(found.values())
        path = path.rpartition(".")[0]


def _news(model: nn.Module, path: str, config: Any, insert: Insert, old: int) -> dict[str, Any]:
    staged = _stage(model, path, config, insert, old)
    if staged:
        return staged
    counts = _counts(path, config, insert, old)
    news: dict[str, Any] = dict.fromkeys(counts, old + 1)
    for name, value in vars(config).items():
        if name.endswith(NUMBERS) and name.lstrip("_") != OUTPUTS and _is_list_of(value, int):
            news[name] = type(value)(_shifted(value, insert))
        elif name in FIRST and type(value) is int and 0 <= value <= old:
            news[name] = value + (insert.copy_of < value and insert.at <= value)
        elif _is_per_layer(name, value, old):
            news[name] = _longer(value, insert)
            if name == "attention_layers" and "attention_types" in vars(config):  # GPT-Neo's short form of it
                news["attention_types"] = [[list(news[name]), 1]]
    return {name: new for name, new in news.items() if new != vars(config)[name]}


def _stage(model: nn.Module, path: str, config: Any, insert: Insert, old: int) -> dict[str, Any]:
    """One more layer in a stage, where a list counts the layers of each."""
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
    """Names of what counts the layers; where encoder and decoder have a count each, that of their own side."""
    inside = insert.container.removeprefix(path).split(".")
    side = next((side for side in SIDES if side in inside), "")
    own = [name for name in vars(config) if side and side in name and name.endswith("layers")]
    others = [name for name in COUNTS if not side or not any(other in name for other in SIDES)]
    return [name for name in own or others if type(vars(config).get(name)) is int and vars(config)[name] == old]


def _is_list_of(value: Any, *kinds: type) -> bool:
    return type(value) in (list, tuple) and bool(value) and all(type(item) in kinds for item in value)


def _is_per_layer(name: str, value: Any, old: int) -> bool:
    """Words, switches (0 and 1 too) and values with a fraction; other whole numbers may be numbers of layers."""
    if not any(word in name for word in PER_LAYER) or FEATURE in name or name.endswith(NUMBERS):
        return False
    return (
        _is_list_of(value, str, bool, int, float)
        and len(value) == old
        and not (set(value) - {0, 1} and _is_list_of(value, int))
    )


def _longer(value: Any, insert: Insert) -> Any:
    return type(value)([*value[: insert.at], value[insert.copy_of], *value[insert.at :]])


def _shifted(numbers: Sequence[int], insert: Insert) -> list[int]:
    """Numbers of layers behind the new one are one larger, and the new one is among them if its model is."""
    moved = [number + (number >= insert.at) for number in numbers if number >= 0]
    negative = [number for number in numbers if number < 0]
    return sorted([*moved, *([insert.at] if insert.copy_of in numbers else [])]) + negative


def layer_lists(model: nn.Module, container: str) -> Lists:
    """All that configurations say layer by layer of a container's children now, patterns worked out."""
    count = len(model.get_submodule(container)._modules)
    found: dict[tuple[str, str], tuple[Any, ...]] = {}
    for path, config in configs_above(model, container):
        for name, value in _said(config):
            whole = _is_list_of(value, str, bool, int, float) and len(value) == count
            if whole and (_is_per_layer(name, value, count) or name not in vars(config)):
                found[path, name] = tuple(value)
    return found


def _said(config: Any) -> Iterator[tuple[str, Any]]:
    """Attributes and properties that may hold an item per layer."""
    derived = {name for kind in type(config).__mro__ for name, held in vars(kind).items() if isinstance(held, property)}
    for name in sorted({*vars(config), *derived}):
        if any(word in name for word in PER_LAYER) and FEATURE not in name and not name.startswith("_"):
            try:
                yield name, getattr(config, name)
            except Exception:  # a property that some models of the kind do not have
                continue


def contradiction(model: nn.Module, container: str, before: Lists, order: Sequence[int]) -> str:
    """Where a configuration calls a layer something else than it is; empty if nowhere.

    before: what was said before the growth. order: for each layer, the number of the old one that it is or is a copy of.
    """
    after = layer_lists(model, container)
    for (path, name), old in before.items():
        wanted, said = [old[index] for index in order], after.get((path, name), ())
        if len(said) != len(wanted):
            continue
        wrong = next((i for i, (one, other) in enumerate(zip(wanted, said, strict=True)) if one != other), None)
        if wrong is not None:
            period = _period(old)
            instead = (
                f"; add a multiple of {period} blocks at once (count={period}), so that the pattern goes on" if period else ""
            )
            return (
                f"the configuration's {name}, which follows a pattern, would call block {wrong} {said[wrong]!r} where a block "
                f"{wanted[wrong]!r} would stand, and the model's code goes by it{instead}"
            )
    return ""


def _period(items: Sequence[Any]) -> int:
    return next((p for p in range(1, len(items)) if all(a == b for a, b in zip(items, items[p:], strict=False))), 0)
