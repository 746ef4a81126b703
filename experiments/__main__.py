"""The paper's experiments.

    python -m experiments --list                          what there is
    python -m experiments --preset quick                  all arms, small, on the CPU: a few minutes
    python -m experiments --preset paper --device cuda    all arms as in the paper's table, five seeds
    python -m experiments 'NCT-*' 'FTT-R2WiderR'          some of them
    python -m experiments --set more …                    other readings of the paper, and controls; --set all: with the table
    python -m experiments --set appendix-b …              appendix B on its own network
    python -m experiments --set tuning --preset paper …   the honest comparison: tuning, then sweep, then protocol

An interrupted run goes on where it stopped when the same command is given again. Results go to --results, a JSON file per arm,
for the seeds that are complete; arms and seeds that are there are not trained again, and more seeds join them.
From those of the paper's arms a report is made, report.html with its figures beside it; from those of the three sets, in
folders of these names side by side, does-it-pay.md.
"""

from __future__ import annotations

import signal

from experiments.leaving import leave

if __name__ == "__main__":
    signal.signal(signal.SIGINT, leave)  # before torch is imported, which takes seconds

import argparse
import difflib
import fnmatch
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from experiments.reading.result_files import ResultsError, facts, missing, read_all, unusable, write_arm, write_filters
from experiments.setting import appendix_b, own_tuning
from experiments.setting.appendix_b import appendix_b_arms
from experiments.setting.arms import CHOICES, Arm, paper_arms
from experiments.setting.data import Data, DataError, cifar10, download
from experiments.setting.more_arms import more_arms
from experiments.setting.protocol import KINDS, OWNED, chosen_by, lacks, protocol_arms, sweep_arms, tuned_at, tuning_arms
from experiments.setting.segments import Segment, all_segments, segments_of
from experiments.training import eager
from experiments.training.graphs import Graphs
from experiments.training.progress import Progress
from experiments.training.store import Store, StoreError
from experiments.training.train_segments import BATCH, Training

HERE = Path(__file__).parent
OF_THE_PAPER: dict[str, Callable[[], list[Arm]]] = {
    "paper": paper_arms,
    "more": more_arms,
    "all": lambda: [*paper_arms(), *more_arms()],
    "appendix-b": appendix_b_arms,
}
COMPARED = ("tuning", "sweep", "protocol")
SETS = (*OF_THE_PAPER, *COMPARED)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arms", nargs="*", default=["*"], help="names or patterns of arms; all of them by default")
    parser.add_argument("--list", action="store_true", help="print the arms, and the choices made in reading the paper")
    parser.add_argument(
        "--preset",
        choices=("quick", "paper"),
        default="quick",
        help="quick: 2,560 images, one seed, and of the paper's arms a fiftieth of the epochs",
    )
    parser.add_argument(
        "--set", choices=SETS, default="paper", help="which arms: those of the paper, or of the honest comparison"
    )
    parser.add_argument("--reading", choices=("table",), help=argparse.SUPPRESS)  # in commands of older results
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, … (default: cpu)")
    parser.add_argument(
        "--engine",
        choices=("auto", "eager", "graphs", "fused"),
        default="auto",
        help="auto: fused on CUDA (graphs for appendix B), else eager",
    )
    parser.add_argument("--precision", choices=("tf32", "ieee"), default="tf32", help="of products on CUDA (default: tf32)")
    parser.add_argument("--seeds", default=None, help="how many (5), or which (0,3,4; 3, is the one)")
    parser.add_argument("--data", type=Path, default=Path("data"), help="where CIFAR-10 is (default: data)")
    parser.add_argument("--download", action="store_true", help="fetch CIFAR-10 if it is not there")
    parser.add_argument(
        "--work", type=Path, default=None, help="where states are kept (default: experiments/work/PRESET-table or -SET)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=None,
        help="where results go (default: experiments/work/PRESET-table-results, or PRESET-compared/SET)",
    )
    parser.add_argument(
        "--tuned",
        type=Path,
        default=None,
        help="results of --set tuning, for the sets after it and for its own long budgets (default: yours, or the kept ones)",
    )
    parser.add_argument(
        "--out", type=Path, default=None, help="where the report goes (default: PRESET-table-report beside the results)"
    )
    parser.add_argument(
        "--limit", type=int, default=160, help="the most networks of a fleet, as one program (default: 160, or what fits)"
    )
    parser.add_argument(
        "--together", type=int, default=3, help="the most fleets side by side, where the engine can do so (default: 3)"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long; the same command goes on")
    options = parser.parse_args(arguments)
    if options.limit < 1:
        parser.error(f"--limit {options.limit}: write how many networks may be trained together, 1 or more")
    if options.together < 1:
        parser.error(f"--together {options.together}: write how many fleets may be trained side by side, 1 or more")
    if not options.minutes > 0:
        parser.error(f"--minutes {options.minutes:g}: write after how many minutes to stop")
    return options


def seeds_of(text: str | None, preset: str) -> list[int]:
    if text is None:
        return [0] if preset == "quick" else list(range(5))
    try:
        numbers = [int(part) for part in text.removesuffix(",").split(",")]
    except ValueError:
        numbers = []
    seeds = list(range(numbers[0])) if len(numbers) == 1 and "," not in text else numbers
    if not seeds or len(set(seeds)) < len(seeds) or not all(0 <= seed < 1_000_000 for seed in seeds):
        raise SystemExit(f"--seeds {text}: write how many, e.g. 5, or which, e.g. 0,3,4 or 3, (each once, from 0 on)")
    return seeds


def quick(arm: Arm) -> Arm:
    """The same arm with a fiftieth of its epochs."""
    return replace(arm, stages=tuple(replace(stage, epochs=max(1, round(stage.epochs / 50))) for stage in arm.stages))


def arms_of(options: argparse.Namespace) -> list[Arm]:
    if options.set in OF_THE_PAPER:
        return OF_THE_PAPER[options.set]()
    own_folder = compared_in(options.preset) / "tuning"
    if options.set == "tuning":
        folder = options.tuned or tuned_in(options.results or own_folder)
        return [*tuning_arms(), *own_tuning.tuning_arms(read_all(folder))]
    folder = options.tuned or tuned_in(own_folder)
    tuned = chosen_by(folder)
    print(f"rates and weight decays are those that {folder} chose")
    if options.set == "sweep":
        return sweep_arms(tuned)
    own = own_tuning.chosen(read_all(folder))
    return [*protocol_arms(tuned), *own_tuning.own_arms(own, tuned)]


def tuned_in(own: Path) -> Path:
    """Where the results of the tuning are: your own if they are complete, else the kept ones."""
    kept = HERE / "results" / "tuning"
    if not any(own.glob("*.json")):
        return kept
    lacking = lacks(read_all(own))
    if lacking:
        print(f"yours in {own} are not complete: they lack {lacking}")
    return kept if lacking else own


def compared_in(preset: str) -> Path:
    """Where the three sets of the honest comparison leave their results, unless they are told another place."""
    return HERE / "work" / f"{preset}-compared"


def chosen_arms(options: argparse.Namespace) -> list[Arm]:
    arms = arms_of(options)
    names = [arm.name for arm in arms]
    unknown = [pattern for pattern in options.arms if not matches(names, pattern)]
    if unknown:
        raise SystemExit(f"there is no arm {', '.join(unknown)}: {hint(unknown, names, options.set)}")
    chosen = [arm for arm in arms if any(matches([arm.name], pattern) for pattern in options.arms)]
    return [quick(arm) for arm in chosen] if options.preset == "quick" and options.set in OF_THE_PAPER else chosen


def matches(names: Sequence[str], pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def hint(unknown: Sequence[str], names: Sequence[str], which: str) -> str:
    """Where arms are that a set does not have, or what may have been meant."""
    for other in SETS:
        theirs = names_of(other)
        if all(matches(theirs, pattern) for pattern in unknown):
            return f"{'it is one' if len(unknown) == 1 else 'they are'} of --set {other}, and --set is {which}"
    plain = {name.lower(): name for name in names}
    near = [plain[name] for name in difflib.get_close_matches(unknown[0].lower(), plain, n=1)]
    return (f"did you mean {near[0]}? See" if near else "see") + f" python -m experiments --set {which} --list"


def names_of(which: str) -> list[str]:
    """The arms of a set, whatever the tuning chooses."""
    tuned = {kind: dict.fromkeys(tuned_at(kind), OWNED) for kind in KINDS}
    arms: Callable[[], list[Arm]] = {
        **OF_THE_PAPER,
        "tuning": lambda: [*tuning_arms(), *own_tuning.tuning_arms({})],
        "sweep": lambda: sweep_arms(tuned),
        "protocol": lambda: [*protocol_arms(tuned), *own_tuning.own_arms(own_tuning.any_choice(), tuned)],
    }[which]
    return [arm.name for arm in arms()]


def several(number: int, noun: str) -> str:
    """1 arm, 2 arms"""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def engine_of(options: argparse.Namespace) -> tuple[str, Callable[..., Any], Callable[[Any], Any]]:
    """The name of the engine, what makes one, and what models must share to be trained together in it."""
    own = {"loss": appendix_b.loss} if options.set == "appendix-b" else {}
    try:
        device = torch.device(options.device)
        torch.zeros(1, device=device).item()
    except Exception as error:  # of many kinds, by the device
        raise SystemExit(f"there is no device {options.device!r} that torch can compute on here: use --device cpu") from error
    if options.engine == "fused" and device.type != "cuda":
        raise SystemExit(f"the fused engine runs on CUDA, and --device is {options.device}: use --engine eager")
    plain = options.set == "appendix-b"
    if plain and options.engine == "fused":
        raise SystemExit("the fused engine has no kernels for appendix B's network: use --engine graphs")
    if device.type == "cuda":
        torch.set_num_threads(1)  # the host's operators are small; threads of several processes hold each other up
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = options.precision == "tf32"
    kind = options.engine if options.engine != "auto" else "eager" if device.type != "cuda" else "graphs" if plain else "fused"
    if kind in ("eager", "graphs"):
        make = Graphs if kind == "graphs" else eager.Eager
        return kind, lambda *what, **more: make(*what, device=options.device, **own, **more), eager.shape_of
    try:
        from experiments.training.fused.fleet import Fleet
        from experiments.training.fused.rows import shape_of
    except ImportError as error:
        raise SystemExit(
            f"the fused engine needs Triton, which comes with torch for CUDA ({error}): use --engine eager"
        ) from error
    return "fused", lambda *what, **more: Fleet(*what, device=options.device, precision=options.precision, **more), shape_of


def compiling(engine: str, segments: list[Segment], data: Data, batch: int, options: argparse.Namespace) -> Callable[[], None]:
    """Begin to compile an engine's kernels; returns what waits for those that are needed first."""
    if engine != "fused":
        return lambda: None
    from experiments.training.fused.precompile import precompile

    return precompile(segments, [len(labels) for _, labels in data.examined], batch, options.device, options.precision)


@contextmanager
def stoppable(training: Training) -> Iterator[None]:
    """Ctrl-C, or SIGTERM, lets training stop where it can be gone on with; the second one stops it at once."""

    def stop(number: int, frame: Any) -> None:
        print("stopping after this epoch of all; once more to stop at once", flush=True)
        training.until = float("-inf")
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if main_thread else {}
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        restore()


def command_of(options: argparse.Namespace) -> str:
    """The command that makes these results again, without what they do not depend on."""
    words = ["python", "-m", "experiments", *([] if options.arms == ["*"] else options.arms)]
    for name in ("set", "preset", "device", "engine", "precision", "seeds"):
        value = getattr(options, name)
        words += [] if value in (None, "auto") else [f"--{name}", str(value)]
    return shlex.join(words)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        arms = chosen_arms(options)
    except ResultsError as error:
        raise SystemExit(str(error)) from error
    if options.list:
        print(
            "\n".join(
                f"{arm.name:32} {arm.net}, " + ", ".join(f"{stage.epochs:g} epochs" for stage in arm.stages) for arm in arms
            )
        )
        if options.set in OF_THE_PAPER:
            print(f"\nEpochs are those of --preset {options.preset}. How the paper was read:\n")
            print("\n".join(f"- {choice}" for choice in CHOICES))
        else:
            print("\nexperiments/setting/protocol.py describes these arms; own_tuning.py beside it OWN-… and their tuning.")
        return 0
    started = time.monotonic()
    seeds = seeds_of(options.seeds, options.preset)
    of_paper, table = options.set in OF_THE_PAPER, f"{options.preset}-table"
    folder = table if options.set in ("paper", "more", "all") else f"{options.preset}-{options.set}"
    work = options.work or HERE / "work" / folder
    results = options.results or (HERE / "work" / f"{table}-results" if of_paper else compared_in(options.preset) / options.set)
    name, engine, shape = engine_of(options)
    try:
        if options.download:
            download(options.data)
        data = cifar10(options.data)
        data = data.held_out() if options.set in ("tuning", "sweep") else data.validated() if of_paper else data
        data = data.first(2_560, 1_000) if options.preset == "quick" else data
        about = {
            "data": data.name,
            "engine": name,
            "precision": options.precision if options.device.startswith("cuda") else "ieee",
            **({"batch": str(appendix_b.BATCH), "loss": "binary cross entropy"} if options.set == "appendix-b" else {}),
        }
        made_by = {"command": command_of(options), **about, **facts(options.device)}
        results.mkdir(parents=True, exist_ok=True)
        wanted = {arm: missing(results, arm, seeds, made_by) for arm in arms}
        store = Store(work, about)
        segments = list(dict.fromkeys(segment for arm, own in wanted.items() for segment in all_segments([arm], own)))
        left = [segment for segment in segments if not store.is_done(segment)]
        there = sum(not own for own in wanted.values())
        already = f", {several(there, 'arm')} of them in {results} already" if there else ""
        print(
            f"{several(len(arms), 'arm')}, {several(len(seeds), 'seed')}{already}: "
            f"{several(len(segments), 'piece')} of training, {len(left)} left; {name} engine"
        )
        until = started + 60 * options.minutes
        how: dict[str, Any] = {"limit": options.limit, "together": options.together, "until": until}
        how |= {"batch": appendix_b.BATCH} if options.set == "appendix-b" else {}
        compiled = compiling(name, left, data, how.get("batch", BATCH), options)

        def when_compiled(*what: Any, **more: Any) -> Any:
            """An engine; models are made and grown while its kernels are compiled."""
            compiled()
            return engine(*what, **more)

        training = Training(segments, data, when_compiled, shape, store, **how)
        with Progress(training.epochs_left()) as training.tell, stoppable(training):
            done = training.run()
        whole = {arm: [seed for seed in own if all(map(store.is_done, segments_of(arm, seed)))] for arm, own in wanted.items()}
        for arm, own in whole.items():
            if own:
                write_arm(results, arm, own, store, made_by)
                write_filters(results, arm, own, store)
        if not done:
            spent, written = (time.monotonic() - started) / 60, sum(map(bool, whole.values()))
            print(
                f"stopped after {spent:.1f} minutes; {several(written, 'arm')} written to {results}; the same command goes on"
            )
            return 3
        if of_paper:
            from experiments.report import write

            print(f"the report: {write(results, options.out or results.parent / f'{table}-report')}")
        elif all(any((results.parent / name).glob("*.json")) for name in COMPARED):
            from experiments import pays

            try:
                pays.write(results.parent, results.parent / "does-it-pay.md")
            except ResultsError as error:
                print(f"no page of answers yet: {error}")
    except (DataError, StoreError, ResultsError) as error:
        raise SystemExit(str(error)) from error
    except torch.OutOfMemoryError as error:
        raise SystemExit(
            f"not even one network fits into the free memory of {options.device}: free some, or use --device cpu"
        ) from error
    except OSError as error:
        raise SystemExit(unusable(error)) from error
    print(f"results of {several(len(arms), 'arm')} are in {results}; {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
