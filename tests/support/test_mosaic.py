"""The simulation of Mosaic GPU notices kernels that wait too little, or for ever."""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.jax_modules import mosaic_gpu as plgpu
from support.mosaic import simulated

STEPS = 4


def run(
    *, wait_full: bool = True, wait_empty: bool = True, wait_product: bool = True
) -> np.ndarray:
    """Returns Σ x[i] · 1: a warpgroup loads each x[i] into one slot, another multiplies it."""

    def body(x, ones, out, slot, matrix, staged, full, empty):
        def produce():
            for i in range(STEPS):
                if wait_empty and i > 0:
                    plgpu.barrier_wait(empty)
                plgpu.copy_gmem_to_smem(x.at[i], slot, full)

        def consume():
            matrix[...] = ones[...]

            def multiply(total):
                for _ in range(STEPS):
                    if wait_full:
                        plgpu.barrier_wait(full)
                    plgpu.wgmma(total, slot, matrix)
                    if wait_product:
                        plgpu.wgmma_wait(0)
                    if not wait_full:  # too late
                        plgpu.barrier_wait(full)
                    plgpu.barrier_arrive(empty)
                return total[...]

            staged[...] = pl.run_scoped(multiply, plgpu.ACC((64, 64), jnp.float32))
            plgpu.copy_smem_to_gmem(staged, out)
            plgpu.wait_smem_to_gmem(0)

        me = lax.axis_index('warpgroup')
        pl.when(me == 0)(produce)
        pl.when(me == 1)(consume)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types=[
            plgpu.SMEM((64, 64), jnp.float32),
            plgpu.SMEM((64, 64), jnp.float32),
            plgpu.SMEM((64, 64), jnp.float32),
            plgpu.Barrier(num_barriers=1, num_arrivals=1),
            plgpu.Barrier(num_barriers=1, num_arrivals=1),
        ],
        grid=(1,),
        grid_names=('program',),
        num_threads=2,
        thread_name='warpgroup',
    )
    x = jnp.arange(1.0, STEPS + 1)[:, None, None] * jnp.ones((STEPS, 64, 64))
    return np.asarray(kernel(x, jnp.eye(64)))


@pytest.mark.parametrize('late', [False, True], ids=['early', 'late'])
def test_a_correct_kernel(late):
    with simulated(late=late):
        np.testing.assert_array_equal(run(), 10.0)


def test_a_product_that_is_not_waited_for_reads_the_next_load():
    with simulated():
        assert np.any(run(wait_product=False) != 10)


def test_data_that_is_not_waited_for_is_not_there():
    with simulated(late=True):
        assert np.isnan(run(wait_full=False)).any()


def test_a_phase_that_nobody_waited_for_is_lost():
    with simulated(), pytest.raises(jax.errors.JaxRuntimeError, match='lost a phase'):
        run(wait_empty=False)


def test_a_deadlock_is_an_error():
    real = plgpu.barrier_arrive
    with simulated(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(plgpu, 'barrier_arrive', lambda barrier: None)
        with pytest.raises(jax.errors.JaxRuntimeError, match='deadlock'):
            run()
    assert plgpu.barrier_arrive is real, 'the inner patch ends first'
