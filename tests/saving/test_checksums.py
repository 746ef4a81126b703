"""Flip single bits in files of outgrow: each flip is found, or changes nothing that is read."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import outgrow
from outgrow.errors import CheckpointError
from outgrow.integrations.growth_file import read_growth_file, write_growth_file
from outgrow.model.journal import Journal
from outgrow.saving.checksums import of_tensor
from outgrow.saving.growths_in_state_dict import KEY, growth_entries, unpack
from outgrow.saving.run_file import read_run
from outgrow.saving.save_load import describe
from tests.helpers.saved_models import IMAGES, Cnn, grown_cnn, header, photograph, rewrite, trained
from tests.helpers.small_runs import X, at, mlp, started
from tests.helpers.training_run import Net, Trial, assert_equal


def flips(data: bytes, bits: range, count: int, seed: int = 0) -> Iterator[bytes]:
    """The same bytes with one bit changed, at a random place."""
    for bit in random.Random(seed).sample(bits, min(count, len(bits))):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)


def undetected(path: Path, bits: range, count: int, read: Callable[[], Any]) -> list[Any]:
    """The results of reading a file with a flipped bit without an error; the file is restored."""
    data, found = path.read_bytes(), []
    for changed in flips(data, bits, count):
        path.write_bytes(changed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found.append(read())
            except CheckpointError:
                continue
    path.write_bytes(data)
    return found


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A run of a small network, within the fade of a new block, with a generator and a user's own values."""
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    run = started(model, optimizer, [at(2), outgrow.At(step=3, grow=[outgrow.Deepen("blocks.0", fade=5)])])
    for _ in range(4):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
        run.step()
    run.save(tmp_path / "run.pt", extra={"seen": [1, 2.5, "x", None, True], "set": {"a", "b"}})
    return tmp_path / "run.pt"


@pytest.mark.parametrize("part", ["length", "header", "values"])
def test_every_flipped_bit_in_a_file_of_save_is_found(part: str, saved: tuple[nn.Module, Path]) -> None:
    path = saved[1]
    start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    bits = {"length": range(64), "header": range(64, 8 * start), "values": range(8 * start, 8 * path.stat().st_size)}[part]
    model = trained(Cnn)
    before = photograph(model)
    assert undetected(path, bits, 150, lambda: outgrow.load(model, path)) == []
    assert photograph(model) == before
    assert part == "values" or undetected(path, bits, 150, lambda: describe(path)) == []
    assert torch.equal(outgrow.load(model, path)(IMAGES), saved[0](IMAGES))


@pytest.mark.parametrize("count", [150, pytest.param(4000, marks=pytest.mark.exhaustive)])
def test_a_flipped_bit_in_a_runs_file_is_found_or_changes_nothing(count: int, run_file: Path) -> None:
    whole = read_run(run_file)
    left = undetected(run_file, range(8 * run_file.stat().st_size), count, lambda: read_run(run_file))
    for state in left:  # in the padding and the unused fields of the zip file
        assert_equal(state, whole)
    assert len(left) < 0.6 * count


def test_flipped_bits_in_the_values_of_a_runs_file_are_found(run_file: Path) -> None:
    """Both `Run.load` and `outgrow.load` refuse the file, and name the damaged tensor."""
    data, weight = run_file.read_bytes(), torch.load(run_file, weights_only=True)["model"]["blocks.0.up.weight"]
    start = data.index(weight.numpy().tobytes())
    bits = range(8 * start, 8 * (start + weight.nbytes))
    model = mlp(1)
    assert undetected(run_file, bits, 30, lambda: outgrow.load(model, run_file)) == []
    run_file.write_bytes(next(flips(data, bits, 1)))
    with pytest.raises(CheckpointError, match=r"model/blocks\.0\.up\.weight: the checksum is [0-9a-f]{8}, and should be"):
        outgrow.load(model, run_file)
    other = started(model, AdamW(model.parameters()), [at(2), outgrow.At(step=3, grow=[outgrow.Deepen("blocks.0", fade=5)])])
    with pytest.raises(CheckpointError, match="pass checksums=False"):
        other.load(run_file)
    assert other.steps == 0
    assert other.load(run_file, checksums=False)["seen"] == [1, 2.5, "x", None, True]
    assert other.steps == 4


def test_the_growth_file_in_a_trainers_folder_is_checked(tmp_path: Path) -> None:
    """`outgrow.pt` in the checkpoint folder of a Trainer or of Accelerate."""
    model = mlp()
    run = started(model, AdamW(model.parameters()), [at(1)])
    run.step()
    write_growth_file(tmp_path, run)
    path, whole = tmp_path / "outgrow.pt", read_growth_file(tmp_path)
    for state in undetected(path, range(8 * path.stat().st_size), 200, lambda: read_growth_file(tmp_path)):
        assert_equal(state, whole)


def test_the_growth_entries_of_a_state_dict_are_checked() -> None:
    """In checkpoints of Lightning and of torch.distributed: the history itself, buffers and fades."""
    trial = Trial(check=False).go(21)
    outgrow.widen(trial.model, trial.data[:4], "blocks.*", factor=2, fade=5)
    kept = growth_entries(trial.model)
    assert any(name.startswith("outgrow.fade/") for name in kept)
    for name, value in kept.items():
        data = value.numpy().tobytes()
        for changed in flips(data, range(8 * len(data)), 60 if name == KEY else 5):
            spoiled = torch.frombuffer(bytearray(changed), dtype=value.dtype).view(value.shape)
            model = Net()
            try:
                with Journal() as journal:
                    unpack(model, {**kept, name: spoiled}, journal)
            except CheckpointError:
                assert_equal(dict(model.state_dict()).keys(), dict(Net().state_dict()).keys())
                continue
            assert (name, json.loads(changed[: changed.rindex(b',"')] + b"}")) == (
                KEY,
                json.loads(data[: data.rindex(b',"')] + b"}"),
            )


def test_files_without_checksums_are_read(saved: tuple[nn.Module, Path], run_file: Path) -> None:
    rewrite(saved[1], lambda tensors, metadata: None)
    assert not {"outgrow.checksum"} & set(header(saved[1])["__metadata__"])
    assert torch.equal(outgrow.load(trained(Cnn), saved[1])(IMAGES), saved[0](IMAGES))
    state = torch.load(run_file, weights_only=True)
    model = outgrow.load(mlp(1), run_file)
    del state["checksum"], state["checksums"]
    torch.save(state, run_file)
    assert_equal(dict(outgrow.load(mlp(2), run_file).state_dict()), dict(model.state_dict()))


def test_a_file_that_was_changed_on_purpose_is_read_without_checksums(saved: tuple[nn.Module, Path]) -> None:
    data = bytearray(saved[1].read_bytes())
    data[-1] ^= 1
    saved[1].write_bytes(data)
    with pytest.raises(CheckpointError, match=r"(?s)is damaged.*checksums=False.*the checksum is"):
        outgrow.load(trained(Cnn), saved[1])
    assert outgrow.load(trained(Cnn), saved[1], checksums=False).stem.weight.shape == saved[0].stem.weight.shape


def test_a_checksum_is_that_of_the_values_whatever_their_layout() -> None:
    x = torch.randn(2, 3, 4, 5)
    assert (
        of_tensor(x)
        == of_tensor(x.contiguous(memory_format=torch.channels_last))
        == of_tensor(x.transpose(0, 1).mT.mT.transpose(0, 1))
    )
    assert of_tensor(x) != of_tensor(x.flip(0))
    for kind in (torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int8, torch.bool, torch.float8_e4m3fn):
        assert len(of_tensor(x.to(kind))) == 8
    assert of_tensor(x[0, 0].to_sparse()) != of_tensor((x[0, 0] * 2).to_sparse())
    assert of_tensor(x.to(torch.complex64).conj()) == of_tensor(x.to(torch.complex64).conj().resolve_conj())
    assert of_tensor(torch.tensor(1.0)) == of_tensor(torch.ones(1))


def test_grown_models_are_the_same_after_a_second_save(saved: tuple[nn.Module, Path]) -> None:
    """The checksums of the loaded values equal those of the saved values."""
    model = outgrow.load(trained(Cnn), saved[1])
    outgrow.save(model, saved[1].with_name("again.safetensors"))
    assert describe(saved[1].with_name("again.safetensors")).checksums == describe(saved[1]).checksums
    assert_equal(dict(model.state_dict()), dict(grown_cnn().state_dict()))
