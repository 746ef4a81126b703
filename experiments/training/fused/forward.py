"""The kernels of the fused engine, on the way forward: many small networks of one shape, trained side by side.

A step of one of the paper's networks is some hundred kernels that leave a large GPU idle. Here every kernel works on all
networks at once: the first axis of every tensor is the network. Numbers lie as `(net, channel, row, column, sample)`, samples
together, so that a program reads whole rows of the batch whatever the number of channels, and a pixel at the border is the same
for all of a row.

One program computes one or two pixels of all output channels, for all samples: a product

    (pixel · channel out, tap · channel in) @ (tap · channel in, sample)

in which a tap that two pixels see is loaded once. Batch norm costs no pass of its own: a convolution leaves mean and spread of
its pixels behind, `statistics` gathers them, and the next reader applies max(scale · y + shift, 0) as it loads. Sums are taken
in a fixed order: a run gives the same bits twice.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gather(
    images, labels, order, flips, clock, x, y, mean, deviation, STEPS, SIZE: tl.constexpr, SIDE: tl.constexpr, B: tl.constexpr,
    CHUNK: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """The batch of each stream at this step, as `(stream, channel · row · column, sample)`, its colours normalised."""
    stream = tl.program_id(1).to(tl.int64)
    position = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    b = tl.arange(0, B)
    step = tl.load(clock)
    at = (stream * STEPS + step) * B + b
    index = tl.load(order + at).to(tl.int64)
    source = position[None, :] + tl.zeros((B, CHUNK), tl.int32)
    if FLIP:
        column = source % SIDE
        source = tl.where(tl.load(flips + at)[:, None] != 0, source + SIDE - 1 - 2 * column, source)
    inside = position < SIZE
    pixels = tl.load(images + index[:, None] * SIZE + source, mask=inside[None, :], other=0).to(tl.float32)
    colour = position // (SIDE * SIDE)
    centre = tl.load(mean + colour, mask=inside, other=0.0)
    width = tl.load(deviation + colour, mask=inside, other=1.0)
    values = tl.trans((pixels / 255.0 - centre[None, :]) / width[None, :])
    tl.store(x + (stream * SIZE + position.to(tl.int64))[:, None] * B + b[None, :], values, mask=inside[:, None])
    if tl.program_id(0) == 0:
        tl.store(y + stream * B + b, tl.load(labels + index))


@triton.jit
def convolve(
    x, streams, weight, bias, y, scale, shift, part, PARAMETERS, NORMS,
    C_IN: tl.constexpr, C_OUT: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, B: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    TILE: tl.constexpr, STREAMS: tl.constexpr, NORMED: tl.constexpr, STATISTICS: tl.constexpr, BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y = weight ∗ x at some pixels of a row; `NORMED`: x is what a norm and a ReLU make of what is loaded."""
    REACH: tl.constexpr = (TILE - 1) * STRIDE + KERNEL
    K: tl.constexpr = C_IN * KERNEL * REACH
    ROWS: tl.constexpr = C_OUT * TILE
    PIXELS: tl.constexpr = OH * OW
    net = tl.program_id(1).to(tl.int64)
    top = tl.program_id(0) * TILE // OW
    left = tl.program_id(0) * TILE % OW
    source = tl.load(streams + net).to(tl.int64) if STREAMS else net
    x += source * C_IN * H * W * B
    m = tl.arange(0, BM)
    out = m % C_OUT
    number = m // C_OUT
    b = tl.arange(0, B)
    total = tl.zeros((BM, B), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        tap = k // C_IN
        channel = k % C_IN
        row = top * STRIDE - PAD + tap // REACH
        column = left * STRIDE - PAD + tap % REACH
        inside = (k < K) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
        values = tl.load(x + ((channel * H + row) * W + column)[:, None] * B + b[None, :], mask=inside[:, None], other=0.0)
        if NORMED:
            a = tl.load(scale + net * NORMS + channel, mask=k < K, other=0.0)
            c = tl.load(shift + net * NORMS + channel, mask=k < K, other=0.0)
            values = tl.where(inside[:, None], tl.maximum(values * a[:, None] + c[:, None], 0.0), 0.0)
        across = (tap % REACH)[None, :] - number[:, None] * STRIDE
        meets = (across >= 0) & (across < KERNEL) & (m < ROWS)[:, None] & (k < K)[None, :]
        at = ((out[:, None] * KERNEL + (tap // REACH)[None, :]) * KERNEL + across) * C_IN + channel[None, :]
        weights = tl.load(weight + net * PARAMETERS + at, mask=meets, other=0.0)
        total = tl.dot(weights, values, total, input_precision=PRECISION)
    here = m < ROWS
    if BIAS:
        total += tl.load(bias + net * PARAMETERS + out, mask=here, other=0.0)[:, None]
    pixel = top * OW + left + number
    tl.store(y + ((net * C_OUT + out) * PIXELS + pixel)[:, None] * B + b[None, :], total, mask=here[:, None])
    if STATISTICS:
        mean = tl.sum(total, 1) / B
        apart = total - mean[:, None]
        rest = part + (net * PIXELS + pixel) * 2 * C_OUT + out
        tl.store(rest, mean, mask=here)
        tl.store(rest + C_OUT, tl.sum(apart * apart, 1), mask=here)


@triton.jit
def statistics(
    part, gamma, beta, mean, rstd, scale, shift, running_mean, running_var, PARAMETERS, NORMS, MOMENTUM, EPSILON,
    C: tl.constexpr, PIXELS: tl.constexpr, B: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Mean and variance of a batch from those of its pixels; the norm as `scale · y + shift`; running statistics."""
    net = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BC)
    p = tl.arange(0, BP)
    mask = (p < PIXELS)[:, None] & (c < C)[None, :]
    at = part + net * PIXELS * 2 * C + p[:, None] * 2 * C + c[None, :]
    means = tl.load(at, mask=mask, other=0.0)
    squares = tl.load(at + C, mask=mask, other=0.0)
    centre = tl.sum(means, 0) / PIXELS
    apart = tl.where(mask, means - centre[None, :], 0.0)
    COUNT: tl.constexpr = PIXELS * B
    spread = tl.sum(squares, 0) + B * tl.sum(apart * apart, 0)
    variance = spread / COUNT
    inverse = 1.0 / tl.sqrt(variance + EPSILON)
    here = c < C
    g = tl.load(gamma + net * PARAMETERS + c, mask=here, other=0.0)
    h = tl.load(beta + net * PARAMETERS + c, mask=here, other=0.0)
    place = net * NORMS + c
    tl.store(mean + place, centre, mask=here)
    tl.store(rstd + place, inverse, mask=here)
    tl.store(scale + place, g * inverse, mask=here)
    tl.store(shift + place, h - centre * g * inverse, mask=here)
    old = tl.load(running_mean + place, mask=here, other=0.0)
    tl.store(running_mean + place, old + MOMENTUM * (centre - old), mask=here)
    old = tl.load(running_var + place, mask=here, other=0.0)
    tl.store(running_var + place, old + MOMENTUM * (spread / (COUNT - 1) - old), mask=here)


@triton.jit
def join(
    y, scale, shift, skip, skip_scale, skip_shift, z, NORMS,
    C: tl.constexpr, PIXELS: tl.constexpr, B: tl.constexpr, BM: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """z = max(norm(y) + skip, 0), the end of a block; `SKIP`: 0 none, 1 as it is, 2 through a norm."""
    pixel = tl.program_id(0)
    net = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, BM)
    here = c < C
    at = ((net * C + c) * PIXELS + pixel)[:, None] * B + tl.arange(0, B)[None, :]
    norm = net * NORMS + c
    value = tl.load(y + at, mask=here[:, None], other=0.0)
    value = value * tl.load(scale + norm, mask=here, other=0.0)[:, None] + tl.load(shift + norm, mask=here, other=0.0)[:, None]
    if SKIP > 0:
        other = tl.load(skip + at, mask=here[:, None], other=0.0)
        if SKIP == 2:
            a = tl.load(skip_scale + norm, mask=here, other=0.0)
            other = other * a[:, None] + tl.load(skip_shift + norm, mask=here, other=0.0)[:, None]
        value += other
    tl.store(z + at, tl.maximum(value, 0.0), mask=here[:, None])


@triton.jit
def pool(
    y, scale, shift, z, chosen, NORMS,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, WINDOW: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr, B: tl.constexpr, BM: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """The largest of each window of max(norm(y), 0), and which one it was (−1 if it is zero, where no gradient goes back)."""
    pixel = tl.program_id(0)
    net = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, BM)
    b = tl.arange(0, B)
    here = c < C
    best = tl.full((BM, B), -1.0, tl.float32)
    which = tl.zeros((BM, B), tl.int32)
    if NORMED:
        a = tl.load(scale + net * NORMS + c, mask=here, other=0.0)
        d = tl.load(shift + net * NORMS + c, mask=here, other=0.0)
    for tap in range(WINDOW * WINDOW):
        row = pixel // OW * STRIDE - PAD + tap // WINDOW + 0 * c
        column = pixel % OW * STRIDE - PAD + tap % WINDOW + 0 * c
        inside = (row >= 0) & (row < H) & (column >= 0) & (column < W)
        at = ((net * C + c) * H * W + row * W + column)[:, None] * B + b[None, :]
        value = tl.load(y + at, mask=(here & inside)[:, None], other=0.0)
        if NORMED:
            value = value * a[:, None] + d[:, None]
        value = tl.where(inside[:, None], tl.maximum(value, 0.0), -1.0)
        which = tl.where(value > best, tap, which)
        best = tl.maximum(value, best)
    at = ((net * C + c) * OH * OW + pixel)[:, None] * B + b[None, :]
    tl.store(z + at, best, mask=here[:, None])
    tl.store(chosen + at, tl.where(best > 0.0, which, -1).to(tl.int8), mask=here[:, None])


@triton.jit
def classify(
    z, streams, targets, weight, bias, clock, losses, right, gradient, d_weight, d_bias, valid, PARAMETERS, GRADIENTS, STEPS,
    C: tl.constexpr, PIXELS: tl.constexpr, CLASSES: tl.constexpr, B: tl.constexpr, BC: tl.constexpr, BJ: tl.constexpr,
    TRAIN: tl.constexpr,
):  # fmt: skip
    """Mean over pixels, linear layer, cross entropy; forward, and on the way back as far as the block before."""
    net = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BC)
    b = tl.arange(0, B)
    j = tl.arange(0, BJ)
    here = (c < C)[:, None]
    features = tl.zeros((BC, B), tl.float32)
    for pixel in range(PIXELS):
        features += tl.load(z + ((net * C + c) * PIXELS + pixel)[:, None] * B + b[None, :], mask=here, other=0.0)
    features = features / PIXELS
    at = net * PARAMETERS + j[:, None] * C + c[None, :]
    weights = tl.load(weight + at, mask=(j < CLASSES)[:, None] & (c < C)[None, :], other=0.0)
    logits = tl.dot(weights, features, input_precision="ieee")
    logits += tl.load(bias + net * PARAMETERS + j, mask=j < CLASSES, other=0.0)[:, None]
    logits = tl.where((j < CLASSES)[:, None], logits, -float("inf"))
    target = tl.load(targets + tl.load(streams + net).to(tl.int64) * B + b)
    top = tl.max(logits, 0)
    powers = tl.exp(logits - top[None, :])
    whole = tl.sum(powers, 0)
    mine = j[:, None] == target[None, :]
    chosen = tl.sum(tl.where(mine, logits, 0.0), 0)
    loss = tl.log(whole) + top - chosen
    step = tl.load(clock)
    if TRAIN:
        tl.store(losses + net * STEPS + step, tl.sum(loss, 0) / B)
        tl.store(right + net * STEPS + step, tl.sum((chosen >= top).to(tl.float32), 0) / B)
        change = (powers / whole[None, :] - tl.where(mine, 1.0, 0.0)) / B
        tl.store(d_bias + net * GRADIENTS + j, tl.sum(change, 1), mask=j < CLASSES)
        product = tl.dot(change, tl.trans(features), input_precision="ieee")
        at = net * GRADIENTS + j[:, None] * C + c[None, :]
        tl.store(d_weight + at, product, mask=(j < CLASSES)[:, None] & (c < C)[None, :])
        back = tl.dot(tl.trans(weights), change, input_precision="ieee") / PIXELS
        for pixel in range(PIXELS):
            tl.store(gradient + ((net * C + c) * PIXELS + pixel)[:, None] * B + b[None, :], back, mask=here)
    else:
        counts = tl.load(valid + step * B + b)
        tl.store(losses + net, tl.load(losses + net) + tl.sum(loss * counts, 0))
        good = (chosen >= top).to(tl.float32) * counts
        tl.store(right + net, tl.load(right + net) + tl.sum(good, 0))
