"""Kernels for SmallConv: a convolution, its bias, a ReLU and a 2 × 2 max pool as one, forward and back.

Numbers lie as in `forward`.

A program computes the four pixels of a window for all channels and all samples, and keeps the largest alone, with its place:
the output of the convolution, four times as large as what is read of it, is never written. On the way back the gradient of a
window belongs to the pixel that was chosen, so that the gradient of the weight is a sum over windows and places

    dW = Σ_window Σ_place [chosen = place] g(window) x(pixel of place)ᵀ.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place_weights(
    weight, out, tap, channel, inside, PLACE: tl.constexpr, C_IN: tl.constexpr, KERNEL: tl.constexpr, REACH: tl.constexpr
):
    """What the pixel at a place of a window makes of the taps that the window sees."""
    down = tap // REACH - PLACE // 2
    across = tap % REACH - PLACE % 2
    meets = inside & (down >= 0) & (down < KERNEL) & (across >= 0) & (across < KERNEL)
    at = out[:, None] * (KERNEL * KERNEL * C_IN) + ((down * KERNEL + across) * C_IN + channel)[None, :]
    return tl.load(weight + at, mask=meets[None, :], other=0.0)


@triton.jit
def convolve_and_pool(
    x, streams, weight, bias, z, chosen, PARAMETERS,
    C_IN: tl.constexpr, C_OUT: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KERNEL: tl.constexpr, PAD: tl.constexpr,
    B: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """z = the largest of max(weight ∗ x + bias, 0) in each window, and which one it was (−1 if it is zero)."""
    REACH: tl.constexpr = KERNEL + 1
    K: tl.constexpr = C_IN * REACH * REACH
    WINDOWS: tl.constexpr = (H // 2) * (W // 2)
    net = tl.program_id(1).to(tl.int64)
    window = tl.program_id(0)
    top = window // (W // 2) * 2
    left = window % (W // 2) * 2
    x += tl.load(streams + net).to(tl.int64) * C_IN * H * W * B
    weight += net * PARAMETERS
    m = tl.arange(0, BM)
    here = m < C_OUT
    out = tl.where(here, m, 0)
    b = tl.arange(0, B)
    one = tl.zeros((BM, B), tl.float32)
    two = tl.zeros((BM, B), tl.float32)
    three = tl.zeros((BM, B), tl.float32)
    four = tl.zeros((BM, B), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        tap = k // C_IN
        channel = k % C_IN
        row = top - PAD + tap // REACH
        column = left - PAD + tap % REACH
        inside = (k < K) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
        values = tl.load(x + ((channel * H + row) * W + column)[:, None] * B + b[None, :], mask=inside[:, None], other=0.0)
        seen = k < K
        first = place_weights(weight, out, tap, channel, seen, 0, C_IN, KERNEL, REACH)
        one = tl.dot(first, values, one, input_precision=PRECISION)
        second = place_weights(weight, out, tap, channel, seen, 1, C_IN, KERNEL, REACH)
        two = tl.dot(second, values, two, input_precision=PRECISION)
        third = place_weights(weight, out, tap, channel, seen, 2, C_IN, KERNEL, REACH)
        three = tl.dot(third, values, three, input_precision=PRECISION)
        fourth = place_weights(weight, out, tap, channel, seen, 3, C_IN, KERNEL, REACH)
        four = tl.dot(fourth, values, four, input_precision=PRECISION)
    best = one
    which = tl.zeros((BM, B), tl.int32)
    which = tl.where(two > best, 1, which)
    best = tl.maximum(best, two)
    which = tl.where(three > best, 2, which)
    best = tl.maximum(best, three)
    which = tl.where(four > best, 3, which)
    best = tl.maximum(best, four) + tl.load(bias + net * PARAMETERS + out, mask=here, other=0.0)[:, None]
    at = ((net * C_OUT + out) * WINDOWS + window)[:, None] * B + b[None, :]
    tl.store(z + at, tl.maximum(best, 0.0), mask=here[:, None])
    tl.store(chosen + at, tl.where(best > 0.0, which, -1).to(tl.int8), mask=here[:, None])


@triton.jit
def weigh_chosen(
    g, chosen, x, streams, weights, biases, GRADIENTS,
    C_IN: tl.constexpr, C_OUT: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KERNEL: tl.constexpr, PAD: tl.constexpr,
    B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr, GROUPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of a weight and of a bias from that behind the pool, summed over a group of windows, a sum for each place.

    A row is a place and a channel, a column a tap of the window: where the pixel at that place sees the tap, it is one of the
    weight's own.
    """
    REACH: tl.constexpr = KERNEL + 1
    SEEN: tl.constexpr = C_IN * REACH * REACH
    WINDOWS: tl.constexpr = (H // 2) * (W // 2)
    GROUP: tl.constexpr = WINDOWS // GROUPS
    PIECES: tl.constexpr = B // BB
    group = tl.program_id(0)
    net = tl.program_id(1).to(tl.int64)
    x += tl.load(streams + net).to(tl.int64) * C_IN * H * W * B
    m = tl.arange(0, BM)
    there = m < 4 * C_OUT
    o = m % C_OUT
    place = m // C_OUT
    k = tl.program_id(2) * BN + tl.arange(0, BN)
    tap = k // C_IN
    channel = k % C_IN
    total = tl.zeros((BM, BN), tl.float32)
    shifts = tl.zeros((BM,), tl.float32)
    for number in range(GROUP * PIECES):
        window = group * GROUP + number // PIECES
        b = number % PIECES * BB + tl.arange(0, BB)
        at = ((net * C_OUT + o) * WINDOWS + window)[:, None] * B + b[None, :]
        mine = tl.load(chosen + at, mask=there[:, None], other=-1).to(tl.int32) == place[:, None]
        change = tl.where(mine, tl.load(g + at, mask=there[:, None], other=0.0), 0.0)
        row = window // (W // 2) * 2 - PAD + tap // REACH
        column = window % (W // 2) * 2 - PAD + tap % REACH
        inside = (k < SEEN) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
        values = tl.load(x + ((channel * H + row) * W + column)[:, None] * B + b[None, :], mask=inside[:, None], other=0.0)
        total = tl.dot(change, tl.trans(values), total, input_precision=PRECISION)
        shifts += tl.sum(change, 1)
    down = (tap // REACH)[None, :] - (place // 2)[:, None]
    across = (tap % REACH)[None, :] - (place % 2)[:, None]
    own = (down >= 0) & (down < KERNEL) & (across >= 0) & (across < KERNEL) & there[:, None] & (k < SEEN)[None, :]
    slot = ((group * 4 + place) * C_OUT + o)[:, None] * KERNEL + down
    tl.store(weights + net * GRADIENTS + (slot * KERNEL + across) * C_IN + channel[None, :], total, mask=own)
    if tl.program_id(2) == 0:
        tl.store(biases + (net * GROUPS + group) * 4 * C_OUT + m, shifts, mask=there)
