"""The order of the images: a pure function of (seed, epoch, position).

It is the same in numpy on the host and in jnp inside `jit`. Every epoch visits each image once, in
a new random order, without a stored permutation. A Feistel network encrypts position i of the epoch
over [0, a) × [0, b), where a · b is at least n and close to it. While the result lies outside
[0, n), it is encrypted again (cycle walking). A cycle has at most a · b − n such places, so that
many extra rounds give an exact bijection of [0, n) without a data-dependent loop.

A stream of images that can only be read in large pieces takes a few pieces at a time, chosen at
random, and mixes their images (`piecewise_indices`).
Source: Black & Rogaway 2002, "Ciphers with arbitrary finite domains", methods 2 and 3.

All arithmetic is uint32, which wraps alike everywhere and needs no 64-bit mode.
"""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from jaxunet.runtime.bits import mix_bits

ROUNDS = 8  # Feistel rounds
SMALL, SMALL_ROUNDS = 256, 12  # sets below SMALL images need more rounds to mix
MAX_IMAGES = 2**31 - 1

U32 = UInt32[Array, '*shape'] | UInt32[np.ndarray, '*shape']
Broadcast = UInt32[Array, '*#shape'] | UInt32[np.ndarray, '*#shape']


@functools.lru_cache(maxsize=128)
def factors(n: int) -> tuple[int, int]:
    """Returns (a, b) with the least a · b ≥ n, both of similar size and above 1 if n allows.

    Factors of similar size mix best.
    """
    side = math.isqrt(n)
    a = np.arange(max(min(2, n), side // (2 if n < 4096 else 4)), side + 2, dtype=np.int64)
    b = -(-n // a)
    best = np.lexsort((-a, a * b))[0]
    return int(a[best]), int(b[best])


def permuted(i: U32, epoch: Broadcast, n: int, seed: int) -> U32:
    """Returns the image at place i of an epoch: a bijection of [0, n) for each epoch and seed.

    Args:
      i: places, uint32 in [0, n), numpy or jnp, one-dimensional.
      epoch: uint32, of i's shape or (1,).
      n: number of images, 1 ≤ n < 2^31.
      seed: any integer ≥ 0.

    Raises:
      ValueError: n or seed out of range.
    """
    if not 1 <= n <= MAX_IMAGES:
        raise ValueError(f'n: expected 1 to {MAX_IMAGES} images, found {n}')
    xp: ModuleType = jnp if isinstance(i, jax.Array) or isinstance(epoch, jax.Array) else np
    a, b = factors(n)
    key = epoch * np.uint32(0x9E3779B9) + np.uint32(_seed_word(seed))
    keys = [
        mix_bits(key ^ np.uint32(_mix_int(r + 1)))
        for r in range(SMALL_ROUNDS if n < SMALL else ROUNDS)
    ]
    x = _network(i, keys, a, b)
    for _ in range(a * b - n):
        x = xp.where(x >= np.uint32(n), _network(x, keys, a, b), x)
    return x


def batch_indices(
    step: int | Int[Array, ''] | Int[np.ndarray, ''], batch_size: int, n: int, seed: int
) -> Int[Array, ' batch'] | Int[np.ndarray, ' batch']:
    """Returns the images of a step's batch, int32 indices in [0, n).

    They are positions step · batch_size, ... of the endless sequence of epochs.

    Args:
      step: 0 ≤ step < 2^32. A Python or numpy integer gives numpy; a JAX array or tracer of any
        integer type gives jnp.
      batch_size: images per batch, below 2^31.
      n: images in the set, below 2^31.
      seed: `config.seed`.

    Raises:
      ValueError: batch_size, n or seed out of range.
    """
    if not 1 <= batch_size <= MAX_IMAGES:
        raise ValueError(f'batch_size: expected 1 to {MAX_IMAGES}, found {batch_size}')
    traced = isinstance(step, jax.Array)
    xp: ModuleType = jnp if traced else np
    # One-dimensional, because numpy warns when scalars wrap.
    start = xp.reshape(xp.asarray(step).astype(np.uint32), (1,))
    epoch, first = _divide_product(start, batch_size, n, xp)
    place = first + xp.arange(batch_size, dtype=np.uint32)  # below n + batch_size < 2^32
    index = permuted(place % np.uint32(n), epoch + place // np.uint32(n), n, seed)
    return index.astype(np.int32)


class Pieces(NamedTuple):
    """Consecutive parts of a set that are read as a whole.

    Fields:
      counts: number of images of each.
      window: pieces whose images are mixed.
    """

    counts: Int[np.ndarray, ' pieces']
    window: int


def piecewise_indices(
    step: int, batch_size: int, pieces: Pieces, seed: int
) -> Int[np.ndarray, ' batch']:
    """Returns the images of a step's batch, as `batch_indices` does, from a few pieces at a time.

    Every epoch shuffles the pieces, takes `pieces.window` of them after another, and shuffles the
    images of these, so that each image comes once.
    """
    n = int(pieces.counts.sum())
    places = step * batch_size + np.arange(batch_size, dtype=np.int64)
    out = np.empty(batch_size, np.int32)
    for epoch in range(places[0] // n, places[-1] // n + 1):
        here = places // n == epoch
        out[here] = _of_epoch(places[here] % n, epoch, pieces, seed)
    return out


def _of_epoch(
    places: Int[np.ndarray, ' rows'], epoch: int, pieces: Pieces, seed: int
) -> Int[np.ndarray, ' rows']:
    count, key = len(pieces.counts), np.array([epoch & 0xFFFFFFFF], np.uint32)
    # Seeds beyond those of `batch_indices`, one for the pieces and one for each window.
    order = permuted(np.arange(count, dtype=np.uint32), key, count, seed | 1 << 32)
    ends = np.cumsum(pieces.counts[order])  # in the shuffled set
    places = places.copy()
    windows = np.searchsorted(ends, places, 'right') // pieces.window
    for window in np.unique(windows).tolist():
        first = int(ends[window * pieces.window - 1]) if window else 0
        last = int(ends[min((window + 1) * pieces.window, count) - 1])
        rows = windows == window
        inner = (places[rows] - first).astype(np.uint32)
        places[rows] = first + permuted(inner, key, last - first, seed | (window + 2) << 32)
    piece = np.searchsorted(ends, places, 'right')
    begins = np.cumsum(pieces.counts) - pieces.counts
    return begins[order[piece]] + places - (ends[piece] - pieces.counts[order[piece]])


def _divide_product(x: U32, factor: int, n: int, xp: ModuleType) -> tuple[U32, U32]:
    """Returns divmod(x · factor, n), the quotient modulo 2^32; the product may need 63 bits."""
    common = math.gcd(factor, n)
    factor, n = factor // common, n // common
    divisor, one = np.uint32(n), np.uint32(1)
    whole, rest = x // divisor, x % divisor

    def reduced(quotient: U32, remainder: U32) -> tuple[U32, U32]:
        over = remainder >= divisor
        return (
            xp.where(over, quotient + one, quotient),
            xp.where(over, remainder - divisor, remainder),
        )

    # x · factor = whole · n · factor + rest · factor. Double-and-add computes the second product,
    # reduced by n at every bit.
    quotient, remainder = xp.zeros_like(x), xp.zeros_like(x)
    for bit in bin(factor)[2:]:
        quotient, remainder = reduced(quotient + quotient, remainder + remainder)
        if bit == '1':
            quotient, remainder = reduced(quotient, remainder + rest)
    return quotient + whole * np.uint32(factor), remainder * np.uint32(common)


def _network(x: U32, keys: list[Broadcast], a: int, b: int) -> U32:
    """Feistel network, a bijection of [0, a · b): a keyed hash of one half shifts the other."""
    left, right = x % np.uint32(a), x // np.uint32(a)
    for r, key in enumerate(keys):
        if r % 2 == 0:
            left = (
                left + mix_bits(right * np.uint32(0xC2B2AE3D) + key) % np.uint32(a)
            ) % np.uint32(a)
        else:
            right = (
                right + mix_bits(left * np.uint32(0x27D4EB2F) + key) % np.uint32(b)
            ) % np.uint32(b)
    return right * np.uint32(a) + left


def _mix_int(x: int) -> int:
    return int(mix_bits(np.array([x], np.uint32))[0])


def _seed_word(seed: int) -> int:
    """Folds an integer of any size to 32 bits."""
    if seed < 0:
        raise ValueError(f'seed: expected 0 or more, found {seed}')
    word = 0x243F6A88
    while True:
        word = _mix_int((word ^ seed) & 0xFFFFFFFF)
        seed >>= 32
        if not seed:
            return word
