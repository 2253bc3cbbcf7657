"""Weights converted together are those that every layer converts by itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny import tiny_config

from jaxunet.model.encoder import TIME_EMBEDDING, Encoder
from jaxunet.model.noisy_classifier import build_classifier
from jaxunet.model.unet import build_unet
from jaxunet.ops.references import UPDATE, XLA

MODEL = {'channel_mult': (1, 2), 'attention_resolutions': (4,)}
FLOAT32 = {'unet': (TIME_EMBEDDING,), 'classifier': (TIME_EMBEDDING, 'pool')}


def build(network: str, precision: str) -> Encoder:
    """Returns a tiny network for images of 8×8×1."""
    config = tiny_config(model=MODEL).replace(precision=precision)
    return build_unet(config, XLA) if network == 'unet' else build_classifier(config, 10, XLA)


@pytest.mark.parametrize('precision', ['bfloat16', 'float16', 'float32'])
@pytest.mark.parametrize('network', list(FLOAT32))
def test_predictions_and_gradients_are_the_same(network: str, precision: str) -> None:
    """Bit for bit; and each kernel has the type in which its layer computes."""
    model = build(network, precision)
    rng = np.random.default_rng(0)
    x, t = jnp.asarray(rng.normal(size=(2, 8, 8, 1)), jnp.float32), jnp.asarray([3, 30])
    params = jax.jit(model.init)(jax.random.key(0), x, t)['params']
    params = jax.tree.map(lambda w: jnp.asarray(rng.normal(size=w.shape), w.dtype) / 8, params)
    narrowed = model.narrowed(params, lambda arrays: UPDATE.narrow(arrays, jnp.dtype(precision)))

    for path, leaf in jax.tree.leaves_with_path(narrowed):
        computes_in_float32 = path[0].key.startswith(FLOAT32[network])
        narrow = path[-1].key == 'kernel' and not computes_in_float32
        assert leaf.dtype == (precision if narrow else 'float32'), jax.tree_util.keystr(path)

    @jax.jit
    def both(params: object, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.value_and_grad(lambda x: jnp.sum(jnp.sin(model.predict(params, x, t))))(x)

    jax.tree.map(np.testing.assert_array_equal, both(params, x), both(narrowed, x))
