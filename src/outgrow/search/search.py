"""Architecture search by growth: the public call, and its result."""

from __future__ import annotations

import os
from collections.abc import Callable
from numbers import Real
from typing import Any

from torch import nn

from outgrow.errors import SearchError
from outgrow.model.example import Example
from outgrow.search.artifacts import Models, open_store
from outgrow.search.description import Search
from outgrow.search.fingerprint import check_same, fingerprint
from outgrow.search.objectives import Objectives
from outgrow.search.patience import release
from outgrow.search.records import Book, Record, complete, pareto_front
from outgrow.search.report_page import page
from outgrow.search.space import Space
from outgrow.search.storages import (
    FACTS,
    adopt_study,
    check_exists,
    check_facts,
    check_kind,
    create_study,
    default_artifacts,
    load_study,
    objectives_of,
    open_storage,
    reachable,
)
from outgrow.search.worker import Worker
from outgrow.text.tables import make_table, rounded
from outgrow.wrong_arguments import usage


class SearchResult:
    """The trials of a study: the best ones, their models, and a report. `print(result)` shows the front as a table.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> def train(model, optimizer, trial):
        ...     return 1 / model[0].out_features
        >>> space = Space(factors=(1.5,), deepen=())
        >>> result = search(model, torch.zeros(1, 4), space, train, "error", trials=2, quiet=True)
        >>> [(record.number, record.parent, record.growth) for record in result.records]
        [(0, None, ()), (1, 0, ("Widen '0' × 1.5",))]
        >>> result.load(result.best)[0].out_features
        12
    """

    def __init__(self, study: Any, slots: int, attempts: int = 5, models: Models | None = None) -> None:
        self.study, self.objectives, self._models = study, objectives_of(study), models
        records = [Record.of(trial) for trial in study.get_trials(deepcopy=False)]
        self.records = Book(records, slots, attempts).settled()

    @property
    def front(self) -> list[Record]:
        """The complete trials that no other dominates, the best first by the first objective."""
        return pareto_front(self.records, self.objectives)

    @property
    def best(self) -> Record:
        """The complete trial that is best by the first objective."""
        found = self.front
        if not found:
            raise SearchError(f"no trial of the study {self.study.study_name!r} is complete")
        return found[0]

    def load(self, record: Record | int | None = None) -> nn.Module:
        """The trained model of a trial: a record, a number, or by default the best."""
        return self.load_with_optimizer(record)[0]

    def load_with_optimizer(self, record: Record | int | None = None) -> tuple[nn.Module, Any]:
        """The trained model of a trial and its optimizer, to train on."""
        if self._models is None:
            raise SearchError("this result was read from a storage alone: outgrow.search returns one that can load models")
        if isinstance(record, int):
            found = [one for one in self.records if one.number == record]
            if not found:
                raise SearchError(f"there is no trial {record}")
            record = found[0]
        return self._models.load(record or self.best)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write a page with the Pareto front, the tree of trials and a table of them; it loads nothing from elsewhere."""
        from outgrow.saving.atomic_write import write_plain

        write_plain(path, page(self.study.study_name, self.records, self.objectives).encode(), SearchError)

    def to_json(self) -> dict[str, Any]:
        """Plain data: the objectives, and all trials."""
        ways = dict(zip(self.objectives.names, self.objectives.directions, strict=True))
        return {"study": self.study.study_name, "objectives": ways, "trials": [one.to_json() for one in self.records]}

    def __str__(self) -> str:
        names = self.objectives.names
        rows = [
            (
                str(record.number),
                "–" if record.parent is None else str(record.parent),
                "; ".join(record.growth) or "–",
                *(f"{value:.4g}" for value in record.values),
                *(() if "parameters" in names else (rounded(record.parameters),)),
            )
            for record in self.front
        ]
        header = ("trial", "from", "growth", *names, *(() if "parameters" in names else ("parameters",)))
        failed = len(self.records) - len(complete(self.records))
        said = f"{len(complete(self.records))} trials complete, {failed} without a result; {len(rows)} that no other dominates:"
        return f"{said}\n\n{make_table(header, rows)}"

    __repr__ = __str__


@usage("outgrow.search(parent, example, outgrow.Space(), train, 'error', study='digits', storage='search.log')")
def search(
    parent: nn.Module,
    example: Example,
    space: Space,
    train: Callable[[Any, Any, Any], Any],
    objectives: Any,
    study: Any = "search",
    *,
    storage: Any = None,
    optimizer: Callable[[nn.Module], Any] | None = None,
    sampler: str = "evolution",
    trials: int = 50,
    population: int = 8,
    seed: int = 0,
    artifacts: Any = None,
    lease: float = 60.0,
    attempts: int = 5,
    minutes: float | None = None,
    quiet: bool = False,
) -> SearchResult:
    """Search for architectures by growth: every trial grows the trained model of another trial exactly, and trains it briefly.

    The first trial trains the parent itself. Every other one takes a complete trial as its parent, grows its model by
    transforms drawn from the space, with weights and optimizer state inherited exactly, and trains on. A study in a storage is
    continued by the same call, and may be shared by any number of processes and machines (`outgrow search worker`).

    Args:
        parent: the model to start from; it is not changed.
        example: an input of the model, as for `outgrow.grow`.
        space: the growths that a trial may sample, and limits: `outgrow.Space`.
        train: `train(model, optimizer, trial)` trains the model in place, and returns metrics: a dict, or one number. `trial`
            is Optuna's: `trial.suggest_float("lr", …)` draws hyperparameters. Random generators of Python, numpy and torch are
            seeded before each call. A trial in which it raises, or returns NaN, counts as failed, and the search goes on.
        objectives: a name, a list of names to minimise, or a dict from names to "min" or "max". "parameters", "flops" (of one
            forward pass on the example) and "latency" (its time in seconds) are measured, others are metrics of `train`.
        study: the name of the study, or a study of Optuna.
        storage: None (in memory), the path of a journal file, a URL such as "sqlite:///search.db" or "grpc://host:13000", or a
            storage of Optuna.
        optimizer: a function that makes the optimizer (or several) of a model; its state is inherited and grows too.
        sampler: how parents are chosen. "evolution": tournaments among the `population` best, ranked as in NSGA-II. "hill":
            generations of `population` trials from the best so far by the first objective, as in NASH. "random": any.
        trials: the number of trials, including the first.
        population: see `sampler`.
        seed: for all random choices.
        artifacts: where models are kept, a folder or an artifact store of Optuna; by default a folder beside the storage's
            file.
        lease: the number of seconds after which a trial without a sign of life from its worker is taken up by another one. A
            worker that was killed on the same machine is noticed at once.
        attempts: how often a trial is taken up before it is given up.
        minutes: begin no trial after so many; the same call with a storage continues the search.
        quiet: print no line per trial.

    Example:
        >>> import torch
        >>> x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        >>> def train(model, optimizer, trial):
        ...     for _ in range(20):
        ...         optimizer.zero_grad()
        ...         loss = (model(x)[:, 0] - x.prod(1)).square().mean()
        ...         loss.backward()
        ...         optimizer.step()
        ...     return {"error": loss.item()}
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> adam = lambda model: torch.optim.Adam(model.parameters(), lr=0.01)
        >>> space = Space(factors=(1.5, 2), deepen=(), parameters=200)
        >>> result = search(model, x, space, train, ["error", "parameters"], optimizer=adam, trials=5, quiet=True)
        >>> len(result.records), result.best.values[0] < result.records[0].values[0]
        (5, True)
        >>> result.load().state_dict()["0.weight"].shape[0] > 4
        True
    """
    described = Search(
        parent, example, space, train, objectives, optimizer, sampler, trials, population, seed, artifacts, lease, attempts
    )
    return run_search(described, study, storage, quiet, minutes=minutes)


def run_search(
    search: Search, study: Any, storage: Any, quiet: bool = False, most: int | None = None, minutes: float | None = None
) -> SearchResult:
    """Take part in a search until it is done, or until this process has carried out `most` trials or worked so long."""
    search.check()
    named = isinstance(study, str)
    if study == "" or (not named and not hasattr(study, "get_trials")):
        raise SearchError(f"study={study!r}: write a name, or pass a study of Optuna")
    check_kind(storage)
    if minutes is not None and (not isinstance(minutes, Real) or not minutes > 0):
        raise SearchError(f"minutes={minutes!r}: write a number of minutes above 0")
    artifacts = search.artifacts if search.artifacts is not None else default_artifacts(storage if named else None)
    objectives: Objectives = search.objectives
    creator = False
    facts: dict[str, Any] = {
        "sampler": search.sampler,
        "seed": search.seed,
        "trials": search.trials,
        "attempts": search.attempts,
    }
    computed = fingerprint(search.parent, search.example)
    first: dict[str, Any] = facts | ({"parent": computed} if computed else {})  # a fact of a new study alone
    if named:
        study, creator = create_study(open_storage(storage), study, objectives, first)
    else:
        adopt_study(study, objectives)
    with reachable():
        check_facts(study, facts)
        known = study.user_attrs.get(FACTS) or (first if not study.get_trials(deepcopy=False) else {})
        check_same(study.study_name, known.get("parent"), computed)
        slots = max(known.get("trials", 0), search.trials)
        if study.user_attrs.get(FACTS, {}).get("trials") != slots:
            study.set_user_attr(FACTS, {**facts, **known, "trials": slots})
    models = Models(search.parent, search.optimizer, open_store(artifacts))
    try:
        Worker(search, study, models, quiet, own_sampler=named).run(creator, most, minutes)
        return SearchResult(study, slots, search.attempts, models)
    finally:
        if named:
            release(study._storage)


def read_search(storage: Any, study: str | None = None) -> SearchResult:
    """The trials of a stored search, without its models."""
    check_exists(storage)
    found = load_study(open_storage(storage, create=False), study)
    facts = found.user_attrs.get(FACTS)
    if facts is None:
        raise SearchError(f"the study {found.study_name!r} was not made by outgrow.search")
    with reachable():
        result = SearchResult(found, int(facts["trials"]), int(facts.get("attempts", 5)))
    release(found._storage)
    return result
