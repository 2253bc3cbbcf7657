"""Sampling in the benchmark: draws many images by DDIM, and times the network alone beside it.

The sampler cannot be faster than the network that it calls. The network's share of the time shows
what the loop around it costs: its arithmetic, the noise, launches, and fetching the images.
"""

from __future__ import annotations

import jax
import numpy as np

from jaxunet.benchmark.cases import Prepared, Sampling
from jaxunet.benchmark.jax_side import random_inputs, timed_compile
from jaxunet.config import Config
from jaxunet.model.unet import Params, build_unet
from jaxunet.sampling.generator import Generator
from jaxunet.sampling.options import SamplerConfig


def prepare(config: Config, params: Params, asked: Sampling, notes: dict[str, str]) -> Prepared:
    """Compiles the sampler and the network alone; returns them ready to be timed.

    A step draws a batch of `config.data.batch_size` images and fetches them, as `jaxunet.sample`
    does. `Prepared.alone` makes the same evaluations of the network, without waiting between them.

    Args:
      asked: number of images and of DDIM steps.
      notes: as in `Prepared`.

    Raises:
      UserError: the sampler does not support this number of steps, or the model.
    """
    batch, device = config.data.batch_size, jax.devices()[0]
    options = SamplerConfig(name='ddim', steps=asked.steps)
    generator = Generator(config, options, batch_size=batch, devices=[device])
    inputs = random_inputs(config)
    labels = np.asarray(inputs['labels']) if 'labels' in inputs else None
    low_res = None
    if generator.low_res_shape is not None:
        shape = batch, *generator.low_res_shape
        low_res = np.random.default_rng(config.seed).integers(0, 256, shape, np.uint8)
    held = {'params': generator.put(params)}
    timed = timed_compile(lambda: generator.compile(held['params']))
    network = jax.jit(build_unet(config, generator.kernels.ops).predict)
    evaluated = [inputs['x0'], inputs['t'], inputs.get('labels')]
    options_of_network = {'low_res': inputs['low_res']} if 'low_res' in inputs else {}

    def run(steps: int) -> None:
        for i in range(steps):
            indices = np.arange(i * batch, (i + 1) * batch)
            drawn = generator(
                held['params'], seed=0, indices=indices, labels=labels, low_res=low_res
            )
            np.asarray(drawn)

    def alone(steps: int) -> None:
        out = None
        for _ in range(steps * generator.sampler.evaluations):
            out = network(held['params'], *evaluated, **options_of_network)
        jax.block_until_ready(out)

    run(1)
    alone(1)
    return Prepared(
        run=run,
        lower_s=timed.lower_s,
        compile_s=timed.compile_s,
        bytes_moved=None,
        peak_bytes=None,
        notes=notes | {'sampler': f'ddim, {asked.steps} steps'},
        close=held.clear,
        unit=-(-asked.images // batch),
        alone=alone,
        evaluations=generator.sampler.evaluations,
    )
