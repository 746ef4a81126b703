"""The kernels of the fused engine, on the way back, and the optimizer. `forward` says how numbers lie.

With g the gradient behind a norm, that of what goes into the norm is, a channel,

    dy = c₁ g + c₂ y + c₃,   c₁ = γ/σ,   c₂ = −c₁ · mean(g x̂)/σ,   c₃ = −c₁ · mean(g) − c₂ · mean(y),   x̂ = (y − mean(y))/σ

which is computed as it is loaded. Gradients of weights are left as partial sums, over groups of pixels, which `adam` adds up.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def part_gradient(
    first, second, z, y, mean, rstd, g, part, skip_y, skip_mean, skip_rstd, skip_part, NORMS,
    C: tl.constexpr, PIXELS: tl.constexpr, B: tl.constexpr, BM: tl.constexpr, TWO: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """The gradient before a block's last ReLU, from one or two behind it; and its sums for the norms before."""
    pixel = tl.program_id(0)
    net = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, BM)
    here = (c < C)[:, None]
    at = ((net * C + c) * PIXELS + pixel)[:, None] * B + tl.arange(0, B)[None, :]
    value = tl.load(first + at, mask=here, other=0.0)
    if TWO:
        value += tl.load(second + at, mask=here, other=0.0)
    value = tl.where(tl.load(z + at, mask=here, other=0.0) > 0.0, value, 0.0)
    tl.store(g + at, value, mask=here)
    norm = net * NORMS + c
    left = (net * PIXELS + pixel) * 2 * C + c
    sums = tl.sum(value, 1)
    m = tl.load(mean + norm, mask=c < C, other=0.0)
    r = tl.load(rstd + norm, mask=c < C, other=0.0)
    normal = (tl.load(y + at, mask=here, other=0.0) - m[:, None]) * r[:, None]
    tl.store(part + left, sums, mask=c < C)
    tl.store(part + left + C, tl.sum(value * normal, 1), mask=c < C)
    if SKIP:
        m = tl.load(skip_mean + norm, mask=c < C, other=0.0)
        r = tl.load(skip_rstd + norm, mask=c < C, other=0.0)
        normal = (tl.load(skip_y + at, mask=here, other=0.0) - m[:, None]) * r[:, None]
        tl.store(skip_part + left, sums, mask=c < C)
        tl.store(skip_part + left + C, tl.sum(value * normal, 1), mask=c < C)


@triton.jit
def norm_gradient(
    part, mean, rstd, scale, c1, c2, c3, d_gamma, d_beta, NORMS, GRADIENTS,
    C: tl.constexpr, PIXELS: tl.constexpr, B: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """The gradients of γ and β, and the three numbers a channel that give dy from g and y."""
    net = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BC)
    p = tl.arange(0, BP)
    here = c < C
    mask = (p < PIXELS)[:, None] & here[None, :]
    at = part + net * PIXELS * 2 * C + p[:, None] * 2 * C + c[None, :]
    sums = tl.sum(tl.load(at, mask=mask, other=0.0), 0)
    products = tl.sum(tl.load(at + C, mask=mask, other=0.0), 0)
    tl.store(d_beta + net * GRADIENTS + c, sums, mask=here)
    tl.store(d_gamma + net * GRADIENTS + c, products, mask=here)
    place = net * NORMS + c
    s = tl.load(scale + place, mask=here, other=0.0)
    r = tl.load(rstd + place, mask=here, other=0.0)
    m = tl.load(mean + place, mask=here, other=0.0)
    COUNT: tl.constexpr = PIXELS * B
    slope = -s * products / COUNT * r
    tl.store(c1 + place, s, mask=here)
    tl.store(c2 + place, slope, mask=here)
    tl.store(c3 + place, -s * sums / COUNT - slope * m, mask=here)


@triton.jit
def unpool(
    gradient, chosen, y, mean, rstd, g, part, NORMS,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, WINDOW: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr, B: tl.constexpr, BM: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """The gradient before the pool and the ReLU, from that behind them; and its sums for the norm before."""
    pixel = tl.program_id(0)
    net = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, BM)
    b = tl.arange(0, B)
    here = (c < C)[:, None]
    total = tl.zeros((BM, B), tl.float32)
    SEEN: tl.constexpr = (WINDOW - 1) // STRIDE + 1
    for number in range(SEEN * SEEN):
        row = (pixel // W + PAD) // STRIDE - number // SEEN + 0 * c
        column = (pixel % W + PAD) // STRIDE - number % SEEN + 0 * c
        down = pixel // W + PAD - row * STRIDE
        across = pixel % W + PAD - column * STRIDE
        inside = (row >= 0) & (column >= 0) & (row < OH) & (column < OW) & (down < WINDOW) & (across < WINDOW)
        at = ((net * C + c) * OH * OW + row * OW + column)[:, None] * B + b[None, :]
        mine = tl.load(chosen + at, mask=here & inside[:, None], other=-1) == (down * WINDOW + across)[:, None]
        total += tl.where(mine, tl.load(gradient + at, mask=here & inside[:, None], other=0.0), 0.0)
    at = ((net * C + c) * H * W + pixel)[:, None] * B + b[None, :]
    tl.store(g + at, total, mask=here)
    left = part + (net * H * W + pixel) * 2 * C + c
    tl.store(left, tl.sum(total, 1), mask=c < C)
    if NORMED:
        m = tl.load(mean + net * NORMS + c, mask=c < C, other=0.0)
        r = tl.load(rstd + net * NORMS + c, mask=c < C, other=0.0)
        normal = (tl.load(y + at, mask=here, other=0.0) - m[:, None]) * r[:, None]
        tl.store(left + C, tl.sum(total * normal, 1), mask=c < C)


@triton.jit
def convolve_back(
    g, y, c1, c2, c3, weight, out, before, scale, shift, mean, rstd, part, PARAMETERS, NORMS,
    C_IN: tl.constexpr, C_OUT: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, B: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    TILE: tl.constexpr, NORMED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of a convolution's input at some pixels of a row; `NORMED`: on through the norm it was loaded through."""
    HIGH: tl.constexpr = (KERNEL - 1) // STRIDE + 1
    WIDE: tl.constexpr = (TILE + KERNEL - 2) // STRIDE + 1
    K: tl.constexpr = C_OUT * HIGH * WIDE
    ROWS: tl.constexpr = C_IN * TILE
    net = tl.program_id(1).to(tl.int64)
    top = tl.program_id(0) * TILE // W
    left = tl.program_id(0) * TILE % W
    # the first row and column of y that these pixels are seen from, ceil((top + PAD - KERNEL + 1) / STRIDE), kept positive
    upper = (top + PAD + KERNEL * STRIDE - KERNEL + STRIDE) // STRIDE - KERNEL
    near = (left + PAD + KERNEL * STRIDE - KERNEL + STRIDE) // STRIDE - KERNEL
    m = tl.arange(0, BM)
    c = m % C_IN
    number = m // C_IN
    b = tl.arange(0, B)
    total = tl.zeros((BM, B), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        tap = k // C_OUT
        channel = k % C_OUT
        row = upper + tap // WIDE
        column = near + tap % WIDE
        inside = (k < K) & (row >= 0) & (row < OH) & (column >= 0) & (column < OW)
        at = ((net * C_OUT + channel) * OH * OW + row * OW + column)[:, None] * B + b[None, :]
        norm = net * NORMS + channel
        value = tl.load(g + at, mask=inside[:, None], other=0.0) * tl.load(c1 + norm, mask=inside, other=0.0)[:, None]
        value += tl.load(y + at, mask=inside[:, None], other=0.0) * tl.load(c2 + norm, mask=inside, other=0.0)[:, None]
        value += tl.load(c3 + norm, mask=inside, other=0.0)[:, None]
        down = top + PAD - STRIDE * row
        across = (left + PAD + number)[:, None] - STRIDE * column[None, :]
        meets = (across >= 0) & (across < KERNEL) & (m < ROWS)[:, None] & ((k < K) & (down >= 0) & (down < KERNEL))[None, :]
        at = ((channel * KERNEL + down)[None, :] * KERNEL + across) * C_IN + c[:, None]
        weights = tl.load(weight + net * PARAMETERS + at, mask=meets, other=0.0)
        total = tl.dot(weights, value, total, input_precision=PRECISION)
    here = m < ROWS
    pixel = top * W + left + number
    at = ((net * C_IN + c) * H * W + pixel)[:, None] * B + b[None, :]
    if NORMED:
        norm = net * NORMS + c
        old = tl.load(before + at, mask=here[:, None], other=0.0)
        a = tl.load(scale + norm, mask=here, other=0.0)
        d = tl.load(shift + norm, mask=here, other=0.0)
        total = tl.where(old * a[:, None] + d[:, None] > 0.0, total, 0.0)
        centre = tl.load(mean + norm, mask=here, other=0.0)
        r = tl.load(rstd + norm, mask=here, other=0.0)
        rest = part + (net * H * W + pixel) * 2 * C_IN + c
        tl.store(rest, tl.sum(total, 1), mask=here)
        tl.store(rest + C_IN, tl.sum(total * (old - centre[:, None]) * r[:, None], 1), mask=here)
    tl.store(out + at, total, mask=here[:, None])


@triton.jit
def weigh(
    g, y, c1, c2, c3, x, streams, scale, shift, out, NORMS, GRADIENTS,
    C_IN: tl.constexpr, C_OUT: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BB: tl.constexpr, GROUP: tl.constexpr, STREAMS: tl.constexpr, NORMED: tl.constexpr, DIRECT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of a convolution's weight, summed over a group of pixels; `DIRECT`: g is the gradient of y already."""
    K: tl.constexpr = C_IN * KERNEL * KERNEL
    group = tl.program_id(0)
    net = tl.program_id(1).to(tl.int64)
    source = tl.load(streams + net).to(tl.int64) if STREAMS else net
    x += source * C_IN * H * W * B
    o = tl.arange(0, BM)
    k = tl.program_id(2) * BN + tl.arange(0, BN)
    tap = k // C_IN
    channel = k % C_IN
    there = o < C_OUT
    if not DIRECT:
        norm = net * NORMS + o
        f1 = tl.load(c1 + norm, mask=there, other=0.0)
        f2 = tl.load(c2 + norm, mask=there, other=0.0)
        f3 = tl.load(c3 + norm, mask=there, other=0.0)
    if NORMED:
        a = tl.load(scale + net * NORMS + channel, mask=k < K, other=0.0)
        d = tl.load(shift + net * NORMS + channel, mask=k < K, other=0.0)
    total = tl.zeros((BM, BN), tl.float32)
    for number in range(GROUP * (B // BB)):
        pixel = group * GROUP + number // (B // BB)
        b = number % (B // BB) * BB + tl.arange(0, BB)
        at = ((net * C_OUT + o) * OH * OW + pixel)[:, None] * B + b[None, :]
        change = tl.load(g + at, mask=there[:, None], other=0.0)
        if not DIRECT:
            change = change * f1[:, None] + tl.load(y + at, mask=there[:, None], other=0.0) * f2[:, None] + f3[:, None]
        row = pixel // OW * STRIDE - PAD + tap // KERNEL
        column = pixel % OW * STRIDE - PAD + tap % KERNEL
        inside = (k < K) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
        values = tl.load(x + ((channel * H + row) * W + column)[:, None] * B + b[None, :], mask=inside[:, None], other=0.0)
        if NORMED:
            values = tl.where(inside[:, None], tl.maximum(values * a[:, None] + d[:, None], 0.0), 0.0)
        total = tl.dot(change, tl.trans(values), total, input_precision=PRECISION)
    at = net * GRADIENTS + group * C_OUT * K + o[:, None] * K + k[None, :]
    tl.store(out + at, total, mask=there[:, None] & (k < K)[None, :])


@triton.jit
def adam(
    parameters, gradients, base, stride, count, first, second, largest, pace, late, sizes, roots, decays, clock, PARAMETERS,
    GRADIENTS, STEPS, B1, B2, EPSILON, BLOCK: tl.constexpr, AMSGRAD: tl.constexpr,
    DECOUPLED: tl.constexpr, PACED: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """Adam with L2 in the gradient, or AdamW, from partial sums of gradients.

    For each network and step, `sizes` has lr / (1 − β₁ᵗ), `roots` has √(1 − β₂ᵗ), and `decays` the weight decay (AdamW: × lr).
    `pace` has a factor on the update of each entry; entries that are marked in `late` have made fewer steps: theirs are in the
    second halves of `sizes` and `roots`.
    """
    net = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = i < PARAMETERS
    now = net * STEPS + tl.load(clock)
    at = net * PARAMETERS + i
    begin = tl.load(base + i, mask=here, other=0)
    gap = tl.load(stride + i, mask=here, other=0)
    number = tl.load(count + i, mask=here, other=0)
    gradient = tl.zeros((BLOCK,), tl.float32)
    for part in range(tl.max(number, 0)):
        gradient += tl.load(gradients + net * GRADIENTS + begin + part * gap, mask=here & (part < number), other=0.0)
    value = tl.load(parameters + at, mask=here, other=0.0)
    decay = tl.load(decays + now)
    factor = tl.load(pace + at, mask=here, other=1.0) if PACED else 1.0
    if DECOUPLED:
        value = value * (1.0 - factor * decay)
    else:
        gradient += decay * value
    m = tl.load(first + at, mask=here, other=0.0)
    v = tl.load(second + at, mask=here, other=0.0)
    m += (gradient - m) * (1.0 - B1)
    v = v * B2 + gradient * gradient * (1.0 - B2)
    tl.store(first + at, m, mask=here)
    tl.store(second + at, v, mask=here)
    if AMSGRAD:
        v = tl.maximum(v, tl.load(largest + at, mask=here, other=0.0))
        tl.store(largest + at, v, mask=here)
    size = tl.load(sizes + now)
    root = tl.load(roots + now)
    if LATE:
        young = tl.load(late + at, mask=here, other=0) != 0
        then = now + tl.num_programs(1) * STEPS
        size = tl.where(young, tl.load(sizes + then), size)
        root = tl.where(young, tl.load(roots + then), root)
    value -= factor * size * m / (tl.sqrt(v) / root + EPSILON)
    tl.store(parameters + at, value, mask=here)
