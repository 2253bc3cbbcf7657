"""The sides that `tools/gpu/auto.py` times, and its table."""

from __future__ import annotations

import pathlib

import pytest

from jaxunet.config import split_backend
from jaxunet.ops import backends
from jaxunet.runtime import device
from tools.gpu import auto


@pytest.mark.parametrize('precision', auto.SIDES)
def test_auto_is_a_side_of_each_set_of_kernels(precision: str, monkeypatch) -> None:
    """XLA's side stands for `auto` where its table takes XLA; every other choice is another."""
    monkeypatch.setattr(backends, '_unavailable', lambda name: None)
    monkeypatch.setattr(backends.choices, 'read', lambda device, precision: None)
    for kernels, sides in auto.SIDES[precision].items():
        monkeypatch.setenv(device.VARIABLE, kernels)
        target = device.Target.HOPPER if kernels == 'fastest' else device.Target.PORTABLE
        with device.use(target):
            own = auto.AUTO.get((precision, kernels), 'auto')
            names = backends.choose('auto', precision).names
            assert names == backends.choose(own, precision).names
            others = [side for side in ('xla', *sides) if side != own]
            assert len(others) + 1 == len({*sides, 'xla'})
            for side in others:
                assert split_backend(side)[0] in ('xla', 'cuda', 'pallas')
                assert backends.choose(side, precision).names != names


def test_table_of_auto() -> None:
    call = auto.command('float32', 5, pathlib.Path('rows.jsonl'))
    lists = dict(argument.lstrip('-').split('=', 1) for argument in call[3:])
    names, kernels = lists['backends'].split(','), lists['kernels'].split(',')
    assert len(names) == len(kernels)
    milliseconds = {('xla', 'fastest'): 20.0, ('auto', 'fastest'): 10.0, ('cuda', 'ada'): 19.0}
    sides = list(zip(names, kernels, strict=True))
    times = [[milliseconds.get(side, 30.0) + i / 10 for i in range(3)] for side in sides]
    row = {'precision': 'float32', 'backends': names, 'kernels': kernels, 'ms': times}
    assert auto.table([row]).splitlines()[2:] == [
        '| float32 | fastest | 10.10 | `xla` | 20.10 | 0.502 (0.500 to 0.505) | yes |',
        '| float32 | portable | 20.10 | `cuda` | 30.10 | 0.668 (0.667 to 0.669) | yes |',
        '| float32 | ada | 20.10 | `cuda` | 19.10 | 1.052 (1.052 to 1.053) | no |',
    ]
