"""Messages along the edges of a graph: rows chosen and collected by index, sparse matrices, torch_geometric's networks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from tests.helpers.grow_everywhere import DTYPE, assert_exact_everywhere, growable, randomised, reasons

NODES, EDGES = 7, 20


def graph(seed: int) -> tuple[Tensor, Tensor]:
    """Features of some nodes, and edges between them."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(NODES + seed, 5, generator=generator, dtype=DTYPE)
    return features, torch.randint(NODES + seed, (2, EDGES + seed), generator=generator)


def adjacency(edges: Tensor, nodes: int) -> Tensor:
    return torch.sparse_coo_tensor(edges, torch.ones(edges.shape[1], dtype=DTYPE), (nodes, nodes)).coalesce()


class Messages(nn.Module):
    """A layer that sends messages along edges; `collect` combines them."""

    def __init__(self, collect: str) -> None:
        super().__init__()
        self.enter, self.message, self.leave = nn.Linear(5, 6), nn.Linear(6, 4), nn.Linear(4, 2)
        self.collect = collect

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        hidden = torch.tanh(self.enter(x))
        sent = self.message(hidden[edges[0]])
        return self.leave(torch.tanh(COLLECTORS[self.collect](sent, edges[1], x.shape[0])))


def spread(index: Tensor, like: Tensor) -> Tensor:
    return index.unsqueeze(-1).expand_as(like)


def mean(sent: Tensor, to: Tensor, nodes: int) -> Tensor:
    """The mean as in torch_geometric: a sum, divided by counts that are expanded over the features."""
    count = sent.new_zeros(nodes).scatter_add_(0, to, sent.new_ones(len(to))).clamp(min=1)
    total = sent.new_zeros(nodes, sent.shape[1]).scatter_add_(0, spread(to, sent), sent)
    return total / count.view(-1, 1).expand_as(total)


COLLECTORS: dict[str, Any] = {
    "index_add": lambda sent, to, n: sent.new_zeros(n, sent.shape[1]).index_add_(0, to, sent),
    "index_add to ones": lambda sent, to, n: torch.ones(n, sent.shape[1], dtype=sent.dtype).index_add(0, to, sent),
    "scatter_add": lambda sent, to, n: torch.zeros(n, sent.shape[1], dtype=DTYPE).scatter_add(0, spread(to, sent), sent),
    "mean": mean,
    **{
        how: lambda sent, to, n, how=how: sent.new_zeros(n, sent.shape[1]).scatter_reduce(
            0, spread(to, sent), sent, how, include_self=False
        )
        for how in ("amax", "amin", "prod", "sum")
    },
    "index_reduce": lambda sent, to, n: sent.new_zeros(n, sent.shape[1]).index_reduce(0, to, sent, "mean"),
    "index_put": lambda sent, to, n: sent.new_zeros(n, sent.shape[1]).index_put((to,), sent, accumulate=True),
    "gather": lambda sent, to, n: sent.gather(0, to[:n].unsqueeze(-1).repeat(1, sent.shape[1])),
    "index_copy": lambda sent, to, n: sent.new_zeros(n, sent.shape[1]).index_copy(0, torch.arange(n), sent[:n]),
    "sparse.mm": lambda sent, to, n: torch.sparse.mm(
        torch.sparse_coo_tensor(torch.stack([to, torch.arange(len(to))]), torch.ones(len(to), dtype=DTYPE), (n, len(to))), sent
    ),
}


@pytest.mark.filterwarnings("ignore:index_reduce", "ignore:Sparse invariant checks")
@pytest.mark.parametrize("collect", COLLECTORS)
def test_messages_that_are_collected_by_index_grow_exactly_by_every_method(collect: str) -> None:
    model = randomised(Messages(collect))
    assert_exact_everywhere(model, graph(0), graph(1), {"enter", "message"})
    assert growable(model, graph(0))["message"] == ("r2r", "net2net", "netmorph", "mean")


class PerEntry(nn.Module):
    """Every entry has its own index, so units are not treated alike."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.enter, self.leave, self.how = nn.Linear(5, 6), nn.Linear(6, 2), how

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        hidden = self.enter(x)
        if self.how == "gather":
            return self.leave(hidden.gather(0, index))
        if self.how == "number":  # an index expanded by a number in the code reaches none of the new units
            return self.leave(torch.zeros_like(hidden).scatter_add(0, index[:, :1].expand(-1, 6), hidden))
        return self.leave(torch.zeros_like(hidden).scatter_add(0, index, hidden))


class Inserted(nn.Module):
    """Features of images take the places of some tokens, as in LLaVA; `expand` makes the mask as large as the tokens."""

    def __init__(self, expand: Any) -> None:
        super().__init__()
        self.token, self.image, self.leave, self.expand = nn.Embedding(9, 6), nn.Linear(5, 6), nn.Linear(6, 2), expand

    def forward(self, tokens: Tensor, images: Tensor) -> Tensor:
        hidden = self.token(tokens)
        return self.leave(torch.tanh(hidden.masked_scatter(self.expand(tokens == 0, hidden), self.image(images))))


def inserted(batch: int) -> tuple[Tensor, Tensor]:
    tokens = torch.arange(1, 9).repeat(batch, 1)
    tokens[:, 2:4] = 0
    return tokens, torch.randn(batch * 2, 5, generator=torch.Generator().manual_seed(batch), dtype=DTYPE)


@pytest.mark.parametrize(
    "expand", [lambda mask, like: mask.unsqueeze(-1).expand_as(like), lambda mask, like: mask.unsqueeze(-1)]
)
def test_rows_that_take_the_places_of_others_grow_with_them(expand: Any) -> None:
    model = randomised(Inserted(expand))
    assert_exact_everywhere(model, inserted(2), inserted(3), {"token"})


def test_a_mask_per_entry_is_refused() -> None:
    model = randomised(Inserted(lambda mask, like: mask.unsqueeze(-1).expand_as(like) & (like > -100)))
    assert "selected by index" in reasons(model, inserted(2))["token"]


@pytest.mark.parametrize("how", ["gather", "scatter_add"])
def test_an_index_per_entry_is_refused(how: str) -> None:
    x, index = torch.randn(4, 5), torch.randint(4, (4, 6))
    assert "entry by entry" in reasons(PerEntry(how), (x, index))["enter"]


def test_an_index_that_new_units_would_outgrow_is_refused_and_nothing_changes() -> None:
    model, example = PerEntry("number"), (torch.randn(4, 5), torch.randint(4, (4, 6)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(outgrow.GrowthError, match="index of 6 for 8 units"):
        outgrow.widen(model, example, "enter", by=2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class Neighbours(nn.Module):
    """Sums over neighbours by a sparse matrix, passed as an argument or stored as a buffer."""

    def __init__(self, kept: Tensor | None = None) -> None:
        super().__init__()
        self.enter, self.message, self.leave = nn.Linear(5, 6), nn.Linear(6, 4), nn.Linear(4, 2)
        self.register_buffer("kept", kept)

    def forward(self, x: Tensor, given: Tensor | None = None) -> Tensor:
        matrix = self.kept if given is None else given
        return self.leave((matrix @ self.message(self.enter(x).relu())).relu())


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", ["coo", "csr", "buffer"])
def test_sparse_matrices_carry_units_along(kind: str) -> None:
    x, edges = graph(0)
    matrix = adjacency(edges, NODES)
    model = randomised(Neighbours(matrix if kind == "buffer" else None))
    matrix = matrix.to_sparse_csr() if kind == "csr" else matrix
    example, fresh = ((x,), (2 * x,)) if kind == "buffer" else ((x, matrix), (x.sin(), matrix))
    assert_exact_everywhere(model, example, fresh, {"enter", "message"})


def test_scores_as_products_and_sums_are_read_by_their_parameter() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Linear(5, 6), nn.Linear(6, 2)
            self.attention = nn.Parameter(torch.randn(1, 6))

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.enter(x)
            return self.leave(hidden) * (hidden * self.attention).sum(-1, keepdim=True)

    model = randomised(Scores())
    example = graph(0)[0]
    assert_exact_everywhere(model, example, graph(1)[0], {"enter"})
    outgrow.widen(model, example, "enter", by=2, method="r2r")
    assert torch.equal(model.attention[0, 6], -model.attention[0, 7])


def test_a_parameter_that_also_scales_can_not_cancel() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Linear(5, 6), nn.Linear(6, 2)
            self.scale = nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.enter(x)
            return self.leave(hidden * self.scale) + (torch.tanh(hidden) * self.scale).sum(-1, keepdim=True)

    model = randomised(Both())
    methods = growable(model, graph(0)[0])["enter"]
    assert not {"r2r", "net2net"} & set(methods)
    assert_exact_everywhere(model, graph(0)[0], graph(1)[0], {"enter"})


geometric = {  # model, its options, the volumes that grow
    "GCN": ({}, {"convs.0.lin"}),
    "GCN with batch norm": ({"norm": "BatchNorm"}, {"convs.0.lin"}),
    "GCN, all layers read": ({"jk": "cat"}, {"convs.0.lin", "convs.1.lin"}),
    "GraphSAGE": ({}, {"convs.0.lin_l"}),
    "GraphSAGE by maximum": ({"aggr": "max"}, {"convs.0.lin_l"}),
    "GIN": ({}, {"convs.0.nn.lins.0", "convs.0.nn.lins.1", "convs.1.nn.lins.0"}),
    "GAT": ({}, {"convs.0.lin"}),
    "GAT of two heads": ({"heads": 2}, {"convs.0.lin", "convs.0.lin#2", "convs.1.lin"}),
    "GAT of version 2": ({"v2": True}, {"convs.0.lin_l"}),
    "EdgeCNN": ({}, {"convs.0.nn.lins.0", "convs.0.nn.lins.1", "convs.1.nn.lins.0"}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", geometric)
def test_networks_of_torch_geometric_grow_exactly(name: str) -> None:
    library = pytest.importorskip("torch_geometric.nn")
    options, names = geometric[name]
    model = randomised(getattr(library, name.split()[0].strip(","))(5, 6, 2, 2, **options))
    assert_exact_everywhere(model, graph(0), graph(1), names)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pool", ["global_mean_pool", "global_max_pool", "global_add_pool"])
def test_graphs_that_are_pooled_into_one_vector_each(pool: str) -> None:
    library = pytest.importorskip("torch_geometric.nn")

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.leave = library.GraphSAGE(5, 6, 2), nn.Linear(6, 2)

        def forward(self, x: Tensor, edges: Tensor, graphs: Tensor) -> Tensor:
            return self.leave(getattr(library, pool)(self.net(x, edges), graphs))

    example, fresh = ((*graph(seed), torch.arange(NODES + seed) // 4) for seed in (0, 1))
    assert_exact_everywhere(randomised(Pooled()), example, fresh, {"net.convs.0.lin_l", "net.convs.1.lin_l"})
