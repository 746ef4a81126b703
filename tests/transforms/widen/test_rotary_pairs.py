"""Heads under rotary encodings: existing pairs keep their frequencies, new ones lie between them."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outgrow
from tests.helpers.library_models import FAMILIES
from tests.helpers.random_weights import randomise_parameters

X = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
DOUBLE = outgrow.Widen(kind="head_dim", factor=2)


def frequencies(size: int) -> Tensor:
    return 100.0 ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)


class Rotary(nn.Module):
    """Attention with 2 heads of 6 features. layout: whether a pair is (i, i + 3), "halves", or (2·i, 2·i + 1), "neighbours"."""

    def __init__(self, layout: str, table: Tensor | None = None) -> None:
        super().__init__()
        self.layout, self.size = layout, 6
        self.q, self.k, self.v = (nn.Linear(12, 12) for _ in range(3))
        self.out = nn.Linear(12, 12)
        self.register_buffer("table", frequencies(6) if table is None else table)

    def turned(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * self.table
        cos, sin = angles.cos(), angles.sin()
        if self.layout == "halves":
            a, b = x.chunk(2, -1)
            return x * torch.cat([cos, cos], -1) + torch.cat([-b, a], -1) * torch.cat([sin, sin], -1)
        pairs = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        return x * cos.repeat_interleave(2, -1) + pairs * sin.repeat_interleave(2, -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], -1, self.size).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v)
        return x + self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("times", [2, 3])
def test_existing_pairs_move_to_every_k_th_place(times: int) -> None:
    model = randomise_parameters(Rotary("halves").double())
    before, q, k = model(X).detach(), model.q.weight.detach().clone(), model.k.weight.detach().clone()
    outgrow.grow(model, X, outgrow.Widen(kind="head_dim", factor=times))
    assert model.size == 6 * times
    torch.testing.assert_close(model(X), before, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.table, frequencies(6 * times), rtol=1e-12, atol=0.0)
    places = (2, 2, 3, times, 12)  # heads, halves, old pairs, new pairs for each, inputs
    new_q, new_k = model.q.weight.view(places), model.k.weight.view(places)
    torch.testing.assert_close(new_q[..., 0, :].reshape(12, 12), q * math.sqrt(times))
    assert torch.equal(new_k[..., 0, :].reshape(12, 12), k)
    assert not new_k[..., 1:, :].any()
    assert new_q[..., 1:, :].ne(0).all()


def test_pairs_of_neighbours_stay_neighbours() -> None:
    model = randomise_parameters(Rotary("neighbours").double())
    before, k = model(X).detach(), model.k.weight.detach().clone()
    outgrow.grow(model, X, DOUBLE)
    torch.testing.assert_close(model(X), before, rtol=1e-12, atol=1e-12)
    grown = model.k.weight.view(2, 3, 2, 2, 12)  # heads, old pairs, new pairs for each, features of a pair, inputs
    assert torch.equal(grown[:, :, 0].reshape(12, 12), k)
    assert not grown[:, :, 1].any()


def test_new_features_learn_and_the_optimizer_follows() -> None:
    model = randomise_parameters(Rotary("halves").double())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model(X).square().mean().backward()
    optimizer.step()
    moment = optimizer.state[model.k.weight]["exp_avg"].clone()
    outgrow.grow(model, X, DOUBLE, optimizer=optimizer)
    grown = optimizer.state[model.k.weight]["exp_avg"]
    assert torch.equal(grown.view(2, 2, 3, 2, 12)[:, :, :, 0].reshape(12, 12), moment)
    for _ in range(2):  # keys learn first, then queries
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
    assert all((layer.weight.grad != 0).all() for layer in (model.q, model.k, model.v))


@pytest.mark.parametrize("size", [{"factor": 1.5}, {"by": 2}, {"to": 9}])
def test_other_than_whole_factors_are_refused_with_the_nearest(size: dict[str, Any]) -> None:
    model = Rotary("halves").double()
    with pytest.raises(outgrow.GrowthError, match=r"grows by whole factors.*nearest: 12 \(factor=2\)"):
        outgrow.grow(model, X, outgrow.Widen(kind="head_dim", **size))
    assert model.size == 6


def test_without_the_kind_the_way_out_names_it() -> None:
    model = Rotary("halves").double()
    (name,) = (volume.name for volume in outgrow.volumes(model, X) if volume.rotary)
    with pytest.raises(outgrow.GrowthError, match="write kind='head_dim' with a whole factor"):
        outgrow.widen(model, X, name, factor=2)


def test_a_table_that_is_no_geometric_sequence_is_refused() -> None:
    model = Rotary("halves", torch.tensor([1.0, 0.5, 0.1])).double()
    with pytest.raises(outgrow.GrowthError, match="no geometric sequence"):
        outgrow.grow(model, X, DOUBLE)


def llama(**rope: Any) -> Any:
    """A Llama with heads of 16 features, and a type of rotary encoding."""
    import transformers

    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**sizes, **heads, rope_parameters={"rope_theta": 10000.0, **rope})
    return randomise_parameters(transformers.LlamaForCausalLM(config).double()).eval()


TOKENS = {"input_ids": torch.arange(12).view(2, 6)}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("rope", [{"rope_type": "linear", "factor": 3.0}, {"rope_type": "llama3", "factor": 8.0, **LLAMA3}])
def test_scaled_encodings_keep_the_table_of_the_library(rope: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    model = llama(**rope)
    before = model(**TOKENS).logits
    outgrow.grow(model, TOKENS, DOUBLE)
    torch.testing.assert_close(model(**TOKENS).logits, before, rtol=1e-6, atol=1e-6)
    fresh = type(model)(copy.deepcopy(model.config)).model.rotary_emb
    for name, table in fresh.named_buffers():
        torch.testing.assert_close(model.model.rotary_emb.get_buffer(name).float(), table, rtol=2e-7, atol=0.0)


@pytest.mark.parametrize(
    ("rope", "reason"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, "existing features other ones"),
        ({"rope_type": "dynamic", "factor": 4.0}, "again while the model runs"),
    ],
)
def test_encodings_whose_frequencies_depend_on_more_are_refused(rope: dict[str, Any], reason: str) -> None:
    pytest.importorskip("transformers")
    model = llama(**rope)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(outgrow.GrowthError, match=reason):
        outgrow.grow(model, TOKENS, DOUBLE)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.config.head_dim == 16


def test_a_grown_model_is_saved_and_loaded_with_its_table(tmp_path: Any) -> None:
    pytest.importorskip("transformers")
    family = next(one for one in FAMILIES if str(one) == "qwen2")
    model: Any = randomise_parameters(family.build())
    outgrow.grow(model, family.example(), DOUBLE)
    outgrow.save(model, tmp_path / "model.pt")
    again: Any = family.build()
    outgrow.load(again, tmp_path / "model.pt")
    table = model.model.rotary_emb.inv_freq
    torch.testing.assert_close(again.model.rotary_emb.inv_freq, table, rtol=0.0, atol=0.0)
    torch.testing.assert_close(again.eval()(**family.example()).logits, model.eval()(**family.example()).logits)
