"""Work is done once per kind of block, with the same result as for each block separately."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.analysis.analyse import dissect
from outgrow.analysis.unit_states import State
from outgrow.errors import TraceError
from outgrow.exactness import propagate_states as paths
from tests.helpers.like_blocks import EXAMPLE, NETS, Block, Net


def walks(monkeypatch: pytest.MonkeyPatch, model: nn.Module, example: Any) -> int:
    """How many walks `volumes` makes along paths."""
    made = []
    plain = paths._walked
    with monkeypatch.context() as patch:
        patch.setattr(paths, "_walked", lambda *given: made.append(given) or plain(*given))  # type: ignore[func-returns-value]
        outgrow.volumes(model, example)
    return len(made)


def each_by_itself(model: nn.Module, example: Any) -> None:
    anatomy = dissect(model, example)
    for volume in (volume for volume in anatomy.volumes if not volume.pinned):
        for state in State:
            assert paths.judge(anatomy, volume, state) == paths._walked(anatomy, volume, state)[0], (volume.name, state)


@pytest.mark.parametrize("name", NETS)
def test_verdicts_are_those_of_each_block_by_itself(name: str) -> None:
    each_by_itself(NETS[name](), EXAMPLE)


@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "test_byobnet", "test_resnet"])
def test_verdicts_of_library_models_are_those_of_each_block_by_itself(name: str) -> None:
    import timm

    each_by_itself(timm.create_model(name), torch.randn(2, 3, 64, 64))


def test_further_layers_need_no_further_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (walks(monkeypatch, Net(*(Block() for _ in range(count))), EXAMPLE) for count in (4, 8))
    assert few == many


def test_blocks_that_differ_are_walked_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {name: walks(monkeypatch, make(), EXAMPLE) for name, make in NETS.items()}
    alike = counts.pop("like blocks")
    assert all(count > alike for count in counts.values()), counts


def passes(model: nn.Module, call: Callable[[], Any]) -> int:
    """The number of forward passes with values that a call runs."""
    seen = []
    handle = model.register_forward_pre_hook(lambda _, args: None if args[0].is_meta else seen.append(1))
    try:
        call()
    finally:
        handle.remove()
    return len(seen)


def test_places_are_found_without_arithmetic() -> None:
    model = Net(*(Block() for _ in range(3)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert passes(model, lambda: outgrow.places(model, EXAMPLE)) == 0
    assert [place.own for place in outgrow.places(model, EXAMPLE)][:3] == [True] * 3
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_garbage_is_collected_afterwards() -> None:
    model = Net(Block())
    for example in (EXAMPLE, EXAMPLE[..., :2]):  # the model does not run on the second
        with contextlib.suppress(TraceError):
            outgrow.volumes(model, example)
        assert gc.isenabled()


def test_what_lies_in_a_cycle_that_nobody_holds_is_no_output() -> None:
    class Cyclic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.side, self.hidden, self.out = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            holder: dict[str, Any] = {"side": self.side(x)}
            holder["holder"] = holder
            return self.out(torch.relu(self.hidden(x)))

    side = next(volume for volume in outgrow.volumes(Cyclic(), torch.randn(2, 3)) if volume.name == "side")
    assert "output" not in side.reason


def test_doubtful_places_are_tried_on_the_model_itself() -> None:
    class Mean(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            scale = torch.tensor(1.0 / len(self.blocks))  # a constant whose value no trace on the meta device shows
            return self.head(sum(block(x) for block in self.blocks) * scale)

    model = Mean(Block(), Block())
    assert passes(model, lambda: outgrow.places(model, EXAMPLE)) > 0
    assert not any(place.own for place in outgrow.places(model, EXAMPLE))


@pytest.mark.parametrize("name", [*NETS, "timm"])
def test_a_model_on_the_meta_device_has_the_volumes_and_places_of_one_with_values(name: str) -> None:
    import timm

    make, example = (
        (lambda: timm.create_model("test_vit"), torch.randn(1, 3, 64, 64)) if name == "timm" else (NETS[name], EXAMPLE)
    )
    with torch.device("meta"):
        without = make()
    for given in (example, example.to("meta")):
        for look in (outgrow.volumes, outgrow.places):
            if name != "a layer used elsewhere" or look is outgrow.volumes:
                assert list(map(repr, look(without, given))) == list(map(repr, look(make(), example)))
            else:
                assert "on the meta device it can't be checked" in look(without, given)[0].reason


def test_a_timeline_of_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        without = NETS["like blocks"]()
    events = [outgrow.At(step=1, grow=[outgrow.Widen("*.up", factor=2)]), outgrow.At(step=2, grow=[outgrow.Deepen("blocks.1")])]
    assert outgrow.timeline(without, EXAMPLE, events) == outgrow.timeline(NETS["like blocks"](), EXAMPLE, events)


def test_a_timeline_of_a_transformers_model_on_the_meta_device() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
    example = {"input_ids": torch.arange(12).view(2, 6)}
    events = [
        outgrow.At(step=1, grow=[outgrow.Widen("*.mlp.*", factor=2)]),
        outgrow.At(step=2, grow=[outgrow.Deepen("model.layers.0")]),
    ]
    with torch.device("meta"):
        without = LlamaForCausalLM(config)
    assert outgrow.timeline(without, example, events) == outgrow.timeline(LlamaForCausalLM(config), example, events)


def test_code_that_reads_values_is_refused_on_the_meta_device() -> None:
    class Reads(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return x if float(x.sum()) > 0 else -x

    with torch.device("meta"):
        model = Reads(Block())
    for look in (outgrow.volumes, outgrow.places):
        with pytest.raises(TraceError, match=r"on the meta device[^~]*load the weights first"):
            look(model, EXAMPLE)
