"""PEFT adapters: small matrices added to the layers of a frozen model, as LoRA's A and B in W + s·B·A.

Their inner size, the rank, belongs to the adapter's own configuration, not to the model's. So a glob that happens to match it
("*.mlp.*") does not select it, and it grows only if a pattern names it ("*.lora_A.*"). The outer sizes follow the layers.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from outgrow.analysis.volumes import Volume

PARTS = ("lora_", "hada_", "lokr_", "vera_", "randlora_", "vblora_", "oft_", "boft_", "hra_", "ia3_")  # prefixes of their names
CONFIGS = "peft_config"
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
    return twin


def has_adapters(model: nn.Module) -> bool:
    return any(isinstance(vars(module).get(CONFIGS), dict) for module in model.modules())
