"""The check of a growth within a run: brief by default, but no wrong growth passes it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import outgrow
import outgrow.integrations.lightning.callback
from outgrow.apply import apply_plan as apply
from outgrow.errors import GrowthError, VerifyError
from outgrow.verify import brief_check as brief
from outgrow.verify import outputs as verify
from tests.helpers.run_scenes import Scene, refused
from tests.helpers.small_runs import X, at, mlp

Seen = list[tuple[bool, tuple[int, ...]]]  # for each pass of a model: whether in train mode, and the shape of its input


def watched(model: nn.Module) -> Seen:
    """A list that collects the passes of a model, except for those on the meta device."""
    seen: Seen = []

    def note(module: nn.Module, args: Any) -> None:
        if not args[0].is_meta:
            seen.append((module.training, tuple(args[0].shape)))

    model.register_forward_pre_hook(note)
    return seen


def network(act: Callable[[], nn.Module] = nn.GELU, **options: Any) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), act(), nn.Linear(8, 8), act(), nn.Linear(8, 3)).to(**options)


def grown(model: nn.Module, *transforms: Any, example: Any = X, **options: Any) -> Seen:
    """The passes of one growth in a run."""
    optimizer = SGD(model.parameters(), lr=0.1)
    run = outgrow.Run(model, example, optimizer, [at(1, *transforms)], quiet=True, **options)
    seen = watched(model)
    growth = run.step()
    assert growth is not None
    assert len(run.records) == 1
    assert (run.records[0].error == growth.max_error) or options.get("check") is False
    return seen


HIDDEN = outgrow.Widen("0", to=12)
ONCE, WHOLE = (1, 4), (6, 4)


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        (True, [(False, ONCE)] * 2),
        ("full", [(False, WHOLE), (True, WHOLE)] * 2),
        (False, []),
    ],
)
def test_passes_of_a_growth(check: Any, expected: Seen) -> None:
    assert grown(network(dtype=torch.float64), HIDDEN, check=check) == expected


def test_new_blocks_are_planned_by_the_dry_run_too() -> None:
    for transform in (outgrow.Deepen("1"), outgrow.Branch("2"), outgrow.Deepen("2", method="netmorph")):
        assert grown(network(dtype=torch.float64), transform) == [(False, ONCE)] * 2


def test_batch_statistics_of_a_new_norm_need_the_thorough_check() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2)).double()
    image = torch.randn(6, 1, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert (True, tuple(image.shape)) in grown(model, outgrow.Deepen("2", method="net2net"), example=image)
    assert isinstance(model[3], nn.Sequential)


def test_a_fade_in_progress_needs_the_thorough_check() -> None:
    model = mlp()
    run = outgrow.Run(model, X, SGD(model.parameters(), lr=0.1), [at(1, outgrow.Deepen("blocks.0", fade=9)), at(2)], quiet=True)
    run.step()
    seen = watched(model)
    assert run.step() is not None
    assert (True, WHOLE) in seen


def test_errors_above_the_floor_are_compared_with_the_networks_sensitivity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "FLOOR", -1.0)  # below the smallest error: on some CPUs this growth changes nothing at all
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    assert grown(network(dtype=torch.float32), outgrow.Widen("*", factor=2), example=x) == [(False, ONCE)] * 3


def test_a_part_on_which_the_model_does_not_run_is_not_used() -> None:
    model = network(dtype=torch.float64)
    run = outgrow.Run(model, X, SGD(model.parameters(), lr=0.1), [at(1, HIDDEN)], quiet=True)
    assert run._brief is not None
    run._brief.lengths = (1, 3)  # one feature too few
    seen = watched(model)
    assert run.step() is not None
    assert seen == [(False, (1, 3)), *[(False, WHOLE), (True, WHOLE)] * 2]


def test_the_reported_error_is_that_of_the_sample() -> None:
    errors = []
    for seed in range(6):  # how often rounding changes nothing depends on the CPU
        model = network(dtype=torch.float32)
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
        run = outgrow.Run(model, x, SGD(model.parameters(), lr=0.1), [at(1, outgrow.Widen("*", factor=2))], quiet=True)
        with torch.no_grad():
            before = model(x[:1])
            run.step()
            after = model(x[:1])
        errors.append(float((before.double() - after.double()).abs().max() / before.double().abs().max()))
        assert run.records[0].error == pytest.approx(errors[-1])
    assert max(errors) > 0


class Counted(nn.Module):
    """Its outputs depend on the number of its blocks, which shapes do not reveal."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x) * (1 + 1e-3 * len(self.inner.blocks))
        return result


@pytest.mark.parametrize("check", [True, "full"])
def test_code_that_depends_on_the_number_of_blocks_is_detected(check: Any) -> None:
    scene = Scene()
    scene.model = Counted()  # type: ignore[assignment]
    scene.optimizer = torch.optim.AdamW(scene.model.parameters(), lr=1e-2)
    run = scene.run([at(1, outgrow.Deepen("inner.blocks.0"))], scheduler=None, average=None, check=check)
    with refused(scene, VerifyError, "differs from the old one in eval mode", run):
        run.step()


@pytest.mark.parametrize("check", [True, "full", False])
@pytest.mark.parametrize("place", [0, -1], ids=["old", "new"])
@pytest.mark.parametrize("name", ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight"])
def test_one_wrong_entry_is_detected(name: str, place: int, check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One old or new entry of one tensor is wrong by a thousandth."""
    real = apply.fill_values

    def spoil(new: Tensor, old: Tensor, edits: Any, *rest: Any) -> None:
        real(new, old, edits, *rest)
        if edits[0].tensor == name and not new.is_meta:
            new.view(-1)[place] += 1e-3

    scene = Scene()
    scene.model = network(dtype=torch.float64)  # type: ignore[assignment]
    scene.optimizer = torch.optim.AdamW(scene.model.parameters(), lr=1e-2)
    run = scene.run([at(1, outgrow.Widen("*", factor=1.5))], scheduler=None, average=None, check=check)
    monkeypatch.setattr(apply, "fill_values", spoil)
    if check is False:
        assert run.step() is not None
        return
    with refused(scene, VerifyError, "differs from the old one in eval mode", run):
        run.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_checked_in_float32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of a tenth, a few units in the last place of bfloat16, is detected."""
    assert grown(network(dtype=dtype), outgrow.Widen("*", factor=1.5), example=X.to(dtype)) == [(False, ONCE)] * 2
    real = verify.check

    def spoil(model: nn.Module, *rest: Any) -> Any:
        with torch.no_grad():
            model[4].weight.mul_(1.1)
        return real(model, *rest)

    monkeypatch.setattr(verify, "check", spoil)
    with pytest.raises(VerifyError, match="differs from the old one"):
        grown(network(dtype=dtype), HIDDEN, example=X.to(dtype))


class Trained(nn.Module):
    """In train mode, it also returns the norm of the hidden vector, or the output of another head."""

    def __init__(self, more: str) -> None:
        super().__init__()
        self.up, self.down, self.more = nn.Linear(4, 8), nn.Linear(8, 3), more
        if more == "head":
            self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        hidden = nn.functional.gelu(self.up(x))
        if not self.training:
            return self.down(hidden)
        return self.down(hidden), self.head(hidden) if self.more == "head" else hidden.norm(dim=1)


@pytest.mark.parametrize("more", ["head", "length"])
def test_code_that_runs_only_in_train_mode_needs_the_thorough_check(more: str) -> None:
    torch.manual_seed(0)
    model = Trained(more).double()
    assert brief.plan_brief_check(model, X) is None
    if more == "head":
        assert (True, WHOLE) in grown(model, outgrow.Widen("up", to=12))
        return
    with pytest.raises(VerifyError, match="in train mode"):  # in eval mode nothing differs
        grown(model, outgrow.Widen("up", to=12, method="r2r"))


class Noisy(nn.Module):
    """The usual differences of train mode: batch statistics, dropout of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.attend = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True, norm_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.norm(self.conv(x)).relu(), 0.1, self.training).flatten(2).mT
        if self.training:
            x = x * torch.empty(len(x), 1, 1).to(x).bernoulli_(0.9).div_(0.9)
        result: Tensor = self.head(self.attend(x).mean(1))
        return result


def test_noise_and_batch_statistics_do_not_need_it() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 3, 6, 6)
    model = Noisy()
    before, dice = model.state_dict(), torch.get_rng_state()
    found = brief.plan_brief_check(model, x)
    assert found is not None
    assert (found.lengths, found.drops) == ((1, 3, 6, 6), True)
    assert torch.equal(dice, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert grown(model, outgrow.Widen("attend.linear1", to=24), example=x) == [(False, (1, 3, 6, 6))] * 2


class Mixing(nn.Module):
    """Subtracts the mean of all samples: for a single sample, nothing remains."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        result: Tensor = self.down(hidden - hidden.mean(0))
        return result


def test_examples_that_can_not_be_shortened_are_used_whole() -> None:
    torch.manual_seed(0)
    assert grown(Mixing().double(), outgrow.Widen("up", to=12)) == [(False, WHOLE)] * 2
    flattened = nn.Sequential(nn.Flatten(0), nn.Linear(24, 8), nn.GELU(), nn.Linear(8, 3)).double()  # needs six samples
    assert grown(flattened, outgrow.Widen("1", to=12)) == [(False, WHOLE)] * 2
    off = network(nn.ReLU, dtype=torch.float64)  # half of its units are inactive for one sample, not for all
    assert grown(off, HIDDEN) == [(False, WHOLE)] * 2


def test_parts_have_the_same_influence_as_the_whole() -> None:
    """Lengths are shortened together, as far as the model runs and its influences suffice; features are not."""
    torch.manual_seed(0)
    convolved = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    found = brief.plan_brief_check(convolved, torch.randn(2, 3, 256, 256))
    assert found is not None
    assert found.lengths == (1, 3, 64, 64)
    fixed = nn.Sequential(nn.Conv1d(3, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(8 * 126, 2))
    found = brief.plan_brief_check(fixed, torch.randn(2, 3, 128))
    assert found is not None
    assert found.lengths == (1, 3, 128)
    wide = nn.Sequential(nn.Linear(128, 8), nn.GELU(), nn.Linear(8, 2))
    found = brief.plan_brief_check(wide, torch.randn(2, 128))
    assert found is not None
    assert found.lengths == (1, 128)
    long = nn.Sequential(nn.Conv1d(3, 8, 100), nn.GELU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 2))
    found = brief.plan_brief_check(long, torch.randn(2, 3, 512))  # its kernel does not fit into 64
    assert found is not None
    assert found.lengths == (1, 3, 128)
    found = brief.plan_brief_check(Placed(), torch.arange(256).view(2, 128) % 50)
    assert found is not None
    assert found.lengths == (1, 128)


class Placed(nn.Module):
    """Each position has a vector of its own, on which shorter texts do not depend."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(1000, 8), nn.Embedding(128, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(torch.tanh(self.words(x) + self.places.weight[: x.shape[1]]))
        return result


@pytest.mark.parametrize("check", ["brief", "", None, 1, "FULL"])
def test_invalid_values_are_refused(check: Any) -> None:
    model = mlp()
    with pytest.raises(GrowthError, match=r"write True .*'full'.* or False"):
        outgrow.Run(model, X, SGD(model.parameters(), lr=0.1), [at(1)], quiet=True, check=check)


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*isinstance\\(treespec, LeafSpec\\)")
@pytest.mark.parametrize(("check", "expected"), [(True, [True]), ("full", [False])])
@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_trainers_have_the_same_option(
    library: str, check: Any, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, kinds = verify.before, []

    def note(*args: Any, **options: Any) -> Any:
        kinds.append(options.get("brief", False))
        return real(*args, **options)

    monkeypatch.setattr(verify, "before", note)
    if library == "lightning":
        from tests.helpers.lightning_fit import Fit

        grow = outgrow.lightning.Grow([at(1, outgrow.Widen("*", factor=1.5))], torch.ones(4, 1, 6, 6), "model", check=check)
        Fit(grow=grow, max_epochs=1)
    else:
        from tests.helpers import transformers_trainer as trainers

        one = trainers.trainer(tmp_path, schedule=[at(1, outgrow.Widen("*.mlp.*", factor=1.5))], max_steps=1)
        trainers.grow_of(one).check = check
        one.train()
    assert kinds == expected


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_trainers_refuse_invalid_values_at_once(library: str) -> None:
    import importlib

    with pytest.raises(GrowthError, match="check='some'"):
        importlib.import_module(f"outgrow.{library}").Grow([at(1)], X, check="some")


def test_large_values_are_not_taken_for_infinities() -> None:
    """Their sum may be infinite: then each value is checked."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    with torch.no_grad():
        model[2].bias.fill_(3e38)
    assert torch.isinf(model[2].bias.sum())
    outgrow.widen(model, torch.ones(2, 4), "0", to=12)
    assert model[0].out_features == 12


def test_the_quoted_figures_are_the_measured_ones() -> None:
    measured = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "brief.json").read_text())
    arms = measured["arms"]
    quoted = re.search(r"(\d+) growths of eleven of timm's\s.* up to (\d+) units", str(verify.__doc__), re.DOTALL)
    assert quoted is not None
    assert len({arm["model"] for arm in arms}) == 11
    assert [len(arms), math.ceil(max(arm["ulps"] for arm in arms))] == [int(figure) for figure in quoted.groups()]
    assert all(arm["passes"] == 2 and arm["ulps"] <= verify.FLOOR for arm in arms)
