"""A small language model learns a second text in new blocks, while all of its old weights are held (as in LLaMA Pro).

    pip install "outgrow[transformers]"
    python examples/grow_and_freeze.py

It first learns the source of a module of the standard library. Then new blocks, which change nothing at first, are added
between the old ones and trained on another module. The result is a plain model of Transformers. It needs no download, and takes
some seconds on one core.
"""

from __future__ import annotations

import argparse
import inspect
import json.decoder
import tempfile
from typing import Any

import torch
import transformers

import outgrow
import outgrow.integrations.transformers

LENGTH = 32  # bytes of text that the model sees at once


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Pieces of a module's source, as bytes."""

    def __init__(self, module: Any) -> None:
        data = torch.tensor(list(inspect.getsource(module).encode()))
        self.pieces = data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def train(model: Any, text: Text, epochs: int, folder: str, *callbacks: Any) -> None:
    arguments = transformers.TrainingArguments(
        folder,
        num_train_epochs=epochs,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        weight_decay=0.1,  # held weights do not decay
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        log_level="error",
    )
    transformers.Trainer(model, arguments, train_dataset=text, callbacks=list(callbacks)).train()


@torch.no_grad()
def loss_on(model: Any, text: Text) -> float:
    return float(model.eval()(input_ids=text.pieces, labels=text.pieces).loss)


def main() -> None:
    transformers.set_seed(0)
    first, second = Text(argparse), Text(json.decoder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = transformers.LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **sizes, **tokens)
    model = transformers.LlamaForCausalLM(config)
    with tempfile.TemporaryDirectory() as folder:
        train(model, first, 1, folder)
        old = {name: value.clone() for name, value in model.named_parameters()}
        before = loss_on(model, second)

        grow = outgrow.transformers.Grow([], {"input_ids": first.pieces[:2]}, first=[outgrow.Deepen(layers=4)], freeze="old")
        train(model, second, 3, folder, grow)

        model.save_pretrained(folder)
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    kept = [name for name, value in plain.named_parameters() if any(torch.equal(value, other) for other in old.values())]
    print(f"{len(old)} old tensors, {len(kept)} of the {len(list(plain.parameters()))} in the file have the same values")
    print(f"{plain.config.num_hidden_layers} blocks; loss on the second text: {before:.2f} → {loss_on(plain, second):.2f}")


if __name__ == "__main__":
    main()
