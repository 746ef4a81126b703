"""Checkpoints: saved models are loaded bit for bit."""

from __future__ import annotations

import copy
import json
import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import outgrow
from outgrow.history.growths_on_model import history
from outgrow.saving.save_load import describe
from tests.helpers.saved_models import IMAGES, TOKENS, Cnn, Gpt, grown_cnn, grown_gpt, header, refused, trained


def test_a_norm_without_weights_beside_one_that_has_some(path: Path) -> None:
    """The sizes of both are set, each once: of one with its weight, of the other because its code needs it."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4, elementwise_affine=False), nn.LayerNorm(4), nn.Linear(4, 2))

    model = build()
    growth = outgrow.widen(model, torch.randn(5, 3), "0", to=8)
    places = [(setting.module, setting.name) for setting in growth.plan.settings]
    assert len(set(places)) == len(places)
    outgrow.save(model, path)
    assert repr(outgrow.load(build(), path)) == repr(model)


@pytest.mark.parametrize(("make", "build", "example"), [(grown_cnn, Cnn, IMAGES), (grown_gpt, Gpt, TOKENS)], ids=["cnn", "gpt"])
def test_a_model_grown_by_every_method_comes_back_bit_for_bit(
    make: Callable[[], nn.Module], build: Callable[[], nn.Module], example: Tensor, path: Path
) -> None:
    model = make()
    small = trained(build, seed=9)
    drawn = torch.get_rng_state()
    outgrow.save(model, path)
    again = outgrow.load(small, path)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert again is small
    assert torch.equal(again(example), model(example))
    assert repr(again) == repr(model)  # sizes and ε of every layer
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, buffer in model.named_buffers():
        assert torch.equal(again.get_buffer(name), buffer), name
    assert history(again) == history(model)
    assert len(history(model)) >= 2
    model.train()(example).square().sum().backward()
    again.train()(example).square().sum().backward()
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_a_loaded_model_grows_on_as_the_saved_one_does(saved: tuple[nn.Module, Path]) -> None:
    model, path = saved
    again = outgrow.load(Cnn().eval(), path)
    before = again(IMAGES)
    for each in (model, again):
        outgrow.widen(each, IMAGES, "*", factor=1.5, method="r2r", seed=5)
    assert torch.equal(again(IMAGES), model(IMAGES))
    torch.testing.assert_close(again(IMAGES), before, rtol=1e-5, atol=1e-5)
    outgrow.save(again, path)
    assert torch.equal(outgrow.load(Cnn().eval(), path)(IMAGES), again(IMAGES))


def test_layer_norms_come_back_with_their_epsilon(path: Path) -> None:
    outgrow.save(grown_gpt(), path)
    again = outgrow.load(Gpt(), path)
    assert again.norm1.normalized_shape == (14,)
    assert type(again.norm1.normalized_shape) is tuple
    assert again.norm1.eps == pytest.approx(1e-5 * 8 / 14, rel=1e-12)


def test_the_file_is_plain_safetensors_with_a_standard_state_dict(path: Path) -> None:
    model = grown_gpt()
    outgrow.save(model, path)
    metadata = header(path)["__metadata__"]
    assert all(isinstance(value, str) for value in metadata.values())
    assert metadata["outgrow.version"] == "1"
    assert len(json.loads(metadata["outgrow"])["histories"][""]) == 2
    plain = safetensors.torch.load_file(path)
    assert set(plain) == set(model.state_dict()) - {"head.weight"}
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        nn.init.zeros_(parameter)
    copied.load_state_dict({**plain, "head.weight": plain["embedding.weight"]})
    assert torch.equal(copied(TOKENS), model(TOKENS))


def test_a_tied_tensor_is_stored_once_and_stays_tied(path: Path) -> None:
    outgrow.save(grown_gpt(), path)
    entries = header(path)
    assert "embedding.weight" in entries
    assert "head.weight" not in entries
    again = outgrow.load(Gpt(), path)
    assert again.head.weight is again.embedding.weight
    assert again.head.weight.shape == (11, 14)
    assert describe(path).aliases == {"head.weight": "embedding.weight"}


def test_a_model_whose_tie_is_missing_is_refused(path: Path) -> None:
    outgrow.save(trained(Gpt), path)
    loose = trained(Gpt, seed=1)
    loose.head.weight = nn.Parameter(torch.zeros(11, 8))
    refused(loose, path, "head.weight", "the same tensor as embedding.weight")
    outgrow.save(loose, path)
    refused(trained(Gpt), path, "head.weight", "the same tensor as embedding.weight in the model")


def test_views_of_one_storage_are_stored_apart(path: Path) -> None:
    model = nn.ParameterList([torch.zeros(6), torch.zeros(6)])
    whole = torch.arange(10.0)
    model[0].data, model[1].data = whole[:6], whole[4:]
    outgrow.save(model, path)
    again = outgrow.load(nn.ParameterList([torch.zeros(6), torch.zeros(6)]), path)
    assert again[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert again[1].tolist() == [4, 5, 6, 7, 8, 9]


def test_buffers_outside_the_state_dict_come_back_if_they_grew(saved: tuple[nn.Module, Path]) -> None:
    model, path = saved
    assert "gain" not in model.state_dict()
    assert model.gain.numel() > 8
    assert torch.equal(outgrow.load(Cnn(), path).gain, model.gain)
    assert [name for name in header(path) if name.startswith("outgrow.")] == ["outgrow.buffer/gain"]
    outgrow.save(Cnn(), path)
    assert not [name for name in header(path) if name.startswith("outgrow.")]


def test_the_model_may_have_grown_part_of_the_way_or_all_of_it(path: Path) -> None:
    model = trained(Cnn)
    outgrow.widen(model, IMAGES, "conv1", to=8)
    half = copy.deepcopy(model)
    outgrow.widen(model, IMAGES, "stem", to=12)
    whole = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    outgrow.save(model, path)
    for other in (half, whole):
        assert torch.equal(outgrow.load(other, path)(IMAGES), model(IMAGES))
        assert history(other) == history(model)


def test_a_model_built_at_the_final_size_gets_weights_and_settings(path: Path) -> None:
    build = lambda width: nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.Linear(width, 2))  # noqa: E731
    model = trained(lambda: build(8))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    outgrow.widen(model, x, "0", to=12, method="mean")
    outgrow.save(model, path)
    big = build(12)
    assert big[1].eps != model[1].eps
    assert torch.equal(outgrow.load(big, path)(x), model(x))
    assert history(big) == history(model)


def test_a_model_that_grew_in_another_way_is_refused(saved: tuple[nn.Module, Path]) -> None:
    other = trained(Cnn)
    outgrow.widen(other, IMAGES, "conv1", to=8, seed=1)
    refused(other, saved[1], "already grown in another way", "before its first growth")


def test_parts_grown_by_themselves_come_back_with_the_whole(path: Path) -> None:
    build = lambda: nn.Sequential(Cnn(), nn.Linear(5, 3))  # noqa: E731
    model = trained(build)
    outgrow.widen(model[0], IMAGES, "conv1", to=8)
    outgrow.widen(model, IMAGES, "0.conv1", to=10)
    outgrow.widen(model[0], IMAGES, "conv1", to=12)
    outgrow.save(model, path)
    again = outgrow.load(build().eval(), path)
    assert torch.equal(again(IMAGES), model(IMAGES))
    assert len(history(again)) == 1
    assert len(history(again[0])) == 2


def test_wrappers_are_unwrapped(path: Path) -> None:
    model = grown_cnn()
    outgrow.save(torch.optim.swa_utils.AveragedModel(model), path)
    wrapped = nn.DataParallel(Cnn().eval())
    assert outgrow.load(wrapped, path) is wrapped
    assert torch.equal(wrapped.module(IMAGES), model(IMAGES))


def test_channels_last_is_kept(saved: tuple[nn.Module, Path]) -> None:
    small = Cnn().eval().to(memory_format=torch.channels_last)
    again = outgrow.load(small, saved[1])
    assert again.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    assert not again.conv1.weight.is_contiguous()
    assert torch.equal(again.conv1.weight, saved[0].conv1.weight)


def test_parameters_stay_the_same_objects(saved: tuple[nn.Module, Path]) -> None:
    model = Cnn()
    before = [id(parameter) for parameter in model.parameters()]
    outgrow.load(model, saved[1])
    assert [id(parameter) for parameter in model.parameters()] == before


def test_no_pickle_is_read_or_written(saved: tuple[nn.Module, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("pickle")

    for module, names in ((pickle, ("load", "loads", "dump", "dumps", "Unpickler", "Pickler")), (torch, ("load", "save"))):
        for name in names:
            monkeypatch.setattr(module, name, forbidden)
    outgrow.load(Cnn(), saved[1])
    outgrow.save(saved[0], saved[1])


def test_a_new_file_has_default_permissions_and_is_complete_before_it_gets_its_name(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("sync"), sync(handle)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("rename"), rename(a, b)))
    outgrow.save(Cnn(), path)
    (path.parent / "other").touch()
    assert done[:2] == ["sync", "rename"]
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((path.parent / "other").stat().st_mode)


def test_a_link_is_followed(path: Path) -> None:
    link = path.with_name("latest.safetensors")
    link.symlink_to(path)
    outgrow.save(Cnn(), link)
    assert link.is_symlink()
    assert describe(path).model == "Cnn"


def test_describe_returns_history_and_shapes(saved: tuple[nn.Module, Path]) -> None:
    model, path = saved
    about = describe(path)
    assert about.histories == {"": history(model)}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert {name: shape for name, (_, shape) in about.tensors.items() if "/" not in name} == shapes
    assert about.tensors["bn.num_batches_tracked"] == ("I64", ())


@pytest.mark.parametrize("way", ["the same growths again", "a file of outgrow.save beside it"])
def test_own_files_of_torch_save_are_resumed_as_the_page_on_saving_describes(way: str, path: Path) -> None:
    """Three more steps after resuming give the parameters of the training that was not interrupted."""

    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def grow(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        outgrow.grow(model, x, outgrow.Widen("0", to=8), outgrow.Deepen(after="1"), optimizer=optimizer)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

    x = torch.randn(5, 4)
    model, optimizer = start()
    steps(model, optimizer)
    grow(model, optimizer)
    steps(model, optimizer)
    own = path.with_name("own.pt")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, own)
    outgrow.save(model, path)
    steps(model, optimizer)
    again, resumed = start()
    if way == "the same growths again":
        grow(again, resumed)
    else:
        again = outgrow.load(again, path)
        resumed = torch.optim.AdamW(again.parameters(), lr=0.01)
    content = torch.load(own, weights_only=True)
    again.load_state_dict(content["model"])
    resumed.load_state_dict(content["optimizer"])
    steps(again, resumed)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
