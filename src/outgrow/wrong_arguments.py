"""Wrong arguments of a public call: an error that shows a correct call.

Python's own `TypeError` about a missing or unknown argument only names it. A function decorated with `usage` raises `CallError`
instead, which is a TypeError too and contains an example of the call:

    outgrow.load: missing a required argument: 'path'. Write e.g. outgrow.load(model, 'model.safetensors')
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from outgrow.errors import CallError

C = TypeVar("C", bound=Callable[..., Any])


def usage(example: str) -> Callable[[C], C]:
    """Decorate a function, or the constructor of a class, with an example of its call.

    Example:
        >>> @usage("outgrow.twice(3)")
        ... def twice(number: int) -> int:
        ...     return 2 * number
        >>> twice(4)
        8
        >>> twice()
        Traceback (most recent call last):
        ...
        outgrow.errors.CallError: outgrow.twice: missing a required argument: 'number'. Write e.g. outgrow.twice(3)
    """
    name = example.partition("(")[0]

    def decorate(call: C) -> C:
        if isinstance(call, type):
            kind: Any = call
            kind.__init__ = _checked(kind.__init__, name, example)
            return call
        return _checked(call, name, example)  # type: ignore[return-value]

    return decorate


def _checked(call: Callable[..., Any], name: str, example: str) -> Callable[..., Any]:
    signature = inspect.signature(call)

    @functools.wraps(call)
    def checked(*args: Any, **options: Any) -> Any:
        try:
            signature.bind(*args, **options)
        except TypeError as error:
            raise CallError(f"{name}: {_reason(signature, options, error)}. Write e.g. {example}".replace("?.", "?")) from None
        return call(*args, **options)

    return checked


def _reason(signature: inspect.Signature, options: dict[str, Any], error: TypeError) -> str:
    """What is wrong with the arguments; for an unknown one, the most similar known name."""
    known = [name for name in signature.parameters if name not in ("self", "cls")]
    open_ended = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values())
    unknown = [name for name in options if name not in known and not open_ended]
    if not unknown:
        return str(error)
    near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.7)
    others = f": did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
    return f"there is no argument {unknown[0]!r}{others}"
