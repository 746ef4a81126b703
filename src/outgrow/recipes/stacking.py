"""Train a deep stack from nothing: few blocks at first, deepened in stages by copies that fade in.

The evidence is a pilot, of which no result files are kept in this repository: a GPT of 12 layers, width 384, on bytes of Python
source, AdamW, warm-up, constant rate, decay over the last fifth; the rate was tuned for training from scratch. 3 → 6 → 12
layers at 40 % and 70 % of 2,000 steps reached the loss that scratch has after 1,600 steps with 31 % fewer FLOPs, in each of
three seeds. Other settings had one seed. The study in experiments/lm is to replace the pilot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from torch import nn

from outgrow.errors import ScheduleError, SizeError
from outgrow.recipes.find_stack import find_stack
from outgrow.requests import Deepen
from outgrow.runs.schedule import At, Schedule
from outgrow.text.plurals import counted
from outgrow.wrong_arguments import usage

# All settings are those of the pilot (see above): n seeds, and FLOPs saved against scratch at the same loss.
SHARES = {
    1: (0.7,),  # 6 → 12 layers; n = 1; 24 %, interpolated. (3 → 12 at 50 %: 23 %)
    2: (0.4, 0.7),  # 3 → 6 → 12; n = 3; 31 %. (At 50 % and 75 % of longer runs 27 and 30 %, n = 1)
    3: (0.1, 0.3, 0.55),  # 1 → 3 → 6 → 12; n = 1; 26 %, interpolated
}
LAST = 0.7  # the last of more growths than three, which were not tried: they are spread evenly up to it
FADE = 200  # steps in which copies fade in: in all runs of the pilot
FADE_SHARE = 0.1  # and at most this share of the run: 200 of 2,000 steps; longer shares were not tried
ORDER = "interleave"  # a a b b c c; a b c a b c was as good
STATE = "copy"  # Adam's moments of the copied blocks; in all runs of the pilot


@usage("outgrow.recipes.stack(model, stages=[3, 6, 12], steps=2000)")
def stack(
    model: nn.Module,
    stages: Sequence[int],
    steps: int,
    *,
    shares: Sequence[float] | None = None,
    fade: int | None = None,
    stack: str | None = None,
) -> Schedule:
    """A schedule that trains a stack from nothing with few blocks, and deepens it in stages by copies that fade in.

    Use one peak learning rate for the whole run, the one that is best for the large model, and let the last fade end before the
    rate decays (warm-up, constant rate, decay over the last fifth).

    Evidence: a pilot with a GPT of 12 layers on source code, whose result files are not part of this repository: with
    `stages=[3, 6, 12]`, 2,000 steps and these settings it reached the loss of training from scratch with fewer FLOPs, in three
    seeds. On small image networks growing from nothing does not pay (docs/does-it-pay.md). Other models, data and sizes: not
    known.

    Args:
        model: with `stages[0]` blocks; it is only read.
        stages: the number of blocks at the start and after each growth.
        steps: the number of optimizer steps of the whole run.
        shares: the moments of the growths, as shares of the run; by default 40 % and 70 % for two growths, 70 % for one, and
            10 %, 30 % and 55 % for three. For more, which were not tried, they are spread evenly up to 70 %.
        fade: the number of steps in which copies fade in; by default 200, and at most a tenth of the run.
        stack: the path of the stack, if several of the model have `stages[0]` blocks.

    Example:
        >>> class Block(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.f = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        ...     def forward(self, x):
        ...         return x + self.f(x)
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(Block(), Block(), Block()), nn.Linear(4, 2))
        >>> print(stack(model, stages=[3, 6, 12], steps=2000))
        step 800 (40 % of the run): Deepen '1' to 6 layers; the optimizer's state is copied with blocks
        step 1400 (70 % of the run): Deepen '1' to 12 layers; the optimizer's state is copied with blocks
    """
    _check_stages(stages)
    path = find_stack(model, stages[0], stack)
    growths = list(stages[1:])
    moments = default_shares(len(growths)) if shares is None else _checked(shares, len(growths))
    Schedule().over(steps=steps)  # raises if that is no length
    fade = max(min(FADE, round(FADE_SHARE * steps)), 1) if fade is None else fade
    _check_fade(fade, moments, steps)
    events = [
        At(share=share, grow=[Deepen(layers=layers, fade=fade, order=ORDER, stack=path)], state=STATE)
        for share, layers in zip(moments, growths, strict=True)
    ]
    return Schedule(events).over(steps=steps)


def _checked(shares: Sequence[float], growths: int) -> tuple[float, ...]:
    """The shares that a user has given; `At` checks their range."""
    listed = isinstance(shares, Iterable) and not isinstance(shares, str)
    given = tuple(shares) if listed else ()
    if not listed or not all(isinstance(share, (int, float)) for share in given):
        usual = [round(share, 2) for share in default_shares(growths)]
        raise ScheduleError(f"shares={shares!r}: write a list of numbers between 0 and 1, one per growth, e.g. shares={usual}")
    if len(given) != growths:
        raise ScheduleError(f"shares={shares!r}: {counted(growths, 'growth')} needs as many shares")
    return given


def _check_fade(fade: int, moments: Sequence[float], steps: int) -> None:
    """Raise if copies would still fade in at the end of the run."""
    last = round(max((share for share in moments if 0 < share < 1), default=0.0) * steps)
    if isinstance(fade, int) and last < steps < last + fade:
        what = f"the last growth is at step {last} of {steps}, and its copies would still fade in at the end"
        raise ScheduleError(f"fade={fade}: {what}; write fade={max(steps - last, 1)} or less, or earlier shares=")


def default_shares(growths: int) -> tuple[float, ...]:
    """The moments of this number of growths, as shares of the run.

    Example:
        >>> default_shares(2), [round(share, 3) for share in default_shares(4)]
        ((0.4, 0.7), [0.175, 0.35, 0.525, 0.7])
    """
    return SHARES.get(growths, tuple(LAST * number / growths for number in range(1, growths + 1)))


def _check_stages(stages: Sequence[int]) -> None:
    counts = list(stages) if isinstance(stages, Sequence) and not isinstance(stages, str) else []
    whole = all(type(count) is int and count > 0 for count in counts)
    if len(counts) < 2 or not whole or any(one >= other for one, other in pairwise(counts)):
        raise SizeError(f"stages={stages!r}: write increasing numbers of blocks, two or more, e.g. stages=[3, 6, 12]")
