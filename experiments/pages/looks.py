"""How an arm is drawn, the same in every figure and in the report: a label, a colour of Okabe and Ito's, and a line style.

Colour tells the method; the line style tells it once more, for print in grey and for eyes that see colours otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

# Okabe & Ito, Color Universal Design (2008). Yellow is left out: it is lost on white.
COLOURS = {
    "blue": "#0072B2",
    "green": "#009E73",
    "purple": "#CC79A7",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "red": "#D55E00",
    "black": "#000000",
    "grey": "#767676",
}


@dataclass(frozen=True)
class Look:
    label: str
    colour: str
    dash: tuple[float, ...] = ()  # on and off, in line widths; empty: drawn through
    width: float = 1.0

    @property
    def hex(self) -> str:
        return COLOURS[self.colour]


LOOKS = {
    "R2WiderR": Look("R2WiderR", "blue", width=1.3),
    "R2DeeperR": Look("R2DeeperR", "blue", width=1.3),
    "R2DeeperR(paper)": Look("R2DeeperR, paired", "sky", (6, 1.5, 1, 1.5)),
    "R2R": Look("R2R", "blue", width=1.3),
    "R2WiderR@3000": Look("R2WiderR at 3,000", "sky", (6, 1.5, 1, 1.5)),
    "R2WiderR@1500": Look("R2WiderR at 1,500", "green", (5, 1.6)),
    "R2DeeperR@3000": Look("R2DeeperR at 3,000", "sky", (6, 1.5, 1, 1.5)),
    "R2DeeperR@1500": Look("R2DeeperR at 1,500", "green", (5, 1.6)),
    "Scratch": Look("from scratch", "black"),
    "NetMorph": Look("NetMorph", "green", (5, 1.6)),
    "Net2WiderNet": Look("Net2WiderNet (no skips)", "purple", (1.2, 1.2)),
    "Net2DeeperNet": Look("Net2DeeperNet (no skips)", "purple", (1.2, 1.2)),
    "Net2Net": Look("Net2Net", "purple", (1.2, 1.2)),
    "RandPadWiden": Look("random padding", "orange", (4, 1.3, 1.2, 1.3)),
    "RandPadDeeper": Look("random padding", "orange", (4, 1.3, 1.2, 1.3)),
    "RandomWide": Look("from scratch", "black"),
    "RandomDeep": Look("from scratch", "black"),
    "RandomWide(NoResidual)": Look("from scratch (no skips)", "grey"),
    "WidenTeacher": Look("teacher", "red", (2.5, 1.2)),
    "WidenTeacher(NoResidual)": Look("teacher (no skips)", "grey", (2.5, 1.2)),
    "DeepenTeacher": Look("teacher", "red", (2.5, 1.2)),
    "DeepenTeacher(NoResidual)": Look("teacher (no skips)", "grey", (2.5, 1.2)),
    "Teacher": Look("teacher, overfitted", "red", (2.5, 1.2)),
    "Student": Look("student, R2WiderR", "blue", width=1.3),
    "Rand": Look("from scratch", "black"),
    "He": Look("He initialisation", "red", (5, 1.6)),
    "Std": Look("matched deviation", "blue", width=1.3),
    # the demo's
    "small": Look("not grown", "grey"),
    "r2r": Look("r2r", "blue", width=1.3),
    "net2net": Look("net2net", "purple", (1.2, 1.2)),
    "netmorph": Look("netmorph", "green", (5, 1.6)),
    "copy": Look("copies (does not preserve)", "sky", (6, 1.5, 1, 1.5)),
    "random": Look("random (does not preserve)", "orange", (4, 1.3, 1.2, 1.3)),
    "scratch": Look("from scratch", "black"),
    "scratch, same FLOPs": Look("from scratch, same FLOPs", "red", (2.5, 1.2)),
}


def look(arm: str) -> Look:
    """An arm that is not known here is grey, under its own name."""
    return LOOKS.get(arm.split("-", 1)[-1], Look(arm, "grey"))
