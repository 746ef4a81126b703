"""Kinds of volumes, compared with the fields of the libraries' own configurations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.transforms.widen import list_volumes
from tests.helpers import home_made_models as home
from tests.helpers.library_models import FAMILIES, IMAGE, SIZES, Family

BY_NAME = {str(family): family for family in FAMILIES}
BY_NAME["deit"] = Family("DeiTForImageClassification", "DeiTConfig", {**SIZES, **IMAGE}, inputs="image")
APART = {"hidden_size": 24, "n_embd": 24, "d_model": 24, "dim": 24, "word_embed_proj_dim": 24, "head_dim": 6, "d_kv": 6}
Field = str | int  # of the configuration, or a number that follows from it


@dataclass(frozen=True)
class Expected:
    """For each kind, the sizes of its volumes: fields of the configuration, each with the number of volumes."""

    family: str
    sizes: Mapping[str, Sequence[tuple[Field, Field]]]

    def __str__(self) -> str:
        return self.family


def model(family: str, **others: Any) -> Expected:
    """A model with one stream, and one MLP and one attention per layer."""
    layers = others.get("layers", "num_hidden_layers")
    sizes = {
        "mlp": [(others.get("mlp", "intermediate_size"), layers)],
        "heads": [(others.get("heads", "num_attention_heads"), layers)] * others.get("forms", 1),
        "width": [(others.get("width", "hidden_size"), 1)],
        "vocab": [("vocab_size", 1)],
        "outputs": [],
        "experts": [],
    }
    return Expected(family, {**sizes, **others.get("sizes", {})})


UNTIED = {"sizes": {"vocab": [("vocab_size", 2)]}}
GROUPED = {"forms": 2}  # whole groups, or query heads of each group: both count query heads
IMAGES = {"sizes": {"vocab": [], "outputs": [("num_labels", 1)]}}
TABLE = [
    model("llama", **GROUPED, **UNTIED),
    model("mistral", **GROUPED, **UNTIED),
    model("qwen2", **GROUPED, **UNTIED),
    model("qwen3", **GROUPED),
    model("gemma2", **GROUPED),
    model("gemma3text", **GROUPED),
    model("phi3", **GROUPED, **UNTIED),
    model("gpt2", heads="n_head", mlp=4 * 24, width="n_embd", layers="n_layer"),
    model("gptneox", **UNTIED),
    model("opt", mlp="ffn_dim"),
    model("falcon", mlp="ffn_hidden_size"),
    model("bert"),
    model("roberta"),
    model("distilbert", heads="n_heads", mlp="hidden_dim", width="dim", layers="n_layers"),
    model("mamba", sizes={"heads": []}),
    model("vit", **IMAGES),
    model("deit", **IMAGES),
    # the router, gate_up_proj and down_proj of two layers
    model("mixtral", **GROUPED, sizes={"vocab": [("vocab_size", 2)], "experts": [("num_local_experts", 6)]}),
    # a position bias ties the heads of all layers, except for the two cross-attentions
    Expected(
        "t5", {"mlp": [("d_ff", 4)], "heads": [("num_heads", 2 + 2)], "width": [("d_model", 1)], "vocab": [("vocab_size", 1)]}
    ),
    Expected(
        "whisper",
        {
            "mlp": [("encoder_ffn_dim", "encoder_layers"), ("decoder_ffn_dim", "decoder_layers")],
            "heads": [("encoder_attention_heads", "encoder_layers"), ("decoder_attention_heads", 4)],
            "width": [("d_model", 2)],
            "vocab": [("vocab_size", 1)],
            "outputs": [],
        },
    ),
]


def sizes_by_kind(volumes: Sequence[outgrow.Volume]) -> dict[str | None, Counter[int]]:
    result: dict[str | None, Counter[int]] = {}
    for volume in volumes:
        result.setdefault(volume.kind, Counter())[volume.size] += 1
    return result


def apart(family: Family) -> Family:
    """The family with sizes that can't be taken for each other: 4 heads of 6 features."""
    return replace(family, options={**family.options, **{k: v for k, v in APART.items() if k in family.options}})


@pytest.mark.parametrize("expected", TABLE, ids=str)
def test_kinds_of_a_family_are_those_of_its_configuration(expected: Expected) -> None:
    family = apart(BY_NAME[expected.family])
    network = family.build()

    def value(field: Field) -> int:
        found = field if isinstance(field, int) else getattr(network.config, field)
        return int(found)

    found = sizes_by_kind(outgrow.volumes(network, family.example()))
    for kind, sizes in expected.sizes.items():
        wanted = Counter[int]()
        for size, times in sizes:
            wanted[value(size)] += value(times)
        assert found.get(kind, Counter()) == wanted, kind


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3text", "gptneox", "gpt2", "bert", "whisper"])
def test_features_of_a_head_add_up_to_its_size(name: str) -> None:
    family = apart(BY_NAME[name])
    found = [volume for volume in outgrow.volumes(family.build(), family.example()) if volume.kind == "head_dim"]
    features = {volume.size for volume in found}
    assert 6 in features
    assert max(features) == 6  # less where only a part of the features is rotated


def test_both_towers_have_kinds_of_their_own() -> None:
    clip = BY_NAME["clip"]
    parts = {
        name: (kind, {**options, "hidden_size": width, "intermediate_size": hidden})
        for (name, (kind, options)), width, hidden in zip(clip.parts.items(), (24, 32), (40, 48), strict=True)
    }
    clip = replace(clip, parts=parts)
    found = sizes_by_kind(outgrow.volumes(clip.build(), clip.example()))
    assert found["width"] == {24: 1, 32: 1}
    assert found["mlp"] == {40: 2, 48: 2}
    assert found["vocab"] == {50: 1}
    assert found["heads"] == {4: 4}
    assert "outputs" not in found  # embeddings are compared with each other


def test_a_projector_between_two_streams_is_no_mlp() -> None:
    llava = BY_NAME["llava"]
    volumes = outgrow.volumes(llava.build(), llava.example())
    kinds = {volume.name: volume.kind for volume in volumes}
    assert kinds["model.multi_modal_projector.linear_1"] is None
    assert "model.multi_modal_projector.linear_2" not in kinds  # it writes into the stream of the language model
    assert kinds["model.language_model.embed_tokens"] == "width"
    assert kinds["model.vision_tower.embeddings.patch_embedding"] == "width"


def test_kinds_in_deep_stacks_are_those_of_the_full_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = replace(BY_NAME["mixtral"], options={**BY_NAME["mixtral"].options, "num_hidden_layers": 8})
    network, example = deep.build(), deep.example()
    short = outgrow.volumes(network, example)
    monkeypatch.setattr(list_volumes, "shortened", lambda trace: None)
    full = outgrow.volumes(network, example)
    assert [(v.name, v.kind, v.unit) for v in short] == [(v.name, v.kind, v.unit) for v in full]
    assert Counter(volume.kind for volume in short)["mlp"] == 8


TIMM = {
    "vit_tiny_patch16_224": {"mlp": {768: 2}, "heads": {3: 2}, "head_dim": {64: 2}, "width": {192: 1}, "outputs": {7: 1}},
    "swin_tiny_patch4_window7_224": {
        "mlp": {384: 1, 768: 1, 1536: 1, 3072: 1},
        "heads": {3: 1, 6: 1, 12: 1, 24: 1},
        "head_dim": {32: 4},
        "width": {96: 1, 192: 1, 384: 1, 768: 1},
        "outputs": {7: 1},
    },
    "convnext_atto": {"mlp": {160: 2, 320: 2, 640: 6, 1280: 2}, "width": {40: 1, 80: 1, 160: 1, 320: 1}, "outputs": {7: 1}},
    "resnet18": {
        "mlp": dict.fromkeys((64, 128, 256, 512), 2),
        "width": dict.fromkeys((64, 128, 256, 512), 1),
        "outputs": {7: 1},
    },
    "resnet26": {
        "mlp": dict.fromkeys((64, 128, 256, 512), 4),
        "width": dict.fromkeys((256, 512, 1024, 2048), 1),
        "outputs": {7: 1},
    },
}


@pytest.mark.parametrize("name", TIMM)
def test_kinds_of_image_models(name: str) -> None:
    import timm

    small = {"vit": {"depth": 2}, "swin": {"depths": (1, 1, 1, 1)}}
    network = timm.create_model(name, num_classes=7, **small.get(name.partition("_")[0], {})).eval()
    found = sizes_by_kind(outgrow.volumes(network, torch.randn(2, 3, 224, 224)))
    assert {kind: dict(sizes) for kind, sizes in found.items() if kind} == TIMM[name]


def test_the_layer_behind_linear_attention_writes_no_heads() -> None:
    import timm

    network = timm.create_model("coat_tiny", num_classes=7).eval()
    found = sizes_by_kind(outgrow.volumes(network, torch.randn(2, 3, 224, 224)))
    assert set(found["heads"]) == {2, 3}  # convolutions of three sizes split its 8 heads into 2, 3 and 3
    assert "width" in found


def test_heads_that_weights_mix_are_heads() -> None:
    import timm

    network = timm.create_model("cait_xxs24_224", num_classes=7, depth=2).eval()
    found = sizes_by_kind(outgrow.volumes(network, torch.randn(2, 3, 224, 224)))
    assert set(found["heads"]) == {4}
    assert set(found["head_dim"]) == {48}
    assert found[None] == {3: 1, 196: 1}  # colours and positions


def test_squeezed_channels_of_a_stream_have_no_kind() -> None:
    import timm

    network = timm.create_model("legacy_seresnet18", num_classes=7).eval()
    kinds = {volume.name: volume.kind for volume in outgrow.volumes(network, torch.randn(2, 3, 64, 64))}
    assert kinds["layer1.0.conv1"] == "mlp"
    assert kinds["layer1.0.se_module.fc1"] is None


def test_squeezed_channels_have_no_kind() -> None:
    import timm

    network = timm.create_model("efficientnet_b0", num_classes=7).eval()
    kinds = {volume.name: volume.kind for volume in outgrow.volumes(network, torch.randn(2, 3, 64, 64))}
    assert kinds["blocks.1.1.conv_pw"] == "mlp"
    assert kinds["blocks.1.1.se.conv_reduce"] is None


GPTS: dict[str, Callable[[], nn.Module]] = {
    "hand-written attention": home.GPT,
    "nn.MultiheadAttention": partial(home.GPT, home.TorchAttention),
    "post-norm": partial(home.GPT, home.TorchAttention, post_norm=True),
    "multi-query": partial(home.GPT, partial(home.GroupedAttention, 1)),
}


@pytest.mark.parametrize("make", GPTS.values(), ids=GPTS.keys())
def test_kinds_of_a_home_made_gpt(make: Callable[[], nn.Module]) -> None:
    found = sizes_by_kind(outgrow.volumes(make(), _tokens()))
    assert found["mlp"] == {home.HIDDEN: 2}
    assert found["heads"] == {home.HEADS: 2}
    assert found["width"] == {home.WIDTH: 1}
    assert set(found["head_dim"]) == {home.HEAD_DIM}
    assert found["vocab"] == {home.VOCABULARY: 2}  # the table and the head
    assert found[None] == {home.LENGTH: 1}  # positions


def test_a_tied_head_belongs_to_the_vocabulary() -> None:
    found = sizes_by_kind(outgrow.volumes(home.GPT(tied=True), _tokens()))
    assert found["vocab"] == {home.VOCABULARY: 1}
    assert "outputs" not in found


def test_grouped_queries_have_two_volumes_of_heads() -> None:
    volumes = outgrow.volumes(home.GPT(home.GroupedAttention, layers=1), _tokens())
    groups, queries = (volume for volume in volumes if volume.kind == "heads")
    assert groups.unit == "2 query heads with the key and value head that they share"
    assert queries.unit == "2 query heads, one for each key and value head"
    assert "kind='heads' (one unit: 2 query heads with" in repr(groups)


@pytest.mark.parametrize(("mlp", "experts", "hidden"), [(home.ListedExperts, 1, 3), (home.StackedExperts, 3, 1)])
def test_experts_and_their_hidden_units(mlp: type[nn.Module], experts: int, hidden: int) -> None:
    found = sizes_by_kind(outgrow.volumes(home.GPT(mlp=mlp, layers=1), _tokens()))
    assert found["experts"] == {3: experts}
    assert found["mlp"] == {home.HIDDEN: hidden}


def test_mlps_over_tokens_count_too() -> None:
    volumes = outgrow.volumes(home.Mixer(), torch.randn(2, home.LENGTH, 6))
    assert [(volume.name, volume.size) for volume in volumes if volume.kind == "mlp"] == [
        ("mix_tokens.gate", 10),
        ("mix_channels.gate", home.HIDDEN),
    ]


def test_a_stream_of_the_size_of_the_input_can_have_mlps() -> None:
    layer = nn.TransformerEncoderLayer(24, 4, 40, batch_first=True)
    volumes = outgrow.volumes(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 8, 24))
    found = sizes_by_kind(volumes)
    assert found["mlp"] == {40: 2}
    assert found["heads"] == {4: 2}
    assert set(found["width"]) == {24}
    assert not any(volume.growable for volume in volumes if volume.kind == "width")


class Adapted(nn.Module):
    """A block with a low-rank adapter beside its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.up, self.down = nn.Linear(3, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return x + self.down(torch.relu(self.up(x) + self.b(self.a(x))))


def test_the_rank_of_an_adapter_has_no_kind() -> None:
    kinds = {volume.name: volume.kind for volume in outgrow.volumes(Adapted(), torch.randn(2, 3))}
    assert kinds["up"] == "mlp"
    assert kinds["a"] is None
    assert kinds["stem"] == "width"


def test_layers_in_a_row_have_no_stream() -> None:
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    assert [volume.kind for volume in outgrow.volumes(plain, torch.randn(2, 4))] == [None, None, "outputs"]
    recurrent = outgrow.volumes(nn.LSTM(4, 8), torch.randn(5, 2, 4))
    assert {volume.kind for volume in recurrent} == {None}


def _tokens() -> Tensor:
    return torch.randint(0, home.VOCABULARY, (2, home.LENGTH), generator=torch.Generator().manual_seed(0))
