"""The choice of the calls to merge: by their size, and by the memory of their operands."""

from __future__ import annotations

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


@pytest.mark.parametrize(('late_share', 'layers'), [(0.0, [10]), (0.49, [10]), (0.5, [5, 5])])
def test_a_call_is_cut_where_images_change_in_size(late_share: float, layers: list[int]) -> None:
    """The second part has at most the share `late_share` of the weights."""

    def levels(w: Weights, x: jax.Array) -> tuple[Weights, Weights]:
        return gradient(w, x), gradient(w, x[:, 1:])

    given = weights(), images()
    cut = grouped(levels, late_share=late_share)
    found = attributes(cut, *given)
    assert [a['members'] for a in found] == layers
    assert [a['norms'] for a in found] == [count // 5 for count in layers]
    jax.tree.map(np.testing.assert_array_equal, jax.jit(cut)(*given), jax.jit(levels)(*given))


def test_images_of_one_size_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, 'MOST_WAITING', 0)
    assert calls(grouped(gradient, late_share=1.0), weights(), images()) == {TARGET: 1}


@pytest.mark.parametrize('late_share', [0.0, 0.5])
def test_the_first_of_large_operands_get_a_call_that_others_wait_for(
    late_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def levels(w: Weights, x: jax.Array) -> list[Weights]:
        """The second gradient needs one of the first that no weight gradient computes."""
        first = jax.grad(network, argnums=(0, 1))
        found = []
        for start in range(3):
            of_weights, of_image = first(w, x[:, start:])
            found.append(of_weights)
            x = x + jnp.pad(of_image, ((0, 0), (start, 0), (0, 0), (0, 0)))
        return found

    given = weights(), images()
    waiting = sum(gradient.waiting for gradient in weight_gradients(levels, *given))
    monkeypatch.setattr(selection, 'MOST_WAITING', waiting + 1)
    several = [5, 10] if late_share == 0 else [5, 5, 5]
    assert [a['members'] for a in attributes(grouped(levels), *given)] == [15]
    monkeypatch.setattr(selection, 'MOST_WAITING', waiting)
    cut = grouped(levels, late_share=late_share)
    assert [a['members'] for a in attributes(cut, *given)] == several
    equations = jax.make_jaxpr(cut)(*given).jaxpr.eqns
    names = [e.params.get('target_name', e.primitive.name) for e in equations]
    barrier = names.index('optimization_barrier')
    assert names.count('optimization_barrier') == 1
    assert names[:barrier].count(TARGET) == 1
    # What follows reads the image's gradient behind the barrier, with a weight's.
    (image,) = (v for v in equations[barrier].outvars if v.aval.shape == given[1].shape)
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
