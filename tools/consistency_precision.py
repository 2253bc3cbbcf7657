"""Prints how much a network's rounding disturbs the loss of consistency tuning, by noise level.

    PYTHONPATH=. python tools/consistency_precision.py RUN [--precision bfloat16] [--q 64,256]

RUN is a workdir, a checkpoint or a weight file of a model that predicts v, edm or flow, tuned or
not. The loss compares D(x_t) with D(x_r), and divides by t − r. Each line has, as means over
images:

  t            the noise level
  loss         ‖D(x_t) − D(x_r)‖ / (t − r) in float32, without dropout
  rounding     ‖D'(x_t) − D(x_t)‖ / (t − r), where D' is D in the other precision
  difference   ‖(D'(x_t) − D'(x_r)) − (D(x_t) − D(x_r))‖ / (t − r): the error of what is compared,
               which is smaller as far as both passes round alike

A q suits a precision if `difference` stays well below `loss`.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxunet.checkpoint.load import load_model
from jaxunet.config import PRECISIONS, Config
from jaxunet.config.consistency import check_teacher
from jaxunet.data.source import spread
from jaxunet.data.sources import open_images
from jaxunet.diffusion.levels import time_of_sigma
from jaxunet.diffusion.process import make_diffusion
from jaxunet.model.low_res import low_res_of
from jaxunet.model.unet import Params, build_unet
from jaxunet.ops.backends import choose
from jaxunet.training.batch import normalise
from jaxunet.training.consistency import K, denoised, earlier_level

LEVELS = (0.01, 0.05, 0.2, 0.8, 3.0, 12.0, 80.0)
COLUMNS = ('loss', 'rounding', 'difference')


class Batch(NamedTuple):
    """Training images in [−1, 1] and their noise, with what else the network sees."""

    x0: Array
    noise: Array
    labels: Array | None
    low_res: Array | None


def images_of(config: Config, count: int) -> Batch:
    """Returns `count` training images that are spread over the set."""
    source = open_images(config)
    rows = spread(len(source), count)
    x0 = normalise(jnp.asarray(source.load(rows)))
    labels = jnp.asarray(source.labels[rows], jnp.int32) if config.model.num_classes else None
    noise = jax.random.normal(jax.random.key(0), x0.shape)
    return Batch(x0, noise, labels, low_res_of(config, x0))


def errors(config: Config, params: Params, batch: Batch, precision: str, q: int) -> np.ndarray:
    """Returns `COLUMNS` by level, shape (levels, 3)."""
    process = make_diffusion(config.diffusion)

    def images(precision: str, time: Array) -> Array:
        made = config.replace(precision=precision)
        unet = build_unet(made, choose(config.backend, precision).ops)

        def call(seen: Array, time: Array) -> Array:
            return unet.predict(params, seen, time, batch.labels, low_res=batch.low_res)

        return denoised(process, call, batch.x0, batch.noise, time)

    @jax.jit
    def measured(level: Array) -> Array:
        sigma = jnp.full(len(batch.x0), level)
        lower, gap = earlier_level(sigma, 1 / q)
        times = [time_of_sigma(config.diffusion, s) for s in (sigma, lower)]
        (wide, wide_r), (narrow, narrow_r) = (
            [images(p, time) for time in times] for p in ('float32', precision)
        )
        parts = wide - wide_r, narrow - wide, (narrow - narrow_r) - (wide - wide_r)
        norms = [jnp.sqrt(jnp.sum(jnp.square(part), axis=(1, 2, 3))) for part in parts]
        return jnp.stack([jnp.mean(norm / gap) for norm in norms])

    return np.array([measured(jnp.float32(level)) for level in LEVELS])


def main() -> None:
    """Reads the command line and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('run')
    parser.add_argument('--precision', choices=PRECISIONS[1:], default='bfloat16')
    parser.add_argument('--q', default='64,256', help='discretisations, separated by commas')
    parser.add_argument('--images', type=int, default=64)
    options = parser.parse_args()
    qs = [int(q) for q in options.q.split(',')]
    if min(qs) <= 1 + K:
        parser.error(f'--q: expected more than {1 + K}, so that no target is the image itself')
    model = load_model(options.run)
    check_teacher(model.config, options.run)
    tunes = {'objective': 'consistency', 'consistency_of': model.config.diffusion.prediction}
    config = model.config.replace(diffusion=tunes)
    params = jax.tree.map(jnp.asarray, model.params)
    batch = images_of(config, options.images)
    print(f'{model.note}; {jax.devices()[0].device_kind}, jax {jax.__version__}')
    print('q     t     ', *(f'{name:>11}' for name in COLUMNS), ' difference / loss')
    for q in qs:
        for level, row in zip(
            LEVELS, errors(config, params, batch, options.precision, q), strict=True
        ):
            values = ' '.join(f'{value:11.4g}' for value in row)
            print(f'{q:<5} {level:<6g} {values}  {row[2] / row[0]:.3f}')


if __name__ == '__main__':
    main()
