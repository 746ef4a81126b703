"""Worker functions for trainers of other libraries in several processes with DistributedDataParallel; see `processes.launch`.

Every rank draws its own random numbers (dropout), so that a resumed run equals the uninterrupted one only if the random state
of each rank was saved.
"""

from __future__ import annotations

import copy
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import outgrow
from outgrow.model.unwrap import bare
from tests import conftest  # noqa: F401  # lets torchvision be imported
from tests.helpers.processes import refusal, same_everywhere
from tests.helpers.training_run import Net, assert_equal

X = torch.randn(48, 1, 6, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 4, (48,), generator=torch.Generator().manual_seed(2))
DATA, BATCH, EPOCHS, PER_EPOCH = TensorDataset(X, Y), 8, 3, 3


def schedule() -> list[Any]:
    return [
        outgrow.At(step=2, grow=[outgrow.Widen("*", factor=1.5)], lr=0.5),
        outgrow.When(outgrow.reached("measured", 1.5), grow=[outgrow.Deepen("blocks.0", fade=4)]),
    ]


def measured(epoch: int) -> float:
    """A metric that differs between ranks: after the second epoch, a trigger is true on rank 0 and false on rank 1."""
    return epoch - 10.0 * dist.get_rank()


def parts() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = Net()
    return model, *training(model)


def training(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=20)


def own_random_state(draws: int) -> None:
    """Give each rank another random state. Earlier draws do not matter in a resumed run; the seeds that shuffle data stay."""
    torch.manual_seed(0)
    torch.rand(draws + dist.get_rank())


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder that all ranks use."""
    with tempfile.TemporaryDirectory() as folder:
        given = [folder]
        dist.broadcast_object_list(given)
        yield Path(given[0])
        dist.barrier()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """This rank's part of a batch, as from a loader with a distributed sampler."""
    if step % PER_EPOCH == 0:
        torch.empty((), dtype=torch.int64).random_()  # a DataLoader draws this for its workers
    sampler: DistributedSampler[Any] = DistributedSampler(DATA, shuffle=True)
    sampler.set_epoch(step // PER_EPOCH)
    at = BATCH * (step % PER_EPOCH)
    picked = list(sampler)[at : at + BATCH]
    return X[picked], Y[picked]


def train(run: outgrow.Run, backward: Any = Tensor.backward, until: int = PER_EPOCH * EPOCHS) -> dict[str, Any]:
    """Train in a plain loop; returns everything that must be equal in two runs."""
    (optimizer,), (scheduler,) = run.optimizers, run.schedulers
    while run.steps < until:
        x, y = batch(run.steps)
        optimizer.zero_grad()
        backward(cross_entropy(run.model(x), y))
        optimizer.step()
        scheduler.step()
        run.step()
        assert same_everywhere(run.model.parameters())
        if run.steps % PER_EPOCH == 0:
            run.epoch({"measured": measured(run.epochs + 1)})
            assert same_everywhere(run.model.parameters())
    return state(bare(run.model), optimizer)


def state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    model_ = copy.deepcopy(dict(model.state_dict()))
    return {"model": model_, "optimizer": copy.deepcopy(optimizer.state_dict()), "random": torch.get_rng_state()}


@cache
def by_hand() -> dict[str, Any]:
    """The reference: no trainer, only torch's wrapper."""
    model, optimizer, scheduler = parts()
    run = outgrow.Run(DistributedDataParallel(model), X[:4], optimizer, schedule(), scheduler, quiet=True)
    own_random_state(5)
    result = train(run)
    assert [(record.step, record.epoch) for record in run.records] == [(2, 0), (6, 2)]
    return result


def triggers() -> None:
    """Rank 0 decides, also if only rank 0 has metrics; if it raises, all ranks raise."""
    model, optimizer, _ = parts()
    run = outgrow.Run(DistributedDataParallel(model), X[:4], optimizer, schedule()[1:], quiet=True, check=False)
    first = dist.get_rank() == 0
    text = refusal(run.epoch, None if first else {"measured": 2.0})
    assert "run.epoch(metrics)" in text, text
    assert ("rank 0 decides for all ranks" in text) != first, text
    assert run.epochs == 0
    assert run.epoch({"measured": 1.0} if first else None) is None
    assert run.metrics == [{"measured": 1.0}]
    assert run.epoch({"measured": 2.0} if first else {"measured": float("nan")}) is not None
    assert same_everywhere(model.parameters())


def in_lightning() -> None:
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint

    import outgrow.integrations.lightning.callback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    os.environ.pop("PL_GLOBAL_SEED", None)

    class Lit(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = parts()[0]

        def training_step(self, batch: Any, number: int) -> Tensor:
            self.log("measured", measured(self.current_epoch + 1))
            return cross_entropy(self.model(batch[0]), batch[1])

        def on_train_batch_end(self, *rest: Any) -> None:
            assert same_everywhere(self.parameters())

        def configure_optimizers(self) -> Any:
            optimizer, scheduler = training(self.model)  # the model has already grown in a resumed run
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def fit(*callbacks: L.Callback, path: Path | None = None) -> dict[str, Any]:
        model = Lit()
        trainer = L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            max_epochs=EPOCHS,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=bool(callbacks),
            callbacks=[outgrow.lightning.Grow(schedule(), X[:4], module="model", quiet=True), *callbacks],
        )
        own_random_state(5 if path is None else 77)
        trainer.fit(model, DataLoader(DATA, BATCH, shuffle=True), ckpt_path=path)
        assert same_everywhere(model.parameters())
        return state(model.model, trainer.optimizers[0])

    with shared_folder() as folder:
        name = "step{step}"
        every = ModelCheckpoint(folder, name, auto_insert_metric_name=False, every_n_train_steps=7, save_top_k=-1)
        whole = fit(every)
        assert_equal(whole, by_hand())
        assert_equal(fit(path=folder / "step7.ckpt"), whole)  # within an epoch, and within the fade of the second growth


def in_accelerate() -> None:
    import accelerate

    import outgrow.integrations.accelerate

    def make(seed: int) -> tuple[accelerate.Accelerator, outgrow.Run]:
        accelerator = accelerate.Accelerator(cpu=True, step_scheduler_with_optimizer=False)
        model, optimizer, scheduler = accelerator.prepare(*parts())
        assert isinstance(model, DistributedDataParallel)
        run = outgrow.Run(model, X[:4], optimizer, schedule(), scheduler, quiet=True)
        outgrow.accelerate.attach(run, accelerator)
        own_random_state(seed)
        return accelerator, run

    accelerator, run = make(5)
    with shared_folder() as folder:
        for step in (4, 7):  # after the first growth; within the fade of the second
            train(run, accelerator.backward, step)
            accelerator.save_state(str(folder / str(step)))
            accelerator, run = make(77)
            accelerator.load_state(str(folder / str(step)))
            assert run.steps == step
    assert_equal(train(run, accelerator.backward), by_hand())


def in_the_trainer() -> None:
    """A language model of Transformers; the loop by hand gets the batches and random states of the Trainer's steps."""
    import transformers

    import outgrow.integrations.transformers
    from tests.helpers.transformers_trainer import EXAMPLE, Tokens, build

    transformers.logging.set_verbosity_error()
    fed: list[tuple[dict[str, Tensor], Tensor, Tensor]] = []

    class Recording(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
            fed.append((inputs, num_items_in_batch, torch.get_rng_state()))
            assert isinstance(model, DistributedDataParallel)
            assert same_everywhere(model.parameters())
            return super().training_step(model, inputs, num_items_in_batch)

    def events() -> list[Any]:
        trigger = outgrow.reached("eval_loss", 99.0, "min")
        return [
            outgrow.At(step=2, grow=[outgrow.Widen("*.mlp.*", factor=1.5, fade=3)], lr=0.5),
            outgrow.When(trigger, grow=[outgrow.Deepen("model.layers.0")]),
        ]

    def small() -> tuple[Any, tuple[torch.optim.Optimizer, Any]]:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # unlike Adam, it keeps small errors small
        return model, (optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=9))

    def fit(folder: Path, resume: str | None = None) -> dict[str, Any]:
        model, optimizers = small()
        options = transformers.TrainingArguments(
            str(folder),
            num_train_epochs=2,
            per_device_train_batch_size=4,
            max_grad_norm=0.0,
            eval_strategy="epoch",
            save_steps=2,
            use_cpu=True,
            ddp_backend="gloo",
            report_to=[],
            disable_tqdm=True,
        )
        grow = outgrow.transformers.Grow(events(), EXAMPLE)
        data = {"train_dataset": Tokens(24), "eval_dataset": Tokens(4, seed=1)}
        trainer = Recording(model=model, args=options, callbacks=[grow], optimizers=optimizers, **data)
        assert trainer.args.world_size == 2
        own_random_state(5 if resume is None else 77)
        trainer.train(resume_from_checkpoint=resume)
        assert [(record.step, record.epoch) for record in grow.run.records] == [(2, 0), (3, 1)]
        assert same_everywhere(model.parameters())
        return state(model, trainer.optimizer)

    with shared_folder() as folder:
        whole = fit(folder)
        steps = list(fed)
        assert_equal(fit(folder, str(folder / "checkpoint-4")), whole)
    model, (optimizer, scheduler) = small()
    wrapper = DistributedDataParallel(model)
    run = outgrow.Run(wrapper, EXAMPLE, optimizer, events(), scheduler, quiet=True)
    for inputs, tokens, random in steps:  # tokens: of all ranks
        torch.set_rng_state(random)
        optimizer.zero_grad()
        (wrapper(**inputs, num_items_in_batch=tokens).loss * dist.get_world_size()).backward()
        optimizer.step()
        scheduler.step()
        run.step()
        if run.steps % 3 == 0:
            run.epoch({"eval_loss": 0.0})
    assert len(run.done) == 2
    for name, value in model.state_dict().items():  # the Trainer's gradients are rounded differently from the first step on
        torch.testing.assert_close(value, whole["model"][name], rtol=0.0, atol=1e-6)
