"""What the experiments are given: bad options, files that are broken or of something else."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from experiments import figures, pays, report
from experiments.__main__ import engine_of, main, parse, seeds_of
from experiments.figures import RESULTS
from experiments.reading.result_files import ResultsError, file_name, missing, read_all, read_paper, write_arm, write_filters
from experiments.setting import data as data_module
from experiments.setting.arms import Arm, paper_arms
from experiments.setting.data import cifar10, download
from experiments.setting.protocol import tuning_arms
from experiments.setting.segments import segments_of
from experiments.training.store import Store, StoreError
from experiments.training.train_segments import Training
from tests.helpers import made_up_results as made_up
from tests.helpers.experiment_arms import ARM
from tests.helpers.experiment_runs import short, some_data, training

ROOT = Path(__file__).parents[2]


def trained(folder: Path, arm: Arm = ARM, seeds: tuple[int, ...] = (0,), **about: str) -> Store:
    store = Store(folder, about)
    work = training([arm], folder, some_data(), seeds=seeds)
    work.store = store
    assert work.run()
    return store


@pytest.mark.parametrize("text", ["x", "", "0", "-1", "0,0", "1,-2", "3.5", "99999999999999999999,"])
def test_bad_seeds(text: str) -> None:
    with pytest.raises(SystemExit, match="write how many"):
        seeds_of(text, "paper")


@pytest.mark.parametrize("option", [["--limit", "0"], ["--limit", "-3"], ["--minutes", "nan"], ["--minutes", "-1"]])
def test_bad_numbers(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(option)
    assert f"{option[0]} {option[1]}: write" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["gpu", "", "cuda:99", "meta"])
def test_bad_devices(device: str) -> None:
    with pytest.raises(SystemExit, match="there is no device"):
        engine_of(parse(["--device", device]))


def test_the_fused_engine_needs_cuda() -> None:
    with pytest.raises(SystemExit, match="use --engine eager"):
        engine_of(parse(["--engine", "fused"]))


def test_a_hint_whatever_the_case() -> None:
    with pytest.raises(SystemExit, match="did you mean NCT-R2WiderR"):
        main(["nct-r2wider"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["TUNE-scratch@2-0.001-0.01"], "it is one of --set tuning, and --set is paper"),
        (["EQ-scratch@*", "RE-*"], "they are of --set protocol, and --set is paper"),
        (["--set", "tuning", "BI-Std"], "it is one of --set paper, and --set is tuning"),
        (["--set", "tuning", "SWEEP-*"], "it is one of --set sweep, and --set is tuning"),
        (["--set", "tuning", "TUNE-scratch@2-0.001-0.02"], r"did you mean TUNE-.*\? See .* --set tuning --list"),
        (["BI-Std", "nothing"], "nothing: see python -m experiments --set paper --list"),
    ],
)
def test_an_arm_that_is_not_there(words: list[str], told: str) -> None:
    with pytest.raises(SystemExit, match=f"there is no arm .*{told}"):
        main(words)


def test_commands_of_older_results_are_understood() -> None:
    assert parse(["--set", "tuning", "--reading", "table"]).set == "tuning"


@pytest.mark.parametrize("which", ["paper", "more", "tuning", "sweep", "protocol"])
def test_the_list_of_a_set(which: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--set", which, "--tuned", str(RESULTS.parent / "tuning")]) == 0
    found = capsys.readouterr().out
    assert ("How the paper was read" in found) == ("amsgrad" in found) == (which in ("paper", "more"))
    assert ("experiments/setting/protocol.py" in found) == (which not in ("paper", "more"))


def write_tuning(folder: Path, arms: Sequence[Arm]) -> None:
    folder.mkdir(parents=True)
    for arm in arms:
        content = {**GOOD, "arm": {"name": arm.name}}
        (folder / file_name(arm.name)).write_text(json.dumps(content))


def test_a_tuning_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It is used if it is complete; else the kept one is, and it is said why."""
    own, kept, arms = tmp_path / "own" / "tuning", RESULTS.parent / "tuning", tuning_arms()
    monkeypatch.setattr("experiments.__main__.compared_in", lambda preset: tmp_path / "own")
    chose = "rates and weight decays are those that {} chose\n"

    def said() -> str:
        assert main(["--list", "--set", "sweep"]) == 0
        return capsys.readouterr().out

    assert said().startswith(chose.format(kept))
    write_tuning(own, arms[:1])
    lacking = f"yours in {own} are not complete: they lack {arms[1].name} and {len(arms) - 2} others\n"
    assert said().startswith(lacking + chose.format(kept))
    with pytest.raises(SystemExit, match=rf"lacks {re.escape(arms[1].name)} and .* others: run .* --set tuning first"):
        main(["--list", "--set", "sweep", "--tuned", str(own)])
    assert "chose" not in capsys.readouterr().out
    (own / file_name(arms[0].name)).unlink()
    own.rmdir()
    write_tuning(own, arms[:-2])
    assert f"they lack {arms[-2].name} and 1 other\n" in said()
    path = own / file_name(arms[0].name)
    for arm in arms[-2:]:
        (own / file_name(arm.name)).write_text(path.read_text().replace(arms[0].name, arm.name))
    assert said().startswith(chose.format(own))


def test_what_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("experiments.__main__.cifar10", lambda folder: replace(some_data(256, 10), name="CIFAR-10"))
    folders = ["--work", str(tmp_path / "work"), "--results", str(tmp_path / "results")]
    assert main(["BI-Std", *folders]) == 0
    said = capsys.readouterr().out
    assert said.startswith("1 arm, 1 seed: 2 pieces of training, 2 left")
    assert "results of 1 arm are in" in said
    assert main(["BI-Std", "BI-He", "--seeds", "2", *folders]) == 0
    assert capsys.readouterr().out.startswith("2 arms, 2 seeds: ")
    assert main(["BI-Std", "OF-Rand", *folders]) == 0
    assert capsys.readouterr().out.startswith(f"2 arms, 1 seed, 1 arm of them in {tmp_path / 'results'} already: 1 piece of")


def test_an_interrupted_run_writes_what_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("experiments.__main__.cifar10", lambda folder: replace(some_data(256, 10), name="CIFAR-10"))
    folders = ["--work", str(tmp_path / "work"), "--results", str(tmp_path / "results")]
    land = Training._land

    def land_and_stop(self: Training, flight: Any) -> None:
        land(self, flight)
        self.until = float("-inf")

    monkeypatch.setattr(Training, "_land", land_and_stop)
    assert main(["OF-Teacher", "OF-Student", "--seeds", "1", *folders]) == 3
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["OF-Teacher.json"]
    assert "1 arm written to" in capsys.readouterr().out
    monkeypatch.setattr(Training, "_land", land)
    assert main(["OF-Teacher", "OF-Student", "--seeds", "1", *folders]) == 0
    assert sorted(read_all(tmp_path / "results")) == ["OF-Student", "OF-Teacher"]


def test_what_is_left_leaves_out_steps_that_are_made(tmp_path: Path) -> None:
    """Five epochs of each of two networks, two steps an epoch; an interrupted run has made the first of one."""
    arm = replace(ARM, stages=(replace(ARM.stages[0], epochs=5),))
    work = training([arm], tmp_path, some_data(), seeds=(0, 1), limit=1)
    assert work.epochs_left() == 10

    def stop(done: float, text: str) -> None:
        work.until = float("-inf")

    work.tell = stop
    assert not work.run()
    again = training([arm], tmp_path, some_data(), seeds=(0, 1))
    assert again.epochs_left() == 9
    told: list[float] = []
    again.tell = lambda done, text: told.append(done)
    assert again.run()
    assert sum(told) == 9
    assert again.epochs_left() == 0


def test_an_accuracy_that_was_not_measured_is_not_reported(tmp_path: Path) -> None:
    stage = replace(ARM.stages[0], epochs=3)
    for looks, wanted in ((0, ["training loss"] * 2 + ["best"]), (1, ["best"] * 3)):
        told: list[str] = []
        arm = replace(ARM, stages=(replace(stage, looks=looks),))
        work = training([arm], tmp_path / str(looks), some_data(), tell=lambda done, text, told=told: told.append(text))
        assert work.run()
        assert [re.sub(r".*, | [\d.]+( %)?$", "", text) for text in told] == wanted


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 cut off"])
def test_broken_states_are_named(content: bytes, tmp_path: Path) -> None:
    store = trained(tmp_path)
    path = store.path(segments_of(ARM, 0)[0])
    path.write_bytes(content)
    with pytest.raises(StoreError, match=rf"{path.name} can't be read .*delete it"):
        Store(tmp_path).is_done(segments_of(ARM, 0)[0])
    torch.save([1], path)
    with pytest.raises(StoreError, match="can't be read"):
        Store(tmp_path).is_done(segments_of(ARM, 0)[0])


def test_states_of_other_data_or_another_engine_are_refused(tmp_path: Path) -> None:
    """The same description on other data is another training."""
    trained(tmp_path, data="CIFAR-10, the first 2,560 images", engine="eager")
    segment = segments_of(ARM, 0)[0]
    assert Store(tmp_path, {"data": "CIFAR-10, the first 2,560 images", "engine": "eager"}).is_done(segment)
    for about in ({"data": "CIFAR-10"}, {"engine": "fused"}):
        with pytest.raises(StoreError, match=r"was trained otherwise .*name another folder with --work"):
            Store(tmp_path, about).is_done(segment)


def test_results_that_were_made_otherwise_are_not_mixed(tmp_path: Path) -> None:
    store = trained(tmp_path / "work", seeds=(0, 1))
    made = {"command": "one", "data": "CIFAR-10", "engine": "fused", "precision": "tf32", "device": "NVIDIA H200"}
    write_arm(tmp_path, ARM, [0], store, made)
    before = (tmp_path / file_name(ARM.name)).read_bytes()
    for change in ({"data": "CIFAR-10, the first 2,560 images"}, {"engine": "eager"}, {"device": "x86_64"}):
        with pytest.raises(ResultsError, match="were made otherwise"):
            write_arm(tmp_path, ARM, [1], store, {**made, **change})
    assert (tmp_path / file_name(ARM.name)).read_bytes() == before


def test_what_is_in_the_results_is_not_trained_again(tmp_path: Path) -> None:
    store = trained(tmp_path / "work", seeds=(0, 1))
    made = {"command": "one", "data": "CIFAR-10", "engine": "fused", "precision": "tf32", "device": "NVIDIA H200"}
    assert missing(tmp_path, ARM, [0, 1, 2], made) == [0, 1, 2]
    write_arm(tmp_path, ARM, [1], store, made)
    assert missing(tmp_path, ARM, [0, 1, 2], {**made, "command": "another"}) == [0, 2]
    with pytest.raises(ResultsError, match="were made otherwise"):
        missing(tmp_path, ARM, [1], {**made, "engine": "eager"})
    with pytest.raises(ResultsError, match="another description"):
        missing(tmp_path, replace(ARM, flips=True), [1], made)


def test_filters_of_other_seeds_are_kept(tmp_path: Path) -> None:
    arm = short(paper_arms()[0])
    store = trained(tmp_path, arm, seeds=(0, 1))
    write_filters(tmp_path, arm, [0], store)
    first = load_file(tmp_path / "filters.safetensors")
    write_filters(tmp_path, arm, [1], store)
    both = load_file(tmp_path / "filters.safetensors")
    assert {name.split("/")[1] for name in both} == {"0", "1"}
    assert all(torch.equal(both[name], value) for name, value in first.items())


@pytest.mark.parametrize(
    "content", [{"format": 1}, {"format": 1, "arm": {"name": "A"}}, {"format": 1, "arm": [], "curves": {}}, [1]]
)
def test_other_json_is_named(content: object, tmp_path: Path) -> None:
    (tmp_path / "A.json").write_text(json.dumps(content))
    with pytest.raises(ResultsError, match=r"A\.json is no results file .*take it out"):
        read_all(tmp_path)


GOOD = {
    "format": 1,
    "arm": {"name": "A"},
    "seeds": [0, 3],
    "command": "made up",
    "curves": {"0": [{"accuracy": [0.1]}], "3": [{"accuracy": [0.1, 0.2]}, {"accuracy": [0.3]}]},
}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"arm": {"name": None}}, "name is no text"),
        ({"command": None}, "command is no text"),
        ({"seeds": 5}, "no list of whole numbers"),
        ({"seeds": []}, "no list of whole numbers"),
        ({"seeds": ["0", "3"]}, "no list of whole numbers"),
        ({"seeds": [0]}, "not listed"),
        ({"curves": []}, "AttributeError"),
        ({"curves": None}, "TypeError"),
        *(
            ({"curves": {**GOOD["curves"], "3": curve}}, "seed 3 has no curve")  # type: ignore[dict-item]
            for curve in (None, [], {}, [None], [{}], [{"accuracy": None}], [{"accuracy": []}], [{"accuracy": [0.1]}, {}])
        ),
        ({"curves": {"0": [{"accuracy": [0.1]}]}}, "seed 3 has no curve"),
    ],
)
def test_results_with_something_missing_are_named(change: dict[str, object], told: str, tmp_path: Path) -> None:
    path = tmp_path / "A.json"
    path.write_text(json.dumps(GOOD))
    assert list(read_all(tmp_path)) == ["A"]
    path.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(ResultsError, match=rf"A\.json is no results file .*{told}.*take it out"):
        read_all(tmp_path)


@pytest.mark.parametrize("change", [{"command": None}, {"curves": {}}, {"curves": {"0": None}}, {"seeds": 1}])
def test_a_seed_without_a_curve_is_not_there(change: dict[str, object], tmp_path: Path) -> None:
    """It is told before anything is trained."""
    write_arm(tmp_path, ARM, [0], trained(tmp_path / "work"), {"command": "one"})
    path = tmp_path / file_name(ARM.name)
    assert missing(tmp_path, ARM, [0], {}) == []
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ResultsError, match="is no results file"):
        missing(tmp_path, ARM, [0], {})


def test_the_report_is_of_the_papers_arms(tmp_path: Path) -> None:
    """Results of others are refused alone, and left out beside those of the paper."""
    other = RESULTS.parent / "protocol" / "EQ-scratch@2.json"
    (tmp_path / other.name).write_bytes(other.read_bytes())
    for module in (report, figures):
        with pytest.raises(SystemExit, match=r"are not of the paper's arms \(EQ-scratch@2 is none"):
            module.main(["--results", str(tmp_path), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
    made_up.write(tmp_path, only="BI-Std")
    assert list(read_paper(tmp_path)) == ["BI-Std"]


@pytest.mark.parametrize("module", [report, figures, pays])
def test_a_page_that_can_not_be_written(module: ModuleType, tmp_path: Path) -> None:
    made_up.write(tmp_path / "results", only="BI-Std")
    (tmp_path / "file").write_text("")
    options = [] if module is pays else ["--results", str(tmp_path / "results")]
    with pytest.raises(SystemExit, match=r"file.* can't be written or read"):
        module.main([*options, "--out", str(tmp_path / "file" / "page")])


def test_a_folder_that_can_not_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried before anything is trained."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("experiments.__main__.cifar10", lambda folder: replace(some_data(256, 10), name="CIFAR-10"))
    with pytest.raises(SystemExit, match="can't be written"):
        main(["BI-Std", "--results", str(tmp_path / "file" / "results"), "--work", str(tmp_path / "work")])
    assert not (tmp_path / "work").exists()


def test_a_download_repairs_what_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib
    import io
    import tarfile

    names = [f"data_batch_{n}.bin" for n in range(1, 6)] + ["test_batch.bin"]
    record = bytes(data_module.RECORD)
    monkeypatch.setattr(data_module, "DIGESTS", dict.fromkeys(names, hashlib.md5(record, usedforsecurity=False).hexdigest()))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name in names:
            info = tarfile.TarInfo(f"{data_module.FOLDER}/{name}")
            info.size = len(record)
            archive.addfile(info, io.BytesIO(record))
    asked = []

    def fetch(address: str) -> io.BytesIO:
        asked.append(address)
        return io.BytesIO(packed.getvalue())

    monkeypatch.setattr(data_module.urllib.request, "urlopen", fetch)
    download(tmp_path)
    assert len(cifar10(tmp_path).labels) == 5
    download(tmp_path)
    assert len(asked) == 1
    (tmp_path / data_module.FOLDER / names[2]).write_bytes(b"damaged")
    download(tmp_path)
    assert len(asked) == 2
    assert len(cifar10(tmp_path).labels) == 5
