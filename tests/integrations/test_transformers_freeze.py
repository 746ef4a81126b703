"""Grow and freeze in the Transformers Trainer: LLaMA Pro in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

import outgrow
import outgrow.integrations.transformers as ours
from tests.helpers.transformers_trainer import EXAMPLE, build, trainer

DEEPER = [outgrow.Deepen(layers=4)]


def run_of(folder: Path) -> Any:
    return trainer(folder, grow=ours.Grow([], EXAMPLE, first=DEEPER, freeze="old"))


def test_only_new_blocks_are_trained_and_the_result_is_a_plain_model(tmp_path: Path) -> None:
    old, one = build(), run_of(tmp_path / "run")
    one.train()
    model = one.model
    assert model.config.num_hidden_layers == 4
    assert all(parameter.requires_grad for parameter in model.parameters())
    grown = build()
    growth = outgrow.grow(grown, EXAMPLE, *DEEPER)
    blocks = {name.split(".")[2] for name in growth.new_parameters}
    assert blocks == {"1", "3"}
    for name, value in grown.named_parameters():
        assert torch.equal(value, model.get_parameter(name)) is (name not in growth.new_parameters), name
    for name, value in old.named_parameters():
        assert torch.equal(model.get_parameter(growth.plan.renamed(name)), value)
    state = one.optimizer.state_dict()["state"]
    assert len(state) == len(growth.new_parameters)  # no memory for the others
    model.save_pretrained(tmp_path / "plain")
    ids = {"input_ids": EXAMPLE["input_ids"]}
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert not any("outgrow" in type(module).__module__ for module in again.modules())
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(**ids).logits, model.eval()(**ids).logits)


def test_a_resumed_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole, again = run_of(tmp_path / "whole"), run_of(tmp_path / "again")
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-10"))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name
