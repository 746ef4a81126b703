"""The values of experts: copies and slices of the experts that a layer has (a dense MLP is one expert).

An expert with hidden units h computes f(x) = Σ over h of d_h·act(g_h·x)·(u_h·x). A layer computes Σ over experts of w_e·f_e(x).
The weights w_e come from a softmax over the router's logits, of which the k largest are taken (usually divided by their sum).

*Copies of a dense MLP.* Weights that add up to 1 make Σ w_e·f = f: any router is exact.

*Slices* (fine-grained experts). An expert becomes G experts with 1/G of its hidden units each. All of them have its row in the
router, so their logits are equal, and k·G are taken instead of k. They are chosen together, each with the weight w/G; so the
values d are multiplied by G: Σ over slices of (w/G)·G·f_slice = w·f.

*Copies of an expert.* c copies with its row in the router, c·k of which are taken, have the weight w/c each. The values d of
copy j are multiplied by shares s_jh, drawn per hidden unit, with Σ over j of s_jh = c: equal copies would stay equal in
training.

*Drop-upcycling* (Nakamura et al., 2025). In every copy, a part of the hidden units is drawn again, with mean and standard
deviation of the matrix. The function changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Form:
    """How a layer's experts become new ones: `copies` of each, each in `slices`. drop: part of the units drawn again.

    shares: whether copies have different shares in the output, since they are always chosen together.
    """

    copies: int = 1
    slices: int = 1
    drop: float = 0.0
    shares: bool = False

    @property
    def factor(self) -> int:
        """New experts per old one."""
        return self.copies * self.slices


def expert_weights(gate: Tensor, up: Tensor, down: Tensor, form: Form, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The tensors `gate_up_proj` and `down_proj` of the new experts.

    gate, up: (experts, hidden units, features); down: (experts, features, hidden units). The slices of a copy follow one
    another, and so do the copies of an expert.
    """
    count, hidden, features = gate.shape
    gate, up = (each.repeat_interleave(form.copies, 0).clone() for each in (gate, up))
    down = down.repeat_interleave(form.copies, 0) * form.slices
    if form.shares and form.copies > 1:
        drawn = torch.rand(count, form.copies, 1, hidden, generator=generator, dtype=torch.float64) + 0.5
        shares = drawn * form.copies / drawn.sum(1, keepdim=True)
        down = (down.double() * shares.view(count * form.copies, 1, hidden).to(down.device)).to(down.dtype)
    if form.drop:
        _draw_again(gate, up, down, form.drop, generator)
    split = [each.reshape(count * form.factor, hidden // form.slices, features) for each in (gate, up)]
    columns = down.view(count * form.copies, features, form.slices, hidden // form.slices).transpose(1, 2)
    return torch.cat(split, 1).contiguous(), columns.reshape(count * form.factor, features, -1).contiguous()


def _draw_again(gate: Tensor, up: Tensor, down: Tensor, part: float, generator: torch.Generator) -> None:
    """Draw a part of the hidden units of every expert again, in place."""
    hidden = gate.shape[1]
    for expert in range(len(gate)):
        units = torch.randperm(hidden, generator=generator)[: round(part * hidden)].to(gate.device)
        for rows in (gate[expert], up[expert], down[expert].T):
            mean, deviation = float(rows.float().mean()), float(rows.float().std())
            drawn = torch.randn(len(units), rows.shape[1], generator=generator) * deviation + mean
            rows[units] = drawn.to(rows)


def router_rows(copies: int, slices: int, like: Tensor, deviation: float, generator: torch.Generator) -> Tensor:
    """Random rows of a router, one per copy; the slices of a copy share its row. like: a router's weight."""
    drawn = torch.randn(copies, like.shape[1], generator=generator) * deviation
    return drawn.repeat_interleave(slices, 0).to(like.dtype)
