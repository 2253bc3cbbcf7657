"""AdamW, sums of squares, 16-bit copies and packed gradients against the float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.parity import assert_parity, draw

from jaxunet.ops.adamw import packed, reference
from jaxunet.ops.adamw.cases import AWKWARD, CASES, MANY, SIZES, Case
from jaxunet.ops.adamw.operands import Constants
from xla_ffi.adamw import update
from xla_ffi.adamw.narrow import narrow
from xla_ffi.adamw.pack import pack
from xla_ffi.adamw.update import CHUNK, adamw, sum_of_squares

CONSTANTS = Constants(0.9, 0.999, 1e-8, 0.01)
SHARES = (0.0005, 0.25)  # share of the new weights in each average
assert SIZES[-1][-1] == CHUNK + 3


def inputs(case: Case):
    """Returns the arrays of a step, by the name of their tree and their number."""
    arrays = {}
    for i, (shape, kind) in enumerate(zip(case.shapes, case.gradient_types(), strict=True)):
        arrays[f'gradient{i}'] = draw(shape, kind), kind
        for name in ('param', 'mu', *(f'average{n}_' for n in range(case.averages))):
            arrays[f'{name}{i}'] = draw(shape, 'float32'), 'float32'
        positive = np.abs(draw(shape, 'float32', scale=0.1)) + 0.125
        arrays[f'nu{i}'] = positive.astype(np.float32).astype(np.float64), 'float32'
    return arrays


def step(module, case: Case, steps: int):
    """Returns a module's step after `steps` earlier ones, as a function of named arrays."""

    def call(**arrays):
        def tree(name):
            return [arrays[f'{name}{i}'] for i in range(len(case.shapes))]

        wide = arrays['param0'].dtype  # float64 in the oracle

        def number(value):
            return jnp.asarray(value, wide)

        return module.adamw(
            CONSTANTS,
            *(tree(name) for name in ('gradient', 'param', 'mu', 'nu')),
            [tree(f'average{n}_') for n in range(case.averages)],
            take=jnp.asarray(True),
            factor=number(0.5),
            learning_rate=number(0.0078125),
            corrections=tuple(number(1 - b ** (steps + 1)) for b in CONSTANTS[:2]),
            follow=[number(share) for share in SHARES[: case.averages]],
        )

    return call


def check(case: Case, steps: int):
    assert_parity(
        step(update, case, steps), step(reference, case, steps), inputs(case), gradients=False
    )


@pytest.mark.parametrize('steps', [0, 1000])
@pytest.mark.parametrize('case', AWKWARD, ids=lambda c: c.name)
def test_awkward_shapes(case, steps):
    check(case, steps)


@pytest.mark.gpu
@pytest.mark.parametrize('steps', [0, 1000])
@pytest.mark.parametrize('case', CASES, ids=lambda c: c.name)
def test_every_case(case, steps):
    check(case, steps)


@pytest.mark.parametrize(
    'case', [AWKWARD[2], pytest.param(MANY, marks=pytest.mark.gpu)], ids=lambda c: c.name
)
def test_runs_are_identical(case):
    typed = {n: jnp.asarray(v, jnp.float32).astype(kind) for n, (v, kind) in inputs(case).items()}
    call = jax.jit(step(update, case, 3))
    first = call(**typed)
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, first, call(**typed))


def trees(count: int, sizes=SIZES, seed=0):
    r = np.random.default_rng(seed)
    return [[jnp.asarray(r.standard_normal(s), jnp.float32) for s in sizes] for _ in range(count)]


def narrowed(tree):
    """Gives the gradients every allowed type in turn, so that all types occur in one launch."""
    return [leaf.astype(('bfloat16', 'float32', 'float16')[i % 3]) for i, leaf in enumerate(tree)]


def fused(g, p, mu, nu, averages, step, rate, factor, follow, take=True, copies=()):
    corrections = tuple(jnp.float32(1 - b ** (step + 1)) for b in (CONSTANTS.b1, CONSTANTS.b2))
    scalars = {
        'take': jnp.asarray(take),
        'factor': jnp.float32(factor),
        'learning_rate': jnp.float32(rate),
    }
    call = jax.jit(
        lambda *a, copies: adamw(
            CONSTANTS,
            *a,
            corrections=corrections,
            follow=[jnp.float32(f) for f in follow],
            copies=copies,
            **scalars,
        )
    )
    return call(g, p, mu, nu, averages, copies=copies)


def test_a_step_that_is_not_taken_changes_nothing():
    g, p, mu, nu, average = trees(5)
    g[3] = g[3].at[0].set(jnp.nan)
    found = fused(g, p, mu, nu, [average], 0, 0.1, jnp.nan, (0.5,), take=False)
    for before, after in zip(
        jax.tree.leaves((p, mu, nu, average)), jax.tree.leaves(tuple(found)), strict=True
    ):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize('where', ['cpu', pytest.param('gpu', marks=pytest.mark.gpu)])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('full', [1, 4 * CHUNK, 2**24])
def test_packed_gradients_give_the_same_bits(full, dtype, where):
    del where
    g, p, mu, nu, average = trees(5)
    late = [i % 4 == 1 for i in range(len(g))]
    other = packed.pack(g, late, pack, full, dtype)
    assert 2 <= len(other.arrays) <= len(g)
    assert all(array.dtype == dtype for array in other.arrays)
    g = [x.astype(dtype) for x in g]
    found, want = (fused(given, p, mu, nu, [average], 3, 0.1, 0.5, (0.25,)) for given in (other, g))
    jax.tree.map(np.testing.assert_array_equal, found, want)
    np.testing.assert_allclose(sum_of_squares(other), sum_of_squares(g), rtol=1e-5)


@pytest.mark.parametrize('take', [True, False])
@pytest.mark.parametrize('pack', [False, True])
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
# 1000: more arrays than one launch takes.
@pytest.mark.parametrize('more', [3, pytest.param(1000, marks=pytest.mark.gpu)])
def test_copies_are_the_new_weights_in_16_bits(more, dtype, pack, take):
    g, p, mu, nu, average = trees(5, sizes=(*SIZES, *[(9,)] * more))
    copies = [None if i % 3 == 0 else x.astype(dtype) - 1 for i, x in enumerate(p)]
    given = packed.pack(g, [i % 4 == 1 for i in range(len(g))]) if pack else g
    found = fused(given, p, mu, nu, [average], 3, 0.1, 0.5, (0.25,), take, copies)
    without = fused(given, p, mu, nu, [average], 3, 0.1, 0.5, (0.25,), take)
    jax.tree.map(np.testing.assert_array_equal, found[:4], without[:4])
    for before, weights, copy in zip(copies, found.params, found.copies, strict=True):
        if before is None:
            assert copy is None
        else:
            want = weights.astype(dtype) if take else before
            np.testing.assert_array_equal(copy.view(jnp.uint16), want.view(jnp.uint16))


def test_arguments_that_are_kept_are_not_overwritten():
    """XLA decides what is updated in place; it copies arrays that the caller still needs."""
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
    with jax.enable_x64(True):
        exact = float(reference.sum_of_squares([np.asarray(x, np.float64) for x in tree]))
    found = [float(jax.jit(sum_of_squares)(tree)) for _ in range(2)]
    assert found[0] == pytest.approx(exact, rel=64 * float(np.finfo(np.float32).eps))
    assert found[0] == found[1]
    tree[4] = tree[4].at[0, 0, 0, 0].set(jnp.inf)
    assert not np.isfinite(float(jax.jit(sum_of_squares)(tree)))


def test_mistakes_are_named():
    g, p, mu, nu = trees(4)
    with pytest.raises(ValueError, match='adamw: mu: shapes differ'):
        fused(g, p, mu[1:], nu, [], 0, 0.1, 1.0, ())
    with pytest.raises(ValueError, match='adamw: params: expected float32, found bfloat16'):
        fused(g, jax.tree.map(lambda x: x.astype(jnp.bfloat16), p), mu, nu, [], 0, 0.1, 1.0, ())
    for copies, message in (
        ([p[0]], f'1 for {len(p)} arrays'),
        ([x.astype(jnp.bfloat16)[None] for x in p], r'\[0\]: shape'),
        (p, 'expected bfloat16 or float16, all alike, found float32'),
        (narrowed(p), 'all alike, found bfloat16, float16, float32'),
    ):
        with pytest.raises(ValueError, match=f'adamw: copies.*{message}'):
            fused(g, p, mu, nu, [], 0, 0.1, 1.0, (), copies=copies)
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
    for want, got in zip(reference.narrow(arrays, dtype), found, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


# 1500: more arrays than one launch takes.
@pytest.mark.parametrize('more', [3, pytest.param(1500, marks=pytest.mark.gpu)])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_gradients_are_packed_as_joined(dtype, more):
    (arrays,) = trees(1, sizes=(*SIZES, *[(9,)] * more, (64,), (32, 129), (0,)))
    types = ('float32', 'bfloat16', 'float16')
    given = [x.astype(types[i % 3]) for i, x in enumerate(arrays)]
    given += [x.astype(types[(i + 1) % 3]) for i, x in enumerate(arrays)]
    found, want = (jax.jit(lambda g, f=f: f(g, dtype))(given) for f in (pack, packed.joined))
    assert found.dtype == want.dtype == dtype
    np.testing.assert_array_equal(found, want)


def test_what_cannot_be_packed_is_named():
    with pytest.raises(ValueError, match=r'expected float32 or bfloat16 or float16, found int32'):
        pack([jnp.arange(3)])
    with pytest.raises(ValueError, match='gradients: no arrays'):
        pack([])
    with pytest.raises(
        ValueError, match='pack: dtype: expected float32 or bfloat16, found float16'
    ):
        pack([jnp.arange(3.0)], 'float16')


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_every_number_is_rounded_to_the_nearest(dtype):
    dtype = jnp.dtype(dtype)
    infinity = np.array(np.inf, dtype).view(np.uint16)
    sizes = np.arange(infinity, dtype=np.uint16).view(dtype).astype(np.float32)
    middles = sizes[:-1] / 2 + sizes[1:] / 2
    beside = [(middles.view(np.int32) + bit).view(np.float32) for bit in (-1, 0, 1)]
    sizes = np.concatenate([sizes, *beside, [65519.99, 65520, 3e38, np.inf]]).astype(np.float32)
    numbers = np.concatenate([sizes, -sizes, [np.float32(np.nan)]])
    with np.errstate(over='ignore'):
        want = numbers.astype(dtype)
    (found,) = jax.jit(lambda x: narrow([x], dtype))(numbers)
    found, number = np.asarray(found), ~np.isnan(want)
    np.testing.assert_array_equal(np.isnan(found), ~number)
    np.testing.assert_array_equal(found[number].view(np.uint16), want[number].view(np.uint16))


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
