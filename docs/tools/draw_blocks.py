"""The pictures of docs/transforms.md that show whole blocks: deepening, fades, larger kernels, branches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from ink import (
    CELL,
    HUES,
    SOFT,
    WIDTH,
    Card,
    Grid,
    arrow,
    box,
    caption,
    card,
    cell,
    curves,
    frame,
    line,
    node,
    plain,
    save,
    skip,
    text,
    tint,
)
from specimens import Specimen, grown, inputs, taken, tensor_of, tenths
from torch import Tensor, nn

import outgrow

SMALL = 0.24  # of cells that stand below a box


class Block(nn.Module):
    """x + f(x)."""

    def __init__(self, *branch: nn.Module) -> None:
        super().__init__()
        self.branch = nn.Sequential(*branch)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.branch(x)
        return result


def layers() -> list[nn.Module]:
    return [nn.Linear(3, 4, bias=False), nn.GELU(), nn.Linear(4, 3, bias=False)]


def stack(*branches: Sequence[nn.Module]) -> nn.Module:
    """Two layers with blocks between them."""
    return tenths(nn.Sequential(nn.Linear(2, 3, bias=False), *(Block(*one) for one in branches), nn.Linear(3, 2, bias=False)))


def network() -> nn.Module:
    return tenths(nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 2, bias=False)), seed=4)


def called(module: nn.Module) -> str:
    """A box's text: the class, and its sizes where it is a layer."""
    if isinstance(module, nn.Linear):
        return f"Linear\n{module.in_features} → {module.out_features}"
    if type(module) is nn.Sequential and len(module) > 1:
        return ",\n".join(called(part).partition("\n")[0] for part in module)
    if type(module) is nn.Sequential:
        return called(module[0])
    return type(module).__name__.removesuffix("1d")


def chain(made: Card, x: float, y: float, specimen: Specimen, kind: str, step: float = 1.26) -> float:
    """The children of the grown model, what is new in colour; returns the middle of the new one."""
    assert isinstance(specimen.new, nn.Sequential)
    (insert,) = specimen.plan.inserts
    text(made, x, y, "$x$", fontsize=9)
    end = x + 0.1
    place = 0.0
    for index, (name, module) in enumerate(specimen.new.named_children()):
        middle = x + 0.8 + index * step
        arrow(made, (end, y), (middle - 0.5, y))
        box(made, middle, y, called(module), kind if name == insert.path else "kept", wide=1.0)
        copied = f", a copy of {insert.copy_of + (insert.copy_of >= insert.at)}" if insert.copy_of >= 0 else ""
        text(made, middle, y + 0.27, name + (copied if name == insert.path else ""), fontsize=7, color=SOFT)
        end, place = middle + 0.5, middle if name == insert.path else place
    arrow(made, (end, y), (end + 0.26, y))
    text(made, end + 0.37, y, "$y$", fontsize=9)
    return place


def inside(made: Card, x: float, y: float, left: float) -> None:
    """Dashed lines from a box in the chain down to what it holds, which is as wide as the card except for its margins."""
    frame(made, (x - 0.5, y - 0.2), (left, y - 0.57), (x + 0.5, y - 0.2), (WIDTH - left, y - 0.57))


def zoom(
    made: Card, x: float, y: float, parts: Sequence[nn.Module], kind: str, step: float = 1.0, gate: bool = False
) -> list[float]:
    """x + f(x), with a gate λ behind f or without; returns the middles of its modules and of the sum."""
    text(made, x, y, "$x$", fontsize=9)
    half = min(0.4 * step, 0.5)
    middles = [x + 0.3 + half + step * index for index in range(len(parts))]
    end = x + 0.1
    for middle, part in zip(middles, parts, strict=True):
        arrow(made, (end, y), (middle - half, y))
        box(made, middle, y, called(part), kind, wide=2 * half)
        end = middle + half
    if gate:
        arrow(made, (end, y), (end + 0.2, y))
        node(made, end + 0.32, y, r"$\lambda$", "drawn", 0.12)
        end += 0.44
    total = end + 0.3
    arrow(made, (end, y), (total - 0.1, y))
    node(made, total, y, "+")
    skip(made, (x + 0.17, y), (total, y + 0.1), y + 0.4)
    arrow(made, (total + 0.1, y), (total + 0.33, y))
    return [*middles, total]


def below(made: Card, middle: float, y: float, shown: Grid, said: str, size: float = SMALL, numbers: bool = True) -> None:
    """A matrix under a box, its middle at `middle` and y."""
    caption(made, middle - shown.size[1] * size / 2, y, shown, said, size, numbers)


def block_grid(specimen: Specimen, name: str) -> Grid:
    """A tensor of the block that was copied, and which of its numbers stem from the block's source."""
    (insert,) = specimen.plan.inserts
    return taken(tensor_of(specimen.new, f"{insert.path}.{name}"), tensor_of(specimen.old, f"{insert.copy_of}.{name}"))


def deepen(path: Path) -> None:
    pairs = grown(stack(layers(), layers()), inputs(5, 2), "deepen", "1")
    normed = [[*layers(), nn.BatchNorm1d(3)] for _ in range(2)]
    closed = grown(stack(*normed), inputs(5, 2), "deepen", "1")
    made = card(WIDTH, 4.4, pairs.call)
    inside(made, chain(made, 0.95, 3.62, pairs, "copied"), 3.62, 0.3)
    text(made, 0.36, 2.87, "the branch ends in a layer: pairs", ha="left", fontsize=8)
    middles = zoom(made, 0.4, 2.22, pairs.new[2].branch, "copied", step=0.88)
    below(made, middles[0], 1.12, block_grid(pairs, "branch.0.weight"), "$W$")
    below(made, middles[2], 1.12, block_grid(pairs, "branch.2.weight"), "$V$")
    text(made, middles[1], 1.12, r"$h_\ell=h_r$" + "\n" + r"$V_r=-V_\ell$", fontsize=8.5, color=SOFT, linespacing=1.5)
    text(made, 4.3, 2.87, "the branch ends in a batch norm: γ = β = 0", ha="left", fontsize=8)
    middles = zoom(made, 4.34, 2.22, closed.new[2].branch, "copied", step=0.86)
    below(made, middles[0], 1.12, block_grid(closed, "branch.0.weight"), "$W$")
    below(made, middles[2] - 0.12, 1.12, block_grid(closed, "branch.2.weight"), "$V$")
    below(made, middles[3] - 0.1, 1.12, block_grid(closed, "branch.3.weight"), r"$\gamma$")
    below(made, middles[3] + 0.32, 1.12, block_grid(closed, "branch.3.bias"), r"$\beta$")
    save(made, path, {"copied": "from the block that was copied, up to the sign"})


def residual(path: Path) -> None:
    specimen = grown(network(), inputs(5, 3), "deepen", "1")
    made = card(WIDTH, 3.75, specimen.call)
    inside(made, chain(made, 1.55, 2.97, specimen, "drawn"), 2.97, 0.8)
    middles = zoom(made, 1.45, 1.72, specimen.new[2].branch, "drawn", step=2.2)
    weights = [tensor_of(specimen.new, f"2.branch.{index}.weight") for index in (0, 2)]
    assert all((weight != 0).all() for weight in weights)
    first, last = (Grid(weight, np.full(weight.shape, "drawn")) for weight in weights)
    turned = Grid(first.numbers.T, first.kinds.T)
    below(made, middles[0], 0.8, turned, r"$W^{\mathsf{T}}$", 0.13, numbers=False)
    below(made, middles[2], 0.8, last, "$V$", 0.13, numbers=False)
    said = "16 units in eight pairs:\nwritten alike, read\nwith opposite signs"
    text(made, middles[1], 0.82, said, fontsize=7.2, color=SOFT, linespacing=1.45)
    save(made, path, {"drawn": "new, drawn; a bar marks negative values"})


def identity(path: Path) -> None:
    specimen = grown(network(), inputs(5, 3), "deepen", "1", method="net2net")
    made = card(WIDTH, 3.2, specimen.call)
    inside(made, chain(made, 1.55, 2.42, specimen, "set"), 2.42, 2.25)
    weight, new = tensor_of(specimen.new, "2.0.weight"), specimen.new
    assert np.array_equal(weight, np.eye(3))
    with torch.no_grad():
        hidden = new[:2](inputs(5, 3))
        before, between, after = (value[0].numpy()[:, None] for value in (hidden, new[2][0](hidden), new[2](hidden)))
    x, middle = 2.6, 1.0
    caption(made, x, middle, plain(before), "$h$")
    arrow(made, (x + CELL + 0.1, middle), (x + CELL + 0.31, middle))
    caption(made, x + CELL + 0.44, middle, Grid(weight, np.where(weight == 0, "zero", "set")), "$I$")
    x += 4 * CELL + 0.44
    arrow(made, (x + 0.13, middle), (x + 0.34, middle))
    caption(made, x + 0.47, middle, plain(between), "$Ih$")
    x += CELL + 0.47
    arrow(made, (x + 0.1, middle), (x + 0.31, middle))
    box(made, x + 0.66, middle, "ReLU", "set", wide=0.7)
    arrow(made, (x + 1.01, middle), (x + 1.22, middle))
    caption(made, x + 1.35, middle, plain(after), r"$\psi(Ih)$")
    save(made, path)


def split(path: Path) -> None:
    specimen = grown(network(), inputs(5, 3), "deepen", "0", method="netmorph")
    made = card(WIDTH, 3.05, specimen.call)
    chain(made, 1.55, 2.27, specimen, "drawn")
    turn = tensor_of(specimen.new, "1.0.weight")
    turned = specimen.after("0.weight")
    product = turn @ turned.numbers
    assert np.allclose(product, tensor_of(specimen.old, "0.weight"), atol=1e-12)
    x, middle, wide = 1.7, 1.0, 3 * CELL
    caption(made, x, middle, specimen.before("0.weight"), "$W$")
    arrow(made, (x + wide + 0.12, middle), (x + wide + 0.36, middle))
    caption(made, x + wide + 0.5, middle, turned, r"$Q^{\mathsf{T}}W$")
    text(made, x + 2 * wide + 0.73, middle, "and", fontsize=8, color=SOFT)
    caption(made, x + 2 * wide + 0.98, middle, Grid(turn, np.full(turn.shape, "drawn")), "$Q$")
    text(made, x + 3 * wide + 1.24, middle, "with", fontsize=8, color=SOFT)
    caption(made, x + 3 * wide + 1.52, middle, plain(product), r"$QQ^{\mathsf{T}}W=W$")
    save(made, path, {"drawn": "new, drawn (orthogonal)"})


def pactivation(path: Path) -> None:
    model = tenths(nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 2, bias=False)), seed=4)
    specimen = grown(model, inputs(5, 3), "deepen", "0", method="netmorph", fade=100)
    made = card(WIDTH, 3.75, specimen.call)
    inside(made, chain(made, 1.55, 2.97, specimen, "drawn"), 2.97, 1.2)
    x = torch.linspace(-2.4, 2.4, 33, dtype=torch.float64)
    shown = []
    for done in range(5):
        soft = outgrow.PActivation(nn.Tanh(), steps=4, done=done)
        style = {"color": tint("drawn", 0.7), "linewidth": 1.0}
        if done in (0, 4):
            style = {"color": HUES["drawn" if done else "kept"], "linewidth": 1.6}
        shown.append((x.numpy(), soft(x).numpy(), style))
    left, base = 4.2, 0.28
    _, low, _, high = curves(made, left, base, (2.5, 1.85), shown)
    said = {0: r"$\lambda=0$: the identity", 2: r"$\lambda=\frac{1}{2}$", 4: r"$\lambda=1$: $\psi$, here tanh"}
    for done, words in said.items():
        colour = HUES["drawn" if done else "kept"]
        text(made, left + 2.58, base + (shown[done][1][-1] - low) * high, words, ha="left", fontsize=8, color=colour)
    text(made, 2.75, base + 0.93, r"$\varphi(x)=(1-\lambda)\,x+\lambda\,\psi(x)$", fontsize=10)
    save(made, path)


def kernel(path: Path) -> None:
    """The kernel before and after, and its first place on an image with as much padding as it has."""
    model = tenths(nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, bias=False)))
    specimen = grown(model, inputs(2, 1, 4, 4), "kernel", "0", size=5)
    made = card(WIDTH, 2.85, specimen.call)
    x, middle = 0.6, 1.28
    caption(made, x, middle, specimen.before("0.weight"), "$w$")
    arrow(made, (x + 3 * CELL + 0.12, middle), (x + 3 * CELL + 0.36, middle))
    caption(made, x + 3 * CELL + 0.5, middle, specimen.after("0.weight"), r"$\bar{w}$")
    image(made, 4.75, middle, 4, specimen.old[0])
    arrow(made, (6.07, middle), (6.31, middle))
    image(made, 6.5, middle, 4, specimen.new[0])
    save(made, path)


def image(made: Card, x: float, middle: float, pixels: int, layer: nn.Conv2d) -> None:
    """Pixels with padding around them, and the kernel in its first place."""
    size, pad, wide = 0.19, layer.padding[0], layer.kernel_size[0]
    count = pixels + 2 * pad
    top = middle + count * size / 2
    for row in range(count):
        for column in range(count):
            within = pad <= row < pad + pixels and pad <= column < pad + pixels
            cell(made, x + column * size, top - (row + 1) * size, size, "plain" if within else "zero", 0.35)
    right, low = x + wide * size, top - wide * size
    line(made, [(x, top), (right, top), (right, low), (x, low), (x, top)], color=HUES["kept"], linewidth=1.6, zorder=5)
    node(made, x + wide / 2 * size, top - wide / 2 * size, radius=0.035, kind="kept")
    text(made, x + count * size / 2, top + 0.15, f"an image, padding {pad}", fontsize=7.5, color=SOFT)


def fade(path: Path) -> None:
    """The gate's levels are measured: what the new block adds, as a share of what its source would add."""
    specimen = grown(stack(layers(), layers()), inputs(5, 2), "deepen", "1", fade=8)
    made = card(WIDTH, 3.75, specimen.call)
    inside(made, chain(made, 0.95, 2.97, specimen, "copied"), 2.97, 0.3)
    zoom(made, 0.5, 1.35, specimen.new[2].branch, "copied", step=0.92, gate=True)
    model, h = copy.deepcopy(specimen.new), inputs(5, 3)
    (insert,) = specimen.plan.inserts
    source = specimen.old[insert.copy_of]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    levels = []
    for _ in range(11):
        with torch.no_grad():
            levels.append(float((model[2](h) - h).norm() / (source(h) - h).norm()))
        model(inputs(5, 2)).sum().backward()
        optimizer.step()
    left, base = 5.75, 0.62
    style = {"color": HUES["drawn"], "marker": "o", "markersize": 3}
    _, _, wide, high = curves(made, left, base, (2.5, 1.4), [(np.arange(11.0), np.array(levels), style)])
    for tick in (0, 8):
        text(made, left + tick * wide, base - 0.12, str(tick), fontsize=7, color=SOFT)
    text(made, left + 1.25, base - 0.3, "optimizer steps", fontsize=7.5, color=SOFT)
    for level in (0, 1):
        text(made, left - 0.1, base + high * level, str(level), fontsize=7, color=SOFT)
    text(made, left - 0.14, base + high / 2, r"$\lambda$", fontsize=9.5)
    save(made, path)


def zeroed(parts: Sequence[nn.Module], seed: int = 0) -> tuple[nn.Module, nn.Module]:
    """A branch, and what `outgrow.zero_init` makes of it."""
    branch = tenths(nn.Sequential(*parts), seed)
    zero = outgrow.zero_init(copy.deepcopy(branch), inputs(5, 3))
    assert zero(inputs(5, 3)).abs().max() < 1e-12
    return branch, zero


def zero_init(path: Path) -> None:
    old, new = zeroed([nn.Linear(3, 5, bias=False), nn.GELU(), nn.Linear(5, 3, bias=False)], seed=2)
    made = card(WIDTH, 2.75, "outgrow.zero_init(branch, x)")
    x, middle = 0.65, 1.3
    for name, title in (("0.weight", "W"), ("2.weight", "V")):
        was, now = tensor_of(old, name), tensor_of(new, name)
        for shown, said in ((Grid(was, np.full(was.shape, "kept")), title), (taken(now, was), rf"\bar{{{title}}}")):
            kinds = np.where(shown.numbers == was, "kept", shown.kinds)
            caption(made, x, middle, Grid(shown.numbers, kinds), f"${said}$")
            x += was.shape[1] * CELL + 0.12
            if said == title:
                arrow(made, (x, middle), (x + 0.22, middle))
                x += 0.34
        x += 0.2
    for numbers, said in ((old(inputs(5, 3))[0], "$y$"), (new(inputs(5, 3))[0], r"$\bar{y}$")):
        column = numbers.detach().numpy()[:, None]
        caption(made, x, middle, plain(np.where(np.abs(column) < 1e-12, 0, column)), said)
        if said == "$y$":
            arrow(made, (x + CELL + 0.1, middle), (x + CELL + 0.3, middle))
        x += CELL + 0.42
    save(made, path, {"copied": "taken from its partner, up to the sign"})


def branch(path: Path) -> None:
    """Not run: the branch is zeroed by `outgrow.zero_init`, the graft itself is drawn as it is described."""
    _, new = zeroed(layers(), seed=3)
    made = card(WIDTH, 3.75, 'outgrow.branch(model, x, beside="layer2")')
    for x, said in ((0.45, "b is zero by pairs …"), (4.7, "… or by a last layer of zeros")):
        text(made, x, 3.17, said, ha="left", fontsize=8)
        y = 2.38
        text(made, x, y, "$x$", fontsize=9)
        line(made, [(x + 0.1, y), (x + 0.25, y)])
        for height, parts in ((y + 0.4, ["layer2"]), (y - 0.3, ["Linear\n3 → 4", "GELU", "Linear\n4 → 3"])):
            line(made, [(x + 0.25, y), (x + 0.25, height)])
            end, step = x + 0.25, 0.95
            for index, part in enumerate(parts):
                middle = x + (0.85 + index * step if len(parts) > 1 else 0.85 + step)
                arrow(made, (end, height), (middle - 0.38, height))
                box(made, middle, height, part, "kept" if len(parts) == 1 else "drawn", wide=0.76)
                end = middle + 0.38
            total = x + 3.4
            line(made, [(end, height), (total, height)])
            arrow(made, (total, height), (total, y + (0.1 if height > y else -0.1)))
        node(made, total, y, "+")
        arrow(made, (total + 0.1, y), (total + 0.36, y))
        text(made, total + 0.46, y, "$y$", fontsize=9)
        text(made, x + 0.14, y + 0.4, "$m$", fontsize=9, color=SOFT)
        text(made, x + 0.14, y - 0.3, "$b$", fontsize=9, color=SOFT)
        first, last = (tensor_of(new, name) for name in ("0.weight", "2.weight"))
        if "pairs" not in said:
            first, last = tensor_of(tenths(nn.Sequential(*layers()), 3), "0.weight"), np.zeros_like(last)
        below(made, x + 0.85, 0.95, Grid(first, np.full(first.shape, "drawn")), "$W$")
        below(made, x + 2.75, 0.95, Grid(last, np.where(last == 0, "zero", "drawn")), "$V$")
    save(made, path)


DRAWINGS: dict[str, Callable[[Path], None]] = {
    "deepen": deepen,
    "residual": residual,
    "identity": identity,
    "split": split,
    "pactivation": pactivation,
    "kernel": kernel,
    "fade": fade,
    "branch": branch,
    "zero-init": zero_init,
}
