"""Initial values of a new module, as data: part of an insert while a growth is planned and carried out, but not saved.

A new module is a copy of a sibling or built from its description. A *start* lists what is then written into its tensors, so
that the module does not change the outputs at first: tensors filled with one value, positions set to zero, positions that
repeat others with a sign. Seeds are resolved when the growth is planned, so that a start contains positions only. Batch
statistics are computed when the start is carried out, on the model at that time.
"""

from __future__ import annotations

from dataclasses import dataclass

from outgrow.text.plurals import counted


@dataclass(frozen=True)
class Fill:
    """Set all entries of a tensor to one value."""

    tensor: str
    value: float


@dataclass(frozen=True)
class Zeros:
    """Set positions along an axis to zero."""

    tensor: str
    axis: int
    at: tuple[int, ...]


@dataclass(frozen=True)
class Repeats:
    """Set positions along an axis to a copy of others, times a sign."""

    tensor: str
    axis: int
    to: tuple[int, ...]
    source: tuple[int, ...]
    sign: float


Write = Fill | Zeros | Repeats


@dataclass(frozen=True)
class Start:
    """The steps that initialise a new module, in this order. Names are relative to the new module."""

    draw: int | None = None  # seed from which its layers are initialised again
    writes: tuple[Write, ...] = ()
    identity: str = ""  # it is the identity on the output of this module (its name before the insert), batch norms included
    rotation: tuple[int, int] | None = None  # its layer is an orthogonal matrix: side, and seed
    gates: tuple[str, ...] = ()  # modules whose outputs fade in over `steps` optimizer steps
    soft: tuple[str, ...] = ()  # activations that start as the identity and fade in over `steps` optimizer steps
    whole: bool = False  # the difference between its output and its input fades in over `steps` optimizer steps
    steps: int = 0

    def __str__(self) -> str:
        parts = ["drawn"] if self.draw is not None else []
        paired = sorted({write.tensor for write in self.writes if isinstance(write, Repeats) and write.sign < 0})
        filled = sorted({f"{write.tensor} = {write.value:g}" for write in self.writes if isinstance(write, Fill)})
        parts += [f"pairs cancel in {', '.join(paired)}"] if paired else []
        parts += [", ".join(filled)] if filled else []
        parts += [f"the identity on the output of {self.identity}"] if self.identity else []
        parts += ["undoes the rotation of the layer before it"] if self.rotation is not None else []
        parts += [f"{', '.join(self.soft)} {'starts' if len(self.soft) == 1 else 'start'} as the identity"] if self.soft else []
        parts += [f"faded in over {counted(self.steps, 'step')}"] if self.gates or self.whole else []
        return "; ".join(parts)
