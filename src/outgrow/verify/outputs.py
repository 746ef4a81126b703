"""Check that the grown model's outputs equal the old ones, up to the rounding of the network itself.

The yardstick is the network's own sensitivity: the change of its outputs when every weight changes by one unit in the last
place. A growth passes if it changes the outputs by no more than a small multiple of that. In a model that casts to a coarser
type on the way (Transformers' RMS norms compute in float32, whatever the model's type), weights change by a unit of that type.
Half-precision models are run in float32 where their code allows it, since their own rounding would hide errors.
Random operators (dropout, stochastic depth, noise) return their mean, and batch statistics that a forward pass updates are
restored.

Sensitivity takes two more passes and a copy of all weights, so it is measured only if outputs have changed by more than 32
units in the last place of the largest. 120 growths of eleven of timm's models with random weights changed
them by up to 12 units (benchmarks/results/brief.json). A brief check, within a run (see `verify/brief_check.py`), makes one
pass before and one after, in eval mode.
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

from outgrow.errors import ApplyError, Problem, SelectionError, VerifyError
from outgrow.model.example import Example, call
from outgrow.model.example_errors import does_not_run
from outgrow.model.kept_outputs import model_outputs
from outgrow.model.reference_operators import REFERENCES
from outgrow.model.sandbox import precise, substituted, tensors_of, untouched
from outgrow.verify.compare_old_entries import NewOutputEntries, old_entries

MULTIPLE = 10.0
CLOSER = 2.0  # for half-precision models run in float32: only stored values are rounded coarsely
MASKED = 1e4
FLOOR = 32.0  # units in the last place of the largest output
SIGNS = 65_537  # a prime, so that rows of a matrix get different signs
HALF = (torch.float16, torch.bfloat16)
NOISE = {"aten.randn": 0.0, "aten.randn_like": 0.0, "aten.rand": 0.5, "aten.rand_like": 0.5}


class RandomAtMean(TorchDispatchMode):
    """Makes random operators return their mean; records whether there are any, and the coarsest rounding on the way."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rounding = 0.0
        self.drops = False  # values, not whole samples, are dropped at random
        self.draws = False  # random values are used
        self.rules: dict[str, None] = {}  # operators with rules from outside the package

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
            self.drops |= several_per_sample(args[0])
        if name == "aten.native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name == "aten.bernoulli_":
            return args[0].fill_(args[1] if len(args) > 1 and isinstance(args[1], float) else 0.5)
        if name == "aten.bernoulli":
            return args[0].clone() if len(args) == 1 else torch.full_like(args[0], args[1])
        if name in NOISE:
            result = func(*args, **kwargs).fill_(NOISE[name])
            self.draws |= several_per_sample(result)
            return result
        if name in ("aten.normal_", "aten.uniform_", "aten.exponential_"):
            self.draws |= several_per_sample(args[0])
            bounds = [float(arg) for arg in args[1:] if isinstance(arg, (int, float))]
            low, high = (bounds + [0.0, 1.0][len(bounds) :])[:2]
            mean = {"aten.normal_": low, "aten.uniform_": (low + high) / 2}.get(name, 1.0)
            return args[0].fill_(mean)
        if name in ("aten.rrelu_with_noise", "aten.rrelu_with_noise_") and len(args) > 4 and args[4]:
            self.drops |= several_per_sample(args[0])
            result = torch.nn.functional.leaky_relu(args[0], (args[2] + args[3]) / 2)
            return args[0].copy_(result) if name.endswith("_") else result
        if name == "aten.random_":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def several_per_sample(tensor: Tensor) -> bool:
    """Whether a tensor has more than one value per sample."""
    return tensor.ndim > 0 and tensor.numel() > tensor.shape[0]


@dataclass(frozen=True)
class Outputs:
    """The model's outputs in eval mode and (if it runs there) in train mode."""

    evaluated: tuple[Tensor, ...]
    trained: tuple[Tensor, ...] | None
    rounding: float = 0.0  # of the coarsest type that values were cast to
    drops: bool = False
    draws: bool = False
    wider: bool = False  # a half-precision model that was run in float32
    brief: bool = False  # in eval mode only, by choice
    untrained: str = ""  # reason why the model did not run in train mode
    rules: tuple[str, ...] = ()  # operators with rules from outside the package that ran
    gains: tuple[NewOutputEntries, ...] = ()  # entries that the growth appends, which are not compared

    @property
    def multiple(self) -> float:
        return CLOSER if self.wider else MULTIPLE


class Evaluation:
    """One pass in eval mode on the present model, shared by several checks; code that changes the model calls `forget`.

    before: the outputs to preserve. Not for half-precision models, which are checked in float32.
    """

    def __init__(
        self, model: nn.Module, example: Example, before: tuple[Tensor, ...], gains: Sequence[NewOutputEntries] = ()
    ) -> None:
        self.model, self.example, self.before, self.gains = model, example, before, gains
        self.at_mean = RandomAtMean()
        self._outputs: tuple[Tensor, ...] | None = None

    def outputs(self) -> tuple[Tensor, ...]:
        if self._outputs is None:
            with untouched(self.model):
                self._outputs = self.of(self.model, self.example)
        return self._outputs

    def of(self, model: nn.Module, example: Example) -> tuple[Tensor, ...]:
        """Outputs of a model under the same conditions; the model stays in eval mode."""
        with precise(), self.at_mean:
            model.eval()
            return _detached(model_outputs(call(model, example)))

    @property
    def kept(self) -> bool:
        """Whether the outputs equal those before, up to rounding that any network has."""
        return error(self.before, old_entries(self.before, self.outputs(), self.gains)) <= FLOOR * epsilon(self.before)

    def forget(self) -> None:
        self._outputs = None


def evaluation(model: nn.Module, example: Example, base: Outputs) -> Evaluation | None:
    """A pass of the grown model that checks can share; None for a half-precision model."""
    half = any(tensor.dtype in HALF for tensor in tensors_of(model).values())
    return None if half else Evaluation(model, example, base.evaluated, base.gains)


def run(model: nn.Module, example: Example, brief: bool = False, shared: Evaluation | None = None) -> Outputs:
    """Outputs on the example in both modes (`brief`: in eval mode), with random operators at their mean."""
    if shared is not None:
        return _run(model, example, {}, brief, shared)
    half = {name: tensor for name, tensor in tensors_of(model).items() if tensor.dtype in HALF}
    if half:
        try:
            return _run(model, wider(example), {name: tensor.detach().float() for name, tensor in half.items()}, brief)
        except Exception:  # the code requires its type, or memory is too small: use its own type
            pass
    return _run(model, example, {}, brief)


def draws(model: nn.Module, example: Example) -> bool:
    """Whether a model uses random values; False if it does not run."""
    try:
        return run(model, example).draws
    except Exception:
        return False


def wider(example: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.float() if tensor.dtype in HALF else tensor, example)


def _run(
    model: nn.Module, example: Example, tensors: Mapping[str, Tensor], brief: bool, shared: Evaluation | None = None
) -> Outputs:
    at_mean = RandomAtMean() if shared is None else shared.at_mean
    every = {**tensors_of(model), **tensors}
    if shared is not None:
        evaluated = shared.outputs()
    else:
        with untouched(model), precise(), substituted(model, every) if tensors else nullcontext(), at_mean:
            model.eval()
            evaluated = _detached(model_outputs(call(model, example)))
    trained, reason = None, ""
    if not brief:
        try:
            with untouched(model), precise(), substituted(model, every) if tensors else nullcontext(), at_mean:
                model.train()
                trained = _detached(model_outputs(call(model, example)))
        except Exception as error:  # e.g. batch norm on a single value, a loss without labels: eval mode must suffice
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    return Outputs(
        evaluated, trained, at_mean.rounding, at_mean.drops, at_mean.draws, bool(tensors), brief, reason, tuple(at_mean.rules)
    )


def as_real(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The floating-point tensors, with complex ones viewed as real."""
    real = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor for tensor in tensors)
    return tuple(tensor for tensor in real if tensor.is_floating_point())


def _detached(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(tensor.detach() for tensor in as_real(tensors))


def sensitivity(model: nn.Module, example: Example, base: Outputs, seed: int = 0) -> tuple[float, float]:
    """The change of outputs, relative to the largest, when every weight changes by one unit in the last place."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [tensor for tensor in as_real([t.detach() for t in tensors_of(model).values()]) if tensor.numel()]
    saved = [tensor.detach().clone() for tensor in tensors]  # all before the first change: some may share memory
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
    """Multiply each value by 1 ± eps with drawn signs; in large tensors, the signs repeat."""
    count = min(tensor.numel(), SIGNS)
    factors = 1 + (torch.randint(0, 2, (count,), generator=generator).to(tensor) * 2 - 1) * eps
    if not tensor.is_contiguous():
        rounds = -(-tensor.numel() // count)
        tensor.mul_(factors.repeat(rounds)[: tensor.numel()].view(tensor.shape))
        return
    values = tensor.view(-1)
    whole = len(values) // count * count
    values[:whole].view(-1, count).mul_(factors)
    values[whole:].mul_(factors[: len(values) - whole])


def differences(old: Outputs, new: Outputs) -> tuple[float, float]:
    """The differences between two runs, in eval and in train mode."""
    pairs = ((old.evaluated, new.evaluated), (old.trained, new.trained))
    evaluated, trained = (error(a, b) if a is None or b is None else error(a, old_entries(a, b, old.gains)) for a, b in pairs)
    return evaluated, trained


def error(old: Sequence[Tensor] | None, new: Sequence[Tensor] | None) -> float:
    """Largest difference, relative to the largest output; infinite if shapes or the places of infinities and NaNs differ.

    It is also infinite if there are only infinities and NaNs, since these can't be compared. The largest output is that of both
    models: outputs that are all zero before a growth (a dead ReLU at the end) have no scale of their own.
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
        scale = max(float(a.abs().max()), float(b.abs().max()), torch.finfo(one.dtype).tiny)
        difference = float((a - b).abs().max()) / scale
        worst = max(worst, difference if difference == difference else float("inf"))
    return worst


def _without_marks(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Leave out huge placeholder values (-1e9 at masked positions) if their positions are equal: relative to them, all other
    differences would be negligible."""
    marks = a.abs() >= MASKED
    found = a[marks]
    if not found.numel() or found.numel() == a.numel() or not torch.equal(found, b[marks]) or len(found.unique()) > 2:
        return a, b
    return a[~marks], b[~marks]


def epsilon(outputs: Sequence[Tensor]) -> float:
    return max((torch.finfo(tensor.dtype).eps for tensor in outputs), default=0.0)


def before(model: nn.Module, example: Example, brief: bool = False) -> Outputs:
    """The outputs before a growth, which it has to preserve."""
    try:
        base = run(model, example, brief)
        if not any(tensor.numel() for tensor in base.evaluated):
            way_out = "pass an example for which the outputs are not empty; or check=False"
            raise VerifyError(
                "the model's outputs on the example contain no values to compare",
                [Problem("example", "nothing can be checked", way_out)],
            )
        return base
    except (VerifyError, SelectionError):
        raise
    except Exception as error:
        raise does_not_run(model, example, error) from error


def _rules(outputs: Outputs) -> str:
    """A clause for errors on rules from outside the package that may be the reason for a difference."""
    return f"a rule registered with outgrow.rule is wrong ({', '.join(outputs.rules)}), " if outputs.rules else ""


def check(
    model: nn.Module, example: Example, base: Outputs, preserving: bool, shared: Evaluation | None = None
) -> tuple[float, float]:
    """Compare with the outputs before; raise if a preserving growth changed them. `shared`: a pass of the present model.

    Sensitivity is measured only if the outputs have changed by more than the usual rounding. It is measured on the grown model:
    terms that cancel leave rounding errors proportional to the drawn values.
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
                f"the model's outputs on the example are not finite in {mode} mode, or differ between two passes: nothing "
                "can be checked; everything was put back",
                [Problem("", "infinities and NaNs can't be compared", "pass another example; or check=False")],
            )
        if preserving and not found <= limit:
            raise VerifyError(
                f"the grown model differs from the old one in {mode} mode by {found:.1e} of its largest output, where its own "
                f"rounding allows {limit:.1e}; everything was put back",
                [
                    Problem(
                        "",
                        "the code depends on the grown parts in a way that the analysis missed (e.g. on the number of blocks, "
                        f"or on a layer's attributes), {_rules(after)}or this is a bug in outgrow's analysis of the model",
                        "grow less, or elsewhere; and report it",
                    )
                ],
            )
    return max(errors), max(allowed)
