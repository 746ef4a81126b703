"""Arguments of a growth: unusual models that work, and everything else refused with a readable GrowthError."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.errors import GrowthError, MethodError, OptimizerError, SelectionError, SizeError, TraceError
from tests.helpers.judging import random_states, state_of

X = torch.linspace(-1.0, 1.0, 12).view(3, 4)


def mlp(hidden: int = 8) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 2))


@pytest.mark.parametrize(
    ("example", "words"),
    [
        (torch.zeros(3, 5), "shapes cannot be multiplied"),
        (X.double(), "dtype"),
        (torch.zeros(3, 4, dtype=torch.long), "dtype"),
        (X.to("meta"), "device"),
        (X.numpy(), "ndarray"),
        (None, "NoneType"),
        ("text", "str"),
        (3, "int"),
        ((), "missing"),
        ({"nonsense": X}, "nonsense"),
    ],
    ids=lambda value: str(type(value).__name__),
)
def test_an_example_that_the_model_does_not_run_on(example: Any, words: str) -> None:
    model = mlp()
    before, dice = state_of(model), random_states()
    with pytest.raises(TraceError, match=f"(?s)does not run on the example.*{words}"):
        outgrow.widen(model, example, "0", to=12)
    assert state_of(model) == before
    assert random_states() == dice


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.fc = nn.Embedding(7, 4), nn.Linear(4, 2)

    def forward(self, words: torch.Tensor, scale: torch.Tensor, flag: bool = False) -> torch.Tensor:
        return self.fc(self.words(words) * scale)


WORDS = torch.zeros(3, 5, dtype=torch.long)


@pytest.mark.parametrize(
    ("model", "example", "place", "way_out"),
    [
        (mlp(), torch.zeros(3, 5), r"0: Linear\(.*\) failed on \(3, 5\) float32", "a batch of the training data"),
        (mlp(), X.double(), "0: Linear", r"pass example.to\(torch.float32\), or model.to\(torch.float64\)"),
        (mlp(), torch.zeros(3, 4, dtype=torch.long), "0: Linear", r"pass example.to\(torch.float32\)"),
        (mlp(), X.to("meta"), "0: Linear", "the model is on cpu, the example on meta"),
        (mlp(), X.numpy(), "0: Linear.*the example is of type ndarray", "torch.as_tensor"),
        (mlp(), (), "the model: .*the example is an empty tuple", "a tuple of positional arguments"),
        (mlp(), (X, X), "the model: ", r"forward takes \(input.*pass example=\(input,\)"),
        (Two(), WORDS, "the model: ", r"forward takes \(words: .*, scale: .*pass example=\(words, scale\)"),
        (Two(), {"words": WORDS, "size": X}, "the model: .*words=.*, size=", r"pass example=\(words, scale\), or a dict"),
        (Two(), (X, X), "words: Embedding", "pass integers"),
        (Two(), (WORDS + 7, torch.ones(())), "words: Embedding", "pass indices below 7"),
    ],
)
def test_a_wrong_example_is_reported_with_the_module_and_the_way_out(
    model: nn.Module, example: Any, place: str, way_out: str
) -> None:
    where = "0" if isinstance(model, nn.Sequential) else "words"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = [outgrow.At(step=5, grow=[outgrow.Widen(where, to=12)])]
    with pytest.raises(TraceError, match=f"(?s)does not run on the example.*- {place}.*instead: .*{way_out}"):
        outgrow.widen(model, example, where, to=12)
    with pytest.raises(TraceError, match=f"(?s)does not run on the example.*- {place}.*instead: .*{way_out}"):
        outgrow.Run(model, example, optimizer, schedule, quiet=True)


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"factor": 1.5, "to": 12},
        *({"factor": value} for value in (1, 0.5, -2.0, math.nan, math.inf, 1e30, True, "2", 2j, torch.ones(2))),
        *({"to": value} for value in (8, 4, 0, -1, 12.0, True, "12", 9, 10**12)),
        *({"by": value} for value in (0, -2, 2.0, True, "2")),
    ],
    ids=str,
)
def test_invalid_sizes_are_refused(sizes: dict[str, Any]) -> None:
    model = mlp()
    before = state_of(model)
    with pytest.raises(SizeError, match=r"factor=|to=|by=|size"):
        outgrow.widen(model, X, "0", method="r2r", **sizes)
    assert state_of(model) == before


@pytest.mark.parametrize("where", ["zzz", "", None, 3, [3], b"0", ["0", "zzz"], "zzz.*"])
def test_names_that_select_nothing(where: Any) -> None:
    with pytest.raises(SelectionError, match=r"outgrow.volumes|write a name or a glob"):
        outgrow.widen(mlp(), X, where, to=12)


@pytest.mark.parametrize("method", ["zzz", None, outgrow.R2R, ["r2r"]])
def test_invalid_methods_are_refused(method: Any) -> None:
    with pytest.raises(MethodError, match="there is no method"):
        outgrow.widen(mlp(), X, "0", to=12, method=method)


@pytest.mark.parametrize("init", ["nonsense", 3, None])
@pytest.mark.parametrize("kind", [outgrow.R2R, outgrow.MeanFill, outgrow.Net2Net, outgrow.NetMorph, outgrow.RandomPad])
def test_invalid_inits_are_refused(kind: Callable[..., Any], init: Any) -> None:
    with pytest.raises(MethodError, match="'std', 'he', 'xavier', 'copy'"):
        kind(init=init)


@pytest.mark.parametrize("wrong", [{"scale": math.nan}, {"scale": "1"}, {"noise": -1.0}, {"noise": math.inf}, {"noise": None}])
def test_scales_and_noises_that_are_not_numbers_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(MethodError, match="write a finite number"):
        outgrow.R2R(**wrong)


@pytest.mark.parametrize("result", [None, torch.zeros(3), 1.0])
def test_an_init_that_returns_something_else(result: Any) -> None:
    model = mlp()
    before = state_of(model)
    with pytest.raises(MethodError, match="must return a tensor of the requested shape"):
        outgrow.widen(model, X, "0", to=12, method=outgrow.R2R(init=lambda tensor, shape, generator: result))
    assert state_of(model) == before


def test_an_error_raised_by_an_init_names_it_and_the_growth_is_undone() -> None:
    model = mlp()
    before = state_of(model)
    with pytest.raises(MethodError, match=r"init=.*lambda.* failed for \S+ with ZeroDivisionError"):
        outgrow.widen(model, X, "0", to=12, method=outgrow.R2R(init=lambda tensor, shape, generator: 1 / 0))
    assert state_of(model) == before


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"optimizer": torch.optim.Adam(mlp().parameters())}, OptimizerError, "another model"),
        ({"optimizer": "adam"}, OptimizerError, "is no optimizer"),
        ({"optimizer": torch.optim.Adam}, OptimizerError, "is no optimizer"),
        ({"average": mlp(6)}, GrowthError, "of another model"),
        ({"average": nn.Linear(3, 3)}, GrowthError, "of another model"),
        ({"average": "ema"}, GrowthError, "pass a copy"),
        ({"seed": "a"}, GrowthError, "whole number"),
        ({"seed": None}, GrowthError, "whole number"),
        ({"residual": "zzz"}, MethodError, "'stream'"),
    ],
    ids=str,
)
def test_optimizers_and_averages_of_the_wrong_type_are_refused(
    options: dict[str, Any], kind: type[GrowthError], words: str
) -> None:
    model = mlp()
    before = state_of(model)
    with pytest.raises(kind, match=words):
        outgrow.widen(model, X, "0", to=12, **options)
    assert state_of(model) == before


def test_the_model_itself_is_refused_as_its_average() -> None:
    model = mlp()
    with pytest.raises(GrowthError, match="shares tensors"):
        outgrow.widen(model, X, "0", to=12, average=model)


@pytest.mark.parametrize("transforms", [(), ("0",), (None,), (outgrow.Widen,)])
def test_invalid_transforms_are_refused(transforms: tuple[Any, ...]) -> None:
    with pytest.raises(GrowthError, match=r"outgrow.Widen\('\*', factor=1.5\)"):
        outgrow.grow(mlp(), X, *transforms)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: None, "pass a torch.nn.Module"),
        (lambda: nn.Linear, "not an instance"),
        (lambda: nn.Sequential(nn.ReLU()), "no parameters"),
        (lambda: mlp().to("meta"), "meta device"),
        (lambda: nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 2)), "run the model once first"),
        (lambda: torch.export.export(mlp(), (X,)).module(), "torch.export"),
    ],
    ids=["none", "class", "empty", "meta", "lazy", "exported"],
)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_models_that_can_not_be_grown(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(GrowthError, match=words):
        outgrow.widen(make(), X, "*", factor=1.5)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.parametrize("compile_", [torch.jit.script, lambda model: torch.jit.trace(model, X)], ids=["script", "trace"])
@pytest.mark.parametrize("inside", [False, True])
def test_scripted_models_are_refused(compile_: Callable[[nn.Module], nn.Module], inside: bool) -> None:
    model = compile_(mlp())
    with pytest.raises(TraceError, match="grow the Python module"):
        outgrow.widen(nn.Sequential(model, nn.ReLU()) if inside else model, X, "*", factor=1.5)


def test_an_example_without_finite_outputs_is_refused() -> None:
    model = mlp()
    before = state_of(model)
    with pytest.raises(GrowthError, match="not finite in eval mode"):
        outgrow.widen(model, X * torch.nan, "0", to=12)
    assert state_of(model) == before
    outgrow.widen(model, torch.cat([X, X * torch.nan]), "0", to=12)  # the finite outputs are compared


class Talkative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        print("running")
        return self.inner(x)


def frozen() -> nn.Module:
    return mlp().requires_grad_(False)


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2)).train()


def compiled_inside() -> nn.Module:
    return nn.Sequential(torch.compile(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), backend="eager"), nn.Linear(8, 2))


@pytest.mark.parametrize(
    "make",
    [
        Talkative,
        frozen,
        dropping,
        compiled_inside,
        lambda: torch.compile(mlp(), backend="eager"),
        lambda: nn.DataParallel(mlp()),
        lambda: torch.fx.symbolic_trace(mlp()),
        lambda: mlp().half(),
        lambda: mlp().double(),
    ],
    ids=["prints", "frozen", "dropout", "compiled inside", "compiled", "data parallel", "fx", "half", "double"],
)
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_unusual_models_grow(make: Callable[[], nn.Module]) -> None:
    model = make()
    x = X.to(next(model.parameters()).dtype)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    model.eval()
    with torch.no_grad():
        want = model(x)
    for module, training in zip(model.modules(), modes, strict=True):
        module.training = training
    dice = random_states()
    growth = outgrow.widen(model, x, "*", factor=1.5)
    assert random_states() == dice
    assert growth.parameters[1] > growth.parameters[0]
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    model.eval()
    with torch.no_grad():
        off = (model(x) - want).abs().max() / want.abs().max()
    assert float(off) <= 20 * torch.finfo(x.dtype).eps


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_diverged_model_is_reported_as_such(bad: float) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        model[2].weight[0, 0] = bad
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for how in ({"method": "netmorph"}, {"method": "random"}, {}):
        with pytest.raises(outgrow.GrowthError, match=r"2\.weight: it holds NaN or infinity"):
            outgrow.widen(model, torch.randn(6, 4), "0", by=2, **how)
    assert all(
        torch.equal(a, b) or bool(a.isnan().any()) for a, b in zip(before.values(), model.state_dict().values(), strict=True)
    )


@pytest.mark.filterwarnings("ignore")  # torchao's import warns
def test_a_quantised_model_is_refused_with_the_way_out(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), torch.randn(2, 16)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    weight, before = model[0].weight, model(x)
    for attempt in (
        lambda: outgrow.volumes(model, x),
        lambda: outgrow.widen(model, x, "0", factor=2),
        lambda: outgrow.deepen(model, x, "1"),
        lambda: outgrow.save(model, tmp_path / "model.safetensors"),
    ):
        with pytest.raises(outgrow.GrowthError, match=r"0\.weight: it is of torchao's class(.|\n)*quantise the grown model"):
            attempt()
    assert model[0].weight is weight
    assert torch.equal(model(x), before)
    assert not list(tmp_path.iterdir())
