"""Gates around whole blocks, x + λ·(block(x) − x), for blocks that no weights make the identity (a norm after their sum)."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import outgrow
from outgrow.errors import MethodError
from outgrow.modules.gates import BlockGate, gates_of
from tests.helpers.fading import steps
from tests.helpers.judging import assert_learns, assert_same_function, distance
from tests.helpers.residual_chain import Block, X, chain

STEPS = 4


class Returning(Block):
    """Returns its hidden units too, is called by keyword, and ends in a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)

    def forward(self, *, states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = self.activation(self.a(states)) * mask
        return self.norm(states + self.b(hidden)), hidden


class Caller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Returning(), Returning()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, _ = block(states=x, mask=torch.ones(len(x), 1, dtype=x.dtype))
        return x


class InCode(Block):
    """An activation after the sum that is no module."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(super().forward(x))


class Halved(Block):
    """The skip is multiplied by a number."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x + self.b(self.activation(self.a(x)))


def encoder() -> nn.Module:
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Unflatten(0, (1, -1)), layers, nn.Flatten(0, 1))


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "layer norm": (lambda: chain(Block(after=nn.LayerNorm(6)), Block(after=nn.LayerNorm(6))), "2"),
    "batch norm": (lambda: chain(Block(after=nn.BatchNorm1d(6)), Block(after=nn.BatchNorm1d(6))), "2"),
    "torch's encoder": (lambda: chain(encoder()), "2.0.1.layers"),
    "keywords and tuples": (lambda: chain(Caller()), "2.0.blocks"),
    "activation in code": (lambda: chain(InCode(), InCode()), "2"),
    "a factor on the skip": (lambda: chain(Halved(), Halved()), "2"),
}


def grown(name: str = "layer norm", **options: Any) -> tuple[nn.Module, nn.Module, Any]:
    """A model before and after a growth, and its optimizer."""
    build, stack = MODELS[name]
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    steps(model, optimizer, 1)
    old = copy.deepcopy(model)
    outgrow.grow(model, X, outgrow.Deepen(layers=4, stack=stack, fade=STEPS), optimizer=optimizer, **options)
    return old, model, optimizer


@pytest.mark.parametrize("name", MODELS)
def test_any_block_with_a_skip_fades_in(name: str) -> None:
    old, model, optimizer = grown(name)
    assert_same_function(old, model, [X, X[:2]])
    gates = gates_of(model)
    assert [type(gate) for gate in gates.values()] == [BlockGate, BlockGate]
    assert [path.removeprefix(MODELS[name][1]) for path in gates] == [".1:block", ".3:block"]
    steps(model, optimizer, 1)
    assert_learns(model, X)
    steps(model, optimizer, STEPS - 1)
    assert gates_of(model) == {}
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_hooks_with_kwargs
        assert not module._state_dict_pre_hooks


def test_the_difference_of_a_block_is_what_fades_in() -> None:
    old, model, optimizer = grown()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    block, plain = model.get_submodule("2.1"), copy.deepcopy(model.get_submodule("2.1"))
    plain._forward_hooks.clear()
    x = torch.randn(4, 6, dtype=torch.float64)
    for done in range(STEPS):
        share = done / STEPS
        with torch.no_grad():
            assert distance((1 - share) * x + share * plain(x), block(x)) < 1e-12
        steps(model, optimizer, 1)
    assert torch.equal(block(x), plain(x))
    for path in ("2.1", "2.3"):  # as if each block had been written down twice
        source = old.get_submodule(f"2.{int(path[-1]) // 2}")
        for one, other in zip(model.get_submodule(path).parameters(), source.parameters(), strict=True):
            assert torch.equal(one, other)


def test_without_a_fade_the_error_names_it() -> None:
    model = MODELS["layer norm"][0]()
    for request in (outgrow.Deepen(layers=3, stack="2"), outgrow.Deepen("2.0")):
        with pytest.raises(MethodError, match=r"norm follows its sum.*(?s:.)*with fade="):
            outgrow.grow(model, X, request)


def test_blocks_without_a_skip_are_no_copies() -> None:
    plain = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.ReLU())
    model = chain(plain, copy.deepcopy(plain))
    with pytest.raises(MethodError, match="it has no skip"):
        outgrow.grow(model, X, outgrow.Deepen(layers=3, stack="2", fade=3))


def test_a_fade_is_saved_and_goes_on(path: Path) -> None:
    _, model, optimizer = grown()
    steps(model, optimizer, 1)
    outgrow.save(model, path)
    again = outgrow.load(MODELS["layer norm"][0](), path)
    revived = pickle.loads(pickle.dumps(model))
    for one in (again, revived):
        assert torch.equal(one(X), model(X))
        assert {key: gate.done for key, gate in gates_of(one).items()} == {"2.1:block": 1, "2.3:block": 1}
        other = torch.optim.SGD(one.parameters(), lr=0.0)
        steps(one, other, STEPS - 1)
        assert gates_of(one) == {}
        assert not any(module._forward_hooks_with_kwargs for module in one.modules())


def test_averages_fade_along_and_growths_in_between_are_exact() -> None:
    build, _ = MODELS["layer norm"]
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    average = torch.optim.swa_utils.AveragedModel(model)
    before = average(X).detach()
    outgrow.grow(model, X, outgrow.Deepen(layers=3, stack="2", fade=STEPS), optimizer=optimizer, average=average)
    assert distance(before, average(X).detach()) < 1e-12
    steps(model, optimizer, 1)
    assert list(gates_of(average.module)) == list(gates_of(model))
    old = copy.deepcopy(model)
    outgrow.grow(model, X, outgrow.Widen("2.*.a", factor=1.5), optimizer=optimizer, average=average)
    outgrow.grow(model, X, outgrow.Deepen(layers=5, stack="2", fade=STEPS), optimizer=optimizer, average=average)
    assert_same_function(old, model, [X])
    assert [gate.done for gate in gates_of(model).values()].count(1) == 1
    steps(model, optimizer, STEPS)
    assert gates_of(model) == gates_of(average.module) == {}


def test_a_run_resumes_in_the_middle_of_a_fade(tmp_path: Path) -> None:
    schedule = [outgrow.At(step=2, grow=[outgrow.Deepen(layers=3, stack="2", fade=STEPS)])]

    def run() -> Any:
        torch.manual_seed(0)
        model = MODELS["layer norm"][0]()
        return outgrow.Run(model, X, torch.optim.AdamW(model.parameters(), lr=1e-3), schedule)

    def train(one: Any, count: int) -> None:
        for _ in range(count):
            (optimizer,) = one.optimizers
            optimizer.zero_grad()
            one.model(X).square().mean().backward()
            optimizer.step()
            one.step()

    whole, first, second = run(), run(), run()
    train(whole, 9)
    train(first, 4)
    first.save(tmp_path / "run.pt")
    second.load(tmp_path / "run.pt")
    assert len(gates_of(second.model)) == 1
    train(second, 5)
    assert gates_of(second.model) == {}
    for one, other in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.exhaustive
def test_a_compiled_model_fades_in(fresh_compiler: None) -> None:
    _, model, optimizer = grown("torch's encoder")
    steps(model, optimizer, 2)
    compiled = torch.compile(model, backend="eager")
    assert distance(model(X).detach(), compiled(X).detach()) < 1e-12
    steps(model, optimizer, 2)
    assert distance(model(X).detach(), compiled(X).detach()) < 1e-12


def test_an_opt_with_norms_after_its_sums_is_a_plain_model_at_the_end(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "word_embed_proj_dim": 8, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.OPTConfig(**sizes, vocab_size=40, max_position_embeddings=32, do_layer_norm_before=False)
    model = transformers.OPTForCausalLM(config).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    example = {"input_ids": torch.arange(12).view(2, 6), "attention_mask": torch.ones(2, 6, dtype=torch.int64)}
    before = model(**example).logits.detach()
    outgrow.grow(model, example, outgrow.Deepen(layers=4, fade=2), optimizer=optimizer)
    assert torch.equal(before, model(**example).logits)
    with pytest.warns(UserWarning, match="without the fade in progress"):
        model.save_pretrained(tmp_path / "early")
    for _ in range(2):
        model(**example).logits.square().mean().backward()
        optimizer.step()
    model.save_pretrained(tmp_path / "late")
    again = transformers.OPTForCausalLM.from_pretrained(tmp_path / "late").eval()
    assert again.config.num_hidden_layers == 4
    assert distance(model(**example).logits.detach(), again(**example).logits.detach()) < 1e-6
