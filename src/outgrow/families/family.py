"""A family: nested networks on one set of parameters.

The largest member is the user's model, grown in place. Each smaller member is a part of it (see `families/member.py`), so that
a step on one size trains the entries that all larger sizes share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from outgrow.engine.grow import Request, run_growth
from outgrow.engine.growth_report import Growth
from outgrow.errors import GrowthError
from outgrow.families.alone import Alone
from outgrow.families.check_members import check_outputs, check_shareable, outputs_of, position_of
from outgrow.families.family_file import read_family, write_family
from outgrow.families.member import Member, extracted
from outgrow.families.nesting import check_nested, check_without_fades
from outgrow.families.shared_entries import OUTSIDE, kept_entries
from outgrow.families.sizes_table import sizes_table
from outgrow.history.growths_on_model import ATTRIBUTE, history
from outgrow.model.check_arguments import check_seed, check_switch
from outgrow.model.example import Example
from outgrow.model.journal import Journal
from outgrow.model.unwrap import as_list
from outgrow.saving.atomic_write import Path
from outgrow.saving.run_state import Parts
from outgrow.transforms.all_transforms import Transform, check_transforms
from outgrow.wrong_arguments import usage

CALL = "outgrow.Family(model, example, [outgrow.Widen('*', factor=2)])"
MEMBERS = "members."  # prefix of the smaller members' buffers in the state dict
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


@usage(CALL)
class Family(nn.Module):
    """Several sizes of a model on one set of parameters: family[0] is the smallest, family[-1] the largest.

    Args:
        model: the smallest size; it is grown in place, and is the largest member afterwards.
        example: a tensor, a tuple of arguments, or a dict of keyword arguments.
        sizes: for each further size, the transforms that grow the size before into it: one transform or a list.
        optimizer: one or several optimizers of the model's parameters, whose state grows too.
        seed: for drawn values; growth number k, from 0 on, takes seed + k.
        check: run the old and the new sizes on the example and compare.

    The parameters of the family are those of the largest member. A smaller member has modules and buffers of its own, also
    its own batch statistics, and computes with entries of the shared parameters. If a size is refused, the model is unchanged.

    Example:
        >>> import outgrow
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> family = Family(model, torch.zeros(1, 4), [outgrow.Widen("0", to=12)], [outgrow.Widen("0", to=16)])
        >>> print(family)
        member  parameters    FLOPs         grown by
        ──────  ────────────  ────────────  ──────────
        0       58            96            –
        1       86 (× 1.48)   144 (× 1.50)  0: 8 → 12
        2       114 (× 1.33)  192 (× 1.33)  0: 12 → 16
        >>> x = torch.randn(3, 4)
        >>> sum(member(x).square().mean() for member in family).backward()
        >>> bool(torch.equal(family.extract(0)(x), family[0](x)))
        True
    """

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        *sizes: Transform | Sequence[Transform],
        optimizer: Optimizers = None,
        seed: int = 0,
        check: bool = True,
    ) -> None:
        super().__init__()
        check_shareable(model)
        check_seed(seed)
        check_switch("check", check)
        requests = [as_list(size) for size in sizes]
        if not requests:
            raise GrowthError(f"a family has two sizes or more: pass the transforms of the next one, e.g. {CALL}")
        for request in requests:
            check_transforms(request)
        self._take(model, example, [], [])
        with Journal() as journal:
            for number, request in enumerate(requests):
                self._add(request, example, as_list(optimizer), seed + number, check, journal)

    def _take(self, model: nn.Module, example: Example | None, members: list[Member], flops: list[int]) -> None:
        self.largest, self.example, self._smaller, self._flops = model, example, members, flops
        self._plans = len(history(model))
        self.extra: Any = None  # that was saved with the family, after `load`
        self._trained_alone: int | None = None  # the number of a member, in the context of `alone`
        self._contexts: dict[Member, Alone] = {}

    @usage("family.grow([outgrow.Widen('*', factor=2)], optimizer=optimizer)")
    def grow(
        self,
        transforms: Transform | Sequence[Transform],
        *,
        example: Example | None = None,
        optimizer: Optimizers = None,
        seed: int | None = None,
        check: bool = True,
    ) -> Growth:
        """Add a size: grow the largest member, and keep its present size as a member.

        Args:
            transforms: one transform or a list.
            example: by default that of the family.
            optimizer: one or several optimizers of the family's parameters, whose state grows too.
            seed: for drawn values; by default the number of the growth.
            check: run the old and the new sizes on the example and compare.
        """
        request, given = as_list(transforms), self.example if example is None else example
        check_transforms(request)
        check_switch("check", check)
        if given is None:
            raise GrowthError("the family has no example since it was loaded: pass one, family.grow(transforms, example=x)")
        seed = len(self._smaller) if seed is None else seed
        check_seed(seed)
        self._check_not_alone()
        self._check_sizes()
        with Journal() as journal:
            return self._add(request, given, as_list(optimizer), seed, check, journal)

    def _add(
        self, transforms: list[Any], example: Example, optimizers: list[Any], seed: int, check: bool, journal: Journal
    ) -> Growth:
        """Add a size; the journal undoes it on any failure."""
        check_without_fades(self.largest)
        members = [*self._smaller, Member(self.largest)]
        bases = [outputs_of(member, example) for member in members] if check else []
        journal.note(self._state())
        growth = run_growth(Request(self.largest, example, transforms, optimizers, seed=seed, check=check, outer=journal))
        plans = history(self.largest)[self._plans :]
        check_nested(plans, dict(self.largest.named_parameters(remove_duplicate=False)))
        check_without_fades(self.largest)
        kept = kept_entries(self.largest, plans)
        for member in members:
            member.grown(kept)
        for number, base in enumerate(bases):
            check_outputs(members[number], example, base, number)
        self._smaller, self._plans, self._contexts = members, len(history(self.largest)), {}
        self._flops = [*self._flops, *growth.flops] if not self._flops else [*self._flops, growth.flops[1]]
        return growth

    def _state(self) -> Callable[[], None]:
        """A function that goes back to the present sizes, after all other changes were undone."""
        members, flops, plans = list(self._smaller), list(self._flops), vars(self.largest).get(ATTRIBUTE)
        parts = [member.parts for member in members]

        def restore() -> None:
            self._smaller, self._flops, self._plans = members, flops, len(plans or ())
            if plans is None:
                vars(self.largest).pop(ATTRIBUTE, None)
            else:
                vars(self.largest)[ATTRIBUTE] = plans
            for member, own in zip(members, parts, strict=True):
                member.parts = own
                member.install()

        return restore

    def __len__(self) -> int:
        return len(self._smaller) + 1

    def __getitem__(self, number: int) -> nn.Module:
        """The member of a number, a module of the model's class; negative numbers count from the largest."""
        self._check_sizes()
        position = position_of(number, len(self))
        if position == len(self._smaller):
            return self.largest
        if position != self._trained_alone:
            self._smaller[position].install()
        return self._smaller[position].module

    def __iter__(self) -> Iterator[nn.Module]:
        """All members, the smallest first."""
        return (self[number] for number in range(len(self)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the largest member."""
        return self.largest(*args, **kwargs)

    def sample(self, generator: torch.Generator) -> nn.Module:
        """A member drawn at random, each with the same probability."""
        return self[int(torch.randint(len(self), (), generator=generator))]

    def sandwich(self, generator: torch.Generator, between: int = 1) -> list[nn.Module]:
        """The largest member, the smallest one, and others drawn at random (the sandwich rule of slimmable networks).

        between: the number of members drawn from those between the two; all of them if there are no more.

        Example:
            >>> import outgrow
            >>> model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(3, 4)
            >>> family = Family(model, x, *([outgrow.Widen("0", by=2)] for _ in range(3)))
            >>> optimizer, generator = torch.optim.SGD(family.parameters(), lr=0.1), torch.Generator().manual_seed(0)
            >>> for member in family.sandwich(generator):
            ...     member(x).square().mean().backward()
            >>> optimizer.step()
        """
        if type(between) is not int or between < 0:
            raise GrowthError(
                f"between={between!r}: write the number of members between the largest and the smallest, from 0 on"
            )
        drawn = torch.randperm(len(self) - 2, generator=generator)[:between].tolist() if len(self) > 2 else []
        return [self[-1], self[0], *(self[1 + number] for number in sorted(drawn))]

    @usage("family.alone(0, optimizer)")
    def alone(self, number: int, optimizer: Optimizers = None) -> AbstractContextManager[nn.Module]:
        """Train one member at the cost of that member alone: `with family.alone(0, optimizer) as member:`.

        Inside the context, the member's parameters have gradients of their own size, and the optimizers hold them and their
        part of the state in place of the shared parameters. Passes, clipping (of `member.parameters()`) and steps are those of
        the stand-alone network. Entries that the member does not use stay exactly as they are, also under weight decay and
        momentum. Gradients that are there before are dropped, and so are those of the context at its end.

        Args:
            number: of the member; negative numbers count from the largest.
            optimizer: one or several optimizers of the family's parameters.

        Example:
            >>> import outgrow
            >>> model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(3, 4)
            >>> family = Family(model, x, [outgrow.Widen("0", to=12)])
            >>> optimizer = torch.optim.AdamW(family.parameters())
            >>> with family.alone(0, optimizer) as member:
            ...     optimizer.zero_grad()
            ...     member(x).square().mean().backward()
            ...     optimizer.step()
            >>> optimizer.state[model[0].weight]["exp_avg"].shape
            torch.Size([12, 4])
        """
        self._check_sizes()
        return self._alone(position_of(number, len(self)), as_list(optimizer))

    @contextmanager
    def _alone(self, position: int, optimizers: list[Any]) -> Iterator[nn.Module]:
        self._check_not_alone()
        if position == len(self._smaller):
            yield self.largest
            return
        member = self._smaller[position]
        contexts = self._contexts.setdefault(member, Alone(member))
        others = [other.module for other in self._smaller if other is not member]
        self._trained_alone = position
        try:
            with contexts.context(optimizers, self.largest, others) as module:
                yield module
        finally:
            self._trained_alone = None

    def _check_not_alone(self) -> None:
        if self._trained_alone is not None:
            raise GrowthError(
                f"member {self._trained_alone} is trained alone at present: end the context of family.alone before this call"
            )

    def extract(self, number: int) -> nn.Module:
        """A stand-alone copy of a member: a plain model of its class, with parameters of its own and its growths so far."""
        self._check_sizes()
        position = position_of(number, len(self))
        for context in self._contexts.values():
            context.write_back()
        return extracted(self.largest) if position == len(self._smaller) else self._smaller[position].extracted()

    @usage("family.save('family.pt', optimizer=optimizer)")
    def save(
        self,
        path: Path,
        *,
        optimizer: Optimizers = None,
        scheduler: Any = None,
        also: Mapping[str, Any] | None = None,
        extra: Any = None,
        finite: bool = True,
    ) -> None:
        """Write all sizes to one file, completely or not at all; `Family.load` continues from it, bit for bit.

        Args:
            path: the file; `outgrow.load(model, path)` reads the largest member alone.
            optimizer: one or several optimizers, whose state is saved too.
            scheduler: one or several schedulers of learning rates.
            also: further objects with a state, by name: whatever has `state_dict` and `load_state_dict`, or a torch.Generator.
            extra: further plain values and tensors, which are `family.extra` after `load`.
            finite: raise CheckpointError, and keep the old file, if parameters or buffers hold NaN or infinity.
        """
        self._check_not_alone()
        self._check_sizes()
        saved = Parts(self.largest, as_list(optimizer), as_list(scheduler), also={} if also is None else also)
        write_family(path, saved, self._smaller, self._flops, extra, finite)

    @classmethod
    @usage("outgrow.Family.load(model, 'family.pt', optimizer=optimizer)")
    def load(
        cls,
        model: nn.Module,
        path: Path,
        *,
        example: Example | None = None,
        optimizer: Optimizers = None,
        scheduler: Any = None,
        also: Mapping[str, Any] | None = None,
        checksums: bool = True,
    ) -> Family:
        """Read a file of `save` into a model, newly built at its first size, and return the family.

        Args:
            model: it becomes the largest member. If the file does not fit it, it is unchanged.
            example: for `grow`, which can also be given one.
            optimizer: as many as at `save` and of the same types, made from the small model's parameters.
            scheduler: as many as at `save`, and of the same types.
            also: objects of the same names as at `save`.
            checksums: compare the contents with the checksums in the file.

        Example:
            >>> import tempfile, outgrow
            >>> build, x = lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(1, 4)
            >>> family, path = Family(build(), x, [outgrow.Widen("0", to=12)]), tempfile.mkdtemp() + "/family.pt"
            >>> family.save(path)
            >>> again = Family.load(build(), path)
            >>> bool(torch.equal(again[0](x), family[0](x)))
            True
        """
        check_shareable(model)
        saved = Parts(model, as_list(optimizer), as_list(scheduler), also={} if also is None else also)
        members, flops, extra = read_family(path, saved, checksums)
        family = cls.__new__(cls)
        nn.Module.__init__(family)
        family._take(model, example, members, flops)
        family.extra = extra
        return family

    def train(self, mode: bool = True) -> Family:
        super().train(mode)
        for member in self._smaller:
            member.module.train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Family:
        """Convert or move all tensors; torch calls this for `to`, `cuda`, `float` and others."""
        self._check_not_alone()
        self._contexts = {}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for member in self._smaller:
            for module in member.module.modules():
                for key, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[key] = fn(buffer)
            member.install()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, buffer in self._own_buffers():
            destination[prefix + name] = buffer if keep_vars else buffer.detach()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        for name, buffer in self._own_buffers():
            value = state_dict.pop(prefix + name, None)
            if value is None:
                missing.append(prefix + name)
            elif value.shape != buffer.shape:
                errors.append(
                    f"{prefix}{name} is {tuple(value.shape)} in the checkpoint, and {tuple(buffer.shape)} in the family"
                )
            else:
                with torch.no_grad():
                    buffer.copy_(value)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)

    def _own_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The persistent buffers of the smaller members, by their names in the state dict."""
        for number, member in enumerate(self._smaller):
            buffers = {id(buffer) for buffer in member.module.buffers()}
            for name, tensor in member.module.state_dict(keep_vars=True).items():
                if id(tensor) in buffers:
                    yield f"{MEMBERS}{number}.{name}", tensor

    def _check_sizes(self) -> None:
        """Raise if the largest member was grown by other means: then the positions of the others' entries are not known."""
        if len(history(self.largest)) != self._plans:
            raise GrowthError(OUTSIDE)

    def __repr__(self) -> str:
        parameters = [*(member.parameters for member in self._smaller), sum(one.numel() for one in self.largest.parameters())]
        ends = [len(history(member.module)) for member in self._smaller]
        growths = [history(self.largest)[start:end] for start, end in pairwise([*ends, self._plans])]
        return sizes_table(parameters, self._flops, [(), *growths])
