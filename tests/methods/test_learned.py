"""Learned initialisation: GradMax's directions, North's orthogonality, exactness, and refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outgrow
from outgrow.checkpoints.plan_checkpoint import plan_checkpoint
from outgrow.methods.base import Method
from outgrow.methods.learned import LearnedInit

torch.manual_seed(0)
BATCHES = [(torch.randn(16, 5).double(), torch.randn(16, 3).double()) for _ in range(2)]
X = BATCHES[0][0]


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    result: Tensor = (model(batch[0]) - batch[1]).square().mean()
    return result


def network(activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), activation(), nn.Linear(4, 4), activation(), nn.Linear(4, 3)).double()


def of_explicit_connection(model: nn.Sequential) -> Tensor:
    """The gradient of the loss with respect to a matrix from the input of layer 0 to the output of layer 2, by autograd."""
    direct = torch.zeros(4, 5, dtype=torch.float64, requires_grad=True)
    total = torch.zeros((), dtype=torch.float64)
    for x, y in BATCHES:
        between = model[2](model[1](model[0](x))) + x @ direct.T
        total = total + (model[4](model[3](between)) - y).square().mean() / len(BATCHES)
    return torch.autograd.grad(total, direct)[0]


def test_pairs_read_the_top_singular_vectors_of_an_explicit_connection() -> None:
    model = network(nn.ReLU)
    left, _, right = torch.linalg.svd(of_explicit_connection(model))
    norms = model[0].weight.norm(dim=1).mean(), model[2].weight.norm(dim=0).mean()
    outgrow.widen(model, X, "0", by=4, method=outgrow.R2R(init=outgrow.GradMax(BATCHES, squares)))
    rows, columns = model[0].weight.detach(), model[2].weight.detach()
    for pair in range(2):
        u, z = rows[4 + pair], columns[:, 4 + pair]
        torch.testing.assert_close(rows[6 + pair], u)
        torch.testing.assert_close(columns[:, 6 + pair], -z)
        torch.testing.assert_close((left[:, pair] @ z).abs(), norms[1].detach())  # parallel, and of the old units' norm
        torch.testing.assert_close((right[pair] @ u).abs(), norms[0].detach())
        assert z @ of_explicit_connection(network(nn.ReLU)) @ u < 0  # what the first of the pair adds lowers the loss
    assert not model[0].bias[4:].any()


def test_zero_writers_get_a_larger_gradient_than_drawn_columns_of_the_same_norm() -> None:
    found = []
    for init in ("std", outgrow.GradMax(BATCHES, squares)):
        model = network()
        outgrow.widen(model, X, "0", by=2, method=outgrow.NetMorph(zero="writers", init=init))
        if init == "std":
            norms = model[2].weight.detach()[:, :4].norm(dim=0).mean()
            with torch.no_grad():
                model[2].weight[:, 4:] *= norms / model[2].weight[:, 4:].norm(dim=0)
        (sum(squares(model, batch) for batch in BATCHES) / 2).backward()  # type: ignore[union-attr]
        found.append(float(model[0].weight.grad[4:].norm()))
    assert found[1] > 1.2 * found[0]
    values = torch.linalg.svdvals(of_explicit_connection(network()))
    assert found[1] == pytest.approx(float(norms * values[:2].norm()), rel=1e-6)


METHODS: dict[str, Any] = {
    "r2r": outgrow.R2R,
    "netmorph": outgrow.NetMorph,
    "zero writers": lambda **options: outgrow.NetMorph(zero="writers", **options),
    "mean": outgrow.MeanFill,
}
INITS: dict[str, Any] = {
    "gradmax": lambda: outgrow.GradMax(BATCHES, squares),
    "gradmax, rows drawn": lambda: outgrow.GradMax(BATCHES, squares, rows="drawn"),
    "north": outgrow.North,
    "north on batches": lambda: outgrow.North(BATCHES, squares),
}
WITHOUT_EFFECT = {
    ("netmorph", "gradmax, rows drawn"),
    ("zero writers", "north"),
    ("zero writers", "north on batches"),
    ("mean", "gradmax, rows drawn"),
}


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("method", METHODS)
def test_learned_values_are_exact_deterministic_and_alive(method: str, init: str) -> None:
    model, how = network(), METHODS[method](init=INITS[init]())
    before = model(X)
    if (method, init) in WITHOUT_EFFECT:
        with pytest.raises(outgrow.GrowthError, match="it has no effect"):
            outgrow.widen(model, X, "*", factor=2, method=how)
        return
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    squares(model, BATCHES[0]).backward()
    optimizer.step()
    before, again = model(X), copy.deepcopy(model)
    growth = outgrow.widen(model, X, "*", factor=2, method=how, optimizer=optimizer)  # both volumes, whose values cross
    torch.testing.assert_close(model(X), before, rtol=1e-12, atol=1e-12)
    assert [change.new for change in growth.plan.changes] == [8, 8]
    outgrow.widen(again, X, "*", factor=2, method=how)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))
    for _ in range(2):  # what is zero at first gets its gradient one step later
        optimizer.zero_grad()
        squares(model, BATCHES[0]).backward()
        optimizer.step()
    assert (model[2].weight.grad[:, 4:].norm(dim=0) > 0).all()
    assert (model[0].weight.grad[4:].norm(dim=1) > 0).all()


def test_more_units_than_directions_are_all_different() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double()  # three directions
    outgrow.widen(model, X, "0", by=8, method=outgrow.NetMorph(init=outgrow.GradMax(BATCHES, squares)))
    rows = F.normalize(model[0].weight.detach()[4:])
    assert (rows @ rows.T - torch.eye(8).double()).abs().max() < 0.999


def test_north_is_orthogonal_to_all_rows_or_activations() -> None:
    wide = nn.Sequential(nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    batches = [(torch.randn(40, 12).double() @ torch.randn(12, 12).double(), torch.randn(40, 3).double())]
    for init in (outgrow.North(), outgrow.North(batches, squares)):
        model = copy.deepcopy(wide)
        outgrow.widen(model, batches[0][0], "0", by=6, method=outgrow.NetMorph(init=init))
        rows = model[0].weight.detach()
        seen = rows if init.batches is None else rows @ batches[0][0].T
        seen = F.normalize(seen)
        torch.testing.assert_close((seen @ seen[4:].T)[4:], torch.eye(6).double(), rtol=0, atol=1e-8)
        assert (seen[:4] @ seen[4:].T).abs().max() < 1e-8
        torch.testing.assert_close(rows[4:].norm(dim=1), rows[:4].norm(dim=1).mean().expand(6))


def test_north_takes_the_least_covered_directions_where_rows_span_everything() -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    with torch.no_grad():
        model[0].weight[:, 2] *= 0.01
    outgrow.widen(model, torch.randn(4, 3).double(), "0", by=5, method=outgrow.NetMorph(init=outgrow.North()))
    new = F.normalize(model[0].weight.detach()[6:])
    assert new[0, 2].abs() > 0.99
    assert (new @ new.T - torch.eye(5).double()).abs().max() < 0.999  # also those beyond the number of inputs differ


def test_convolutions_with_batch_norms_and_pooling_stay_exact() -> None:
    model = nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4, 3)),
    ).double()
    x = torch.randn(6, 2, 8, 8).double()
    batches = [(x, torch.randn(6, 3).double())]
    model(x)
    kept = {name: tensor.clone() for name, tensor in model.named_buffers()}
    model.eval()
    before = model(x)
    growth = outgrow.widen(model, x, "*", factor=2, method=outgrow.R2R(init=outgrow.GradMax(batches, squares)))
    assert {change.volume: change.new for change in growth.plan.changes} == {"0": 8, "4": 8}
    torch.testing.assert_close(model(x), before, rtol=1e-11, atol=1e-11)
    assert all(torch.equal(tensor[:4] if tensor.ndim else tensor, kept[name]) for name, tensor in model.named_buffers())


def test_a_failing_loss_leaves_everything_as_it_was() -> None:
    def fails(model: nn.Module, batch: Any) -> Tensor:
        model(batch[0])
        torch.randn(3)
        raise RuntimeError("no more data")

    model = network()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with pytest.raises(outgrow.GrowthError, match="failed with RuntimeError: no more data"):
        outgrow.widen(model, X, "0", by=2, method=outgrow.R2R(init=outgrow.GradMax(BATCHES, fails)))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert not any(module._forward_hooks for module in model.modules())


def refusal(model: nn.Module, x: Any, method: Method, **where: Any) -> str:
    with pytest.raises(outgrow.GrowthError) as caught:
        outgrow.widen(model, x, method=method, **where)
    return str(caught.value)


def test_refusals_name_the_volume_the_reason_and_the_volumes_that_fit() -> None:
    init = outgrow.GradMax(BATCHES, squares)
    assert "net2net leaves no values free" in refusal(network(), X, outgrow.Net2Net(init=init), where="0", by=2)
    dead = refusal(network(nn.ReLU), X, outgrow.NetMorph(init=init, zero="writers"), where="0", by=2)
    assert "0: with zero writers nothing would be learned: the slope of aten.relu at zero is zero" in dead
    normed = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4), nn.RMSNorm(4, eps=1e-6), nn.Linear(4, 3)).double()
    found = refusal(normed, X, outgrow.NetMorph(zero="writers", init=init), where="*", factor=2)
    assert "2: between 2 and its readers" in found
    assert "it fits '0'" in found
    flat = outgrow.GradMax(BATCHES, lambda model, batch: 0 * model(batch[0]).sum())
    assert "the gradient of the loss is zero there" in refusal(network(), X, outgrow.R2R(init=flat), where="0", by=2)
    twice = outgrow.GradMax(BATCHES, lambda model, batch: model(batch[0]).sum() + model(batch[0] + 1).sum())
    assert "ran 2 times" in refusal(network(), X, outgrow.R2R(init=twice), where="0", by=2)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(outgrow.GrowthError, match="write 'matching' or 'drawn'"):
        outgrow.GradMax(BATCHES, squares, rows="any")
    with pytest.raises(outgrow.GrowthError, match="pass a function of"):
        outgrow.North(BATCHES)
    with pytest.raises(TypeError, match=r"Write e.g. outgrow\.GradMax\("):
        outgrow.GradMax(BATCHES)  # type: ignore[call-arg]
    with pytest.raises(outgrow.GrowthError, match=r"outgrow\.GradMax\(batches, loss\)"):
        outgrow.R2R(init=3)  # type: ignore[arg-type]


def test_a_plan_learns_nothing_and_a_growth_learns_at_its_own_time() -> None:
    calls: list[int] = []

    def counted(model: nn.Module, batch: Any) -> Tensor:
        calls.append(model[0].out_features)  # type: ignore[index, union-attr, arg-type]
        return squares(model, batch)

    model = network()
    widen = outgrow.Widen("0", by=2, method=outgrow.R2R(init=outgrow.GradMax(BATCHES, counted)))
    planned = outgrow.plan(model, X, widen)
    assert not calls
    assert planned.edits[0].init.startswith("gradmax/")  # type: ignore[union-attr]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = outgrow.Run(model, X, optimizer, [outgrow.At(step=2, grow=[widen]), outgrow.At(step=4, grow=[widen])], quiet=True)
    assert not calls
    for _ in range(5):
        optimizer.zero_grad()
        loss = squares(model, BATCHES[0])
        loss.backward()
        optimizer.step()
        run.step(loss)
    assert calls == [4, 4, 6, 6]
    assert model[0].out_features == 8


def test_schedule_files_and_checkpoints_refuse_learned_values(tmp_path: Path) -> None:
    method = outgrow.R2R(init=outgrow.GradMax(BATCHES, squares))
    schedule = outgrow.Schedule([outgrow.At(step=1, grow=[outgrow.Widen("0", by=2, method=method)])])
    with pytest.raises(outgrow.GrowthError, match="is learned from batches, which a file can't hold"):
        schedule.to_file(tmp_path / "schedule.toml")
    checkpoint: Any = None  # refused before anything is read
    with pytest.raises(outgrow.GrowthError, match="here its weights stay on the disk"):
        plan_checkpoint(checkpoint, [outgrow.Widen("0", by=2, method=method)])


def test_grown_weights_are_saved_and_loaded(tmp_path: Path) -> None:
    model = network()
    outgrow.widen(model, X, "0", by=2, method=outgrow.R2R(init=outgrow.GradMax(BATCHES, squares)))
    outgrow.save(model, tmp_path / "grown.safetensors")
    loaded = network()
    outgrow.load(loaded, tmp_path / "grown.safetensors")
    torch.testing.assert_close(loaded(X), model(X), rtol=0, atol=0)


def test_averages_get_the_same_values_and_scale_and_fade_are_kept() -> None:
    model, average = network(), network()
    with torch.no_grad():
        average[0].weight.mul_(0.5)
    init: LearnedInit = outgrow.GradMax(BATCHES, squares)
    whole = network()
    outgrow.widen(whole, X, "0", by=2, method=outgrow.R2R(init=init))
    outgrow.widen(model, X, "0", by=2, method=outgrow.R2R(init=init, scale=0.5), average=average)
    torch.testing.assert_close(model[0].weight[4:], average[0].weight[4:], rtol=0, atol=0)
    torch.testing.assert_close(model[0].weight[4:] * 2, whole[0].weight[4:])
    faded, before = network(), network()(X)
    optimizer = torch.optim.SGD(faded.parameters(), 0.0)
    outgrow.widen(faded, X, "0", by=2, method=outgrow.NetMorph(init=init), fade=2, optimizer=optimizer)
    torch.testing.assert_close(faded(X), before, rtol=1e-12, atol=1e-12)
    for _ in range(2):
        faded(X).sum().backward()
        optimizer.step()
    direct = of_explicit_connection(network())
    change = faded[2].weight[:, 4:] @ faded[0].weight[4:]
    assert (direct * change).sum() < 0  # the faded-in connection lowers the loss


def test_learned_values_that_are_passed_in_the_wrong_way_are_refused_with_the_right_one() -> None:
    batches = [(torch.randn(8, 4), torch.randn(8, 2))]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    other = copy.deepcopy(model)
    with pytest.raises(outgrow.GrowthError, match=r"init=GradMax is a class: write init=outgrow\.GradMax\(batches, loss\)"):
        outgrow.R2R(init=outgrow.GradMax)
    for method in (outgrow.North(), outgrow.GradMax(batches, loss), outgrow.North):
        with pytest.raises(outgrow.GrowthError, match=r"no method: write method=outgrow\.R2R\(init="):
            outgrow.widen(model, batches[0][0], "0", by=2, method=method)  # type: ignore[arg-type]
    wrong = outgrow.GradMax(batches, lambda model, batch: loss(other, batch))
    with pytest.raises(outgrow.GrowthError, match=r"0 did not run with gradients in loss\(model, batch\): use the model"):
        outgrow.widen(model, batches[0][0], "0", by=2, method=outgrow.R2R(init=wrong))


def test_north_needs_inputs_that_are_not_zero() -> None:
    zeros = [(torch.zeros_like(X), BATCHES[0][1])]
    found = refusal(network(), X, outgrow.R2R(init=outgrow.North(zeros, squares)), where="0", by=2)
    assert "0: all of its inputs are zero on the batches" in found


def gpt2() -> tuple[nn.Module, nn.Module]:
    """A GPT-2 in double precision, and the same with linear layers in place of each Conv1D."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(3)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=12, n_inner=20, vocab_size=17, n_positions=16)
    model = GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    plain = copy.deepcopy(model)
    for path, layer in [(path, layer) for path, layer in plain.named_modules() if isinstance(layer, Conv1D)]:
        linear = nn.Linear(*layer.weight.shape).double()
        linear.weight.data, linear.bias.data = layer.weight.detach().t().clone(), layer.bias.detach().clone()
        plain.set_submodule(path, linear)
    return model, plain


@pytest.mark.parametrize("init", ["gradmax", "gradmax, rows drawn", "north", "north on batches"])
@pytest.mark.parametrize("method", METHODS)
def test_conv1d_of_gpt2_gets_the_values_of_a_linear_layer(method: str, init: str) -> None:
    tokens = [torch.randint(17, (3, 9), generator=torch.Generator().manual_seed(seed)) for seed in (5, 6)]

    def language(model: nn.Module, batch: Tensor) -> Tensor:
        result: Tensor = F.cross_entropy(model(batch).logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        return result

    made = {
        "gradmax": lambda: outgrow.GradMax(tokens, language),
        "gradmax, rows drawn": lambda: outgrow.GradMax(tokens, language, rows="drawn"),
        "north": outgrow.North,
        "north on batches": lambda: outgrow.North(tokens, language),
    }
    (model, plain), fresh = gpt2(), torch.randint(17, (2, 7), generator=torch.Generator().manual_seed(7))
    want, where = model(fresh).logits, "transformer.h.*.mlp.c_fc"
    torch.testing.assert_close(plain(fresh).logits, want)
    how = METHODS[method](init=made[init]())
    if (method, init) in WITHOUT_EFFECT:
        with pytest.raises(outgrow.GrowthError, match="it has no effect"):
            outgrow.widen(model, tokens[0], where, by=6, method=how)
        return
    for one in (model, plain):
        outgrow.widen(one, tokens[0], where, by=6, method=how)
        torch.testing.assert_close(one(fresh).logits, want, rtol=1e-11, atol=1e-11)
    for block, other in zip(model.transformer.h, plain.transformer.h, strict=True):
        assert block.mlp.c_fc.weight.shape == (12, 26)
        if init != "gradmax, rows drawn":  # drawn values depend on the shape of the stored weight
            torch.testing.assert_close(block.mlp.c_fc.weight, other.mlp.c_fc.weight.t())
        if method != "r2r" or init.startswith("gradmax"):
            torch.testing.assert_close(block.mlp.c_proj.weight, other.mlp.c_proj.weight.t())


def test_scores_of_conv1d_are_those_of_a_linear_layer() -> None:
    tokens = [torch.randint(17, (3, 9), generator=torch.Generator().manual_seed(5))]
    found = []
    for model in gpt2():
        scores = outgrow.scores(model, tokens, lambda m, b: m(b, labels=b).loss, tokens[0])
        found.append({score.volume: (score.gain, score.rank) for score in scores.volumes if "mlp" in score.volume})
    assert sorted(found[0]) == sorted(found[1]) == [f"transformer.h.{block}.mlp.c_fc" for block in (0, 1)]
    for name, values in found[0].items():
        assert values == pytest.approx(found[1][name])
