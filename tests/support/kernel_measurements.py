"""Measurements of made-up kernels, without a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxunet.benchmark.kernels import measure as kernels
from jaxunet.runtime import gpu_time as timing
from jaxunet.runtime import rows
from jaxunet.runtime.measurement import ArrayFunction, Arrays, Measurement

ORIGIN = {
    'kind': 'kernel',
    'device': 'NVIDIA H200',
    'git': 'abc1234',
    'driver': '1',
    'versions': {'jax': '0.11.2'},
}


def toy(
    name: str, pallas: ArrayFunction | None = None, flops: int | None = 2_000_000
) -> Measurement:
    def double(i: Arrays) -> Arrays:
        return {'y': i['x'][0] * 2, 'sum': jnp.sum(i['x'][0], axis=0)}

    inputs = {'x': (jax.ShapeDtypeStruct((16, 8), 'float32'),)}
    return Measurement(
        'toy', name, 'forward', 4, {'xla': double, 'pallas': pallas or double}, inputs, flops
    )


def fake_trace(
    programs: Mapping[str, Callable[[int], PyTree]], *, rounds: int
) -> dict[str, timing.Times]:
    """Runs every program, and returns made-up times: 30 µs a call for XLA, 8 to 10 for kernels."""
    found = {}
    for name, program in programs.items():
        outputs = [jax.block_until_ready(program(number)) for number in range(rounds)]
        assert (
            np.asarray(outputs[0]['y']) != np.asarray(outputs[1]['y'])
        ).any()  # calls alternate among sets of inputs
        np.testing.assert_array_equal(outputs[0]['y'], outputs[2]['y'])
        each = (
            (30.0,) * rounds
            if name.endswith('xla')
            else tuple(8.0 + 2 * (i % 2) for i in range(rounds))
        )
        found[name] = timing.Times({'kernel_of_' + name: sum(each) / rounds}, each)
    return found


def same_times(
    programs: Mapping[str, Callable[[int], PyTree]], **_: object
) -> dict[str, timing.Times]:
    """Runs every program, and returns 2 µs a call for each."""
    for program in programs.values():
        jax.block_until_ready(program(1))
    return {name: timing.Times({'k': 1.0}, (2.0,)) for name in programs}


def fails(_: Arrays) -> Arrays:
    raise ValueError('does not compile')


def outcomes(
    *wanted: Measurement,
    trace: kernels.Trace = fake_trace,
    seconds: float = 600,
    elsewhere: kernels.Elsewhere | None = None,
) -> list[rows.Row | Measurement]:
    stop = time.monotonic() + seconds
    return list(kernels.measure(wanted, stop=stop, elsewhere=elsewhere, trace=trace))


def measured(
    *wanted: Measurement,
    trace: kernels.Trace = fake_trace,
    elsewhere: kernels.Elsewhere | None = None,
) -> list[rows.Row]:
    found = outcomes(*wanted, trace=trace, elsewhere=elsewhere)
    assert all(isinstance(row, dict) for row in found)
    return found
