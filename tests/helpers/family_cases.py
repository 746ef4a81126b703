"""Families of Transformers and what is expected of growths of each kind: the same function and a saved model, or a refusal.

`TABLE` is data: one row per family, one cell per kind. A cell says which requests are made and, where they are refused, a part
of the message and the reason in a few words. `python -m tests.helpers.family_page` writes the table into the documentation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from outgrow import Deepen, Widen
from tests.helpers.library_models import FAMILIES, IMAGE, SIZES, Family
from tests.helpers.random_weights import randomise_parameters

KINDS = ("mlp", "heads", "head_dim", "width", "depth")
APART = {  # sizes that can't be taken for each other: 4 heads of 6 features
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim"), 24),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "hidden_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 40),
    **dict.fromkeys(("head_dim", "d_kv"), 6),
}


@dataclass(frozen=True)
class Cell:
    """One growth: its requests, and the refusal that is expected: a part of the message, and the reason in a few words.

    A configuration that can't describe the grown model counts as a refusal. note: what the page says of an exact growth.
    steps: optimizer steps before the model is saved, since a fade must have ended.
    """

    requests: Sequence[Any]
    note: str = ""
    refused: tuple[str, str] | None = None
    steps: int = 0


@dataclass(frozen=True)
class Row:
    """A family, and its cells by kind. limit: the error of outputs that is allowed, relative to the largest output."""

    name: str
    family: Family
    cells: Mapping[str, Cell]
    generates: bool = False
    limit: float = 1e-12
    dtype: torch.dtype = torch.float64

    def build(self) -> nn.Module:
        return randomise_parameters(self.family.build().to(self.dtype)).eval()

    def example(self, seed: int, batch: int, length: int) -> dict[str, Tensor]:
        made = self.family.example(seed, batch, length)
        return {name: value.to(self.dtype) if value.is_floating_point() else value for name, value in made.items()}


def _named(name: str) -> Family:
    """A family of the library models, with sizes that can't be taken for each other."""
    found = next(one for one in FAMILIES if str(one) == name)
    parts = {part: (kind, _apart(options)) for part, (kind, options) in found.parts.items()}
    return replace(found, options=_apart(found.options), parts=parts)


def _apart(options: Mapping[str, Any]) -> dict[str, Any]:
    return {**options, **{name: value for name, value in APART.items() if name in options}}


MLP, HEADS, WIDTH = Widen(kind="mlp", factor=1.5), Widen(kind="heads", factor=1.5), Widen(kind="width", factor=1.5)
HEAD_DIM = Widen(kind="head_dim", factor=2)
LARGER = {"head_dim": Cell((HEAD_DIM, Widen(kind="width", factor=2)), "with the width")}
BOTH = {"heads": Cell((HEADS, WIDTH), "with the width"), "width": Cell((HEADS, WIDTH), "with the heads"), **LARGER}
USUAL = {
    "mlp": Cell((MLP,)),
    "heads": Cell((Widen(kind="heads", factor=2),)),
    "head_dim": Cell((HEAD_DIM,)),
    "width": Cell((WIDTH,)),
    "depth": Cell((Deepen(layers=4),)),
}
DECODER = {"generates": True}
FLOAT32_NORMS = {"generates": True, "limit": 5e-6}  # RMS norms and rotary tables compute in float32 whatever the dtype


def _stacks(*paths: str) -> Cell:
    return Cell(tuple(Deepen(layers=4, stack=path) for path in paths))


def _row(name: str, family: str | Family, cells: Mapping[str, Cell] | None = None, **options: Any) -> Row:
    found = _named(family) if isinstance(family, str) else family
    return Row(name, found, {**USUAL, **(cells or {})}, **options)


def _refused(usual: Cell, part: str, reason: str) -> Cell:
    return replace(usual, refused=(part, reason))


FADED = Cell((Deepen(layers=4, fade=2),), "with `fade=`", steps=2)


def _doubled(outputs: str | None, *more: Widen) -> dict[str, Cell]:
    """Heads and width twice as large, where one stream comes out of a norm or a nonlinear function: it is copied whole."""
    width = Widen(kind="width", factor=2, outputs=outputs)
    requests = (Widen(kind="heads", factor=2), width, *more)
    kept = f"; only {outputs} {'are' if outputs == 'logits' else 'is'} kept" if outputs else ""
    return {
        "heads": Cell(requests, f"× 2, with the width{kept}"),
        "width": Cell(requests, f"× 2, with the heads{kept}"),
        "head_dim": Cell((HEAD_DIM, width, *more), f"with the width{kept}"),
    }


BERT = {**_doubled(None), "depth": FADED}
PARTLY = _refused(LARGER["head_dim"], "only a part of a head's features can grow", "the rotary encoding turns a part of a head")


TABLE = (
    _row("Llama", "llama", **FLOAT32_NORMS),
    _row("Mistral", "mistral", **FLOAT32_NORMS),
    _row("Qwen2", "qwen2", **FLOAT32_NORMS),
    _row("Qwen3", "qwen3", **FLOAT32_NORMS),
    _row("Gemma2", "gemma2", {"depth": Cell((Deepen(layers=6),))}, **FLOAT32_NORMS),
    _row("Gemma3", "gemma3text", **FLOAT32_NORMS),
    _row("Phi-3", "phi3", **FLOAT32_NORMS),
    _row("GPT-2", "gpt2", BOTH, **DECODER),
    _row("GPT-NeoX", "gptneox", {**BOTH, "head_dim": PARTLY}, **DECODER),
    _row("OPT", "opt", BOTH, **DECODER),
    _row("Falcon", "falcon", {**BOTH, "depth": FADED}, **DECODER),  # nothing that its packed heads write can be paired
    _row("BERT", "bert", BERT),
    _row("RoBERTa", "roberta", BERT),
    _row("DistilBERT", "distilbert", BERT),
    _row("ViT", "vit"),
    _row("DeiT", Family("DeiTForImageClassification", "DeiTConfig", _apart({**SIZES, **IMAGE}), inputs="image")),
    _row(
        "CLIP",
        "clip",
        _doubled("logits_per_image") | {"depth": _stacks("text_model.encoder.layers", "vision_model.encoder.layers")},
    ),
    _row(
        "T5",
        "t5",
        {
            "width": Cell((replace(WIDTH, outputs="logits"),), "only the logits are kept"),
            "depth": _stacks("encoder.block", "decoder.block"),
        },
        **FLOAT32_NORMS,
    ),
    _row(
        "Whisper",
        "whisper",
        _doubled("logits", Widen("model.encoder.conv1", factor=2))
        | {"depth": _stacks("model.encoder.layers", "model.decoder.layers")},
        **DECODER,
    ),
    _row("Mixtral", "mixtral", generates=True, limit=5e-5, dtype=torch.float32),  # its experts have no float64
    _row(
        "Mamba",
        "mamba",
        {kind: _refused(USUAL[kind], f"no volume is of kind '{kind}'", "there are no heads") for kind in ("heads", "head_dim")},
        generates=True,
        limit=5e-6,
    ),
)
