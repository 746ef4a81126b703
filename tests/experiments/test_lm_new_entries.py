"""New entries of a widened language model begin without moments, and their rate rises; existing entries are not affected."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.lm.arms import Growth, narrow, whole_width
from experiments.lm.gpt import GPT, Size, build
from experiments.lm.growing import grow_model
from experiments.lm.new_entries import NewEntries

TEXT = torch.arange(64).view(4, 16) % 7


def step(model: GPT, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(TEXT).flatten(0, 1), TEXT.flatten().roll(-1)).backward()
    optimizer.step()


def grown() -> tuple[GPT, torch.optim.Optimizer, dict[str, torch.Size]]:
    model = build(narrow(Size(2, 32, 4, 64, 8), 2.0), 16, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        step(model, optimizer)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    growth = Growth(widen=whole_width(2.0), method="net2net", state="rewarmed")
    assert grow_model(model, TEXT, growth, [optimizer], 0)["exact"]
    return model, optimizer, shapes


def box(value: Tensor, shape: torch.Size) -> Tensor:
    return value[tuple(slice(size) for size in shape)]


def test_moments_of_new_entries_are_zero_and_those_of_others_are_kept() -> None:
    model, optimizer, shapes = grown()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    NewEntries(model, shapes).reset([optimizer])
    for index, (name, parameter) in enumerate(model.named_parameters()):
        for key in ("exp_avg", "exp_avg_sq"):
            kept, was = box(optimizer.state[parameter][key], shapes[name]), box(before[index][key], shapes[name])
            assert torch.equal(kept, was)
            assert torch.count_nonzero(optimizer.state[parameter][key]) == torch.count_nonzero(was)


def test_a_slowed_step_moves_new_entries_by_a_part_and_others_as_before() -> None:
    ends = {}
    for factor in (1.0, 0.25):
        model, optimizer, shapes = grown()
        new = NewEntries(model, shapes)
        new.reset([optimizer])
        begin = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        with new.slowed(factor):
            step(model, optimizer)
        ends[factor] = {name: parameter.detach() - begin[name] for name, parameter in model.named_parameters()}
    for name, shape in shapes.items():
        full, part = ends[1.0][name], ends[0.25][name]
        assert torch.equal(box(full, shape), box(part, shape))
        box(full, shape).zero_(), box(part, shape).zero_()
        assert torch.allclose(part, 0.25 * full, atol=1e-7)
        assert full.numel() == box(full, shape).numel() or bool(full.any())
