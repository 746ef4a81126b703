"""The command `outgrow search`: take part in a search as a worker, or write its report.

outgrow search worker mycode.search:describe --study digits --storage search.log
outgrow search report --study digits --storage search.log --out report.html
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from outgrow.cli.model_names import CommandError, build_object
from outgrow.cli.plugins import load_plugins

STORAGE = (
    "a journal file (search.log), a database (sqlite:///search.db, postgresql://…) or a proxy of Optuna (grpc://HOST:PORT), "
    "which all workers can reach"
)
WORKER = """\
Carry out trials of an architecture search until all are done. Any number of workers may run at the same time, on one machine or
many; the first one creates the study. A worker may be stopped or killed at any moment: its trial is taken up by another.

TARGET is a function MODULE:CALLABLE without arguments that returns an outgrow.Search."""
EPILOG = """\
  outgrow search worker mycode.search:describe --study digits --storage search.log &
  outgrow search worker mycode.search:describe --study digits --storage search.log &
  outgrow search report --study digits --storage search.log --out report.html"""
Subparsers = Any  # argparse has no public name for it


def add_search(commands: Subparsers) -> None:
    """Add the command to the parser."""
    about = "search for architectures by growth: run a worker, or write a report"
    raw = argparse.RawDescriptionHelpFormatter
    search = commands.add_parser("search", help=about, description=about.capitalize() + ".", epilog=EPILOG, formatter_class=raw)
    parts = search.add_subparsers(title="commands", required=True, metavar="COMMAND")
    worker = parts.add_parser(
        "worker", help="carry out trials of a search", description=WORKER, epilog=EPILOG, formatter_class=raw
    )
    worker.add_argument("target", metavar="TARGET", help="MODULE:CALLABLE, which returns an outgrow.Search")
    worker.add_argument("--study", metavar="NAME", required=True, help="the name of the study")
    worker.add_argument("--storage", metavar="STORAGE", required=True, help=STORAGE)
    worker.add_argument("--most", type=_positive, metavar="N", help="stop after N trials of this worker, instead of at the end")
    worker.add_argument("--minutes", type=float, metavar="M", help="begin no trial after M minutes")
    worker.add_argument("--quiet", action="store_true", help="print no line per trial")
    worker.set_defaults(run=run_worker)
    report = parts.add_parser(
        "report",
        help="write a page with the Pareto front and the family tree of a search",
        description="Print the trials of a search that no other dominates, and write a page with the Pareto front, the family "
        "tree and all trials.",
    )
    report.add_argument("--study", metavar="NAME", help="the name of the study; it may be left out if there is only one")
    report.add_argument("--storage", metavar="STORAGE", required=True, help=STORAGE)
    report.add_argument("--out", metavar="FILE", help="the page to write, e.g. report.html")
    report.add_argument("--json", action="store_true", help="print all trials as JSON instead of a table")
    report.set_defaults(run=run_report)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of trials: write a positive integer")
    return int(text)


def run_worker(args: argparse.Namespace) -> str:
    """The output of `outgrow search worker`."""
    from outgrow.search.description import Search
    from outgrow.search.search import run_search

    load_plugins()
    search = build_object(args.target)
    if not isinstance(search, Search):
        raise CommandError(f"{args.target} returns a {type(search).__name__}: it must return an outgrow.Search")
    return str(run_search(search, args.study, args.storage, quiet=args.quiet, most=args.most, minutes=args.minutes))


def run_report(args: argparse.Namespace) -> str:
    """The output of `outgrow search report`."""
    from outgrow.search.search import read_search

    result = read_search(args.storage, args.study)
    if args.out is not None:
        result.report(args.out)
    return json.dumps(result.to_json(), indent=2, ensure_ascii=False) if args.json else str(result)
