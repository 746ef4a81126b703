"""A short run of the Transformers Trainer that is saved half-way, and runs that resume it, here or in another process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

STEPS, SAVED = 6, 3
Callbacks = Sequence[Any]


def texts(count: int = 32) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 48, (count, 10), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def losses_of(
    model: Any, folder: Path, resume: Path | None = None, callbacks: Callbacks = (), optimizers: Any = (None, None)
) -> list[float]:
    """Train, with a checkpoint half-way; returns the loss of each step."""
    import transformers

    found: list[float] = []

    class Recorder(transformers.Trainer):  # type: ignore[misc]
        def training_step(self, *inputs: Any, **more: Any) -> Any:
            loss = super().training_step(*inputs, **more)
            found.append(loss.item())
            return loss

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        save_steps=SAVED,
        save_strategy="no" if resume else "steps",
        learning_rate=1e-2,
        weight_decay=0.1,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
    )
    trainer = Recorder(model, arguments, train_dataset=texts(), callbacks=list(callbacks), optimizers=optimizers)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return found


def resumed(checkpoint: Path, folder: Path, optimizer: Callable[[Any], Any] | None = None) -> list[float]:
    """The losses of a plain Trainer after a checkpoint."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(checkpoint)
    model: Any = getattr(transformers, config.architectures[0]).from_pretrained(checkpoint)
    made = (None, None) if optimizer is None else (optimizer(model), None)
    return losses_of(model, folder, resume=checkpoint, optimizers=made)


def main() -> None:
    """Print the losses of a resumed run; in a process of its own."""
    if torch.version.cuda is None:  # see tests/conftest.py
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    found = resumed(Path(sys.argv[1]), Path(sys.argv[2]))
    assert "outgrow" not in sys.modules
    print(json.dumps(found))


if __name__ == "__main__":
    main()
