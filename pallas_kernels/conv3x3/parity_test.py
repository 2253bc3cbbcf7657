"""The convolution kernels against the float64 oracle: interpreted on a CPU (awkward cases), compiled on a GPU (all cases)."""

import jax
import jax.numpy as jnp
import pytest
from parity import DTYPES, assert_parity, draw, kernel_target

from pallas_kernels.conv3x3 import reference, vjp
from pallas_kernels.conv3x3.cases import AWKWARD, CASES, Case
from pallas_kernels.features import Features


def inputs(case: Case, dtype: str, batch: int):
    shapes = {f'x{i}': ((batch, case.height, case.width, c), dtype) for i, c in enumerate(case.parts)}
    shapes['kernel'] = ((3, 3, case.channels, case.features), dtype)
    shapes['shift'] = ((batch if case.per_sample else 1, case.features), 'float32')
    if case.norm:
        shapes['scale'] = shapes['offset'] = ((1, case.channels), 'float32')
    shapes |= {f'residual{i}': ((batch, case.height, case.width, c), dtype) for i, c in enumerate(case.residual)}
    if case.residual and case.residual != (case.features,):
        shapes['shortcut'] = ((sum(case.residual), case.features), dtype)
    scales = {'kernel': (9 * case.channels) ** -0.5, 'shortcut': max(sum(case.residual), 1) ** -0.5}
    return {name: (draw(shape, kind, scale=scales.get(name, 1.0)), kind) for name, (shape, kind) in shapes.items()}


def op(module, case: Case, **options):
    """The op of a module as a function of named arrays; with options of a norm's, all that it returns."""

    def call(**arrays):
        x = Features(tuple(arrays[f'x{i}'] for i in range(len(case.parts))), (None,) * len(case.parts))
        residual = Features(tuple(arrays[f'residual{i}'] for i in range(len(case.residual))), (None,) * len(case.residual))
        around = {'residual': residual if case.residual else None, 'shortcut': arrays.get('shortcut')}
        if not case.norm:
            return module.conv3x3(x, arrays['kernel'], arrays['shift'], **around).value
        affine = (arrays['scale'], arrays['offset'])
        found = module.norm_silu_conv3x3(x, *affine, arrays['kernel'], arrays['shift'], groups=case.groups, **around, **options)
        return found if options else found.value

    return call


def check(case: Case, dtype: str, batch: int):
    with kernel_target():
        assert_parity(op(vjp, case), op(reference, case), inputs(case, dtype, case.batch or batch))


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('case', AWKWARD, ids=lambda c: c.name)
def test_awkward_shapes(case, dtype):
    check(case, dtype, 2)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('case', CASES, ids=lambda c: c.name)
def test_every_case(case, dtype):
    check(case, dtype, 3)


@pytest.mark.gpu
@pytest.mark.parametrize('case', CASES[1:36:11], ids=lambda c: c.name)
def test_a_batch_of_32(case):
    """As in training: more strips of pixels than multiprocessors."""
    check(case, 'bfloat16', 32)


@pytest.mark.gpu
def test_runs_are_identical():
    case = CASES[3]
    arrays = {name: jnp.asarray(value, kind) for name, (value, kind) in inputs(case, 'bfloat16', 4).items()}
    pull = jax.jit(lambda a: jax.vjp(lambda a: op(vjp, case)(**a), a)[1](jnp.ones((4, 64, 64, 64), jnp.bfloat16)))
    first, second = pull(arrays), pull(arrays)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), first, second)))
