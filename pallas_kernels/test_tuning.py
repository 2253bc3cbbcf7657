"""The tuning program, with made-up times: what it times, prints and writes into a device's table of
tiles.
"""

from __future__ import annotations

import json
import pathlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import pytest

from jaxunet.runtime import device
from jaxunet.runtime import gpu_time as timing
from pallas_kernels import tile_table
from pallas_kernels.conv3x3 import tune_hopper


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
            found[name] = timing.Times({'kernel': us}, (us,) * rounds)
        return found

    monkeypatch.setattr(timing, 'named', named)
    monkeypatch.setattr(timing, 'trace_times', trace_times)
    monkeypatch.setattr(tile_table, 'FOLDER', tmp_path)
    tile_table.load.cache_clear()
    yield tmp_path / 'cpu.jsonl'
    tile_table.load.cache_clear()


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr(sys, 'argv', ['tune', *flags])
    with device.use(device.Target.HOPPER):
        tune_hopper.main()


def test_tuning(
    table: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        '--cases=8x8_192to256',
        '--batch=2',
        '--directions=forward,input,fused,weight',
        '--limit=3',
    )
    run(monkeypatch, *flags)
    assert not table.exists()
    rows = [
        json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith('{')
    ]
    assert len(rows) >= 3
    run(monkeypatch, *flags, '--write')
    assert '3 tiles written' in capsys.readouterr().out
    found = tile_table.load('cpu')
    assert len(found) == 3
    assert all(entry.us is not None for entry in found.values())


def test_a_machine_without_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(*_: object, **__: object) -> None:
        raise AssertionError('times kernels')

    monkeypatch.setattr(timing, 'trace_times', timed)
    monkeypatch.setattr(sys, 'argv', ['tune'])
    with pytest.raises(SystemExit, match='error: the kernels need an NVIDIA GPU'):
        tune_hopper.main()


def test_unknown_names_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match='2'):
        run(monkeypatch, '--directions=forward,inputs')
    assert 'forward, input, fused, weight' in capsys.readouterr().err
