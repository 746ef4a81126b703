"""Another process that reads saved models with Transformers alone, without outgrow.

`elsewhere("logits", …)` calls a function of this file there. The process starts at the first call and serves all tests of a
session, since the import of Transformers takes seconds.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.helpers.random_weights import randomise_parameters

GENERATED = {"max_new_tokens": 4, "do_sample": False, "use_cache": True}
ROOT = Path(__file__).parents[2]
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


def elsewhere(function: str, argument: Any) -> Any:
    """The result of a function of this file, called in the other process. Arguments and results are plain JSON values."""
    process = _other_process()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([function, argument]) + "\n")
    process.stdin.flush()
    reply = process.stdout.readline()
    assert reply, "the other process has ended"
    result, failure = json.loads(reply)
    assert not failure, failure
    return result


@functools.cache
def _other_process() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.helpers.read_elsewhere"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    atexit.register(process.communicate)  # which closes its stdin
    return process


def outputs_of_families(tasks: Sequence[tuple[str, bool]]) -> dict[str, str]:
    """Write the results of models beside them; returns what went wrong, by folder.

    Written are the outputs of the model that Transformers builds and loads, its outputs with other weights (new blocks are the
    identity at first, which would hide one of the wrong kind), and the tokens that it generates with a cache.
    """
    failures = {}
    for folder, generates in tasks:
        try:
            model = _loaded(folder, "auto")
            save_file(results(model, load_file(Path(folder) / INPUTS), generates), Path(folder) / RESULTS)
        except Exception as error:
            failures[folder] = f"{type(error).__name__}: {error}"
    return failures


@torch.no_grad()
def logits(tasks: Sequence[tuple[str, str, str]]) -> None:
    """For each folder of a model, file of inputs and new file: write the model's logits, computed in float32."""
    for folder, inputs, result in tasks:
        model = _loaded(folder, torch.float32)
        save_file({"logits": model(**load_file(inputs)).logits.contiguous()}, result)


def _loaded(folder: str, dtype: Any) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    model, about = kind.from_pretrained(folder, output_loading_info=True, dtype=dtype)
    assert not any(about.values()), about
    return model.eval()


def _let_torchvision_import() -> torch.library.Library:
    """The torchvision wheel registers its operators for CUDA builds of torch only."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def _serve() -> None:
    """Call functions that are requested on stdin, one per line, and write their results."""
    replies, sys.stdout = sys.stdout, sys.stderr  # libraries print too
    for line in sys.stdin:
        function, argument = json.loads(line)
        result, failure = None, ""
        try:
            result = globals()[function](argument)
            assert "outgrow" not in sys.modules
        except Exception:
            failure = traceback.format_exc()
        print(json.dumps([result, failure]), file=replies, flush=True)


if __name__ == "__main__":
    kept = _let_torchvision_import() if torch.version.cuda is None else None
    torch.set_num_threads(1)
    _serve()
