"""Heads under a rotary position encoding grow by whole factors: new pairs of features lie between the existing ones.

A head of D features has D/2 pairs, and pair i turns by the angle position · θ_i with θ_i = base^(−2i/D). In a head of k·D
features pair k·i turns as pair i did, since base^(−2·k·i/(k·D)) = base^(−2i/D). So existing pairs move to every k-th place, and
k − 1 new pairs follow each of them, with the frequencies in between. That no new pair changes a score is the matter of
`exactness/score_features.py`.

The new table of frequencies is the one that the model's library computes at the new size; without a library, the geometric
sequence that the old table is a part of. Every k-th entry must be an old one. This holds for frequencies that are all divided
by one factor ("linear") or changed one by one ("llama3"), and not where the change depends on the index ("yarn").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from outgrow.analysis.volumes import Volume
from outgrow.configuration.library_build import buffers_at, buffers_now
from outgrow.errors import SizeError
from outgrow.growth_plan.plan import Edit, Insertion, Plan
from outgrow.model.sandbox import tensors_of
from outgrow.requests import Widen
from outgrow.transforms.widen.make_plan import Choice

WHOLE_FACTORS = "write kind='head_dim' with a whole factor, e.g. factor=2: new pairs of features lie between the existing ones"
RECOMPUTED = ("dynamic", "longrope")  # types of encodings whose tables Transformers computes again while the model runs
WHOLE = 1e-9
EPSILON = torch.finfo(torch.float32).eps  # libraries compute tables in float32 at best


class NoTable(Exception):
    """No table of frequencies preserves the scores of existing features."""

    def __init__(self, volume: str, reason: str) -> None:
        super().__init__(reason)
        self.volume, self.reason = volume, reason


def between(volume: Volume, request: Widen) -> Volume:
    """A volume of rotary pairs as one that can grow; refuses sizes that are no multiple of the present one."""
    size = volume.size
    wanted = size * request.factor if request.factor is not None else request.to or size + (request.by or 0)
    if wanted > size and abs(wanted / size - round(wanted / size)) > WHOLE:
        below = int(wanted // size)
        nearest = " and ".join(f"{size * times} (factor={times})" for times in (below, below + 1) if times > 1)
        raise SizeError(
            f"{volume.name} can't grow from {size} to {wanted:g} features: under a rotary position encoding the size of a head "
            f"grows by whole factors, so that existing features keep their frequencies; the nearest: {nearest}"
        )
    return replace(volume, pinned="")


@dataclass(frozen=True)
class _Tables:
    """Tables of frequencies by name: of the model, and of its library at the present and the planned sizes, if there are any.

    rounding: relative; a library may round the base of the frequencies to the dtype of the parameters.
    """

    model: nn.Module
    rounding: float
    old: Mapping[str, Tensor]
    present: Mapping[str, Tensor]
    planned: Mapping[str, Tensor]


def with_tables(model: nn.Module, choices: Sequence[Choice], plan: Plan) -> Plan:
    """A plan with the new frequencies of all rotary encodings that grow; raises `NoTable` if there are none."""
    rotary = [choice for choice in choices if choice.spaced]
    if not rotary:
        return plan
    tensors = tensors_of(model)
    buffers = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, nn.Parameter)}
    present = buffers_now(model)
    old = {name: present.get(name, tensor) if tensor.is_meta else tensor for name, tensor in buffers.items()}
    rounding = max(torch.finfo(tensor.dtype).eps for tensor in tensors.values() if tensor.is_floating_point())
    tables = _Tables(model, max(rounding, EPSILON), old, present, buffers_at(model, plan))
    owner = {slot.tensor: choice for choice in rotary for slot in choice.volume.slots if slot.tensor in buffers}
    missing = [choice for choice in rotary if choice not in owner.values()]
    if missing:
        raise NoTable(missing[0].volume.name, "no buffer of the model holds its frequencies")
    edits: list[Edit] = []
    taken = set(owner)
    for edit in plan.edits:
        choice = owner.get(edit.tensor)
        if choice is None or not isinstance(edit, Insertion):
            edits.append(edit)
        else:
            edits += _filled(tables, edit, choice, taken)
    return replace(plan, edits=tuple(edits))


def _filled(tables: _Tables, edit: Insertion, choice: Choice, taken: set[str]) -> Iterator[Insertion]:
    """The insertion of new frequencies, for a table and for its copies that the forward pass does not read.

    taken: tables that are filled already; copies are added.
    """
    name, volume = edit.tensor, choice.volume
    old, times = tables.old[name], 1 + choice.new // volume.count
    if old.shape != (volume.count,) or old.is_meta or not old[0]:
        raise NoTable(volume.name, f"{name} is no plain table with one frequency per pair of features")
    path = name.rpartition(".")[0]
    kinds = vars(tables.model.get_submodule(path)).get("rope_type")
    found = [kind for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]) if kind in RECOMPUTED]
    if found:
        raise NoTable(volume.name, f"{path} computes its frequencies again while the model runs (rope_type {found[0]!r})")
    new = _new_table(name, old.detach().double().cpu(), times, tables, volume)
    at = torch.tensor(edit.at)
    signs = tuple((new[at] / float(old[0])).tolist())
    filled = replace(edit, fill="copy", sources=(0,) * len(edit.at), signs=signs, draws=(), keep=(), noise=0.0, fade=0)
    filled = replace(filled, gradient=(), gradient_keep=())
    yield filled
    for other, tensor in tables.old.items():
        twin = other.rpartition(".")[0] == path and other not in taken and tensor.shape == old.shape
        if twin and not tensor.is_meta and torch.equal(tensor.to(old), old):
            taken.add(other)
            yield replace(filled, tensor=other)


def _new_table(name: str, old: Tensor, times: int, tables: _Tables, volume: Volume) -> Tensor:
    """The frequencies at the new size, of which every `times`-th is an old one."""
    present, planned = (held.get(name) for held in (tables.present, tables.planned))
    if present is not None and planned is not None:
        before, after = (table.detach().double().cpu() for table in (present, planned))
        if not torch.allclose(before, old, rtol=2 * tables.rounding, atol=0.0):
            raise NoTable(volume.name, f"{name} holds other frequencies than the library computes, e.g. rounded ones")
        if after.shape == (len(old) * times,) and torch.allclose(after[::times], before, rtol=2 * EPSILON, atol=0.0):
            return after
        raise NoTable(
            volume.name,
            f"the frequencies in {name} do not only follow the size of a head: at {times} times the size the library gives "
            "existing features other ones (a scaled encoding such as yarn)",
        )
    ratio = (old[-1] / old[0]) ** (1 / max(len(old) - 1, 1))
    steps = torch.arange(len(old), dtype=torch.float64)
    if len(old) < 2 or not torch.allclose(old[0] * ratio**steps, old, rtol=8 * tables.rounding, atol=0.0):
        raise NoTable(volume.name, f"{name} is no geometric sequence, so the frequencies in between are not known")
    return old[0] * ratio ** (torch.arange(len(old) * times, dtype=torch.float64) / times)
