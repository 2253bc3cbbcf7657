"""The work of one training step, op by op: floating-point operations and bytes, from shapes alone.

The network is called with ops that only record their shapes, so this works for any config. Each op
of each pass (forward, backward) is one `Work`, in one class of `KINDS`. N images have P = N·H·W
pixels in all, and an element of the compute type has e bytes:

| class | FLOPs | bytes |
|---|---|---|
| convolution forward, C to F channels | 2·9·P·C·F | e·(P·C + P·F + 9·C·F) |
| ... with a residual of R channels | | e·P·R more |
| ... and a shortcut R to F | 2·P·R·F more | e·R·F more |
| convolution input gradient | as forward, without residual | the same |
| ... of the shortcut, a separate op | 2·P·R·F | e·(P·F + P·R + R·F) |
| each of the three of an upsampled image, P those of dy | 2·4·P·C·F | e·(P·C/4 + P·F + 9·C·F) |
| convolution weight gradient | as forward, with shortcut | e·(P·C + P·F + 9·C·F [+ P·R + R·F]) |
| GroupNorm forward before a convolution | | e·P·C: x is read once, the convolution applies it |
| GroupNorm forward alone | | 2·e·P·C: x is read, y is written |
| GroupNorm backward | | e·P·C·(3 + n): x and dy are read, dx is written |
| attention forward, h heads of d, T tokens | 4·N·h·T²·d | 4·e·N·T·h·d: qkv and the result |
| attention backward | 2.5 times forward | 8·e·N·T·h·d: qkv, result, dy, dqkv |
| linear, C to F, each of three products | 2·P·C·F | e·(P·C + P·F + C·F) |
| AdamW | | see `_update` |

A convolution of an upsampled image needs four products for a pixel, not nine, because every 3×3
window covers 2×2 pixels of the small image. XLA has no such convolution, so its floor counts nine
products and reads the upsampled image.

n is the number of gradients from other readers of x (the residual or shortcut, and the skip
connection), which the norm's backward pass adds. Attention's backward pass recomputes its weights
(arXiv 2307.08691). Convolutions with at most `FEW` input or output channels are a separate class.
Linear layers on embeddings are in the class linear.

Not counted: scales, offsets, biases and statistics; recomputation (model.remat); arithmetic that is
not a product; images and loss. Kernels that add up partial results are not needed in principle, so
their class has no work. The work of XLA's remaining kernels depends on XLA's fusions, so
`jaxunet.benchmark.roofline.measured` reads it from the compiled program.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxunet.config import Config
from jaxunet.model import cost
from jaxunet.model.encoder import TIME_EMBEDDING
from jaxunet.model.unet import Params
from jaxunet.ops.activation import Activation
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.ops.conv3x3.upsampling import nearest
from jaxunet.ops.dropout import Dropout
from jaxunet.ops.group_norm.operands import Norm
from jaxunet.ops.linear.projections import project
from jaxunet.ops.vocabulary import Ops, WithInput

KINDS = (
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    REDUCTIONS,
    NORM_FORWARD,
    NORM_BACKWARD,
    ATTENTION_FORWARD,
    ATTENTION_BACKWARD,
    LINEAR,
    FEW_CHANNELS,
    UPDATE,
    REMAINING,
) = (
    'convolution forward',
    'convolution input gradient',
    'convolution weight gradient',
    'split reductions',
    'GroupNorm forward',
    'GroupNorm backward',
    'attention forward',
    'attention backward',
    'linear',
    'convolutions with few channels',
    'AdamW and 16-bit copies',
    "XLA's remaining kernels",
)
CONVOLUTIONS = (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
# Classes that the report also shows by level.
LEVELLED = (*CONVOLUTIONS, NORM_FORWARD, NORM_BACKWARD)
Level = tuple[int | str, ...]  # (height, width), or another name in a table; () = no level
FEW = 8  # most channels that the kernels for images take


class Work(NamedTuple):
    """One op of one pass.

    Fields:
      kind: one of `KINDS`.
      level: (height, width) of its images; () for ops without images.
      flops: multiplications and additions of its products.
      bytes: bytes that it must read and write.
    """

    kind: str
    level: Level
    flops: int
    bytes: int


def step_work(config: Config, xla: Collection[str] = ()) -> list[Work]:
    """Returns the work of one training step of a config on one device.

    Args:
      xla: the ops, as in `jaxunet.config.OPS`, that XLA computes. XLA fuses norms with other work,
        so norms are then among its remaining kernels, and the result leaves them out. XLA's
        attention is matrix products, which count as linear. XLA has no special kernels for
        convolutions with few channels.
    """
    recorder = _Recorder(jnp.dtype(config.precision).itemsize, frozenset(xla))
    params, predict = cost.forward_pass(
        config.replace(model={'remat': False}), config.data.batch_size, recorder.ops()
    )
    for product in cost.products(jax.make_jaxpr(predict)(params).jaxpr):
        recorder.product(product)
    return [*recorder.work, _update(config, params)]


def _update(config: Config, params: Params) -> Work:
    """Returns the work of the gradient norm, AdamW, the averages and the 16-bit copies.

    The norm has to be known before a gradient is used, so gradients are read twice. Weights, both
    moments and every average are float32, read once and written once. If the network computes in
    16 bits, gradients of its kernels (weights of convolutions and linear layers) have 16 bits, and
    16-bit copies of these kernels are written beside the weights.
    """
    narrow = jnp.dtype(config.precision).itemsize
    averages = len(config.ema.rates) + len(config.ema.widths)
    moved = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        copied = path[-1].key == 'kernel' and not path[0].key.startswith(TIME_EMBEDDING)
        gradient = narrow if copied else 4
        copy = narrow if copied and narrow < 4 else 0
        moved += math.prod(leaf.shape) * (2 * gradient + 2 * 4 * (3 + averages) + copy)
    return Work(UPDATE, (), 0, moved)


class _Recorder:
    """Ops that record the work of their forward and backward passes, and return zeros.

    Attributes:
      work: the record.
    """

    def __init__(self, itemsize: int, xla: frozenset[str]) -> None:
        self.work: list[Work] = []
        self._itemsize, self._xla = itemsize, xla
        self._first = True  # the first convolution reads the images, whose gradient nobody needs

    def ops(self) -> Ops:
        """Returns the ops."""
        return Ops(
            self.conv3x3,
            self.upsample_conv3x3,
            self.norm_silu_conv3x3,
            self.norm_silu_conv3x3_and_input,
            self.group_norm,
            self.group_norm_and_input,
            self.attention,
            self.linear,
            project,  # its products are recorded by `product`
        )

    def conv3x3(self, conv: Convolution) -> Activation:
        """Records a convolution."""
        return self._conv('conv3x3', conv)

    def upsample_conv3x3(self, conv: Convolution) -> Activation:
        """Records a convolution of an upsampled image; only XLA reads the large image."""
        if 'conv3x3' in self._xla:
            return self._conv('conv3x3', conv.of(nearest(conv.image.value)))
        return self._conv('conv3x3', conv, by_phases=True)

    def norm_silu_conv3x3(self, conv: Convolution) -> Activation:
        """Records a convolution, and its norm, whose result nothing else reads."""
        self._norm('norm_silu_conv3x3', conv.image, written=False, copies=0)
        return self._conv('norm_silu_conv3x3', conv)

    def norm_silu_conv3x3_and_input(
        self, conv: Convolution, *, copies: int = 1
    ) -> WithInput[Activation]:
        """Records a convolution and its norm, where the image has other readers."""
        self._norm('norm_silu_conv3x3', conv.image, written=False, copies=copies)
        return WithInput(self._conv('norm_silu_conv3x3', conv), (conv.image,) * copies)

    def group_norm(
        self, x: Activation, norm: Norm, *, silu: bool = False, dropout: Dropout | None = None
    ) -> Array:
        """Records a norm. Dropout inside it adds no bytes."""
        return self._norm('group_norm', x, written=True, copies=0)

    def group_norm_and_input(
        self, x: Activation, norm: Norm, *, silu: bool = False, copies: int = 1
    ) -> WithInput[Array]:
        """Records a norm where x has other readers."""
        return WithInput(self._norm('group_norm', x, written=True, copies=copies), (x,) * copies)

    def attention(self, qkv: Array, *, num_heads: int) -> Array:
        """Records an attention."""
        batch, tokens, packed = qkv.shape
        flops = 4 * batch * tokens**2 * packed // 3  # heads · width = packed / 3
        elements = batch * tokens * packed // 3
        apart = 'attention' not in self._xla
        self._note(ATTENTION_FORWARD if apart else LINEAR, (), flops, 4 * elements)
        self._note(ATTENTION_BACKWARD if apart else LINEAR, (), flops * 5 // 2, 8 * elements)
        return jnp.zeros((batch, tokens, packed // 3), qkv.dtype)

    def linear(
        self, x: Array, kernel: Array, bias: Array, *, residual: Array | None = None
    ) -> Array:
        """Records a linear layer."""
        channels, features = kernel.shape
        pixels = math.prod(x.shape[:3])
        flops, elements = 2 * pixels * channels * features, x.size + pixels * features + kernel.size
        added = 0 if residual is None else residual.size
        self._note(LINEAR, (), flops, elements + added)
        for _ in ('input gradient', 'weight gradient'):
            self._note(LINEAR, (), flops, elements)
        return jnp.zeros((*x.shape[:3], features), x.dtype)

    def product(self, p: cost.Product) -> None:
        """Records a matrix product outside of the ops, forward and backward.

        Each gradient reads two of the product's three arrays and writes the third.
        """
        moved = sum(a.size * a.dtype.itemsize for a in (*p.operands, p.result))
        level = max(p.operands[0].shape[1:3], p.result.shape[1:3]) if p.convolution else ()
        for kind in CONVOLUTIONS if p.convolution else (LINEAR,) * 3:
            self.work.append(Work(kind, level, p.flops, moved))

    def _conv(self, op: str, conv: Convolution, *, by_phases: bool = False) -> Activation:
        x, kernel, shortcut = conv.image, conv.kernel, conv.shortcut
        residual = Activation(()) if conv.residual is None else conv.residual
        image, (channels, features) = x.parts[0].shape[:3], kernel.shape[2:]
        read_pixels, taps = math.prod(image), 9
        if by_phases:
            image, taps = (image[0], 2 * image[1], 2 * image[2]), 4
        pixels, level = math.prod(image), image[1:]
        added = residual.channels
        flops = 2 * taps * pixels * channels * features
        elements = read_pixels * channels + pixels * features + kernel.size
        flops_1x1, elements_1x1 = 0, 0
        if shortcut is not None:
            flops_1x1 = 2 * pixels * shortcut.size
            elements_1x1 = pixels * added + shortcut.size
        read = elements_1x1 or pixels * added
        sides = [part.shape[3] for part in (*x.parts, *residual.parts)]
        few = min(*sides, features) <= FEW and op not in self._xla
        forward, backward, weights = (FEW_CHANNELS,) * 3 if few else CONVOLUTIONS
        self._note(forward, level, flops + flops_1x1, elements + read)
        if not self._first:
            self._note(backward, level, flops, elements)
        if shortcut is not None:
            self._note(backward, level, flops_1x1, elements_1x1 + pixels * features)
        self._note(weights, level, flops + flops_1x1, elements + elements_1x1)
        self._first = False
        return Activation.of(jnp.zeros((*image, features), x.dtype))

    def _norm(self, op: str, x: Activation, *, written: bool, copies: int) -> Array:
        image = x.parts[0].shape[:3]
        elements, level = math.prod(image) * x.channels, image[1:]
        if op not in self._xla:
            self._note(NORM_FORWARD, level, 0, elements * (2 if written else 1))
            self._note(NORM_BACKWARD, level, 0, elements * (3 + copies))
        return jnp.zeros((*image, x.channels), x.dtype)

    def _note(self, kind: str, level: Level, flops: int, elements: int) -> None:
        self.work.append(Work(kind, level, flops, elements * self._itemsize))
