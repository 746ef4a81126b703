"""Carry out plans on a model, its averaged copies and its optimizers, with a journal that can undo everything.

This is the only place where a growth changes anything. New modules come first (with their starting values), so that edits find
tensors by their new names; then optimizers, and last the configuration of the model's library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from outgrow.analysis import peft_adapters as adapters
from outgrow.apply.apply_plan import apply_plan, apply_setting
from outgrow.apply.carry_out_insert import put_in
from outgrow.apply.device_memory import reserve
from outgrow.apply.final_positions import edits_by_tensor
from outgrow.apply.fold_skips import apply_grafts
from outgrow.apply.learned_values import learned_values
from outgrow.apply.weight_fades import grow_drifts
from outgrow.configuration.explain_differences import left
from outgrow.configuration.follow_sizes import changed, follow
from outgrow.configuration.rebuild_from_config import exchanged
from outgrow.configuration.take_back import take_back
from outgrow.growth_plan.plan import Plan
from outgrow.history.growths_on_model import history
from outgrow.model.example import Example
from outgrow.model.journal import Journal
from outgrow.model.sandbox import tensors_of
from outgrow.optimizers.grow_optimizers import grow_optimizers
from outgrow.optimizers.new_parameters import add_new_parameters, unfreeze
from outgrow.optimizers.stale import shapes_before
from outgrow.transforms.site_and_step import Step
from outgrow.verify import outputs as verify


class Work:
    """A growth in progress: the changes so far to the model, its copies and optimizers, and the journal that undoes them.

    learn: whether learned values are computed; in trials, where only sizes matter, drawn ones take their place.
    """

    def __init__(
        self,
        model: nn.Module,
        copies: Sequence[nn.Module],
        optimizers: Sequence[Any],
        example: Example,
        journal: Journal | None = None,
        copy_state: bool = False,
        learn: bool = False,
    ) -> None:
        self.model, self.copies, self.optimizers, self.example = model, copies, optimizers, example
        self.copy_state, self.learn = copy_state, learn
        self.journal = Journal() if journal is None else journal
        self.plans: list[Plan] = []
        self.notes: list[str] = []
        self.changed: list[tuple[Tensor, str, tuple[int, ...]]] = []
        self.added: list[tuple[nn.Parameter, nn.Parameter, str]] = []
        self.edited: list[Tensor] = []
        self.shared: verify.Evaluation | None = None  # the grown model's pass in eval mode

    def carry_out(self, step: Step) -> None:
        """Insert new modules, add their parameters to the optimizers, then make all edits and settings."""
        sources: list[tuple[str, str]] = []
        for plan in step.plans:
            sources = self._put_in(plan, sources)
        if sources:
            unfreeze(self.model, [path for path, _ in sources])
            self.added += add_new_parameters(self.optimizers, self.model, sources, self.journal, self.copy_state)
        for plan in step.plans:
            self._edit(plan, step)
            self.plans.append(plan)

    def _put_in(self, plan: Plan, sources: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Insert the new modules of a plan, and make its settings, which use the names after the inserts.

        sources: for each new module so far, its path and that of the module whose optimizers it joins; returned with new ones.
        """
        models = [self.model, *self.copies]
        for insert in plan.inserts:
            new = put_in(models, self.example, insert, self.journal)
            sources = [*((insert.renamed(path), insert.renamed(like)) for path, like in sources), new]
        for setting in plan.settings if plan.inserts else ():
            for one in models:
                apply_setting(one, setting, self.journal)
        return sources

    def _edit(self, plan: Plan, step: Step) -> None:
        """Grow the tensors of the model, its averaged copies and its optimizers; make settings unless `_put_in` has."""
        edits = replace(plan, settings=()) if plan.inserts else plan
        tensors = tensors_of(self.model)
        learned = learned_values(self.model, step.learned, edits) if self.learn else {}
        inits = {**step.inits, **learned}
        reserve(tensors, edits, self.optimizers)
        before: dict[int, Tensor] = {}
        for one in (self.model, *self.copies):
            own = tensors if one is self.model else tensors_of(one)
            olds = {name: tensor.detach() for name, tensor in own.items()}
            before = before or {id(tensor): olds[name] for name, tensor in own.items()}  # the model's own: it comes first
            apply_grafts(one, edits, self.journal)
            apply_plan(one, edits, inits, self.journal, like=tensors, tensors=own, olds=olds)
            grow_drifts(one, edits, olds, inits, self.journal, start=one is self.model)
        grow_optimizers(self.optimizers, tensors, edits, before, self.journal)
        self.changed += shapes_before(tensors, edits)
        self.edited += [tensors[name] for name in edits_by_tensor(edits)]

    def describe(self, sample: Example, base: verify.Outputs | None = None) -> None:
        """Update the model's configuration, if it has one: its settings join the last plan, and the report names them.

        base: outputs on the sample before the growth; the pass that runs here is also used to check them.
        """
        self.shared = None if base is None else verify.evaluation(self.model, sample, base)
        settings, failures = follow(self.model, sample, [*history(self.model), *self.plans], self.journal, self.shared)
        for one in self.copies:
            for setting in settings:
                apply_setting(one, setting, self.journal)
        self.plans[-1] = replace(self.plans[-1], settings=(*self.plans[-1].settings, *settings))
        tried = changed([setting for plan in self.plans for setting in plan.settings])
        if failures:
            self.plans = take_back([self.model, *self.copies], sample, self.plans, list(failures), self.journal)
            self.shared = None if base is None else verify.evaluation(self.model, sample, base)
        new = changed([setting for plan in self.plans for setting in plan.settings])
        read = " (the model's code reads it in its forward pass)" if failures and new else ""
        self.notes += [f"config: {new}{read}"] if new else []
        note = f"even after {tried}: " if tried and not new else ""
        for path, reason in list(failures.items())[-1:]:
            self.notes.append(left(note + reason, exchanged(self.model.get_submodule(path))))
        self.notes += [adapters.NOTE] if adapters.has_adapters(self.model) else []
