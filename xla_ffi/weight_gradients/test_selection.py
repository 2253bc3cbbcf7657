"""The choice of the calls to merge: by their size, and by the memory of their operands."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.merging import (
    BATCH,
    CHANNELS,
    SINGLE,
    Weights,
    assert_equal,
    attributes,
    calls,
    gradient,
    images,
    network,
    weight_gradients,
    weights,
)

from jaxunet.ops.activation import Activation
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.ops.conv3x3.upsampling import nearest
from jaxunet.ops.group_norm.operands import Norm
from xla_ffi.conv3x3.vjp import conv3x3, norm_silu_conv3x3
from xla_ffi.weight_gradients import selection
from xla_ffi.weight_gradients.equations import read
from xla_ffi.weight_gradients.grouping import TARGET, grouped
from xla_ffi.weight_gradients.selection import CONVOLUTION

pytestmark = pytest.mark.extension


def test_large_products_stay_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = BATCH * 5 * 6
    joined = 2 * pixels * (9 * 2 + 2) * CHANNELS * CHANNELS  # the largest
    monkeypatch.setattr(selection, 'MOST_FLOPS', joined)
    assert calls(grouped(gradient), weights(), images()) == {TARGET: 1}
    monkeypatch.setattr(selection, 'MOST_FLOPS', joined - 1)
    assert calls(grouped(gradient), weights(), images()) == {TARGET: 1, CONVOLUTION: 1}
    assert_equal(gradient, weights(), images())
    monkeypatch.setattr(selection, 'MOST_FLOPS', 2 * pixels * CHANNELS * 3)
    assert calls(grouped(gradient), weights(), images()) == SINGLE  # a single call is left


@pytest.mark.parametrize('last_apart', [False, True])
@pytest.mark.parametrize(
    ('rows', 'layers'), [([0, 1, 0], [10, 5]), ([1, 0], [5, 5]), ([0, 1], [10]), ([0, 0], [10])]
)
def test_a_call_is_cut_before_the_largest_images_at_its_end(
    rows: list[int], layers: list[int], last_apart: bool
) -> None:
    def levels(w: Weights, x: jax.Array) -> list[Weights]:
        return [gradient(w, x[:, row:]) for row in rows]

    given = weights(), images()
    cut = grouped(levels, last_apart=last_apart)
    found = attributes(cut, *given)
    assert [a['members'] for a in found] == (layers if last_apart else [sum(layers)])
    assert [a['norms'] for a in found] == [a['members'] // 5 for a in found]
    jax.tree.map(np.testing.assert_array_equal, jax.jit(cut)(*given), jax.jit(levels)(*given))


def test_a_call_is_not_cut_if_the_largest_images_are_not_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The weight gradient of these, which stays alone, then ends the backward pass."""

    def levels(w: Weights, x: jax.Array) -> list[Any]:
        wide = Activation.of(jnp.tile(x, (1, 1, 1, 2 * CHANNELS // x.shape[-1])))

        def largest(kernel: jax.Array) -> jax.Array:
            y = conv3x3(Convolution(image=wide, kernel=kernel, shift=w['row']))
            return jnp.sum(jnp.sin(y.value.astype(jnp.float32)))

        smaller = [gradient(w, x[:, row:]) for row in (2, 1)]
        return [*smaller, jax.grad(largest)(w['joined'])]

    given = weights(), images()
    found = attributes(grouped(levels, last_apart=True), *given)
    assert [a['members'] for a in found] == [10, 1]
    flops = sorted(gradient.flops for gradient in weight_gradients(levels, *given))
    monkeypatch.setattr(selection, 'MOST_FLOPS', flops[-2])
    assert flops[-2] < flops[-1]
    assert calls(grouped(levels, last_apart=True), *given) == {TARGET: 1, CONVOLUTION: 1}


@pytest.mark.parametrize('last_apart', [False, True])
def test_the_first_of_large_operands_get_a_call_that_others_wait_for(
    last_apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def levels(w: Weights, x: jax.Array) -> list[Weights]:
        """The second gradient needs one of the first that no weight gradient computes."""
        first = jax.grad(network, argnums=(0, 1))
        found = []
        for start in (1, 2, 0):
            of_weights, of_image = first(w, x[:, start:])
            found.append(of_weights)
            x = x + jnp.pad(of_image, ((0, 0), (start, 0), (0, 0), (0, 0)))
        return found

    given = weights(), images()
    waiting = sum(gradient.waiting for gradient in weight_gradients(levels, *given))
    monkeypatch.setattr(selection, 'MOST_WAITING', waiting + 1)
    several = [5, 5, 5] if last_apart else [5, 10]
    assert [a['members'] for a in attributes(grouped(levels), *given)] == [15]
    monkeypatch.setattr(selection, 'MOST_WAITING', waiting)
    cut = grouped(levels, last_apart=last_apart)
    assert [a['members'] for a in attributes(cut, *given)] == several
    equations = jax.make_jaxpr(cut)(*given).jaxpr.eqns
    names = [e.params.get('target_name', e.primitive.name) for e in equations]
    barrier = names.index('optimization_barrier')
    assert names.count('optimization_barrier') == 1
    assert names[:barrier].count(TARGET) == 1
    # What follows reads the image's gradient behind the barrier, with a weight's.
    (image,) = (v for v in equations[barrier].outvars if v.aval.shape == given[1][:, 1:].shape)
    assert any(image in e.invars for e in equations[barrier + 1 :])
    jax.tree.map(np.testing.assert_array_equal, jax.jit(cut)(*given), jax.jit(levels)(*given))


def test_everything_else_waits_for_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind a norm that returns the gradients of a skip connection and of what it joins."""
    monkeypatch.setattr(selection, 'MOST_WAITING', 0)
    c, row = CHANNELS, jnp.ones((1, CHANNELS))

    def unet(w: Weights, x: jax.Array) -> jax.Array:
        first = Convolution(image=Activation.of(x), kernel=w['first'], shift=row)
        skip = conv3x3(first)
        half = Activation.of(skip.value[:, ::2, ::2])
        low = conv3x3(Convolution(image=half, kernel=w['low'], shift=row))
        both = Activation((nearest(low.value), skip.value))
        ones = jnp.ones((1, 2 * c))
        norm = Norm(ones, ones, 2)
        y = norm_silu_conv3x3(Convolution(image=both, norm=norm, kernel=w['joined'], shift=row))
        return jnp.sum(jnp.sin(y.value.astype(jnp.float32)))

    shapes = {'first': (3, 3, 4, c), 'low': (3, 3, c, c), 'joined': (3, 3, 2 * c, c)}
    given = {name: jnp.full(shape, 0.1, jnp.bfloat16) for name, shape in shapes.items()}
    x = images()[:, :4]
    cut = grouped(jax.grad(unet))
    equations = jax.make_jaxpr(cut)(given, x).jaxpr.eqns
    waits: set[object] = set()
    for equation in equations:
        behind = not waits.isdisjoint(read([equation]))
        if behind or equation.primitive.name == 'optimization_barrier':
            waits.update(equation.outvars)
    first, second = (e for e in equations if e.params.get('target_name') == TARGET)
    assert waits.isdisjoint(read([first]))
    gradients = [v for v in read([second]) & waits if v.aval.shape[-1] == c]
    assert len(gradients) == 2  # those of the results of `low` and `first`
    found, wanted = (jax.jit(f)(given, x) for f in (cut, jax.grad(unet)))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
