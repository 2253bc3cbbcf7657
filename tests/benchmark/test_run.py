"""`python -m jaxunet.benchmark`: every case and side is a row, and mistakes end first."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import pathlib
import threading

import numpy as np
import pytest
from support.benchmarks import FIELDS, MEASURED, available, fake_sides, plan
from support.commands import call
from support.tiny import flags, tiny_config

from jaxunet.benchmark import run, sharing, table
from jaxunet.benchmark.cases import DEFAULT_DIRECTIONS, Prepared, Sampling
from jaxunet.benchmark.device import Rates
from jaxunet.benchmark.jax_side import synthetic_source
from jaxunet.runtime import rows
from jaxunet.runtime.errors import UserError


def test_command_line(tmp_path: pathlib.Path) -> None:
    """Rows of every direction, shares that follow from them, a table that is printed again from the
    file.
    """
    output = tmp_path / 'rows.jsonl'
    options = ['--backends=xla', '--batch_sizes=4', '--rounds=3', '--steps=2', f'--output={output}']
    printed = call('jaxunet.benchmark', *flags(), *options)
    found = rows.read(output)
    assert [row['direction'] for row in found] == list(DEFAULT_DIRECTIONS)
    for row in found:
        assert set(row) == FIELDS | MEASURED
        assert (row['backend'], row['batch_size'], row['config'], row['error']) == (
            'xla',
            4,
            'digits',
            None,
        )
        low, high = row['quartiles_ms']
        assert 0 < low <= row['median_ms'] <= high
        assert row['ratio'] == 1
        seconds = row['median_ms'] / 1e3
        np.testing.assert_allclose(row['images_per_second'], 4 / seconds)
        passes = 1 if row['direction'] == 'forward' else 3
        np.testing.assert_allclose(
            row['mfu'], passes * row['forward_flops'] / seconds / row['matmul_flops']
        )
        np.testing.assert_allclose(
            row['bandwidth_share'], row['bytes_moved'] / seconds / row['copy_bytes_per_s']
        )
        assert row['lower_s'] > 0
        assert row['compile_s'] > 0
    forward, backward, step = found
    assert forward['bytes_moved'] < backward['bytes_moved'] < step['bytes_moved']
    assert forward['peak_bytes'] < backward['peak_bytes'] < step['peak_bytes']
    assert call('jaxunet.benchmark', f'--table={output}') == printed
    assert printed.count('\n| digits |') == 3


def test_sampling_is_held_against_the_network_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, 'measure_rates', lambda precision: Rates(1e12, 1e12))
    wanted = plan(
        backends=['xla'], batch_sizes=['4'], directions=['sample'], sampling=Sampling(8, 5)
    )
    (row,) = run.run(wanted, synthetic_source(wanted.config), 'x')
    alone = {'sampled_images', 'network_ms', 'share_of_network', 'sampler'}
    assert set(row) == FIELDS | MEASURED | alone
    assert (row['sampler'], row['sampled_images'], row['error']) == ('ddim, 5 steps', 8, None)
    assert row['steps_per_round'] == 2  # whole turns of 8 images, in batches of 4
    assert row['steps_per_call'] == 1
    assert row['network_ms'] > 0
    assert row['share_of_network'] > 0
    seconds = row['median_ms'] / 1e3
    np.testing.assert_allclose(row['images_per_second'], 4 / seconds)
    np.testing.assert_allclose(row['mfu'], 5 * row['forward_flops'] / seconds / 1e12)
    shown = f'| sample, {row["share_of_network"]:.0%} of the network alone | xla |'
    assert shown in table.markdown([row])


def test_a_side_that_cannot_run_is_a_row(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that fails while it is timed; the others go on, and ratios are to the first even
    where the second is gone.
    """
    made = fake_sides(lambda direction, steps: direction == 'step')
    monkeypatch.setattr(run, 'make_side', made)
    monkeypatch.setattr(run, 'measure_rates', lambda precision: Rates(1e9, 1e9))
    wanted = plan()._replace(sides=('a', 'missing', 'dies'))
    found = list(run.run(wanted, synthetic_source(wanted.config), 'x'))
    seen = [(row['backend'], row['direction'], row['error']) for row in found]
    assert seen == [
        ('missing', 'all', 'this machine has no such kernels'),
        ('a', 'forward', None),
        ('dies', 'forward', None),
        ('a', 'forward+backward', None),
        ('dies', 'forward+backward', None),
        ('a', 'step', None),
        ('dies', 'step', 'RuntimeError: out of memory'),
    ]
    text = table.markdown(found)
    assert 'error: this machine has no such kernels' in text
    assert {row.count('|') for row in text.splitlines() if row.startswith('|')} == {
        len(table.HEAD) + 1
    }


@pytest.mark.long
def test_exit_status_tells_of_missing_sides(tmp_path: pathlib.Path) -> None:
    """Several sides: what runs is measured and the status is 1. One alone: an error at once."""
    missing = [name for name in ('pallas', 'cuda') if not available(name)]
    if not missing:
        pytest.skip('this machine has every backend')
    options = [
        *flags(),
        '--rounds=1',
        '--steps=1',
        '--directions=forward',
        f'--output={tmp_path / "rows.jsonl"}',
    ]
    message = call('jaxunet.benchmark', *options, f'--backends=xla,{missing[0]}', code=1)
    assert f'error: {missing[0]}, float32, batch 8, all: backend={missing[0]}' in message
    assert [
        (row['backend'], row['error'] is None) for row in rows.read(tmp_path / 'rows.jsonl')
    ] == [(missing[0], False), ('xla', True)]
    assert call('jaxunet.benchmark', *options, f'--backends={missing[0]}', code=2).startswith(
        f'error: backend={missing[0]}'
    )


def test_dry_run_prints_the_cases() -> None:
    options = [
        '--batch_sizes=4,8',
        '--precisions=bfloat16,float32',
        '--directions=step,forward',
        '--dry_run',
    ]
    lines = call('jaxunet.benchmark', *flags(), *options).splitlines()
    assert len(lines) == 8
    assert (
        lines[0]
        == 'digits, bfloat16, batch 4, forward: auto; 10 rounds of about 0.5 s, at least 10 steps'
    )
    assert (
        lines[-1]
        == 'digits, float32, batch 8, step: auto; 10 rounds of about 0.5 s, at least 10 steps'
    )
    file = pathlib.Path(__file__).parents[2] / 'configs' / 'elephants64.py'
    printed = call(
        'jaxunet.benchmark',
        f'--config={file}',
        '--directions=step',
        '--rounds=3',
        '--steps=7',
        '--dry_run',
    )
    assert printed == 'elephants64, bfloat16, batch 32, step: auto; 3 rounds of 7 steps\n'
    sized = ['--config.data.image_size=64', '--dry_run', '--directions=step']
    assert call('jaxunet.benchmark', f'--config={file}', *sized).startswith('elephants64 64x64, ')


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'backends': ['pallsa']}, '--backends: .*did you mean "pallas"'),
        ({'peers': ['torch']}, '--peers: expected some of pytorch'),
        ({'precisions': ['half']}, '--precisions: .*float16'),
        ({'directions': ['back']}, '--directions: .*forward'),
        ({'batch_sizes': ['32', '-1']}, "--batch_sizes: .*'-1'"),
        (
            {'peers': ['pytorch'], 'directions': ['sample']},
            '--directions: the peers draw no samples',
        ),
        (
            {'config': tiny_config(train={'steps_per_call': 2, 'log_every': 2}), 'steps': 5},
            r'--steps: 5 is not a multiple of train.steps_per_call \(2\)',
        ),
        ({'rounds': 0}, '--rounds: expected 1 or more, found 0'),
        ({'config': tiny_config(parallel={'devices': 2})}, 'parallel.devices: .* found 2'),
        (
            {'config': tiny_config(optimizer={'accumulate_steps': 2})},
            'optimizer.accumulate_steps: .* found 2',
        ),
    ],
)
def test_mistakes(changes: dict[str, list[str] | int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(**changes)


@pytest.mark.parametrize('more', [(), ('--dry_run',)])
def test_a_file_that_cannot_be_written_ends_first(more, tmp_path: pathlib.Path) -> None:
    """Even before the images are opened."""
    images = '--config.data.path=missing.npz'
    message = call('jaxunet.benchmark', *flags(), images, f'--output={tmp_path}', *more, code=2)
    assert message.startswith(f'error: --output: {tmp_path}: cannot be written')


@pytest.mark.parametrize('flag', ['sampled_images', 'sampling_steps'])
def test_flags_of_sampling_need_the_direction_sample(flag: str) -> None:
    command = ['jaxunet.benchmark', '--dry_run', f'--{flag}=8']
    call(*command, '--directions=step,sample')
    message = call(*command, code=2)
    assert f'error: --{flag}: only the direction sample draws images' in message


def test_peers_need_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(UserError, match=r'pip install "jaxunet\[peers\]"'):
        plan(peers=['pytorch'])


def test_benchmarks_with_one_lock_compile_together_and_measure_alone(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, 'measure_rates', lambda precision: Rates(1e12, 1e12))
    lock, compiled, found = str(tmp_path / 'lock'), threading.Event(), []
    prepare = run._prepare

    def prepared(*arguments: object) -> Prepared:
        try:
            return prepare(*arguments)  # type: ignore[arg-type]
        finally:
            compiled.set()

    monkeypatch.setattr(run, '_prepare', prepared)
    wanted = plan(directions=['forward'])._replace(lock=lock)

    def benchmark() -> None:
        found.extend(run.run(wanted, synthetic_source(wanted.config), ''))

    thread = threading.Thread(target=benchmark)
    with sharing.measuring(lock):
        thread.start()
        assert not compiled.wait(1)
    with sharing.compiling(lock):
        assert compiled.wait(60)
        thread.join(1)
        assert not found
    thread.join(60)
    assert [row['error'] for row in found] == [None]


def test_a_lock_has_its_folder_and_needs_a_file_system_with_locks(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / 'new' / 'lock'
    with sharing.compiling(str(lock)):
        assert lock.is_file()

    def refuse(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, 'No locks available')

    monkeypatch.setattr(fcntl, 'flock', refuse)
    message = f'--lock: {lock}: cannot be locked: No locks available; name a file on a disk of'
    with pytest.raises(UserError, match=message), sharing.measuring(str(lock)):
        pass
