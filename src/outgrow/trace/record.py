"""Record one forward pass: the list of ATen operators that ran, and the tensors between them.

A `TorchDispatchMode` receives every operator below autograd, whatever Python code the model's `forward` contains; parameters
and buffers are recognised by identity, and module hooks give the module whose code is running. Fused kernels (flash attention,
the Transformer fast path, oneDNN and cuDNN recurrent layers) are disabled while recording, so that they run as elementary
operators.

A tensor that is written in place becomes a new value: the list of operators is in single-assignment form.
"""

from __future__ import annotations

import abc
import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from outgrow.errors import Problem, SelectionError, TraceError
from outgrow.model.example import Example, call, tensors_anywhere, tensors_in
from outgrow.model.idle_modules import IdlePeers, peers_alongside
from outgrow.model.inner_gradients import GRADIENT, Gradients, inside_backward, needs_gradients, with_gradients
from outgrow.model.kept_outputs import model_outputs, other_outputs
from outgrow.model.known_values import KnownConstants, KnownShapes, on_meta
from outgrow.model.meta_copy import inside_known
from outgrow.model.meta_operators import ShapeCache
from outgrow.model.reference_operators import Substitute
from outgrow.model.sandbox import elementary, substituted, tensors_of, untouched
from outgrow.model.shared_memory import disjoint, geometry_of, storage_of
from outgrow.model.walk_modules import all_modules, set_mode
from outgrow.modules.fold import Fold
from outgrow.trace.index_lists import ListIndices, has_unknown_lists
from outgrow.trace.operators import FAKE_QUANTISE, FOLD, OBSERVING, Op, Ref, Trace, Value
from outgrow.trace.view_regions import box_of


@contextlib.contextmanager
def module_paths(model: nn.Module) -> Iterator[Callable[[], str]]:
    """Yield a function that returns the path of the module whose `forward` is running."""
    running, thread = [""], get_ident()

    def enter(path: str, module: nn.Module, args: Any) -> None:
        if get_ident() == thread:
            running.append(path)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if get_ident() == thread:
            running.pop()

    handles: list[Any] = []
    try:
        for path, module in all_modules(model):
            handles.append(module.register_forward_pre_hook(partial(enter, path), prepend=True))
            handles.append(module.register_forward_hook(leave, prepend=True, always_call=True))
        yield lambda: running[-1]
    finally:
        for handle in handles:
            handle.remove()


class Watcher(TorchDispatchMode):
    """Sees every operator that runs while it is active, and each `Fold` as one operator."""

    inside = False  # a Fold or a gradient is running: its operators are not recorded
    gradients = False  # whether calls of `torch.autograd.grad` are recorded as operators

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled in the meantime, and disabling Dynamo at every operator takes as long as recording it."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.saved: set[int] = set()  # ids of tensors that autograd keeps
        self.substitute = Substitute(self)  # custom operators are recorded as their references
        self.idle_peers: IdlePeers = {}  # modules that run only for the trace (see `model/idle_modules.py`)

    @abc.abstractmethod
    def folded(self, path: str, fold: Fold, x: Tensor, result: Tensor) -> None:
        """Called when a Fold has computed `result` from `x`."""

    @abc.abstractmethod
    def differentiated(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Called when `torch.autograd.grad` has computed `results`, one for each of `inputs`."""

    def hide(self, hidden: bool) -> None:
        self.inside = hidden

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        thread = get_ident()

        def enter(module: nn.Module, args: Any) -> None:
            self.inside |= get_ident() == thread

        def leave(path: str, module: nn.Module, args: Any, result: Any) -> None:
            if get_ident() != thread:
                return
            self.inside = False
            assert isinstance(module, Fold)
            self.folded(path, module, args[0], result)

        handles: list[Any] = []
        for path, module in all_modules(model):
            if isinstance(module, Fold):
                handles.append(module.register_forward_pre_hook(enter))
                handles.append(module.register_forward_hook(partial(leave, path)))
        mode = with_gradients(Gradients(self.differentiated, self.hide), self.saved) if self.gradients else nullcontext()
        try:
            with self, mode, peers_alongside(model, self.idle_peers):
                yield
        finally:
            for handle in handles:
                handle.remove()


class TensorIndices:
    """Indices of tensors by identity. The tensors are not kept alive: torch would copy tensors with further references."""

    def __init__(self) -> None:
        self.items: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def get(self, tensor: Tensor) -> int | None:
        found = self.items.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def __setitem__(self, tensor: Tensor, index: int) -> None:
        self.items[id(tensor)] = weakref.ref(tensor), index


class Recorder(Watcher):
    """Records every operator that runs while it is active."""

    def __init__(
        self, tensors: Mapping[str, Tensor], buffers: set[str], inputs: list[Tensor], trace: Trace, here: Callable[[], str]
    ) -> None:
        super().__init__()
        self.trace, self.gradients, self.idle_peers = trace, trace.gradients, trace.idle_peers
        self.differentiates = False  # seen in this pass, operator by operator
        self.here = here
        self.shapes = KnownShapes() if trace.known else ShapeCache()
        self.known: dict[Any, tuple[str, bool]] = {}  # operator → its name, and whether it writes in place
        self.index_of = TensorIndices()
        self.refs: list[Ref] = [Ref(value.index) for value in trace.values]
        self.sharing: dict[int, list[weakref.ref[Tensor]]] = {}  # by memory
        self.ungrouped: list[weakref.ref[Tensor]] = []  # tensors that are not in `sharing` yet
        self.lists: dict[int, tuple[Tensor, tuple[int, ...]]] = {}  # tensors that stand for lists among indices, by their ids
        self.stale = WeakIdKeyDictionary()  # tensor → writes to parts of it through views: value and box
        known = {value.name: value.index for value in trace.values if value.name}
        for name, tensor in tensors.items():
            if name in known:
                self.index_of[tensor] = known[name]
            else:
                self._new(tensor, "buffer" if name in buffers else "parameter", name)
        for tensor in inputs:
            self._new(tensor, "input")

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        thread = get_ident()

        def leave(path: str, module: nn.Module, args: Any, result: Any) -> None:
            if get_ident() != thread:
                return
            index = self.index_of.get(result) if isinstance(result, Tensor) else None
            if index is not None:
                self.trace.returned.setdefault(path, index)

        def listed(tensor: Tensor, integers: tuple[int, ...]) -> None:
            self.lists[id(tensor)] = tensor, integers

        handles = [module.register_forward_hook(partial(leave, path)) for path, module in all_modules(model)]
        try:
            constants = KnownConstants() if self.trace.known else nullcontext()
            with super().watching(model), constants, ListIndices(listed) if self.trace.lists else nullcontext():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _new(self, tensor: Tensor, kind: str, name: str = "") -> int:
        index = len(self.trace.values)
        dtype, here = tensor.dtype, weakref.ref(tensor)
        floating = dtype.is_floating_point or dtype.is_complex
        integers = self.lists[id(tensor)][1] if id(tensor) in self.lists else ()
        self.trace.values.append(Value(index, tuple(tensor.shape), floating, kind, name, dtype is torch.bool, integers))
        self.refs.append(Ref(index))
        self.index_of.items[id(tensor)] = here, index
        self.ungrouped.append(here)
        return index

    def _ref(self, item: Any) -> Any:
        if isinstance(item, Tensor):
            return self.refs[self.value_of(item)]
        if isinstance(item, (list, tuple)):
            return tuple([self._ref(part) for part in item])
        return item

    def value_of(self, tensor: Tensor) -> int:
        """The index of a tensor's present value; writes through views are recorded first."""
        index = self.index_of.get(tensor)
        if index is None:
            return self._new(tensor, "constant")
        written = self.stale.pop(tensor, ()) if self.stale else ()
        if written:
            parts, boxes = tuple(Ref(value) for value, _ in written), tuple(box for _, box in written)
            output = self._new(tensor, "result")
            self._note("outgrow.write_through_view", (Ref(index), parts, boxes), {}, (output,))
            return output
        return int(index)

    def _note(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: tuple[int, ...]) -> None:
        self.trace.ops.append(Op(len(self.trace.ops), name, args, kwargs, outputs, self.here()))

    def folded(self, path: str, fold: Fold, x: Tensor, result: Tensor) -> None:
        value = Ref(self.value_of(x))
        self.trace.ops.append(Op(len(self.trace.ops), FOLD, (value, fold.dim), {}, (self._new(result, "result"),), path))

    def differentiated(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        refs = self._ref(outputs), self._ref(inputs)
        self._note(GRADIENT, refs, {}, tuple(self._new(result, "result") for result in results))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside:
            return func(*args, **kwargs)
        made = self.substitute(func, args, kwargs)
        if made is not NotImplemented:
            return made
        self.differentiates |= inside_backward()
        inputs = tuple([self._ref(arg) for arg in args])
        keywords = {key: self._ref(arg) for key, arg in kwargs.items()} if kwargs else {}
        result = self.shapes.call(func, args, kwargs)
        results = [result] if type(result) is Tensor else tensors_in(result)
        outputs = tuple([self._new(tensor, "result") for tensor in results])
        known = self.known.get(func)
        if known is None:
            known = self.known[func] = str(func.overloadpacket), func._schema.is_mutable
        name, mutable = known
        if name == FAKE_QUANTISE:
            keywords[OBSERVING] = bool(args[1].item())  # on meta tensors this fails, and the model runs on its own tensors
        self._note(name, inputs, keywords, outputs)
        if mutable:
            self._rewrite_views(func, args)
        return result

    def _group_by_memory(self) -> None:
        """Add the tensors created since the last call that are still alive to `sharing`, by their memory."""
        for ref in self.ungrouped:
            tensor = ref()
            if tensor is not None:
                self.sharing.setdefault(storage_of(tensor), []).append(ref)
        self.ungrouped.clear()

    def _rewrite_views(self, func: Any, args: Any) -> None:
        """After an in-place write, mark the base and overlapping views as changed; it is recorded if they are used again."""
        for argument, tensor in zip(func._schema.arguments, args, strict=False):
            if not (isinstance(tensor, Tensor) and argument.alias_info is not None and argument.alias_info.is_write):
                continue
            written = self.value_of(tensor)
            self._group_by_memory()
            others = {id(other): other for ref in self.sharing.get(storage_of(tensor), ()) if (other := ref()) is not None}
            for other in others.values():
                if other is tensor or storage_of(other) != storage_of(tensor):
                    continue
                if geometry_of(other) == geometry_of(tensor):
                    self.index_of[other] = written
                    self.stale.pop(other, None)
                elif not disjoint(other, tensor):
                    self.stale[other] = (*self.stale.get(other, ()), (written, box_of(tensor, other)))


def _outputs_of_pass(model: nn.Module, recorder: Recorder, output: Any) -> list[Tensor]:
    """The tensors that leave the model: those in its output, and results that outlive the pass although no operator used them.

    The latter are outputs in another form (e.g. a numpy array), unless a cache or a module keeps them.
    """
    shown = [tensor for tensor in model_outputs(output) if recorder.index_of.get(tensor) is not None]
    used = {ref.value for op in recorder.trace.ops for ref in op.refs}
    if not _unused(recorder, used).keys() - {id(tensor) for tensor in shown}:
        return shown
    held = [list(vars(module).values()) for module in model.modules()]
    kept = {id(tensor) for tensor in (*tensors_in(held), *tensors_anywhere(output, set(), caches=True))} | recorder.saved
    if _unused(recorder, used).keys() - kept:
        gc.collect()  # tensors in unreachable cycles do not outlive the pass
    return [*shown, *(tensor for key, tensor in _unused(recorder, used).items() if key not in kept)]


def _unused(recorder: Recorder, used: set[int]) -> dict[int, Tensor]:
    """Results that are alive although no operator has used them, by identity."""
    alive = [(ref(), index) for ref, index in recorder.index_of.items.values() if index not in used]
    return {id(t): t for t, index in alive if t is not None and recorder.trace.values[index].kind == "result"}


def record(
    model: nn.Module,
    example: Example,
    training: bool = False,
    trace: Trace | None = None,
    idle_peers: IdlePeers | None = None,
) -> Trace:
    """Run the model once and record its operators (appended to `trace` if one is given).

    The first attempt is on meta tensors, which need neither time nor memory, and the second as well, with the values of
    integers and masks; a model that reads other values (or uses tensors that are not registered) is run on its own tensors.
    """
    if trace is not None:
        return _record(model, example, training, trace)
    peers = idle_peers or {}
    for known in (True,) if inside_known() else (False, True):
        try:
            trace = _record(model, example, training, Trace(meta=True, known=known, idle_peers=peers))
            if has_unknown_lists(trace):
                return _record(model, example, training, Trace(meta=True, known=known, lists=True, idle_peers=peers))
            return trace
        except SelectionError:  # the request names an output that the model does not have
            raise
        except Exception as error:
            if needs_gradients(error) or isinstance(error, _Differentiates):
                return _record_gradients(model, example, training, peers)
    try:
        return _record(model, example, training, Trace(idle_peers=peers))
    except Exception as error:
        if needs_gradients(error) or isinstance(error, _Differentiates):
            return _record_gradients(model, example, training, peers)
        raise


class _Differentiates(Exception):
    """The model differentiates in its forward pass: it must be recorded again, with gradients as operators."""


def _record_gradients(model: nn.Module, example: Example, training: bool, peers: IdlePeers) -> Trace:
    try:
        return _record(model, example, training, Trace(meta=True, gradients=True, idle_peers=peers))
    except Exception as error:
        if "saved tensor hooks" in str(error):
            problem = Problem("the model", "it differentiates with torch.func", "use torch.autograd.grad")
            raise TraceError("gradients of torch.func can't be traced", [problem]) from error
    return _record(model, example, training, Trace(gradients=True, idle_peers=peers))


def _record(model: nn.Module, example: Example, training: bool, trace: Trace) -> Trace:
    tensors = tensors_of(model)
    buffers = {name for name, tensor in tensors.items() if not isinstance(tensor, nn.Parameter)}
    if trace.meta:
        tensors = {name: tensor.detach().to("meta") for name, tensor in tensors.items()}
        example = on_meta(example)
    with untouched(model, not trace.meta), elementary(), module_paths(model) as here, substituted(model, tensors):
        set_mode(model, training)
        recorder = Recorder(tensors, buffers, tensors_in(example), trace, here)
        with recorder.watching(model):
            output = call(model, example)
        if recorder.differentiates and not trace.gradients:
            raise _Differentiates
        for name, others in other_outputs(output).items():
            trace.others[name] = [recorder.value_of(tensor) for tensor in others if recorder.index_of.get(tensor) is not None]
        trace.outputs.update(dict.fromkeys(recorder.value_of(tensor) for tensor in _outputs_of_pass(model, recorder, output)))
    trace.passes.append(training)
    trace.ends.append(len(trace.ops))
    return trace
