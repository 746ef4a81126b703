"""The fused engine beside the plain loop: the first hundred losses of some arms, and what rounding alone does to them.

    python -m experiments.agreement --device cuda --data data        writes results/agreement.json

Four arms (two widened, one deepened, and a small one) are trained for an epoch by the plain loop, grown, and from there trained
for a hundred steps by each engine on the same batches. Adam makes much of little: where a gradient is nearly zero, its sign
decides, so that two runs that differ by rounding part after some steps. How fast is measured too, by a plain loop whose
weights begin one unit in the last place off. The fused engine adds in another order, and sets out a little earlier; it agrees
if it comes no farther from the plain loop than that one does, but for a small factor.

That whole runs end alike is another question: `python -m experiments ARM --engine eager` trains an arm by the plain loop, and
`results/eager` (on a GPU) and `results/eager-cpu` have some.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from experiments.reading.result_files import facts
from experiments.setting.arms import Arm, paper_arms
from experiments.setting.data import Data, cifar10
from experiments.setting.more_arms import more_arms
from experiments.setting.segments import all_segments, segments_of
from experiments.training.eager import Eager
from experiments.training.store import Store
from experiments.training.train_segments import BATCH, Training

ARMS = ("BI-Std", "APB-R2WiderR", "APB-R2DeeperR", "VIZ-R2R")
STEPS = 100
HERE = Path(__file__).parent


def short(arm: Arm, per_epoch: int) -> Arm:
    """An epoch, a growth, and a hundred steps."""
    first, second = arm.stages
    return replace(arm, stages=(replace(first, epochs=1), replace(second, epochs=STEPS / per_epoch)))


class Jostled(Eager):
    """A plain loop whose weights are moved by one unit in the last place, up or down by chance, before it begins."""

    def __init__(self, *what: Any, **more: Any) -> None:
        super().__init__(*what, **more)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for model in self.models:
                for parameter in model.parameters():
                    sign = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter) * 2 - 1
                    parameter.mul_(1 + sign * torch.finfo(parameter.dtype).eps)


def losses(
    arms: Sequence[Arm], data: Data, engine: Callable[..., Any], shape: Any, taught: Path, batch: int
) -> dict[str, list[float]]:
    """The losses of each arm's last stage, from networks that were taught already."""
    with tempfile.TemporaryDirectory() as folder:
        for file in taught.iterdir():
            (Path(folder) / file.name).write_bytes(file.read_bytes())
        store = Store(Path(folder))
        Training(all_segments(arms, [0]), data, engine, shape, store, batch=batch).run()
        states = {arm.name: store.state(segments_of(arm, 0)[-1]) for arm in arms}
    return {name: state["curve"]["steps"] for name, state in states.items() if state is not None}


def compare(data: Data, device: str, engines: dict[str, tuple[Callable[..., Any], Any]], batch: int = BATCH) -> dict[str, Any]:
    """What each engine makes of the three arms; the first one is the reference."""
    arms = [short(arm, len(data.labels) // batch) for arm in (*paper_arms(), *more_arms()) if arm.name in ARMS]
    teachers = [replace(arm, stages=arm.stages[:1]) for arm in arms]
    with tempfile.TemporaryDirectory() as folder:
        engine, shape = engines["eager"]
        Training(all_segments(teachers, [0]), data, engine, shape, Store(Path(folder)), batch=batch).run()
        found = {name: losses(arms, data, *made, Path(folder), batch) for name, made in engines.items()}
    return {"arms": list(ARMS), "losses": found, **facts(device)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.agreement", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "agreement.json")
    options = parser.parse_args(arguments)
    from experiments.training.fused.fleet import Fleet
    from experiments.training.fused.rows import shape_of

    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    engines: dict[str, tuple[Callable[..., Any], Any]] = {
        "eager": (lambda *what, **more: Eager(*what, device=options.device, **more), shape_of),
        "one ulp off": (lambda *what, **more: Jostled(*what, device=options.device, **more), shape_of),
        "fused": (lambda *what, **more: Fleet(*what, device=options.device, precision="ieee", **more), shape_of),
        "fused, tf32": (lambda *what, **more: Fleet(*what, device=options.device, precision="tf32", **more), shape_of),
    }
    result = {"command": f"python -m experiments.agreement --device {options.device}"}
    result |= compare(cifar10(options.data), options.device, engines)
    options.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    for arm in ARMS:
        for name in list(engines)[1:]:
            print(
                f"{arm:16} {name:12} after 1, 10, 100 steps: "
                + ", ".join(f"{apart(result, name, arm, n):.1e}" for n in (1, 10, 100))
            )
    return 0


def apart(result: dict[str, Any], engine: str, arm: str, steps: int) -> float:
    """The largest difference of losses from the plain loop's within some steps."""
    mine, theirs = result["losses"][engine][arm], result["losses"]["eager"][arm]
    return max(abs(one - other) for one, other in zip(mine[:steps], theirs[:steps], strict=True))


if __name__ == "__main__":
    sys.exit(main())
