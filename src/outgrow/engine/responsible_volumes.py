"""Which volumes are responsible where a grown model does not compute what the old one did.

The growth is repeated on copies of the model, with one half of its volumes and then with the other; the half that differs is
halved again. It is only done where a growth is refused for its outputs, and adds names to the refusal.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from outgrow.errors import GrowthError, Problem, VerifyError
from outgrow.requests import Widen

ATTEMPTS = 40


def halved(names: Sequence[str], differs: Callable[[Sequence[str]], bool]) -> list[tuple[str, ...]]:
    """The smallest groups of names found that differ by themselves; all of them are known to differ together."""
    if len(names) == 1:
        return [tuple(names)]
    middle = len(names) // 2
    found = [group for half in (names[:middle], names[middle:]) if differs(half) for group in halved(half, differs)]
    return found or [tuple(names)]


def named(error: VerifyError, model: nn.Module, widen: Widen, names: Sequence[str], grow: Callable[..., object]) -> VerifyError:
    """The refusal, with the volumes of a widening that are responsible; as it was if they can't be found.

    grow: makes a growth of (model, transform), or raises.
    """
    attempts = 0

    def differs(some: Sequence[str]) -> bool:
        nonlocal attempts
        attempts += 1
        if attempts > ATTEMPTS:
            return False
        try:
            grow(copy.deepcopy(model), replace(widen, where=tuple(some)))
        except VerifyError:
            return True
        except GrowthError:  # it grows only together with others
            return False
        return False

    try:
        groups = halved(names, differs)
    except Exception:  # a model that can't be copied, or no memory for it
        return error
    guilty = {name for group in groups for name in group}
    others = [name for name in names if name not in guilty]
    if not others and len(names) > 1:
        return error
    which = f"select others: {others!r}" if 0 < len(others) <= 8 else "select others than it by name"
    problems = [
        Problem(", ".join(group), "its growth changes the outputs, also without that of the others", which) for group in groups
    ]
    message, *_ = str(error).split("\n")
    return VerifyError(message, [*problems, *(replace(problem, instead="report it") for problem in error.problems)])
