"""A program that reads saved models with Transformers alone: `python -m tests.helpers.read_elsewhere TASKS.json`.

For each folder it writes the outputs of the model that Transformers builds and loads, its outputs with other weights (new
blocks are the identity at first, which would hide one of the wrong kind), and the tokens that it generates with a cache.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.helpers.random_weights import randomise_parameters

GENERATED = {"max_new_tokens": 4, "do_sample": False, "use_cache": True}
INPUTS, RESULTS = "inputs.safetensors", "results.safetensors"


@torch.no_grad()
def results(model: nn.Module, example: dict[str, Tensor], generates: bool) -> dict[str, Tensor]:
    """Outputs and tokens of a model, and its outputs with other weights, which stay."""
    found = {"outputs": scores(model, example)}
    if generates:
        found["tokens"] = generated(model, example)
    found["other outputs"] = scores(randomise_parameters(model, 7), example)
    return {name: value.contiguous().clone() for name, value in found.items()}


def generated(model: Any, example: dict[str, Tensor]) -> Tensor:
    """Tokens that a model generates with a cache. Whisper's own `generate` needs a real tokenizer."""
    from transformers import GenerationMixin

    inputs = {name: value for name, value in example.items() if not name.startswith(("decoder", "attention"))}
    tokens: Tensor = GenerationMixin.generate(model, **inputs, **GENERATED)
    return tokens


def scores(model: Any, example: dict[str, Tensor]) -> Tensor:
    """Logits of a model, or what CLIP has instead."""
    output = model(**example)
    found: Tensor = output.logits if hasattr(output, "logits") else output.logits_per_image
    return found


def _read(folder: Path, generates: bool) -> None:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    model, about = kind.from_pretrained(folder, output_loading_info=True, dtype="auto")
    assert not any(about.values()), about
    save_file(results(model.eval(), load_file(folder / INPUTS), generates), folder / RESULTS)


def _let_torchvision_import() -> torch.library.Library:
    """The torchvision wheel registers its operators for CUDA builds of torch only."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


if __name__ == "__main__":
    kept = _let_torchvision_import() if torch.version.cuda is None else None
    torch.set_num_threads(1)
    failures = {}
    for folder, generates in json.loads(Path(sys.argv[1]).read_text()):
        try:
            _read(Path(folder), generates)
        except Exception as error:
            failures[folder] = f"{type(error).__name__}: {error}"
    assert "outgrow" not in sys.modules
    Path(sys.argv[1]).with_suffix(".failures.json").write_text(json.dumps(failures))
