"""Gains of gated MLPs, heads and streams against matrices that are built by hand, and against one small step of training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outgrow
from outgrow.scoring.ranking import Score

torch.manual_seed(0)
BATCHES = [(torch.randn(6, 5, 6).double(), torch.randn(6, 5, 3).double()) for _ in range(2)]
RATE = 1e-5


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    result: Tensor = (model(batch[0]) - batch[1]).square().mean()
    return result


def whole_loss(model: nn.Module) -> Tensor:
    return torch.stack([squares(model, batch) for batch in BATCHES]).mean()


def randomised(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model.double()


def score_of(model: nn.Module, volume: str, factor: float) -> Score:
    found = outgrow.scores(model, BATCHES, squares, factor=factor)[volume]
    assert isinstance(found, Score)
    return found


def output_gradients(model: nn.Module, layer: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The input of a layer and the gradient of the loss at its output, for one of the two batches."""
    kept: list[Tensor] = []

    def note(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        kept.extend((given[0].detach(), output))

    handle = layer.register_forward_hook(note)
    squares(model, batch).backward()
    handle.remove()
    model.zero_grad()
    gradient = kept[1].grad
    assert gradient is not None
    return kept[0], gradient / len(BATCHES)


def step_on(model: nn.Module, rows: list[Tensor]) -> float:
    """The decrease of the loss by one step on some tensors that are parts of parameters, per rate."""
    before = whole_loss(model)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(before, parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            for row in rows:
                if row.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr():
                    place = row.storage_offset() // max(parameter.stride(0), 1)
                    row -= RATE * gradient[place : place + len(row)]
        return float(before - whole_loss(model)) / RATE


class Gated(nn.Module):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, hidden), nn.Linear(6, hidden), nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


def test_a_gated_unit_with_the_best_column_lowers_the_loss_by_its_gain() -> None:
    model = randomised(Gated())
    matrix = torch.zeros(3, 6).double()
    for batch in BATCHES:
        _, gradient = output_gradients(model, model.down, batch)
        kernel = F.silu(model.gate(batch[0]))[..., 0].detach()  # of unit 0, whose gate the new unit has
        matrix += torch.einsum("bto,bt,bti->oi", gradient, kernel, batch[0])
    left, values, _ = torch.linalg.svd(matrix)
    norm = model.down.weight.detach().norm(dim=0).mean()
    score = score_of(model, "gate", 1.125)
    assert (score.new, score.size, score.rank) == (1, 8, None)
    assert score.gain == pytest.approx(float((norm * values[0]) ** 2), rel=0.02)
    assert score.singular_values[0] == pytest.approx(float(values[0]), rel=0.02)

    grown = Gated(9).double()
    with torch.no_grad():
        for name, layer in grown.named_children():
            old = model.get_submodule(name)
            layer.weight[tuple(slice(size) for size in old.weight.shape)] = old.weight  # type: ignore[index, union-attr]
            layer.bias[: len(old.bias)] = old.bias  # type: ignore[index, union-attr, arg-type]
        grown.gate.weight[8], grown.gate.bias[8] = model.gate.weight[0], model.gate.bias[0]
        grown.up.weight[8], grown.up.bias[8] = 0.0, 0.0
        grown.down.weight[:, 8] = norm * left[:, 0]
    assert step_on(grown, [grown.up.weight[8:]]) == pytest.approx(score.gain, rel=0.02)


class Attention(nn.Module):
    """Two heads of four entries."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(*sizes, bias=False) for sizes in ((6, 8), (6, 8), (6, 8), (8, 3)))

    def patterns(self, x: Tensor) -> Tensor:
        q, k = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k))
        return (q @ k.transpose(-1, -2) / 2).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        v = self.v(x).unflatten(-1, (-1, 4)).transpose(1, 2)
        result: Tensor = self.o((self.patterns(x) @ v).transpose(1, 2).flatten(2))
        return result


def test_a_head_with_the_best_columns_has_the_gain_of_its_four_entries() -> None:
    model = randomised(Attention())
    matrix = torch.zeros(3, 6).double()
    for batch in BATCHES:
        _, gradient = output_gradients(model, model.o, batch)
        mixed = model.patterns(batch[0])[:, 0].detach() @ batch[0]  # attention of the first head
        matrix += torch.einsum("bto,bti->oi", gradient, mixed)
    norm, values = model.o.weight.detach().norm(dim=0).mean(), torch.linalg.svdvals(matrix)
    found = outgrow.scores(model, BATCHES, squares, factor=1.5)
    (score,) = found.volumes
    assert (score.kind, score.new, score.size) == ("heads", 1, 2)
    assert score.gain == pytest.approx(float((norm * values).square().sum()), rel=0.02)


def test_entries_of_a_group_have_a_column_in_each_of_its_query_heads() -> None:
    torch.manual_seed(3)
    model = tiny_llama().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    tokens = torch.randint(32, (3, 6))
    first = model.model.layers[0].self_attn
    kept: list[Tensor] = []
    handles = [
        first.v_proj.register_forward_hook(lambda module, given, output: kept.append(given[0].detach())),
        first.o_proj.register_forward_hook(lambda module, given, output: (output.retain_grad(), kept.append(output))[0]),
    ]
    result = model(input_ids=tokens, labels=tokens, output_attentions=True)
    result.loss.backward()
    for handle in handles:
        handle.remove()
    gradient = kept[1].grad
    assert gradient is not None
    mixed = result.attentions[0][:, :2].detach() @ kept[0][:, None]  # of the two query heads of the first group
    matrix = torch.einsum("bto,bhti->hoi", gradient, mixed).flatten(0, 1)
    columns = first.o_proj.weight.detach().T.unflatten(0, (2, 2, 4)).transpose(1, 2).flatten(2).flatten(0, 1)
    norm, values = columns.norm(dim=1).mean(), torch.linalg.svdvals(matrix)[:4]
    found = outgrow.scores(model, [tokens], lambda model, batch: model(input_ids=batch, labels=batch).loss, factor=1.5)
    score = found["model.layers.0.self_attn.q_proj"]
    assert isinstance(score, Score)
    assert (score.kind, score.new, score.grain, score.size) == ("heads", 1, 2, 4)
    assert score.gain == pytest.approx(float((norm * values).square().sum()), rel=0.02)
    assert " 4 → 6 " in str(found)
    assert found.refused["model.layers.0.self_attn.q_proj#2"].startswith("new query heads read values")
    kinds = sorted(score.kind or "" for score in found.volumes)
    assert kinds == ["heads", "mlp", "width"]
    assert [place.place for place in found.places] == ["model.layers.0"]


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=32, num_hidden_layers=1, max_position_embeddings=16, attn_implementation="eager", **sizes)
    return LlamaForCausalLM(config).eval()


class Stream(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.RMSNorm) -> None:
        super().__init__()
        self.stem, self.up, self.down, self.head = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(4, 8), nn.Linear(8, 3)
        self.norm, self.last = norm(8), norm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        result: Tensor = self.head(self.last(x + self.down(self.up(self.norm(x)).tanh())))
        return result


def stream_columns(model: Stream, start: int = 0) -> Tensor:
    return torch.cat([model.up.weight[:, start:], model.head.weight[:, start:]]).detach().T


def test_a_stream_has_the_gain_of_all_pairs_of_a_reader_and_a_writer_before_it() -> None:
    model = randomised(Stream())
    with torch.no_grad():
        model.norm.weight.fill_(1.0), model.last.weight.fill_(1.0)
    matrix = torch.zeros(4 + 3, 6 + 4).double()
    for batch in BATCHES:
        into_down = output_gradients(model, model.down, batch)[0]
        at_up, at_head = (output_gradients(model, layer, batch)[1] for layer in (model.up, model.head))
        stem = model.stem(batch[0]).detach()
        end = stem + model.down(into_down).detach()
        first, second = (value.square().mean(-1, keepdim=True).rsqrt() for value in (stem, end))
        matrix[:4, :6] += torch.einsum("bto,bti->oi", at_up * first, batch[0])  # the down layer comes after the up layer
        matrix[4:, :6] += torch.einsum("bto,bti->oi", at_head * second, batch[0])
        matrix[4:, 6:] += torch.einsum("bto,bti->oi", at_head * second, into_down)
    norm, values = stream_columns(model).norm(dim=1).mean(), torch.linalg.svdvals(matrix)[:2]
    score = score_of(model, "stem", 1.25)
    assert (score.new, score.kind) == (2, "width")
    assert score.gain == pytest.approx(float((norm * values).square().sum()), rel=0.03)


def test_no_columns_of_a_stream_under_layer_norms_do_better() -> None:
    model = randomised(Stream(nn.LayerNorm))
    assert isinstance(model, Stream)
    gain, norm = score_of(model, "stem", 1.25).gain, stream_columns(model).norm(dim=1).mean()
    outgrow.widen(model, BATCHES[0][0], "stem", by=2, method="mean")
    measured = []
    for seed in range(30):
        torch.manual_seed(seed)
        drawn = norm * torch.linalg.qr(torch.randn(7, 2).double())[0]
        with torch.no_grad():
            model.up.weight[:, 8:], model.head.weight[:, 8:] = drawn[:4], drawn[4:]
        gradients = torch.autograd.grad(whole_loss(model), [model.stem.weight, model.down.weight])
        measured.append(sum(float(gradient[8:].square().sum()) for gradient in gradients))
    assert 0.99 * max(measured) < gain < 20 * max(measured)


def test_reasons_are_those_of_the_volume() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), Sum(), nn.Flatten(), nn.Linear(100, 3)).double()
    batches = [(torch.randn(4, 1, 5, 5).double(), torch.randn(4, 3).double())]
    found = outgrow.scores(model, batches, squares)
    assert found.refused["0"].endswith("divides rows of zero by their deviation")
    with pytest.raises(KeyError, match="'0' has no score: several tensors write it, and a batch norm"):
        print(found["0"])
    with pytest.raises(KeyError, match="no volume or place with a score is called 'zero': there are "):
        print(found["zero"])


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.conv(x)
        return result


def test_the_model_that_the_loss_gets_must_be_used() -> None:
    model = randomised(Gated())
    with pytest.raises(outgrow.GrowthError, match="use the model that it gets"):
        outgrow.scores(model, BATCHES, lambda unused, batch: (model(batch[0]) - batch[1]).square().mean().detach())


class Grouped(nn.Module):
    """Channels of a convolution whose reader has two groups: groups of channels can be added, or channels to each group."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.b = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.c = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))).mean((2, 3)))
        return y


def best_channel_per_group(model: Grouped, x: Tensor, y: Tensor) -> float:
    """The largest gain of one more channel in each group, by power iteration on a network that is built by hand."""
    larger = Grouped().double()
    larger.a, larger.b = nn.Conv2d(3, 10, 3, padding=1).double(), nn.Conv2d(10, 8, 3, padding=1, groups=2).double()
    old, new = [0, 1, 2, 3, 5, 6, 7, 8], [4, 9]
    larger.c = model.c
    norm = model.b.weight.detach().movedim(1, 0).flatten(1).norm(dim=1).mean()
    a, b = larger.a.weight, larger.b.weight
    with torch.no_grad():
        a[old], larger.a.bias[old] = model.a.weight, model.a.bias  # type: ignore[index]
        b[:, :4] = model.b.weight
        larger.b.bias.copy_(model.b.bias)  # type: ignore[union-attr, arg-type]
        larger.a.bias[new] = 0.0  # type: ignore[index]
    columns = torch.ones(8, 3, 3, dtype=torch.float64)
    gain = 0.0
    for _ in range(60):
        with torch.no_grad():
            a[new], b[:, 4] = 0.0, norm * columns / columns.norm()
        (down,) = torch.autograd.grad(F.cross_entropy(larger(x), y), [a])
        gain = float(down[new].square().sum())
        with torch.no_grad():
            a[new], b[:, 4] = 1e-4 * down[new], 0.0
        (back,) = torch.autograd.grad(F.cross_entropy(larger(x), y), [b])
        columns = back[:, 4]
    return gain


@pytest.mark.parametrize("seed", [1028, 1035, 1042, 1])  # with the first three, one draw of columns leaves the loss by chance
def test_directions_of_a_grouped_convolution_are_scored_each_by_itself(seed: int) -> None:
    torch.manual_seed(seed)
    x, y = torch.randn(4, 3, 32, 32).double(), torch.tensor([0, 1, 2, 3])
    torch.manual_seed(0)
    model = Grouped().double()
    found = outgrow.scores(model, [(x, y)], lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
    assert sorted(score.volume for score in found.volumes) == ["a", "a#2", "b"]
    inner = found["a#2"]
    assert isinstance(inner, Score)
    assert inner.gain == pytest.approx(best_channel_per_group(model, x, y), rel=0.05)


@pytest.mark.parametrize("seed", [1, 5, 6])  # rounding of the grown weights moves the loss
def test_a_stream_has_its_gain_in_half_precision_too(seed: int) -> None:
    torch.manual_seed(seed)
    model, tokens = tiny_llama(), torch.randint(32, (3, 6))
    exact, rounded = (
        outgrow.scores(one, [tokens], lambda model, batch: model(input_ids=batch, labels=batch).loss)["model.embed_tokens"].gain
        for one in (copy.deepcopy(model), model.bfloat16())
    )
    assert rounded == pytest.approx(exact, rel=0.05)
