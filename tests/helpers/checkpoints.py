"""Small random checkpoints of Transformers on the disk, and a process without outgrow that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.library_models import FAMILIES, Family
from tests.helpers.read_elsewhere import elsewhere


def family(name: str, layers: int = 4) -> Family:
    """A family of the library models, with a stack that is longer than the cut ones of a brief comparison."""
    found = next(one for one in FAMILIES if str(one) == name)
    options = {key: layers if key in ("num_hidden_layers", "n_layer") else value for key, value in found.options.items()}
    return replace(found, options=options)


def save_small(name: str, folder: Path, dtype: torch.dtype = torch.float32, shard: str = "5GB", layers: int = 4) -> nn.Module:
    """Save a small random model; returns it in float32, with the saved values."""
    model: Any = family(name, layers).build()
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    result: nn.Module = model.float()
    return result


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, read by safetensors."""
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(load_file(path))
    return found


def logits_elsewhere(folders: Sequence[Path], examples: Sequence[dict[str, Tensor]], scratch: Path) -> list[Tensor]:
    """The logits of checkpoints, computed by Transformers in a process that never imports outgrow."""
    from safetensors.torch import load_file, save_file

    tasks = []
    for number, (folder, example) in enumerate(zip(folders, examples, strict=True)):
        ids, result = scratch / f"ids{number}.safetensors", scratch / f"logits{number}.safetensors"
        save_file({name: value.contiguous() for name, value in example.items()}, ids)
        tasks.append((str(folder), str(ids), str(result)))
    elsewhere("logits", tasks)
    return [load_file(result)["logits"] for _, _, result in tasks]
