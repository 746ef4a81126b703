"""The methods by name. "auto" tries the methods of `AUTO` in order and takes the first that is exact on the path.

Net2Net comes with random shares there: copies with equal shares have equal gradients and stay equal.
"""

from __future__ import annotations

from outgrow.errors import MethodError
from outgrow.methods.base import REGISTERED, Method
from outgrow.methods.check_method import check_method
from outgrow.methods.faded import Faded
from outgrow.methods.fill_new_entries import NAME as NEW_ENTRIES
from outgrow.methods.fill_new_entries import NewEntries, for_new_entries
from outgrow.methods.learned import LearnedInit
from outgrow.methods.mean_fill import MeanFill
from outgrow.methods.net2net import Net2Net
from outgrow.methods.netmorph import NetMorph, RandomPad
from outgrow.methods.r2r import R2R

EXTENDING = ("vocab", "outputs")  # kinds that grow by new entries of the model's interface
AUTO: tuple[Method, ...] = (R2R(), NetMorph(), MeanFill(), NetMorph(zero="writers"), Net2Net(split="random"))
BY_NAME: dict[str, tuple[Method, ...]] = {
    "auto": AUTO,
    "r2r": (R2R(),),
    "net2net": (Net2Net(),),
    "netmorph": (NetMorph(), NetMorph(zero="writers")),
    "mean": (MeanFill(),),
    "random": (RandomPad(),),
}


def by_name() -> dict[str, tuple[Method, ...]]:
    """All methods with a name: the package's own, and those registered with `outgrow.register_method`."""
    return {**BY_NAME, **{name: (kind(),) for name, kind in REGISTERED.items()}}


def method_classes() -> dict[str, type[Method]]:
    """The class of each method that has a name; "auto" is a list of several."""
    return {**{name: type(methods[0]) for name, methods in by_name().items() if name != "auto"}, NEW_ENTRIES: NewEntries}


def candidates(method: str | Method, fade: int | None = None, kind: str | None = None) -> tuple[Method, ...]:
    """The methods to try, in order, for a user's `method=`, `fade=` and `kind=`."""
    if kind in EXTENDING:
        return for_new_entries(method, fade)
    if isinstance(method, NewEntries):
        raise MethodError("outgrow.NewEntries is for kind='vocab' and kind='outputs'")
    if fade is not None:
        return _faded(method, fade)
    if isinstance(method, Method):
        check_method(method)
        return (method,)
    known = by_name()
    if isinstance(method, str) and method in known:
        return known[method]
    if isinstance(method, LearnedInit) or (isinstance(method, type) and issubclass(method, LearnedInit)):
        raise MethodError("learned values are no method: write method=outgrow.R2R(init=outgrow.GradMax(batches, loss))")
    names = ", ".join(repr(name) for name in known)
    raise MethodError(
        f"there is no method {method!r}: write one of {names}, or an instance such as outgrow.R2R(init='he'); "
        "outgrow.register_method gives a method of your own a name"
    )


def _faded(method: str | Method, steps: int) -> tuple[Method, ...]:
    """The methods to try with `fade=`: the fade, and with "auto" also methods that are exact without it where it is refused."""
    if method == "auto":
        return (Faded(steps=steps), MeanFill(), NetMorph(zero="writers"), Net2Net(split="random"))
    if method in ("random", "netmorph"):
        return (Faded(steps=steps),)
    if isinstance(method, RandomPad) or (isinstance(method, NetMorph) and method.zero == "readers"):
        return (Faded(steps=steps, init=method.init, scale=method.scale, noise=method.noise),)
    (first, *_) = candidates(method)
    reason = "is exact without a fade" if first.exact else "can't be faded in"
    raise MethodError(f"{first.name} {reason}: leave fade= out, or write method='random' (the default with fade=)")


__all__ = [
    *("AUTO", "BY_NAME", "R2R", "MeanFill", "Method", "Net2Net", "NetMorph", "NewEntries", "RandomPad"),
    *("by_name", "candidates", "method_classes"),
]
