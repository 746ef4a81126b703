"""How an arm is drawn, the same in every figure and in the report: a label, a colour of Okabe and Ito's, and a line style.

Colour and line style both stand for the method, for print in grey and for readers who see colours differently.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    "Code": Look("nearly zero", "green", (5, 1.6)),
    "R2WiderR@4500": Look("R2WiderR at 4,500", "blue", width=1.3),
    "R2DeeperR@4500": Look("R2DeeperR at 4,500", "blue", width=1.3),
    "R2WiderR@0": Look("R2WiderR at 0", "purple", (1.2, 1.2)),
    "R2DeeperR@0": Look("R2DeeperR at 0", "purple", (1.2, 1.2)),
}
SUFFIXES = {
    "(author)": "author’s settings",
    "(dropped)": "rate dropped",
    "(writers)": "zero writers",
    "(NoDrop)": "rate not dropped",
    "(printed)": "a third of the scale",
    "(code)": "nearly zero",
    "(Residual)": "with skips",
    "(noise)": "with noise",
    "(scale3)": "scale × 3",
    "(scale10)": "scale × 10",
    "(carried)": "state carried",
    "(narrow)": "8/16 channels",
}
ACCOUNT_NAMES = {"nothing": "from nothing", "reuse": "reuse"}


def look(arm: str) -> Look:
    """An arm that is not known here is grey, under its own name; one with a suffix looks like the one without, but dotted."""
    name = arm.split("-", 1)[-1]
    if name in LOOKS:
        return LOOKS[name]
    for suffix, words in SUFFIXES.items():
        if name.endswith(suffix):
            plain = look(name.removesuffix(suffix))
            base = plain.label.replace(" (no skips)", "") if suffix == "(Residual)" else plain.label
            return replace(plain, label=f"{base}, {words}", dash=plain.dash if suffix == "(narrow)" else (1, 2.2), width=1.0)
    return Look(arm, "grey")
