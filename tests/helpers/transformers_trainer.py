"""A small language model in the Transformers Trainer, with several growths, for comparisons with resumed runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import outgrow
import outgrow.integrations.transformers

PER_EPOCH, EPOCHS = 5, 4  # optimizer steps


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random sequences with repetitions, which can be learned."""

    def __init__(self, count: int, seed: int = 0) -> None:
        half = torch.randint(0, 32, (count, 5), generator=torch.Generator().manual_seed(seed))
        self.rows = torch.cat([half, half], 1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


EXAMPLE = {"input_ids": Tokens(2).rows, "labels": Tokens(2).rows}


def build() -> transformers.PreTrainedModel:
    """The small model, always with the same values."""
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        attention_dropout=0.1,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config)


def events() -> list[Any]:
    """Three growths of all kinds; the first two fade in over several steps."""
    return [
        outgrow.At(step=3, grow=[outgrow.Widen("*.mlp.*", factor=1.5, fade=6)], lr=0.5, warmup=3),
        outgrow.At(epoch=2, grow=[outgrow.Deepen("model.layers.0", fade=4)], weight_decay=0.5),
        outgrow.At(step=13, grow=[outgrow.Widen("*.mlp.*", to=36), outgrow.Deepen("model.layers.2")], new_lr=1.5),
    ]


def trainer(
    folder: Path,
    schedule: Any = None,
    model: Any = None,
    optimizers: Any = (None, None),
    evaluate: Any = None,
    grow: Any = None,
    **options: Any,
) -> transformers.Trainer:
    """A new Trainer with gradient accumulation, clipping, warm-up, dropout and a cosine schedule."""
    settings = {
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 4,
        "lr_scheduler_type": "cosine",
        "save_strategy": "steps",
        "save_steps": 2,
        "logging_steps": 2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        **options,
    }
    grow = grow or outgrow.transformers.Grow(events() if schedule is None else schedule, EXAMPLE)
    return transformers.Trainer(
        model=None if "model_init" in settings else model or build(),
        args=transformers.TrainingArguments(str(folder), **{k: v for k, v in settings.items() if k != "model_init"}),
        train_dataset=Tokens(PER_EPOCH * 8),
        eval_dataset=evaluate,
        callbacks=[grow],
        optimizers=optimizers,
        model_init=settings.get("model_init"),
    )


def grow_of(one: transformers.Trainer) -> outgrow.transformers.Grow:
    return next(each for each in one.callback_handler.callbacks if isinstance(each, outgrow.transformers.Grow))


def state(one: transformers.Trainer) -> dict[str, Any]:
    """Everything that must be equal in two runs."""
    logged = [[each.get(key) for key in ("step", "loss", "grad_norm", "learning_rate")] for each in one.state.log_history]
    position = grow_of(one).run.position()
    return {
        "model": dict(one.model.state_dict()),
        "config": {**one.model.config.to_dict(), "architectures": None, "dtype": None},  # saving sets these
        "optimizer": one.optimizer.state_dict(),
        "scheduler": {key: value for key, value in one.lr_scheduler.state_dict().items() if key != "lr_lambdas"},
        "run": {key: position[key] for key in ("steps", "epochs", "done", "pace")},
        "random": torch.get_rng_state(),
        "logged": [each for each in logged if each[1] is not None],
    }
