"""Checkpoints that are damaged, foreign or do not fit are refused with a way out, and nothing changes."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import outgrow
from outgrow.errors import CheckpointError
from outgrow.saving.save_load import describe
from tests.helpers.saved_models import IMAGES, Cnn, Gpt, grown_gpt, photograph, refused, rewrite, trained


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def pickled(path: Path, zipped: bool) -> None:
    torch.save(Cnn().state_dict(), path, _use_new_zipfile_serialization=zipped)


def damage_json(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    metadata["outgrow"] = metadata["outgrow"][:-20]


def damage_history(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    metadata["outgrow"] = metadata["outgrow"].replace('"edits"', '"edit"')


def endless(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    about = json.loads(metadata["outgrow"])
    about["histories"][""][0]["edits"][0]["at"] = [[0, 1, 10**15]]
    metadata["outgrow"] = json.dumps(about)


FILES: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "missing": (lambda path: path.unlink(), ("no such file",)),
    "folder": (lambda path: (path.unlink(), path.mkdir()), ("folder",)),
    "empty": (lambda path: cut(path, 0), ("empty", "earlier copy")),
    "cut in the length": (lambda path: cut(path, 5), ("damaged", "earlier copy")),
    "cut in the header": (lambda path: cut(path, 300), ("damaged", "earlier copy")),
    "cut in the numbers": (lambda path: cut(path, path.stat().st_size - 1), ("damaged", "earlier copy")),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"\0"), ("damaged", "earlier copy")),
    "random": (lambda path: path.write_bytes(random.Random(0).randbytes(5000)), ("damaged", "not a safetensors file")),
    "text": (lambda path: path.write_text("not a checkpoint, just a note"), ("damaged", "not a safetensors file")),
    "pickle": (lambda path: pickled(path, True), ("pickle", "weights_only=True", "Run.save")),
    "old pickle": (lambda path: pickled(path, False), ("pickle", "weights_only=True", "Run.save")),
    "foreign": (
        lambda path: safetensors.torch.save_file(Cnn().state_dict(), path),
        ("not written by outgrow.save", "load_state_dict", "load_file"),
    ),
    "newer": (lambda path: rewrite(path, lambda _, m: m.update({"outgrow.version": "2"})), ("version 2", "newer outgrow")),
    "odd version": (lambda path: rewrite(path, lambda _, m: m.update({"outgrow.version": "x"})), ("version", "damaged")),
    "damaged JSON": (lambda path: rewrite(path, damage_json), ("damaged", "history", "earlier copy")),
    "damaged history": (lambda path: rewrite(path, damage_history), ("damaged", "history", "earlier copy")),
    "JSON of another kind": (lambda path: rewrite(path, lambda _, m: m.update(outgrow="[1]")), ("damaged", "history")),
    "endless history": (lambda path: rewrite(path, endless), ("damaged", "history")),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_is_not_a_whole_checkpoint_is_refused(case: str, saved: tuple[nn.Module, Path]) -> None:
    spoil, words = FILES[case]
    spoil(saved[1])
    refused(trained(Cnn), saved[1], *words)
    with pytest.raises(CheckpointError) as caught:
        describe(saved[1])
    assert words[0] in str(caught.value)


def wrong_shape(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    tensors["conv2.bias"] = torch.zeros(len(tensors["conv2.bias"]) + 1)


TENSORS: dict[str, tuple[Callable[[dict[str, Tensor], dict[str, str]], object], tuple[str, ...]]] = {
    "missing": (lambda t, _: t.pop("conv2.weight"), ("conv2.weight", "file has no such tensor")),
    "missing buffer": (lambda t, _: t.pop("outgrow.buffer/gain"), ("gain", "file has no such tensor")),
    "unexpected": (lambda t, _: t.update(extra=torch.zeros(2)), ("extra", "model has no such tensor")),
    "shape": (wrong_shape, ("conv2.bias", "(15,) in the model, (16,) in the file")),
    "dtype": (lambda t, _: t.update({"bn.bias": t["bn.bias"].half()}), ("bn.bias", "torch.float32", "torch.float16")),
    "NaN": (lambda t, _: t["bn.running_var"][2:4].fill_(float("nan")), ("bn.running_var", "nan", "2 of 15")),
    "Inf": (lambda t, _: t["head.weight"][1, 1:2].fill_(float("inf")), ("head.weight", "inf", "earlier copy")),
    "-Inf": (lambda t, _: t["head.weight"][1, 1:2].fill_(float("-inf")), ("head.weight", "-inf", "earlier copy")),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_are_refused(case: str, saved: tuple[nn.Module, Path]) -> None:
    change, words = TENSORS[case]
    rewrite(saved[1], change)
    text = refused(trained(Cnn), saved[1], *words)
    assert text.count("\n  - ") == 1  # only the wrong tensor


def test_another_architecture_is_refused_with_the_first_tensors_that_differ(saved: tuple[nn.Module, Path]) -> None:
    text = refused(trained(Gpt), saved[1], "Gpt", "Cnn", "conv1.weight", "no such tensor", "more", "before its first growth")
    assert text.count("the model has no such tensor") == 5
    refused(trained(lambda: Cnn(10)), saved[1], "bn.weight", "(10,)", "from 8 along axis 0")
    refused(trained(Cnn).double(), saved[1], "torch.float64 in the model", "model.to(torch.float32)")


def test_another_setting_is_refused(path: Path) -> None:
    outgrow.save(grown_gpt(), path)
    model = trained(Gpt)
    model.norm2.eps = 1e-6
    refused(model, path, "norm2.eps", "1e-06", "1e-05")


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_a_failure_half_way_leaves_the_model_unchanged(error: BaseException, saved: tuple[nn.Module, Path]) -> None:
    model = trained(Cnn)
    model.bn.num_batches_tracked.fill_(7)  # a tensor that keeps its shape and is overwritten in place

    def fail(*args: object) -> None:
        assert model.stem.weight.shape[0] == 15  # the growth is under way
        raise error

    hook = model.head.register_load_state_dict_pre_hook(fail)  # at this point all layers except the last are loaded
    before = photograph(model)
    with pytest.raises(CheckpointError if isinstance(error, Exception) else KeyboardInterrupt, match=r"broken|^$"):
        outgrow.load(model, saved[1])
    assert photograph(model) == before
    hook.remove()
    outgrow.load(model, saved[1])
    assert torch.equal(model(IMAGES), saved[0](IMAGES))


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_model_that_is_not_finite_is_not_saved(value: str, path: Path) -> None:
    model = trained(Cnn)
    with torch.no_grad():
        model.conv1.weight[0, 0, 0, 0] = float(value)
    with pytest.raises(CheckpointError, match=rf"(?s)not finite.*conv1\.weight.*{value}"):
        outgrow.save(model, path)
    assert not list(path.parent.iterdir())


def test_masks_of_minus_infinity_are_saved(path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))
    outgrow.save(model, path)
    fresh = nn.Linear(2, 2)
    fresh.register_buffer("mask", torch.zeros(3, 3))
    assert torch.equal(outgrow.load(fresh, path).mask, model.mask)
    model.mask[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match="mask"):
        outgrow.save(model, path)


def test_values_that_can_not_be_stored_are_refused(path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> object:
            return {"not": object()}

    for model, word in ((Extra(2, 2), "_extra_state"), (nn.Linear(2, 2, device="meta"), "meta"), (nn.Linear(2, 2), "folder")):
        with pytest.raises(CheckpointError, match=word):
            outgrow.save(model, path if word != "folder" else path.parent)
    with pytest.raises(CheckpointError, match="create it first"):
        outgrow.save(nn.Linear(2, 2), path.parent / "nowhere" / "model.safetensors")
    assert not list(path.parent.iterdir())


@pytest.mark.parametrize("place", ["save_file", "fsync", "replace"])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failed_save_leaves_the_old_file_and_nothing_else(
    place: str, error: BaseException, saved: tuple[nn.Module, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _model, path = saved
    before = path.read_bytes()

    def fail(*args: object) -> None:
        if place == "save_file":
            Path(str(args[1])).write_bytes(b"half")
        raise error

    monkeypatch.setattr(safetensors.torch if place == "save_file" else os, place, fail)
    with pytest.raises(CheckpointError if isinstance(error, Exception) else KeyboardInterrupt, match=r"disk full|^$"):
        outgrow.save(Cnn(), path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
