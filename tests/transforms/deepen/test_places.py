"""Methods that `outgrow.places` lists work, and the reasons against the others are true."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outgrow
from outgrow.errors import MethodError
from tests.helpers import layer_blocks as b
from tests.helpers.block_stacks import Encoder, Skewed, Sum
from tests.helpers.judging import assert_same_function, shake, state_of

X = torch.randn(3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def mlp(width: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 8), nn.SiLU(), nn.Linear(8, width))


def chain(*blocks: nn.Module) -> nn.Module:
    return shake(nn.Sequential(nn.Linear(5, 6), nn.Sequential(*blocks), nn.Linear(6, 2)).double())


def offered(model: nn.Module, x: Tensor = X) -> dict[str, tuple[str, ...]]:
    before = state_of(model)
    found = {place.name: place.methods for place in outgrow.places(model, x)}
    assert state_of(model) == before
    return found


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("subtracted", ""),
        ("there and back", ""),
        ("rolled", ""),
        ("negated", "its input is multiplied by -1"),
        ("doubled", "its input is multiplied by 2"),
        ("averaged", "its skip is not the identity"),
        ("flipped", "its skip is not the identity"),
    ],
)
def test_what_stands_on_a_skip(how: str, words: str) -> None:
    model = chain(Skewed(6, mlp(), how), Skewed(6, mlp(), how))
    old = copy.deepcopy(model)
    assert ("r2r" in offered(model)["1.1"]) == (not words)
    if words:
        with pytest.raises(MethodError, match=words):
            outgrow.deepen(model, X, "1.1", method="r2r")
    else:
        outgrow.deepen(model, X, "1.1", method="r2r", count=2)
        assert_same_function(old, model, [X, X[:2]])


@pytest.mark.parametrize(
    ("first", "second", "grows"),
    [("relu", "relu", True), ("relu6", "relu", True), ("nothing", "relu", False), ("relu", "relu6", False)],
)
def test_an_activation_after_the_sum_must_leave_alone_what_comes_in(first: str, second: str, grows: bool) -> None:
    """Only the second block can be copied, for the first has a single layer; its input has passed the first's activation."""
    model = chain(Sum(6, nn.Linear(6, 6), first), Sum(6, mlp(), second))
    old = copy.deepcopy(model)
    assert ("r2r-paper" in offered(model)["1.0"]) == grows
    if grows:
        outgrow.deepen(model, X, "1.0")
        assert len(model[1]) == 3
        assert_same_function(old, model, [X, X[:2]])
    else:
        with pytest.raises(MethodError, match="no block of the model's own kind can follow it"):
            outgrow.deepen(model, X, "1.0", method="r2r-paper")


def test_an_activation_that_is_none_before_one_that_is() -> None:
    model = chain(Sum(6, mlp()), Sum(6, mlp(), "relu"))
    old = copy.deepcopy(model)
    outgrow.deepen(model, X, "1.0", count=3)
    assert [type(block.after) for block in model[1]] == [nn.Identity] * 4 + [nn.ReLU]
    assert_same_function(old, model, [X])


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 12)

    def forward(self, x: Tensor) -> Tensor:
        return F.glu(self.project(x), dim=-1)


def test_operators_that_are_no_function_of_single_values_are_evaluated_without_harm() -> None:
    assert "r2r-paper" not in offered(chain(Gate(), Gate()))["1.1"]
    model = chain(*(Sum(6, nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 12), nn.GLU())) for _ in range(2)))
    old = copy.deepcopy(model)
    outgrow.deepen(model, X, "1.0", method="r2r-paper")
    assert_same_function(old, model, [X])


def test_pre_norm_and_post_norm_blocks_in_one_list_are_distinguished() -> None:
    def block(before: bool) -> nn.Module:
        return Encoder(6, b.Attention(6, 2, 3, "qkv", "rest", True, True), mlp(), before)

    for turn in (True, False):
        model = chain(block(turn), block(not turn))
        old = copy.deepcopy(model)
        outgrow.deepen(model, X, "1.1", count=2)
        assert all(new.before for new in model[1][2:])
        assert_same_function(old, model, [X])


def test_pairs_before_a_batch_norm_are_promised_only_where_there_is_something_to_pair() -> None:
    def thin() -> nn.Module:
        return Sum(6, nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)))

    model, x = nn.Sequential(nn.Conv2d(3, 6, 3), thin(), thin()).double(), torch.randn(4, 3, 7, 7).double()
    assert offered(shake(model), x)["1"] == ("r2r", "residual")
    with pytest.raises(MethodError, match="needs two layers"):
        outgrow.deepen(model, x, "1", method="r2r-paper")


def test_layers_whose_weights_others_look_at_are_not_put_into_a_container() -> None:
    model = chain(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True))
    assert offered(model)["1.0.linear1"] == ()
    for method, fade in (("residual", None), ("netmorph", None), ("net2net", 3)):
        with pytest.raises(MethodError, match="uses more than its output"):
            outgrow.deepen(model, X, "1.0.linear1", method=method, fade=fade)


def test_blocks_that_are_never_the_identity_can_be_copied_nevertheless() -> None:
    model = chain(Sum(6, mlp(), "gelu"), Sum(6, mlp(), "gelu"))
    assert not outgrow.deepen(model, X, "1.1", method="copy").preserving
    assert len(model[1]) == 3


def test_a_module_with_children_of_one_class_is_not_always_a_container_of_blocks() -> None:
    """Its code runs the children that it knows; layers of our own can follow one of them nevertheless."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (nn.Sequential(Sum(6, mlp())) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    model = chain(Pair())
    old = copy.deepcopy(model)
    assert offered(model)["1.0.one"] == ("r2r", "residual")
    outgrow.deepen(model, X, "1.0.one", method="r2r", count=2)
    assert isinstance(model[1][0].one[1], outgrow.ResidualBlock)
    assert_same_function(old, model, [X])


def test_a_layer_under_two_names_is_left_alone() -> None:
    """Behind one of them the new block would not be run."""

    class Alias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(6, 6)
            self.two = self.one

        def forward(self, x: Tensor) -> Tensor:
            return self.two(x)

    model = chain(Alias())
    assert offered(model)["1.0.one"] == ()
    with pytest.raises(MethodError, match="holds it under several names"):
        outgrow.deepen(model, X, "1.0.one")


def test_a_list_is_judged_by_itself() -> None:
    """Blocks that are called with two tensors can't be put into an nn.Sequential; layers of another list can."""

    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Bilinear(6, 6, 6) for _ in range(2))
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block, layer in zip(self.blocks, self.layers, strict=True):
                x = torch.tanh(layer(block(x, x)))
            return x

    model = chain(Lists())
    old = copy.deepcopy(model)
    assert offered(model)["1.0.layers.1"] == ("r2r", "residual", "netmorph")
    assert offered(model)["1.0.blocks.1"] == ()
    outgrow.deepen(model, X, "1.0.layers.1")
    assert_same_function(old, model, [X])


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = mlp()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.f(x)
        return result


class ReadsValues(nn.Module):
    """Its code reads values, so it does not run on the meta device; `order`: how it runs its blocks."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.stem, self.blocks, self.order = nn.Linear(5, 6), nn.ModuleList(Residual() for _ in range(3)), order

    def forward(self, x: Tensor) -> Tensor:
        assert not (x != x).any()
        x = self.stem(x)
        for number in range(3 if self.order == "fixed" else len(self.blocks)):
            x = self.blocks[number](x) * (1.0 + number if self.order == "scaled" else 1.0)
        return x


@pytest.mark.parametrize(("order", "own"), [("all", True), ("fixed", False), ("scaled", False)])
def test_models_that_read_values_take_few_passes(order: str, own: bool) -> None:
    model, passes = shake(ReadsValues(order).double()), []
    model.register_forward_pre_hook(lambda *given: passes.append(given[1][0].device.type))
    places = {place.name: place for place in outgrow.places(model, X)}
    assert passes.count("cpu") == 4  # modules' calls, modules in containers, operators, one block more
    assert [places[f"blocks.{number}"].own for number in range(3)] == [own] * 3


class Odds(nn.Module):
    """Modules of all kinds outside containers: norms, dropout, a module of its own, one with two arguments, a shared one."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.stem, self.n, self.drop = nn.LayerNorm(3), nn.Linear(3, 4), nn.LayerNorm(4), nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Plus() for _ in range(2))
        self.inner, self.mix = Inner(), nn.Bilinear(4, 4, 4)
        self.shared = self.again = nn.BatchNorm1d(4)
        self.unused, self.flat, self.head = nn.Linear(4, 4), nn.Flatten(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.n(self.stem(self.early(x))))
        for block in self.blocks:
            x = block(x)
        return self.head(self.flat(self.shared(self.mix(self.inner(x), x))))


class Plus(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(x))


def test_places_lists_exactly_what_deepen_accepts() -> None:
    """For every module and every method, by trying."""
    torch.manual_seed(0)
    model, x = Odds(), torch.randn(5, 3)
    listed = {(place.name, method) for place in outgrow.places(model, x) for method in place.methods}
    accepted = set()
    for name, _ in model.named_modules(remove_duplicate=False):
        for method in ("r2r", "r2r-paper", "residual", "net2net", "netmorph"):
            try:
                growth = outgrow.deepen(copy.deepcopy(model), x, name, method=method)
            except outgrow.GrowthError:
                continue
            assert growth.preserving
            accepted.add((name, method))
    assert accepted == listed
    names = {name for name, _ in accepted}
    assert {"n", "drop", "stem", "blocks.0", "blocks.1", "inner", "inner.act"} <= names
    assert not {"", "early", "mix", "blocks", "shared", "again", "unused"} & names


@pytest.mark.parametrize("method", ["r2r", "r2r-paper"])
def test_what_is_offered_for_one_block_holds_for_two(method: str) -> None:
    """A dropout and a stack that keep the same shape are not kinds of blocks that take turns."""
    stack = nn.Sequential(*(Sum(6, mlp()) for _ in range(3)))
    model = shake(nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), stack, nn.Flatten(), nn.Linear(24, 2)).double())
    places = [place.name for place in outgrow.places(model, X) if method in place.methods]
    assert {"2", "2.0", "2.1", "2.2"} <= set(places)
    for name in places:
        grown = copy.deepcopy(model)
        outgrow.deepen(grown, X, name, count=2, method=method)
        assert_same_function(model, grown, [X], modes=[False])
