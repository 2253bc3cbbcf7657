"""`python -m jaxunet.sweep` as a user types it."""

import json
import os
import pathlib
import subprocess
import sys
import threading
import time

import jax
import pytest
from support.commands import call
from support.processes import assert_ended
from support.settings import QUICK
from support.tiny import flags

from jaxunet.sweep.folder import load
from jaxunet.sweep.presets import PRESETS, STUDY


def sweep(directory, *arguments, code=0):
    variables = {'JAXUNET_GIT_SHA': 'abc1234'}
    arguments = ['jaxunet.sweep', *arguments, f'--output={directory}']
    return call(*arguments, code=code, variables=variables)


def test_from_the_command_line(tmp_path):
    """Two numbers of devices by two inputs, one of which has nothing to do for the workers; then
    again, retried, and plotted.
    """
    given = [
        *flags(),
        '--config.data.batch_size=6',
        '--vary=parallel.devices=1,2',
        '--vary=data.num_workers=0,1',
        '--steps=6',
        '--warmup=1',
    ]
    out = sweep(tmp_path, *given)
    assert 'note: data.cache: stream instead of auto' in out
    found = {tuple(row['point'].values()): row for row in load(tmp_path).rows}
    assert {point: row['status'] for point, row in found.items()} == {
        (1, 0): 'ok',
        (1, 1): 'error',
        (2, 0): 'ok',
        (2, 1): 'error',
    }
    assert (
        'data.num_workers: 1 workers have nothing to do, as digits: lies in memory'
        in found[1, 1]['reason']
    )
    row = found[2, 0]
    assert row['steps'] == 6
    assert row['warmup'] >= 2
    assert row['compile_s'] > 0
    assert row['lower_s'] > 0
    assert (
        row['step_ms']['quartiles'][0] <= row['step_ms']['median'] <= row['step_ms']['quartiles'][1]
    )
    low, high = row['images_per_s_range']
    assert 0 < low <= row['images_per_s'] <= high
    assert row['peak_bytes'] > 2**26
    assert row['config']['data']['cache'] == 'stream'
    assert row['ops'].startswith('ops: conv3x3=xla, ')
    assert row['versions']['jax'] == jax.__version__
    losses = [found[n, 0]['loss'] for n in (1, 2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)  # the same batches, the same steps
    lines = (tmp_path / 'results.jsonl').read_text().splitlines()
    assert len(lines) == 4

    out = sweep(tmp_path, *given, '--noplot')
    assert '4 of 4 points are done (2 of them failed' in out
    assert (tmp_path / 'results.jsonl').read_text().splitlines() == lines

    out = sweep(tmp_path, *given, '--retry_failed', '--timeout=0.1')
    again = [json.loads(line) for line in (tmp_path / 'results.jsonl').read_text().splitlines()[4:]]
    assert [(row['status'], row['point']['data.num_workers']) for row in again] == [
        ('timeout', 1)
    ] * 2

    for name in ('report.md', 'results.csv', 'parallel.devices.png', 'data.num_workers.png'):
        (tmp_path / name).unlink()
    out = sweep(tmp_path, '--plot_only')
    assert '## What each option is worth' in out
    assert '| parallel.devices=2 | 1 | ×' in (tmp_path / 'report.md').read_text()
    assert (tmp_path / 'parallel.devices.png').exists()
    assert (tmp_path / 'data.num_workers.png').exists()


@pytest.mark.long
def test_top_operations_from_the_command_line(tmp_path):
    out = sweep(
        tmp_path,
        *flags(),
        '--preset=top_operations',
        '--vary=backend=xla',
        '--steps=2',
        '--warmup=1',
    )
    assert '## Phases' in out
    assert 'On a CPU, those of its threads add up to more than the step.' in out
    assert '## Top 10 device operations' in out
    (row,) = load(tmp_path).rows
    assert row['launches'] > 10
    assert row['images_per_s'] == pytest.approx(8e3 / row['step_ms']['median'])
    assert (tmp_path / row['profile']).is_file()
    assert (tmp_path / 'operations.png').exists()
    assert '![operations](operations.png)' in (tmp_path / 'report.md').read_text()


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ([], 'error: --vary: nothing to vary'),
        (['--vary=data.batch_sise=8'], 'error: --vary data.batch_sise: unknown field'),
        (
            ['--vary=jit=on', '--config.data.path=nowhere.zip'],
            'error: data.path: nowhere.zip: no such file',
        ),
        (['--preset=ampp'], f'value should be one of <{"|".join([*PRESETS, STUDY])}>'),
        (
            ['--preset=top_operations', '--vary=jit=on,off', '--config.parallel.devices=1'],
            'error: --vary jit: --preset top_operations',
        ),
        (['--plot_only'], 'holds no sweep'),
    ],
)
def test_mistakes_end_before_anything_runs(arguments, message, tmp_path):
    assert message in sweep(tmp_path / 'out', *arguments, code=2)
    assert not (tmp_path / 'out').exists()


def test_results_that_cannot_be_written_end_before_anything_runs(tmp_path):
    (tmp_path / 'results.jsonl').symlink_to('/proc/version/results.jsonl')
    message = f'error: --output: {tmp_path}/results.jsonl: cannot be written; check the name'
    assert message in sweep(tmp_path, *flags(), '--vary=seed=1,2', '--noplot', code=2)
    assert [path.name for path in tmp_path.iterdir()] == ['results.jsonl']


def test_a_stopped_sweep_takes_its_point_along(tmp_path):
    environment = os.environ | {
        'XLA_FLAGS': QUICK,
        'JAX_PLATFORMS': 'cpu',
        'JAXUNET_GIT_SHA': 'abc1234',
    }
    command = [
        sys.executable,
        '-m',
        'jaxunet.sweep',
        *flags(),
        '--vary=seed=1,2',
        f'--output={tmp_path}',
        '--steps=1000000',
        '--noplot',
    ]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    timer = threading.Timer(60, process.kill)
    timer.start()
    assert process.stdout is not None
    while 'seed=1 ...' not in process.stdout.readline():
        assert process.poll() is None
    children = pathlib.Path(f'/proc/{process.pid}/task/{process.pid}/children')
    while not (child := children.read_text().strip()):
        time.sleep(0.05)
    process.terminate()
    _, err = process.communicate()
    timer.cancel()
    assert process.returncode == 130
    assert 'stopped; the same command goes on from here' in err
    assert_ended(int(child), seconds=10)
    assert not (tmp_path / 'results.jsonl').exists()
