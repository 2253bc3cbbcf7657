"""Gradients in a few flat arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxunet.ops.adamw import packed, reference

TREE = {
    'a': jnp.arange(1.0, 7.0).reshape(2, 3),
    'b': jnp.float32(7.0),
    'c': jnp.zeros((0,)),
    'd': jnp.arange(8.0, 72.0).astype('bfloat16'),
    'e': jnp.arange(72.0, 105.0),
}


@pytest.mark.parametrize('full', [1, 300, 2**24, None])
def test_packed_gradients_are_the_leaves_with_zeros_between_them(full):
    late = [False, True, False, False, False]
    found = packed.pack(TREE, late, full=full)
    assert found.groups[-1] == (1,)
    assert found.order == (0, 2, 3, 4, 1)
    assert len(found.groups) == {1: 4, 300: 3, 2**24: 2, None: 2}[full]
    assert all(a.dtype == jnp.float32 and a.size % packed.ALIGNMENT == 0 for a in found.arrays)
    back = packed.unpack(found, TREE)
    jax.tree.map(np.testing.assert_array_equal, back, TREE)
    np.testing.assert_array_equal(reference.sum_of_squares(found), reference.sum_of_squares(back))


def test_gradients_packed_in_bfloat16_are_rounded_and_fill_arrays_of_as_many_bytes():
    late = [False, True, False, False, False]
    found = packed.pack(TREE, late, full=200 // 2, dtype='bfloat16')
    assert found.groups == packed.pack(TREE, late, full=200).groups
    assert all(array.dtype == jnp.bfloat16 for array in found.arrays)
    want = jax.tree.map(lambda x: x.astype('bfloat16'), TREE)
    jax.tree.map(np.testing.assert_array_equal, packed.unpack(found, TREE), want)


def test_packed_gradients_are_a_tree_of_arrays():
    found = packed.pack(TREE, [False] * 5)
    twice = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p))(found)
    assert twice.groups == found.groups
    np.testing.assert_array_equal(packed.unpack(twice, TREE)['e'], 2 * TREE['e'])


@pytest.mark.parametrize('late', [[False] * 5, [True, False, False, True, False], [True] * 5])
def test_the_update_of_packed_gradients(late):
    scalars = dict.fromkeys(('take', 'factor', 'learning_rate'), jnp.float32(1.0))
    constants = reference.Constants(0.9, 0.99, 1e-8, 0.1)
    params = jax.tree.map(lambda x: x.astype(jnp.float32), TREE)
    state = (params, params, params, ())

    def update(gradients):
        ones = (jnp.float32(0.5), jnp.float32(0.5))
        return reference.adamw(constants, gradients, *state, **scalars, corrections=ones, follow=[])

    jax.tree.map(np.testing.assert_array_equal, update(packed.pack(TREE, late)), update(params))
