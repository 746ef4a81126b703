"""Growth entries in the state dict of a resume checkpoint, so that it can be loaded into a newly built small model.

`model.state_dict()` itself stays unchanged. Checkpoints for resuming get additional keys: `outgrow.history` (JSON, as bytes),
and tensors of unfinished fades and of grown buffers outside the state dict. A hook on the model removes them before anything is
loaded, and gives the model its shapes: so any code that calls `load_state_dict` (Lightning, a Trainer, a user's script) can
load a grown model without changes.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from outgrow.apply.weight_fades import STORED, drifts_of, pack_drifts, restore_drifts
from outgrow.errors import CheckpointError
from outgrow.history.growth_order import Histories, histories_of
from outgrow.history.growths_on_model import growths
from outgrow.model.journal import Journal
from outgrow.modules.gates import gates_of, restore_gates
from outgrow.saving.checksums import TABLE, check_text, compare, of_tensors, seal_text
from outgrow.saving.growth_record import UNREADABLE, VERSION, GrowthRecord, read_record, record_text, unreadable
from outgrow.saving.model_contents import contents_of
from outgrow.saving.replay_growths import BUFFER, replay

PREFIX = "outgrow."
KEY = f"{PREFIX}history"
WHAT = "the growth history in the checkpoint"
TEST = "trainer.test(outgrow.lightning.load(LitModel(…), path), …), where path may be checkpoint_callback.best_model_path"


class Outgrown(CheckpointError):
    """A checkpoint from before the model's last growth."""


def growth_entries(model: nn.Module) -> dict[str, Tensor]:
    """The growth entries of a model for a resume checkpoint, besides its state dict; empty if it has never grown.

    Example:
        >>> import outgrow
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> growth_entries(model)
        {}
        >>> growth = outgrow.widen(model, torch.zeros(1, 4), "0", to=12)
        >>> list(growth_entries(model))
        ['outgrow.history']
    """
    grown = histories_of(model) or gates_of(model) or any(True for _ in drifts_of(model))
    return all_entries(model) if grown else {}


def all_entries(model: nn.Module) -> dict[str, Tensor]:
    """The growth entries of any model, also of one that has never grown."""
    histories = histories_of(model)
    contents, (facts, amounts) = contents_of(model, histories), pack_drifts(model)
    shapes = {name: list(tensor.shape) for name, tensor in contents.items()}
    buffers = {name: tensor.detach() for name, tensor in contents.items() if name.startswith(BUFFER)}
    codes = of_tensors({**amounts, **buffers})
    record = record_text(model, histories, facts, version=VERSION, shapes=shapes, **{TABLE: codes})
    text = seal_text(record).encode()
    return {KEY: torch.frombuffer(bytearray(text), dtype=torch.uint8), **amounts, **buffers}


def unpack(
    model: nn.Module, state: MutableMapping[str, Any], journal: Journal, prefix: str = "", drifting: bool = True
) -> bool:
    """Remove the growth entries from a state dict, and give the model their shapes; returns whether there were any.

    drifting: continue faded widenings; False for averaged copies.
    Raises CheckpointError if the growths do not fit the model.
    """
    if prefix + KEY not in state:
        return False
    names = [name for name in state if name.startswith(prefix + PREFIX)]
    extras = {name.removeprefix(prefix): state.pop(name) for name in names}
    record = record_in(extras, WHAT)
    try:
        final = {str(name): tuple(shape) for name, shape in record.also["shapes"].items()}
    except UNREADABLE as error:
        raise unreadable(WHAT, error) from error
    if TABLE in record.also:
        found = of_tensors({name: value for name, value in extras.items() if name != KEY})
        compare(found, record.also[TABLE], "the checkpoint")
    refuse_earlier(model, record.histories)
    misfit = f"the checkpoint does not fit this model ({type(model).__qualname__}; it was written for {record.model})"
    replay(model, record.histories, final, misfit, journal)
    contents = contents_of(model, record.histories)
    with torch.no_grad():
        for name in (name for name in extras if name.startswith(BUFFER)):
            contents[name].copy_(extras[name])
    amounts = {name: value for name, value in extras.items() if name.startswith(STORED)}
    if drifting:
        restore_drifts(model, record.drifts, amounts, journal)
    restore_gates(model, record.gates)
    return True


def record_in(state: Mapping[str, Any], what: str) -> GrowthRecord:
    """The growth record in a state dict. what: how an error calls it."""
    try:
        text = bytes(state[KEY].cpu().tolist())
    except UNREADABLE as error:
        raise unreadable(what, error) from error
    record = read_record(text, what)
    check_text(text, what)
    return record


def refuse_earlier(model: nn.Module, histories: Histories) -> None:
    """Raise if a model has been through all growths of a checkpoint, and through further ones: it can't go back."""
    now = histories_of(model)
    further = sum(len(growths(plans)) - len(growths(histories.get(place, ()))) for place, plans in now.items())
    before = all(now.get(place, ())[: len(plans)] == tuple(plans) for place, plans in histories.items())
    if before and further > 0:
        times = "once" if further == 1 else f"{further} times"
        raise Outgrown(
            f"the model has grown {times} since the checkpoint was written, and a grown model does not load a smaller one: "
            "build it as at first and load into that"
        )


def _refuse_smaller(model: nn.Module, state: Mapping[str, Any], prefix: str) -> None:
    """Raise if a state dict without a history is of another size than a model that has grown."""
    own = {f"{prefix}{name}": value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    if any(name not in state or getattr(state[name], "shape", None) != value.shape for name, value in own.items()):
        refuse_earlier(model, {})


def expect(model: nn.Module, drifting: bool = True) -> torch.utils.hooks.RemovableHandle:
    """Let a model accept growth entries in every state dict that it loads. Returns the handle of the hook.

    A copy that is made of the model meanwhile (an average of its weights) accepts them too, without faded widenings.
    """

    def hook(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        try:
            with Journal() as journal:
                if not unpack(module, state, journal, prefix, drifting and module is model):
                    _refuse_smaller(module, state, prefix)
        except Outgrown as error:
            raise Outgrown(f"{error}. With Lightning: {TEST}") from error

    handle: torch.utils.hooks.RemovableHandle = model.register_load_state_dict_pre_hook(hook)
    return handle
