"""A tiny GPT-2 that learns to write Python, byte by byte, and grows on the way: in the Transformers Trainer.

    pip install "outgrow[transformers]"
    python examples/transformers_run.py

It reads the source of a module of the standard library, needs no download, and takes a few seconds on one core.
"""

from __future__ import annotations

import argparse
import inspect
import tempfile

import torch
import transformers

import outgrow
import outgrow.integrations.transformers

LENGTH = 32  # bytes of text that the model sees at once


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Pieces of a text, as bytes; the model learns to tell each byte from those before it."""

    def __init__(self, text: str) -> None:
        data = torch.tensor(list(text.encode()))
        self.pieces = data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def main() -> None:
    transformers.set_seed(0)
    source = inspect.getsource(argparse)
    split = len(source) * 9 // 10
    train, held_out = Text(source[:split]), Text(source[split:])
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=32, n_inner=64, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
    )
    model = transformers.GPT2LMHeadModel(config)

    grow = outgrow.transformers.Grow(
        [
            outgrow.At(step=60, grow=[outgrow.Widen("transformer.h.*.mlp.c_fc", factor=2)]),
            outgrow.At(epoch=1, grow=[outgrow.Deepen(after="transformer.h.1", fade=30)]),
        ],
        example=train[:2],
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(
                folder,
                num_train_epochs=2,
                per_device_train_batch_size=16,
                learning_rate=3e-3,
                lr_scheduler_type="cosine",
                warmup_steps=10,
                eval_strategy="epoch",
                save_strategy="epoch",  # trainer.train(resume_from_checkpoint=True) goes on from the last one, bit for bit
                logging_steps=20,
                use_cpu=True,
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=train,
            eval_dataset=held_out,
            callbacks=[grow],
        )
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        trainer.save_model(folder)
        same = transformers.AutoModelForCausalLM.from_pretrained(folder)

    print()
    for record in grow.run.records:
        print(record)
    print(f"{same.config.n_layer} blocks, {same.config.n_inner} hidden units each, {same.num_parameters():,} parameters")
    print(f"loss on text it has not seen: {before:.2f} → {trainer.state.log_history[-2]['eval_loss']:.2f}")


if __name__ == "__main__":
    main()
