"""The tuning programs, with made-up times: what they time, print and write into a device's table of
tiles.
"""

from __future__ import annotations

import functools
import json
import pathlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
import pytest
from support.commands import call

from jaxunet.runtime import device
from jaxunet.runtime import gpu_time as timing
from pallas_kernels import tile_table
from pallas_kernels.attention import triton
from pallas_kernels.attention import tune as attention
from pallas_kernels.conv3x3 import tune_hopper, tune_triton
from pallas_kernels.group_norm import tune as group_norm


class Program(Protocol):
    """A tuning program."""

    def main(self) -> None: ...


@pytest.fixture
def table(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """Yields the path of the table for this process's device.

    Compiled programs do nothing; each is faster than those that were compiled before it.
    """

    def named(name: str, function: Callable[..., jax.Array]) -> types.SimpleNamespace:
        compiled = types.SimpleNamespace(compile=lambda: lambda *arguments: jnp.ones(1))
        return types.SimpleNamespace(lower=lambda *arguments: compiled)

    def trace_times(
        programs: Mapping[str, Callable[[int], object]], *, rounds: int
    ) -> dict[str, timing.Times]:
        found = {}
        for i, (name, program) in enumerate(programs.items()):
            program(0)
            us = 100.0 / (1 + i)
            found[name] = timing.Times(
                {f'jaxunet_attention_{kernel}': us for kernel in attention.KERNELS}, (us,) * rounds
            )
        return found

    monkeypatch.setattr(timing, 'named', named)
    monkeypatch.setattr(timing, 'trace_times', trace_times)
    monkeypatch.setattr(triton, 'forward', functools.partial(triton.forward, interpret=True))
    monkeypatch.setattr(tile_table, 'FOLDER', tmp_path)
    tile_table.load.cache_clear()
    yield tmp_path / 'cpu.jsonl'
    tile_table.load.cache_clear()


def run(monkeypatch: pytest.MonkeyPatch, module: Program, *flags: str) -> None:
    monkeypatch.setattr(sys, 'argv', ['tune', *flags])
    with device.use(device.Target.HOPPER):
        module.main()


RUNS = [
    (
        attention,
        (
            '--shapes=64:1:32',
            '--batch=1',
            '--kernels=both,forward,backward,backward_dq,backward_dkv',
        ),
        4,
    ),
    (
        group_norm,
        (
            '--shapes=8:32+32',
            '--batch=2',
            '--kernels=both_xla,both,both_triton,forward,gradient_sums_activation',
        ),
        2,
    ),
    (
        tune_hopper,
        (
            '--cases=8x8_192to256',
            '--batch=2',
            '--directions=forward,input,fused,weight',
            '--limit=3',
        ),
        3,
    ),
]


@pytest.mark.parametrize(
    ('module', 'flags', 'keys'),
    RUNS,
    ids=lambda v: v.__name__ if isinstance(v, types.ModuleType) else '',
)
def test_tuning(
    module: Program,
    flags: tuple[str, ...],
    keys: int,
    table: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(monkeypatch, module, *flags)
    assert not table.exists()
    rows = [
        json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith('{')
    ]
    assert len(rows) >= keys
    run(monkeypatch, module, *flags, '--write')
    assert f'{keys} tiles written' in capsys.readouterr().out
    found = tile_table.load('cpu')
    assert len(found) == keys
    assert all(entry.us is not None for entry in found.values())


@pytest.mark.usefixtures('table')
def test_attention_without_tiles_that_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The op is timed all the same, and so are the kernels of other shapes."""
    forward, shapes = triton.forward, []
    monkeypatch.setattr(
        triton, 'forward', lambda qkv, *a, **k: shapes.append(qkv.shape) or forward(qkv, *a, **k)
    )
    run(monkeypatch, attention, '--dtype=float32', '--shapes=256:1:256,64:1:32', '--batch=1')
    lines = capsys.readouterr().out.splitlines()
    rows = [json.loads(line) for line in lines if line.startswith('{')]
    timed = [(row['tokens'], row['what']) for row in rows if 'what' in row]
    assert timed == [(256, 'forward'), (256, 'both'), (64, 'forward'), (64, 'both')]
    tiles = [(row['tokens'], row['kernel']) for row in rows if 'kernel' in row]
    assert tiles == [(64, kernel) for kernel in attention.KERNELS]
    message = '(1, 256, 1, 256) float32: no tiles to time for '
    assert f'{message}forward, backward, backward_dq, backward_dkv' in lines
    assert set(shapes) == {(1, 64, 96)}


@pytest.mark.parametrize('lacking', attention.PAIR)
def test_attention_without_tiles_for_one_of_a_pair(
    lacking: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    candidates = attention.candidates
    monkeypatch.setattr(
        attention, 'candidates', lambda name, *a: [] if name == lacking else candidates(name, *a)
    )
    jobs = attention.jobs_for((1, 64, 1, 32), list(attention.KERNELS), jnp.dtype('float32'))
    assert {what for _, what, _ in jobs} == {'forward', 'backward'}
    assert capsys.readouterr().out == (
        '(1, 64, 1, 32) float32: no tiles to time for backward_dq, backward_dkv\n'
    )


@pytest.mark.parametrize('module', [attention, group_norm, tune_hopper, tune_triton])
def test_a_machine_without_a_gpu_is_told(
    module: Program | types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def timed(*_: object, **__: object) -> None:
        raise AssertionError('times kernels')

    monkeypatch.setattr(timing, 'trace_times', timed)
    monkeypatch.setattr(sys, 'argv', ['tune'])
    arguments = [['tune']] if module is tune_triton else []
    with pytest.raises(SystemExit, match='error: Pallas kernels need an NVIDIA GPU'):
        module.main(*arguments)


@pytest.mark.parametrize(
    ('module', 'flag', 'known'),
    [
        (attention, '--kernels=forward,backwards', 'both, forward, backward,'),
        (attention, '--dtype=float64', 'bfloat16'),
        (group_norm, '--kernels=forward,backwards', 'both_xla, both, both_triton, forward,'),
        (group_norm, '--dtype=float64', 'bfloat16'),
        (tune_hopper, '--directions=forward,inputs', 'forward, input, fused, weight'),
    ],
    ids=lambda v: v.__name__ if isinstance(v, types.ModuleType) else None,
)
def test_unknown_names_are_refused(
    module: Program,
    flag: str,
    known: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match='2'):
        run(monkeypatch, module, flag)
    assert known in capsys.readouterr().err


@pytest.mark.parametrize(
    ('flag', 'known'),
    [
        ('--directions=forward,inputs', 'expected some of forward, fused, input, weight'),
        ('--dtype=float64', 'bfloat16'),
    ],
)
def test_unknown_names_are_refused_for_the_portable_convolution(flag: str, known: str) -> None:
    assert known in call('pallas_kernels.conv3x3.tune_triton', flag, code=1)
