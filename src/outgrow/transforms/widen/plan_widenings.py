"""Plan all widenings of a growth together, since volumes may be tied to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outgrow.requests import Widen
from outgrow.trace.flops import count_flops
from outgrow.transforms.site_and_step import Site, Step
from outgrow.transforms.widen.expert_sizes import grouped_product_notes
from outgrow.transforms.widen.fold_residual import fold_residuals
from outgrow.transforms.widen.learned_choices import learnings_of
from outgrow.transforms.widen.make_plan import inits_of
from outgrow.transforms.widen.new_outputs import new_output_entries, output_notes
from outgrow.transforms.widen.notes import outputs_note, rescaled_note
from outgrow.transforms.widen.predict_shapes import Prediction
from outgrow.transforms.widen.settle_sizes import settle


def widen_plan(site: Site, requests: Sequence[Widen]) -> Step:
    """The plan of all widenings of a growth. Folds are put on skips in a trial, and the volumes are analysed again there."""
    with site.trial() as journal:
        anatomy, requests, grafts = fold_residuals(site.model, site.example, site.anatomy, requests, journal)
        choices, skipped, plan = settle(site.model, site.example, anatomy, requests, site.seed)
        learned = learnings_of(site.model, anatomy, choices, plan)
    prediction = Prediction(anatomy, choices)
    flops = count_flops(anatomy.reading.trace, prediction.shape)
    notes = (
        *rescaled_note(site.model, choices, plan),
        *outputs_note(anatomy.reading.trace, requests, prediction),
        *output_notes(choices),
        *grouped_product_notes(site.model, choices),
    )
    gains = new_output_entries(anatomy, choices)
    return Step((replace(plan, grafts=grafts),), inits_of(choices), tuple(skipped), flops, notes, gains, learned)
