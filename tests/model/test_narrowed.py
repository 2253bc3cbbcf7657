"""Weights converted together are those that every layer converts by itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny import tiny_config
from support.turns import in_turn

from jaxunet.model.encoder import TIME_EMBEDDING, Encoder
from jaxunet.model.noisy_classifier import build_classifier
from jaxunet.model.unet import Params, UNet, build_unet
from jaxunet.ops.references import UPDATE, XLA

MODEL = {'channel_mult': (1, 2), 'attention_resolutions': (4,)}
FLOAT32 = {'unet': (TIME_EMBEDDING,), 'classifier': (TIME_EMBEDDING, 'pool')}


def build(network: str, precision: str) -> Encoder:
    """Returns a tiny network for images of 8×8×1."""
    config = tiny_config(model=MODEL).replace(precision=precision)
    return build_unet(config, XLA) if network == 'unet' else build_classifier(config, 10, XLA)


def draw(model: Encoder) -> tuple[Params, jax.Array, jax.Array]:
    """Returns random weights of a network, images and timesteps."""
    rng = np.random.default_rng(0)
    x, t = jnp.asarray(rng.normal(size=(2, 8, 8, 1)), jnp.float32), jnp.asarray([3, 30])
    shapes = jax.eval_shape(model.init, jax.random.key(0), x, t)['params']
    params = jax.tree.map(lambda w: jnp.asarray(rng.normal(size=w.shape), w.dtype) / 8, shapes)
    return params, x, t


def narrowed(model: Encoder, params: Params, precision: str) -> Params:
    """Returns the weights narrowed together; checks their types."""
    found = model.narrowed(params, lambda arrays: UPDATE.narrow(arrays, jnp.dtype(precision)))
    in_float32 = FLOAT32['unet' if isinstance(model, UNet) else 'classifier']
    for path, leaf in jax.tree.leaves_with_path(found):
        narrow = path[-1].key == 'kernel' and not path[0].key.startswith(in_float32)
        assert leaf.dtype == (precision if narrow else 'float32'), jax.tree_util.keystr(path)
    return found


@pytest.mark.parametrize(
    ('network', 'precision'),
    in_turn({name: name for name in FLOAT32}, ('bfloat16',), ('float16',)),
)
def test_predictions_and_gradients_are_the_same(network: str, precision: str) -> None:
    """Bit for bit; and each kernel has the type in which its layer computes."""
    model = build(network, precision)
    params, x, t = draw(model)

    @jax.jit
    def both(params: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.value_and_grad(lambda x: jnp.sum(jnp.sin(model.predict(params, x, t))))(x)

    found = both(narrowed(model, params, precision), x)
    jax.tree.map(np.testing.assert_array_equal, both(params, x), found)


@pytest.mark.parametrize('precision', ['bfloat16', 'float16', 'float32'])
@pytest.mark.parametrize('network', list(FLOAT32))
def test_the_weights_are_those_that_each_layer_would_convert(network: str, precision: str) -> None:
    """In float32, they are the weights themselves."""
    model = build(network, precision)
    params, *_ = draw(model)
    found = narrowed(model, params, precision)
    jax.tree.map(
        lambda leaf, wide: np.testing.assert_array_equal(leaf, wide.astype(leaf.dtype)),
        found,
        params,
    )
