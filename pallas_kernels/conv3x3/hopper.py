"""The forward 3×3 convolution on Hopper (sm_90): supported shapes, tiles, the kernel's operands.

`hopper_kernel` contains the kernel and explains its pipeline.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxunet.ops.activation import Activation
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.ops.terms import bfloat16_terms
from pallas_kernels import tile_table
from pallas_kernels.conv3x3 import hopper_kernel, hopper_tiles
from pallas_kernels.conv3x3.activation import activated
from pallas_kernels.conv3x3.hopper_plan import Mainloop, mainloop
from pallas_kernels.conv3x3.schedule import CHUNK, TAPS, Tile
from pallas_kernels.hopper_grid import ceil_div

Image = Float[Array, 'batch height width _']


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Call:
    """One call: conv3x3(act(x)) + shift [+ residual, or residual · shortcut]; arrays or shapes.

    Fields:
      conv: images of bfloat16, float16 or float32, and weights of the same type. It has no norm;
        several parts of a residual need a shortcut.
      affine: float32 (a, b), each (batch, channels): act(x) = SiLU(a · x + b), rounded to x's type;
        None: act is the identity.
      flipped: convolve with `dispatch.flip(kernel)` without a copy: the input gradient of the
        convolution with `kernel`, (3, 3, features, channels).
    """

    conv: Convolution
    affine: tuple[Array, Array] | None = None
    flipped: bool = dataclasses.field(default=False, metadata={'static': True})

    @property
    def dtype(self) -> jnp.dtype:
        """The type of x."""
        return jnp.dtype(self.conv.image.dtype)

    @property
    def channels(self) -> tuple[int, ...]:
        """Channels of the parts of x."""
        return _channels(self.conv.image)

    @property
    def residual_channels(self) -> tuple[int, ...]:
        """Channels of the parts of the residual; () if there is none."""
        return _channels(self.conv.residual)

    @property
    def features(self) -> int:
        """Channels of the result."""
        return self.conv.kernel.shape[-2 if self.flipped else -1]

    def mainloop(self, tile: Tile) -> Mainloop:
        """Returns the steps of the kernel with a tile."""
        batch, height, width, _ = self.conv.image.parts[0].shape
        split = self.dtype == jnp.float32
        return mainloop(
            (batch, height, width),
            self.channels,
            self.features,
            tile,
            residual=self.residual_channels,
            shortcut=self.conv.shortcut is not None,
            split=split,
            flipped=self.flipped,
            activated=self.affine is not None and not split,
            itemsize=self.dtype.itemsize,
        )


def supports(call: Call, tile: Tile | None = None) -> str | None:
    """Returns None if `forward` supports these operands, else the reason, from shapes and types."""
    conv, dtype = call.conv, call.dtype
    parts, others = conv.image.parts, () if conv.residual is None else conv.residual.parts
    shape, total, features = parts[0].shape, sum(call.channels), call.features
    expected = (3, 3, features, total) if call.flipped else (3, 3, total, features)
    if dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f'x: expected bfloat16, float16 or float32, found {dtype}'
    if any(
        len(part.shape) != 4 or part.shape[:-1] != shape[:-1] or part.dtype != dtype
        for part in (*parts, *others)
    ):
        given = ', '.join(f'{part.shape} {part.dtype}' for part in (*parts, *others))
        return f'x and residual: expected parts that agree in all but channels, found {given}'
    if conv.kernel.shape != expected or conv.kernel.dtype != dtype:
        given = f'{conv.kernel.shape} in {conv.kernel.dtype}'
        return f'kernel: expected {expected} in {dtype}, found {given}'
    # A tensor map's rows must be multiples of 16 bytes; a float32 is read as its bfloat16 terms.
    if any(c % 8 for c in (*call.channels, *call.residual_channels, features)):
        return (
            f'channels: expected multiples of 8, found {call.channels} and '
            f'{call.residual_channels} -> {features}'
        )
    if 0 in (*shape, total, features):
        return f'x: found an empty array, {shape} -> {features} channels'
    problem = _residual_problem(call)
    if problem is not None:
        return problem
    if call.affine is not None and any(
        a.shape != (shape[0], total) or a.dtype != jnp.float32 for a in call.affine
    ):
        return (
            f'affine: expected two float32 {(shape[0], total)}, '
            f'found {[(a.shape, str(a.dtype)) for a in call.affine]}'
        )
    if tile is None:
        return None  # every shape has a tile
    return call.mainloop(tile).schedule.problem()


def _residual_problem(call: Call) -> str | None:
    """Returns the reason why `forward` does not support the channels of the residual, or None."""
    channels, features, shortcut = call.residual_channels, call.features, call.conv.shortcut
    if shortcut is None and channels not in ((), (features,)):
        return (
            f'residual: expected one array of {features} channels without a shortcut, '
            f'found {channels}'
        )
    expected = (sum(channels), features)
    if shortcut is not None and (shortcut.shape != expected or shortcut.dtype != call.dtype):
        given = f'{shortcut.shape} in {shortcut.dtype}'
        return f'shortcut: expected {expected} in {call.dtype}, found {given}'
    return None


def candidates(call: Call, limit: int = 12) -> list[Tile]:
    """Returns at most `limit` tiles worth timing for these operands, best guess first."""
    return hopper_tiles.candidates(call.mainloop, limit)


def default_tile(call: Call) -> Tile:
    """Returns the tile for shapes in no table: the first of `candidates`."""
    return candidates(call, limit=1)[0]


def shape_class(call: Call) -> str:
    """Returns the name of these operands in the table of tiles."""
    channels, others = ('+'.join(map(str, c)) for c in (call.channels, call.residual_channels))
    added = f', {others} {"added" if call.conv.shortcut is None else "projected"}' * bool(others)
    options = ', activated' * (call.affine is not None) + ', flipped' * call.flipped
    image = 'x'.join(map(str, call.conv.image.parts[0].shape[:-1]))
    return f'{image}, {channels} to {call.features}{added}{options}'


def choose_tile(call: Call) -> Tile:
    """Returns the tile measured on this device for these operands, else `default_tile`."""
    tile = tile_table.measured(Tile, 'conv3x3/hopper', call.dtype, shape_class(call))
    return tile or default_tile(call)


def forward(call: Call, tile: Tile | None = None) -> Float[Array, 'batch height width features']:
    """Runs the kernel.

    Products accumulate in float32, and sums are rounded once, to x's type. float32 operands
    multiply as three bfloat16 products (about 16 bits).

    Args:
      tile: None takes `choose_tile`.

    Raises:
      ValueError: `supports` refuses the operands; the message says why.
    """
    if reason := supports(call, tile):
        raise ValueError(f'conv3x3 on Hopper: {reason}')
    return _forward(call, tile=tile or choose_tile(call))


# Jitted, so that equal calls share one trace and one lowering.
@functools.partial(jax.jit, static_argnames='tile')
def _forward(call: Call, *, tile: Tile) -> Array:
    dtype, features = call.dtype, call.features
    split = dtype == jnp.float32
    if call.affine is not None and split:
        # A float32 must be split into bfloat16 terms after the activation.
        image = Activation(activated(call.conv.image.parts, call.affine))
        call = Call(dataclasses.replace(call.conv, image=image), None, call.flipped)
    conv, p = call.conv, call.mainloop(tile)
    others = () if conv.residual is None else conv.residual.parts

    halves = _halves if split else list
    inputs = halves(conv.image.parts)
    taps = conv.kernel.reshape(TAPS, *conv.kernel.shape[2:])
    matrices = [_weights(taps, call.flipped, p.outputs_first, split)]
    if conv.shortcut is not None:
        inputs += halves(others)
        matrices.append(_weights(conv.shortcut[None], False, p.outputs_first, split))
    elif others:
        inputs += bfloat16_terms(others[0], 3) if split else others
        columns = ceil_div(tile.features, CHUNK) * CHUNK
        matrices.append(jnp.eye(tile.features, columns, dtype=matrices[0].dtype)[None])
    missing = p.schedule.feature_tiles * tile.features - features
    shift = jnp.pad(conv.shift.astype(jnp.float32), ((0, 0), (0, missing)))
    affine = [] if call.affine is None else [_padded(v, call.channels) for v in call.affine]
    images = [x.reshape(*x.shape[:2], 1, *x.shape[2:]) for x in inputs]

    y = hopper_kernel.call(
        p, _silu if affine else None, dtype, [*images, *matrices, shift, *affine]
    )
    return y.reshape(*y.shape[:2], *y.shape[3:])


def _channels(image: Activation | None) -> tuple[int, ...]:
    return () if image is None else tuple(part.shape[-1] for part in image.parts)


def _halves(parts: Sequence[Image]) -> list[Image]:
    """Returns the high halves of all parts, then the low ones."""
    pairs = [bfloat16_terms(part, 2) for part in parts]
    return [high for high, _ in pairs] + [low for _, low in pairs]


def _weights(
    matrices: Float[Array, 'taps rows columns'],
    outputs_first: bool,
    wanted_first: bool,
    split: bool,
) -> Array:
    """Returns the weights in the order in which the kernel reads them.

    Args:
      outputs_first, wanted_first: True if output channels come first: in `matrices`, and in the
        order that the kernel needs.
      split: concatenate them for the high, high and low halves of x.
    """
    if wanted_first and not outputs_first:
        matrices = jnp.swapaxes(matrices, 1, 2)
    if not split:
        return matrices
    high, low = bfloat16_terms(matrices, 2)
    return jnp.concatenate([high, low, high], axis=2 if wanted_first else 1)


def _silu(x: Array) -> Array:
    """Returns x · sigmoid(x) = h + h · tanh(h), h = x / 2: one special-function instruction."""
    half = x * 0.5
    return half + half * jnp.tanh(half)


def _padded(
    vector: Float[Array, 'batch channels'], widths: Sequence[int]
) -> Float[Array, 'batch _']:
    """Appends zeros to each part, up to whole chunks."""
    if not any(width % CHUNK for width in widths):
        return vector
    ends = itertools.accumulate(widths)
    parts = [
        jnp.pad(vector[:, end - width : end], ((0, 0), (0, -width % CHUNK)))
        for width, end in zip(widths, ends, strict=True)
    ]
    return jnp.concatenate(parts, axis=-1)
