"""Times of programs and kernels from a GPU's trace."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxunet.runtime import gpu_time as timing


def profile(
    events: list[tuple[str, str, float, float]], line: str = 'Stream #14(Compute)'
) -> jax.profiler.ProfileData:
    """A GPU's trace of (module, kernel, start, microseconds)."""
    names = sorted({kernel for _, kernel, _, _ in events})
    text = ''.join(
        f'event_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}\n'
        for i, name in enumerate(names, 1)
    )
    text += 'stat_metadata { key: 1 value { id: 1 name: "hlo_module" } }\n'
    body = ''.join(
        f'events {{ metadata_id: {names.index(kernel) + 1} offset_ps: {int(start * 1e6)} '
        f'duration_ps: {int(us * 1e6)} '
        + (f'stats {{ metadata_id: 1 str_value: "{module}" }}' if module else '')
        + ' }\n'
        for module, kernel, start, us in events
    )
    planes = [
        ('/device:GPU:0', line, body),
        ('/device:GPU:0', 'XLA Modules', body),
        ('/host:CPU', 'Stream of thought', body),
    ]
    return jax.profiler.ProfileData.from_text_proto(
        '\n'.join(
            f'planes {{ name: "{plane}" lines {{ name: "{name}" {inner} }} {text} }}'
            for plane, name, inner in planes
        )
    )


def test_times_of_each_call_and_kernel() -> None:
    """Programs by module, calls in the order of time, and only what a GPU's streams ran."""
    events = []
    for i, us in enumerate((5.0, 7.0, 6.0)):
        events += [
            ('jit_a', 'main', 100.0 * i, us),
            ('jit_a', 'sum', 100.0 * i + 20, 1.0),
            ('jit_a', 'sum', 100.0 * i + 30, 2.0 + i),
        ]
        events += [
            ('jit_b(17)', 'main', 100.0 * i + 50, 2 * us),
            ('', 'other', 100.0 * i + 70, 9.0),
            ('jit_c', 'main', 100.0 * i + 80, 9.0),
        ]
    times = timing.read_times(profile(events[::-1]), ['a', 'b', 'missing'], 3)
    assert set(times) == {'a', 'b'}
    assert times['a'].calls == pytest.approx((8, 11, 11))
    assert (times['a'].us, *times['a'].quartiles) == pytest.approx((11, 9.5, 11))
    assert times['a'].kernels == pytest.approx({'main': 6, 'sum': 2 * 1.5})
    assert times['b'].us == pytest.approx(12)


def test_kernels_after_a_marker_are_of_its_program() -> None:
    """Another library's kernels have no module; the next module ends its program."""
    events = []
    for i in range(2):
        events += [
            ('jit_before_a', 'add', 100.0 * i, 1.0),
            ('', 'gemm', 100.0 * i + 10, 5.0 + i),
            ('', 'add', 100.0 * i + 20, 2.0),
            ('jit_b', 'main', 100.0 * i + 30, 3.0),
            ('', 'copy', 100.0 * i + 40, 9.0),
        ]
    times = timing.read_times(profile(events[::-1]), ['a', 'b'], 2)
    assert times['a'].calls == pytest.approx((7, 8))
    assert times['a'].kernels == pytest.approx({'gemm': 5.5, 'add': 2})
    assert times['b'].calls == pytest.approx((3, 3))
    assert timing.marker('a')() == 1


def test_a_trace_that_lost_kernels_has_no_calls() -> None:
    events = [('jit_a', kernel, 10.0 * i, 1.0 + i) for i in range(3) for kernel in 'xy']
    lost = timing.read_times(profile([*events[:-1], ('jit_a', 'x', 90.0, 1.0)]), ['a'], 3)['a']
    assert lost.calls == ()
    assert lost.us == sum(lost.kernels.values())
    assert timing.read_times(profile([]), ['a'], 3) == {}


def test_programs_are_named_in_traces() -> None:
    lowered = timing.named('some_name', lambda x: x + 1).lower(jnp.ones(3))
    assert '@jit_some_name ' in lowered.as_text()
    # GPU programs get this; a JAX that does not know it must fail here rather than on the GPU.
    assert lowered.compile(compiler_options=timing.COMPILER_OPTIONS)(jnp.ones(3)).sum() == 6
