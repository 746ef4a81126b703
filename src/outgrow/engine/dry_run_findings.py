"""The results of a dry run: steps that only have to be carried out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from outgrow.apply.final_positions import prepare
from outgrow.apply.weight_fades import drifts_of
from outgrow.engine.carry_out import Work
from outgrow.growth_plan.plan import Plan
from outgrow.model.sandbox import tensors_of
from outgrow.modules.gates import gates_of
from outgrow.transforms.site_and_step import Step


@dataclass(frozen=True, eq=False)
class Ready:
    """The planned steps of a growth, for a model whose tensors have the shapes of the throw-away copy."""

    shapes: Mapping[str, tuple[int, ...]]  # of the model's tensors before
    steps: Sequence[Step]
    notes: Sequence[str]
    flops: tuple[int, int]
    edited: Sequence[str] = ()  # parameters that change, by their names after the growth
    joins: Sequence[tuple[str, str]] = ()  # likewise a new parameter, and the one whose group it joins

    @staticmethod
    def of(shapes: Mapping[str, tuple[int, ...]], steps: Sequence[Step], work: Work, flops: tuple[int, int]) -> Ready:
        """The steps carried out on the copy. With new modules, settings of the configuration are left out and found again."""
        if not any(plan.inserts for plan in work.plans):
            steps = [*steps[:-1], replace(steps[-1], plans=(*steps[-1].plans[:-1], work.plans[-1]))]
        names = {id(parameter): name for name, parameter in work.model.named_parameters()}
        edited = [names[id(tensor)] for tensor in work.edited if id(tensor) in names]
        joins = [(names[id(new)], names[id(like)]) for new, like, _ in work.added]
        ready = Ready(shapes, steps, work.notes, flops, edited, joins)
        for plan in ready.plans:
            prepare(plan)
        return ready

    @property
    def plans(self) -> list[Plan]:
        return [plan for step in self.steps for plan in step.plans]

    @property
    def adds_modules(self) -> bool:
        return any(plan.inserts for plan in self.plans)

    @property
    def takes_statistics(self) -> bool:
        """Whether the example's statistics make a new batch norm the identity: then train mode has to be compared too."""
        inserts = [insert for plan in self.plans for insert in plan.inserts]
        return any(insert.start.identity and dict(insert.made).get("norm") for insert in inserts)

    def fits(self, model: nn.Module) -> bool:
        """Whether the model has the copy's shapes, and nothing is fading in, which would change the analysis."""
        return shapes_of(model) == self.shapes and not gates_of(model) and not any(True for _ in drifts_of(model))


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors_of(model).items()}
