"""What grows in models of other libraries: torch_geometric, neuralop, e3nn, and Transformers' mixtures of experts.

`widen(model, x, "*", factor=2)` on a small model of each kind. Parameters are randomised first, in double precision (complex
ones too) where the library allows it. A model counts when its outputs stay, on the example and on fresh inputs of another
size, and something grew. Forces, where a model computes some, are outputs. What is left out is listed with its reason.

    python -m benchmarks.coverage_others             # all: a few minutes
    python -m benchmarks.coverage_others GCN FNO     # some, merged into the results
"""

from __future__ import annotations

import copy
import importlib
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

RESULTS = Path(__file__).parent / "results" / "coverage_others.json"
DOUBLE = torch.float64
FACTOR = 2.0
INSIDE = ("output of the model", "model's input", "another direction", "looked up", "computes nothing", "fixed table")


@dataclass(frozen=True)
class Case:
    """A model of a library: how it is built, and inputs for it by a seed."""

    library: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    double: bool = True  # whether it runs in double precision


def graph(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    nodes = 9 + 2 * seed
    edges = torch.randint(nodes, (2, 3 * nodes), generator=generator)
    return torch.randn(nodes, 6, generator=generator, dtype=DOUBLE), edges


def field(dimensions: int) -> Callable[[int], tuple[Tensor, ...]]:
    def inputs(seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(2, 2, *[8 + 4 * seed] * dimensions, generator=generator, dtype=DOUBLE),)

    return inputs


def molecule(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 9, (4 + seed,), generator=generator), torch.randn(4 + seed, 3, generator=generator, dtype=DOUBLE)


def atoms(seed: int) -> tuple[Tensor, Tensor]:
    kinds, positions = molecule(seed)
    return nn.functional.one_hot(kinds % 3, 3).to(DOUBLE), positions


def words(seed: int) -> tuple[Tensor, ...]:
    return (torch.randint(30, (2, 6 + seed), generator=torch.Generator().manual_seed(seed)),)


def network(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(importlib.import_module("torch_geometric.nn"), name)(6, 8, 2, 4, **options)


class Stack(nn.Module):
    """Two layers of one kind, and a linear one."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        kind = getattr(importlib.import_module("torch_geometric.nn"), name)
        self.first, self.second, self.out = kind(6, 8, **options), kind(8, 8, **options), nn.Linear(8, 2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.out(torch.tanh(self.second(torch.tanh(self.first(x, edges)), edges)))


def every_pair(positions: Tensor) -> Tensor:
    index = torch.arange(len(positions))
    edges = torch.stack([index.repeat_interleave(len(index)), index.repeat(len(index))])
    return edges[:, edges[0] != edges[1]]


class Forces(nn.Module):
    """SchNet's energy, and its forces."""

    def __init__(self) -> None:
        super().__init__()
        schnet = importlib.import_module("torch_geometric.nn").SchNet
        sizes = {"hidden_channels": 8, "num_filters": 8, "num_interactions": 2, "num_gaussians": 6}
        self.net = schnet(**sizes, interaction_graph=self.neighbours)

    @staticmethod
    def neighbours(positions: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        edges = every_pair(positions)
        return edges, (positions[edges[0]] - positions[edges[1]]).norm(dim=-1)

    def forward(self, kinds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            positions = positions.detach().requires_grad_()
            energy = self.net(kinds, positions)
            (gradient,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        return energy, -gradient


class Equivariant(nn.Module):
    """One convolution of e3nn: a tensor product with spherical harmonics, whose weights a small network computes."""

    def __init__(self) -> None:
        super().__init__()
        o3 = importlib.import_module("e3nn.o3")
        radial = importlib.import_module("e3nn.nn").FullyConnectedNet
        self.harmonics = o3.Irreps("1x0e + 1x1o")
        self.enter = o3.Linear("3x0e", "4x0e")
        self.product = o3.FullyConnectedTensorProduct("4x0e", self.harmonics, "4x0e + 2x1o", shared_weights=False)
        self.radial = radial([5, 8, self.product.weight_numel], nn.functional.silu)
        self.out = o3.Linear("4x0e + 2x1o", "1x0e")
        self.head = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, kinds: Tensor, positions: Tensor) -> Tensor:
        edges = every_pair(positions)
        lines = positions[edges[0]] - positions[edges[1]]
        places = torch.arange(5, dtype=positions.dtype)
        weights = self.radial(torch.exp(-((lines.norm(dim=1, keepdim=True) - places) ** 2)))
        harmonics = importlib.import_module("e3nn.o3").spherical_harmonics(
            self.harmonics, lines, True, normalization="component"
        )
        messages = self.product(self.enter(kinds)[edges[0]], harmonics, weights)
        return self.head(self.out(messages.new_zeros(len(kinds), messages.shape[1]).index_add(0, edges[1], messages)))


def operator(dimensions: int, **options: Any) -> Callable[[], nn.Module]:
    sizes = {"n_modes": (4,) * dimensions, "hidden_channels": 8, "in_channels": 2, "out_channels": 1, "n_layers": 2}
    return lambda: importlib.import_module("neuralop.models").FNO(**sizes, **options)


def mixture(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from benchmarks.coverage import import_timm

        import_timm()  # torchvision's operators, which Transformers imports too
        library = importlib.import_module("transformers")
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
        sizes = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_experts_per_tok": 2, **heads}
        model: nn.Module = getattr(library, f"{name}ForCausalLM")(getattr(library, f"{name}Config")(**sizes, **options))
        return model

    return build


LAYERS = """
    GCNConv SAGEConv GraphConv TAGConv GATConv GATv2Conv TransformerConv SGConv ClusterGCNConv LEConv ResGatedGraphConv MFConv
    FeaStConv GENConv GeneralConv
""".split()
CASES: dict[str, Case] = {
    **{name: Case("torch_geometric", network(name), graph) for name in ("GCN", "GraphSAGE", "GIN", "EdgeCNN")},
    "GAT": Case("torch_geometric", network("GAT", heads=2), graph),
    "GATv2": Case("torch_geometric", network("GAT", v2=True), graph),
    "GCN with LayerNorm": Case("torch_geometric", network("GCN", norm="LayerNorm"), graph),
    **{name: Case("torch_geometric", lambda name=name: Stack(name), graph) for name in LAYERS},  # type: ignore[misc]
    "ChebConv": Case("torch_geometric", lambda: Stack("ChebConv", K=2), graph),
    "SchNet with forces": Case("torch_geometric", Forces, molecule),
    "FNO in 1 dimension": Case("neuralop", operator(1), field(1)),
    "FNO in 2 dimensions": Case("neuralop", operator(2), field(2)),
    "FNO in 3 dimensions": Case("neuralop", operator(3), field(3)),
    "FNO with group norm": Case("neuralop", operator(2, norm="group_norm"), field(2)),
    "TFNO (Tucker)": Case("neuralop", operator(2, factorization="tucker", rank=0.5), field(2)),
    "equivariant convolution": Case("e3nn", Equivariant, atoms),
    "Mixtral": Case("transformers", mixture("Mixtral", num_local_experts=4, intermediate_size=12), words, double=False),
    "Qwen3Moe": Case("transformers", mixture("Qwen3Moe", num_experts=4, moe_intermediate_size=12), words, double=False),
    "GptOss": Case("transformers", mixture("GptOss", num_local_experts=4, intermediate_size=12), words, double=False),
}


@torch.no_grad()
def randomise(model: nn.Module, double: bool) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for module in model.modules() if double else ():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(DOUBLE))
    for parameter in model.parameters():
        kind = (torch.complex128 if parameter.is_complex() else DOUBLE) if double else parameter.dtype
        parameter.data = parameter.detach().to(kind)
        parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=kind))
    return model.eval()


def flat(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output.detach().flatten()
    parts = output.values() if isinstance(output, dict) else output
    return torch.cat([flat(part) for part in parts if isinstance(part, (Tensor, tuple, list))])


def outputs(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    result = model(*inputs)
    return flat(result.logits if hasattr(result, "logits") else result)


def examine(case: Case) -> dict[str, Any]:
    import outgrow

    torch.manual_seed(0)
    model = randomise(case.build(), case.double)
    before = [outputs(model, case.inputs(seed)) for seed in (0, 1)]
    grown = copy.deepcopy(model)
    try:
        growth = outgrow.widen(grown, case.inputs(0), "*", factor=FACTOR)
    except outgrow.GrowthError as error:
        return {"library": case.library, "counts": False, "refused": str(error).replace("\n", " ")}
    after = [outputs(grown, case.inputs(seed)) for seed in (0, 1)]
    error = max(float((old - new).abs().max() / old.abs().max()) for old, new in zip(before, after, strict=True))
    left_out = [f"{skip.volume}: {skip.reason}" for skip in growth.skipped if not any(text in skip.reason for text in INSIDE)]
    return {
        "library": case.library,
        "counts": error < (1e-11 if case.double else 1e-5),
        "error": error,
        "ratio": round(growth.parameters[1] / growth.parameters[0], 2),
        "methods": dict(Counter(change.method for change in growth.plan.changes)),
        "left_out": left_out,
    }


def section() -> list[str]:
    """The part of docs/results/coverage.md on other libraries."""
    results = json.loads(RESULTS.read_text())
    models = results["models"]
    counted = sum(result["counts"] for result in models.values())
    lines = [
        "",
        "## Other libraries",
        "",
        f'`outgrow.widen(model, x, "*", factor={FACTOR:g})` on small models of other libraries, randomised, on the example',
        "and on fresh inputs of another size. Made by `make coverage` from `benchmarks/results/coverage_others.json`; see",
        "`benchmarks/coverage_others.py`.",
        "",
        f"**{counted} of {len(models)} models count** ({results['versions']}).",
        "",
        "| library | model | counts | parameters × | error | volumes grown | left out |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, result in models.items():
        if "refused" in result:
            lines.append(f"| {result['library']} | {name} | no | | {result['refused'][:300].replace('|', '/')} | | |")
            continue
        methods = ", ".join(f"{count} {method}" for method, count in result["methods"].items())
        reasons = "<br>".join(reason[:330].replace("|", "/") for reason in result["left_out"][:3])
        mark = "yes" if result["counts"] else "no"
        lines.append(
            f"| {result['library']} | {name} | {mark} | {result['ratio']:.2f} | {result['error']:.0e} | {methods} | {reasons} |"
        )
    return lines


def main() -> None:
    warnings.filterwarnings("ignore")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"models": {}}
    for name in sys.argv[1:] or CASES:
        result = examine(CASES[name])
        results["models"][name] = result
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(name, {key: value for key, value in result.items() if key != "left_out"}, flush=True)
    results["models"] = {name: results["models"][name] for name in CASES if name in results["models"]}
    libraries = [importlib.import_module(name) for name in ("torch_geometric", "neuralop", "e3nn", "transformers")]
    found = ", ".join(f"{library.__name__} {library.__version__}" for library in libraries)
    results["versions"] = f"torch {torch.__version__.partition('+')[0]}, {found}"
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    from benchmarks import coverage

    coverage.write_page(json.loads(coverage.RESULTS.read_text()))


if __name__ == "__main__":
    main()
