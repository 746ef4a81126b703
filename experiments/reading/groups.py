"""Which arms are shown and compared together: one group per figure of the paper.

An arm that is not among the results is left out of its group, so that a few arms make a report as well as all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from experiments.reading.curves import Results


@dataclass(frozen=True)
class Group:
    """Arms of one figure. `scratch` is the grown network trained from its beginning, `padding` growth by random values.

    `more` are arms that plots and tables of final accuracies have beside them: controls, other settings and other readings.
    """

    key: str
    title: str
    arms: tuple[str, ...]
    scratch: str | None = None
    padding: str | None = None
    teachers: tuple[str, ...] = ()
    costs: bool = False  # whether the compute to reach an accuracy is compared
    more: tuple[str, ...] = ()

    def present(self, results: Results) -> tuple[str, ...]:
        return tuple(name for name in self.arms if name in results)

    def shown(self, results: Results) -> tuple[str, ...]:
        """The arms of a plot: the group's own, further ones, and its teacher where that is an arm of its own."""
        return tuple(name for name in (*self.arms, *self.more, *self.teachers[:1]) if name in results)


GROUPS = (
    Group(
        "nct-widen",
        "Convergence, widened",
        ("NCT-R2WiderR", "NCT-NetMorph", "NCT-Net2WiderNet", "NCT-RandPadWiden", "NCT-RandomWide"),
        "NCT-RandomWide",
        "NCT-RandPadWiden",
        ("NCT-WidenTeacher", "NCT-WidenTeacher(NoResidual)", "NCT-RandomWide(NoResidual)"),
        costs=True,
        more=(
            "NCT-NetMorph(writers)",
            "NCT-Net2WiderNet(Residual)",
            "NCT-R2WiderR(carried)",
            "NCT-NetMorph(carried)",
            "NCT-R2WiderR(noise)",
            "NCT-R2WiderR(printed)",
            "NCT-R2WiderR(code)",
            "NCT-RandomWide(author)",
            "NCT-RandomWide(dropped)",
            "NCT-RandomWide(NoResidual)(author)",
            "NCT-RandomWide(NoResidual)(dropped)",
            "NCT-WidenTeacher(dropped)",
            "NCT-WidenTeacher(NoResidual)(dropped)",
        ),
    ),
    Group(
        "nct-deepen",
        "Convergence, deepened",
        ("NCT-R2DeeperR", "NCT-R2DeeperR(paper)", "NCT-Net2DeeperNet", "NCT-RandPadDeeper", "NCT-RandomDeep"),
        "NCT-RandomDeep",
        "NCT-RandPadDeeper",
        ("NCT-DeepenTeacher", "NCT-DeepenTeacher(NoResidual)"),
        costs=True,
        more=(
            "NCT-R2DeeperR(carried)",
            "NCT-DeepenTeacher(dropped)",
            "NCT-DeepenTeacher(NoResidual)(dropped)",
        ),
    ),
    Group(
        "ftt-widen",
        "Faster training, widened",
        ("FTT-R2WiderR", "FTT-NetMorph", "FTT-Net2WiderNet", "FTT-RandPadWiden", "FTT-RandomWide"),
        "FTT-RandomWide",
        "FTT-RandPadWiden",
        costs=True,
        more=(
            "FTT-NetMorph(writers)",
            "FTT-Net2WiderNet(Residual)",
            "FTT-RandomWide(NoResidual)",
            "FTT-WidenTeacher(dropped)",
        ),
    ),
    Group(
        "ftt-deepen",
        "Faster training, deepened",
        ("FTT-R2DeeperR", "FTT-R2DeeperR(paper)", "FTT-Net2DeeperNet", "FTT-RandPadDeeper", "FTT-RandomDeep"),
        "FTT-RandomDeep",
        "FTT-RandPadDeeper",
        costs=True,
        more=(
            "FTT-RandomDeep(author)",
            "FTT-DeepenTeacher(dropped)",
        ),
    ),
    Group(
        "nct-narrow",
        "Convergence, deepened on 8/16 channels",
        (
            "NCT-R2DeeperR(narrow)",
            "NCT-R2DeeperR(paper)(narrow)",
            "NCT-Net2DeeperNet(narrow)",
            "NCT-RandPadDeeper(narrow)",
            "NCT-RandomDeep(narrow)",
        ),
        "NCT-RandomDeep(narrow)",
        "NCT-RandPadDeeper(narrow)",
        ("NCT-DeepenTeacher(narrow)", "NCT-DeepenTeacher(NoResidual)(narrow)"),
        costs=True,
    ),
    Group(
        "ftt-narrow",
        "Faster training, deepened on 8/16 channels",
        (
            "FTT-R2DeeperR(narrow)",
            "FTT-R2DeeperR(paper)(narrow)",
            "FTT-Net2DeeperNet(narrow)",
            "FTT-RandPadDeeper(narrow)",
            "FTT-RandomDeep(narrow)",
        ),
        "FTT-RandomDeep(narrow)",
        "FTT-RandPadDeeper(narrow)",
        costs=True,
    ),
    Group(
        "apb3-widen",
        "Appendix B on its own network, widened",
        ("APB3-R2WiderR@4500", "APB3-R2WiderR@3000", "APB3-R2WiderR@1500", "APB3-R2WiderR@0", "APB3-Scratch"),
        "APB3-Scratch",
        costs=True,
    ),
    Group(
        "apb3-deepen",
        "Appendix B on its own network, deepened",
        ("APB3-R2DeeperR@4500", "APB3-R2DeeperR@3000", "APB3-R2DeeperR@1500", "APB3-R2DeeperR@0", "APB3-Scratch"),
        "APB3-Scratch",
        costs=True,
    ),
    Group(
        "apb-widen",
        "Appendix B, widened",
        ("APB-R2WiderR", "APB-R2WiderR@3000", "APB-R2WiderR@1500", "APB-Scratch"),
        "APB-Scratch",
        costs=True,
        more=("APB-R2WiderR(carried)",),
    ),
    Group(
        "apb-deepen",
        "Appendix B, deepened",
        ("APB-R2DeeperR", "APB-R2DeeperR@3000", "APB-R2DeeperR@1500", "APB-Scratch"),
        "APB-Scratch",
        costs=True,
        more=("APB-R2DeeperR(carried)",),
    ),
    Group("of", "An overfitted teacher", ("OF-Student", "OF-Teacher", "OF-Rand"), "OF-Rand"),
    Group(
        "bi",
        "Bad initialisation",
        ("BI-Std", "BI-He"),
        more=("BI-Std(NoDrop)", "BI-He(NoDrop)", "BI-Code(NoDrop)", "BI-Teacher(dropped)"),
    ),
    Group(
        "viz",
        "Filters",
        ("VIZ-R2R", "VIZ-Net2Net", "VIZ-NetMorph"),
        more=(
            "VIZ-NetMorph(writers)",
            "VIZ-R2R(noise)",
            "VIZ-R2R(scale3)",
            "VIZ-R2R(scale10)",
            "VIZ-R2R(carried)",
            "VIZ-Net2Net(carried)",
            "VIZ-NetMorph(carried)",
        ),
    ),
)

# Net2Net's networks have no residual connections; these are their own kind, trained from scratch.
PLAIN_SCRATCH = {"NCT-Net2WiderNet": "NCT-RandomWide(NoResidual)", "NCT-Net2DeeperNet": "NCT-WidenTeacher(NoResidual)"}
