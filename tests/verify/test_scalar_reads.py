"""Models whose code reads scalars of the example are checked briefly; those that read their own tensors, thoroughly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import outgrow
from outgrow.errors import VerifyError
from outgrow.verify import brief_check as brief
from outgrow.verify import scalar_reads
from tests.helpers.small_runs import at


class Masked(nn.Module):
    """Skips an operator if the mask is all ones; `reads`: what else its code reads."""

    def __init__(self, reads: str = "") -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 3)
        self.reads = reads

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = torch.relu(self.one(x))
        if not bool(mask.all()):
            h = h * mask[:, None]
        if self.reads == "weights" and float(self.one.weight.detach().sum()) > 100:
            h = h * 2
        if self.reads == "noise" and float(torch.rand(())) > 2:
            h = h * 2
        if self.reads == "views":
            seen = torch.zeros(3)
            seen[0].copy_(self.one.weight.detach().sum())
            h = h * 2 if bool((seen > 100).any()) else h
        if self.reads == "units" and self.training and int(mask.sum()) > 0:
            h = h / self.one.out_features * 8  # depends on the width: a growth changes the function
        return self.two(h)  # type: ignore[no-any-return]


def example(ones: bool) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(6, 4), torch.ones(6) if ones else (torch.arange(6) < 4).float()


@pytest.mark.parametrize("ones", [True, False])
def test_scalars_of_the_example_are_replayed(ones: bool) -> None:
    found = brief.plan_brief_check(Masked(), example(ones))
    assert found is not None
    assert found.scalars == {False: [ones], True: [ones]}
    assert found.is_current(Masked(), example(ones))


@pytest.mark.parametrize("reads", ["weights", "noise", "views"])
def test_scalars_of_the_model_are_not_replayed(reads: str) -> None:
    assert scalar_reads.read_scalars(Masked(reads), example(True)) is None
    assert brief.plan_brief_check(Masked(reads), example(True)) is None


def test_recording_scalars_leaves_the_model_unchanged() -> None:
    model = Masked().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given, state = example(True), torch.get_rng_state()
    assert scalar_reads.read_scalars(model, given) == {False: [True], True: [True]}
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_code_that_reads_other_scalars_later_is_detected() -> None:
    found = brief.plan_brief_check(Masked(), example(True))
    assert found is not None
    assert not found.is_current(Masked("weights"), example(True))


def test_code_for_train_mode_behind_a_scalar_is_not_missed() -> None:
    model = Masked("units").train()
    optimizer = SGD(model.parameters(), lr=0.1)
    x, mask = example(True)
    run = outgrow.Run(model, (x, mask), optimizer, [at(1, outgrow.Widen("one", to=12))], quiet=True)
    with pytest.raises(VerifyError):
        run.step()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_language_models_are_checked_briefly(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "llama":
        sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    else:
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=32)
        )
    ids = torch.randint(0, 50, (3, 8))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    passes: list[bool] = []
    model.train()
    optimizer = SGD(model.parameters(), lr=0.1)
    run = outgrow.Run(model, given, optimizer, [at(1, outgrow.Widen("*mlp*", factor=2))], quiet=True)
    block = next(module for module in model.modules() if type(module).__name__.endswith("MLP"))
    block.register_forward_pre_hook(lambda module, args: None if args[0].is_meta else passes.append(module.training))
    growth = run.step()
    assert growth is not None
    assert growth.max_error < 1e-5
    assert passes == [False, False]
