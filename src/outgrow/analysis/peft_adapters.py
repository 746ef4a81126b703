"""PEFT adapters: small matrices added to the layers of a frozen model, as LoRA's A and B in W + s·B·A.

Their inner size, the rank, belongs to the adapter's own configuration, not to the model's. So a glob that happens to match it
("*.mlp.*") does not select it, and it grows only if a pattern names it ("*.lora_A.*"). The outer sizes follow the layers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from outgrow.analysis.volumes import Volume
from outgrow.errors import Problem
from outgrow.growth_plan.plan import Setting

PARTS = ("lora_", "hada_", "lokr_", "vera_", "randlora_", "vblora_", "oft_", "boft_", "hra_", "ia3_")  # prefixes of their names
CONFIGS = "peft_config"
SIZES = {  # names of a layer's sizes → names in the wrapper of the layer
    **{"num_embeddings": "in_features", "in_channels": "in_features"},
    **{"embedding_dim": "out_features", "out_channels": "out_features"},
}
MERGE = "merge them first, model = model.merge_and_unload()"
RANK = "it is the rank of an adapter, which grows only if a pattern names it ('*.lora_A.*')"
NOTE = (
    "adapters: save_pretrained of the PeftModel writes only the adapters, and they load onto the grown base model only; "
    "copy.deepcopy(model).unload().save_pretrained(folder) writes the base model"
)


def is_rank(volume: Volume, patterns: Sequence[str]) -> bool:
    """Whether a volume lies only in adapters, and no pattern names them."""
    named = any(part in pattern for pattern in patterns for part in PARTS)
    return not named and all(_in_adapter(slot.tensor) for slot in volume.slots)


def _in_adapter(tensor: str) -> bool:
    return any(step.startswith(PARTS) for step in tensor.split("."))


def with_adapters(twin: nn.Module, part: nn.Module) -> nn.Module:
    """Add adapters to a model that was built from a configuration: those in the `peft_config` of another one."""
    configs: Any = vars(part).get(CONFIGS)
    if not isinstance(configs, dict) or not configs:
        return twin
    import peft

    for name, config in configs.items():
        peft.inject_adapter_in_model(copy.deepcopy(config), twin, adapter_name=name)
    for path, module in twin.named_modules():
        active: Any = getattr(part.get_submodule(path), "active_adapters", None) if hasattr(module, "base_layer") else None
        if isinstance(active, list) and active != module.active_adapters:
            module.set_adapter(active)
    return twin


def of_wrappers(model: nn.Module, settings: Sequence[Setting]) -> Iterator[Setting]:
    """Sizes that the wrapper of an adapted layer keeps besides the layer itself; a new adapter would be made by them."""
    for setting in settings:
        path, _, last = setting.module.rpartition(".")
        name = SIZES.get(setting.name, setting.name)
        if last == "base_layer" and vars(model.get_submodule(path)).get(name) == setting.old:
            yield Setting(path, name, setting.old, setting.new)


def obstacles(model: nn.Module) -> list[Problem]:
    """What adapters and quantised weights may have to do with a refusal."""
    found: list[Problem] = []
    if has_adapters(model):
        held = {step for name, _ in model.named_parameters() for step in name.split(".")}
        merged = any(getattr(module, "merged_adapters", None) for module in model.modules())
        if "lora_magnitude_vector" in held:
            reason = "each row of W + s·B·A is divided by its norm over all columns, which new columns would change"
            found.append(Problem("DoRA", reason, MERGE))
        elif merged:
            reason = "while they are merged into their layers, A and B are not run, and could not follow them"
            found.append(Problem("adapters", reason, "model.unmerge_adapter(), or model = model.merge_and_unload()"))
        else:
            found.append(Problem("adapters", "they may be in the way: those that do not run can't be followed", MERGE))
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")
        if type(module).__module__.startswith("bitsandbytes") and weight is not None and not weight.is_floating_point():
            reason = f"{path}.weight is quantised: it holds packed values, and no rule says which unit they belong to"
            found.append(Problem("quantised weights", reason, "grow the model before it is quantised"))
            break
    return found


def has_adapters(model: nn.Module) -> bool:
    return any(isinstance(vars(module).get(CONFIGS), dict) for module in model.modules())
