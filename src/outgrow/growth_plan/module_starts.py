"""How a new module starts, as data: part of an insert while a growth is planned and carried out, not of the saved record.

A new module is a copy of a sibling or built from its description. A *start* says what is written into its tensors then, so
that it changes nothing at first: whole tensors that get one value, positions that become zero, positions that repeat others
with a sign. Seeds are resolved when the growth is planned, so that a start holds positions only. The statistics of a batch are
taken when the start is carried out, on the model as it is then.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fill:
    """All entries of a tensor get one value."""

    tensor: str
    value: float


@dataclass(frozen=True)
class Zeros:
    """Positions along an axis become zero."""

    tensor: str
    axis: int
    at: tuple[int, ...]


@dataclass(frozen=True)
class Repeats:
    """Positions along an axis repeat others, times a sign."""

    tensor: str
    axis: int
    to: tuple[int, ...]
    source: tuple[int, ...]
    sign: float


Write = Fill | Zeros | Repeats


@dataclass(frozen=True)
class Start:
    """What happens to a new module before the model runs with it, in this order. Names are those within the new module."""

    draw: int | None = None  # its layers draw their values again, from this seed
    writes: tuple[Write, ...] = ()
    identity: str = ""  # it is the identity on what this module (named as before the insert) returns, batch norms included
    rotation: tuple[int, int] | None = None  # its layer is an orthogonal matrix: side, and what it is drawn from
    gates: tuple[str, ...] = ()  # modules whose outputs come in over some optimizer steps
    steps: int = 0

    def __str__(self) -> str:
        parts = ["drawn"] if self.draw is not None else []
        paired = sorted({write.tensor for write in self.writes if isinstance(write, Repeats) and write.sign < 0})
        filled = sorted({f"{write.tensor} = {write.value:g}" for write in self.writes if isinstance(write, Fill)})
        parts += [f"pairs cancel in {', '.join(paired)}"] if paired else []
        parts += [", ".join(filled)] if filled else []
        parts += [f"the identity on what {self.identity} returns"] if self.identity else []
        parts += ["undoes the rotation of the layer before it"] if self.rotation is not None else []
        parts += [f"faded in over {self.steps} steps"] if self.gates else []
        return "; ".join(parts)
