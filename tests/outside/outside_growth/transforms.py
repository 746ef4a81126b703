"""Vocabulary: more rows for an embedding."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

import outgrow
from outgrow.extending import Change, Insertion, Plan, Setting, Site


@dataclass(frozen=True)
class Vocabulary:
    where: str
    by: int = 1


def plan_vocabulary(site: Site, request: Vocabulary) -> Plan:
    layer = site.model.get_submodule(request.where)
    if not isinstance(layer, nn.Embedding):
        raise outgrow.GrowthError(f"{request.where} is no embedding: name one, e.g. Vocabulary('tokens', by=8)")
    old, new = layer.num_embeddings, layer.num_embeddings + request.by
    rows = Insertion(f"{request.where}.weight", 0, old, tuple(range(old, new)), (0,) * request.by, "zero")
    setting = Setting(request.where, "num_embeddings", old, new)
    return Plan((Change(request.where, old, new, "rows of zeros"),), (rows,), (setting,), site.seed)


outgrow.register_transform(Vocabulary, plan_vocabulary)
