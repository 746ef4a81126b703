"""A growth history that travels in a resume checkpoint, so that a freshly built small model can take it.

A plain `state_dict` stays the library's own. What is to be resumed gets a few more keys: `outgrow.history` (JSON, as bytes)
and the tensors that fades under way and grown buffers outside the state dict need. A hook on the model takes them out again
before anything is loaded, and gives the model the shapes: so whoever calls `load_state_dict`, be it Lightning, a Trainer or
you, need not know of growth.
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


def luggage(model: nn.Module) -> dict[str, Tensor]:
    """What a resume checkpoint holds of a model besides its state dict; nothing if it has never grown.

    Example:
        >>> import outgrow
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> luggage(model)
        {}
        >>> growth = outgrow.widen(model, torch.zeros(1, 4), "0", to=12)
        >>> list(luggage(model))
        ['outgrow.history']
    """
    grown = histories_of(model) or gates_of(model) or any(True for _ in drifts_of(model))
    return packed(model) if grown else {}


def packed(model: nn.Module) -> dict[str, Tensor]:
    """The same for any model, whether it has grown or not."""
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
    """Take the luggage out of a state dict, and give the model the shapes that it tells of; whether there was any.

    drifting: go on with faded widenings, which averaged copies do not.
    Raises CheckpointError if the model is none that these growths fit.
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
    """Let a model take luggage whenever it loads a state dict, from whatever code.

    A copy that is made of the model meanwhile (an average of its weights) expects it too, and does not drift.
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
