"""More tokens and more classes: old entries of the outputs stay, shapes and ties are those of the libraries' own functions."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow import Deepen, NewEntries, Widen
from outgrow.growth_plan.plan import Plan
from tests.helpers.library_models import FAMILIES, SIZES, TOKENS, shaken

BY_NAME = {str(family): family for family in FAMILIES}


def build(name: str) -> tuple[Any, dict[str, Tensor]]:
    return BY_NAME[name].build().double(), BY_NAME[name].example()


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def ties(model: nn.Module) -> set[frozenset[str]]:
    found: dict[int, set[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(tensor), set()).add(name)
    return {frozenset(names) for names in found.values()}


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "gemma2", "opt"])
def test_a_vocabulary_grows_as_by_resize_token_embeddings(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model, example = build(name)
    theirs = copy.deepcopy(model)
    with torch.no_grad():
        before = model(**example).logits
        growth = outgrow.grow(model, example, Widen(kind="vocab", by=6))
        theirs.resize_token_embeddings(56)
        after = model(**example).logits
    assert shapes(model) == shapes(theirs)
    assert ties(model) == ties(theirs)
    assert model.config.vocab_size == theirs.config.vocab_size == 56
    assert model.get_input_embeddings().num_embeddings == 56
    torch.testing.assert_close(after[..., :50], before)
    new = after[..., 50:]
    torch.testing.assert_close(new.mean(-1), before.mean(-1), rtol=0, atol=0.1 * float(before.std()))
    assert len(new.unique()) == new.numel()  # rows differ
    assert "the first 50 are as before" in str(growth)
    assert "tokenizer is not changed" in str(growth)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    ids = next(key for key in ("decoder_input_ids", "input_ids") if key in example)
    example[ids][:, 0] = 55  # a new token
    with torch.no_grad():
        torch.testing.assert_close(again(**example).logits, model(**example).logits)


def test_classes_of_a_bert_keep_their_names_and_new_ones_can_be_learned() -> None:
    transformers = pytest.importorskip("transformers")
    labels = {0: "dull", 1: "fine", 2: "great"}
    config = transformers.BertConfig(**TOKENS, **SIZES, id2label=labels, label2id={v: k for k, v in labels.items()})
    model = shaken(transformers.BertForSequenceClassification(config), 0).double().eval()
    ids = torch.randint(3, 50, (4, 6))
    with torch.no_grad():
        before = model(ids).logits
    growth = outgrow.grow(model, ids, Widen(kind="outputs", to=5))
    assert (model.num_labels, model.config.num_labels) == (5, 5)
    assert model.config.id2label == {**labels, 3: "LABEL_3", 4: "LABEL_4"}
    assert model.config.label2id["LABEL_4"] == 4
    torch.testing.assert_close(model(ids).logits[:, :3], before)
    loss = model(ids, labels=torch.tensor([4, 3, 0, 4])).loss
    torch.testing.assert_close(loss, nn.functional.cross_entropy(model(ids).logits, torch.tensor([4, 3, 0, 4])))
    loss.backward()
    assert Plan.from_json(json.loads(json.dumps(growth.plan.to_json()))) == growth.plan


@pytest.mark.parametrize(("name", "head"), [("resnet10t", "fc"), ("vit_tiny_patch16_224", "head")])
def test_classes_of_timm_models_have_the_shapes_of_reset_classifier(name: str, head: str) -> None:
    timm = pytest.importorskip("timm")
    options = {"img_size": 32, "depth": 1, "embed_dim": 24} if name.startswith("vit") else {}
    model = shaken(timm.create_model(name, num_classes=7, **options), 0).eval()
    theirs, x = copy.deepcopy(model), torch.randn(2, 3, 32, 32)
    before = model(x)
    outgrow.widen(model, x, head, kind="outputs", by=3)
    theirs.reset_classifier(10)
    assert shapes(model) == shapes(theirs)
    assert (model.num_classes, getattr(model, head).out_features) == (10, 10)
    torch.testing.assert_close(model(x)[:, :7], before)


class TwoHeads(nn.Module):
    """A classifier that returns class scores, log-probabilities, and both heads side by side."""

    def __init__(self, vocabulary: int = 9) -> None:
        super().__init__()
        self.num_classes, self.padding = 4, vocabulary - 1
        self.tokens = nn.Embedding(vocabulary, 6, padding_idx=-1)
        self.body, self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        h = torch.relu(self.body(self.tokens(ids).sum(1)))
        first, second = self.first(h), self.second(h)
        return {"first": first, "both": torch.cat([first * 2, second.tanh()], 1)}


@pytest.fixture
def two() -> tuple[TwoHeads, Tensor]:
    torch.manual_seed(0)
    return shaken(TwoHeads(), 0).double(), torch.tensor([[1, 2, 8], [3, 4, 0]])


def test_one_of_several_heads_is_named(two: tuple[TwoHeads, Tensor]) -> None:
    model, ids = two
    before = model(ids)
    outgrow.grow(model, ids, Widen("first", kind="outputs", by=2), Widen(kind="vocab", by=1), Widen("body", by=4))
    after = model(ids)
    assert (model.num_classes, model.second.out_features, model.tokens.num_embeddings) == (6, 3, 10)
    assert (model.tokens.padding_idx, model.body.out_features) == (8, 12)
    torch.testing.assert_close(after["first"][:, :4], before["first"])
    torch.testing.assert_close(after["both"][:, [0, 1, 2, 3, 6, 7, 8]], before["both"])
    torch.testing.assert_close(after["both"][:, 4:6], 2 * after["first"][:, 4:])


@pytest.mark.parametrize("method", ["auto", "zero", "random", NewEntries(start="mean", noise=0.0)])
def test_new_rows_start_as_requested(method: Any, two: tuple[TwoHeads, Tensor]) -> None:
    model, ids = two
    outgrow.grow(model, ids, Widen("first", kind="outputs", by=3, method=method), seed=1)
    for tensor in (model.first.weight.detach(), model.first.bias.detach()):
        old, new = tensor[:4], tensor[4:]
        mean = old.mean(0).expand_as(new)
        noise = 0.05 * float(old.std())
        if method == "zero":
            assert not new.any()
        elif method == "random":
            assert (new - mean).abs().max() > noise
        else:
            torch.testing.assert_close(new, mean, rtol=0, atol=noise if method == "auto" else 1e-12)
    if method == "auto":
        assert len(model.first.weight[4:].unique(dim=0)) == 3


def test_the_optimizer_goes_on_with_old_rows_as_before(two: tuple[TwoHeads, Tensor]) -> None:
    model, ids = two
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, twin)]

    def step(one: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        one(ids)["first"][:, :4].square().sum().backward()
        optimizer.step()

    for one, optimizer in zip((model, twin), optimizers, strict=True):
        step(one, optimizer)
    outgrow.grow(model, ids, Widen("first", kind="outputs", by=2), Widen(kind="vocab", by=3), optimizer=optimizers[0])
    for one, optimizer in zip((model, twin), optimizers, strict=True):
        step(one, optimizer)
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name][: len(value)], value)
    assert not optimizers[0].state[model.first.weight]["exp_avg"][4:].any()


class Scores(nn.Module):
    """A classifier that returns something made of its scores."""

    def __init__(self, end: str) -> None:
        super().__init__()
        self.body, self.head, self.end = nn.Linear(4, 8), nn.Linear(8, 3), end

    def forward(self, x: Tensor) -> Any:
        scores = self.head(self.body(x).relu())
        match self.end:
            case "log-softmax":
                return scores.log_softmax(-1)
            case "loss":
                return scores, nn.functional.cross_entropy(scores, torch.zeros(len(x), dtype=torch.long))
            case "argmax":
                return scores, scores.argmax(-1)
            case "norm":
                return scores / scores.norm(dim=-1, keepdim=True)
            case _:
                return 30 * (scores / 30).tanh()


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("log-softmax", "log_softmax runs over its units"),
        ("loss", "pass an example without labels"),
        ("argmax", "argmax runs over its units"),
        ("norm", "entries that were there before would change"),
    ],
)
def test_outputs_that_mix_entries_are_refused(end: str, reason: str) -> None:
    model, x = Scores(end), torch.randn(3, 4)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(outgrow.GrowthError, match=reason):
        outgrow.grow(model, x, Widen(kind="outputs", by=2))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_softcap_keeps_entries_apart() -> None:
    model, x = Scores("softcap"), torch.randn(3, 4)
    before = model(x)
    outgrow.grow(model, x, Widen(kind="outputs", by=2))
    torch.testing.assert_close(model(x)[:, :3], before)


def test_the_loss_of_a_softmax_rises_by_the_logarithm_of_the_ratio_at_most() -> None:
    model, x, classes = Scores("softcap").double(), torch.randn(64, 4).double(), torch.randint(0, 3, (64,))
    before = nn.functional.cross_entropy(model(x), classes)
    outgrow.grow(model, x, Widen(kind="outputs", by=3, method=NewEntries(noise=0.0)))
    after = nn.functional.cross_entropy(model(x), classes)
    assert before < after <= before + math.log(2) + 1e-3
    assert torch.equal(model(x).argmax(-1), model(x)[:, :3].argmax(-1))


def test_everything_grows_in_one_call_and_in_a_run() -> None:
    pytest.importorskip("transformers")
    model, example = build("llama")
    with torch.no_grad():
        before = model(**example).logits
    requests = Widen(kind="mlp", factor=1.5), Widen(kind="vocab", by=6), Deepen(layers=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run = outgrow.Run(model, example, optimizer, [outgrow.At(step=1, grow=list(requests))], quiet=True)
    model(**example).logits.sum().backward()
    optimizer.step()
    growth = run.step()
    assert growth is not None
    assert "6 new entries" in str(growth)
    config = model.config
    assert (config.vocab_size, config.intermediate_size, config.num_hidden_layers) == (56, 36, 3)
    with torch.no_grad():
        torch.testing.assert_close(model(**example).logits[..., :50], before)


def test_schedule_files_hold_the_requests(tmp_path: Path) -> None:
    grow = [Widen(kind="vocab", by=3, method="zero"), Widen("head", kind="outputs", by=2, method=NewEntries(start="random"))]
    schedule = outgrow.Schedule([outgrow.At(step=3, grow=grow)])
    schedule.to_file(tmp_path / "schedule.toml")
    assert outgrow.Schedule.from_file(tmp_path / "schedule.toml") == schedule


def test_mistakes_are_refused() -> None:
    with pytest.raises(outgrow.GrowthError, match="leave fade= out"):
        Widen(kind="vocab", by=2, fade=10)
    with pytest.raises(outgrow.GrowthError, match="'auto', 'mean', 'zero', 'random'"):
        Widen(kind="outputs", by=2, method="r2r")
    with pytest.raises(outgrow.GrowthError, match="for kind='vocab' and kind='outputs'"):
        Widen(by=2, method=NewEntries())
    with pytest.raises(outgrow.GrowthError, match="start='big'"):
        NewEntries(start="big")
