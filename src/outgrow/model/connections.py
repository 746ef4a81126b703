"""Connections between layers, and the gradient of a loss with respect to units that are not there yet.

A new unit adds z·σ(u·x) to what its reader computes: u is its row in the writer, whose input is x, and z its column in the
reader. For a small unit with σ(a) ≈ a, the loss changes by

    zᵀ M u,   M = Σ over samples and positions of (∂L/∂ reader's output) · (writer's input)ᵀ

so M is the mixed derivative of the loss in z and u, and the gradient of the loss with respect to a direct connection from the
writer's input to the reader's output (U. Evci et al., 2022: GradMax). For convolutions, u and z are kernels: x are the patches
that the writer sees, and M has a row for each entry of z. Maps that are pooled on the way are averaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from outgrow.errors import GrowthError, MethodError
from outgrow.model.batches import drawn_again
from outgrow.model.sandbox import untouched
from outgrow.model.walk_modules import module_at

Loss = Callable[[nn.Module, Any], Tensor]
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
LAYERS = (nn.Linear, *CONVOLUTIONS)
CONV1D = "Conv1D"  # a linear layer of Transformers' GPT-2, with a weight (in, out); the class is not imported for it
NO_GRADIENT = "loss(model, batch) has no gradient: use the model that it gets, with gradients on, and do not detach the loss"
LARGEST = 2**24  # values of patches at a time


@dataclass(frozen=True)
class Reader:
    """A layer that reads units: its path, the columns of the units, and the number of adjacent columns per unit."""

    path: str
    columns: tuple[int, ...]
    length: int = 1


@dataclass(frozen=True)
class Connection:
    """The layer that writes some units (its path and the units' rows), and the layers that read them."""

    writer: str
    rows: tuple[int, ...]
    readers: tuple[Reader, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        return self.writer, *(reader.path for reader in self.readers)


@dataclass
class Observed:
    """Means over batches. Either a problem, or what was requested.

    matrix: (entries of a unit's columns in all readers, entries of a row). units: (units, units), the mean product of two units
    where the first reader sees them. inputs: (entries of a row, entries of a row), the same for the writer's inputs.
    """

    problem: str = ""
    matrix: Tensor | None = None
    units: Tensor | None = None
    inputs: Tensor | None = None


def is_transposed(layer: nn.Module) -> bool:
    """Whether a layer is linear and its weight is (in, out)."""
    weight = getattr(layer, "weight", None)
    return type(layer).__name__ == CONV1D and isinstance(weight, Tensor) and weight.ndim == 2


def is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) or is_transposed(layer)


def weight_of(layer: nn.Module) -> Tensor:
    """The weight of a layer as (out, in, …)."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight.t() if is_transposed(layer) else weight


def check_batches(batches: Any, loss: Any, usual: str) -> None:
    """Raise unless batches can be read more than once, there is at least one, and the loss can be called."""
    if not callable(loss):
        raise MethodError(f"loss is {_kind(loss)}: pass a function of (model, batch) that returns the loss; write e.g. {usual}")
    if isinstance(batches, (str, bytes, Tensor, Mapping, Iterator)) or not isinstance(batches, Iterable):
        once = isinstance(batches, Iterator)  # iter(batches) would draw from the random state, and start a DataLoader's workers
        found = "an iterator, which can be read only once" if once else f"of type {type(batches).__name__}"
        raise MethodError(f"batches is {found}: pass a list of batches or a DataLoader; write e.g. {usual}")


def _kind(given: Any) -> str:
    return "None" if given is None else f"of type {type(given).__name__}"


def observe(
    model: nn.Module,
    connections: Mapping[str, Connection],
    batches: Iterable[Any],
    loss: Loss,
    want: Sequence[str] = ("matrix",),
    seed: int = 0,
) -> dict[str, Observed]:
    """Run the loss on all batches and collect what is wanted, by the names of connections.

    The model runs in its present mode; buffers, modes, gradients and the random state are left as they were. want: names of
    fields of `Observed`.
    """
    found = {name: Observed() for name in connections}
    count = 0
    with untouched(model), drawn_again(batches, seed), torch.enable_grad():
        for batch in batches:
            with _Recorded(model, {path for connection in connections.values() for path in connection.paths}) as recorded:
                value = loss_of(loss, model, batch)
                if "matrix" in want and connections and not value.requires_grad:
                    raise MethodError(NO_GRADIENT)
                gradients = recorded.gradients(value) if "matrix" in want else {}
            count += 1
            with torch.no_grad():
                for name, connection in connections.items():
                    if not found[name].problem:
                        _add(found[name], model, connection, recorded, gradients, want)
    if not count:
        raise MethodError("there are no batches: pass a list of at least one batch")
    for one in found.values():
        for field in want:
            total = getattr(one, field)
            setattr(one, field, None if total is None or one.problem else total / count)
    return found


def loss_of(loss: Loss, model: nn.Module, batch: Any) -> Tensor:
    try:
        value = loss(model, batch)
    except GrowthError:
        raise
    except Exception as error:
        raise MethodError(f"loss(model, batch) failed with {type(error).__name__}: {error}") from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        given = (
            f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"an object of {type(value).__name__}"
        )
        raise MethodError(f"loss(model, batch) returned {given}: it must return a tensor with one value")
    if not bool(torch.isfinite(value)):
        raise MethodError(f"loss(model, batch) is {value.item()}: pass batches on which it is finite")
    return value


def check_finite(gradient: Tensor, where: str) -> None:
    if not bool(torch.isfinite(gradient).all()):
        raise MethodError(f"the gradient of loss(model, batch) at {where} is not finite: pass batches on which it is")


class _Recorded:
    """Inputs and outputs of layers in one call of the loss."""

    def __init__(self, model: nn.Module, paths: set[str]) -> None:
        self.model, self.paths = model, paths
        self.inputs: dict[str, list[Tensor]] = {path: [] for path in paths}
        self.outputs: dict[str, list[Tensor]] = {path: [] for path in paths}
        self.handles: list[Any] = []

    def __enter__(self) -> _Recorded:
        for path in self.paths:
            self.handles.append(module_at(self.model, path).register_forward_hook(self._hook(path)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _hook(self, path: str) -> Callable[[nn.Module, tuple[Any, ...], Any], Any]:
        def hook(module: nn.Module, given: tuple[Any, ...], output: Any) -> Any:
            if not torch.is_grad_enabled() or not given or not isinstance(given[0], Tensor) or not isinstance(output, Tensor):
                return None
            if not output.requires_grad:  # everything before it is frozen
                output = output.detach().requires_grad_()
            self.inputs[path].append(given[0].detach().clone())  # later operators may write into it
            self.outputs[path].append(output)
            return output.clone()

        return hook

    def gradients(self, value: Tensor) -> dict[str, Tensor]:
        """The gradient at the output of each layer that ran once; layers that the loss does not depend on are left out."""
        paths = [path for path in self.paths if len(self.outputs[path]) == 1]
        if not value.requires_grad or not paths:
            return {}
        wanted = [self.outputs[path][0] for path in paths]
        found = torch.autograd.grad(value.reshape(()), wanted, allow_unused=True)
        kept = {path: gradient for path, gradient in zip(paths, found, strict=True) if gradient is not None}
        for path, gradient in kept.items():
            check_finite(gradient, f"the output of {path}")
        return kept


def _add(
    one: Observed,
    model: nn.Module,
    connection: Connection,
    recorded: _Recorded,
    gradients: Mapping[str, Tensor],
    want: Sequence[str],
) -> None:
    """Add the results of one batch, or note the problem."""
    for path in connection.paths:
        calls = len(recorded.outputs[path])
        if calls != 1:
            one.problem = (
                f"{path} ran {calls} times in one call of the loss, and once is needed"
                if calls
                else (f"{path} did not run with gradients in loss(model, batch): use the model that it gets, with gradients on")
            )
            return
    if "matrix" in want and (missing := [reader.path for reader in connection.readers if reader.path not in gradients]):
        one.problem = f"the loss does not depend on the output of {missing[0]}"
        return
    writer, x = module_at(model, connection.writer), recorded.inputs[connection.writer][0]
    if x.ndim < 2 or (isinstance(writer, CONVOLUTIONS) and x.ndim != writer.weight.ndim):
        one.problem = f"the input of {connection.writer} has no batch axis"
        return
    parts: list[Tensor] = []
    for reader in connection.readers if "matrix" in want else ():
        layer = module_at(model, reader.path)
        part = _matrix(writer, x, layer, reader.length, recorded.inputs[reader.path][0], gradients[reader.path])
        if part is None:
            one.problem = f"the positions at which {reader.path} reads are not those at which {connection.writer} writes"
            return
        parts.append(part)
    sums: dict[str, Tensor] = {"matrix": torch.cat(parts)} if parts else {}
    if "units" in want:
        first = connection.readers[0]
        sums["units"] = _products_of_units(module_at(model, first.path), first, recorded.inputs[first.path][0])
    if "inputs" in want:
        sums["inputs"] = _products_of_inputs(writer, x)
    for field, value in sums.items():
        before = getattr(one, field)
        setattr(one, field, value if before is None else before + value)


def _matrix(writer: nn.Module, x: Tensor, layer: nn.Module, length: int, seen: Tensor, gradient: Tensor) -> Tensor | None:
    """The matrix of one writer and one reader, summed over samples and positions; None if their positions do not match."""
    x, seen, gradient = _plain(x), _plain(seen), _plain(gradient)
    if is_linear(writer):
        if not is_linear(layer) or length != 1 or gradient.shape[:-1] != x.shape[:-1]:
            return None
        return gradient.flatten(0, -2).T @ x.flatten(0, -2)
    if len(gradient) != len(x):
        return None
    total: Tensor | None = None
    for here in _chunks(writer, x):
        part = _of_maps(patches(writer, x[here]), layer, length, seen[here], gradient[here])
        if part is None:
            return None
        total = part if total is None else total + part
    return total


def _of_maps(maps: Tensor, layer: nn.Module, length: int, seen: Tensor, gradient: Tensor) -> Tensor | None:
    """The matrix for a writer that is a convolution. maps: (sample, entry of a row, height, width)."""
    if isinstance(layer, CONVOLUTIONS):
        seen, gradient = (t.unsqueeze(2) if t.ndim == 3 else t for t in (seen, gradient))
        maps = _padded(layer, F.adaptive_avg_pool2d(maps, (seen.shape[2], seen.shape[3])))
        kernel, stride, dilation = (_two(sizes) for sizes in (layer.kernel_size, layer.stride, layer.dilation))
        shape = (gradient.shape[1], maps.shape[1], *kernel)
        found: Tensor = conv2d_weight(maps, shape, gradient, stride, 0, dilation)  # (out, entry of a row, height, width)
        return found.flatten(2).transpose(1, 2).flatten(0, 1)
    if gradient.ndim == 2:  # flattened or pooled maps: (sample, out)
        height = max(round(math.sqrt(length * maps.shape[2] / maps.shape[3])), 1)
        if length % height:
            return None
        pooled = F.adaptive_avg_pool2d(maps, (height, length // height)).flatten(2)
        return torch.einsum("no,nup->opu", gradient, pooled).flatten(0, 1)
    last = maps.movedim(1, -1)  # channels last, as (sample, height, width, …) or as (sample, position, …)
    last = last if gradient.ndim == 4 else last.flatten(1, 2)
    if length != 1 or gradient.shape[:-1] != last.shape[:-1]:
        return None
    return gradient.flatten(0, -2).T @ last.flatten(0, -2)


def patches(writer: nn.Module, x: Tensor) -> Tensor:
    """What a convolution multiplies with its kernel: (sample, entry of a kernel, height, width)."""
    assert isinstance(writer, CONVOLUTIONS)
    x = _padded(writer, x if x.ndim == 4 else x.unsqueeze(2))
    kernel, stride, dilation = (_two(sizes) for sizes in (writer.kernel_size, writer.stride, writer.dilation))
    height, width = ((s - d * (k - 1) - 1) // t + 1 for s, k, t, d in zip(x.shape[2:], kernel, stride, dilation, strict=True))
    found: Tensor = F.unfold(x, kernel, dilation, 0, stride).unflatten(2, (height, width))
    return found


def _padded(layer: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    """An input with the padding of a layer, as (sample, channel, height, width)."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    sides = list(layer._reversed_padding_repeated_twice)
    return F.pad(x, [*sides, *([0] * (4 - len(sides)))], mode=mode) if any(sides) else x


def _two(sizes: Sequence[Any]) -> tuple[int, int]:
    return (1, int(sizes[0])) if len(sizes) == 1 else (int(sizes[0]), int(sizes[1]))


def _chunks(writer: nn.Module, x: Tensor) -> list[slice]:
    """Samples whose patches fit into memory together."""
    assert isinstance(writer, CONVOLUTIONS)
    size = max(x[0].numel() * math.prod(writer.kernel_size), 1)
    step = max(LARGEST // size, 1)
    return [slice(start, start + step) for start in range(0, len(x), step)]


def _products_of_units(layer: nn.Module, reader: Reader, seen: Tensor) -> Tensor:
    """The mean over samples and positions of the products of two units, where a reader sees them."""
    seen = _plain(seen)
    axis = -1 if is_linear(layer) else 1
    mine = seen.index_select(axis, torch.tensor(reader.columns, device=seen.device)).movedim(axis, -1)
    flat: Tensor = mine.unflatten(-1, (-1, reader.length)).transpose(-1, -2).flatten(0, -2)  # (sample and position, unit)
    return flat.T @ flat / len(flat)


def _products_of_inputs(writer: nn.Module, x: Tensor) -> Tensor:
    """The mean over samples and positions of the products of two entries of what a writer multiplies with a row."""
    x = _plain(x)
    if is_linear(writer):
        flat = x.flatten(0, -2)
        return flat.T @ flat / len(flat)
    total, count = torch.zeros((), device=x.device), 0
    for here in _chunks(writer, x):
        flat = patches(writer, x[here]).movedim(1, -1).flatten(0, -2)
        total, count = total + flat.T @ flat, count + len(flat)
    return total / count


def _plain(tensor: Tensor) -> Tensor:
    """A tensor with at least single precision."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
