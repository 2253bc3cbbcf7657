"""The ops on plain arrays, under every transformation."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from support.functional import BATCHED, OPS, WEIGHTS, WITH_ADAMW

from jaxunet.ops import functional as kernels
from jaxunet.ops.adamw.operands import Tree
from jaxunet.runtime.device import Target, use

Arguments = dict[str, jax.Array]
Carry = tuple[Tree, kernels.AdamWState]  # params, state
Function = Callable[[Arguments], jax.Array]

MESH = Mesh(np.array(jax.local_devices(backend='cpu')[:2]), ('devices',))


def example(op: str) -> Arguments:
    draw = np.random.default_rng(0)
    shapes = BATCHED | WEIGHTS
    return {name: jnp.asarray(draw.normal(size=shapes[name]), jnp.float32) for name in OPS[op][0]}


def axes(arguments: Arguments) -> dict[str, int | None]:
    return {name: 0 if name in BATCHED else None for name in arguments}


def halves(arguments: Arguments) -> Arguments:
    """Splits the batch into two, on an axis in front."""
    return {
        name: a.reshape(2, a.shape[0] // 2, *a.shape[1:]) if name in BATCHED else a
        for name, a in arguments.items()
    }


def vmap(f: Function) -> Function:
    """Maps the activations only."""

    def mapped(a: Arguments) -> jax.Array:
        y = jax.vmap(f, in_axes=(axes(a),))(halves(a))
        return y.reshape(-1, *y.shape[2:])

    return mapped


def ensemble(f: Function) -> Function:
    """Maps everything: two networks on two halves of the batch."""

    def mapped(a: Arguments) -> jax.Array:
        twice = {n: v if n in BATCHED else jnp.stack([v, v]) for n, v in halves(a).items()}
        y = jax.vmap(f)(twice)
        return y.reshape(-1, *y.shape[2:])

    return mapped


def scan_of_remat(f: Function) -> Function:
    def scanned(a: Arguments) -> jax.Array:
        batched = {name: v for name, v in halves(a).items() if name in BATCHED}
        _, y = jax.lax.scan(lambda _, x: (None, jax.checkpoint(f)(a | x)), None, batched)
        return y.reshape(-1, *y.shape[2:])

    return scanned


def shard_map(f: Function, check: bool) -> Function:
    def split(a: Arguments) -> jax.Array:
        specs = {name: P('devices') if name in BATCHED else P() for name in a}
        return jax.shard_map(
            f, mesh=MESH, in_specs=(specs,), out_specs=P('devices'), check_vma=check
        )(a)

    return split


TRANSFORMATIONS: dict[str, Callable[[Function], Function]] = {
    'jit': lambda f: f,
    'vmap': vmap,
    'vmap of everything': ensemble,
    'scan of remat': scan_of_remat,
    'shard_map': lambda f: shard_map(f, check=False),
    'checked shard_map': lambda f: shard_map(f, check=True),
}
# Simulating is slow: one program with all of them.
SIMULATED: dict[str, Callable[[Function], Function]] = {
    'shard_map of scan of remat of vmap': lambda f: shard_map(scan_of_remat(vmap(f)), check=False)
}


def with_gradients(f: Function, arguments: Arguments) -> tuple[jax.Array, Arguments]:
    y, pull = jax.vjp(f, arguments)
    return y, pull(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))[0]


def call(op: str, backend: str) -> Function:
    names, function = OPS[op]
    return lambda a: function(*(a[name] for name in names), backend=backend)


@functools.cache
def expected(op: str) -> tuple[jax.Array, Arguments]:
    return jax.jit(functools.partial(with_gradients, call(op, 'xla')))(example(op))


@pytest.mark.parametrize('op', OPS)
def test_values_and_gradients_under_every_transformation(op, backend):
    """Those of the reference, in one compiled program."""
    # The Pallas kernels compute float32 products as three bfloat16 products.
    tolerance = 5e-4 if backend == 'pallas' else 1e-4
    chosen = SIMULATED if backend == 'pallas' else TRANSFORMATIONS
    found = jax.jit(
        lambda a: {
            name: with_gradients(transform(call(op, backend)), a)
            for name, transform in chosen.items()
        }
    )(example(op))
    for name, results in found.items():
        jax.tree.map(
            lambda got, exact, name=name: np.testing.assert_allclose(
                got, exact, rtol=tolerance, atol=tolerance, err_msg=name
            ),
            results,
            expected(op),
        )


RULE = {'learning_rate': 0.1, 'b1': 0.8, 'b2': 0.99, 'eps': 1e-6, 'weight_decay': 0.01}


@pytest.mark.parametrize('backend', WITH_ADAMW, indirect=True)
def test_adamw_is_that_of_optax_under_every_transformation(backend):
    """Two steps, for two networks: of a scan under vmap, and of a shard_map that is checked."""
    draw = np.random.default_rng(1)
    params, *gradients = (
        {'a': jnp.asarray(draw.normal(size=(2, 3, 5)), jnp.float32), 'b': jnp.ones((2, 4))}
        for _ in range(3)
    )

    def optax_steps(params: Tree) -> Tree:
        optimizer = optax.adamw(**RULE)
        state = optimizer.init(params)
        with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
            for gradient in gradients:
                updates, state = optimizer.update(gradient, state, params)
                params = optax.apply_updates(params, updates)
        return params

    def steps(params: Tree, gradients: Tree) -> Tree:
        def step(carry: Carry, gradient: Tree) -> tuple[Carry, None]:
            return kernels.adamw(gradient, *carry[::-1], **RULE, backend=backend), None

        (params, state), _ = jax.lax.scan(step, (params, kernels.adamw_init(params)), gradients)
        assert state.count.shape == ()
        return params

    both = jax.tree.map(lambda *g: jnp.stack(g), *gradients)
    want = optax_steps(params)
    mapped, split = jax.jit(
        lambda p, g: (
            jax.vmap(steps, in_axes=(0, 1))(p, g),
            jax.shard_map(steps, mesh=MESH, in_specs=P(), out_specs=P())(p, g),
        )
    )(params, both)
    for found in (mapped, split):
        jax.tree.map(
            lambda got, exact: np.testing.assert_allclose(got, exact, rtol=2e-6, atol=2e-6),
            found,
            want,
        )


def test_pallas_refuses_a_checked_shard_map():
    def attend(a: Arguments) -> jax.Array:
        return kernels.attention(a['tokens'], num_heads=2, backend='pallas')

    with use(Target.HOPPER), pytest.raises(ValueError, match='check_vma=False only; pass that'):
        jax.eval_shape(
            shard_map(attend, check=True),
            {'tokens': jax.ShapeDtypeStruct((8, 3, 24), jnp.float32)},
        )
