"""Merged calls of weight gradients: the results of the single calls, and which calls are merged."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support import kernel_names

from jaxunet.ops.activation import Activation
from jaxunet.ops.dropout import Dropout
from jaxunet.ops.transformations import vary, varying_axes
from xla_ffi.conv3x3.parameter_gradients import PARTIAL_SUMS
from xla_ffi.conv3x3.split_k import MULTIPROCESSORS
from xla_ffi.conv3x3.vjp import conv3x3, norm_silu_conv3x3
from xla_ffi.group_norm.vjp import group_norm, group_norm_and_input
from xla_ffi.linear.vjp import linear
from xla_ffi.weight_gradients import grouping
from xla_ffi.weight_gradients.grouping import CONVOLUTION, LINEAR, NORMS, TARGET, grouped

pytestmark = pytest.mark.extension

CHANNELS, BATCH = 8, 3
Weights = dict[str, jax.Array]


def weights(dtype: str = 'bfloat16') -> Weights:
    """Returns the weights of `network`: of three convolutions and two linear layers."""
    c = CHANNELS
    shapes = {
        'first': (3, 3, 4, c),
        'joined': (3, 3, 2 * c, c),
        'shortcut': (2 * c, c),
        'last': (3, 3, 2 * c, c),
        'linear': (c, c),
        'linear_2': (c, 3),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    found = {
        name: (0.2 * jax.random.normal(key, shape)).astype(dtype)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    rows = {'row': c, 'norm': c, 'scale': 2 * c}
    return found | {name: jnp.ones((1, size)) for name, size in rows.items()}


def images(dtype: str = 'bfloat16', batch: int = BATCH) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (batch, 5, 6, 4)).astype(dtype)


def network(w: Weights, x: jax.Array) -> jax.Array:
    """Returns a loss: inputs of two parts, a shortcut, norms, shifts per sample, linear layers."""
    w = vary(w, varying_axes(x))
    rows = w['row'] * jnp.arange(1.0, 1.0 + x.shape[0])[:, None]
    with jax.named_scope('first'):
        h = conv3x3(Activation.of(x), w['first'], rows)
    both = Activation((*h.parts, jnp.sin(h.value)))
    with jax.named_scope('joined'):
        y = norm_silu_conv3x3(
            both,
            *(w['scale'], w['scale'], w['joined'], w['row']),
            residual=both,
            shortcut=w['shortcut'],
            groups=2,
        )
    with jax.named_scope('linear'):
        normed, (passed,) = group_norm_and_input(y, w['norm'], w['norm'], groups=2)
        y = Activation.of(linear(normed, w['linear'], w['row'], residual=passed.value))
    y = conv3x3(Activation((*y.parts, *h.parts)), w['last'], w['row'], residual=y)
    out = linear(y.value, w['linear_2'], w['row'][:, :3])
    return jnp.sum(jnp.sin(out.astype(jnp.float32)))


gradient = jax.grad(network)
SINGLE = {CONVOLUTION: 3, LINEAR: 2}  # the calls of `gradient`


def calls(function: Callable[..., Any], *arguments: Any) -> dict[str, int]:
    """Returns how often the lowered function calls the handlers of weight gradients."""
    found = kernel_names.count(jax.jit(function).lower(*arguments))
    return {name: found[name] for name in (TARGET, CONVOLUTION, LINEAR) if found[name]}


def assert_equal(function: Callable[..., Any], *arguments: Any) -> None:
    """Checks that a function and its merged form return the same bits."""
    wanted, found = (jax.jit(f)(*arguments) for f in (function, grouped(function)))
    assert jax.tree.structure(wanted) == jax.tree.structure(found)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        assert (a.dtype, a.weak_type) == (b.dtype, b.weak_type)
        np.testing.assert_array_equal(a, b)
        assert jnp.any(b != 0)


def attributes(
    function: Callable[..., Any], *arguments: Any, targets: Sequence[str] = (TARGET,)
) -> list[dict[str, Any]]:
    """Returns the attributes of the calls of some handlers, of the merged calls by default."""
    equations = jax.make_jaxpr(function)(*arguments).jaxpr.eqns
    found = [e for e in equations if e.params.get('target_name') in targets]
    return [dict(e.params['attributes']) for e in found]


def samples(function: Callable[..., Any], *arguments: Any) -> list[bool]:
    """Returns which norms' gradients are added by their own calls, in the order of the calls."""
    return [found['samples'] for found in attributes(function, *arguments, targets=NORMS)]


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


def test_the_call_has_the_attributes_of_its_members() -> None:
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


def test_large_products_stay_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = BATCH * 5 * 6
    joined = 2 * pixels * (9 * 2 + 2) * CHANNELS * CHANNELS  # the largest
    monkeypatch.setattr(grouping, 'MOST_FLOPS', joined)
    assert calls(grouped(gradient), weights(), images()) == {TARGET: 1}
    monkeypatch.setattr(grouping, 'MOST_FLOPS', joined - 1)
    assert calls(grouped(gradient), weights(), images()) == {TARGET: 1, CONVOLUTION: 1}
    assert_equal(gradient, weights(), images())
    monkeypatch.setattr(grouping, 'MOST_FLOPS', 2 * pixels * CHANNELS * 3)
    assert calls(grouped(gradient), weights(), images()) == SINGLE  # a single call is left


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


@pytest.mark.parametrize(('tail', 'members'), [(0.0, [10]), (0.49, [10]), (0.5, [5, 5])])
def test_a_call_is_cut_where_images_change_in_size(tail: float, members: list[int]) -> None:
    """The second part has at most the share `tail` of the weights."""

    def levels(w: Weights, x: jax.Array) -> tuple[Weights, Weights]:
        return gradient(w, x), gradient(w, x[:, 1:])

    given = weights(), images()
    cut = grouped(levels, tail=tail)
    found = attributes(cut, *given)
    assert [a['members'] for a in found] == members
    assert [a['norms'] for a in found] == [count // 5 for count in members]
    jax.tree.map(np.testing.assert_array_equal, jax.jit(cut)(*given), jax.jit(levels)(*given))


def test_images_of_one_size_are_not_cut() -> None:
    assert calls(grouped(gradient, tail=1.0), weights(), images()) == {TARGET: 1}


def norm_gradient(
    x: jax.Array, scale: jax.Array, offset: jax.Array, **options: Any
) -> tuple[jax.Array, ...]:
    """Returns the gradients of x, scale and offset."""

    def loss(*arguments: jax.Array) -> jax.Array:
        x, scale, offset = arguments
        y = group_norm(Activation.of(x), scale, offset, groups=2, **options)
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
        """The second norm needs the first one's gradients, and members need the third's."""
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
@pytest.mark.parametrize('devices', [1, 2])
def test_inside_of_shard_map(devices: int, check_vma: bool) -> None:
    """Weights are the same on every device, and the images vary."""
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

    given = weights(), images(batch=2 * BATCH)
    assert calls(of(grouped(gradient)), *given) == {TARGET: 1}
    wanted, found = (jax.jit(of(f))(*given) for f in (gradient, grouped(gradient)))
    jax.tree.map(np.testing.assert_array_equal, wanted, found)


def test_members_that_vary_over_devices_and_members_that_do_not() -> None:
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
        return jnp.sum(conv3x3(x, kernel, jnp.ones((1, features))).value.astype(jnp.float32))

    return jax.grad(loss)


def workspaces(function: Callable[..., Any], *arguments: Any) -> list[int]:
    """Returns the sizes of the workspaces of all calls of weight gradients."""
    equations = jax.make_jaxpr(function)(*arguments).jaxpr.eqns
    names = (TARGET, CONVOLUTION)
    return [e.outvars[-1].aval.size for e in equations if e.params.get('target_name') in names]


@pytest.mark.parametrize('count', [2, 16])
def test_the_workspace(count: int) -> None:
    """Holds what the members need and some partial sums, at most as much as their own."""
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
