"""Schedules as TOML and JSON: reading, writing, and mistakes in a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import outgrow
from outgrow.errors import ScheduleError

tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")

WRITTEN = """
[[growth]]
epoch = 25
grow = [{ widen = "*", factor = 1.5 }, { deepen = "layer3.1", count = 2, fade = 200 }, { kernel = "conv1", size = 9 }]
lr = 0.2

[[growth]]
step = 10_000
grow = [
    { branch = "layer2", method = "netmorph" },
    { widen = ["a.*", "b"], by = 4, method = { name = "r2r", init = "he", scale = 0.5 } },
]
train = "new"
hold = 50

[[growth]]
when = { rule = "plateau", metric = "val_loss", patience = 5 }
grow = { kernel = "conv2", size = [3, 5] }
state = "fresh"
"""
MEANT = outgrow.Schedule(
    [
        outgrow.At(
            epoch=25,
            grow=[
                outgrow.Widen("*", factor=1.5),
                outgrow.Deepen(after="layer3.1", count=2, fade=200),
                outgrow.Kernel("conv1", 9),
            ],
            lr=0.2,
        ),
        outgrow.At(
            step=10_000,
            grow=[
                outgrow.Branch(beside="layer2", method="netmorph"),
                outgrow.Widen(["a.*", "b"], by=4, method=outgrow.R2R(init="he", scale=0.5)),
            ],
            train="new",
            hold=50,
        ),
        outgrow.When(outgrow.plateau("val_loss", patience=5), grow=[outgrow.Kernel("conv2", (3, 5))], state="fresh"),
    ]
)


def test_toml_as_a_person_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(WRITTEN)
    assert outgrow.Schedule.from_file(path) == MEANT


def test_json_as_a_person_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(tomllib.loads(WRITTEN)))
    assert outgrow.Schedule.from_file(str(path)) == MEANT


def test_fields_that_are_left_out_have_their_defaults() -> None:
    event = {"epoch": 3, "grow": [{"deepen": "1"}, {"widen": "*", "to": 8}]}
    assert outgrow.Schedule.from_dict({"growth": [event]}).to_dict() == {"growth": [event]}


def test_numbers_of_numpy(tmp_path: Path) -> None:
    schedule = outgrow.Schedule(
        [outgrow.At(step=1, grow=[outgrow.Widen(factor=np.float32(1.1)), outgrow.Widen(by=np.int64(2))])]
    )
    schedule.to_file(tmp_path / "plan.toml")
    assert outgrow.Schedule.from_file(tmp_path / "plan.toml") == schedule


names = st.text(min_size=1, max_size=8) | st.sampled_from(["*", "layer1.*", 'a"b', "\\", "\x7f", "\n", "ψ(x)", "'''"])
counts = st.integers(1, 10**12)
factors = st.floats(0, 1e300, exclude_min=True) | counts
fades = st.none() | counts


@st.composite
def methods(draw: st.DrawFn) -> Any:
    options = {"init": draw(st.sampled_from(["std", "he", "xavier", "copy"])), "scale": draw(st.floats(-9, 9))}
    kind = draw(st.sampled_from([outgrow.R2R, outgrow.Net2Net, outgrow.NetMorph, outgrow.MeanFill, outgrow.RandomPad]))
    if kind is outgrow.Net2Net:
        options |= {"split": draw(st.sampled_from(["equal", "random"])), "noise": draw(st.floats(0, 1))}
    if kind is outgrow.NetMorph:
        options["zero"] = draw(st.sampled_from(["readers", "writers"]))
    return kind(**options)


@st.composite
def widenings(draw: st.DrawFn) -> outgrow.Widen:
    amount = draw(
        st.one_of(
            st.fixed_dictionaries({"factor": st.floats(1, 1e9, exclude_min=True)}),
            st.fixed_dictionaries({"by": counts}),
            st.fixed_dictionaries({"to": counts}),
        )
    )
    fade = draw(fades)
    method = "auto" if fade else draw(methods() | st.sampled_from(["auto", "r2r", "net2net", "netmorph", "mean", "random"]))
    residual = "stream" if fade else draw(st.sampled_from(["stream", "fold"]))
    return outgrow.Widen(draw(names | st.lists(names, min_size=1)), **amount, method=method, residual=residual, fade=fade)


transforms = st.one_of(
    widenings(),
    st.builds(outgrow.Deepen, names, counts, st.sampled_from(["auto", "copy", "netmorph"]), fades),
    st.builds(outgrow.Deepen, names, layers=st.integers(2, 9)),
    st.builds(outgrow.Kernel, names, counts | st.lists(counts, min_size=1), fades),
    st.builds(outgrow.Branch, names, st.sampled_from(["auto", "random"]), hidden=st.none() | st.integers(2, 99), fade=fades),
)
finite = st.floats(allow_nan=False, allow_infinity=False)
named_triggers = st.one_of(
    st.builds(outgrow.plateau, names, counts, st.floats(0, 1e9), st.sampled_from(["min", "max"])),
    st.builds(outgrow.reached, names, finite | counts, st.sampled_from(["min", "max"])),
)


@st.composite
def schedules(draw: st.DrawFn) -> outgrow.Schedule:
    events: list[Any] = []
    times = {name: iter(sorted(draw(st.lists(counts, min_size=4, max_size=4)))) for name in ("step", "epoch")}
    for kind in draw(st.lists(st.sampled_from(["step", "epoch", "when"]), max_size=4)):
        options = draw(
            st.fixed_dictionaries(
                {"grow": st.lists(transforms, min_size=1, max_size=3)},
                optional={"lr": factors, "weight_decay": factors, "warmup": counts, "new_lr": factors}
                | {"train": st.just("new"), "state": st.sampled_from(["carry", "fresh"])},
            )
        )
        if options.get("train") == "new":
            options["hold"] = draw(fades)
        if kind == "when":
            events.append(outgrow.When(draw(named_triggers), **options))
        else:
            events.append(outgrow.At(**{kind: next(times[kind])}, **options))
    return outgrow.Schedule(events)


@settings(deadline=None, max_examples=80)
@given(schedules())
def test_round_trips(tmp_path_factory: pytest.TempPathFactory, schedule: outgrow.Schedule) -> None:
    folder = tmp_path_factory.mktemp("schedules")
    assert outgrow.Schedule.from_dict(schedule.to_dict()) == schedule
    for name in ("plan.toml", "plan.json"):
        schedule.to_file(folder / name)
        assert outgrow.Schedule.from_file(folder / name) == schedule
    assert tomllib.loads((folder / "plan.toml").read_text("utf-8")) == json.loads((folder / "plan.json").read_text("utf-8"))


AT = "[[growth]]\nepoch = 3\n"
GROW = 'grow = [{ widen = "*", factor = 1.5 }]\n'
GOOD = f"[[growth]]\nepoch = 1\n{GROW}\n"
MISTAKES = {
    f"[[growth]]\nepohc = 3\n{GROW}": "growth 2: there is no key 'epohc': did you mean 'epoch'?",
    f"[[growth]]\nepoch = 3\ngrown = 4\n{GROW}": "growth 2: there is no key 'grown': did you mean 'grow'?",
    f"[[growth]]\nepoch = 3\nLR = 0.5\n{GROW}": "growth 2: there is no key 'LR': did you mean 'lr'?",
    f"[[growth]]\nepoch = 3\nstep = 4\n{GROW}": "'share' and 'when' is required, and it has step and epoch",
    f"[[growth]]\n{GROW}": "it has none",
    "[[growth]]\nepoch = 3": "growth 2: 'grow' is missing",
    AT + "grow = [{ widne = '*', factor = 2 }]": "growth 2, transform 1: a transform has one of the keys 'widen', "
    "'deepen', 'kernel', 'branch', with the place as its value; for 'widne', did you mean 'widen'?",
    AT + "grow = [{ widen = '*', deepen = '1' }]": "transform 1: .* it has widen and deepen",
    AT + "grow = [{ factor = 2 }]": "it has none of them",
    AT + "grow = [{ deepen = '1' }, { deepen = 7 }]": r"growth 2, transform 2 \(deepen\): after=7: write the path",
    AT + "grow = [{ widen = 3, by = 2 }]": r"transform 1 \(widen\): where=3: write a name",
    AT + "grow = [{ widen = '*', factr = 2 }]": r"\(widen\): there is no key 'factr': did you mean 'factor'\?",
    AT + "grow = [{ widen = '*', factor = 0.5 }]": "factor=0.5 does not grow anything",
    AT + "grow = [{ widen = { a = 1 }, factor = 2 }]": "widen is a table",
    AT + "grow = [{ kernel = 'conv1' }]": r"\(kernel\): 'size' is missing",
    AT + "grow = ['widen']": "transform 1: 'widen' is not a table: write e.g. { widen",
    AT + "grow = []": "growth 2: grow=.*: write a list of transforms",
    AT + "grow = [{ deepen = '1', method = { name = 'r2r' } }]": "method is a table",
    AT + "grow = [{ widen = '*', factor = 2, method = { name = 'r2' } }]": "did you mean 'r2r'",
    AT + "grow = [{ widen = '*', factor = 2, method = { nam = 'r2r' } }]": "method: 'name' is missing; for 'nam'",
    AT + "grow = [{ widen = '*', factor = 2, method = { name = 'r2r', zero = 1 } }]": "there is no key 'zero'",
    AT + "grow = [{ widen = '*', factor = 2, method = 3 }]": "there is no method 3",
    f"[[growth]]\nepoch = '3'\n{GROW}": "growth 2: epoch='3': write a number of epochs",
    f"[[growth]]\nshare = 40\n{GROW}": "growth 2: share=40: write a share of the run between 0 and 1",
    f"[[growth]]\nepoch = 2026-01-01\n{GROW}": "growth 2: epoch=datetime.date",
    f"[[growth]]\nepoch = 3\nlr = 'low'\n{GROW}": "growth 2: lr='low': write a factor",
    f"[[growth]]\nepoch = 3\ntrain = ['new']\n{GROW}": r"growth 2: train=\['new'\]: write 'all'",
    f"[[growth]]\nwhen = 'plateau'\n{GROW}": "growth 2, when: 'plateau' is not a table: write e.g. { rule",
    f"[[growth]]\nwhen = {{ rule = 'plato', metric = 'loss' }}\n{GROW}": "rule = 'plato': did you mean 'plateau'",
    f"[[growth]]\nwhen = {{ rule = 'plateau' }}\n{GROW}": r"when \(plateau\): 'metric' is missing",
    f"[[growth]]\nwhen = {{ rule = 'plateau', metric = 3 }}\n{GROW}": "write the name of a metric",
    f"[[growth]]\nwhen = {{ rule = 'plateau', metric = 'loss', least = 'x' }}\n{GROW}": "least='x': write the least",
    f"[[growth]]\nwhen = {{ rule = 'reached', metric = 'loss', value = 'x' }}\n{GROW}": "value='x': write a number",
    f"[[growths]]\nepoch = 3\n{GROW}": "there is no key 'growths': did you mean 'growth'",
    "[[growth]\n": "plan.toml is not valid TOML: ",
    "[[growth]]\nepoch = 0\n" + GROW: "epoch=0: write a number of epochs",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=range(len(MISTAKES)))
def test_mistakes_name_file_entry_and_way_out(tmp_path: Path, mistake: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(GOOD + mistake)
    with pytest.raises(ScheduleError, match=MISTAKES[mistake]) as error:
        outgrow.Schedule.from_file(path)
    assert str(error.value).startswith(str(path))


def test_events_that_are_not_in_order(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(f"[[growth]]\nepoch = 5\n{GROW}\n[[growth]]\nepoch = 4\n{GROW}")
    with pytest.raises(ScheduleError, match=r"plan.toml: events are not in order of time"):
        outgrow.Schedule.from_file(path)


FILES = {
    "plan.json": {
        b"[": "is not valid JSON",
        b"[]": "a schedule is a table with the key 'growth'",
        b"{}": "'growth' must be a list",
        b'{"growth": {}}': "'growth' must be a list",
        b'{"growth": ["x"]}': "growth 1: 'x' is not a table",
        b'{"growth": [{"epoch": 1, "epoch": 2}]}': "the key 'epoch' occurs twice",
        b'{"growth": [{"when": {"rule": "plateau", "metrics": "a"}, "grow": []}]}': r"growth 1, when \(plateau\): there is "
        "no key 'metrics': did you mean 'metric'",
        b"\xff\xfe": "is not valid JSON: 'utf-8' codec",
        b"[" * 100_000: "nested too deeply",
    },
    "plan.toml": {b"": "'growth' must be a list", b"growth = 3": "'growth' must be a list", b"\xff": "is not valid TOML"},
    "plan.yaml": {b"": "must end in .toml or .json"},
}


@pytest.mark.parametrize(("name", "content"), [(name, content) for name, many in FILES.items() for content in many])
def test_other_files(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ScheduleError, match=FILES[name][content]) as error:
        outgrow.Schedule.from_file(path)
    assert str(path) in str(error.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="can't be read: No such file"):
        outgrow.Schedule.from_file(tmp_path / "plan.toml")


def test_python_code_can_not_be_written(tmp_path: Path) -> None:
    def mine(*_: Any) -> Any:
        return True

    class Mine(outgrow.R2R):
        pass

    cases = {
        "growth 1: .*mine.* is Python code": outgrow.When(mine, grow=[outgrow.Widen(by=2)]),
        "growth 1, transform 1: init=.*mine.* is a function": outgrow.At(
            step=1, grow=[outgrow.Widen(by=2, method=outgrow.R2R(init=mine))]
        ),
        "is a method without a name": outgrow.At(step=1, grow=[outgrow.Widen(by=2, method=Mine())]),
    }
    for message, event in cases.items():
        with pytest.raises(ScheduleError, match=message):
            outgrow.Schedule([event]).to_file(tmp_path / "plan.toml")
    infinite = outgrow.Schedule([outgrow.When(outgrow.reached("x", float("inf")), grow=[outgrow.Widen(by=2)])])
    with pytest.raises(ScheduleError, match="can't be written as JSON"):
        infinite.to_file(tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())
    infinite.to_file(tmp_path / "plan.toml")
    assert outgrow.Schedule.from_file(tmp_path / "plan.toml") == infinite


def test_python_without_a_parser_for_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MEANT.to_file(tmp_path / "plan.toml")
    for name in ("tomllib", "tomli"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ScheduleError, match="pip install tomli"):
        outgrow.Schedule.from_file(tmp_path / "plan.toml")
