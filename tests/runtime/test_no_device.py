"""JAX without a device that it can use ends a command in one line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jaxunet.runtime.no_device import NO_DEVICE, is_no_device, needs_device, no_device_error

NO_GPU = (
    "Unable to initialize backend 'cuda': INTERNAL: no supported devices found for platform CUDA "
    "(set JAX_PLATFORMS='' to automatically choose an available backend)"
)
COMMAND = (
    'import jax; from jaxunet.runtime import command; '
    'command.run(lambda argv: print(jax.devices()))'
)


# The first is a name that JAX does not know; without its plugin, JAX raises for cuda an assertion.
@pytest.mark.parametrize('platform', ['none', 'cuda'])
def test_a_command_ends_in_one_line(platform):
    done = subprocess.run(
        [sys.executable, '-c', COMMAND],
        env=os.environ | {'JAX_PLATFORMS': platform, 'CUDA_VISIBLE_DEVICES': ''},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == NO_DEVICE, done.stderr
    assert f'error: JAX found no device that it can use (JAX_PLATFORMS={platform})' in done.stderr
    assert done.stderr.endswith('JAX_PLATFORMS=cpu computes on the CPU\n')
    assert 'Traceback' not in done.stderr


def test_the_reason_is_told(monkeypatch):
    monkeypatch.delenv('JAX_PLATFORMS', raising=False)
    told = str(no_device_error(RuntimeError(NO_GPU)))
    assert told.startswith(
        "JAX found no device that it can use: Unable to initialize backend 'cuda': INTERNAL: no "
        'supported devices found for platform CUDA; if'
    )


@pytest.mark.parametrize('error', [RuntimeError('another'), AssertionError(), ValueError(NO_GPU)])
def test_other_errors_stay(error):
    assert not is_no_device(error)
    with pytest.raises(type(error)) as found, needs_device():
        raise error
    assert found.value is error
