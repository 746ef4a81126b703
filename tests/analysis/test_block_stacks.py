"""The volumes of a stack of equal blocks are those that are found when every block is analysed separately."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import outgrow
from outgrow.analysis.analyse import watch
from outgrow.analysis.shorten_stacks import shortened
from outgrow.trace.operators import Trace
from outgrow.transforms.widen import list_volumes
from tests.helpers.like_blocks import EXAMPLE, NETS, Block, Net
from tests.helpers.network_programs import programs, stacked
from tests.helpers.random_networks import Program, Step, build, inputs


def reported(model: nn.Module, example: Any) -> list[Any]:
    """Everything that is reported about all volumes."""
    return [
        (v.name, v.count, v.size, v.grain, v.pinned, v.methods, v.reason, v.slots, v.writers, v.readers, repr(v))
        for v in outgrow.volumes(model, example)
    ]


def read_by_itself(model: nn.Module, example: Any) -> list[Any]:
    """The same with every block analysed, equal or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(list_volumes, "shortened", lambda trace: None)
        return reported(model, example)


def read_operators(model: nn.Module, example: Any) -> int:
    """How many operators `volumes` interprets, in all traces together."""
    read: list[int] = []
    plain = list_volumes.read

    def counting(trace: Trace, rules: Any) -> Any:
        read.append(len(trace.ops))
        return plain(trace, rules)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(list_volumes, "read", counting)
        outgrow.volumes(model, example)
    return sum(read)


class Numbered(Block):
    """A stack with a different block at one place."""

    def __init__(self, number: int, odd: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.number, self.odd = number, odd

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x if self.odd is None or self.number != 4 else self.odd(x)


def numbered(odd: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Net(*(Numbered(number, odd) for number in range(8)))


class Masked(Net):
    """Blocks take a mask, and one of them another mask."""

    def forward(self, x: Tensor) -> Tensor:
        x, keep, other = self.stem(x), x.sum(-1, keepdim=True) > 0, x.mean(-1, keepdim=True) > 0
        for number, block in enumerate(self.blocks):
            x = block(x) * (other if number == 4 else keep)
        return self.head(x)


class Tapped(Net):
    """The output of one block is used at the end too."""

    def forward(self, x: Tensor) -> Tensor:
        x = tapped = self.stem(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            tapped = x if number == 4 else tapped
        return self.head(x) + tapped[..., :2]


class All(Net):
    """All hidden states are used at the end."""

    def forward(self, x: Tensor) -> Tensor:
        states = [self.stem(x)]
        for block in self.blocks:
            states.append(block(states[-1]))
        return self.head(torch.stack(states).mean(0))


class Swapped(Net):
    """Two streams that change places in every block."""

    def forward(self, x: Tensor) -> Tensor:
        x, y = self.stem(x), self.stem(x * 2)
        for block in self.blocks:
            x, y = y, block(x)
        return self.head(x + y)


class Between(Net):
    """The model's own code runs between blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.stem(x)
        for block in self.blocks:
            x = torch.tanh(block(x)) + first
        return self.head(x)


class Straight(nn.Module):
    """Layers in sequence, without a residual stream: volumes lie between two blocks."""

    def __init__(self, count: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def shared_parameter() -> nn.Module:
    net = Net(*(Block() for _ in range(8)))
    net.blocks[5].up.weight = net.blocks[3].up.weight
    return net


def hooked() -> nn.Module:
    net = Net(*(Block() for _ in range(8)))
    net.blocks[4].register_forward_hook(lambda module, args, output: output[..., torch.arange(7, -1, -1)])
    return net


def other_type() -> nn.Module:
    net = Net(*(Numbered(number, lambda x: x.double().float()) for number in range(8)))
    net.blocks[6].odd = lambda x: x
    return net


def unused_buffers() -> nn.Module:
    net = Net(*(Block() for _ in range(8)))
    for block in net.blocks:
        block.register_buffer("table", torch.zeros(5))
    return net


def unused_parameter() -> nn.Module:
    net = Net(*(Block() for _ in range(8)))
    net.blocks[4].extra = nn.Parameter(torch.zeros(12))
    return net


LIKE: dict[str, Callable[[], nn.Module]] = {
    "like blocks": lambda: Net(*(Block() for _ in range(8))),
    "a pattern of two": lambda: Net(*(Block(act=(torch.relu, torch.sigmoid)[n % 2]) for n in range(12))),
    "a pattern of three": lambda: Net(*(Block(heads=(1, 2, 4)[n % 3]) for n in range(15))),
    "two runs": lambda: Net(*(Block(heads=2 if n < 6 else 4) for n in range(12))),
    "code between blocks": lambda: Between(*(Block() for _ in range(8))),
    "buffers that nobody uses": unused_buffers,
}
ODD: dict[str, Callable[[], nn.Module]] = {
    "another constant": numbered(lambda x: x * 2.0),
    "a statistic": numbered(lambda x: x - x.mean(-1, keepdim=True)),
    "another order of features": numbered(lambda x: x.flip(-1)),
    "an operator without a rule": numbered(lambda x: x.cumprod(-1)),
    "one feature": numbered(lambda x: x + x[..., :1]),
    "another mask": lambda: Masked(*(Block() for _ in range(8))),
    "a shared parameter": shared_parameter,
    "a hook on one block": hooked,
    "another type": other_type,
    "a parameter that nobody uses": unused_parameter,
    "another ε": lambda: Net(*(Block(eps=1e-3 if n == 4 else 1e-5) for n in range(8))),
}
OTHER: dict[str, Callable[[], nn.Module]] = {
    "no residual stream": Straight,
    "a tapped block": lambda: Tapped(*(Block() for _ in range(8))),
    "all states": lambda: All(*(Block() for _ in range(8))),
    "streams that change places": lambda: Swapped(*(Block() for _ in range(8))),
    **NETS,
}


def given_to(model: nn.Module) -> Tensor:
    return torch.zeros(2, 5, 6) if isinstance(model, Straight) else EXAMPLE


@pytest.mark.parametrize("name", [*LIKE, *ODD, *OTHER])
def test_volumes_are_those_of_blocks_read_by_themselves(name: str) -> None:
    model = (LIKE | ODD | OTHER)[name]()
    example = given_to(model)
    assert reported(model, example) == read_by_itself(model, example)


@pytest.mark.parametrize("name", LIKE)
def test_like_blocks_are_read_once(name: str) -> None:
    model = LIKE[name]()
    assert read_operators(model, EXAMPLE) <= 0.8 * len(watch(model, EXAMPLE).ops)


@pytest.mark.parametrize("name", ODD)
def test_an_odd_block_is_read(name: str) -> None:
    """Of eight blocks, one of which differs, no other one represents that one."""
    model = ODD[name]()
    trace = watch(model, EXAMPLE)
    short = shortened(trace)
    odd = 5 if name == "a shared parameter" else 4
    assert short is None or any(op.module.startswith(f"blocks.{odd}.") for op in short.trace.ops)


def test_further_blocks_are_not_read() -> None:
    few, many = (read_operators(Net(*(Block() for _ in range(count))), EXAMPLE) for count in (6, 24))
    assert few == many


@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "test_byobnet", "test_resnet"])
def test_volumes_of_library_models_are_those_of_blocks_read_by_themselves(name: str) -> None:
    import timm

    model, example = timm.create_model(name), torch.randn(2, 3, 64, 64)
    assert reported(model, example) == read_by_itself(model, example)


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Gemma2"])
def test_volumes_of_decoders_are_those_of_blocks_read_by_themselves(kind: str) -> None:
    import transformers

    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 9, "vocab_size": 50}
    if kind != "GPT2":
        sizes |= {"num_key_value_heads": 2, "intermediate_size": 24, "head_dim": 4}
    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**sizes, pad_token_id=0)).eval()
    example = {"input_ids": torch.arange(10).view(2, 5)}
    assert reported(model, example) == read_by_itself(model, example)
    assert read_operators(model, example) < 0.8 * len(watch(model, example).ops)


def repeated(program: Program, count: int, odd: Step | None, at: int) -> Program:
    """The steps of a program several times, possibly with another step in between."""
    steps = [step for number in range(count) for step in ((odd,) if odd and number == at else ()) + program.steps]
    return Program(program.stream, program.width, tuple(steps), program.head, program.seed)


STACKS = st.one_of(
    st.builds(
        repeated, programs(2), st.integers(4, 7), st.one_of(st.none(), programs(1).map(lambda p: p.steps[0])), st.integers(0, 6)
    ),
    stacked(),
)


def check(program: Program) -> None:
    try:
        model = build(program).eval()
        example = inputs(program, batch=2, seed=0)
        model(example)
    except Exception:  # an odd step of another stream
        return
    assert reported(model, example) == read_by_itself(model, example)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(STACKS)
def test_volumes_of_any_stack_are_those_of_blocks_read_by_themselves(program: Program) -> None:
    check(program)


@pytest.mark.exhaustive
@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(STACKS)
def test_volumes_of_many_more_stacks(program: Program) -> None:
    check(program)
