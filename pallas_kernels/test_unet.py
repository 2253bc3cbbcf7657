"""The UNet on the kernels, simulated on a CPU: the same network as on XLA, under every
transformation that training uses.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.mosaic import simulated
from support.tiny import tiny_config

from jaxunet.model.unet import build_unet
from jaxunet.ops.activation import Activation
from jaxunet.ops.backends import choose
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.ops.group_norm.operands import Norm


@pytest.fixture(autouse=True)
def _simulated():
    with simulated():
        yield


def example(**model):
    fields = {
        'channel_mult': (1, 2),
        'attention_resolutions': (4,),
        'num_classes': 0,
        'label_dropout': 0.0,
        'zero_init': False,
    } | model
    config = tiny_config(model=fields)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, *config.image_shape)), jnp.float32)
    t = jnp.asarray([3, 30], jnp.int32)
    networks = {name: build_unet(config, choose(name).ops) for name in ('xla', 'pallas')}
    params = jax.jit(networks['xla'].init)(jax.random.key(0), x, t)['params']
    return networks, params, x, t


def loss(network, params, x, t):
    return jnp.mean(jax.lax.square(network.predict(params, x, t) - x))


def assert_close(got, want):
    """Compares the float32 gradients of a UNet.

    A convolution of three bfloat16 products errs by 2⁻¹⁷ of its largest element. A gradient passes
    each one at most twice, forward and backward. If a product were missing, one would err by 2⁻¹⁰.
    """
    convolutions = sum(leaf.shape[:2] == (3, 3) for leaf in jax.tree.leaves(want))
    for path, leaf in jax.tree_util.tree_leaves_with_path(want):
        other = dict(jax.tree_util.tree_leaves_with_path(got))[path]
        most = convolutions * 2**-16 * float(jnp.abs(leaf).max())
        np.testing.assert_allclose(other, leaf, rtol=0, atol=most, err_msg=str(path))


@pytest.mark.long
@pytest.mark.parametrize(
    'model',
    [
        {'resblock_updown': True, 'scale_shift_norm': True},
        {'remat': True, 'channel_mult': (1,), 'attention_resolutions': ()},
    ],
    ids=['adm', 'remat'],
)
def test_loss_and_gradients_are_those_of_xla(model):
    networks, params, x, t = example(**model)
    (want, want_gradients), (got, gradients) = (
        jax.jit(jax.value_and_grad(lambda p, n=networks[name]: loss(n, p, x, t)))(params)
        for name in ('xla', 'pallas')
    )
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert_close(gradients, want_gradients)


def conv(x, kernel):
    one, zero = jnp.ones((1, x.shape[-1]), x.dtype), jnp.zeros((1, kernel.shape[-1]), x.dtype)
    image = Activation.of(x)
    y = choose('pallas').ops.norm_silu_conv3x3(
        Convolution(image=image, norm=Norm(one, one, 2), kernel=kernel, shift=zero, residual=image)
    )
    return jnp.sum(jnp.sin(y.value))


def arrays():
    generator = np.random.default_rng(1)
    return (
        jnp.asarray(generator.standard_normal(shape), jnp.float32)
        for shape in ((2, 4, 4, 8), (3, 3, 8, 8))
    )


def test_vmap_over_kernels_is_a_loop():
    """Other transformations of single ops: tests/ops/test_functional.py."""
    x, kernel = arrays()
    kernels = jnp.stack([kernel, 2 * kernel, -kernel])
    pull = jax.value_and_grad(conv, argnums=(0, 1))
    got = jax.jit(jax.vmap(pull, in_axes=(None, 0)))(x, kernels)
    pull = jax.jit(pull)  # see support.mosaic.simulated
    want = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(pull(x, k) for k in kernels))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-4), got, want)
