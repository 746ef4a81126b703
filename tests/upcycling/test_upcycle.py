"""Dense models become mixtures of experts that compute the same; mixtures of experts get more experts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import outgrow
from outgrow.errors import MethodError, SizeError, VerifyError
from tests.helpers.checkpoints import logits_elsewhere

transformers = pytest.importorskip("transformers.core_model_loading") and pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}
DENSE: dict[str, tuple[str, dict[str, Any]]] = {  # the class with experts, and options
    "Llama": (
        "Mixtral",
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
    ),
    "Mistral": ("Mixtral", {"sliding_window": 4, "head_dim": 8}),
    "Qwen2": ("Qwen2Moe", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "Qwen3": ("Qwen3Moe", {"head_dim": 8, "attention_bias": True}),
    "Olmo2": ("FlexOlmo", {}),
}
SPARSE: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 5},
    "Qwen2Moe": {"num_experts": 5, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 8, "mlp_only_layers": [1]},
    "Qwen3Moe": {"num_experts": 5, "moe_intermediate_size": 16, "head_dim": 8, "norm_topk_prob": True},
    "Olmoe": {"num_experts": 5, "num_key_value_heads": 4},
}


def build(name: str, kind: str = "ForCausalLM", **options: Any) -> Any:
    """A model with random weights, distinct experts included."""
    own = {**(DENSE[name][1] if name in DENSE else {"num_experts_per_tok": 2, **SPARSE[name]}), **options}
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **own})
    model = getattr(transformers, name + kind)(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def ids(length: int = 12, seed: int = 0) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 40, (3, length), generator=torch.Generator().manual_seed(seed))}


def difference(one: Any, other: Any, example: dict[str, Tensor]) -> float:
    with torch.no_grad():
        a, b = one(**example).logits, other(**example).logits
    return float((a - b).abs().max() / a.abs().max())


CASES = {
    **{name: (name, {}) for name in DENSE},
    "finer": ("Mistral", {"experts": 4, "top_k": 1, "granularity": 4}),
    "finer with a shared expert": ("Qwen2", {"granularity": 2, "shared": "dense"}),
    **{f"more experts, {name}": (name, {"experts": 10}) for name in SPARSE},
    **{f"smaller experts, {name}": (name, {"experts": 5, "granularity": 2}) for name in SPARSE},
}


@pytest.fixture(scope="module")
def upcycled() -> dict[str, tuple[Any, Any]]:
    found = {}
    for case, (name, options) in CASES.items():
        model = build(name)
        before = copy.deepcopy(model.state_dict())
        found[case] = model, outgrow.upcycle(model, ids(), **options)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_new_model_computes_the_same(case: str, upcycled: dict[str, tuple[Any, Any]]) -> None:
    old, new = upcycled[case]
    name, options = CASES[case]
    assert type(new).__name__ == (DENSE[name][0] if name in DENSE else name) + "ForCausalLM"
    assert difference(old, new, ids(40, seed=1)) < 2e-6  # longer than the example, and than the windows
    with torch.no_grad():
        for mode in (True, False):
            old.train(mode)
            new.train(mode)
            torch.testing.assert_close(old(**ids()).logits, new(**ids()).logits, rtol=1e-5, atol=1e-5)
    report = new.upcycling
    assert report.exact
    assert report.error <= report.limit
    experts = new.model.layers[0].mlp.experts
    slices = options.get("granularity", 1)
    assert report.experts[0] == len(experts.down_proj) == options.get("experts", 8) * slices
    assert str(report.experts[0]) in str(report)


def test_new_models_generate_as_the_old_ones_and_learn(upcycled: dict[str, tuple[Any, Any]]) -> None:
    for case in ("Llama", "Qwen2", "Qwen3", "Olmo2", "finer"):
        old, new = upcycled[case]
        options = {"max_new_tokens": 6, "do_sample": False, "use_cache": True}
        assert torch.equal(old.generate(**ids(), **options), new.generate(**ids(), **options)), case
        twin = copy.deepcopy(new).train()
        optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
        mlp, losses = twin.model.layers[0].mlp, []
        for _ in range(3):
            optimizer.zero_grad()
            loss = twin(**ids(), labels=ids()["input_ids"]).loss
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[0]
        assert float(mlp.gate.weight.grad.abs().max()) > 1e-4 * float(mlp.experts.down_proj.grad.abs().max()), case
        used = [
            expert for expert, gradient in zip(mlp.experts.down_proj, mlp.experts.down_proj.grad, strict=True) if gradient.any()
        ]
        assert len(used) > 1
        assert not torch.equal(used[0], used[1])  # copies become different, since their tokens are


def test_copies_of_different_experts_have_gradients_of_their_own(upcycled: dict[str, tuple[Any, Any]]) -> None:
    twin = copy.deepcopy(upcycled["more experts, Mixtral"][1]).train()
    twin(**ids(), labels=ids()["input_ids"]).loss.backward()
    mlp = twin.model.layers[0].mlp
    for gradient in (mlp.gate.weight.grad, mlp.experts.gate_up_proj.grad):
        assert float((gradient[0] - gradient[1]).abs().max()) > 0.01 * float(gradient.abs().max())


def test_new_models_are_read_without_outgrow(upcycled: dict[str, tuple[Any, Any]], tmp_path: Path) -> None:
    cases = (*DENSE, "finer with a shared expert", "more experts, Qwen2Moe", "smaller experts, Olmoe")
    folders = [tmp_path / str(number) for number in range(len(cases))]
    for case, folder in zip(cases, folders, strict=True):
        upcycled[case][1].save_pretrained(folder)
    for case, found in zip(cases, logits_elsewhere(folders, [ids(seed=4)] * len(cases), tmp_path), strict=True):
        with torch.no_grad():
            expected = upcycled[case][0](**ids(seed=4)).logits
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_drop_upcycling_reports_that_it_is_not_exact() -> None:
    model = build("Llama")
    new = outgrow.upcycle(model, ids(), drop=0.5)
    assert not new.upcycling.exact
    assert new.upcycling.error > 0.01
    assert "does NOT preserve the function" in str(new.upcycling)
    dense = model.model.layers[0].mlp.gate_proj.weight
    for expert in new.model.layers[0].mlp.experts.gate_up_proj:
        kept = sum(bool((expert[:32] == row).all(1).any()) for row in dense)
        assert kept == 16  # of 32 hidden units


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_mode_and_frozen_parameters_are_those_of_the_dense_model(dtype: torch.dtype) -> None:
    model = build("Qwen3").to(dtype).train()
    model.model.embed_tokens.requires_grad_(False)
    state = torch.random.get_rng_state()
    new = outgrow.upcycle(model, ids(), experts=4)
    assert torch.equal(state, torch.random.get_rng_state())
    assert {parameter.dtype for parameter in new.parameters()} == {dtype}
    assert new.training
    assert [name for name, parameter in new.named_parameters() if not parameter.requires_grad] == ["model.embed_tokens.weight"]


def test_seeds_and_other_heads() -> None:
    model = build("Llama", "ForSequenceClassification", num_labels=3, pad_token_id=0)
    one, same, other = (outgrow.upcycle(model, ids(), experts=4, seed=seed) for seed in (1, 1, 2))
    assert type(one).__name__ == "MixtralForSequenceClassification"
    assert one.config.num_labels == 3
    routers = [each.model.layers[0].mlp.gate.weight for each in (one, same, other)]
    assert torch.equal(routers[0], routers[1])
    assert not torch.equal(routers[0], routers[2])


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "attention biases": ("Llama", {"attention_bias": True}, {}, r"self_attn\.q_proj\.bias: MixtralForCausalLM has no place"),
    "biases of the MLP": ("Llama", {"mlp_bias": True}, {}, r"mlp\.gate_proj\.bias: Mixtral"),
    "layers with and without windows": (
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        {},
        "layer_types: layers differ",
    ),
    "too many per token": ("Llama", {}, {"experts": 2, "top_k": 3}, "there are only 2 experts"),
    "slices": ("Llama", {}, {"granularity": 5}, "32 hidden units, which is not a multiple"),
    "a part": ("Llama", {}, {"drop": 1.0}, "from 0 to below 1"),
    "a count": ("Llama", {}, {"experts": 0}, "whole number above 0"),
    "no shared expert": ("Llama", {}, {"shared": "dense"}, "only a dense Qwen2"),
    "unknown shared": ("Qwen2", {}, {"shared": "half"}, "write one of 'zero', 'dense'"),
    "one more expert": ("Mixtral", {}, {"experts": 6}, "exact only if each of them has the same number of copies"),
    "as many per token": ("Mixtral", {}, {"experts": 10, "top_k": 2}, "write experts=10 without top_k"),
    "another family": ("GPT2", {}, {}, "GPT2LMHeadModel can't be upcycled(.|\n)*llama and mistral → Mixtral"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_exact_is_refused(case: str) -> None:
    name, config, options, match = REFUSED[case]
    if name == "GPT2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=40))
    else:
        model = build(name, **config)
    with pytest.raises((MethodError, SizeError), match=match):
        outgrow.upcycle(model, ids(), **options)


def test_biases_of_zeros_need_no_place() -> None:
    model = build("Llama", attention_bias=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
    assert difference(model, outgrow.upcycle(model, ids()), ids(20)) < 2e-6


def test_settings_of_the_configuration_are_kept() -> None:
    model = build("Mistral", attention_dropout=0.1, hidden_act="gelu", rms_norm_eps=1e-3)
    new = outgrow.upcycle(model, ids())
    assert (new.config.attention_dropout, new.config.hidden_act, new.config.rms_norm_eps) == (0.1, "gelu", 1e-3)


def test_logits_of_routers_are_not_compared() -> None:
    model = build("Mixtral", output_router_logits=True)
    new = outgrow.upcycle(model, ids(), experts=10)
    assert model.config.output_router_logits
    assert new.config.output_router_logits
    assert new(**ids()).router_logits[0].shape[1] == 10


def test_a_difference_is_found_by_the_comparison() -> None:
    model = build("Llama")
    model.model.layers[0].mlp.act_fn = torch.nn.ReLU()  # which the configuration does not say
    with pytest.raises(VerifyError, match="MixtralForCausalLM differs from LlamaForCausalLM by"):
        outgrow.upcycle(model, ids())


def test_widening_experts_names_the_way_out() -> None:
    with pytest.raises(MethodError, match=r"kind='experts'(.|\n)*outgrow\.upcycle\(model, example, experts=…\)"):
        outgrow.grow(build("Mixtral"), ids(), outgrow.Widen(kind="experts", factor=2))


@pytest.mark.parametrize(
    ("name", "reason"), [("Olmo", "none of queries and keys"), ("Olmo2", r"norms what attention and MLP return(.|\n)*FlexOlmo")]
)
def test_classes_that_look_alike_are_refused_with_the_reason(name: str, reason: str) -> None:
    config = getattr(transformers, f"{name}Config")(**SMALL)
    dense, into = getattr(transformers, f"{name}ForCausalLM")(config), build("Olmoe", num_experts=4)
    state = {key: value.clone() for key, value in into.state_dict().items()}
    with pytest.raises(MethodError, match=f"can't be upcycled to OlmoeForCausalLM(.|\n)*{reason}"):
        outgrow.upcycle(dense, ids(), into=into)
    assert all(torch.equal(value, into.state_dict()[key]) for key, value in state.items())
    if name == "Olmo":
        with pytest.raises(MethodError, match=f"OlmoForCausalLM can't be upcycled(.|\n)*{reason}"):
            outgrow.upcycle(dense, ids())
