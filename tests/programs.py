"""Hypothesis strategies that draw programs for `networks`."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from blocks import ACTIVATIONS
from networks import Program, Step


def one_of(*values: Any) -> SearchStrategy[Any]:
    return st.sampled_from(values)


def step(kind: str, **options: SearchStrategy[Any]) -> SearchStrategy[Step]:
    return st.builds(Step, st.just(kind), st.fixed_dictionaries(options))


WIDTHS = one_of(4, 6, 8, 5)
HEADS, DEPTHS = one_of(2, 3, 4), one_of(3, 4)
FLAG = st.booleans()
COMMON = (
    step("activation", name=one_of(*ACTIVATIONS, "relu_")),
    step("prelu", each=FLAG),
    step("layer_scale"),
    step("glu", out=WIDTHS, how=one_of("glu", "chunk", "split")),
    step("dropout", p=one_of(0.1, 0.5), whole=FLAG),
    step("twice", name=one_of("relu", "tanh")),
    step(
        "attention",
        heads=HEADS,
        depth=DEPTHS,
        how=one_of("qkv", "qkv_chunk", "separate"),
        end=one_of("rest", "flatten", "same"),
        fused=FLAG,
        bias=FLAG,
    ),
)
FLAT_IMAGE = st.one_of(
    step("conv", out=WIDTHS, kernel=one_of(1, 3), stride=st.just(1), groups=one_of(1, 2), bias=FLAG),
    step("depthwise", times=one_of(1, 2)),
    step("volumetric", out=WIDTHS),
    step("group_norm", groups=one_of(1, 2), affine=FLAG),
    step("norm", how=one_of("batch", "batch", "batch_plain", "instance", "instance_affine", "instance_tracked")),
    step("norm", how=one_of("layer", "layer_written", "rms")),
    step("squeeze_excite", hidden=WIDTHS, how=one_of("linear", "hard", "conv")),
    *COMMON,
)
FLAT_SEQUENCE = st.one_of(
    step("linear", out=WIDTHS, bias=FLAG),
    step("conv1d", out=WIDTHS, groups=one_of(1, 2)),
    step("norm", how=one_of("layer", "layer_plain", "rms", "rms_written", "batch", "layer_var", "layer_pow")),
    step("grouped_queries", kv=one_of(1, 2), group=one_of(2, 3), depth=DEPTHS, how=one_of("interleave", "expand")),
    step("torch_attention", heads=one_of(1, 2)),
    step("swiglu", hidden=WIDTHS, out=WIDTHS),
    step("recurrent", hidden=one_of(3, 4), cell=one_of("lstm", "gru"), layers=one_of(1, 2), both_ways=FLAG),
    step("position"),
    *COMMON,
)


def composed(flat: SearchStrategy[Step]) -> tuple[SearchStrategy[Step], ...]:
    body = st.lists(flat, min_size=1, max_size=3).map(tuple)
    return (
        step("residual", body=body, shortcut=one_of("identity", "projection", "pad"), after=FLAG),
        step("concatenate", one=body, other=body, with_input=FLAG),
        step("halves", body=body, how=one_of("chunk", "split", "narrow")),
    )


ANY_IMAGE = st.one_of(
    FLAT_IMAGE,
    FLAT_IMAGE,
    *composed(FLAT_IMAGE),
    step("conv", out=WIDTHS, kernel=one_of(1, 3), stride=st.just(2), groups=one_of(1, 2), bias=FLAG),
    step("transposed", out=WIDTHS, stride=one_of(1, 2), groups=one_of(1, 2)),
    step("shuffle", out=one_of(2, 3), up=FLAG),
    step("pool", how=one_of("max", "avg", "adaptive")),
    step("resize", mode=one_of("nearest", "bilinear")),
)
ANY_SEQUENCE = st.one_of(FLAT_SEQUENCE, FLAT_SEQUENCE, *composed(FLAT_SEQUENCE), step("merge", out=WIDTHS))


def programs(longest: int = 6) -> SearchStrategy[Program]:
    """Any network."""
    seeds = st.integers(0, 99)
    image, text = (st.lists(any_step, min_size=1, max_size=longest).map(tuple) for any_step in (ANY_IMAGE, ANY_SEQUENCE))
    return st.one_of(
        st.builds(Program, st.just("image"), WIDTHS, image, one_of("pool", "adaptive", "flatten", "conv"), seeds),
        st.builds(Program, st.just("sequence"), WIDTHS, text, one_of("pool", "last", "each", "flatten"), seeds),
        st.builds(Program, st.just("tokens"), WIDTHS, text, one_of("each", "tied", "pool"), seeds),
    )


def chains(stream: str, heads: SearchStrategy[str], *parts: SearchStrategy[tuple[Step, ...]]) -> SearchStrategy[Program]:
    """Networks that repeat one pattern of steps, one to three times."""
    pattern = st.tuples(*parts).map(lambda found: tuple(step for part in found for step in part))
    steps = st.lists(pattern, min_size=1, max_size=3).map(lambda found: tuple(step for part in found for step in part))
    return st.builds(Program, st.just(stream), one_of(4, 6, 8), steps, heads, st.integers(0, 99))


def just(kind: str, **options: Any) -> SearchStrategy[tuple[Step, ...]]:
    return st.just((Step(kind, options),))


def one(strategy: SearchStrategy[Step]) -> SearchStrategy[tuple[Step, ...]]:
    return strategy.map(lambda found: (found,))


EVEN = one_of(4, 6, 8)
CONV = step("conv", out=EVEN, kernel=one_of(1, 3), stride=one_of(1, 2), groups=st.just(1), bias=FLAG)
SAME_CONV = step("conv", out=EVEN, kernel=one_of(1, 3), stride=st.just(1), groups=st.just(1), bias=FLAG)
ACTIVATION = step("activation", name=one_of(*ACTIVATIONS))
BATCH = Step("norm", {"how": "batch"})
PRE = Step("norm", {"how": "layer"})
HEADS_OF_FOUR = step(
    "attention",
    heads=one_of(2, 4),
    depth=one_of(4, 6),
    how=one_of("qkv", "qkv_chunk", "separate"),
    end=one_of("rest", "flatten"),
    fused=FLAG,
    bias=FLAG,
)


def _basic_block(one: Step, name: str, other: Step) -> Step:
    return Step(
        "residual", {"body": (one, BATCH, Step("activation", {"name": name}), other), "shortcut": "identity", "after": True}
    )


def _pre_norm(body: tuple[Step, ...]) -> Step:
    return Step("residual", {"body": (PRE, *body), "shortcut": "identity", "after": False})


PLAIN = {
    "mlp": chains("sequence", one_of("each", "pool"), one(step("linear", out=EVEN, bias=FLAG)), one(ACTIVATION)),
    "cnn": chains("image", one_of("pool", "adaptive", "flatten"), one(CONV), st.just((BATCH,)), one(ACTIVATION)),
    "resnet": chains(
        "image",
        one_of("pool", "adaptive"),
        one(st.builds(_basic_block, SAME_CONV, one_of(*ACTIVATIONS), SAME_CONV)),
        one(CONV),
    ),
    "transformer": chains(
        "tokens",
        one_of("each", "pool"),
        one(HEADS_OF_FOUR).map(_pre_norm).map(lambda found: (found,)),
        st.tuples(step("linear", out=one_of(10, 12), bias=FLAG), ACTIVATION).map(_pre_norm).map(lambda found: (found,)),
    ).map(lambda p: Program(p.stream, p.width, (*p.steps, PRE), p.head, p.seed)),
}
