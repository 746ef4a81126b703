"""Examine every optimizer of the libraries that are installed, and write the table of docs/results/optimizers.md.

    python -m benchmarks.optimizers                  # all that are not in benchmarks/results/optimizers.json yet
    python -m benchmarks.optimizers timm SOAP        # these libraries or optimizers alone, again
    python -m benchmarks.optimizers --table          # only write the table

carried.py describes the examination. Settings are the libraries' defaults, except for a learning rate where it is required
or where the default diverges.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import markdown
from benchmarks.carried import Make, Result, examine

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results" / "optimizers.json", HERE.parent / "docs" / "results" / "optimizers.md"
START, END = "<!-- table -->", "<!-- end of the table -->"
TORCH = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Adafactor")
RATES = {"schedulefreesgd": 0.01, "dadaptlion": 0.01, "lbfgs": 0.001}


def setups(libraries: Sequence[str] = ()) -> Iterator[tuple[str, str, Make]]:
    """All set-ups of these libraries, or of all; no other library is imported."""
    for library in libraries or LIBRARIES:
        for name, make in LIBRARIES[library]():
            yield library, name, make


def of_torch() -> Iterator[tuple[str, Make]]:
    for name in TORCH:
        yield name, lambda m, n=name: getattr(torch.optim, n)(m.parameters(), lr=1e-3)
    yield "SGD(momentum)", lambda m: torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9)
    yield "SGD(momentum, fused)", lambda m: torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9, fused=True)
    yield "LBFGS", lambda m: torch.optim.LBFGS(m.parameters(), lr=1e-3, max_iter=2)


def of_timm() -> Iterator[tuple[str, Make]]:
    import timm.optim

    for name in (*timm.optim.list_optimizers(), "lookahead_adam"):
        yield name, lambda m, n=name: timm.optim.create_optimizer_v2(m, n, lr=1e-3, weight_decay=0.0)


def of_pytorch_optimizer() -> Iterator[tuple[str, Make]]:
    import pytorch_optimizer

    for name in pytorch_optimizer.get_supported_optimizers():
        yield name, lambda m, n=name: made_by_pytorch_optimizer(m, n)
    adam = torch.optim.Adam
    yield "Lookahead(Adam)", lambda m: pytorch_optimizer.Lookahead(adam(m.parameters(), lr=1e-3))
    yield "SAM(Adam)", lambda m: pytorch_optimizer.SAM(m.parameters(), adam, lr=1e-3)


def of_schedulefree() -> Iterator[tuple[str, Make]]:
    import schedulefree

    for name in ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"):
        yield name, lambda m, n=name: getattr(schedulefree, n)(m.parameters(), lr=1e-3)


def of_prodigyopt() -> Iterator[tuple[str, Make]]:
    import prodigyopt

    yield "Prodigy", lambda m: prodigyopt.Prodigy(m.parameters(), lr=1.0)


def of_transformers() -> Iterator[tuple[str, Make]]:
    import transformers.optimization

    yield "Adafactor", lambda m: transformers.optimization.Adafactor(m.parameters())


def of_bitsandbytes() -> Iterator[tuple[str, Make]]:
    import bitsandbytes

    for name in ("Adam", "AdamW", "Lion", "RMSprop", "Adagrad"):
        yield name, lambda m, n=name: getattr(bitsandbytes.optim, n)(m.parameters(), lr=1e-3)


LIBRARIES: dict[str, Callable[[], Iterator[tuple[str, Make]]]] = {
    "torch": of_torch,
    "timm": of_timm,
    "pytorch_optimizer": of_pytorch_optimizer,
    "schedulefree": of_schedulefree,
    "prodigyopt": of_prodigyopt,
    "transformers": of_transformers,
    "bitsandbytes": of_bitsandbytes,
}


def made_by_pytorch_optimizer(model: nn.Module, name: str) -> Any:
    import pytorch_optimizer

    kind = pytorch_optimizer.load_optimizer(name)
    if "muon" in name or name == "adago":
        groups = [[p for p in model.parameters() if (p.ndim >= 2) is matrix] for matrix in (True, False)]
        return kind([{"params": group, "use_muon": matrix} for group, matrix in zip(groups, (True, False), strict=True)])
    if name in ("lomo", "adalomo", "adammini"):
        return kind(model)
    if name == "spectralsphere":
        return kind([p for p in model.parameters() if p.ndim == 2])
    needed: dict[str, Any] = {"bsam": {"num_data": 100}, "ranger21": {"num_iterations": 1000, "lr": 1e-3}}.get(name, {})
    return kind(model.parameters(), **needed, **({"lr": RATES[name]} if name in RATES else {}))


def examined(library: str, name: str, make: Make) -> Result:
    """In double precision, or in single precision where the library allows no other."""
    error: BaseException | None = None
    for dtype in (torch.float32,) if library == "bitsandbytes" else (torch.float64, torch.float32):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return examine(library, name, make, dtype)
        except Exception as one:
            error = one
    return Result(library, name, error=f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}")


def row(result: Result) -> tuple[str, ...]:
    if result.error:
        return result.library, result.name, "not run here", result.error, "", "", ""
    if result.refused:
        return result.library, result.name, "refused", result.refused, "", "", ""
    equal = max(result.old, result.block_old) < (1e-6 if result.double else 1e-3)
    old = "equal" if equal else f"close (× {result.ratio:.1f})"
    copies = "no" if result.no_copies else "yes" if result.copies < 1e-3 else "near" if result.copies >= 1e-3 else "–"
    return result.library, result.name, "carried", old, f"{result.new:.1f}", copies, f"{result.block_new:.1f}"


def table(results: list[Result]) -> str:
    header = ("library", "optimizer", "", "existing entries", "new entries", "copies", "new blocks")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in dict.fromkeys(r.library for r in results))
    counts = []
    for library in dict.fromkeys(result.library for result in results):
        own = [result for result in results if result.library == library]
        fine, refused = (sum(row(result)[2] == word for result in own) for word in ("carried", "refused"))
        counts.append(f"{library}: {fine} of {len(own)} carried, {refused} refused, {len(own) - fine - refused} not run here")
    listed = "\n".join(f"- {count}" for count in counts)
    return f"{listed}\n\nVersions: {versions}.\n\n" + "\n".join(markdown.table(header, map(row, results)))


def load() -> list[Result]:
    return [Result(**one) for one in json.loads(RESULTS.read_text())] if RESULTS.exists() else []


def write(results: list[Result]) -> None:
    RESULTS.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


def write_table(results: list[Result]) -> None:
    text = PAGE.read_text()
    before, _, rest = text.partition(START)
    PAGE.write_text(f"{before}{START}\n\n{table(results)}\n\n{END}{rest.partition(END)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", help="libraries or optimizers to examine again")
    parser.add_argument("--table", action="store_true", help="only write the table of docs/results/optimizers.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = {(result.library, result.name): result for result in load()}
    if not options.table:
        library = torch.library.Library("torchvision", "DEF")  # timm imports torchvision, whose wheel may lack operators
        for name in ("nms", "qnms"):
            library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        order = list(setups())
        for owner, name, make in order:
            wanted = owner in options.which or name in options.which if options.which else (owner, name) not in known
            if wanted:
                known[owner, name] = examined(owner, name, make)
                print(" ".join(row(known[owner, name])), flush=True)
                write([known[one, other] for one, other, _ in order if (one, other) in known])
    write_table(list(known.values()) if options.table else load())


if __name__ == "__main__":
    main()
