"""Kernels drawn by one program are those that each initializer draws by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny import tiny_config

from jaxunet.model import initializers
from jaxunet.model.initializers import BLOCK, INITIALIZERS, Traced, Uniform
from jaxunet.model.unet import build_unet, init_params
from jaxunet.ops.references import XLA

SHAPES = [(3, 3, 3, 8), (3, 3, 64, 64), (2, BLOCK // 2), (2, BLOCK), (16, 48), (1, 1)]


@pytest.mark.parametrize('init', sorted(INITIALIZERS))
def test_kernels_equal_those_of_jax(init: str) -> None:
    """The program, each kernel by itself, and JAX's initializer draw the same bits."""
    uniform = INITIALIZERS[init]
    theirs = jax.nn.initializers.variance_scaling(uniform.scale, uniform.mode, 'uniform')
    keys = [jax.random.key(seed) for seed in range(len(SHAPES))]

    def drawn(initializer) -> list:
        return [initializer(key, shape) for key, shape in zip(keys, SHAPES, strict=True)]

    expected = jax.jit(lambda: drawn(theirs))()
    for found in (Traced(lambda: drawn(uniform)).arrays(), drawn(uniform)):
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)
    assert uniform.limit(SHAPES[1]) >= np.abs(expected[1]).max()


@pytest.mark.parametrize(
    'changes', [{'num_classes': 5}, {'zero_init': False, 'init': 'ddpm'}], ids=str
)
def test_a_network_equals_flax_init(changes: dict) -> None:
    """All parameters are those of Flax, with the same names."""
    config = tiny_config().replace(model=changes)
    model = build_unet(config, XLA)
    key = jax.random.key(2)
    labels = jnp.zeros((1,), jnp.int32) if config.model.num_classes else None
    image, t = jnp.zeros((1, *config.image_shape)), jnp.zeros((1,), jnp.int32)
    expected = jax.jit(model.init)(key, image, t, labels)['params']
    traced = Traced(lambda: init_params(model, config, key))
    found = traced.arrays()
    jax.tree.map(np.testing.assert_array_equal, traced.arrays(), found)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
    ('setting', 'value'),
    [('jax_threefry_partitionable', False), ('jax_default_prng_impl', 'rbg')],
)
def test_other_generators_draw_as_jax_does(setting, value) -> None:
    """With another generator than JAX's default, JAX draws each kernel."""
    uniform, shape = Uniform(1.0, 'fan_in'), (3, 3, 8, 8)
    before = jax.config.values[setting]
    jax.config.update(setting, value)
    try:
        key = jax.random.key(1)
        expected = jax.jit(
            lambda: jax.nn.initializers.variance_scaling(1.0, 'fan_in', 'uniform')(key, shape)
        )()
        found = Traced(lambda: uniform(key, shape)).arrays()
    finally:
        jax.config.update(setting, before)
    np.testing.assert_array_equal(found, expected)


def test_one_program_draws_all_kernels(monkeypatch) -> None:
    """However many there are; whatever else is computed from them follows."""
    programs = []
    drawn = initializers._drawn
    monkeypatch.setattr(initializers, '_drawn', lambda *of: programs.append(of) or drawn(*of))

    def kernels() -> list:
        return [Uniform(1.0, 'fan_in')(jax.random.key(n), (3, 3, 8, 8 + n)) for n in range(5)]

    def result() -> tuple:
        made = kernels()
        return made, [2 * kernel for kernel in made], [jnp.copy(made[0]), jnp.ones((3, 1)), 7]

    found, expected = Traced(result).arrays(), jax.jit(result)()
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert {type(leaf) for leaf in jax.tree.leaves(found)} == {np.ndarray}
    assert len(programs) == 1
    with pytest.raises(RuntimeError, match='stop'):
        Traced(stop)
    assert isinstance(kernels()[0], jax.Array)  # drawn at once, also after an error inside
    assert len(programs) == 1


def stop() -> None:
    """Fails."""
    raise RuntimeError('stop')
