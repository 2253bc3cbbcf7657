"""Tests an installed wheel with kernels, on a machine without a compiler or a GPU.

    cd ELSEWHERE && python CHECKOUT/tools/wheel.py

Loads both compiled modules, and compares a small network with its gradients, computed by the CPU
handlers of the CUDA kernels, with plain JAX. Exits with an error if jaxunet is that of a checkout,
or a result differs.
"""

from __future__ import annotations

import importlib.metadata
import pathlib
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np

import jaxunet
import xla_ffi
from jaxunet.config import Config, recipes
from jaxunet.model.unet import Params, build_unet, init_params
from jaxunet.ops.backends import ops_of
from jaxunet.ops.vocabulary import Ops
from jaxunet.runtime.plugins import backend_names

NETWORK = {'base_channels': 32, 'channel_mult': (1, 2), 'num_res_blocks': 1}
ATTENTION = {'attention_resolutions': (8,), 'num_head_channels': 32, 'norm_groups': 8}


def check_installation() -> None:
    """Checks where the packages are, what they hold and that both modules were loaded."""
    for package in (jaxunet, xla_ffi):
        folder = pathlib.Path(str(package.__file__)).parents[1]
        assert folder == pathlib.Path(sysconfig.get_path('purelib')), f'not installed: {folder}'
    assert importlib.metadata.version('jaxunet') == jaxunet.__version__
    assert set(backend_names()) >= {'pallas', 'cuda'}
    assert {'digits', 'images'} <= set(recipes.names())
    assert xla_ffi._cpu is not None, xla_ffi._cpu_error
    assert xla_ffi._cuda is not None, xla_ffi._cuda_error
    assert set(xla_ffi._cpu.registrations()) <= set(xla_ffi._cuda.registrations())


def outputs(config: Config, ops: Ops, params: Params) -> tuple[jax.Array, Params]:
    """Returns the network's mean square and its gradients, for images of 16×16 pixels."""
    model = build_unet(config, ops)
    x = jax.random.normal(jax.random.key(1), (2, 16, 16, 1))
    t = jnp.array([3, 500])
    return jax.jit(
        jax.value_and_grad(lambda params: jnp.mean(jnp.square(model.predict(params, x, t))))
    )(params)


def main() -> None:
    """Runs all checks; prints the largest difference, relative to the largest value."""
    check_installation()
    config = Config().replace(
        data={'image_size': (16,)}, model=NETWORK | ATTENTION, precision='float32'
    )
    fresh = init_params(build_unet(config, ops_of('xla')), config, jax.random.key(0))
    leaves, tree = jax.tree.flatten(fresh)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    noisy = [x + 0.05 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    params = jax.tree.unflatten(tree, noisy)
    expected, found = (outputs(config, ops_of(name), params) for name in ('xla', 'cuda'))
    worst = max(
        float(np.abs(np.subtract(a, b)).max() / max(np.abs(a).max(), 1e-6))
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True)
    )
    assert worst < 1e-3, f'the CPU handlers differ from plain JAX by {worst:.1e}'
    print(f'jaxunet {jaxunet.__version__}, {xla_ffi._cuda.architectures}: differs by {worst:.1e}')


if __name__ == '__main__':
    main()
