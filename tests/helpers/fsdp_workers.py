"""Worker functions for tests of sharded models and distributed checkpoints; `processes.launch` runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import outgrow
from outgrow.distributed.fsdp import shard
from outgrow.history.growths_on_model import history
from outgrow.model.unwrap import bare
from outgrow.saving.dcp import history_state, regrow
from tests.helpers.ddp_workers import GROWTHS, Block, X, alone, network, train, whole
from tests.helpers.processes import batches, refusal, share


def sharding(**options: Any) -> Callable[[nn.Module], None]:
    """A user's function: shard every block, then the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def how(model: nn.Module) -> None:
        for module in list(model.modules()):
            if isinstance(module, Block):
                fully_shard(module, mesh=mesh, **options)
        fully_shard(model, mesh=mesh)

    return how


def whole_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.full_tensor() for name, parameter in model.named_parameters()}


def fully_sharded() -> None:
    """Ten steps before each growth and ten after the last: parameters and moments equal those of one process."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    truth, data = alone(), batches(40)
    model = network()
    kind = type(model)
    shard(model, sharding(reshard_after_forward=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for stage, growth in enumerate([*GROWTHS, None]):
        train(model, optimizer, data[10 * stage : 10 * stage + 10])
        if growth is None:
            break
        before = model(X.double()).detach()  # leaves parameters whole, for a backward pass that is never made
        growth(model, optimizer=optimizer)
        assert isinstance(model, FSDPModule)
        assert isinstance(model, kind)
        assert all(isinstance(part, FSDPModule) for part in model.modules() if isinstance(part, Block))
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        assert held == {id(parameter) for parameter in model.parameters()} == {id(key) for key in optimizer.state} | held
        for parameter in model.parameters():
            for value in optimizer.state.get(parameter, {}).values():
                assert value.ndim == 0 or (isinstance(value, DTensor) and value.placements == parameter.placements)
        torch.testing.assert_close(model(X.double()).detach(), before, rtol=1e-12, atol=1e-12)
    for name, parameter in truth.named_parameters():
        torch.testing.assert_close(whole_of(model)[name], parameter.detach(), rtol=1e-9, atol=1e-9)
    assert len(history(model)) == 3
    assert sum(len(module._forward_pre_hooks) for module in model.modules()) == 3  # one per group, none twice


def sharded_run() -> None:
    """A run of a sharded model: planned for the whole model, and grown by its schedule as in one process."""
    events = [outgrow.At(step=5, grow=[outgrow.Widen("0", by=4)], lr=0.5), outgrow.At(step=8, grow=[outgrow.Deepen("2")])]
    data, results = batches(12), []
    for sharded in (False, True):
        model = network()
        if sharded:
            shard(model, sharding())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        before = list(model.parameters())
        run = outgrow.Run(model, X.double(), optimizer, events, quiet=True)
        assert all(one is two for one, two in zip(before, model.parameters(), strict=True))
        for batch in data:
            train(model, optimizer, [batch], share if sharded else whole)
            run.step()
        assert len(run.records) == 2
        results.append(whole_of(model) if sharded else {name: value.detach() for name, value in model.named_parameters()})
    alone, together = results
    assert list(alone) == list(together)
    for name, value in alone.items():
        torch.testing.assert_close(together[name], value, rtol=1e-9, atol=1e-9)
    assert "torch.distributed.checkpoint" in refusal(run.save, "run.pt")
    wanted = [outgrow.At(step=5, grow=[outgrow.Widen("0", by=4)], new_lr=2)]
    assert "leave them out" in refusal(outgrow.Run, model, X.double(), optimizer, wanted, quiet=True)


def sharded_refusals() -> None:
    """After any error, the sharded model and its optimizer are as before, and training continues as without the error."""
    from torch.distributed.fsdp import FSDPModule

    rank, data, how = dist.get_rank(), batches(6), sharding()
    model, twin = network(), network()
    how(model)
    how(twin)
    optimizer, other = (torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, twin))
    train(model, optimizer, data[:3])
    text = refusal(GROWTHS[0], model, optimizer=optimizer)
    assert "outgrow.shard(model, function)" in text, text
    shard(model, how)

    def stumbling(model: nn.Module) -> None:
        how(model[2].f)
        raise outgrow.GrowthError("stumbled")

    def idle(model: nn.Module) -> None:
        pass

    before = {name: (parameter, parameter.to_local().clone()) for name, parameter in model.named_parameters()}
    states = {parameter: dict(state) for parameter, state in optimizer.state.items()}
    hooks = [list(module._forward_pre_hooks) for module in model.modules()]

    assert "nonsense" in refusal(outgrow.widen, model, X.double(), "nonsense", by=4, optimizer=optimizer)
    assert "seed" in refusal(outgrow.widen, model, X.double(), "0", by=4, seed=rank, optimizer=optimizer)
    assert "refused" in refusal(outgrow.widen, model, X.double(), "0" if rank else "nonsense", by=4) or not rank
    for wrong, expected in ((stumbling, "stumbled"), (idle, "did not shard it again")):
        vars(model)["_outgrow_shard"] = wrong
        assert expected in refusal(GROWTHS[1], model, optimizer=optimizer)
    vars(model)["_outgrow_shard"] = how
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is parameter for name, (parameter, _) in before.items())
    assert all(torch.equal(after[name].to_local(), numbers) for name, (_, numbers) in before.items())
    assert {parameter: dict(state) for parameter, state in optimizer.state.items()} == states
    assert [list(module._forward_pre_hooks) for module in model.modules()] == hooks
    assert model[0].out_features == 8
    assert not history(model)

    train(twin, other, data[:3])
    train(model, optimizer, data[3:])
    train(twin, other, data[3:])
    numbers = whole_of(twin)
    assert all(torch.equal(value, numbers[name]) for name, value in whole_of(model).items())

    model.set_requires_gradient_sync(False)
    cross_entropy(model(X.double()), torch.zeros(6, dtype=torch.long)).backward()
    text = refusal(GROWTHS[0], model, optimizer=optimizer)
    assert "not reduced yet" in text, text
    model.set_requires_gradient_sync(True)
    cross_entropy(model(X.double()), torch.zeros(6, dtype=torch.long)).backward()

    # gradients are kept, and an optimizer that was left out raises
    gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    GROWTHS[0](model)
    assert isinstance(model, FSDPModule)
    grown = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    assert torch.equal(grown["0.weight"][:8], gradients["0.weight"])
    assert not grown["0.weight"][8:].any()
    assert torch.equal(grown["3.bias"], gradients["3.bias"])
    text = refusal(optimizer.step)
    assert "the model was sharded again" in text, text


def sharded_fades() -> None:
    """Gates and new columns fade in over the steps of a sharded run as in a plain one."""
    data = batches(12)
    ends = []
    for sharded in (False, True):
        model = network()
        if sharded:
            shard(model, sharding())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        train(model, optimizer, data[:2], share if sharded else whole)
        outgrow.widen(model, X.double(), "0", by=4, fade=6, optimizer=optimizer)
        train(model, optimizer, data[2:5], share if sharded else whole)
        outgrow.deepen(model, X.double(), "2", fade=6, optimizer=optimizer)
        train(model, optimizer, data[5:], share if sharded else whole)
        model.reshard() if sharded else None
        ends.append(whole_of(model) if sharded else dict(model.named_parameters()))
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value.detach(), rtol=1e-9, atol=1e-9)


def checkpoints() -> None:
    """Checkpoints of two processes after growths, loaded into the small model: training then continues bit for bit."""
    import tempfile

    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    data = batches(25)
    for wrapped in (lambda model: shard(model, sharding()), DistributedDataParallel):
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        model = wrapped(network())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for stage, growth in enumerate(GROWTHS):
            train(model, optimizer, data[5 * stage : 5 * stage + 5])
            growth(model, optimizer=optimizer)
        outgrow.widen(model, X.double(), "2.f.0", by=2, fade=8, optimizer=optimizer)
        train(model, optimizer, data[15:20])
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": moments, **history_state(model)}, checkpoint_id=folder[0])

        again = wrapped(network(seed=1))
        assert regrow(again, folder[0]) is again
        resumed = torch.optim.AdamW(again.parameters(), lr=0.01)
        weights, moments = get_state_dict(again, resumed)
        state = {"model": weights, "optim": moments}
        dcp.load(state, checkpoint_id=folder[0])
        set_state_dict(again, resumed, model_state_dict=state["model"], optim_state_dict=state["optim"])
        assert history(bare(again)) == history(bare(model))
        train(model, optimizer, data[20:])
        train(again, resumed, data[20:])
        local = [(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True)]
        for one, other in local:
            assert torch.equal(getattr(one, "_local_tensor", one), getattr(other, "_local_tensor", other))

        other = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
        shapes = [parameter.shape for parameter in other.parameters()]
        assert "does not fit this model" in refusal(regrow, other, folder[0])
        assert [parameter.shape for parameter in other.parameters()] == shapes
        dcp.save({"model": other.state_dict()}, checkpoint_id=folder[0] + "/plain")
        assert "history_state(model)" in refusal(regrow, network(), folder[0] + "/plain")
        assert "read as a distributed checkpoint" in refusal(regrow, network(), folder[0] + "/nowhere")


def saves_whole() -> None:
    """`outgrow.save` on all ranks: one file of the whole model, ties included, or an error on all of them."""
    import tempfile
    from pathlib import Path

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    path = Path(folder[0]) / "model.safetensors"
    truth, model = network(), shard(network(), sharding())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for growth in GROWTHS:
        growth(truth)
        growth(model, optimizer=optimizer)
    train(model, optimizer, batches(2))
    numbers = whole_of(model)
    outgrow.save(model, path)
    again = outgrow.load(network(seed=1), path)
    assert len(history(again)) == len(history(model)) == 3
    assert all(torch.equal(parameter, numbers[name]) for name, parameter in again.named_parameters())
    before = path.read_bytes()
    with torch.no_grad():
        next(model.parameters()).to_local().fill_(float("nan"))
    assert "not finite" in refusal(outgrow.save, model, path)
    assert "no folder" in refusal(outgrow.save, model, path.parent / "nowhere" / "model.safetensors")
    assert path.read_bytes() == before

    tied = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    tied[1].weight = tied[0].weight
    shard(tied, sharding())
    outgrow.save(tied, path)
    fresh = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    fresh[1].weight = fresh[0].weight
    whole = tied[0].weight.full_tensor()
    assert torch.equal(outgrow.load(fresh, path)[1].weight, whole)

    sharded, run_file = shard(network(seed=2), sharding()), path.with_name("run.pt")
    outgrow.save(truth, path)
    assert outgrow.load(sharded, path) is sharded
    assert all(torch.equal(value, dict(truth.named_parameters())[name]) for name, value in whole_of(sharded).items())
    if not dist.get_rank():
        outgrow.Run(again, X.double(), torch.optim.SGD(again.parameters(), lr=0.1), [], quiet=True).save(run_file)
    dist.barrier()
    assert all(torch.equal(value, numbers[name]) for name, value in whole_of(outgrow.load(sharded, run_file)).items())
    torch.testing.assert_close(sharded(X.double()).detach(), again(X.double()).detach())
    bare_shards = network()
    sharding()(bare_shards)
    assert "outgrow.shard(model, function)" in refusal(outgrow.load, bare_shards, path)
