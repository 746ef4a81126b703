"""New blocks: exact at growth in models of libraries and in our own, named, trained, saved, and undone after a failure."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn

import outgrow
from outgrow.errors import GrowthError, MethodError
from tests.helpers.judging import assert_same_function, distance, shake, state_of
from tests.helpers.residual_chain import Block, X, chain


class PostNorm(Block):
    def __init__(self) -> None:
        super().__init__(after=nn.LayerNorm(6))


FAMILIES = {
    "resnet18": "layer2.1",
    "resnet26t": "layer2.1",
    "resnetv2_18": "stages.1.blocks.1",
    "convnext_atto": "stages.2.blocks.1",
    "mobilenetv3_small_050": "blocks.2.1",
    "regnetx_002": "s3.b2",
    "levit_128s": "stages.1.blocks.1",
}


KINDS = [
    pytest.param(
        name, method, marks=[] if method == "r2r" or name in ("resnet18", "convnext_atto") else [pytest.mark.exhaustive]
    )
    for name in FAMILIES
    for method in ("r2r", "r2r-paper")
]


@pytest.mark.parametrize(("name", "method"), KINDS)
def test_blocks_of_the_model_s_own_kind(name: str, method: str) -> None:
    size = 224 if name == "levit_128s" else 64
    model = shake(timm.create_model(name, num_classes=5).double())
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    old = copy.deepcopy(model)
    after = FAMILIES[name]
    container = after.rpartition(".")[0]
    growth = outgrow.deepen(model, x, after, count=2, method=method)
    assert_same_function(old, model, [x])
    assert growth.parameters[1] > growth.parameters[0]
    assert len(model.get_submodule(container)) if hasattr(model.get_submodule(container), "__len__") else True
    names = {growth.plan.renamed(key) for key in old.state_dict()}
    assert names < set(model.state_dict())
    for key, value in old.state_dict().items():
        assert torch.equal(model.state_dict()[growth.plan.renamed(key)], value), key


class Split(nn.Module):
    """A branch whose last layer reads several volumes: two paths and a gate, laid side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.last = nn.Linear(6, 5), nn.Linear(6, 4), nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.cat([torch.relu(self.a(x)), torch.tanh(self.b(x))], -1)
        return x + self.last(parts * nn.functional.gelu(self.c(x)))


class Two(nn.Module):
    """Takes and returns two streams."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = Block(), Block()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.f(x), self.g(y)


class TwoStreams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(5, 6), nn.ModuleList([Two(), Two()])

    def forward(self, x: Tensor) -> Tensor:
        x, y = self.stem(x), self.stem(-x)
        for block in self.blocks:
            x, y = block(x, y)
        return x * y


@pytest.mark.parametrize("method", ["r2r", "copy"])
def test_branches_that_read_several_volumes_and_blocks_with_two_streams(method: str) -> None:
    for model, after in ((chain(Split(), Split()), "2.0"), (shake(TwoStreams().double()), "blocks.0")):
        old = copy.deepcopy(model)
        outgrow.deepen(model, X, after, method=method, fade=5 if method == "copy" else None)
        assert_same_function(old, model, [X, X[:2]])


def test_a_vision_transformer_learns_with_its_new_block() -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=5, depth=3)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    x, y = torch.randn(8, 3, 32, 32), torch.randint(5, (8,))

    def step() -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        step()
    before = nn.functional.cross_entropy(model(x), y).item()
    outgrow.deepen(model, x, "blocks.1", optimizer=optimizer)
    assert len(model.blocks) == 4
    assert abs(nn.functional.cross_entropy(model(x), y).item() - before) < 1e-5
    start = {name: parameter.detach().clone() for name, parameter in model.blocks[2].named_parameters()}
    losses = [step() for _ in range(5)]
    assert losses[-1] < before
    assert max(losses) < 1.1 * before
    for name, parameter in model.blocks[2].named_parameters():
        assert not torch.equal(parameter, start[name]), name
    (group,) = optimizer.param_groups
    assert group["param_names"] == [name for name, _ in model.named_parameters()]
    assert [id(p) for p in group["params"]] == [id(p) for p in model.parameters()]


def test_windows_keep_their_turn() -> None:
    """Every other block of a Swin transformer shifts its windows; two new blocks keep it so."""
    model = timm.create_model("swin_tiny_patch4_window7_224", depths=(2, 2), num_heads=(3, 6), img_size=56, num_classes=4)
    x = torch.randn(1, 3, 56, 56)
    old = copy.deepcopy(model.eval())
    outgrow.deepen(model, x, "layers.0.blocks.1", count=2)
    shifts = [tuple(block.shift_size) for block in model.layers[0].blocks]
    assert shifts == shifts[:2] * 2
    assert distance(old(x).detach(), model.eval()(x).detach()) < 1e-5


@pytest.mark.parametrize(
    ("block", "grows"),
    [
        (lambda: Block(), ""),
        (lambda: Block(activation=nn.ReLU(), after=nn.ReLU()), ""),
        (lambda: Block(activation=nn.Sigmoid()), ""),
        (lambda: Block(after=nn.GELU()), r"aten\.gelu after its sum is not idempotent"),
        (lambda: Block(after=nn.Tanh()), r"aten\.tanh after its sum is not idempotent"),
        (lambda: PostNorm(), "post-norm"),
    ],
)
def test_places_and_refusals_agree(block: Any, grows: str) -> None:
    model = chain(block(), block())
    places = {place.name: place for place in outgrow.places(model, X)}
    old, before = copy.deepcopy(model), state_of(model)
    assert ("r2r" in places["2.0"].methods) == (not grows)
    assert state_of(model) == before
    if grows:
        with pytest.raises(MethodError, match=grows):
            outgrow.deepen(model, X, "2.0")
        assert state_of(model) == before
        outgrow.deepen(model, X, "2.0", method="residual")
        assert_same_function(old, model, [X])
    else:
        outgrow.deepen(model, X, "2.0")
        assert len(model[2]) == 3
        assert_same_function(old, model, [X, X[:2]])


class Listed(nn.Module):
    """Runs the blocks of a list by fixed indices, or all of them."""

    def __init__(self, by_number: bool) -> None:
        super().__init__()
        self.blocks, self.out, self.by_number = nn.ModuleList([Block(5), Block(5)]), nn.Linear(5, 2), by_number

    def forward(self, x: Tensor) -> Tensor:
        for block in [self.blocks[0], self.blocks[1]] if self.by_number else self.blocks:
            x = block(x)
        return self.out(x)


def test_a_block_that_nobody_would_run_is_refused() -> None:
    model = shake(Listed(by_number=True).double())
    before = state_of(model)
    with pytest.raises(MethodError, match="does not run a block that is added there"):
        outgrow.deepen(model, X, "blocks.1")
    assert state_of(model) == before
    for by_number in (True, False):
        places = outgrow.places(Listed(by_number).double(), X)
        assert [place.name for place in places if "r2r-paper" in place.methods] == (
            [] if by_number else ["blocks.0", "blocks.1"]
        )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"after": "nowhere"}, "has no module 'nowhere'"),
        ({"after": ""}, "write after=, the path of a module"),
        ({"after": "2.0", "method": "netmorph"}, "no linear layer or convolution"),
        ({"after": "2.0", "method": "net2net"}, "does not end in an activation"),
        ({"after": "2.0", "count": 0}, "whole number above 0"),
        ({"after": "2.0", "method": "magic"}, "write one of"),
        ({"after": 3}, "path of a module"),
    ],
)
def test_mistakes_are_answered_in_words(arguments: dict[str, Any], words: str) -> None:
    model = chain(Block(), Block())
    with pytest.raises(GrowthError, match=words):
        outgrow.deepen(model, X, **arguments)


@pytest.mark.parametrize("method", ["copy", "random"])
def test_methods_that_do_not_preserve_say_so(method: str) -> None:
    model = chain(Block(), Block())
    growth = outgrow.deepen(model, X, "2.1", method=method)
    assert not growth.preserving
    assert growth.max_error > 1e-3
    assert "does NOT preserve" in str(growth)
    if method == "copy":
        assert torch.equal(model[2][2].a.weight, model[2][1].a.weight)


def test_a_growth_of_everything_at_once_and_ten_in_a_row(path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv1d(1, 6, 3, padding=1), nn.Flatten(), nn.Linear(30, 6), nn.ReLU(), nn.Sequential(Block(), Block())
        )

    torch.manual_seed(0)
    model = shake(build().double())
    x = torch.randn(4, 1, 5, dtype=torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    average = torch.optim.swa_utils.AveragedModel(model)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)

    for number in range(10):
        step()
        old, averaged = copy.deepcopy(model), average(x).detach()
        transforms: list[Any] = [outgrow.Deepen(after="4.1")]
        if number % 3 == 1:
            transforms = [outgrow.Widen("4.*.a", factor=1.25), outgrow.Kernel("0", 3 + 2 * (number // 3 + 1))]
        elif number % 3 == 2:
            transforms = [outgrow.Deepen(after="4.0"), outgrow.Widen("0", by=2), outgrow.Deepen(after="4.1")]
        growth = outgrow.grow(model, x, *transforms, optimizer=optimizer, average=average)
        assert growth.preserving
        assert_same_function(old, model, [x, x[:2]])
        assert distance(averaged, average(x).detach()) < 1e-12
        assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in model.parameters()}
    step()
    outgrow.save(model, path)
    again = outgrow.load(build().double(), path)
    assert list(again.state_dict()) == list(model.state_dict())
    assert torch.equal(again(x), model(x))
    old = copy.deepcopy(again)
    outgrow.deepen(again, x, "4.2")
    assert_same_function(old, again, [x])


def test_names_are_those_of_the_model_before() -> None:
    model = shake(nn.Sequential(nn.Linear(5, 6), nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(3)))).double())
    old = copy.deepcopy(model)
    outgrow.grow(model, X, outgrow.Deepen("1.0"), outgrow.Deepen("1.1.0"), outgrow.Deepen("1.0.1", count=2))
    assert [len(stage) for stage in model[1]] == [4, 2, 3, 2]
    assert_same_function(old, model, [X])


def test_code_that_a_block_more_breaks_is_refused_in_words() -> None:
    class Counting(Listed):
        def forward(self, x: Tensor) -> Tensor:
            rest = [1, 2]
            for block in self.blocks:
                x = rest.pop() * block(x)
            return self.out(x)

    model = Counting(by_number=False).double()
    before = state_of(model)
    with pytest.raises(MethodError, match="with one more block there the model does not run"):
        outgrow.deepen(model, X, "blocks.0")
    assert state_of(model) == before
    with pytest.raises(GrowthError, match="does not run on the example"):
        outgrow.places(model, X[:, :2])


def test_an_average_of_another_depth_is_refused() -> None:
    with pytest.raises(GrowthError, match="of another model"):
        outgrow.deepen(chain(Block(), Block()), X, "2.0", average=chain(Block(), Block(), Block()))


def test_an_optimizer_that_was_left_out_is_reported_once() -> None:
    model = chain(Block(), Block())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outgrow.deepen(model, X, "2.1")
    model(X).sum().backward()
    with pytest.warns(UserWarning, match=r"SGD does not train the new parameters 2\.2\.a\.weight and 3 more"):
        optimizer.step()
    optimizer.step()
    new = torch.optim.SGD(model.parameters(), lr=0.1)
    new.step()


def test_a_failure_afterwards_takes_the_blocks_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = chain(Block(), Block())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(X).sum().backward()
    optimizer.step()
    before, groups = state_of(model), [list(map(id, group["params"])) for group in optimizer.param_groups]

    def fail(*args: Any) -> None:
        raise outgrow.GrowthError("as if it were wrong")

    monkeypatch.setattr("outgrow.verify.outputs.check", fail)
    with pytest.raises(GrowthError, match="as if"):
        outgrow.grow(model, X, outgrow.Deepen(after="2.0", count=2), outgrow.Widen("2.0.a", factor=2), optimizer=optimizer)
    assert state_of(model) == before
    assert [list(map(id, group["params"])) for group in optimizer.param_groups] == groups


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_a_language_model_goes_on_generating(kind: str, path: Path) -> None:
    small = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    older = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
    config = getattr(transformers, f"{kind}Config")(**(small if kind == "Llama" else older), bos_token_id=0, eos_token_id=1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(2, 40, (2, 6))
    before = model(input_ids=ids).logits.detach()
    written = model.generate(ids, max_new_tokens=6, do_sample=False)
    blocks = "model.layers" if kind == "Llama" else "transformer.h"
    outgrow.deepen(model, {"input_ids": ids}, f"{blocks}.0", count=2)
    assert len(model.get_submodule(blocks)) == 4
    assert model.config.num_hidden_layers == 4
    assert distance(before, model(input_ids=ids).logits.detach()) < 1e-5
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), written)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False), written)
    outgrow.save(model, path)
    fresh = getattr(transformers, f"{kind}Config")(**(small if kind == "Llama" else older), bos_token_id=0, eos_token_id=1)
    again = outgrow.load(transformers.AutoModelForCausalLM.from_config(fresh).eval(), path)
    assert torch.equal(again.generate(ids, max_new_tokens=6, do_sample=False), written)
    rebuilt = transformers.AutoModelForCausalLM.from_config(model.config).eval()
    rebuilt.load_state_dict(model.state_dict())
    assert torch.equal(rebuilt(input_ids=ids).logits, model(input_ids=ids).logits)


def test_a_post_norm_transformer_is_refused() -> None:
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24
    )
    model = transformers.BertModel(config)
    with pytest.raises(MethodError, match="post-norm"):
        outgrow.deepen(model, {"input_ids": torch.randint(2, 40, (2, 6))}, "encoder.layer.0")


def test_two_new_blocks_do_not_start_alike() -> None:
    model = chain(Block(), Block())
    outgrow.deepen(model, X, "2.1", count=2)
    one, other = model.get_submodule("2.2").state_dict(), model.get_submodule("2.3").state_dict()
    assert any(not torch.equal(one[name], other[name]) for name in one)
