"""`--choose` finds the fastest backend of each op."""

from __future__ import annotations

import pathlib

import pytest
from support.benchmarks import available, fake_sides, plan
from support.commands import call
from support.tiny import flags

from jaxunet.benchmark import choose
from jaxunet.benchmark.jax_side import synthetic_source


def test_choose_on_a_machine_without_kernels(tmp_path: pathlib.Path) -> None:
    if missing := [name for name in ('pallas', 'cuda') if available(name)]:
        pytest.skip(f'this machine has {missing}')
    path = tmp_path / 'choices.json'
    printed = call(
        'jaxunet.benchmark', *flags(), '--choose', variables={'JAXUNET_CHOICES': str(path)}
    )
    assert printed == 'only xla runs on this machine (cpu): nothing to choose\n'
    assert not path.exists()


def test_choose_checks_its_file_first(tmp_path: pathlib.Path) -> None:
    variables = {'JAXUNET_CHOICES': str(tmp_path)}
    error = call('jaxunet.benchmark', *flags(), '--choose', variables=variables, code=2)
    assert error.startswith(f'error: JAXUNET_CHOICES: {tmp_path}: cannot be written')


@pytest.mark.parametrize('flag', ['--backends=xla', '--directions=step', '--batch_sizes=2,4'])
def test_choose_refuses_what_it_does_not_read(flag: str) -> None:
    error = call('jaxunet.benchmark', *flags(), '--choose', flag, code=2)
    assert error.startswith(f'error: {flag.split("=", maxsplit=1)[0]}: --choose ')


def test_choose_refuses_a_config_with_a_backend() -> None:
    error = call('jaxunet.benchmark', *flags(), '--choose', '--config.backend=xla', code=2)
    assert error.startswith('error: backend: found xla; --choose times every backend')


@pytest.mark.parametrize('steps', [4, None])
def test_choose_leaves_out_what_does_not_run(
    steps: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a side that fails while it is timed, or before, while steps are counted."""
    closed: list[str] = []
    made = fake_sides(lambda direction, steps: steps > 1, closed.append)
    monkeypatch.setattr(choose, 'make_side', made)
    monkeypatch.setattr(choose, 'fresh_state', lambda config: None)
    config = plan().config
    measure = choose.step_timer(config, synthetic_source(config), rounds=3, steps=steps)
    found = measure(['a', 'missing', 'dies'])
    assert {name: len(times) for name, times in found.items()} == {'a': 3}
    assert closed == ['a step', 'dies step']
