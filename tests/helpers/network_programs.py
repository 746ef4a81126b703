"""Hypothesis strategies that draw programs for `networks`."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.helpers.layer_blocks import ACTIVATIONS
from tests.helpers.random_networks import Program, Step


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
COMPUTING = st.one_of(
    st.tuples(st.just("linear"), WIDTHS, FLAG),
    st.tuples(st.just("pairwise"), one_of("multiply", "sum", "maximum"), WIDTHS),
    st.tuples(st.just("norm"), one_of("layer", "plain", "rms")),
    st.tuples(st.just("activation"), one_of(*ACTIVATIONS)),
    st.tuples(st.just("beside"), one_of("add", "add all", "scale", "scale all", "scaled", "scaled all", "divide")),
)
COMPUTED_STEPS = st.lists(COMPUTING, min_size=1, max_size=4).map(tuple)
CODES = one_of(3, 5, 12)
COMPUTED = (
    step("learned_queries", queries=one_of(3, 7), code=CODES, steps=COMPUTED_STEPS, out=WIDTHS, features=FLAG),
    step("computed_linear", out=WIDTHS, code=CODES, steps=COMPUTED_STEPS, bias=FLAG, turned=FLAG),
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
ANY_SEQUENCE = st.one_of(FLAT_SEQUENCE, FLAT_SEQUENCE, *composed(FLAT_SEQUENCE), step("merge", out=WIDTHS), *COMPUTED)


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


# Networks of stacked blocks, to be deepened.

AFTERWARDS = one_of("nothing", "nothing", "relu", "gelu", "relu6", "tanh")
SKEWS = one_of("subtracted", "negated", "doubled", "averaged", "flipped", "there and back", "halves", "rolled")
ODD_BLOCK = st.one_of(
    step("thin", norm=FLAG, after=AFTERWARDS),
    step("weighted", hidden=WIDTHS, learnt=FLAG),
    step("skewed", hidden=WIDTHS, how=SKEWS),
    step("ending", hidden=WIDTHS, how=one_of("glu", "pool", *ACTIVATIONS)),
)
IMAGE_BLOCK = st.one_of(
    step("basic", hidden=WIDTHS, norm=FLAG, bias=FLAG),
    step("bottleneck", hidden=WIDTHS, norm=one_of("batch", "none", "group"), after=AFTERWARDS),
    step("preactivated", hidden=WIDTHS),
    step("inverted", hidden=one_of(8, 6)),
    step("convnext", scaled=FLAG),
    ODD_BLOCK,
)
SEQUENCE_BLOCK = st.one_of(
    step("mlp", hidden=WIDTHS, activation=one_of(*ACTIVATIONS), p=one_of(0.0, 0.2), scaled=FLAG),
    step("encoder", hidden=WIDTHS, before=FLAG, how=one_of("qkv", "qkv_chunk", "separate"), fused=FLAG),
    step("torchs", before=FLAG, p=one_of(0.0, 0.1)),
    step("llama", hidden=WIDTHS, kv=one_of(1, 2)),
    ODD_BLOCK,
)
CONTAINERS = one_of(
    "sequential", "sequential", "list", "list", "named", "stage", "dict", "by_number", "each_twice", "all_twice", "tied"
)
PLAIN_CONV = step("conv", out=WIDTHS, kernel=one_of(1, 3), stride=one_of(1, 1, 2), groups=one_of(1, 1, 2), bias=FLAG)
ODD_CONV = step(
    "odd_conv",
    out=WIDTHS,
    kernel=st.tuples(one_of(3, 1, 2), one_of(3, 1, 2)),
    padding=one_of("number", "same", "valid"),
    mode=one_of("zeros", "zeros", "circular", "reflect", "replicate"),
    dilation=one_of(1, 1, 2),
)


def stacks(block: SearchStrategy[Step], flat: SearchStrategy[Step], plain: SearchStrategy[Any]) -> SearchStrategy[Step]:
    """Residual blocks of one kind or two, blocks of any steps, or plain layers; in a container."""
    body = st.lists(flat, min_size=1, max_size=3).map(tuple)
    anything = step("residual", body=body, shortcut=one_of("identity", "identity", "projection"), after=FLAG)
    kinds = st.one_of(block, block, block, anything).map(lambda found: (found,))
    patterns = st.one_of(kinds, kinds, kinds, st.tuples(block, block), plain, st.tuples(anything, flat))
    return step("stack", pattern=patterns, count=one_of(2, 1, 3), container=CONTAINERS)


IMAGE_NORM = step("norm", how=one_of("batch", "batch", "layer_written"))
SOME_ACTIVATION = step("activation", name=one_of("relu", "relu", "relu_", *ACTIVATIONS))
DROP = step("dropout", p=one_of(0.1, 0.5), whole=FLAG)
VGG = st.one_of(st.tuples(PLAIN_CONV, IMAGE_NORM, SOME_ACTIVATION), st.tuples(PLAIN_CONV, IMAGE_NORM, DROP, SOME_ACTIVATION))
MLP = st.one_of(st.tuples(step("linear", out=WIDTHS, bias=FLAG), SOME_ACTIVATION), st.tuples(SOME_ACTIVATION, DROP))
IMAGE_STACK = stacks(IMAGE_BLOCK, FLAT_IMAGE, VGG)
SEQUENCE_STACK = stacks(SEQUENCE_BLOCK, FLAT_SEQUENCE, MLP)


def beside(main: SearchStrategy[Step], others: SearchStrategy[Step]) -> SearchStrategy[tuple[Step, ...]]:
    """A step with one or two others around it, or none."""
    few = st.one_of(st.just(()), others.map(lambda found: (found,)))
    return st.tuples(few, main, few).map(lambda found: (*found[0], found[1], *found[2]))


def stacked() -> SearchStrategy[Program]:
    """Networks of one or two stacks, with a layer or so between them."""
    seeds = st.integers(0, 99)
    given = step("given", hidden=WIDTHS, count=one_of(2, 1))
    image = beside(IMAGE_STACK, st.one_of(IMAGE_STACK, PLAIN_CONV, ODD_CONV, ANY_IMAGE))
    text = beside(SEQUENCE_STACK, st.one_of(SEQUENCE_STACK, given, ANY_SEQUENCE))
    heads = one_of("pool", "each", "last")
    return st.one_of(
        st.builds(Program, st.just("image"), WIDTHS, image, one_of("pool", "adaptive", "flatten", "conv"), seeds, FLAG),
        st.builds(Program, st.just("sequence"), WIDTHS, text, heads, seeds, FLAG),
        st.builds(Program, st.just("tokens"), WIDTHS, text, one_of("each", "tied", "pool"), seeds, FLAG),
    )


# Networks whose weights are computed from parameters.


def computing() -> SearchStrategy[Program]:
    """One or two blocks with computed weights, perhaps with an activation or a norm between them."""
    between = st.one_of(st.just(()), one(ACTIVATION), st.just((PRE,)))
    steps = st.tuples(one(st.one_of(*COMPUTED)), between, st.one_of(st.just(()), one(st.one_of(*COMPUTED))))
    found = steps.map(lambda parts: tuple(step for part in parts for step in part))
    return st.builds(Program, st.just("sequence"), WIDTHS, found, one_of("each", "pool"), st.integers(0, 99))
