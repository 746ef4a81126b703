"""The training state of a Trainer's checkpoint, grown on the disk: training goes on as if the model had grown in memory."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import outgrow
from outgrow import Deepen, Widen
from outgrow.checkpoints.optimizer_groups import trainer_groups
from outgrow.checkpoints.plan_checkpoint import CheckpointPlan, plan_checkpoint
from outgrow.checkpoints.read_checkpoint import read_checkpoint
from outgrow.checkpoints.training_state import read_training_state
from outgrow.cli.main import main
from outgrow.errors import CheckpointError
from tests.helpers import trainer_checkpoints
from tests.helpers.checkpoints import family
from tests.helpers.trainer_checkpoints import SAVED, losses_of, resumed
from tests.helpers.training_run import assert_equal

transformers = pytest.importorskip("transformers")

places = pytest.mark.skipif(
    torch.__version__.startswith("2.6"), reason="this torch does not say where tensors lie in optimizer.pt"
)

ALL = [Widen(kind="mlp", factor=1.5), Widen(kind="width", to=24), Deepen(layers=6)]
CASES: dict[str, tuple[str, list[Any]]] = {
    "llama": ("llama", ALL),
    "tied, copies": ("gpt2", [Widen(kind="mlp", factor=1.5, method="net2net"), Deepen(layers=6)]),
}


def built(name: str = "llama") -> Any:
    model: Any = family(name).build().train()
    for part in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if hasattr(model.config, part):
            setattr(model.config, part, 0.0)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


class GrowAfter(transformers.TrainerCallback):  # type: ignore[misc]
    """Grows the model and its optimizer in memory, after the step whose checkpoint is grown on the disk."""

    def __init__(self, requests: list[Any], name: str) -> None:
        self.requests, self.name = requests, name

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **rest: Any) -> None:
        if state.global_step == SAVED:
            outgrow.grow(model, family(self.name).example(), *self.requests, optimizer=optimizer, seed=0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[float]]]:
    """For each family a run that is not grown: the checkpoint half-way, and all losses."""
    found = {}
    for name in dict.fromkeys(name for name, _ in CASES.values()):
        folder = tmp_path_factory.mktemp(name)
        losses = losses_of(built(name), folder)
        found[name] = folder / f"checkpoint-{SAVED}", losses
    return found


@places
@pytest.mark.parametrize("case", ["llama", pytest.param("tied, copies", marks=pytest.mark.exhaustive)])
def test_a_grown_checkpoint_resumes_as_a_growth_in_memory_goes_on(case: str, runs: dict[str, Any], tmp_path: Path) -> None:
    name, requests = CASES[case]
    checkpoint, plain = runs[name]
    growth = outgrow.grow_checkpoint(checkpoint, *requests, out=tmp_path / "new", training_state=True)
    assert " kB, optimizer.pt, rng_state.pth, scheduler.pt, trainer_state.json, training_args.bin" in str(growth)
    in_memory = losses_of(built(name), tmp_path / "memory", callbacks=[GrowAfter(requests, name)])
    found = resumed(tmp_path / "new", tmp_path / "run")
    assert in_memory[:SAVED] == plain[:SAVED]
    assert found == in_memory[SAVED:]
    assert found[0] == pytest.approx(plain[SAVED], rel=1e-5)
    assert found[1:] != plain[SAVED + 1 :]


@places
@pytest.mark.exhaustive
def test_a_trainer_resumes_in_a_process_that_never_imports_outgrow(runs: dict[str, Any], tmp_path: Path) -> None:
    checkpoint, plain = runs["llama"]
    outgrow.grow_checkpoint(checkpoint, *ALL, out=tmp_path / "new", training_state=True)
    arguments = [sys.executable, trainer_checkpoints.__file__, str(tmp_path / "new"), str(tmp_path / "run")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == resumed(tmp_path / "new", tmp_path / "here")
    assert found[0] == pytest.approx(plain[SAVED], rel=1e-5)


def momentum(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def named(model: Any) -> torch.optim.Optimizer:
    model.model.embed_tokens.requires_grad_(False)
    return torch.optim.AdamW([(name, one) for name, one in model.named_parameters() if one.requires_grad], lr=1e-2)


@places
@pytest.mark.exhaustive
@pytest.mark.parametrize("make", [momentum, named])
def test_the_optimizer_of_a_user_follows_too(make: Any, tmp_path: Path) -> None:
    """One group of all parameters, with momentum for new blocks; and named parameters, some of them frozen."""
    requests = [Widen(kind="mlp", factor=1.5), Deepen(layers=5)]
    model = built()
    losses_of(model, tmp_path / "old", optimizers=(make(model), None))
    outgrow.grow_checkpoint(tmp_path / "old" / f"checkpoint-{SAVED}", *requests, out=tmp_path / "new", training_state=True)
    twin = built()
    grow = GrowAfter(requests, "llama")
    in_memory = losses_of(twin, tmp_path / "memory", callbacks=[grow], optimizers=(make(twin), None))
    assert resumed(tmp_path / "new", tmp_path / "run", make) == in_memory[SAVED:]


@places
def test_the_files_are_those_that_a_trainer_would_write(runs: dict[str, Any], tmp_path: Path) -> None:
    checkpoint, _ = runs["llama"]
    shutil.copytree(checkpoint, tmp_path / "old")
    progress = json.loads((tmp_path / "old" / "trainer_state.json").read_text())
    best = {**progress, "best_metric": 1.0, "best_model_checkpoint": "checkpoint-1"}
    (tmp_path / "old" / "trainer_state.json").write_text(json.dumps(best))
    growth = outgrow.grow_checkpoint(tmp_path / "old", *ALL, out=tmp_path / "new", training_state=True, verify="none")
    assert json.loads((tmp_path / "new" / "trainer_state.json").read_text()) == progress  # a grown model can't load the best
    for name in ("rng_state.pth", "scheduler.pt", "training_args.bin"):
        assert (tmp_path / "new" / name).read_bytes() == (tmp_path / "old" / name).read_bytes()
    found = torch.load(tmp_path / "new" / "optimizer.pt", weights_only=True, mmap=True)
    old = torch.load(tmp_path / "old" / "optimizer.pt", weights_only=True)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "new")
    arguments = transformers.TrainingArguments(str(tmp_path / "run"), weight_decay=0.1, use_cpu=True, report_to=[])
    fresh = transformers.Trainer(model, arguments).create_optimizer().state_dict()
    assert [group["params"] for group in found["param_groups"]] == [group["params"] for group in fresh["param_groups"]]
    assert [{**group, "params": 0} for group in found["param_groups"]] == [{**g, "params": 0} for g in old["param_groups"]]
    shapes = {tuple(parameter.shape) for parameter in model.parameters()}
    assert {tuple(state["exp_avg"].shape) for state in found["state"].values()} <= shapes
    assert all(state["exp_avg"].data_ptr() % 64 == 0 for state in found["state"].values())
    left = outgrow.grow_checkpoint(tmp_path / "old", *ALL, out=tmp_path / "without", verify="none")
    assert "training state not copied (--training-state grows it too): optimizer.pt, rng_state.pth" in str(left)
    assert not (tmp_path / "without" / "optimizer.pt").exists()
    assert growth.left == ()


@places
def test_an_interrupted_growth_writes_the_training_state_again(runs: dict[str, Any], tmp_path: Path) -> None:
    checkpoint, requests = runs["llama"][0], [Widen(kind="mlp", factor=1.5)]
    total: list[int] = []

    def stop_in_the_state(size: int) -> Any:
        total.append(size)
        done: list[int] = []

        def advance(size: int) -> None:
            done.append(size)
            if len(total) == 1 and sum(done) > total[0] // 2:  # the state is twice as large as the weights
                raise KeyboardInterrupt

        return advance

    options: dict[str, Any] = {"training_state": True, "verify": "none", "progress": stop_in_the_state}
    with pytest.raises(KeyboardInterrupt, match="goes on from there"):
        outgrow.grow_checkpoint(checkpoint, *requests, out=tmp_path / "new", **options)
    outgrow.grow_checkpoint(checkpoint, *requests, out=tmp_path / "new", **options)
    outgrow.grow_checkpoint(checkpoint, *requests, out=tmp_path / "whole", **options)
    assert {path.name for path in tmp_path.iterdir()} == {"new", "whole"}
    for name in ("optimizer.pt", "model.safetensors"):
        assert (tmp_path / "new" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def stepped(model: Any) -> torch.optim.Optimizer:
    """An optimizer with the groups of a Trainer, after a step on random gradients that leaves the model as it was."""
    own, before = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    groups = [{"params": [own[name] for name in names]} for names in trainer_groups(model)]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()
    model.load_state_dict(before)
    return optimizer


@places
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["gemma2", "mixtral", "gptneox", "opt", "mamba", "bert", "vit"])
@pytest.mark.parametrize("kind", ["mlp", "heads", "width", "layers", "vocab", "outputs"])
def test_the_state_of_other_families_is_that_of_a_growth_in_memory(name: str, kind: str, tmp_path: Path) -> None:
    model: Any = family(name).build()
    model.save_pretrained(tmp_path / "old")
    optimizer = stepped(model)
    torch.save(optimizer.state_dict(), tmp_path / "old" / "optimizer.pt")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    torch.save(scheduler.state_dict(), tmp_path / "old" / "scheduler.pt")
    (tmp_path / "old" / "trainer_state.json").write_text("{}")
    request: Any = Deepen(layers=8) if kind == "layers" else Widen(kind=kind, factor=2.0)
    options: dict[str, Any] = {"training_state": True, "verify": "none", "example": family(name).example()}
    try:
        outgrow.grow_checkpoint(tmp_path / "old", request, out=tmp_path / "new", **options)
    except outgrow.GrowthError as error:
        assert kind != "mlp"
        pytest.skip(str(error))  # the weights can't be grown in this way
    outgrow.grow(model, family(name).example(), request, optimizer=optimizer)
    assert_equal(torch.load(tmp_path / "new" / "optimizer.pt", weights_only=True)["state"], optimizer.state_dict()["state"])


def truncated(folder: Path, other: Path) -> None:
    path = folder / "optimizer.pt"
    path.write_bytes(path.read_bytes()[:-500])


def of_another_model(folder: Path, other: Path) -> None:
    shutil.copyfile(other / "optimizer.pt", folder / "optimizer.pt")


def of_another_size(folder: Path, other: Path) -> None:
    data = torch.load(folder / "optimizer.pt", weights_only=True)
    data["state"][3]["exp_avg"] = torch.zeros(7, 7)
    torch.save(data, folder / "optimizer.pt")


def with_code(folder: Path, other: Path) -> None:
    data = torch.load(folder / "optimizer.pt", weights_only=True)
    torch.save({**data, "path": Path("x")}, folder / "optimizer.pt")


def with_unknown_state(folder: Path, other: Path) -> None:
    data = torch.load(folder / "optimizer.pt", weights_only=True)
    data["state"][0]["curvature"] = torch.zeros(2)
    torch.save(data, folder / "optimizer.pt")


def without(name: str) -> Any:
    return lambda folder, other: (folder / name).unlink()


def with_folder(name: str) -> Any:
    return lambda folder, other: (folder / name).mkdir()


def with_other_groups(folder: Path, other: Path) -> None:
    torch.save({"base_lrs": [0.1], "last_epoch": 3}, folder / "scheduler.pt")


REFUSED: dict[str, tuple[Any, str]] = {
    "truncated": (truncated, "it is truncated, or not a file of torch.save"),
    "of another model": (of_another_model, "its groups have .* parameters, the model's"),
    "of another size": (of_another_size, r"its state 'exp_avg' has the shape \(7, 7\) instead of"),
    "with code": (with_code, "can't be read safely: it holds objects of pathlib"),
    "unknown": (with_unknown_state, "the class of the optimizer is not recognised .*curvature"),
    "no optimizer": (without("optimizer.pt"), "has no optimizer.pt"),
    "no scheduler": (without("scheduler.pt"), "has no scheduler.pt: a Trainer that resumes would load neither"),
    "no progress": (without("trainer_state.json"), r"has no trainer_state.json"),
    "another scheduler": (with_other_groups, "learning rates for 1 groups, and optimizer.pt has 2"),
    "DeepSpeed": (with_folder("global_step3"), "DeepSpeed has written it in parts"),
    "FSDP": (with_folder("optimizer_0"), "FSDP has written it"),
}


@pytest.fixture(scope="module")
def plan(runs: dict[str, Any]) -> CheckpointPlan:
    return plan_checkpoint(read_checkpoint(runs["llama"][0]), [Widen(kind="mlp", factor=1.5)])


@places
@pytest.mark.parametrize("case", REFUSED)
def test_training_state_that_cannot_follow_is_refused(
    case: str, runs: dict[str, Any], plan: CheckpointPlan, tmp_path: Path
) -> None:
    spoil, reason = REFUSED[case]
    shutil.copytree(runs["llama"][0], tmp_path / "old")
    spoil(tmp_path / "old", runs["gpt2"][0])
    here = replace(plan, checkpoint=replace(plan.checkpoint, folder=str(tmp_path / "old")))
    with pytest.raises(CheckpointError, match=reason):
        read_training_state(here)


def test_nothing_is_written_if_the_training_state_is_refused(
    runs: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs["llama"][0], tmp_path / "old")
    truncated(tmp_path / "old", tmp_path)
    arguments = ["grow", str(tmp_path / "old"), "--widen", "mlp=1.5", "--out", str(tmp_path / "new"), "--training-state"]
    assert main(arguments) == 2
    assert "optimizer.pt can't be read" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"old"}
