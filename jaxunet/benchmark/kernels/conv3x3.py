"""Measurements of the convolutions.

The convolutions of images and of upsampled images are measured in three directions (forward, input
gradient, weight gradient); the fused op is measured forward, and with all gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jaxunet.ops.activation import Activation
from jaxunet.ops.backends import implementations
from jaxunet.ops.conv3x3.cases import CIFAR10, ELEPHANTS64, UPSAMPLED, Case
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.ops.group_norm.operands import Norm
from jaxunet.ops.references import Op
from jaxunet.runtime.measurement import ArrayFunction, Arrays, Measurement, with_gradients
from jaxunet.runtime.plugins import Backend

CASES = ELEPHANTS64 + CIFAR10
IMAGE_CHANNELS = 3


def measurements(
    batch: int, dtype: DTypeLike = jnp.bfloat16, backends: Sequence[Backend] = ()
) -> Iterator[Measurement]:
    """Yields all measurements at a batch size, on XLA and the backends that implement the op.

    Plain convolutions are named by height, width and channels; fused ones have the name of their
    case. The FLOPs of upsampled images are those of the plain convolution, though kernels may need
    fewer. A backend without an op for upsampled images convolves the large image.
    """
    shapes = dict.fromkeys(
        (case.height, case.width, case.channels, case.features) for case in CASES
    )
    for shape in shapes:
        yield from _plain(
            Case(*shape[:2], (shape[2],), shape[3], norm=False), batch, dtype, backends
        )
    for case in UPSAMPLED:
        yield from _plain(case, batch, dtype, backends, 'upsample_conv3x3', scale=2)
    for case in dict.fromkeys(case for case in CASES if case.norm):
        yield from _fused(case, batch, dtype, backends)


def _plain(
    case: Case,
    batch: int,
    dtype: DTypeLike,
    backends: Sequence[Backend],
    name: str = 'conv3x3',
    scale: int = 1,
) -> Iterator[Measurement]:
    array = jax.ShapeDtypeStruct
    image = batch, case.height, case.width
    x = array((*image, case.channels), dtype)
    dy = array((batch, scale * case.height, scale * case.width, case.features), dtype)
    kernel, shift = (
        array((3, 3, case.channels, case.features), dtype),
        array((1, case.features), jnp.float32),
    )

    def zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros(like.shape, like.dtype)

    def by_direction(op: Op) -> dict[str, ArrayFunction]:
        def convolve(x: jax.Array, kernel: jax.Array, shift: jax.Array) -> jax.Array:
            return op(Convolution(image=Activation.of(x), kernel=kernel, shift=shift)).value

        def forward(i: Arrays) -> PyTree:
            return convolve(i['x'], i['kernel'], i['shift'])

        # The function is linear, so its gradient does not depend on the point: zeros will do.
        def input_gradient(i: Arrays) -> PyTree:
            _, pull = jax.vjp(lambda x: convolve(x, i['kernel'], zeros(shift)), zeros(x))
            return pull(i['dy'])[0]

        def weight_gradient(i: Arrays) -> PyTree:
            _, pull = jax.vjp(lambda k: convolve(i['x'], k, zeros(shift)), zeros(kernel))
            return pull(i['dy'])[0]

        return {
            'forward': forward,
            'input_gradient': input_gradient,
            'weight_gradient': weight_gradient,
        }

    sides = {owner: by_direction(op) for owner, op in implementations(name, backends).items()}
    flops = scale**2 * case.flops(batch)
    inputs_of: dict[str, Arrays] = {
        'forward': {'x': x, 'kernel': kernel, 'shift': shift},
        'input_gradient': {'dy': dy, 'kernel': kernel},
        'weight_gradient': {'x': x, 'dy': dy},
    }
    for direction, inputs in inputs_of.items():
        if direction == 'input_gradient' and case.channels == IMAGE_CHANNELS:
            continue  # training needs no gradient of the images
        each = {owner: functions[direction] for owner, functions in sides.items()}
        yield Measurement(name, case.name, direction, batch, each, inputs, flops)


def _fused(
    case: Case, batch: int, dtype: DTypeLike, backends: Sequence[Backend]
) -> Iterator[Measurement]:
    array, wide = jax.ShapeDtypeStruct, jnp.float32
    image = batch, case.height, case.width
    inputs: Arrays = {
        'x': tuple(array((*image, c), dtype) for c in case.parts),
        'scale': array((1, case.channels), wide),
        'offset': array((1, case.channels), wide),
        'kernel': array((3, 3, case.channels, case.features), dtype),
        'shift': array((batch if case.per_sample else 1, case.features), wide),
    }
    flops = case.flops(batch)
    projected = bool(case.residual) and case.residual != (case.features,)
    if case.residual:
        inputs['residual'] = tuple(array((*image, c), dtype) for c in case.residual)
    if projected:
        inputs['shortcut'] = array((sum(case.residual), case.features), dtype)
        flops += 2 * batch * case.height * case.width * sum(case.residual) * case.features

    def side(op: Op) -> ArrayFunction:
        def call(i: Arrays) -> PyTree:
            conv = Convolution(
                image=Activation(i['x']),
                norm=Norm(i['scale'], i['offset'], case.groups),
                kernel=i['kernel'],
                shift=i['shift'],
                residual=Activation(i['residual']) if case.residual else None,
                shortcut=i.get('shortcut'),
            )
            return op(conv).value

        return call

    sides = {name: side(op) for name, op in implementations('norm_silu_conv3x3', backends).items()}
    yield Measurement('norm_silu_conv3x3', case.name, 'forward', batch, sides, inputs, flops)
    # The gradient of a residual without shortcut is dy itself, which a network does not copy.
    fixed = () if projected else ('residual',)
    both = {name: with_gradients(function, fixed) for name, function in sides.items()}
    inputs = inputs | {'dy': array((*image, case.features), dtype)}
    yield Measurement(
        'norm_silu_conv3x3', case.name, 'forward+backward', batch, both, inputs, 3 * flops
    )
