"""What a brief check of outputs needs, found out before a run starts: that eval mode will do, and on how little of the example.

At a growth that was rehearsed, a run compares one pass of the old model with one of the grown model, in eval mode, on a part of
the example. Two things are looked at beforehand to see that this shows what a thorough check would show.

*Modes.* The model is watched in both modes, without numbers. If train mode makes the same sums, products and norms of the same
things in the same order, and differs in noise and where batch statistics come from, which go by the axis of the features, then
a plan that is exact in one mode is exact in the other: units that are alike have alike statistics, and units that nobody
reads, or that are zero, stay so. Whatever else train mode does (heads of its own, losses) needs the thorough check, and so does
a model whose code does something else by the time of the growth than it did when it was looked at last.

*Parts.* Let y be the outputs, and r random numbers of their shape. A tensor w of the model *shows* in the outputs by

    s(w) = ‖∂⟨r, y⟩ / ∂w‖ / ‖y‖

which does not depend on how many outputs there are, nor on their scale. A part of the example will do if each tensor shows on
it at least a tenth as much as on the whole, by three quarters as many of its entries (fewer will do of a table, of which the
whole shows less than half). One sample of a model that compares samples, one that half of the units are off for, or a text that
some expert never sees, will not. Parts are one sample, and then shorter lengths (of sequences, of both sides of an image), of
which at least 64 are left.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from outgrow.model.compiled import uncompiled
from outgrow.model.example import Example, call, outputs_in
from outgrow.model.sandbox import elementary, on_meta, precise, random_state, substituted, tensors_of, untouched
from outgrow.verify.outputs import HALF, Sober, many, real_numbers, wider
from outgrow.verify.scalar_reads import Answered, Answers, answers

OWN = "a tensor of the model"
LEAST = 64  # of a length that is cut: what attends, normalises or pools over it still has something to choose from
SHARE, ENTRIES = 0.1, 0.75  # a share of a random length: that of few numbers varies a good deal
CHANNELS = (
    "convolution",
    "max_pool",
    "avg_pool",
    "_adaptive_avg_pool",
    "native_batch_norm",
    "_native_batch_norm",
    "cat",
    "input",
)
MADE = ("empty", "new_", "zeros", "ones", "full", "rand", "scalar_tensor", "arange")
FACTORIES = (*MADE, "_to_copy", "clone", "copy_", "fill_")


@dataclass(eq=False)
class Brief:
    """How to look at a model briefly: what is left of each axis of each tensor of its example, one after the other.

    `seen` is all that the model computed in train mode when it was looked at last: code that does something else by now has to
    be looked at thoroughly. (Eval mode is what the brief check runs.)
    """

    lengths: tuple[int, ...]
    drops: bool = False  # in train mode, numbers are dropped at random
    seen: Any = None
    told: Answers | None = None  # numbers of the example that its code looks at

    def still(self, model: nn.Module, example: Example) -> bool:
        """Whether the model computes what it did, but for its sizes."""
        return self.seen is not None and self.seen == _operators(model, example, self.told)

    def look(self, model: nn.Module, example: Example) -> None:
        self.seen = _operators(model, example, self.told)


def _operators(model: nn.Module, example: Example, told: Answers | None) -> Any:
    """All operators that run in train mode, in order; None if the model does not run without numbers."""
    names = Names()
    with random_state():
        return names.all if _ran(model, example, lambda _: {True: names}, told) else None


@uncompiled()
def study(model: nn.Module, example: Example) -> Brief | None:
    """How a rehearsed growth of this model can be checked briefly; None if it can't."""
    with random_state():
        told, passes = None, _watched(model, example, None)
        if passes is None:
            told = answers(model, example)
            passes = None if told is None else _watched(model, example, told)
        seen = _operators(model, example, told)
        if passes is None or seen is None or passes[0].names != passes[1].names or any(watch.mixes for watch in passes):
            return None
        return Brief(_least(model, example), passes[1].drops, seen, told)


def part_of(example: Example, lengths: Sequence[int]) -> Example:
    """The first so many entries along each axis."""
    leaves, form = tree_flatten(example)
    ahead = iter(lengths)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            for axis in range(leaf.ndim):
                leaf = leaf.narrow(axis, 0, next(ahead))
            leaves[index] = leaf.contiguous()
    part: Example = tree_unflatten(leaves, form)
    return part


class Names(TorchDispatchMode):
    """Notes which operators run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.all: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.all.append(func)
        return func(*args, **(kwargs or {}))


class Watch(TorchDispatchMode):
    """Notes what is computed from what: for each operator that is not done entry by entry its name, the shape of its result and
    the operators and tensors that its inputs come from; for those that are, numbers that they compute with.

    Noise, and what is made of it alone, is left out.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[Any] = []
        self.drops = False
        self.mixes = False  # batch statistics may go over units
        self._kinds: list[str] = []  # of the operators that were noted
        self._from: dict[int, frozenset[Any]] = {key: frozenset([name]) for key, name in names.items()}
        self._alive: list[Tensor] = []  # so that no other tensor gets the same id

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket).removeprefix("aten.")
        leaves = tree_flatten((args, kwargs or {}))[0]
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        origins = frozenset().union(*(self._from.get(id(one), frozenset()) for one in inputs)) if inputs else frozenset()
        noise = torch.Tag.nondeterministic_seeded in func.tags
        self.drops |= noise and bool(args) and isinstance(args[0], Tensor) and many(args[0])
        results = [one for one in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(one, Tensor)]
        if torch.Tag.pointwise in func.tags and not noise:
            numbers = [leaf for leaf in leaves if isinstance(leaf, float) or (isinstance(leaf, int) and leaf is not True)]
            if numbers and origins and any(one.is_floating_point() for one in results):
                self.names.append((name.rstrip("_"), *(str(float(number)) for number in numbers)))  # NaN is no other NaN
        elif not (noise or func.is_view or name.startswith(FACTORIES)):
            if "batch_norm" in name:
                self.mixes |= not self._by_channel(inputs[0])
            self.names.append(
                ("batch_norm" if "batch_norm" in name else name, *(tuple(one.shape) for one in results[:1]), origins)
            )
            origins = frozenset([len(self._kinds)])
            self._kinds.append(name)
        if noise or name.startswith(MADE):
            origins = frozenset()
        for one in results:
            self._from[id(one)] = origins
            self._alive.append(one)
        return result

    def _by_channel(self, x: Tensor) -> bool:
        """Whether features lie along the axis that a batch norm goes by: those of a matrix, or of what convolutions put out."""
        kinds = [self._kinds[one] if isinstance(one, int) else one for one in self._from.get(id(x), frozenset())]
        return x.ndim == 2 or all(kind.startswith(CHANNELS) for kind in kinds if kind != OWN)


def _watched(model: nn.Module, example: Example, told: Answers | None) -> tuple[Watch, Watch] | None:
    """A pass in eval mode and one in train mode, without numbers; None if the model does not run without."""
    made: dict[bool, Watch] = {}

    def watches(origins: Mapping[int, str]) -> Mapping[bool, Watch]:
        made.update({False: Watch(origins), True: Watch(origins)})
        return made

    return (made[False], made[True]) if _ran(model, example, watches, told) else None


def _ran(
    model: nn.Module,
    example: Example,
    watches: Callable[[Mapping[int, str]], Mapping[bool, Any]],
    told: Answers | None,
) -> bool:
    """Run a model without numbers but those it is told, in each mode that `watches` gives a watch for; whether it could."""
    tensors = {name: tensor.detach().to("meta") for name, tensor in tensors_of(model).items()}
    given = on_meta(example)
    leaves = [leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, Tensor)]
    origins = {id(tensor): OWN for tensor in tensors.values()} | {id(leaf): f"input {n}" for n, leaf in enumerate(leaves)}
    try:
        for training, watch in watches(origins).items():
            with untouched(model, buffers=False), elementary(), substituted(model, tensors):
                model.train(training)
                with Answered(told[training]) if told else nullcontext(), watch:
                    call(model, given)
    except Exception:  # code that looks at numbers; or a mode that the example is not made for
        return False
    return True


def _least(model: nn.Module, example: Example) -> tuple[int, ...]:
    """Lengths of the least part that will do."""
    shapes = [tuple(leaf.shape) for leaf in tree_flatten(example)[0] if isinstance(leaf, Tensor)]
    best = [list(shape) for shape in shapes]
    try:
        whole = shown(model, example)
    except Exception:  # no gradients: then nothing tells what a part would show
        whole = []
    if not any(showing.much for showing in whole) or _points(example):
        return _flat(best)
    for lengths in _samples(shapes):
        if _shows(model, part_of(example, _flat(lengths)), whole):
            best = lengths
    for size in sorted({size for shape in shapes for size in shape[1:]}, reverse=True):
        for less in _lesser(size):
            lengths = [[now[0], *(less if n == size else n for n in now[1:])] if now else [] for now in best]
            if _shows(model, part_of(example, _flat(lengths)), whole):
                best = lengths
                break
    return _flat(best)


def _points(example: Example) -> bool:
    """Whether numbers of the example may be positions in it, on a device that does not survive one that is out of range."""
    leaves = [leaf for leaf in tree_flatten(example)[0] if isinstance(leaf, Tensor) and leaf.device.type != "cpu"]
    return any(leaf.dtype in (torch.int32, torch.int64) and leaf.numel() > 0 for leaf in leaves)


def _samples(shapes: Sequence[tuple[int, ...]]) -> Iterator[list[list[int]]]:
    """One sample, where all tensors have samples along their first axis."""
    counts = {shape[0] if shape else 0 for shape in shapes}
    if len(counts) == 1 and counts.pop() > 1:
        yield [[1, *shape[1:]] for shape in shapes]


def _lesser(size: int) -> list[int]:
    """Halves of halves, the least first."""
    sizes = []
    while size % 2 == 0 and size // 2 >= LEAST:
        size //= 2
        sizes.append(size)
    return sizes[::-1]


def _flat(lengths: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(length for axes in lengths for length in axes)


def _shows(model: nn.Module, part: Example, whole: Sequence[Showing]) -> bool:
    try:
        found = shown(model, part)
        return found[0].finite >= whole[0].finite and all(here.enough(there) for here, there in zip(found, whole, strict=True))
    except Exception:  # it does not run on the part
        return False


@dataclass(frozen=True)
class Showing:
    """How much a tensor shows in outputs, and by which share of its entries."""

    much: float
    entries: float
    finite: bool  # all outputs were

    def enough(self, whole: Showing) -> bool:
        return self.much >= SHARE * whole.much and (whole.entries < 0.5 or self.entries >= ENTRIES * whole.entries)


def shown(model: nn.Module, example: Example) -> list[Showing]:
    """For each parameter, how much it shows in the outputs on the example; the model is left as it was.

    Parameters that are zero, and hide what is before them as long as they are, are taken to be random numbers.
    """
    half = any(tensor.dtype in HALF for tensor in tensors_of(model).values())
    generator = torch.Generator().manual_seed(0)
    tensors = {name: tensor.detach() for name, tensor in tensors_of(model).items()}
    tensors = {name: tensor.float() if tensor.dtype in HALF else tensor for name, tensor in tensors.items()}
    learned = [name for name, one in model.named_parameters() if one.is_floating_point() and one.numel()]
    for name in learned:
        if not bool(tensors[name].any()):
            tensors[name] = torch.randn(tensors[name].shape, generator=generator).to(tensors[name]) * 0.1
    leaves = [tensors[name].requires_grad_() for name in learned]
    with untouched(model), precise(), substituted(model, tensors), torch.enable_grad():
        for module in model.modules():
            module._backward_hooks = module._backward_pre_hooks = OrderedDict()  # nobody is to hear of these gradients
        model.eval()
        with Sober():
            outputs = real_numbers(outputs_in(call(model, wider(example) if half else example)))
        total = torch.zeros((), device=leaves[0].device)
        for output in outputs:
            numbers = output[torch.isfinite(output)]
            random = torch.randn(numbers.shape, generator=generator).to(numbers)
            total = total + ((numbers * random).sum() / numbers.detach().norm().clamp_min(1e-30)).to(total)
        gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    none = torch.zeros((2,), device=leaves[0].device)
    found = [none if g is None else torch.stack([g.norm(), g.count_nonzero() / g.numel()]).to(none) for g in gradients]
    finite = all(bool(torch.isfinite(output).all()) for output in outputs)
    return [Showing(much, entries, finite) for much, entries in torch.stack(found).tolist()]
