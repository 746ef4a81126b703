"""New entries of the model's outputs and of its vocabulary: no method has to cancel them, since nothing old reads them.

    logits′ = [W; U]·h = [W·h; U·h]        the first entries are the old logits, whatever U is

So U is free, and only decides where training starts. With the mean of the old rows, each new logit is the mean of the old ones:
it never exceeds the largest, so the most likely token or class stays the same, and the loss of a softmax over n more entries
rises by at most log((V + n)/V) at the start (J. Hewitt, 2021: Initializing new word embeddings for pretrained language models).
"""

from __future__ import annotations

from dataclasses import dataclass

from outgrow.analysis.unit_states import State, Verdict
from outgrow.analysis.volumes import Slot, Volume
from outgrow.errors import MethodError
from outgrow.methods.base import Draft, Method, Recipe, forced, free, typical, zeros
from outgrow.wrong_arguments import usage

STARTS = ("mean", "zero", "random")
NAME = "new entries"


@usage("outgrow.NewEntries(start='mean')")
@dataclass(frozen=True, kw_only=True)
class NewEntries(Method):
    """New rows of an embedding or of an output layer, for `Widen(kind="vocab")` and `Widen(kind="outputs")`.

    start: "mean" (of the old rows, and of the old biases), "zero", or "random" (drawn as `init` says). noise: standard
    deviation of noise on new values, relative to that of their tensor, so that new rows differ; 0.01 by default with "mean".

    Example:
        >>> import torch, outgrow
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> how = NewEntries(start="zero")
        >>> growth = outgrow.widen(model, torch.randn(1, 4), kind="outputs", by=1, method=how)
        >>> model[2].out_features, model[2].weight[2].abs().max().item()
        (3, 0.0)
    """

    start: str = "mean"
    noise: float | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.start not in STARTS:
            raise MethodError(f"start={self.start!r}: write one of {', '.join(map(repr, STARTS))}")
        if self.noise is None:
            object.__setattr__(self, "noise", 0.01 if self.start == "mean" else 0.0)
        super().__post_init__()

    @property
    def name(self) -> str:
        return f"{NAME} ({self.start})"

    @property
    def state(self) -> State:
        return State.ANY

    @property
    def exact(self) -> bool:
        return True

    def recipe(self, slot: Slot, volume: Volume, verdict: Verdict, draft: Draft) -> Recipe:
        if slot.role == "reads":
            return forced(slot, verdict, draft) or zeros(draft)
        if slot.role == "scales":
            return zeros(draft) if slot.shift else typical(slot, draft)
        if self.start == "zero":
            return zeros(draft)
        return free(draft) if self.start == "random" else typical(slot, draft)


BY_START: dict[str, tuple[Method, ...]] = {
    "auto": (NewEntries(),),
    **{start: (NewEntries(start=start),) for start in STARTS},
}


def for_new_entries(method: str | Method, fade: int | None) -> tuple[Method, ...]:
    """The methods to try for kinds "vocab" and "outputs", for a user's `method=` and `fade=`."""
    if fade is not None:
        raise MethodError("new entries of outputs change no old one: leave fade= out")
    if isinstance(method, NewEntries):
        return (method,)
    if isinstance(method, str) and method in BY_START:
        return BY_START[method]
    known = ", ".join(map(repr, BY_START))
    raise MethodError(f"method={method!r}: new entries of outputs start by {known}, or by outgrow.NewEntries(…)")
