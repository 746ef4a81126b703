"""The requests that a user can make: Widen, Deepen, Kernel and Branch, as frozen, validated data."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from outgrow.analysis.attention_products import GROUP, HEADS, QUERY
from outgrow.analysis.volume_kinds import KINDS
from outgrow.errors import MethodError, SelectionError, SizeError
from outgrow.methods.all_methods import candidates
from outgrow.methods.base import Method
from outgrow.text.plurals import counted
from outgrow.wrong_arguments import usage

MOST_NEW_UNITS = 2**20  # per volume and growth: a larger number is taken for a typing error
DEEPEN_METHODS = ("auto", "r2r", "r2r-paper", "residual", "net2net", "netmorph", "copy", "random")
ORDERS = ("interleave", "stack")
BRANCH_METHODS = ("auto", "r2r", "netmorph", "copy", "random")


def check_fade(fade: int | None) -> None:
    if fade is not None and (type(fade) is not int or fade < 1):
        raise SizeError(f"fade={fade!r}: write a number of optimizer steps, a whole number above 0")


@usage("outgrow.Widen('*', factor=1.5)")
@dataclass(frozen=True)
class Widen:
    """A request for more units in the volumes that `where` selects; exactly one of `factor`, `by` and `to` says how many.

    kind: only volumes of this kind: "mlp", "heads", "head_dim", "width", "experts", "vocab" or "outputs". The last two append
    entries to the model's outputs; the old ones stay as they are. Their methods are "mean", "zero", "random" and NewEntries.
    unit: for kind="heads" where query heads share keys and values: "group" adds key and value heads with their query heads,
    "query" adds query heads to each of them. By default the form that reaches the size; groups if both do.
    fade: number of optimizer steps over which new units fade in: their own weights are drawn, and the weights that read them
    start at zero. outputs: the outputs of the model that the growth preserves, by key, attribute or position, e.g. "logits";
    others may change their size. Without it, all outputs are preserved.

    Example:
        >>> Widen("layer1.*", factor=1.5).summary
        "Widen 'layer1.*' × 1.5"
        >>> Widen(kind="mlp", factor=1.5).summary
        "Widen mlp '*' × 1.5"
        >>> Widen(kind="heads", by=4, unit="query").summary
        "Widen heads (query) '*' by 4"
    """

    where: str | Sequence[str] = "*"
    factor: float | None = None
    by: int | None = None
    to: int | None = None
    method: str | Method = "auto"
    residual: str = "stream"
    fade: int | None = None
    kind: str | None = None
    outputs: str | int | Sequence[str | int] | None = None
    unit: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("factor", "by", "to") if getattr(self, name) is not None]
        if len(given) != 1:
            raise SizeError(
                f"say how wide with exactly one of factor=, by= and to=, not {' and '.join(given) or 'none of them'}"
            )
        if self.factor is not None and (not isinstance(self.factor, Real) or isinstance(self.factor, bool)):
            raise SizeError(f"factor={self.factor!r} is not a number: write one above 1, e.g. factor=1.5")
        if self.factor is not None and not 1 < self.factor < float("inf"):
            raise SizeError(f"factor={self.factor} does not grow anything: write a factor above 1, e.g. factor=1.5")
        for name in ("by", "to"):
            value = getattr(self, name)
            if isinstance(value, Integral) and not isinstance(value, bool):
                object.__setattr__(self, name, int(value))  # e.g. numpy's integers
        if self.by is not None and (type(self.by) is not int or self.by < 1):
            raise SizeError(f"by={self.by!r} does not grow anything: write a whole number of units above 0")
        if self.to is not None and (type(self.to) is not int or self.to < 1):
            raise SizeError(f"to={self.to!r} is not a size: write a whole number of units")
        if not isinstance(self.where, Collection) or not all(isinstance(pattern, str) for pattern in self.where):
            raise SelectionError(f"where={self.where!r}: write a name or a glob such as 'layer1.*', or a list of them")
        if not self.where:
            raise SelectionError(f"where={self.where!r} selects nothing: write a name or a glob such as 'layer1.*', or '*'")
        if not isinstance(self.where, str):
            object.__setattr__(self, "where", tuple(self.where))  # so that requests with equal names are equal
        if self.kind is not None and self.kind not in KINDS:
            raise SelectionError(f"kind={self.kind!r}: write one of {', '.join(map(repr, KINDS))}")
        if self.unit is not None and (self.unit not in (GROUP, QUERY) or self.kind != HEADS):
            raise SelectionError(
                f"unit={self.unit!r} of kind={self.kind!r}: with kind='heads', write unit='group' (whole groups of query heads "
                "that share a key head) or unit='query' (more query heads in each group)"
            )
        if self.kind is not None and self.residual == "fold":
            raise SelectionError(
                "residual='fold' widens what one module writes: name the module with where=, and leave kind= out"
            )
        self._check_outputs()
        check_fade(self.fade)
        candidates(self.method, self.fade, self.kind)
        if self.residual == "fold" and self.fade is not None:
            raise MethodError("a folded residual is exact without a fade: leave fade= out")
        if self.residual not in ("stream", "fold"):
            raise MethodError(
                f"residual={self.residual!r}: write 'stream' (widen whole streams) or 'fold' (the paper's folded residual)"
            )

    def _check_outputs(self) -> None:
        names = [self.outputs] if isinstance(self.outputs, (str, int)) else self.outputs
        if names is None:
            return
        plain = isinstance(names, Collection) and all(isinstance(name, (str, int)) for name in names)
        if not plain or not names or any(name == "" or isinstance(name, bool) for name in names):
            raise SelectionError(
                f"outputs={self.outputs!r}: write the key, attribute or position of an output, e.g. outputs='logits', or a list"
            )
        if not isinstance(self.outputs, (str, int)):
            object.__setattr__(self, "outputs", tuple(names))

    @property
    def kept(self) -> tuple[str | int, ...]:
        """The names of the outputs that the growth preserves; empty if it preserves all of them."""
        return (self.outputs,) if isinstance(self.outputs, (str, int)) else tuple(self.outputs or ())

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.where,) if isinstance(self.where, str) else tuple(self.where)

    @property
    def summary(self) -> str:
        """The request in a few words."""
        amount = f"× {self.factor:g}" if self.factor else f"by {self.by}" if self.by else f"to {self.to}"
        kind = f"{self.kind} " if self.kind else ""
        kind += f"({self.unit}) " if self.unit else ""
        return f"Widen {kind}{', '.join(self.patterns)!r} {amount}"


@usage("outgrow.Deepen('layer3.1')")
@dataclass(frozen=True)
class Deepen:
    """A request to insert `count` new blocks after the module `after`; without `after`, to deepen a stack to `layers` blocks.

    method: "auto" (r2r), "r2r", "r2r-paper", "residual", "net2net", "netmorph"; or "copy" and "random", which do not preserve
    the function. fade: number of optimizer steps over which the output of the new block fades in. Any block is exact then:
    the default is a copy of its neighbour, and "copy" and "random" are exact too. layers: without `after`, the new number of
    blocks of the model's stack; with it, insert an `outgrow.ResidualBlock` with this number of layers (where the model has no
    blocks of its own, that is the default, with two layers). order: of the blocks of a stack and their copies, "interleave"
    (a a b b) or "stack" (a b a b). stack: the path of the container, if the model has several stacks.

    Example:
        >>> Deepen(after="layer2.1", count=2).method
        'auto'
        >>> Deepen(layers=24, stack="encoder.layers").summary
        "Deepen 'encoder.layers' to 24 layers"
    """

    after: str = ""
    count: int = 1
    method: str = "auto"
    fade: int | None = None
    layers: int | None = None
    order: str = "interleave"
    stack: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.after, str):
            raise SelectionError(f"after={self.after!r}: write the path of a module, e.g. after='layer2.1'")
        if not self.after:
            self._check_stack()
        elif self.stack is not None or self.order != "interleave":
            raise SelectionError("stack= and order= belong to layers=, the number of blocks of a whole stack: leave after= out")
        if type(self.count) is not int or self.count < 1:
            raise SizeError(f"count={self.count!r}: write the number of blocks to add, a whole number above 0")
        if self.method not in DEEPEN_METHODS:
            raise MethodError(f"method={self.method!r}: write one of {', '.join(map(repr, DEEPEN_METHODS))}")
        if self.after and self.layers is not None and (type(self.layers) is not int or self.layers < 2):
            raise SizeError(f"layers={self.layers!r}: a residual block has two layers or more")
        if self.after and self.layers is not None and self.method not in ("auto", "r2r", "residual", "random"):
            raise MethodError(f"layers= is for residual blocks, and {self.method!r} does not build one: leave one of them out")
        check_fade(self.fade)
        if self.fade is not None and self.method in ("r2r", "r2r-paper"):
            raise MethodError("r2r is exact without a fade: write method='copy' (the default with fade=), or leave fade out")

    def _check_stack(self) -> None:
        if self.layers is None:
            raise SelectionError("write after=, the path of a module, e.g. 'layer2.1'; or layers=, the new number of blocks")
        if type(self.layers) is not int or self.layers < 1:
            raise SizeError(f"layers={self.layers!r}: write the new number of blocks, a whole number")
        if self.count != 1:
            raise SizeError(f"layers={self.layers} is the new number of all blocks: leave count= out")
        if self.order not in ORDERS:
            raise MethodError(f"order={self.order!r}: write 'interleave' (a a b b) or 'stack' (a b a b)")
        if self.stack is not None and not (isinstance(self.stack, str) and self.stack):
            raise SelectionError(f"stack={self.stack!r}: write the path of a container of blocks, e.g. stack='encoder.layers'")
        if self.method in ("residual", "net2net", "netmorph"):
            raise MethodError(
                f"a stack is deepened by copies of its blocks, and {self.method!r} makes others: name a place with after="
            )

    @property
    def exact(self) -> bool:
        return self.fade is not None or self.method not in ("copy", "random")

    @property
    def summary(self) -> str:
        """The request in a few words."""
        if self.after:
            return f"Deepen after {self.after!r} + {self.count}"
        order = "" if self.order == "interleave" else " (a b a b)"
        return f"Deepen {repr(self.stack) + ' ' if self.stack else ''}to {self.layers} layers{order}"

    @property
    def named(self) -> str:
        """The method, and the fade if there is one, as reports show them."""
        default = "r2r" if self.fade is None else "copy"
        method = default if self.method == "auto" else self.method
        return f"{method}, faded in over {counted(self.fade, 'step')}" if self.fade else method


@usage("outgrow.Kernel('conv1', 5)")
@dataclass(frozen=True)
class Kernel:
    """A request to enlarge the kernel of the convolution `where` to `size`, one number or one per axis.

    fade: number of optimizer steps over which the new entries go from zero to drawn values.

    Example:
        >>> Kernel("conv1", 9)
        Kernel(where='conv1', size=9, fade=None)
    """

    where: str
    size: int | Sequence[int]
    fade: int | None = None

    def __post_init__(self) -> None:
        sizes = [self.size] if isinstance(self.size, int) else self.size
        if not isinstance(self.where, str):
            raise SelectionError(f"where={self.where!r}: write the path of a convolution, e.g. 'conv1'")
        if not isinstance(sizes, Sequence) or not all(type(size) is int and size > 0 for size in sizes):
            raise SizeError(f"size={self.size!r}: write a whole number, or one for each axis, e.g. (3, 7)")
        if not isinstance(self.size, int):
            object.__setattr__(self, "size", tuple(self.size))
        check_fade(self.fade)

    @property
    def summary(self) -> str:
        """The request in a few words."""
        return f"Kernel {self.where!r} to {self.size}"


@usage("outgrow.Branch('layer2')")
@dataclass(frozen=True)
class Branch:
    """A request to add a branch in parallel to the module `beside`.

    method: "auto" or "r2r" (zero by pairs), "netmorph" (zero by its last layer); "copy" (of the module) and "random", which
    preserve the function only with `fade`, the number of optimizer steps over which the branch fades in.
    layers, hidden: build a branch with this number of layers (2 by default) and hidden units instead of copying the module.

    Example:
        >>> Branch(beside="layer2", method="netmorph").fade is None
        True
    """

    beside: str
    method: str = "auto"
    layers: int | None = None
    hidden: int | None = None
    fade: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.beside, str) or not self.beside:
            raise SelectionError(f"beside={self.beside!r}: write the path of a module, e.g. beside='layer2'")
        if self.method not in BRANCH_METHODS:
            raise MethodError(f"method={self.method!r}: write one of {', '.join(map(repr, BRANCH_METHODS))}")
        if self.layers is not None and (type(self.layers) is not int or self.layers < 2):
            raise SizeError(f"layers={self.layers!r}: a branch that can be zero and learn has two layers or more")
        if self.hidden is not None and (type(self.hidden) is not int or self.hidden < 2):
            raise SizeError(f"hidden={self.hidden!r}: write the number of hidden units, two or more")
        check_fade(self.fade)
        if self.fade is not None and self.method in ("r2r", "netmorph"):
            raise MethodError(f"{self.method} is exact without a fade: write method='copy' or 'random', or leave fade= out")
        if self.method == "copy" and (self.layers or self.hidden):
            raise MethodError("a copy has the layers of its original: leave layers= and hidden= out, or write method='random'")

    @property
    def exact(self) -> bool:
        return self.fade is not None or self.method not in ("copy", "random")

    @property
    def summary(self) -> str:
        """The request in a few words."""
        return f"Branch beside {self.beside!r}"

    @property
    def kind(self) -> str:
        """The name of the method, with "auto" resolved."""
        default = "r2r" if self.fade is None else "copy"
        return default if self.method == "auto" else self.method


@dataclass(frozen=True)
class Skip:
    """A volume that a glob selects but that does not grow, with the reason."""

    volume: str
    size: int
    reason: str

    def __str__(self) -> str:
        return f"{self.volume} ({self.size}): {self.reason}"


def is_glob(pattern: str) -> bool:
    return any(char in pattern for char in "*?[")
