"""Checkpoints grown on the disk: the values of a growth in memory, bit for bit, and the old outputs after loading elsewhere."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import outgrow
from outgrow import Deepen, Widen
from outgrow.checkpoints.grow_checkpoint import SUFFIX
from outgrow.checkpoints.read_checkpoint import INDEX, WEIGHTS, read_checkpoint
from outgrow.errors import CheckpointError, MethodError
from tests.helpers.checkpoints import family, logits_elsewhere, save_small, tensors_in

pytest.importorskip("transformers")

MLP = Widen("*.mlp.*", factor=1.5)
CASES: dict[str, tuple[str, list[Any]]] = {
    "llama width": ("llama", [Widen("model.embed_tokens", factor=1.5)]),
    "llama copied width": ("llama", [Widen("model.embed_tokens", factor=2, method="net2net")]),
    "llama mlp and depth": ("llama", [MLP, Deepen(after="model.layers.1", count=2)]),
    "qwen3 tied, mlp and depth": ("qwen3", [MLP, Deepen(after="model.layers.0")]),
    "gpt2 mlp and depth": ("gpt2", [MLP, Deepen(after="transformer.h.2")]),
    "qwen3 tied, width": ("qwen3", [Widen(kind="width", factor=1.5)]),
    "gemma2 width": ("gemma2", [Widen(kind="width", factor=1.5)]),
    "llama query heads": ("llama", [Widen(kind="heads", factor=2, unit="query")]),
    "qwen3 head size": ("qwen3", [Widen(kind="head_dim", factor=2)]),
    "bert mlp and vocabulary": ("bert", [Widen("*.intermediate.dense", factor=1.5), Widen(kind="vocab", by=6)]),
    "llama vocabulary and depth": ("llama", [Widen(kind="vocab", to=64, method="zero"), Deepen(after="model.layers.1")]),
}


def grown_in_memory(model: Any, name: str, requests: list[Any], seed: int = 0) -> dict[str, torch.Tensor]:
    twin = copy.deepcopy(model)
    outgrow.grow(twin, family(name).example(), *requests, seed=seed, check=False)
    state: dict[str, torch.Tensor] = twin.state_dict()
    return state


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """The cases, grown on the disk: the folder of each, and the old model."""
    found = {}
    for number, (case, (name, requests)) in enumerate(CASES.items()):
        folder = tmp_path_factory.mktemp("case")
        model = save_small(name, folder / "old", shard="20KB" if number % 2 else "5GB", layers=3)
        options: dict[str, Any] = {"shard_size": 30_000 if number % 3 else "5GB", "jobs": 1 + number % 2}
        outgrow.grow_checkpoint(folder / "old", *requests, out=folder / "new", seed=3, **options)
        found[case] = folder, model
    return found


@pytest.mark.parametrize("case", CASES)
def test_streamed_values_are_those_of_a_growth_in_memory(case: str, grown: dict[str, tuple[Path, Any]]) -> None:
    folder, model = grown[case]
    name, requests = CASES[case]
    found, expected = tensors_in(folder / "new"), grown_in_memory(model, name, requests, seed=3)
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=0)
    pointers = {expected[key].data_ptr() for key in found}
    assert all(value.data_ptr() in pointers for value in expected.values())  # the others are tied to these


def test_checkpoints_load_without_outgrow_and_compute_the_same(grown: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    examples = [family(CASES[case][0]).example(seed=5) for case in grown]
    found = logits_elsewhere([folder / "new" for folder, _ in grown.values()], examples, tmp_path)
    for (case, (_, model)), example, logits in zip(grown.items(), examples, found, strict=True):
        with torch.no_grad():
            before = model.eval()(**example).logits
        assert logits.shape[-1] == 50 + {"bert mlp and vocabulary": 6, "llama vocabulary and depth": 14}.get(case, 0)
        error = (logits[..., :50] - before).abs().max() / before.abs().max()
        assert error < 5e-6, case


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A checkpoint of two layers."""
    save_small("llama", tmp_path / "old", layers=2)
    return tmp_path / "old"


def test_a_new_directory_holds_what_goes_beside_the_weights(old: Path, tmp_path: Path) -> None:
    (old / "tokenizer.json").write_text("{}")
    (old / "README.md").write_text("---\nlicense: mit\ntags:\n- x\n---\n# Old\n")
    (old / "optimizer.pt").write_bytes(b"state")
    growth = outgrow.grow_checkpoint(old, MLP, out=tmp_path / "new")
    names = {path.name for path in (tmp_path / "new").iterdir()}
    expected = {"config.json", WEIGHTS, "tokenizer.json", "generation_config.json", "README.md", "outgrow_plan.json"}
    assert names == expected
    card = (tmp_path / "new" / "README.md").read_text()
    assert "- outgrow\n" in card
    assert "license: mit\n" in card
    assert "base_model: old" in card
    record = json.loads((tmp_path / "new" / "outgrow_plan.json").read_text())
    assert record["growths"][0]["plan"]["edits"]
    assert growth.left == ("optimizer.pt",)
    assert "intermediate_size 24 → 36" in str(growth)
    assert growth.comparison is not None
    assert growth.comparison.error < 4e-6
    again = outgrow.grow_checkpoint(tmp_path / "new", MLP, out=tmp_path / "newer", verify="full")
    assert len(json.loads((tmp_path / "newer" / "outgrow_plan.json").read_text())["growths"]) == 2
    assert again.comparison is not None
    assert "whole model" in again.comparison.what


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "requests",
    [
        [Widen("model.embed_tokens", factor=1.5)],
        [Widen(kind="mlp", factor=1.5), Widen(kind="heads", factor=2, method="net2net")],
    ],
    ids=["width, with rescaled values", "mlp and heads, with draws and copies only"],
)
def test_half_precision_is_computed_in_float32_and_rounded_once(
    dtype: torch.dtype, requests: list[Widen], tmp_path: Path
) -> None:
    model = save_small("llama", tmp_path / "old", dtype, layers=2)
    growth = outgrow.grow_checkpoint(tmp_path / "old", *requests, out=tmp_path / "new")
    expected = grown_in_memory(model, "llama", requests)
    for name, value in tensors_in(tmp_path / "new").items():
        assert value.dtype == dtype
        assert torch.equal(value, expected[name].to(dtype)), name
    assert growth.comparison is not None
    assert growth.comparison.agrees
    outgrow.grow_checkpoint(tmp_path / "old", *requests, out=tmp_path / "wide", dtype=torch.float32, verify="none")
    for name, value in tensors_in(tmp_path / "wide").items():
        assert torch.equal(value, expected[name]), name
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"


def test_jobs_shards_and_order_do_not_change_values(old: Path, tmp_path: Path) -> None:
    for name, options in {"one": {}, "many": {"jobs": 4, "shard_size": "8KB"}}.items():
        outgrow.grow_checkpoint(old, MLP, out=tmp_path / name, verify="none", **options)
    one, many = tensors_in(tmp_path / "one"), tensors_in(tmp_path / "many")
    assert (tmp_path / "many" / INDEX).exists()
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_an_interrupted_growth_goes_on_where_it_stopped(old: Path, tmp_path: Path) -> None:
    outgrow.grow_checkpoint(old, MLP, out=tmp_path / "whole", shard_size="16KB", verify="none")
    calls = []

    def stop_after(count: int) -> Any:
        def started(total: int) -> Any:
            def advance(size: int) -> None:
                calls.append(size)
                if len(calls) == count:
                    raise KeyboardInterrupt

            return advance

        return started

    with pytest.raises(KeyboardInterrupt, match="goes on from there"):
        outgrow.grow_checkpoint(old, MLP, out=tmp_path / "new", shard_size="16KB", progress=stop_after(20))
    draft = tmp_path / f"new{SUFFIX}"
    assert not (tmp_path / "new").exists()
    assert not (draft / "config.json").exists()
    with pytest.raises(CheckpointError, match=r"it has no config\.json"):
        read_checkpoint(draft)
    written = {path: os.stat(path).st_mtime_ns for path in draft.glob("*.safetensors")}
    assert written
    calls.clear()
    outgrow.grow_checkpoint(old, MLP, out=tmp_path / "new", shard_size="16KB", progress=stop_after(0))
    assert not draft.exists()
    assert all(os.stat(tmp_path / "new" / path.name).st_mtime_ns == time for path, time in written.items())
    assert sum(calls) == sum(value.nbytes for value in tensors_in(tmp_path / "new").values())
    for name, value in tensors_in(tmp_path / "whole").items():
        assert torch.equal(value, tensors_in(tmp_path / "new")[name])


def test_a_draft_of_another_growth_is_not_continued(old: Path, tmp_path: Path) -> None:

    def stop(total: int) -> Any:
        def advance(size: int) -> None:
            raise KeyboardInterrupt

        return advance

    with pytest.raises(KeyboardInterrupt):
        outgrow.grow_checkpoint(old, MLP, out=tmp_path / "new", progress=stop)
    outgrow.grow_checkpoint(old, MLP, out=tmp_path / "new", seed=1, verify="none")
    outgrow.grow_checkpoint(old, MLP, out=tmp_path / "other", seed=1, verify="none")
    one, other = tensors_in(tmp_path / "new"), tensors_in(tmp_path / "other")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_full_disk_is_reported_with_the_way_to_go_on(old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, writes = os.pwrite, []

    def full(handle: int, data: bytes, at: int) -> int:
        writes.append(at)
        if len(writes) > 5:
            raise OSError(28, "No space left on device")
        return real(handle, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match=r"the disk is full.*goes on from there"):
        outgrow.grow_checkpoint(old, MLP, out=tmp_path / "new")
    monkeypatch.undo()
    assert not (tmp_path / "new").exists()
    outgrow.grow_checkpoint(old, MLP, out=tmp_path / "new")
    assert (tmp_path / "new" / "config.json").exists()


def test_a_disk_that_is_too_small_is_found_before_anything_is_written(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("usage", (), {"free": 1000})())
    with pytest.raises(CheckpointError, match="has 1 kB left"):
        outgrow.grow_checkpoint(old, MLP, out=tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir()} == {"old"}


def test_wrong_values_are_found_by_the_comparison(old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outgrow.checkpoints.stream_tensors import Stream

    real = Stream.values
    monkeypatch.setattr(Stream, "values", lambda self, tensor: real(self, tensor) * 1.01)
    with pytest.raises(outgrow.GrowthError, match="does not compute the same"):
        outgrow.grow_checkpoint(old, MLP, out=tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir()} == {"old"}


def test_rounding_to_half_precision_is_told_apart_from_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wider stream is multiplied by √1.5, which no bfloat16 holds: that is reported. The limit stays narrow."""
    from outgrow.checkpoints import new_values, stream_tensors

    model = save_small("llama", tmp_path / "old", torch.bfloat16).eval()
    width, mlp = Widen(kind="width", factor=1.5), Widen(kind="mlp", factor=1.5)
    growth = outgrow.grow_checkpoint(tmp_path / "old", width, out=tmp_path / "new", verify="full")
    found = growth.comparison
    assert found is not None
    assert found.error <= found.limit < 1e-4
    example = family("llama").example(seed=5)
    after = logits_elsewhere([tmp_path / "new"], [example], tmp_path)[0]
    with torch.no_grad():
        before = model(**example).logits
    measured = float((after - before).abs().max() / before.abs().max())
    assert found.rounding is not None
    assert 0.1 < measured / found.rounding < 10
    assert f"{found.rounding:.1e} with new values as rounded to bfloat16" in str(found)
    exact = outgrow.grow_checkpoint(tmp_path / "old", mlp, out=tmp_path / "exact").comparison  # pairs cancel when rounded too
    assert exact is not None
    assert exact.rounding is None
    real = stream_tensors.Stream.values
    with monkeypatch.context() as patch:  # the file holds other values than those of the growth, by one unit in the last place
        patch.setattr(stream_tensors.Stream, "values", lambda self, tensor: real(self, tensor) * (1 + 2**-7))
        with pytest.raises(outgrow.GrowthError, match="the file does not hold the values of the growth"):
            outgrow.grow_checkpoint(tmp_path / "old", width, out=tmp_path / "wrong")
    compute = new_values.compute
    with monkeypatch.context() as patch:  # the growth itself is wrong, by less than rounding to bfloat16 changes
        patch.setattr(stream_tensors.Stream, "_stays_half", lambda *_: False)
        patch.setattr(stream_tensors, "compute", lambda value, *more: compute(value, *more) * (1 + 2**-12))
        with pytest.raises(outgrow.GrowthError, match="does not compute the same"):
            outgrow.grow_checkpoint(tmp_path / "old", width, out=tmp_path / "wrong")


REFUSED = {
    "fade": ([Widen("*.mlp.*", factor=1.5, fade=10)], MethodError, "no part of a plain checkpoint"),
    "random": ([Widen("*.mlp.*", factor=1.5, method="random")], MethodError, "only grown by exact methods"),
    "one layer of many": ([Widen("model.layers.0.mlp.*", factor=1.5)], CheckpointError, "no configuration of LlamaForCausalLM"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_plain_checkpoint_cannot_hold_is_refused(case: str, old: Path, tmp_path: Path) -> None:
    requests, kind, reason = REFUSED[case]
    with pytest.raises(kind, match=reason):
        outgrow.grow_checkpoint(old, *requests, out=tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir()} == {"old"}


def test_an_output_directory_that_is_not_empty_is_refused(old: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        outgrow.grow_checkpoint(old, MLP, out=tmp_path)
    (tmp_path / "empty").mkdir()
    outgrow.grow_checkpoint(old, MLP, out=tmp_path / "empty", verify="none")
    assert (tmp_path / "empty" / "config.json").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_tensors_are_computed_in_slabs(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outgrow.checkpoints import row_slabs, stream_tensors

    model = save_small("llama", tmp_path / "old", dtype, layers=2)
    requests = [Widen("model.embed_tokens", factor=1.5), Widen("*.mlp.*", factor=1.5)]
    sliced = []

    def counted(*arguments: Any) -> Any:
        for first, rows in row_slabs.slabs(*arguments):
            sliced.append((first, rows.shape))
            yield first, rows

    real = stream_tensors.Stream
    monkeypatch.setattr("outgrow.checkpoints.grow_checkpoint.Stream", lambda *given: real(*given, large=1, slab=100))
    monkeypatch.setattr(stream_tensors, "slabs", counted)
    outgrow.grow_checkpoint(tmp_path / "old", *requests, out=tmp_path / "new")
    assert len({shape for _, shape in sliced}) > 1
    expected = grown_in_memory(model, "llama", requests)
    for name, value in tensors_in(tmp_path / "new").items():
        torch.testing.assert_close(value, expected[name].to(dtype), rtol=1e-6 if dtype == torch.float32 else 0, atol=0)


READ_ON_DEMAND = ("qwen3 tied, mlp and depth", "bert mlp and vocabulary")
MORE_ON_DEMAND = [pytest.param(case, marks=pytest.mark.exhaustive) for case in ("llama mlp and depth", "gpt2 mlp and depth")]


@pytest.mark.parametrize("case", [*READ_ON_DEMAND, *MORE_ON_DEMAND])
def test_models_are_compared_with_values_that_are_read_on_demand(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outgrow.checkpoints import read_values

    monkeypatch.setattr(read_values, "LARGE", 1)
    read: list[str] = []
    real = read_values.Reader._values
    monkeypatch.setattr(read_values.Reader, "_values", lambda *given: (read.append(given[-1]), real(*given))[1])
    name, requests = CASES[case]
    save_small(name, tmp_path / "old", torch.bfloat16, layers=3)
    for mode in ("brief", "full"):
        growth = outgrow.grow_checkpoint(tmp_path / "old", *requests, out=tmp_path / mode, verify=mode)
        assert growth.comparison is not None
        assert growth.comparison.agrees
        assert len(set(read)) > 10
        read.clear()


def test_two_growths_do_not_write_to_one_directory(old: Path, tmp_path: Path) -> None:
    pytest.importorskip("fcntl")

    def meanwhile(total: int) -> Any:
        with pytest.raises(CheckpointError, match="another process is writing"):
            outgrow.grow_checkpoint(old, MLP, out=tmp_path / "new", verify="none")
        return lambda size: None

    outgrow.grow_checkpoint(old, MLP, out=tmp_path / "new", verify="none", progress=meanwhile)
    assert {path.name for path in tmp_path.iterdir()} == {"old", "new"}
