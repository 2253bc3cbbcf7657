"""Parameter count, FLOPs and memory of a configured model, from shapes alone."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import optax
from absl import logging
from jaxtyping import PyTree

from jaxunet.config import Config
from jaxunet.model.unet import Params, build_unet, init_params
from jaxunet.ops.adamw import reference
from jaxunet.ops.backends import Kernels, choose
from jaxunet.ops.references import XLA
from jaxunet.ops.vocabulary import Ops
from jaxunet.runtime import device

# Peak of a training step's activations, as a multiple of those that its forward pass keeps, by the
# backend of the op norm_silu_conv3x3. Each is the largest in the latest rows of
# docs/results/step/rows.jsonl (bfloat16, H200). XLA recomputes much of what the backward pass
# reads. Pallas's kernels keep only what they must, and their backward pass writes more; CUDA's also
# keep activations.
HELD = {'xla': 0.42, 'pallas': 2.8, 'cuda': 2.1}
# The same where kernels overlap (`Kernels.overlap`).
HELD_CONCURRENT = {'xla': 0.56, 'pallas': 5.0, 'cuda': 2.2}
LONG_ON_A_CPU = 2e11  # work of a run (`warn_if_long_on_a_cpu`)
# The settings of docs/training.md#on-a-cpu, which a wheel does not have.
FOR_A_CPU = (
    '--config.precision=float32 --config.data.image_size=32 --config.data.batch_size=16 '
    '--config.model.base_channels=32 --config.model.num_res_blocks=1 --config.train.steps=2000'
)


def tree_bytes(tree: PyTree) -> int:
    """Returns the bytes of all numeric arrays, or of their shapes, in a pytree."""
    return sum(
        math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
        for x in jax.tree.leaves(tree)
        if jnp.issubdtype(x.dtype, jnp.number)
    )


def parameter_count(config: Config) -> int:
    """Returns the number of scalar parameters of the UNet."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(param_shapes(config)))


def forward_flops(config: Config) -> float:
    """Returns the floating-point operations of one image's forward pass.

    Counts convolutions and matrix products; a multiply-add counts as two operations.
    """
    params, loss = _loss(config, batch=1, ops=XLA)
    return float(sum(p.flops for p in products(jax.make_jaxpr(loss)(params).jaxpr)))


class Product(NamedTuple):
    """A convolution or matrix product of a program.

    Fields:
      flops: floating-point operations; a multiply-add counts as two.
      operands, result: shapes and types.
      convolution: a convolution, else a matrix product.
    """

    flops: int
    operands: tuple[jax.ShapeDtypeStruct, ...]
    result: jax.ShapeDtypeStruct
    convolution: bool


def products(jaxpr: jax.extend.core.Jaxpr) -> Iterator[Product]:
    """Yields the convolutions and matrix products of a jaxpr and of those inside it."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in ('conv_general_dilated', 'dot_general'):
            operands = tuple(_outline(x.aval) for x in equation.invars)
            result = _outline(equation.outvars[0].aval)
            if name == 'dot_general':
                (contracted, _), _ = equation.params['dimension_numbers']
                depth = math.prod(operands[0].shape[i] for i in contracted)
            else:
                kernel = operands[1].shape
                features = kernel[equation.params['dimension_numbers'].rhs_spec[0]]
                depth = math.prod(kernel) // features
            flops = 2 * math.prod(result.shape) * depth
            yield Product(flops, operands, result, name == 'conv_general_dilated')
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from products(inner)


def _outline(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def memory(config: Config, kernels: Kernels) -> dict[str, int]:
    """Returns the estimated bytes per device by purpose, with these kernels.

    The keys are parameters (also those of a teacher), averages, optimizer, gradients and
    activations. With `parallel.shard_optimizer`, parameters are a device's part and the gathered
    ones. Activations are those that the forward pass keeps for the backward pass, as the kernels'
    ops do, times `HELD`; an unmeasured backend takes the largest multiple.
    """
    devices = config.parallel.devices or jax.device_count()
    share = max(config.data.batch_size // config.optimizer.accumulate_steps // devices, 1)
    with _target():
        params, loss = _loss(config, batch=share, ops=kernels.ops)
        residuals = jax.eval_shape(lambda p: jax.vjp(loss, p)[1], params)
    size = tree_bytes(params)
    shared, gathered = (1, 0)
    if config.parallel.shard_optimizer and devices > 1:
        shared, gathered = devices, _network_bytes(config, params)
    table = HELD_CONCURRENT if kernels.overlap(config, devices) else HELD
    held = table.get(_holder(kernels), max(table.values()))
    return {
        'parameters': (1 + config.diffusion.folds_guidance) * (-(-size // shared) + gathered),
        'averages': -(-size * (len(config.ema.rates) + len(config.ema.widths)) // shared),
        'optimizer': -(-tree_bytes(jax.eval_shape(optax.adam(1e-3).init, params)) // shared),
        'gradients': size,
        'activations': int(held * max(tree_bytes(residuals) - size, 0)),
    }


def _network_bytes(config: Config, params: Params) -> int:
    """Returns the bytes of the weights in the types that the network computes with."""
    narrow = functools.partial(reference.narrow, dtype=config.precision)
    model = build_unet(config)
    return tree_bytes(jax.eval_shape(lambda p: model.narrowed(p, narrow), params))


def _holder(kernels: Kernels) -> str:
    """Returns the backend whose ops keep most of the activations."""
    return kernels.names['norm_silu_conv3x3']


def _target() -> contextlib.AbstractContextManager[None]:
    """Lets kernels be traced as for a Hopper GPU on a machine that cannot run them."""
    try:
        device.target()
    except device.UnsupportedDeviceError:
        return device.use(device.Target.HOPPER)
    return contextlib.nullcontext()


def summary(config: Config) -> str:
    """Returns the parameter count, FLOPs and memory as readable lines."""
    forward = forward_flops(config) / 1e9
    kernels = choose(config.backend, config.precision, here=False)
    parts = memory(config, kernels)
    gib = ', '.join(f'{name} {value / 2**30:.2f}' for name, value in parts.items())
    # The backward pass takes twice as many, the target of consistency one pass more, and guidance
    # that is folded in another.
    diffusion = config.diffusion
    step = (3 + (diffusion.objective == 'consistency') + diffusion.folds_guidance) * forward
    return (
        f'parameters: {parameter_count(config):,}\n'
        f'GFLOPs per image: {forward:.2f} forward, about {step:.2f} per training step\n'
        f'memory per device, GiB: {sum(parts.values()) / 2**30:.2f} estimated '
        f'with {_holder(kernels)} ({gib})' + _snapshots(config)
    )


def warn_if_long_on_a_cpu(config: Config) -> None:
    """Warns of a run that takes a CPU more than some hours, before its step compiles for minutes.

    The work is assumed to grow with images, pixels and the square of the channels. A run of
    configs/digits.py has a work of 8e8, which takes two CPU cores a minute. A run with
    `train.minutes` is as long as its user asked.
    """
    if config.train.minutes:
        return
    height, width, _ = config.image_shape
    images = config.train.steps * config.data.batch_size
    work = images * height * width * config.model.base_channels**2
    if jax.default_backend() == 'cpu' and work > LONG_ON_A_CPU:
        logging.warning(
            'JAX finds no GPU here, and this run is long for a CPU: %s steps of %d images of '
            '%dx%d. For a CPU, add %s',
            f'{config.train.steps:,}',
            config.data.batch_size,
            height,
            width,
            FOR_A_CPU,
        )


def _snapshots(config: Config) -> str:
    """Returns a line about the snapshots of power-function averages; '' if the run keeps none."""
    if not config.snapshot_every:
        return ''
    count = config.train.steps // config.snapshot_every
    size = 2 * parameter_count(config) * len(config.ema.widths)
    return f'\nsnapshots on disk: {count} of {size / 2**20:.1f} MiB, {count * size / 2**30:.2f} GiB'


def param_shapes(config: Config) -> Params:
    """Returns the shapes of the UNet's parameters."""
    return jax.eval_shape(lambda: init_params(build_unet(config), config, jax.random.key(0)))


def forward_pass(
    config: Config, batch: int, ops: Ops
) -> tuple[Params, Callable[[Params], jax.Array]]:
    """Returns the parameters' shapes, and their function: the prediction for images of zeros."""
    model = build_unet(config, ops)
    labels = jnp.zeros((batch,), jnp.int32) if config.model.num_classes else None
    keys = jax.random.split(jax.random.key(0), batch) if config.model.dropout else None

    def predict(params: Params) -> jax.Array:
        x = jnp.zeros((batch, *config.image_shape), jnp.float32)
        shape = config.low_res_shape
        low_res = None if shape is None else jnp.zeros((batch, *shape), jnp.float32)
        t = jnp.zeros((batch,), jnp.int32)
        return model.predict(params, x, t, labels, keys, low_res=low_res)

    return param_shapes(config), predict


def _loss(config: Config, batch: int, ops: Ops) -> tuple[Params, Callable[[Params], jax.Array]]:
    """Returns the parameters' shapes, and the loss of one forward pass as a function."""
    params, predict = forward_pass(config, batch, ops)
    return params, lambda params: jnp.mean(jax.lax.square(predict(params)))
