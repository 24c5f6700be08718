"""Sums of tiles of rows on the GPU, in the `Row` order of their length: only the additions.

Legend: R row length, W columns per program, F folds, C = W // F; rows/tiles.py defines the layout of tiles.
"""

import triton
import triton.language as tl


@triton.jit
def _halve_adjacent(x_RC):
    """(0 + 1), (2 + 3), ..."""
    even, odd = tl.split(tl.reshape(x_RC, [x_RC.shape[0], x_RC.shape[1] // 2, 2]))
    return even + odd


@triton.jit
def _halves(x_RC):
    """The lower and the upper half of the columns."""
    half: tl.constexpr = x_RC.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(x_RC, [x_RC.shape[0], 2, half]), [0, 2, 1]))


@triton.jit
def _halve_apart(x_RC):
    """(0 + n/2), (1 + n/2 + 1), ..."""
    low, high = _halves(x_RC)
    return low + high


@triton.jit
def _halve_down(x_RC):
    """Apply _halve_apart until one column of up to 4096 is left."""
    x = x_RC
    if x.shape[1] >= 2048:
        x = _halve_apart(x)
    if x.shape[1] >= 1024:
        x = _halve_apart(x)
    if x.shape[1] >= 512:
        x = _halve_apart(x)
    if x.shape[1] >= 256:
        x = _halve_apart(x)
    if x.shape[1] >= 128:
        x = _halve_apart(x)
    if x.shape[1] >= 64:
        x = _halve_apart(x)
    if x.shape[1] >= 32:
        x = _halve_apart(x)
    if x.shape[1] >= 16:
        x = _halve_apart(x)
    if x.shape[1] >= 8:
        x = _halve_apart(x)
    if x.shape[1] >= 4:
        x = _halve_apart(x)
    if x.shape[1] >= 2:
        x = _halve_apart(x)
    return x


@triton.jit
def slots_to_row(
    slots_RC, ROWS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, SHUFFLE: tl.constexpr,
    FOLDS: tl.constexpr = 1,
):  # fmt: skip
    """Slot totals [ROWS, LANES * VECTOR] -> row totals [ROWS], in Row order.

    SHUFFLE leaves the lanes to tl.sum, whose butterfly is the same tree if a thread holds one lane, which is so if a
    lane's places are one load. Without it every addition is explicit (the interpreter's tl.sum has another order).
    FOLDS, up to 4, are the lanes that a thread holds: they are added first.
    """
    x = slots_RC
    if VECTOR >= 2:
        x = _halve_adjacent(x)
    if VECTOR >= 4:
        x = _halve_adjacent(x)
    if VECTOR >= 8:
        x = _halve_adjacent(x)
    if SHUFFLE:
        tl.static_assert(FOLDS <= 4 and (FOLDS == 1 or LANES <= 32))
        if FOLDS >= 2:
            x = _halve_apart(x)
        if FOLDS >= 4:
            x = _halve_apart(x)
        row_total = tl.sum(x, 1)
    else:
        group: tl.constexpr = 32 if LANES > 32 else LANES
        groups: tl.constexpr = LANES // group
        x = _halve_down(tl.reshape(x, [ROWS * groups, group]))
        x = _halve_down(tl.reshape(x, [ROWS, groups]))
        row_total = tl.reshape(x, [ROWS])
    return row_total


@triton.jit
def _add_2(slots, x):
    low, high = _halves(x)
    return slots + low + high


@triton.jit
def _add_4(slots, x):
    low, high = _halves(x)
    return _add_2(_add_2(slots, low), high)


@triton.jit
def _add_8(slots, x):
    low, high = _halves(x)
    return _add_4(_add_4(slots, low), high)


@triton.jit
def row_total(
    terms_RW, ROWS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, SHUFFLE: tl.constexpr,
    FOLDS: tl.constexpr = 1,
):  # fmt: skip
    """Terms [ROWS, W] of whole rows or whole chunks -> their sums [ROWS], in Row order; 1 to 16 steps.

    Row starts at +0. A single step omits that, which matters only for a sum of -0, and adds it once at the end.
    """
    STEPS: tl.constexpr = terms_RW.shape[1] // (LANES * VECTOR)
    slots = tl.zeros((ROWS, LANES * VECTOR), tl.float32)
    if STEPS == 1:
        slots = terms_RW
    elif STEPS == 2:
        slots = _add_2(slots, terms_RW)
    elif STEPS == 4:
        slots = _add_4(slots, terms_RW)
    elif STEPS == 8:
        slots = _add_8(slots, terms_RW)
    else:
        tl.static_assert(STEPS == 16)
        low, high = _halves(terms_RW)
        slots = _add_8(_add_8(slots, low), high)
    total = slots_to_row(slots, ROWS, LANES, VECTOR, SHUFFLE, FOLDS)
    if STEPS == 1:
        total += 0.0
    return total


@triton.jit
def tile_total(
    terms_RFC, ROWS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, SHUFFLE: tl.constexpr
):  # fmt: skip
    """row_total of a tile [ROWS, F, C]."""
    F: tl.constexpr = terms_RFC.shape[1]
    terms_RW = tl.reshape(terms_RFC, [ROWS, F * terms_RFC.shape[2]])
    return row_total(terms_RW, ROWS, LANES, VECTOR, SHUFFLE, F)


@triton.jit
def tile_max(x_RFC):
    """Maximum of each row of a tile, [ROWS]."""
    return tl.max(tl.max(x_RFC, 1), 1)


@triton.jit
def lanes_total(lanes_L, SHUFFLE: tl.constexpr):
    """Sums of lanes [L] -> their sum [1]: halves groups of 32, then the groups.

    One-dimensional, because in two dimensions Triton may assign several lanes to a thread, as it did for a row that is
    in flight at the same time.
    """
    if SHUFFLE and lanes_L.shape[0] <= 512:
        total = tl.zeros((1,), tl.float32) + tl.sum(lanes_L, 0)
    else:
        total = slots_to_row(tl.reshape(lanes_L, [1, lanes_L.shape[0]]), 1, lanes_L.shape[0], 1, False)
    return total


@triton.jit
def chunk_sums(partial_ptr, row, CHUNKS: tl.constexpr, CHUNK_LANES: tl.constexpr, SHUFFLE: tl.constexpr):
    """The sum of a row that is split into CHUNKS chunks, [1]."""
    chunk = tl.arange(0, CHUNK_LANES)
    sums = tl.load(partial_ptr + row.to(tl.int64) * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0)
    return lanes_total(sums, SHUFFLE)
