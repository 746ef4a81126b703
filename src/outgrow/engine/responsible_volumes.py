"""Find the volumes whose growth changes the outputs.

The growth is repeated on copies of the model, with one half of its volumes and then with the other; the half that differs is
halved again. This is done only after a growth was refused for its outputs, and adds names to the refusal.
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
    """The smallest groups of names found that make the outputs differ; all names together are known to do so."""
    if len(names) == 1:
        return [tuple(names)]
    middle = len(names) // 2
    found = [group for half in (names[:middle], names[middle:]) if differs(half) for group in halved(half, differs)]
    return found or [tuple(names)]


def named(error: VerifyError, model: nn.Module, widen: Widen, names: Sequence[str], grow: Callable[..., object]) -> VerifyError:
    """The refusal with the names of the responsible volumes; unchanged if these can't be found.

    grow: called with a model and a transform; makes the growth, or raises.
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
    which = f"select others: {others!r}" if 0 < len(others) <= 8 else "select other volumes by name"
    problems = [Problem(", ".join(group), "its growth changes the outputs, even without the others", which) for group in groups]
    message, *_ = str(error).split("\n")
    return VerifyError(message, [*problems, *(replace(problem, instead="report it") for problem in error.problems)])
