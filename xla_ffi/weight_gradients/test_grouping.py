"""Merged calls of weight gradients: the results of the single calls, and which calls are merged."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
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
    samples,
    weights,
)

from jaxunet.ops.activation import Activation
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.ops.dropout import Dropout
from jaxunet.ops.group_norm.operands import Norm
from xla_ffi.conv3x3.parameter_gradients import PARTIAL_SUMS
from xla_ffi.conv3x3.split_k import MULTIPROCESSORS
from xla_ffi.conv3x3.vjp import conv3x3
from xla_ffi.group_norm.vjp import group_norm
from xla_ffi.weight_gradients import selection
from xla_ffi.weight_gradients.grouping import TARGET, grouped
from xla_ffi.weight_gradients.selection import CONVOLUTION

pytestmark = pytest.mark.extension


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_gradients_are_those_of_the_single_calls(dtype: str) -> None:
    given = weights(dtype), images(dtype)
    assert calls(gradient, *given) == SINGLE
    assert calls(grouped(gradient), *given) == {TARGET: 1}
    assert_equal(gradient, *given)
    assert_equal(jax.value_and_grad(network, argnums=(0, 1)), *given)


def test_it_runs_without_jit() -> None:
    wanted, found = gradient(weights(), images()), grouped(gradient)(weights(), images())
    jax.tree.map(np.testing.assert_array_equal, wanted, found)


def test_the_call_has_the_attributes_of_its_layers() -> None:
    (found,) = attributes(grouped(gradient), weights(), images())
    assert found['members'] == 5
    of_linear = [found[f'linear_{i}'] for i in range(5)]
    assert sorted(of_linear) == [False] * 3 + [True] * 2
    of_convolutions = [i for i in range(5) if not of_linear[i]]
    assert [found[f'parts_{i}'] for i in of_convolutions] == [2, 1, 1]
    assert [found[f'residuals_{i}'] for i in of_convolutions] == [0, 2, 0]
    assert [found[f'norm_{i}'] for i in of_convolutions] == [False, True, False]
    assert found['norms'] == 1
    assert len(found) == 2 + 5 + 3 * 3


def test_the_call_keeps_the_choice_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('JAXUNET_KERNELS', 'portable')
    portable = jax.grad(lambda w, x: network(w, x))  # noqa: PLW0108 (JAX has not traced it yet)
    (found,) = attributes(grouped(portable), weights(), images())
    assert found['kernels'] == 'portable'
    assert not [name for name in found if name.startswith('kernels_')]
    assert_equal(portable, weights(), images())


def test_float32_stays_alone_and_types_do_not_mix() -> None:
    assert calls(grouped(gradient), weights('float32'), images('float32')) == SINGLE

    def several(*given: tuple[Weights, jax.Array]) -> list[Weights]:
        return [gradient(w, x) for w, x in given]

    given = [(weights(dtype), images(dtype)) for dtype in ('bfloat16', 'float32', 'float16')]
    assert calls(grouped(several), *given) == SINGLE | {TARGET: 2}
    assert_equal(several, *given)


def test_calls_that_depend_on_a_member_stay_alone() -> None:
    def twice(w: Weights, x: jax.Array) -> tuple[Weights, Weights]:
        first = gradient(w, x)
        return first, gradient(jax.tree.map(lambda a, b: a - b, w, first), x)

    assert calls(grouped(twice), weights(), images()) == SINGLE | {TARGET: 1}
    assert_equal(twice, weights(), images())


def test_a_merged_call_adds_the_sums_of_norms() -> None:
    def several(*given: tuple[Weights, jax.Array]) -> list[Weights]:
        return [gradient(w, x) for w, x in given]

    given = [(weights(dtype), images(dtype)) for dtype in ('bfloat16', 'float32', 'float16')]
    for one in given:
        assert samples(gradient, *one) == [True, False]
    assert samples(several, *given) == [True, False] * 3
    assert samples(grouped(several), *given) == [False] * 6
    # The norm of the float32 gradient is between the calls of the others.
    assert [a['norms'] for a in attributes(grouped(several), *given)] == [1, 2]
    assert samples(grouped(gradient), *given[1]) == [True, False]  # nothing is merged


def norm_gradient(
    x: jax.Array, scale: jax.Array, offset: jax.Array, **options: Any
) -> tuple[jax.Array, ...]:
    """Returns the gradients of x, scale and offset."""

    def loss(*arguments: jax.Array) -> jax.Array:
        x, scale, offset = arguments
        y = group_norm(Activation.of(x), Norm(scale, offset, 2), **options)
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    return jax.grad(loss, argnums=(0, 1, 2))(x, scale, offset)


@pytest.mark.parametrize('rows', [(1, 1), (BATCH, 1), (1, BATCH), (BATCH, BATCH)])
@pytest.mark.parametrize('dropout', [True, False])
def test_norms_whose_samples_share_scale_and_offset(rows: tuple[int, int], dropout: bool) -> None:
    x = jnp.sin(jnp.tile(images(), 2))
    options: dict[str, Any] = {'silu': True}
    if dropout:
        options['dropout'] = Dropout(jnp.ones((BATCH, 2), jnp.uint32), 0.5)

    def run(w: Weights, x: jax.Array, *given: jax.Array) -> Any:
        return gradient(w, images()), norm_gradient(x, *given, **options)

    given = weights(), x, *(jnp.ones((r, CHANNELS)) for r in rows)
    assert samples(run, *given) == [True, False, True]
    assert samples(grouped(run), *given) == [False, False, rows != (1, 1)]
    assert_equal(run, *given)


def test_norms_whose_gradients_a_merged_call_needs_stay_alone() -> None:
    row = jnp.ones((1, 4))

    def run(w: Weights, x: jax.Array, row: jax.Array) -> Any:
        """The second norm needs the first one's gradients, convolutions need the third's."""
        first = norm_gradient(x, row, row)
        second = norm_gradient(x, *first[1:])
        third = norm_gradient(second[0], row, row)
        return first, second, third, gradient(w, x * jnp.sum(third[2]).astype(x.dtype))

    given = weights(), images(), row
    assert samples(run, *given) == [True, True, True, True, False]
    assert samples(grouped(run), *given) == [True, False, True, False, False]
    assert_equal(run, *given)


def test_norms_that_depend_on_a_member_stay_alone() -> None:
    def run(w: Weights, x: jax.Array) -> Any:
        found = gradient(w, x)
        return found, norm_gradient(x, found['row'][:, :4], found['row'][:, 4:])

    given = weights(), images()
    assert samples(grouped(run), *given) == [False, False, True]
    assert_equal(run, *given)


@pytest.mark.parametrize('used', [slice(1), slice(1, 2), slice(0)])
def test_norms_with_unused_gradients(used: slice) -> None:
    def run(w: Weights, x: jax.Array, row: jax.Array) -> Any:
        return gradient(w, x), norm_gradient(x, row, row)[used]

    given = weights(), images(), jnp.ones((1, 4))
    assert calls(grouped(run), *given) == {TARGET: 1}
    assert_equal(run, *given)


def test_unused_results_and_results_that_are_not_gradients() -> None:
    constant = images()

    def some(w: Weights, none: None, x: jax.Array) -> Any:
        found = gradient(w, constant)
        return {'a': (found['first'], found['first'] * 2), 'x': x, 'none': none, 'two': 2.0}

    assert calls(grouped(some), weights(), None, images()) == {TARGET: 1}
    assert_equal(some, weights(), None, images())


def test_a_function_without_gradients_is_unchanged() -> None:
    assert_equal(network, weights(), images())


def micro_batches(of: Callable[..., Weights], w: Weights, x: jax.Array) -> Weights:
    """Returns the sums of gradients of three batches in a loop."""

    def add(total: Weights, one: jax.Array) -> tuple[Weights, None]:
        return jax.tree.map(jnp.add, total, of(w, one)), None

    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, w), jnp.stack([x, 2 * x, 3 * x]))[0]


def test_loops_and_functions_inside() -> None:
    inside = functools.partial(micro_batches, grouped(gradient))
    outside = functools.partial(micro_batches, gradient)
    given = weights(), images()
    assert calls(inside, *given) == {TARGET: 1}
    jax.tree.map(np.testing.assert_array_equal, jax.jit(inside)(*given), jax.jit(outside)(*given))
    assert calls(grouped(outside), *given) == SINGLE
    assert_equal(outside, *given)
    assert calls(grouped(jax.jit(gradient)), *given) == SINGLE
    assert_equal(jax.jit(gradient), *given)


@pytest.mark.parametrize('check_vma', [True, False])
@pytest.mark.parametrize(('devices', 'count'), [(1, 1), (2, 1), (2, 2)])
def test_inside_of_shard_map(
    devices: int, count: int, check_vma: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are the same on every device, and the images vary. Also with two merged calls."""
    monkeypatch.setattr(selection, 'MOST_WAITING', 0)
    mesh = jax.sharding.Mesh(jax.devices()[:devices], 'd')
    each, one = PartitionSpec('d'), PartitionSpec()

    def of(function: Callable[..., Weights]) -> Callable[..., Weights]:
        def shard(w: Weights, x: jax.Array) -> Weights:
            scale = jax.lax.psum(jnp.ones(()), 'd')
            found = function(w, x)
            if not check_vma:
                found = jax.lax.psum(found, 'd')
            return jax.tree.map(lambda g: g / scale.astype(g.dtype), found)

        return jax.shard_map(
            shard, mesh=mesh, in_specs=(one, each), out_specs=one, check_vma=check_vma
        )

    def levels(w: Weights, x: jax.Array) -> Weights:
        found = [gradient(w, x[:, start:]) for start in range(count)]
        return jax.tree.map(lambda *g: sum(g), *found)

    given = weights(), images(batch=2 * BATCH)
    assert calls(of(grouped(levels)), *given) == {TARGET: count}
    wanted, found = (jax.jit(of(f))(*given) for f in (levels, grouped(levels)))
    jax.tree.map(np.testing.assert_array_equal, wanted, found)


def test_layers_that_vary_over_devices_and_layers_that_do_not() -> None:
    mesh = jax.sharding.Mesh(jax.devices()[:2], 'd')

    def shard(of: Callable[..., Any], w: Weights, x: jax.Array, y: jax.Array) -> Any:
        return of(lambda w, x, y: (gradient(w, x), gradient(w, y)))(w, x, y)

    def run(of: Callable[..., Any]) -> Any:
        specs = (PartitionSpec(), PartitionSpec('d'), PartitionSpec())
        mapped = jax.shard_map(
            functools.partial(shard, of), mesh=mesh, in_specs=specs, out_specs=PartitionSpec()
        )
        return jax.jit(mapped)(weights(), images(batch=2 * BATCH), images())

    jax.tree.map(np.testing.assert_array_equal, run(lambda f: f), run(grouped))


def test_it_can_be_mapped() -> None:
    x = jnp.stack([images(), 2 * images()])
    wanted, found = (jax.vmap(f, (None, 0))(weights(), x) for f in (gradient, grouped(gradient)))
    jax.tree.map(np.testing.assert_array_equal, wanted, found)


def scopes(function: Callable[..., Any]) -> set[str]:
    """Returns the paths of all operations."""
    text = jax.jit(function).lower(weights(), images()).as_text(debug_info=True)
    return set(re.findall(r'loc\("jit\([^/]*\)/([^"]*)"', text))


def test_scopes_stay() -> None:
    wanted, found = scopes(gradient), scopes(grouped(gradient))
    assert {path for path in wanted if path.startswith('transpose(jvp(joined))/')}
    merged = {path for path in wanted if 'transpose' in path and path.endswith('/ffi_call')}
    assert wanted - found <= merged
    assert found - wanted == {'backward/ffi_call'}


def product(images: tuple[int, ...], features: int) -> Callable[..., jax.Array]:
    """Returns the gradient of a convolution's weights as a function of them."""

    def loss(kernel: jax.Array) -> jax.Array:
        x = Activation.of(jnp.ones(images, jnp.bfloat16))
        conv = Convolution(image=x, kernel=kernel, shift=jnp.ones((1, features)))
        return jnp.sum(conv3x3(conv).value.astype(jnp.float32))

    return jax.grad(loss)


def workspaces(function: Callable[..., Any], *arguments: Any) -> list[int]:
    """Returns the sizes of the workspaces of all calls of weight gradients."""
    equations = jax.make_jaxpr(function)(*arguments).jaxpr.eqns
    names = (TARGET, CONVOLUTION)
    return [e.outvars[-1].aval.size for e in equations if e.params.get('target_name') in names]


@pytest.mark.parametrize('count', [2, 16])
def test_the_workspace(count: int) -> None:
    """Holds what the layers need and some partial sums, at most as much as their own."""
    shape, c = (4, 32, 32, 128), 128
    one = product(shape, c)
    kernels = [jax.ShapeDtypeStruct((3, 3, c, c), jnp.bfloat16)] * count

    def every(kernels: list[jax.Array]) -> list[jax.Array]:
        return [one(kernel) for kernel in kernels]

    own = workspaces(every, kernels)
    assert len(own) == count
    needed = count * (9 * c * c + (2 * 4 + 512) * c)
    blocks = 4 * MULTIPROCESSORS * PARTIAL_SUMS
    assert (sum(own) < needed + blocks) == (count == 2)
    assert workspaces(grouped(every), kernels) == [min(sum(own), needed + blocks)]
