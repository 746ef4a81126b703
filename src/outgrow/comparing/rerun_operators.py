"""Run a few operators of a trace again, in isolation, on other values.

Their other inputs (parameters, masks, tables) are those of the model's forward pass on the example. Everything runs in float64
on the CPU, whatever the model's type and device, so that rounding hides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outgrow.analysis.find_volumes import find_volumes
from outgrow.analysis.interpret_trace import read
from outgrow.analysis.rules.all_rules import RULES
from outgrow.analysis.volumes import Anatomy
from outgrow.model.example import Example, call, tensors_in
from outgrow.model.sandbox import elementary, tensors_of, untouched
from outgrow.trace.evaluate_operator import base_name
from outgrow.trace.operators import Op, Ref, Trace
from outgrow.trace.record import Recorder, module_paths, record

SILENT = "to_copy clone alias detach view unsafe_view expand t transpose permute unsqueeze squeeze slice select".split()


def dissect_on_real_tensors(model: nn.Module, example: Example) -> Anatomy:
    """The anatomy of a model that runs on real tensors: on the meta device, some operators decompose into other operators."""
    return find_volumes(read(record(model, example, trace=Trace()), RULES))


class TracedValues(Mapping[int, Tensor]):
    """The tensors of a real trace: all parameters and buffers, and those of the other values that are `wanted`."""

    def __init__(self, model: nn.Module, example: Example, anatomy: Anatomy, wanted: Iterable[int]) -> None:
        self.values_of = anatomy.reading.trace.values
        self.tensors = tensors_of(model)
        self.kept: dict[int, Tensor] = {}
        made = {value for value in wanted if not self.values_of[value].name}
        if made:
            self.kept = _kept(model, example, made)

    def __getitem__(self, value: int) -> Tensor:
        about = self.values_of[value]
        tensor = self.tensors[about.name].detach() if about.name else self.kept[value]
        if tuple(tensor.shape) != about.shape:
            raise KeyError(value)  # the model took another path in the second pass
        return _wide(tensor.cpu()).clone()  # an operator may write into its inputs

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.values_of)))

    def __len__(self) -> int:
        return len(self.values_of)


class _Keeper(Recorder):
    """A recorder that also keeps the tensors of some values."""

    def __init__(self, wanted: set[int], *given: Any) -> None:
        self.wanted = wanted
        self.kept: dict[int, Tensor] = {}
        super().__init__(*given)

    def _new(self, tensor: Tensor, kind: str, name: str = "") -> int:
        index = super()._new(tensor, kind, name)
        if index in self.wanted:
            self.kept[index] = tensor.detach().clone()
        return index


def _kept(model: nn.Module, example: Example, wanted: set[int]) -> dict[int, Tensor]:
    """Run the model as for its trace, and keep some values."""
    tensors = tensors_of(model)
    buffers = {name for name, tensor in tensors.items() if not isinstance(tensor, nn.Parameter)}
    with untouched(model), elementary(), module_paths(model) as here:
        model.eval()
        keeper = _Keeper(wanted, tensors, buffers, tensors_in(example), Trace(), here)
        with keeper.watching(model):
            call(model, example)
    return keeper.kept


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def rerun(ops: Sequence[Op], given: Mapping[int, Tensor], values: TracedValues) -> dict[int, Tensor]:
    """The values that operators compute from `given`, in place of their inputs in the model."""
    made = dict(given)

    def found(item: Any) -> Any:
        if isinstance(item, Ref):
            if item.value not in made:
                made[item.value] = values[item.value]
            return made[item.value]
        if isinstance(item, (tuple, list)):
            return [found(part) for part in item]
        if isinstance(item, torch.device):
            return torch.device("cpu")
        return torch.float64 if isinstance(item, torch.dtype) and item.is_floating_point else item

    for op in ops:
        function = getattr(torch.ops.aten, base_name(op))
        result = function(*map(found, op.args), **{key: found(value) for key, value in op.kwargs.items()})
        made.update(zip(op.outputs, tensors_in(result), strict=True))
    return made


def external_inputs(ops: Sequence[Op], given: Iterable[int]) -> set[int]:
    """Inputs of some operators that none of them computes."""
    return {ref.value for op in ops for ref in op.refs} - {output for op in ops for output in op.outputs} - set(given)


def function_name(ops: Sequence[Op]) -> str:
    """The name of a function: the names of its operators, except for those that only copy or reshape."""
    names = [
        base_name(op).strip("_").removeprefix("native_").removesuffix("_with_indices").removesuffix("_kernel") for op in ops
    ]
    shown = [name for name in names if name not in SILENT]
    if len(shown) > 4:
        return f"{shown[0]}·…·{shown[-1]} ({len(shown)} operators)"
    return "·".join(shown)
