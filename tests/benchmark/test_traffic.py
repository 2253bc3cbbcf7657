"""Numbers of a compiled program, the bytes that it moves first, and the rates of a device."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from jaxunet.benchmark.device import measure_rates
from jaxunet.benchmark.jax_side import peak_bytes, timed_compile
from jaxunet.benchmark.traffic import bytes_moved


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize(
    ('function', 'arguments', 'expected'),
    [
        (lambda x: jnp.sin(x) + x, [f32(1000)], 8000),
        (lambda x, y: x @ y, [f32(100, 200), f32(200, 50)], 4 * (100 * 200 + 200 * 50 + 100 * 50)),
        (
            lambda x, i: x[i] * 2,
            [f32(100_000, 8), jax.ShapeDtypeStruct((4,), jnp.int32)],
            2 * 4 * 8 * 4 + 16,
        ),  # not the whole table
    ],
)
def test_bytes_moved(
    function: Callable[..., jax.Array], arguments: list[jax.ShapeDtypeStruct], expected: int
) -> None:
    assert bytes_moved(jax.jit(function).lower(*arguments).compile().as_text()) == expected


LOOP = """HloModule m
%body (p: (s32[], bf16[1000])) -> (s32[], bf16[1000]) {
  %p = (s32[], bf16[1000]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = bf16[1000]{0} get-tuple-element(%p), index=1
  %y = bf16[1000]{0} custom-call(%x), custom_call_target="kernel", api_version=API_VERSION_TYPED_FFI
  ROOT %t = (s32[], /*index=1*/bf16[1000]{0}) tuple(%i, %y)
}
%cond (p: (s32[], bf16[1000])) -> pred[] {
  %p = (s32[], bf16[1000]{0}) parameter(0)
  ROOT %c = pred[] constant(true)
}
%update (a: f32[100], b: f32[10], i: s32[]) -> f32[100] {
  %a = f32[100]{0} parameter(0)
  %b = f32[10]{0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %d = f32[100]{0} dynamic-update-slice(%a, %b, %i)
}
%inner (a: f32[100], b: f32[10], i: s32[]) -> f32[100] {
  %a = f32[100]{0} parameter(0)
  %b = f32[10]{0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %f = f32[100]{0} fusion(%a, %b, %i), kind=kLoop, calls=%update
}
ENTRY %main (t: (s32[], bf16[1000]), a: f32[100], b: f32[10], i: s32[]) -> f32[100] {
  %t = (s32[], bf16[1000]{0}) parameter(0)
  %a = f32[100]{0} parameter(1)
  %b = f32[10]{0} parameter(2)
  %i = s32[] parameter(3)
  %w = (s32[], bf16[1000]{0}) while(%t), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"7"}}
  %g = (f32[10]{0}, u8[999999]{0}) custom-call(%b, %b), custom_call_target="__cublas$gemm"
  ROOT %r = f32[100]{0} call(%a, %b, %i), to_apply=%inner
}
"""


def test_bytes_moved_by_loops_calls_and_custom_kernels() -> None:
    """Seven times a kernel of 2000 bytes in and out; a library call without its scratch space; an
    update in place of 40 bytes.
    """
    assert bytes_moved(LOOP) == 7 * 4000 + 3 * 40 + (2 * 40 + 4)
    with pytest.raises(ValueError, match='ENTRY'):
        bytes_moved('HloModule m')


def test_a_fusion_with_several_results_writes_only_its_updates() -> None:
    """Two updates of 40 bytes in place, read and written, and their index."""
    hlo = """HloModule m
%update (a: f32[100], b: f32[10], i: s32[]) -> (f32[100], f32[100]) {
  %a = f32[100]{0} parameter(0)
  %b = f32[10]{0} parameter(1)
  %i = s32[] parameter(2)
  %c = f32[100]{0} parameter(3)
  %d = f32[100]{0} dynamic-update-slice(%a, %b, %i)
  %e = f32[100]{0} dynamic-update-slice(%c, %b, %i)
  ROOT %t = (f32[100]{0}, f32[100]{0}) tuple(%d, %e)
}
ENTRY %main (a: f32[100], b: f32[10], i: s32[], c: f32[100]) -> (f32[100], f32[100]) {
  %a = f32[100]{0} parameter(0)
  %b = f32[10]{0} parameter(1)
  %i = s32[] parameter(2)
  %c = f32[100]{0} parameter(3)
  ROOT %f = (f32[100]{0}, f32[100]{0}) fusion(%a, %b, %i, %c), kind=kLoop, calls=%update
}
"""
    assert bytes_moved(hlo) == (40 + 4) + 2 * 40


def test_compile_time_and_memory() -> None:
    def build() -> jax.stages.Compiled:
        return (
            jax.jit(lambda x: jnp.tanh(x * 3) @ x.T, donate_argnums=()).lower(f32(64, 64)).compile()
        )

    compiled, lower_s, compile_s = timed_compile(build)
    assert lower_s > 0
    assert compile_s > 0
    assert peak_bytes(compiled) >= 2 * 64 * 64 * 4


def test_rates_are_those_of_this_device() -> None:
    """Within what any machine that runs these tests could do."""
    rates = measure_rates('float32', side=64, copied=2**16)
    assert 1e6 < rates.matmul_flops < 1e17
    assert 1e6 < rates.copy_bytes < 1e14
