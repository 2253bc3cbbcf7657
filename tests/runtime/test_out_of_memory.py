"""A device or a machine without memory is recognized, and the user told what to lower."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from support.full_memory import exhaust

from jaxunet.runtime.errors import UserError
from jaxunet.runtime.out_of_memory import (
    OUT_OF_MEMORY,
    OutOfMemoryError,
    is_out_of_memory,
    memory_for,
    warn_of_small_limit,
)

TOLD = 'drawing: the device has no memory left (RESOURCE_EXHAUSTED: '


@pytest.mark.parametrize(
    'message',
    [
        'RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.\nBuffers: ...',
        'RESOURCE_EXHAUSTED: Failed to allocate request for 2.00GiB (2147483648B) on device 0',
        'RESOURCE_EXHAUSTED: Error allocating device buffer',
        'INTERNAL: Failed to load in-memory CUBIN: CUDA_ERROR_OUT_OF_MEMORY: out of memory',
    ],
)
def test_a_device_without_memory(message):
    error = jax.errors.JaxRuntimeError(message)
    assert is_out_of_memory(error)
    with pytest.raises(OutOfMemoryError) as told, memory_for('drawing', 'draw less'):
        raise error
    (line,) = str(told.value).splitlines()
    assert line == (
        f'drawing: the device has no memory left ({message.splitlines()[0]}); draw less'
    )


def test_a_thread_that_cannot_start() -> None:
    with (
        pytest.raises(
            OutOfMemoryError, match=r'^a run: .* no memory or threads left .*, or lower it'
        ),
        memory_for('a run', 'lower it'),
    ):
        raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(('limit', 'told'), [(2**31, True), (2**33, False), (-1, False)])
def test_a_small_limit_of_addresses_is_told(limit, told, monkeypatch, caplog) -> None:
    monkeypatch.setattr('resource.getrlimit', lambda _: (limit, -1))
    warn_of_small_limit()
    assert ('at least 4 GiB, found 2.0 GiB' in caplog.text) is told


@pytest.mark.parametrize(
    'error',
    [
        jax.errors.JaxRuntimeError(
            'RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 262144'
        ),
        jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Received message larger than max'),
        jax.errors.JaxRuntimeError('INTERNAL: out of luck'),
        RuntimeError('RESOURCE_EXHAUSTED: Out of memory'),
        UserError('RESOURCE_EXHAUSTED: Out of memory'),
    ],
)
def test_other_errors_stay_what_they_are(error):
    assert not is_out_of_memory(error)
    with pytest.raises(type(error)) as raised, memory_for('drawing', 'draw less'):
        raise error
    assert raised.value is error


def test_what_jax_and_numpy_raise():
    with pytest.raises(OutOfMemoryError) as told, memory_for('drawing', 'draw less'):
        exhaust()
    assert str(told.value).startswith(TOLD)
    with pytest.raises(OutOfMemoryError) as told, memory_for('drawing', 'draw less'):
        np.zeros(2**50)
    assert str(told.value).startswith('drawing: this machine has no memory left (Unable to alloc')
    assert told.value.exit_code == OUT_OF_MEMORY != UserError.exit_code


def test_the_inner_advice_counts():
    with (
        pytest.raises(OutOfMemoryError, match=r'^inner: .*; a$'),
        memory_for('outer', 'b'),
        memory_for('inner', 'a'),
    ):
        exhaust()
