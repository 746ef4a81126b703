"""Check that the grown model computes what the old one did, as exactly as the network itself is computed.

The yardstick is the network's own sensitivity: how far its outputs move when every weight moves by one unit in the last
place. A growth passes if it moves them by no more than a small multiple of that. A model that goes through a coarser type on
its way (Transformers' RMS norms compute in float32, whatever the model's type) rounds as that type does, and so do the moves.
Half-precision models are run in float32, where their code allows it, for their own arithmetic would hide a good deal.
Random operators (dropout, stochastic depth, noise) are run at their mean, and batch statistics that a forward pass updates are
put back.

Sensitivity takes two more passes and a copy of all weights, so it is measured only where outputs have moved by more than 32
units in the last place of the largest. 120 growths of eleven of timm's models with random weights moved them by up to 12 units
(benchmarks/results/brief.json). A brief check, within a run (see `verify/brief_check.py`), makes one pass before and one after,
in eval mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from outgrow.errors import ApplyError, Problem, TraceError, VerifyError
from outgrow.model.example import Example, call, outputs_in
from outgrow.model.reference_operators import REFERENCES
from outgrow.model.sandbox import precise, substituted, tensors_of, untouched

MULTIPLE = 10.0
CLOSER = 2.0  # for models of half precision that are run in float32: only stored numbers are rounded coarsely
MARK = 1e4
FLOOR = 32.0  # units in the last place of the largest output
SIGNS = 65_537  # a prime, so that no two rows of a matrix get the same ones
HALF = (torch.float16, torch.bfloat16)
NOISE = {"aten.randn": 0.0, "aten.randn_like": 0.0, "aten.rand": 0.5, "aten.rand_like": 0.5}


class Sober(TorchDispatchMode):
    """Runs random operators at their mean; notes whether there are any, and how coarsely numbers are rounded on the way."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rounding = 0.0
        self.drops = False  # numbers, not whole samples, are dropped at random
        self.draws = False  # random numbers are computed with
        self.rules: dict[str, None] = {}  # operators that were read by rules from outside the package

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func.overloadpacket)
        if name in REFERENCES:
            self.rules[REFERENCES[name].operator] = None
        if name == "aten._to_copy":
            result = func(*args, **kwargs)
            if result.is_floating_point() and args[0].is_floating_point():
                self.rounding = max(self.rounding, torch.finfo(result.dtype).eps)
            return result
        if name in ("aten.native_dropout", "aten.bernoulli_", "aten.bernoulli"):
            self.drops |= many(args[0])
        if name == "aten.native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name == "aten.bernoulli_":
            return args[0].fill_(args[1] if len(args) > 1 and isinstance(args[1], float) else 0.5)
        if name == "aten.bernoulli":
            return args[0].clone() if len(args) == 1 else torch.full_like(args[0], args[1])
        if name in NOISE:
            result = func(*args, **kwargs).fill_(NOISE[name])
            self.draws |= many(result)
            return result
        if name in ("aten.normal_", "aten.uniform_", "aten.exponential_"):
            self.draws |= many(args[0])
            numbers = [float(arg) for arg in args[1:] if isinstance(arg, (int, float))]
            low, high = (numbers + [0.0, 1.0][len(numbers) :])[:2]
            mean = {"aten.normal_": low, "aten.uniform_": (low + high) / 2}.get(name, 1.0)
            return args[0].fill_(mean)
        if name in ("aten.random_", "aten.rrelu_with_noise"):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def many(tensor: Tensor) -> bool:
    """More than one number a sample."""
    return tensor.ndim > 0 and tensor.numel() > tensor.shape[0]


@dataclass(frozen=True)
class Outputs:
    """What the model computed, in eval and (where it can) in train mode."""

    evaluated: tuple[Tensor, ...]
    trained: tuple[Tensor, ...] | None
    rounding: float = 0.0  # the coarsest that numbers were cast to on the way
    drops: bool = False
    draws: bool = False
    wider: bool = False  # run in float32 though the model is of half precision
    brief: bool = False  # in eval mode only, by choice
    untrained: str = ""  # why the model did not run in train mode
    rules: tuple[str, ...] = ()  # operators on the way that were read by rules from outside the package

    @property
    def multiple(self) -> float:
        return CLOSER if self.wider else MULTIPLE


class Evaluation:
    """One pass in eval mode that several checks share, on the model as it is: whoever changes it next lets go of the outputs.

    before: outputs that are to be kept. Not for models of half precision, which are checked in float32.
    """

    def __init__(self, model: nn.Module, example: Example, before: tuple[Tensor, ...]) -> None:
        self.model, self.example, self.before = model, example, before
        self.sober = Sober()
        self._outputs: tuple[Tensor, ...] | None = None

    def outputs(self) -> tuple[Tensor, ...]:
        if self._outputs is None:
            with untouched(self.model):
                self._outputs = self.of(self.model, self.example)
        return self._outputs

    def of(self, model: nn.Module, example: Example) -> tuple[Tensor, ...]:
        """Outputs of a model under the same conditions; it stays in eval mode."""
        with precise(), self.sober:
            model.eval()
            return _numbers(outputs_in(call(model, example)))

    @property
    def kept(self) -> bool:
        """Whether the outputs are those from before, but for rounding that any network has."""
        return error(self.before, self.outputs()) <= FLOOR * epsilon(self.before)

    def forget(self) -> None:
        self._outputs = None


def evaluation(model: nn.Module, example: Example, base: Outputs) -> Evaluation | None:
    """A pass of the grown model that can be shared; None for a model of half precision."""
    half = any(tensor.dtype in HALF for tensor in tensors_of(model).values())
    return None if half else Evaluation(model, example, base.evaluated)


def run(model: nn.Module, example: Example, brief: bool = False, shared: Evaluation | None = None) -> Outputs:
    """Outputs on the example in both modes (`brief`: in eval mode), random operators off; the model is left as it was."""
    if shared is not None:
        return _run(model, example, {}, brief, shared)
    half = {name: tensor for name, tensor in tensors_of(model).items() if tensor.dtype in HALF}
    if half:
        try:
            return _run(model, wider(example), {name: tensor.detach().float() for name, tensor in half.items()}, brief)
        except Exception:  # code that insists on its type, or too little memory for this: in its own type, then
            pass
    return _run(model, example, {}, brief)


def draws(model: nn.Module, example: Example) -> bool:
    """Whether a model computes with random numbers, as far as it runs."""
    try:
        return run(model, example).draws
    except Exception:
        return False


def wider(example: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.float() if tensor.dtype in HALF else tensor, example)


def _run(
    model: nn.Module, example: Example, tensors: Mapping[str, Tensor], brief: bool, shared: Evaluation | None = None
) -> Outputs:
    sober = Sober() if shared is None else shared.sober
    every = {**tensors_of(model), **tensors}
    if shared is not None:
        evaluated = shared.outputs()
    else:
        with untouched(model), precise(), substituted(model, every) if tensors else nullcontext(), sober:
            model.eval()
            evaluated = _numbers(outputs_in(call(model, example)))
    trained, reason = None, ""
    if not brief:
        try:
            with untouched(model), precise(), substituted(model, every) if tensors else nullcontext(), sober:
                model.train()
                trained = _numbers(outputs_in(call(model, example)))
        except Exception as error:  # batch norm on a single value, a loss without labels: eval must do
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    return Outputs(
        evaluated, trained, sober.rounding, sober.drops, sober.draws, bool(tensors), brief, reason, tuple(sober.rules)
    )


def real_numbers(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Those that are numbers, a complex one as two real ones."""
    real = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor for tensor in tensors)
    return tuple(tensor for tensor in real if tensor.is_floating_point())


def _numbers(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(tensor.detach() for tensor in real_numbers(tensors))


def sensitivity(model: nn.Module, example: Example, base: Outputs, seed: int = 0) -> tuple[float, float]:
    """How far outputs move, relative to their largest, when every weight moves by one unit in the last place."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [tensor for tensor in real_numbers([t.detach() for t in tensors_of(model).values()]) if tensor.numel()]
    saved = [tensor.detach().clone() for tensor in tensors]  # all of them first: some may share their memory
    try:
        with torch.no_grad():
            for tensor in tensors:
                _move(tensor, max(torch.finfo(tensor.dtype).eps, base.rounding), generator)
        moved = run(model, example, base.brief)
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, saved, strict=True):
                tensor.copy_(value)
    return differences(base, moved)


def _move(tensor: Tensor, eps: float, generator: torch.Generator) -> None:
    """Multiply each number by 1 ± eps, by signs that are drawn; where there are many numbers, the signs come round again."""
    count = min(tensor.numel(), SIGNS)
    factors = 1 + (torch.randint(0, 2, (count,), generator=generator).to(tensor) * 2 - 1) * eps
    if not tensor.is_contiguous():
        rounds = -(-tensor.numel() // count)
        tensor.mul_(factors.repeat(rounds)[: tensor.numel()].view(tensor.shape))
        return
    numbers = tensor.view(-1)
    whole = len(numbers) // count * count
    numbers[:whole].view(-1, count).mul_(factors)
    numbers[whole:].mul_(factors[: len(numbers) - whole])


def differences(old: Outputs, new: Outputs) -> tuple[float, float]:
    """How far two runs are apart, in eval and in train mode."""
    return error(old.evaluated, new.evaluated), error(old.trained, new.trained)


def error(old: Sequence[Tensor] | None, new: Sequence[Tensor] | None) -> float:
    """Largest difference, relative to the largest output; infinite where shapes differ, or what is no number.

    Infinities and NaNs (at padding, say) must stay where they are; if there is nothing else, nothing can be told.
    """
    if old is None or new is None:
        return 0.0 if old is None and new is None else float("inf")
    if len(old) != len(new):
        return float("inf")
    worst = 0.0
    for one, other in zip(old, new, strict=True):
        if one.shape != other.shape:
            return float("inf")
        if not one.numel():
            continue
        a, b = (tensor.float() if tensor.dtype in HALF else tensor for tensor in (one, other))
        a, b = _without_marks(a, b)
        finite = torch.isfinite(a)
        if not bool(finite.all()):
            same = torch.equal(a.isnan(), b.isnan()) and torch.equal(a[a.isinf()], b[a.isinf()])
            if not same or not bool(finite.any()):
                return float("inf")
            a, b = a[finite], b[finite]
        scale = max(float(a.abs().max()), torch.finfo(one.dtype).tiny)
        difference = float((a - b).abs().max()) / scale
        worst = max(worst, difference if difference == difference else float("inf"))
    return worst


def _without_marks(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Leave out a few huge values that stand for nothing (-1e9 in masked places) if they are where they were: beside them
    nothing else would count."""
    marks = a.abs() >= MARK
    found = a[marks]
    if not found.numel() or found.numel() == a.numel() or not torch.equal(found, b[marks]) or len(found.unique()) > 2:
        return a, b
    return a[~marks], b[~marks]


def epsilon(outputs: Sequence[Tensor]) -> float:
    return max((torch.finfo(tensor.dtype).eps for tensor in outputs), default=0.0)


def before(model: nn.Module, example: Example, brief: bool = False) -> Outputs:
    """The outputs that are to be kept."""
    try:
        base = run(model, example, brief)
        if not any(tensor.numel() for tensor in base.evaluated):
            way_out = "give an example for which the model returns some; or check=False"
            raise VerifyError(
                "the model's outputs on the example hold no numbers to compare",
                [Problem("example", "nothing can be checked", way_out)],
            )
        return base
    except VerifyError:
        raise
    except Exception as error:
        raise TraceError(f"the model does not run on the example: {type(error).__name__}: {error}") from error


def _rules(outputs: Outputs) -> str:
    """Rules from outside the package that may be the reason for a difference."""
    return f"a rule that outgrow.rule was given is wrong ({', '.join(outputs.rules)}), " if outputs.rules else ""


def check(
    model: nn.Module, example: Example, base: Outputs, preserving: bool, shared: Evaluation | None = None
) -> tuple[float, float]:
    """Compare with the outputs before; raises if a preserving growth moved them. `shared`: a pass of the model as it is now.

    How far they may move is measured only if they have moved by more than rounding moves any network. It is measured on the
    grown model: what cancels leaves rounding behind that grows with what was drawn.
    """
    try:
        after = run(model, example, base.brief, shared)
    except Exception as error:
        raise ApplyError(
            f"the grown model does not run on the example: {type(error).__name__}: {error}; everything was put back"
        ) from error
    errors = differences(base, after)
    floor = FLOOR * epsilon(base.evaluated)
    allowed = [floor, floor]
    if preserving and max(errors) > floor:
        allowed = [max(floor, base.multiple * moved) for moved in sensitivity(model, example, after)]
    for mode, found, limit in zip(("eval", "train"), errors, allowed, strict=True):
        if preserving and not limit < float("inf"):
            raise VerifyError(
                f"the model's outputs on the example are no numbers in {mode} mode, or not the same twice: nothing can be "
                "checked; everything was put back",
                [Problem("", "infinities and NaNs compare with nothing", "give another example; or check=False")],
            )
        if preserving and not found <= limit:
            raise VerifyError(
                f"the grown model differs from the old one in {mode} mode by {found:.1e} of its largest output, where its own "
                f"rounding allows {limit:.1e}; everything was put back",
                [
                    Problem(
                        "",
                        "the code depends on what grew in a way that was not seen (the number of its blocks, or a layer's "
                        f"attributes, say), {_rules(after)}or this is a bug in outgrow's analysis of the model",
                        "grow less, or elsewhere; and report it",
                    )
                ],
            )
    return max(errors), max(allowed)
