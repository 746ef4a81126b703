"""The Transformers Trainer: growths equal those made by hand, and any checkpoint resumes bit for bit."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import outgrow
import outgrow.integrations.transformers
from tests.helpers.training_run import assert_equal
from tests.helpers.transformers_trainer import EXAMPLE, Tokens, build, events, grow_of, state, trainer

pytestmark = pytest.mark.filterwarnings("ignore:training has ended during a fade")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> transformers.Trainer:
    """An uninterrupted run, with a checkpoint every other step."""
    one = trainer(tmp_path_factory.mktemp("whole"))
    one.train()
    assert len(grow_of(one).run.done) == 3
    return one


def checkpoint(whole: transformers.Trainer, step: int) -> str:
    return os.path.join(whole.args.output_dir, f"checkpoint-{step}")


class ByHand(transformers.TrainerCallback):
    """A user's callback without a schedule; it also checks that outputs are preserved."""

    def __init__(self) -> None:
        self.errors: list[float] = []

    def grow(self, model: Any, optimizer: Any, number: int) -> None:
        before = outputs(model)
        outgrow.grow(model, EXAMPLE, *events()[number].grow, optimizer=optimizer.optimizer, seed=number)
        self.errors.append((outputs(model) - before).abs().max().item())

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **rest: Any) -> None:
        if state.global_step == 3:
            self.grow(model, optimizer, 0)

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **rest: Any) -> None:
        if state.epoch == 2:
            self.grow(model, optimizer, 1)


def outputs(model: Any) -> torch.Tensor:
    training = model.training
    model.eval()
    with torch.no_grad():
        result: torch.Tensor = model(**EXAMPLE).logits
    model.train(training)
    return result


def test_a_schedule_equals_growths_by_hand(tmp_path: Path) -> None:
    plain = [outgrow.At(step=3, grow=events()[0].grow), outgrow.At(epoch=2, grow=events()[1].grow)]
    one = trainer(tmp_path / "schedule", plain, max_steps=12, save_strategy="no")
    one.train()
    other = trainer(tmp_path / "hand", [], max_steps=12, save_strategy="no")
    hand = ByHand()
    other.add_callback(hand)
    other.train()
    assert len(hand.errors) == 2
    assert max(hand.errors) < 1e-6
    assert one.model.config.num_hidden_layers == 3
    assert one.model.config.intermediate_size == 30
    assert_equal({**state(one), "run": 0}, {**state(other), "run": 0})


@pytest.mark.parametrize("step", [4, 10, 14])
def test_a_checkpoint_resumes_bit_for_bit(step: int, whole: transformers.Trainer, tmp_path: Path) -> None:
    """The first is within a fade; the second is an epoch's last step, before the growth at its end; the third is the last."""
    resume: Any = checkpoint(whole, step)
    if step == 14:
        shutil.copytree(resume, tmp_path / "checkpoint-14")
        resume = True  # the last checkpoint
    again = trainer(tmp_path, save_strategy="no")
    torch.rand(5)  # the random state of the new process must not matter
    again.train(resume_from_checkpoint=resume)
    assert_equal(state(again), state(whole))


def test_an_optimizer_that_was_given_resumes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made from the small model, without the new block's parameters. Old checkpoints are deleted after the new one."""
    rotated: list[bool] = []

    def rotate(output_dir: str, **options: Any) -> None:
        rotated.append((tmp_path / f"checkpoint-{3 * len(rotated) + 3}" / "outgrow.pt").exists())

    monkeypatch.setattr("transformers.trainer.rotate_checkpoints", rotate)

    def make() -> transformers.Trainer:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=9)
        schedule = [outgrow.At(step=2, grow=[outgrow.Deepen("model.layers.0")], lr=0.5)]
        return trainer(tmp_path, schedule, model, (optimizer, scheduler), max_steps=6, save_steps=3, logging_steps=3)

    one = make()
    one.train()
    assert rotated == [True, True]
    two = make()
    two.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_equal(state(two), state(one))
    assert one.optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * 0.1 * (1 / 3 + 6 / 9 * 2 / 3))


def test_a_trigger_reads_all_evaluations_of_an_epoch(tmp_path: Path) -> None:
    """The search for the best model starts again after a growth: a smaller one could not be loaded."""
    trigger = outgrow.plateau("eval_b_loss", patience=2, least=100.0)
    schedule = [outgrow.When(trigger, grow=[outgrow.Deepen("model.layers.0", fade=8)])]

    def make(folder: str) -> transformers.Trainer:
        return trainer(
            tmp_path / folder,
            schedule,
            model_init=build,
            evaluate={"a": Tokens(4, seed=1), "b": Tokens(4, seed=2)},
            eval_strategy="epoch",
            save_strategy="epoch",
            load_best_model_at_end=True,
            metric_for_best_model="eval_a_loss",
            greater_is_better=True,  # so that the untrained model is the best
        )

    one = make("one")
    grown: list[int] = []
    then: list[torch.Tensor] = []

    class Watch(transformers.TrainerCallback):
        def on_epoch_begin(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
            grown.append(model.config.num_hidden_layers)
            then.append(outputs(model))

    one.add_callback(Watch())
    one.train()
    assert grown == [2, 2, 2, 3]  # the first epoch is the best so far; two more are no better
    assert one.state.best_model_checkpoint.endswith("checkpoint-15")
    assert torch.equal(outputs(one.model), then[-1])  # the fade of the new block had not started then
    again = make("two")
    again.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-10"))
    assert_equal(state(again), state(one))


def test_the_library_loads_a_grown_model_by_itself(whole: transformers.Trainer, tmp_path: Path) -> None:
    whole.save_model(str(tmp_path))
    assert not [name for name in os.listdir(tmp_path) if "outgrow" in name]
    for folder in (str(tmp_path), checkpoint(whole, 20)):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert (model.config.intermediate_size, model.config.num_hidden_layers) == (36, 4)
        assert torch.equal(outputs(model), outputs(whole.model))


def test_an_incomplete_checkpoint_is_refused(whole: transformers.Trainer, tmp_path: Path) -> None:
    """Outgrow's file comes last: a process that was killed before leaves none, or one of an earlier save in the same folder."""
    for step in (16, 18, 20):
        shutil.copytree(checkpoint(whole, step), tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-20" / "outgrow.pt").unlink()
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    again = trainer(tmp_path, model=model)
    with pytest.raises(outgrow.GrowthError, match=r"checkpoint-20 has no outgrow.pt.*\n.*\n.*resume from .*checkpoint-18"):
        again.train(resume_from_checkpoint=True)
    os.truncate(tmp_path / "checkpoint-18" / "optimizer.pt", 100)
    with pytest.raises(outgrow.GrowthError, match=r"optimizer.pt is 100 bytes.*\n.*\n.*resume from .*checkpoint-16"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-18"))
    assert_equal(dict(model.state_dict()), before)


def test_a_checkpoint_of_another_model_is_refused(whole: transformers.Trainer, tmp_path: Path) -> None:
    config = build().config
    config.hidden_size = 8
    model = transformers.LlamaForCausalLM(config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(outgrow.GrowthError, match="does not fit this model"):
        trainer(tmp_path, model=model).train(resume_from_checkpoint=checkpoint(whole, 14))
    assert_equal(dict(model.state_dict()), before)


def test_an_event_that_is_past_is_refused(whole: transformers.Trainer, tmp_path: Path) -> None:
    late = [*events()[:1], outgrow.At(step=4, grow=[outgrow.Widen("*.mlp.*", factor=2)]), *events()[1:]]
    with pytest.raises(outgrow.GrowthError, match="event 2 is past"):
        trainer(tmp_path, late).train(resume_from_checkpoint=checkpoint(whole, 6))


@pytest.mark.parametrize(
    ("schedule", "example", "message"),
    [
        ([outgrow.At(step=9, grow=[outgrow.Widen("model.layers.7.mlp.*", factor=2)])], EXAMPLE, "event 1.*model.layers.7"),
        ([outgrow.At(step=9, grow=[outgrow.Deepen("model.layers.0")])], {"input_ids": torch.zeros(2, 3)}, "example"),
        (
            [outgrow.When(outgrow.plateau("eval_loss"), grow=[outgrow.Deepen("model.layers.0")])],
            EXAMPLE,
            "eval_strategy='epoch'",
        ),
    ],
)
def test_errors_come_before_training(schedule: Any, example: Any, message: str, tmp_path: Path) -> None:
    one = trainer(tmp_path, schedule)
    grow_of(one).example = example
    with pytest.raises(outgrow.GrowthError, match=message):
        one.train()
    assert one.state.global_step == 0


@pytest.mark.parametrize("how", ["is_fsdp_enabled", "is_deepspeed_enabled"])
def test_a_sharded_model_is_refused(how: str, tmp_path: Path) -> None:
    one = trainer(tmp_path)
    setattr(one, how, True)
    with pytest.raises(outgrow.GrowthError, match=r"shards its model.*outgrow\.shard"):
        outgrow.integrations.transformers._check_trainer(one, one.model)


class Recalling(torch.optim.Optimizer):
    """An optimizer of an unknown class."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(
                    self.state[parameter].setdefault("sum", torch.zeros_like(parameter)).add_(parameter.grad), alpha=1e-3
                )


def test_an_optimizer_that_can_not_follow_is_refused_at_once_with_advice_for_the_trainer(tmp_path: Path) -> None:
    model = build()
    schedule = [outgrow.At(step=2, grow=[outgrow.Widen("*.mlp.*", factor=1.5)])]
    one = trainer(tmp_path, schedule, model, (Recalling(model.parameters()), None), max_steps=4)
    with pytest.raises(outgrow.GrowthError, match=r"step 2, Recalling: [\s\S]*instead: .*write state='fresh'") as caught:
        one.train()
    assert "AcceleratedOptimizer" not in str(caught.value)
    assert one.state.global_step == 0
    fresh = [outgrow.At(step=2, grow=[outgrow.Widen("*.mlp.*", factor=1.5)], state="fresh")]
    other = trainer(tmp_path, fresh, model := build(), (Recalling(model.parameters()), None), max_steps=4)
    other.train()
    assert model.config.intermediate_size == 30


def test_a_history_that_was_not_read_is_an_error(whole: transformers.Trainer, tmp_path: Path) -> None:
    """A callback that is added later is not called when a checkpoint is loaded."""
    one = transformers.Trainer(build(), whole.args, train_dataset=whole.train_dataset)
    one.add_callback(outgrow.transformers.Grow(events(), EXAMPLE))
    with pytest.raises(outgrow.GrowthError, match=r"history was not read: use Trainer\(callbacks=\["):
        one.train(resume_from_checkpoint=checkpoint(whole, 2))
    with pytest.raises(outgrow.GrowthError, match=r"Trainer\(callbacks=\["):
        outgrow.transformers.Grow(events(), EXAMPLE).on_train_begin(one.args, one.state, one.control)


def test_growths_are_in_the_log(whole: transformers.Trainer) -> None:
    """Besides the Trainer's own logs at the same steps, with the losses of the steps before and after."""
    logged = whole.state.log_history
    grown = [each for each in logged if "outgrow/parameters" in each]
    assert [each["outgrow/parameters_before"] for each in grown[1:]] == [each["outgrow/parameters"] for each in grown[:-1]]
    assert grown[-1]["outgrow/parameters"] == whole.model.num_parameters()
    losses = {each["step"]: each["loss"] for each in logged if "loss" in each}
    assert list(losses) == list(range(2, 21, 2))
    for each, step in ((grown[0], 4), (grown[2], 14)):  # the first of two steps whose mean is logged was before the growth
        assert (each["outgrow/loss_before"] + each["outgrow/loss_after"]) / 2 == pytest.approx(losses[step], rel=1e-5)


def test_a_missing_library_is_reported_with_the_way_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "outgrow.integrations.transformers")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(outgrow.GrowthError, match=r"pip install outgrow\[transformers\]"):
        __import__("outgrow.integrations.transformers")


def test_shares_are_of_the_trainers_steps_and_a_longer_run_moves_growths_that_are_ahead(tmp_path: Path) -> None:
    schedule = [outgrow.At(share=share, grow=[outgrow.Widen("*.mlp.*", by=4)]) for share in (0.4, 0.8)]
    one = trainer(tmp_path, schedule, num_train_epochs=1)
    one.train()
    assert [record.step for record in grow_of(one).run.records] == [2, 4]  # of 5
    again = trainer(tmp_path, schedule, max_steps=10)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [record.step for record in grow_of(again).run.records] == [2, 8]
