"""The fused AdamW against optax's, in float64 where that is the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from xla_ffi.adamw.narrow import narrow
from xla_ffi.adamw.update import CHUNK, Rule, adamw, sum_of_squares

RULE = Rule(0.9, 0.999, 1e-8, 0.01)
SIZES = [(), (1,), (3, 5), (64,), (3, 3, 16, 32), (1023,), (4099,), (0, 4), (2, CHUNK + 3)]
EPS = float(np.finfo(np.float32).eps)


def trees(count: int, sizes=tuple(SIZES), seed=0):
    r = np.random.default_rng(seed)
    return [[jnp.asarray(r.standard_normal(s), jnp.float32) for s in sizes] for _ in range(count)]


def narrowed(tree):
    """Every type that gradients may have, in turns, next to each other in a launch."""
    return [leaf.astype(('bfloat16', 'float32', 'float16')[i % 3]) for i, leaf in enumerate(tree)]


def oracle(g, p, mu, nu, averages, step, rate, factor, follow):
    """optax's step in float64."""
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion('standard'),
        jax.numpy_rank_promotion('allow'),
    ):
        g, p, mu, nu, *averages = jax.tree.map(
            lambda x: jnp.asarray(np.asarray(x, np.float64)), (g, p, mu, nu, *averages)
        )
        optimizer = optax.adamw(rate, RULE.b1, RULE.b2, RULE.eps, weight_decay=RULE.weight_decay)
        state = optimizer.init(p)
        state = (state[0]._replace(count=jnp.asarray(step, jnp.int32), mu=mu, nu=nu), *state[1:])
        updates, state = optimizer.update(jax.tree.map(lambda x: x * factor, g), state, p)
        p = optax.apply_updates(p, updates)
        averages = [
            jax.tree.map(lambda e, q, f=f: e + f * (q - e), tree, p)
            for tree, f in zip(averages, follow, strict=True)
        ]
        return jax.tree.map(np.asarray, (p, state[0].mu, state[0].nu, averages))


def fused(g, p, mu, nu, averages, step, rate, factor, follow, take=True):
    corrections = tuple(jnp.float32(1 - b ** (step + 1)) for b in (RULE.b1, RULE.b2))
    scalars = {
        'take': jnp.asarray(take),
        'factor': jnp.float32(factor),
        'learning_rate': jnp.float32(rate),
    }
    call = jax.jit(
        lambda *a: adamw(
            RULE, *a, corrections=corrections, follow=[jnp.float32(f) for f in follow], **scalars
        )
    )
    return call(g, p, mu, nu, averages)


@pytest.mark.gpu
@pytest.mark.parametrize('step', [0, 1000])
@pytest.mark.parametrize('follow', [(), (0.1,), (0.0005, 0.25)])
@pytest.mark.parametrize('narrow_gradients', [False, True])
def test_as_optax_on_the_gpu(step, follow, narrow_gradients):
    check(step, follow, narrow_gradients)


@pytest.mark.parametrize(
    ('step', 'follow', 'narrow_gradients'),
    [(0, (), False), (1000, (0.0005, 0.25), False), (1000, (0.5,), True)],
)
def test_as_optax(step, follow, narrow_gradients):
    check(step, follow, narrow_gradients)


def check(step, follow, narrow_gradients):
    g, p, mu, *averages = trees(3 + len(follow))
    g = narrowed(g) if narrow_gradients else g
    nu = jax.tree.map(lambda x: jnp.square(x) + 0.1, trees(1, seed=1)[0])
    arguments = (g, p, mu, nu, averages, step, 0.01, 0.5, follow)
    exact, found = oracle(*arguments), fused(*arguments)
    for want, got in zip(jax.tree.leaves(exact), jax.tree.leaves(tuple(found)), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=8 * EPS, atol=16 * EPS)


@pytest.mark.gpu
def test_many_tensors_on_the_gpu():
    """More than one launch takes."""
    g, p, mu, average = trees(4, sizes=[(7,), (130,)] * 300)
    nu = jax.tree.map(lambda x: jnp.square(x) + 0.1, g)
    arguments = (g, p, mu, nu, [average], 3, 0.01, 1.0, (0.5,))
    for want, got in zip(
        jax.tree.leaves(oracle(*arguments)), jax.tree.leaves(tuple(fused(*arguments))), strict=True
    ):
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=8 * EPS, atol=16 * EPS)


def test_a_step_that_is_not_taken_changes_nothing():
    g, p, mu, nu, average = trees(5)
    g[3] = g[3].at[0].set(jnp.nan)
    found = fused(g, p, mu, nu, [average], 0, 0.1, jnp.nan, (0.5,), take=False)
    for before, after in zip(
        jax.tree.leaves((p, mu, nu, average)), jax.tree.leaves(tuple(found)), strict=True
    ):
        np.testing.assert_array_equal(before, after)


def test_arguments_that_are_kept_are_not_overwritten():
    """In place is XLA's decision: what the caller still needs is copied."""
    g, p, mu, nu = trees(4)
    before = jax.tree.map(np.array, (p, mu, nu))
    fused(g, p, mu, nu, [], 0, 0.1, 1.0, ())
    jax.tree.map(np.testing.assert_array_equal, before, (p, mu, nu))


@pytest.mark.parametrize('types', ['float32', 'mixed'])
@pytest.mark.parametrize('where', ['cpu', pytest.param('gpu', marks=pytest.mark.gpu)])
def test_sum_of_squares(where, types):
    del where
    (tree,) = trees(1)
    tree = narrowed(tree) if types == 'mixed' else tree
    exact = sum(float(np.sum(np.square(np.asarray(x, np.float64)))) for x in tree)
    found = [float(jax.jit(sum_of_squares)(tree)) for _ in range(2)]
    assert found[0] == pytest.approx(exact, rel=64 * EPS)
    assert found[0] == found[1]
    tree[4] = tree[4].at[0, 0, 0, 0].set(jnp.inf)
    assert not np.isfinite(float(jax.jit(sum_of_squares)(tree)))


def test_mistakes_are_named():
    g, p, mu, nu = trees(4)
    with pytest.raises(ValueError, match='adamw: mu: shapes differ'):
        fused(g, p, mu[1:], nu, [], 0, 0.1, 1.0, ())
    with pytest.raises(ValueError, match='adamw: params: expected float32, found bfloat16'):
        fused(g, jax.tree.map(lambda x: x.astype(jnp.bfloat16), p), mu, nu, [], 0, 0.1, 1.0, ())
    with pytest.raises(ValueError, match='adamw: gradients: no arrays'):
        sum_of_squares([])
    with pytest.raises(
        ValueError, match='adamw: gradients: expected float32 or bfloat16 or float16, found int32'
    ):
        sum_of_squares([jnp.arange(3)])


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
# 1000: more arrays than one launch takes.
@pytest.mark.parametrize('more', [3, pytest.param(1000, marks=pytest.mark.gpu)])
def test_narrow_as_astype(more, dtype):
    (arrays,) = trees(1, sizes=(*SIZES, *[(9,)] * more))
    arrays[4] = arrays[4].at[0, 0, 0, :3].set(jnp.asarray([jnp.inf, -jnp.inf, 1e30]))
    found = jax.jit(lambda a: narrow(a, dtype))(arrays)
    for want, got in zip(arrays, found, strict=True):
        np.testing.assert_array_equal(
            np.asarray(got, np.float32), np.asarray(want.astype(dtype), np.float32)
        )


def test_what_cannot_be_narrowed_is_named():
    (arrays,) = trees(1)
    with pytest.raises(
        ValueError, match='narrow: dtype: expected bfloat16 or float16, found float32'
    ):
        narrow(arrays, jnp.float32)
    with pytest.raises(ValueError, match='narrow: expected float32, found int32'):
        narrow([jnp.arange(3)], jnp.bfloat16)
    with pytest.raises(ValueError, match='narrow: no arrays'):
        narrow([], jnp.bfloat16)
