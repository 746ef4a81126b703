"""Networks of blocks that are equal except for one property."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

EXAMPLE = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """A pre-norm transformer block; the test chooses the difference."""

    def __init__(self, width: int = 8, heads: int = 2, eps: float = 1e-5, act: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.heads, self.act = heads, act
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=eps), nn.LayerNorm(width, eps=eps)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*qkv).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.out(mixed)
        return x + self.down(self.act(self.up(self.norm2(x))))


class Net(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(3, 8), nn.ModuleList(blocks), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Reused(Net):
    """The hidden layer of one block is used elsewhere too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.blocks[2].up(self.stem(x)).exp().mean()


def tied(number: int = 4) -> Net:
    net = Net(*(Block() for _ in range(number)))
    net.blocks[2].down.weight = net.blocks[1].down.weight
    return net


def measured() -> Net:
    """Buffers measure one block's weight, as in spectral norm."""
    net = Net(*(Block() for _ in range(3)))
    nn.utils.parametrizations.spectral_norm(net.blocks[1].up)
    return net


NETS: dict[str, Callable[[], nn.Module]] = {
    "like blocks": lambda: Net(*(Block() for _ in range(4))),
    "another activation": lambda: Net(Block(), Block(), Block(act=torch.sigmoid), Block()),
    "another ε": lambda: Net(Block(), Block(eps=1e-3), Block()),
    "other heads": lambda: Net(Block(), Block(heads=4), Block(), Block(heads=4)),
    "a tied weight": tied,
    "a measured weight": measured,
    "a layer used elsewhere": lambda: Reused(*(Block() for _ in range(4))),
}
