"""Plan a brief check of outputs before a run starts: whether eval mode suffices, and on which part of the example.

At a growth that has passed a dry run, a run compares one pass of the old model with one of the grown model, in eval mode, on a
part of the example. Two conditions are checked beforehand, under which this is as good as a thorough check.

*Modes.* The model runs in both modes on the meta device. If train mode computes the same sums, products and norms of the same
tensors in the same order, and differs only in noise and in the source of batch statistics (taken along the feature axis), then
a plan that is exact in one mode is exact in the other: equal units have equal statistics, and units that are zero or not read
stay so. Anything else in train mode (additional heads, losses) needs the thorough check, and so does a model that runs other
operators at the time of the growth than when its brief check was planned.

*Parts.* Let y be the outputs, and r random values of their shape. The *influence* of a tensor w of the model on the outputs is

    s(w) = ‖∂⟨r, y⟩ / ∂w‖ / ‖y‖

which depends neither on the number of outputs nor on their scale. A part of the example suffices if the influence of each
tensor is at least a tenth of that on the whole example, with at least three quarters as many entries having one (except for
tables, of which the whole example reaches less than half). That excludes one sample for a model that compares samples, a sample
for which half of the units are inactive, and a text that some expert never receives. Candidates are one sample, and then
shorter lengths (of sequences, of both sides of an image) of at least 64.
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
from outgrow.model.example import Example, call
from outgrow.model.kept_outputs import model_outputs
from outgrow.model.known_values import on_meta
from outgrow.model.sandbox import elementary, precise, random_state, substituted, tensors_of, untouched
from outgrow.verify.outputs import HALF, RandomAtMean, as_real, several_per_sample, wider
from outgrow.verify.scalar_reads import ReplayScalars, ScalarReads, read_scalars

OWN = "a tensor of the model"
SHORTEST = 64  # minimum of a shortened length: attention, norms and pooling need enough positions
SHARE, ENTRIES = 0.1, 0.75  # tolerant, since the norm of a few random values varies much
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
class BriefCheck:
    """A planned brief check. `lengths`: length of each axis of each tensor of the example in its part, in order.

    `seen`: the operators that the model ran in train mode when the check was planned or refreshed; if they have changed since,
    the check has to be thorough. (The brief check itself runs eval mode.)
    """

    lengths: tuple[int, ...]
    drops: bool = False  # train mode has dropout of values
    seen: Any = None
    scalars: ScalarReads | None = None  # scalars of the example that the model's code reads

    def is_current(self, model: nn.Module, example: Example) -> bool:
        """Whether the model still runs the same operators, apart from sizes."""
        return self.seen is not None and self.seen == _operators(model, example, self.scalars)

    def refresh(self, model: nn.Module, example: Example) -> None:
        """Record the operators again, after a growth that adds some."""
        self.seen = _operators(model, example, self.scalars)


def _operators(model: nn.Module, example: Example, scalars: ScalarReads | None) -> Any:
    """All operators that run in train mode, in order; None if the model does not run on the meta device."""
    names = OperatorList()
    with random_state():
        return names.all if _run_on_meta(model, example, lambda _: {True: names}, scalars) else None


@uncompiled()
def plan_brief_check(model: nn.Module, example: Example) -> BriefCheck | None:
    """The brief check for growths of this model that have passed a dry run; None if they need the thorough check."""
    with random_state():
        scalars, passes = None, _data_flows(model, example, None)
        if passes is None:
            scalars = read_scalars(model, example)
            passes = None if scalars is None else _data_flows(model, example, scalars)
        seen = _operators(model, example, scalars)
        if passes is None or seen is None or passes[0].names != passes[1].names or any(flow.mixes for flow in passes):
            return None
        return BriefCheck(_smallest_part(model, example), passes[1].drops, seen, scalars)


def part_of(example: Example, lengths: Sequence[int]) -> Example:
    """The part of an example with the first entries along each axis, as many as `lengths` says."""
    leaves, form = tree_flatten(example)
    ahead = iter(lengths)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            for axis in range(leaf.ndim):
                leaf = leaf.narrow(axis, 0, next(ahead))
            leaves[index] = leaf.contiguous()
    part: Example = tree_unflatten(leaves, form)
    return part


class OperatorList(TorchDispatchMode):
    """Records which operators run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.all: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.all.append(func)
        return func(*args, **(kwargs or {}))


class DataFlow(TorchDispatchMode):
    """Records the data flow: for each operator that is not elementwise, its name, the shape of its result, and the operators
    and tensors that its inputs come from; for each elementwise operator, its scalar arguments.

    Noise, and results computed from noise only, are left out.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[Any] = []
        self.drops = False
        self.mixes = False  # batch statistics may mix units
        self._kinds: list[str] = []  # names of the recorded operators
        self._from: dict[int, frozenset[Any]] = {key: frozenset([name]) for key, name in names.items()}
        self._alive: list[Tensor] = []  # keeps tensors alive, so that ids stay unique

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket).removeprefix("aten.")
        leaves = tree_flatten((args, kwargs or {}))[0]
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        origins = frozenset().union(*(self._from.get(id(one), frozenset()) for one in inputs)) if inputs else frozenset()
        noise = torch.Tag.nondeterministic_seeded in func.tags
        self.drops |= noise and bool(args) and isinstance(args[0], Tensor) and several_per_sample(args[0])
        results = [one for one in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(one, Tensor)]
        if torch.Tag.pointwise in func.tags and not noise:
            constants = [leaf for leaf in leaves if isinstance(leaf, float) or (isinstance(leaf, int) and leaf is not True)]
            if constants and origins and any(one.is_floating_point() for one in results):
                self.names.append((name.rstrip("_"), *(str(float(one)) for one in constants)))  # as text, since NaN ≠ NaN
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
        """Whether axis 1, which batch norms use, is the feature axis: of a matrix, or of the output of convolutions."""
        kinds = [self._kinds[one] if isinstance(one, int) else one for one in self._from.get(id(x), frozenset())]
        return x.ndim == 2 or all(kind.startswith(CHANNELS) for kind in kinds if kind != OWN)


def _data_flows(model: nn.Module, example: Example, scalars: ScalarReads | None) -> tuple[DataFlow, DataFlow] | None:
    """The data flow in eval mode and in train mode, on the meta device; None if the model does not run there."""
    made: dict[bool, DataFlow] = {}

    def recorders(origins: Mapping[int, str]) -> Mapping[bool, DataFlow]:
        made.update({False: DataFlow(origins), True: DataFlow(origins)})
        return made

    return (made[False], made[True]) if _run_on_meta(model, example, recorders, scalars) else None


def _run_on_meta(
    model: nn.Module,
    example: Example,
    recorders: Callable[[Mapping[int, str]], Mapping[bool, Any]],
    scalars: ScalarReads | None,
) -> bool:
    """Run a model on the meta device with replayed scalars, once per mode in `recorders`; False if it fails."""
    tensors = {name: tensor.detach().to("meta") for name, tensor in tensors_of(model).items()}
    given = on_meta(example)
    leaves = [leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, Tensor)]
    origins = {id(tensor): OWN for tensor in tensors.values()} | {id(leaf): f"input {n}" for n, leaf in enumerate(leaves)}
    try:
        for training, recorder in recorders(origins).items():
            with untouched(model, buffers=False), elementary(), substituted(model, tensors):
                model.train(training)
                with ReplayScalars(scalars[training]) if scalars else nullcontext(), recorder:
                    call(model, given)
    except Exception:  # code that reads values, or an example that is unsuitable for a mode
        return False
    return True


def _smallest_part(model: nn.Module, example: Example) -> tuple[int, ...]:
    """Lengths of the smallest part of the example that suffices."""
    shapes = [tuple(leaf.shape) for leaf in tree_flatten(example)[0] if isinstance(leaf, Tensor)]
    best = [list(shape) for shape in shapes]
    try:
        whole = influence_on_outputs(model, example)
    except Exception:  # without gradients the influence is unknown
        whole = []
    if not any(one.amount for one in whole) or _may_hold_indices(example):
        return _flat(best)
    for lengths in _samples(shapes):
        if _is_enough(model, part_of(example, _flat(lengths)), whole):
            best = lengths
    for size in sorted({size for shape in shapes for size in shape[1:]}, reverse=True):
        for shorter in _halves(size):
            lengths = [[now[0], *(shorter if n == size else n for n in now[1:])] if now else [] for now in best]
            if _is_enough(model, part_of(example, _flat(lengths)), whole):
                best = lengths
                break
    return _flat(best)


def _may_hold_indices(example: Example) -> bool:
    """Whether the example may contain indices, on a device where an index out of range is fatal."""
    leaves = [leaf for leaf in tree_flatten(example)[0] if isinstance(leaf, Tensor) and leaf.device.type != "cpu"]
    return any(leaf.dtype in (torch.int32, torch.int64) and leaf.numel() > 0 for leaf in leaves)


def _samples(shapes: Sequence[tuple[int, ...]]) -> Iterator[list[list[int]]]:
    """Lengths of one sample, if all tensors have samples along their first axis."""
    counts = {shape[0] if shape else 0 for shape in shapes}
    if len(counts) == 1 and counts.pop() > 1:
        yield [[1, *shape[1:]] for shape in shapes]


def _halves(size: int) -> list[int]:
    """Repeated halves of a size, the smallest first."""
    sizes = []
    while size % 2 == 0 and size // 2 >= SHORTEST:
        size //= 2
        sizes.append(size)
    return sizes[::-1]


def _flat(lengths: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(length for axes in lengths for length in axes)


def _is_enough(model: nn.Module, part: Example, whole: Sequence[Influence]) -> bool:
    try:
        found = influence_on_outputs(model, part)
        return found[0].finite >= whole[0].finite and all(here.enough(there) for here, there in zip(found, whole, strict=True))
    except Exception:  # the model does not run on the part
        return False


@dataclass(frozen=True)
class Influence:
    """The influence of a tensor on the outputs, and the share of its entries that have one."""

    amount: float
    entries: float
    finite: bool  # whether all outputs were finite

    def enough(self, whole: Influence) -> bool:
        return self.amount >= SHARE * whole.amount and (whole.entries < 0.5 or self.entries >= ENTRIES * whole.entries)


def influence_on_outputs(model: nn.Module, example: Example) -> list[Influence]:
    """The influence of each parameter on the outputs on the example; the model stays unchanged.

    Parameters that are zero would hide the layers before them, and are replaced by random values.
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
            module._backward_hooks = module._backward_pre_hooks = OrderedDict()  # the user's hooks must not see these gradients
        model.eval()
        with RandomAtMean():
            outputs = as_real(model_outputs(call(model, wider(example) if half else example)))
        total = torch.zeros((), device=leaves[0].device)
        for output in outputs:
            values = output[torch.isfinite(output)]
            random = torch.randn(values.shape, generator=generator).to(values)
            total = total + ((values * random).sum() / values.detach().norm().clamp_min(1e-30)).to(total)
        gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    none = torch.zeros((2,), device=leaves[0].device)
    found = [none if g is None else torch.stack([g.norm(), g.count_nonzero() / g.numel()]).to(none) for g in gradients]
    finite = all(bool(torch.isfinite(output).all()) for output in outputs)
    return [Influence(amount, entries, finite) for amount, entries in torch.stack(found).tolist()]
