"""What `outgrow inspect DIRECTORY` promises is what a growth of that checkpoint does."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

import outgrow
from outgrow import Deepen, Widen
from outgrow.checkpoints.build_on_meta import build_on_meta, class_of, config_of
from outgrow.checkpoints.growth_options import GrowthOption, cut_to_few_layers, smallest_step
from outgrow.checkpoints.inspect_checkpoint import CheckpointOptions
from outgrow.checkpoints.plan_checkpoint import plan_checkpoint
from outgrow.checkpoints.read_checkpoint import read_checkpoint
from outgrow.cli.main import main
from outgrow.errors import CheckpointError, GrowthError
from tests.helpers.checkpoints import family, save_small

transformers = pytest.importorskip("transformers")


def request(option: GrowthOption) -> list[Any]:
    """The option as requests for the whole checkpoint."""
    step = option.steps.partition(" (")[0]
    if option.request.startswith("layers"):
        return [Deepen(layers=option.sizes[0] + 1 if step != "× 2" else 2 * option.sizes[0], stack=option.where)]
    kinds = option.request.split(" and ")
    return [Widen(kind=kind, factor=2.0) if step == "× 2" else Widen(kind=kind, by=int(step or 1)) for kind in kinds]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> CheckpointOptions:
    """What can grow in the checkpoint of a small Llama, which has training state."""
    folder = tmp_path_factory.mktemp("inspected") / "old"
    save_small("llama", folder)
    (folder / "optimizer.pt").write_bytes(b"")
    return outgrow.inspect_checkpoint(folder)


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("gpt2", "gemma2"))])
def test_every_option_is_what_a_growth_of_the_whole_checkpoint_does(
    name: str, llama: CheckpointOptions, tmp_path: Path
) -> None:
    save_small(name, tmp_path / "old")
    checkpoint = read_checkpoint(tmp_path / "old")
    found = llama if name == "llama" else outgrow.inspect_checkpoint(tmp_path / "old")
    assert {option.request for option in found.options} >= {"mlp", "heads", "width", "layers"}
    assert found["mlp"].savable
    assert found["layers"].sizes == (4,)
    assert found["head_dim"].steps == "× 2" or name == "gpt2"  # where the width has to grow with it
    for option in found.options:
        if option.savable:
            plan = plan_checkpoint(checkpoint, request(option))
            before, after = (config.to_dict() for config in (config_of(checkpoint), plan.model.config))
            changed = {field for field in after if before[field] != after[field] and field != "dtype"}
            assert changed == set(option.config.split(", ")), option.request
            assert not option.reason
        else:
            assert option.reason
            with pytest.raises(GrowthError):
                plan_checkpoint(checkpoint, request(option))


def test_inspecting_a_directory_prints_tables_or_json(
    llama: CheckpointOptions, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = str(llama)
    assert "old: LlamaForCausalLM, " in shown
    assert "in 1 file\ntraining state (--training-state grows it too): optimizer.pt" in shown
    assert re.search(r"^mlp +24 +\+1 +intermediate_size$", shown, re.M)
    assert "2 query heads with the key and value head that they share" in shown
    assert "outgrow grow CHECKPOINT --widen mlp=+1 --out NEW" in shown
    monkeypatch.setattr("outgrow.checkpoints.inspect_checkpoint.inspect_checkpoint", lambda folder, example: llama)
    assert main(["inspect", llama.folder]) == 0
    assert capsys.readouterr().out == shown + "\n"
    assert main(["inspect", llama.folder, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [option["request"] for option in data["options"] if option["savable"]][:1] == ["mlp"]
    assert data["training_state"] == ["optimizer.pt"]


def test_a_directory_without_a_configuration_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckpointError, match=r"is not a Transformers checkpoint: it has no config\.json"):
        outgrow.inspect_checkpoint(tmp_path)
    assert main(["inspect", str(tmp_path), "--model", "timm:resnet18"]) == 2
    assert "leave --model and --input out" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_the_configuration_of_a_large_model_takes_seconds(tmp_path: Path) -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    transformers.LlamaConfig(**sizes, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    started = time.process_time()
    found = outgrow.inspect_checkpoint(tmp_path)
    assert time.process_time() - started < 20
    assert found.parameters > 6e9
    assert found.files == (0, 0)
    assert found["layers"].sizes == (32,)
    assert "no weights, only a configuration" in str(found)


def test_steps_are_searched_where_the_first_is_refused_for_its_size() -> None:
    """One head is no whole group of two; 6 heads divide the width, 10 do not."""
    sizes = {"hidden_size": 96, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 50}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    cut = cut_to_few_layers(transformers.LlamaForCausalLM, config)
    steps, trial = smallest_step(cut, "heads", (4,))
    assert steps == "+2 (not every multiple)"
    assert "num_attention_heads" in trial.saved


@pytest.mark.exhaustive
def test_a_width_that_the_model_returns_can_grow_if_only_the_logits_are_preserved(tmp_path: Path) -> None:
    model: Any = family("t5").build()
    model.save_pretrained(tmp_path)
    found = outgrow.inspect_checkpoint(tmp_path)
    assert found["width"].reason == "it is an output of the model"
    option = next(option for option in found.options if option.outputs)
    assert option.name == "width (--outputs logits)"
    assert "d_model" in option.config
    plan = plan_checkpoint(read_checkpoint(tmp_path), [Widen(kind="width", by=3, outputs=option.outputs)])
    assert plan.model.config.d_model == model.config.d_model + 3


@pytest.mark.parametrize("name", ["clip", "whisper"])
def test_models_of_images_with_texts_and_of_sound_have_a_standard_example(name: str, tmp_path: Path) -> None:
    model: Any = family(name).build()
    model.save_pretrained(tmp_path / "old")
    checkpoint = read_checkpoint(tmp_path / "old")
    assert type(build_on_meta(class_of(checkpoint), config_of(checkpoint))) is type(model)
    growth = outgrow.grow_checkpoint(tmp_path / "old", Widen(kind="mlp", factor=1.5), out=tmp_path / "new", verify="full")
    assert growth.comparison is not None
    assert growth.comparison.agrees
