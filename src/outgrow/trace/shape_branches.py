"""Places where a model's own code branches on a size, as in `if x.shape[0] > 8:`.

The trace and the check cover only the branch that the example takes. Sizes are plain integers, so such a branch is found in the
source of `forward`, not in the trace. Branches that only raise or warn do not count, nor does the code of installed packages:
libraries branch on sizes in many places (padding, caches) without another use of the units.
"""

from __future__ import annotations

import ast
import inspect
import sysconfig
import textwrap
from collections.abc import Iterator

from torch import nn

from outgrow.trace.operators import Trace
from outgrow.trace.value_reads import NOTE, SHOWN

SIZES = frozenset({"shape", "size", "numel"})
INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")})
HARMLESS = (ast.Raise, ast.Assert, ast.Pass, ast.Expr)  # an expression alone is a warning, a log line or a docstring


def note(model: nn.Module, trace: Trace) -> list[str]:
    """A report line if code that ran branches on sizes."""
    modules = dict(model.named_modules())
    run = dict.fromkeys(op.module for op in trace.ops if op.module in modules)
    kinds = {path: type(modules[path]) for path in run}
    branching = {kind: branches_on_sizes(kind) for kind in set(kinds.values())}
    places = [path or "the model" for path, kind in kinds.items() if branching[kind]]
    if not places:
        return []
    more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
    return [
        f"{NOTE}: the code of {', '.join(places[:SHOWN])}{more} branches on sizes of tensors; for inputs of other sizes it may "
        "run code that was not analysed and compared"
    ]


def branches_on_sizes(kind: type[nn.Module]) -> bool:
    """Whether `forward` of a class branches on a size; False if its source can't be read.

    Example:
        >>> branches_on_sizes(nn.Linear)
        False
    """
    try:
        if (inspect.getsourcefile(kind.forward) or "").startswith(INSTALLED):
            return False
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))
    except (OSError, TypeError, SyntaxError):
        return False
    names = set(_names_of_sizes(tree))
    return any(_reads_size(test, names) for test in _tests(tree))


def _tests(tree: ast.AST) -> Iterator[ast.expr]:
    """The conditions of branches and loops, except for those that only raise or warn."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.While)):
            statements = [*node.body, *node.orelse]
            yield from () if all(isinstance(one, HARMLESS) for one in statements) else (node.test,)
        elif isinstance(node, ast.IfExp):
            yield node.test


def _names_of_sizes(tree: ast.AST) -> Iterator[str]:
    """Variables that are assigned from a size, as in `b, n, c = x.shape`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _is_size(node.value):
            for target in node.targets:
                yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))


def _is_size(value: ast.expr) -> bool:
    """Whether an expression is a size itself: x.shape, x.shape[0], x.size(0), x.numel()."""
    if isinstance(value, ast.Subscript):
        return _is_size(value.value)
    if isinstance(value, ast.Call):
        called = value.func
        return isinstance(called, ast.Attribute) and called.attr in SIZES
    return isinstance(value, ast.Attribute) and value.attr == "shape"


def _reads_size(test: ast.expr, names: set[str]) -> bool:
    return any(
        isinstance(node, ast.expr) and (_is_size(node) or (isinstance(node, ast.Name) and node.id in names))
        for node in ast.walk(test)
    )
