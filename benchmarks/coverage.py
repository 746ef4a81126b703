"""How many of timm's model families grow: `widen(model, x, "*", factor=1.5)` on the smallest model of each.

A family counts when, in float64 and with every parameter and buffer randomised first,
- the output agrees within ten times the model's own one-ulp sensitivity (and never worse than 1e-9 of the largest output),
  on the example and on fresh inputs of another batch size;
- parameters grew at least 1.3 ×, or what was left out is refused with a reason (column "left out");
- class and state_dict keys are unchanged;
- training runs, and at least 90% of the new weights (or as large a share as of the old ones) get a gradient within three steps.

    python -m benchmarks.coverage                  # all families: hours on two cores
    python -m benchmarks.coverage resnet levit     # some, merged into the results
    python -m benchmarks.coverage --device cuda --workers 12
    python -m benchmarks.coverage --table          # only write docs/results/coverage.md again
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
import traceback
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import coverage_others
from benchmarks.learning import new_entries

HERE = Path(__file__).parent
FAMILIES = HERE / "timm_families.json"
RESULTS = HERE / "results" / "coverage.json"
PAGE = HERE.parent / "docs" / "results" / "coverage.md"
LARGE = 60_000_000
FACTOR = 1.5
PLAIN, PATIENCE = 5, 20.0  # plain places to try, and seconds for all places of a family
DRAWS = 3


def import_timm() -> Any:
    """timm imports torchvision, whose wheel may lack its operators beside a CPU build of torch."""
    try:
        import timm
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import_timm.library = library  # type: ignore[attr-defined]
        for name in [name for name in sys.modules if name.startswith(("torchvision", "timm"))]:
            del sys.modules[name]
        import timm
    return timm


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> None:
    """Move every parameter and floating buffer away from where it was initialised; variances stay positive."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        if name.endswith("running_var"):
            tensor.mul_(1 + noise.abs())
        elif isinstance(tensor, nn.Parameter) or name.endswith("running_mean"):
            spread = float(tensor.std(correction=0)) if tensor.numel() > 1 else 0.0
            tensor.add_(noise * max(spread, 0.05) * 0.5)
        else:  # masks, position tables: their zeros and infinities stay
            tensor.mul_(1 + 0.1 * noise)


def compare(old: Tensor, new: Tensor) -> float:
    if old.shape != new.shape or not torch.isfinite(new).all() or not torch.isfinite(old).all():
        return float("inf")
    return float((old - new).abs().max() / old.abs().max())


def flat(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    parts = [flat(part) for part in (output.values() if isinstance(output, dict) else output) if part is not None]
    return torch.cat([part.flatten() for part in parts])


@torch.no_grad()
def ulp_sensitivity(model: nn.Module, x: Tensor, base: Tensor) -> float:
    """How far the output moves when every weight moves by one unit in the last place, up or down: the worst of a few draws."""
    generator = torch.Generator().manual_seed(1)
    saved = {name: parameter.clone() for name, parameter in model.named_parameters()}
    worst = 0.0
    for _ in range(DRAWS):
        for name, parameter in model.named_parameters():
            towards = torch.where(torch.rand(parameter.shape, generator=generator) < 0.5, -float("inf"), float("inf"))
            parameter.copy_(torch.nextafter(saved[name], towards.to(parameter)))
        worst = max(worst, compare(base, flat(model(x))))
    for name, parameter in model.named_parameters():
        parameter.copy_(saved[name])
    return worst


def gradient_shares(model: nn.Module, plan: Any, shape: tuple[int, ...], batch: int) -> tuple[float, float]:
    """Shares of new and of old weights that get a gradient within three steps of training.

    The share of the old ones is taken tensor by tensor and weighted as the new ones are spread over them: a layer behind pooled
    features leaves many weights without gradient on a small batch, new and old alike.
    """
    torch.manual_seed(0)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seen = {name: torch.zeros(p.shape, dtype=torch.bool) for name, p in model.named_parameters()}
    device = next(model.parameters()).device
    for _ in range(3):
        optimizer.zero_grad()
        output = flat(model(torch.randn(batch, *shape, dtype=torch.float64).to(device)))
        loss = (output * torch.randn_like(output)).mean()
        loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                seen[name] |= (parameter.grad != 0).cpu()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    total = new_seen = old_seen = 0.0
    for name, flags in seen.items():
        mask = new_entries(plan, name, flags.shape)
        count = int(mask.sum())
        total += count
        new_seen += int((flags & mask).sum())
        old_seen += count * int((flags & ~mask).sum()) / max(int((~mask).sum()), 1)
    return new_seen / max(total, 1), old_seen / max(total, 1)


def prepare(entry: dict[str, Any], device: str) -> tuple[nn.Module, Tensor]:
    """A randomised model, and an example for it."""
    torch.manual_seed(0)
    model = import_timm().create_model(entry["model"]).double().eval()
    randomise(model)
    example = torch.randn(1 if entry["parameters"] > LARGE else 2, *entry["input"], dtype=torch.float64)
    return model.to(device), example.to(device)


def examine(entry: dict[str, Any], device: str) -> dict[str, Any]:
    """Grow one model and measure everything."""
    import outgrow

    model, example = prepare(entry, device)
    batch, *shape = example.shape
    fresh = torch.randn(batch + 1, *shape, dtype=torch.float64).to(device)
    keys, kind = list(model.state_dict()), type(model)
    with torch.no_grad():
        before = [flat(model(x)) for x in (example, fresh)]
    sensitivity = ulp_sensitivity(model, example, before[0])
    started = time.perf_counter()
    growth = outgrow.widen(model, example, "*", factor=FACTOR, check=False)
    seconds = time.perf_counter() - started
    with torch.no_grad():
        errors = [compare(old, flat(model(x))) for old, x in zip(before, (example, fresh), strict=True)]
    allowed = min(max(10 * sensitivity, 32 * torch.finfo(torch.float64).eps), 1e-9)
    ratio = growth.parameters[1] / growth.parameters[0]
    left_out = [skip for skip in growth.skipped if not is_boundary(skip.reason)]
    result = {
        "model": entry["model"],
        "parameters": growth.parameters,
        "ratio": round(ratio, 3),
        "error": max(errors),
        "allowed": allowed,
        "sensitivity": sensitivity,
        "volumes": len(growth.plan.changes),
        "methods": dict(Counter(change.method for change in growth.plan.changes)),
        "left_out": len(left_out),
        "reasons": [f"{skip.volume}: {skip.reason}" for skip in left_out][:12],
        "same_class_and_keys": type(model) is kind and list(model.state_dict()) == keys,
        "seconds": round(seconds, 2),
    }
    new, old = gradient_shares(model, growth.plan, tuple(shape), 2 if entry["parameters"] > LARGE else 8)
    result |= {"gradient_new": round(new, 4), "gradient_old": round(old, 4)}
    exact = max(errors) <= allowed
    learns = new >= 0.9 or new >= old - 1e-3
    result["counts"] = bool(exact and result["same_class_and_keys"] and learns and (ratio >= 1.3 or left_out))
    return result


def deepen_everywhere(entry: dict[str, Any], device: str) -> dict[str, Any]:
    """Deepen a fresh model at every place where a block of its own kind can stand; at a few plain ones if there is none."""
    import outgrow

    model, example = prepare(entry, device)
    with torch.no_grad():
        before = flat(model(example))
    allowed = min(max(10 * ulp_sensitivity(model, example, before), 32 * torch.finfo(torch.float64).eps), 1e-9)
    growable = [place for place in outgrow.places(model, example) if place.growable]
    own = [place.name for place in growable if place.own]
    chosen = own or [place.name for place in growable][:: max(1, len(growable) // PLAIN)][:PLAIN]
    errors: list[float] = []
    refused: list[str] = []
    started = time.perf_counter()
    for name in chosen:
        if time.perf_counter() - started > PATIENCE:
            break
        grown = copy.deepcopy(model)
        try:
            outgrow.deepen(grown, example, name, method="r2r" if own else "residual", check=False)
            with torch.no_grad():
                after = flat(grown(example))
            errors.append(compare(before, after))
            if allowed < errors[-1] < 2 * allowed:  # a grown network has a sensitivity of its own
                allowed = min(max(allowed, 10 * ulp_sensitivity(grown, example, after)), 1e-9)
        except outgrow.GrowthError as error:
            refused.append(f"{name}: {error}")
    return {
        "own": len(own),
        "places": len(growable),
        "tried": len(errors) + len(refused),
        "exact": sum(error <= allowed for error in errors),
        "error": max(errors, default=0.0),
        "allowed": allowed,
        "refused": refused[:3],
    }


def job(family: str, entry: dict[str, Any], device: str) -> tuple[str, dict[str, Any]]:
    """One family in a process of its own; whatever goes wrong becomes its result."""
    warnings.filterwarnings("ignore")
    try:
        result = examine(entry, device)
        torch.cuda.empty_cache()
        return family, {**result, "deepen": deepen_everywhere(entry, device)}
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return family, {"model": entry["model"], "counts": False, "refused": f"{type(error).__name__} ({where}): {error}"}


def is_boundary(reason: str) -> bool:
    """Inputs, outputs and positions never grow; the other direction of a grid that grows is not left out either."""
    return any(
        text in reason
        for text in (
            "output of the model",
            "model's input",
            "not the model's own",
            "another direction",
            "looked up",
            "fixed table",
        )
    )


def deepening(depth: dict[str, Any] | None) -> str:
    """How a family's deepenings went."""
    if depth is None:
        return ""
    return f"{depth['exact']} of {depth['tried']}" + ("" if depth["own"] else " plain")


def write_page(results: dict[str, Any]) -> None:
    families = json.loads(FAMILIES.read_text())
    counted = sum(result.get("counts", False) for result in results["families"].values())
    depths = [result["deepen"] for result in results["families"].values() if "deepen" in result]
    deepened = sum(depth["tried"] == depth["exact"] > 0 for depth in depths)
    places = sum(depth["own"] for depth in depths)
    lines = [
        "# Coverage of timm's model families",
        "",
        f'`outgrow.widen(model, x, "*", factor={FACTOR})` on the smallest model of each of timm\'s {len(families)}',
        "families, in float64, every parameter and buffer randomised first. Made by `make coverage` from",
        "`benchmarks/results/coverage.json`; what the columns mean and when a family counts is described in",
        "`benchmarks/coverage.py`.",
        "",
        f"**{counted} of {len(families)} families count** ({len(results['families'])} examined; {results['versions']}).",
        "",
        f"**{deepened} can be deepened**, exactly at every place that was tried: by a block of their own kind behind "
        f"{places} places, and where a family has none (“plain”), by an `outgrow.ResidualBlock`.",
        "",
        "| family | model | counts | parameters × | error | allowed | volumes grown | left out | new weights with gradient | "
        "deepened |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for family in families:
        result = results["families"].get(family)
        if result is None:
            lines.append(f"| {family} | {families[family]['model']} | not examined | | | | | | | |")
        elif "refused" in result:
            lines.append(f"| {family} | {result['model']} | no | | {result['refused'][:120].replace('|', '/')} | | | | | |")
        else:
            mark = "yes" if result["counts"] else "no"
            methods = ", ".join(f"{count} {name}" for name, count in result["methods"].items())
            lines.append(
                f"| {family} | {result['model']} | {mark} | {result['ratio']:.2f} | {result['error']:.0e} | "
                f"{result['allowed']:.0e} | {methods} | {result['left_out']} | {result['gradient_new']:.0%} | "
                f"{deepening(result.get('deepen'))} |"
            )
    lines += ["", "## What was left out, and why", ""]
    for family, result in results["families"].items():
        if result.get("reasons"):
            lines.append(f"- **{family}**")
            lines += [f"  - {reason}" for reason in result["reasons"][:4]]
            if result["left_out"] > 4:
                lines.append(f"  - … and {result['left_out'] - 4} more")
    PAGE.write_text("\n".join([*lines, *coverage_others.section()]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="families to examine (default: all, smallest first)")
    parser.add_argument("--missing", action="store_true", help="only those without a result that counts")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="processes side by side")
    parser.add_argument("--table", action="store_true", help="only write docs/results/coverage.md again")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    families = json.loads(FAMILIES.read_text())
    RESULTS.parent.mkdir(exist_ok=True)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"families": {}}
    timm = import_timm()
    if not arguments.table:
        results["versions"] = f"torch {torch.__version__.partition('+')[0]}, timm {timm.__version__}, {arguments.device}"
        results["command"] = f"python -m benchmarks.coverage --device {arguments.device}"
    names = arguments.families or sorted(families, key=lambda family: families[family]["parameters"])
    if arguments.missing:
        names = [name for name in names if not results["families"].get(name, {}).get("counts")]
    jobs = [] if arguments.table else [(family, families[family], arguments.device) for family in names]
    with ProcessPoolExecutor(arguments.workers, get_context("spawn")) as pool:
        for number, done in enumerate(as_completed([pool.submit(job, *each) for each in jobs]), start=1):
            family, result = done.result()
            results["families"][family] = result
            mark = "counts" if result["counts"] else "does not count"
            shown = {key: value for key, value in result.items() if key not in ("reasons", "methods")}
            print(f"[{number}/{len(names)}] {family}: {mark}", shown, flush=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    write_page(results)
    print(f"{sum(r['counts'] for r in results['families'].values())} of {len(families)} families count; see {PAGE}")


if __name__ == "__main__":
    main()
