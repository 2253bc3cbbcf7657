"""The handlers of projections against the float64 oracle.

The CPU handlers run the awkward cases, the GPU handlers all cases.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array
from support.parity import DTYPES, assert_parity, assert_runs_are_identical, draw

from jaxunet.ops.linear import projections as reference
from jaxunet.ops.linear.projection_cases import AWKWARD, CIFAR10, ELEPHANTS64, SCALE_SHIFT, Case
from jaxunet.ops.linear.projections import Projection
from xla_ffi.projections import vjp

# Batches of one tile of samples, and of several.
TRAINING = (ELEPHANTS64._replace(batch=32), CIFAR10._replace(batch=128), SCALE_SHIFT)


def inputs(case: Case, dtype: str):
    named = {'x': ((case.batch, case.width), dtype)}
    for i, layer in enumerate(case.layers):
        if layer.product:
            named[f'kernel_{i}'] = ((case.width, layer.features), dtype)
        named |= {f'bias_{i}_{j}': ((layer.features,), 'float32') for j in range(layer.biases)}
    scales = {name: case.width**-0.5 for name in named if name.startswith('kernel')}
    return {
        name: (draw(shape, kind, scale=scales.get(name, 1.0)), kind)
        for name, (shape, kind) in named.items()
    }


def with_layers(op, case: Case):
    """Returns the op as a function of the arrays of `inputs`."""

    def run(x: Array, **arrays: Array) -> tuple[Array, ...]:
        layers = [
            Projection(
                arrays.get(f'kernel_{i}'),
                tuple(arrays[f'bias_{i}_{j}'] for j in range(layer.biases)),
            )
            for i, layer in enumerate(case.layers)
        ]
        return op(x, layers)

    return run


def check(case: Case, dtype: str):
    assert_parity(
        with_layers(vjp.project, case), with_layers(reference.project, case), inputs(case, dtype)
    )


@pytest.mark.parametrize('dtype', [*DTYPES, 'float16'])
@pytest.mark.parametrize('case', AWKWARD, ids=lambda c: c.name)
def test_awkward_shapes(case, dtype):
    check(case, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', [*DTYPES, 'float16'])
@pytest.mark.parametrize('case', TRAINING, ids=lambda c: c.name)
def test_training(case, dtype):
    check(case, dtype)


@pytest.mark.parametrize('dtype', DTYPES)
def test_awkward_runs_are_identical(dtype):
    case = AWKWARD[3]
    assert_runs_are_identical(with_layers(vjp.project, case), inputs(case, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize('case', TRAINING, ids=lambda c: c.name)
def test_runs_are_identical(case):
    assert_runs_are_identical(with_layers(vjp.project, case), inputs(case, 'bfloat16'))


def test_results_and_gradients_without_samples():
    layer = Projection(jnp.ones((8, 16), jnp.bfloat16), (jnp.ones(16),))
    x = jnp.zeros((0, 8), jnp.bfloat16)
    (y,), backward = jax.vjp(lambda x, layer: vjp.project(x, [layer]), x, layer)
    assert y.shape == (0, 16)
    dx, of_layer = backward((y,))
    assert dx.shape == x.shape
    assert not of_layer.kernel.any()
    assert not of_layer.biases[0].any()


def test_gradients_are_rounded_before_they_are_multiplied():
    layer = Projection(jnp.zeros((8, 16), jnp.bfloat16), (jnp.zeros(16),))
    x = jnp.full((2, 8), 256, jnp.bfloat16) * jnp.array([[1], [-1]], jnp.bfloat16)
    _, backward = jax.vjp(lambda layer: vjp.project(x, [layer]), layer)
    dy = jnp.ones((2, 16)).at[0].add(2**-9)  # 1 in bfloat16
    (of_layer,) = backward((dy,))
    assert not of_layer.kernel.any()
    np.testing.assert_array_equal(of_layer.biases[0], 2 + 2**-9)


# Not JAX's arrays: tests are collected before they may use the GPU.
BIAS = np.zeros(5, np.float32)
ONE = Projection(np.ones((8, 5), np.float32), (BIAS,))


@pytest.mark.parametrize(
    ('x', 'layer', 'message'),
    [
        ((2, 3, 8), ONE, r'x: shape \[2, 3, 8\]; expected \[batch, width\]'),
        ((2, 0), ONE, r'x: shape \[2, 0\]; expected \[batch, width\], width at least 1'),
        ((2, 9), ONE, r'layers\[0\].kernel: float32\[8, 5\]; expected float32\[9, features\]'),
        (
            (2, 8),
            ONE._replace(kernel=np.ones((8, 5), jnp.bfloat16)),
            r'layers\[0\].kernel: bfloat16\[8, 5\]',
        ),
        (
            (2, 8),
            ONE._replace(kernel=ONE.kernel[:, :0]),
            r'.*float32\[8, 0\]; .* features at least 1',
        ),
        ((2, 8), ONE._replace(biases=()), r'layers\[0\]: 0 biases; expected 1 to 2'),
        ((2, 8), ONE._replace(biases=(BIAS,) * 3), r'layers\[0\]: 3 biases'),
        (
            (2, 8),
            ONE._replace(biases=(BIAS[:4],)),
            r'layers\[0\].biases: shape \[4\]; expected \[5\]',
        ),
        (
            (2, 8),
            Projection(None, (BIAS[:4], BIAS)),
            r'layers\[0\].biases: shape \[5\]; expected \[4\]',
        ),
    ],
)
def test_wrong_calls_say_what_is_expected(x, layer, message):
    with pytest.raises(ValueError, match=f'project: {message}'):
        vjp.project(jnp.zeros(x), [layer])


def test_too_many_layers_are_refused():
    with pytest.raises(ValueError, match='project: 4097 layers; the kernels take at most 4096'):
        vjp.project(jnp.zeros((2, 8)), [ONE] * 4097)


def test_wrong_types_say_what_is_expected():
    with pytest.raises(ValueError, match=r'project: x: int8; expected bfloat16, float16 or'):
        vjp.project(jnp.zeros((2, 8), jnp.int8), [ONE])
