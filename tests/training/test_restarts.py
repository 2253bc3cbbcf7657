"""A run that heals itself: its process is started again where it died."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import textwrap
import threading
import time

import jax
import pytest
from support.commands import Fork, environment, python_path
from support.tiny import flags, tiny_config

from jaxunet.checkpoint.newest import saved_steps
from jaxunet.runtime.distributed import PEERS_MISSING
from jaxunet.runtime.errors import USER_ERROR
from jaxunet.training import restarts
from jaxunet.training.logs import read_metrics, read_rows
from jaxunet.training.parallel import on_fewer_devices
from jaxunet.training.restarts import Supervisor, describe

# A supervisor has no threads, but the process of these tests may have those of JAX.
pytestmark = pytest.mark.filterwarnings('ignore:os.fork')


def supervise(workdir, script, restarts=3, environ=None, **options):
    command = ['/bin/sh', '-c', script, 'sh', str(workdir)]
    return Supervisor(
        command, workdir, restarts, environ=environ or {}, first_wait=0.01, **options
    ).run()


def rows(workdir):
    columns = (*restarts.COLUMNS, *restarts.EARLIER_COLUMNS)
    return read_rows(workdir / restarts.FILE, columns, restarts.TEXTS)


def test_a_process_that_dies_is_started_again(tmp_path, capfd):
    """Twice: by a signal, and by an error that is no mistake of the user."""
    script = """
        echo x >> "$1/starts"
        mkdir -p "$1/checkpoints/8"
        case $(wc -l < "$1/starts") in 1) kill -KILL $$;; 2) exit 1;; esac
    """
    assert supervise(tmp_path, script) == 0
    assert (tmp_path / 'starts').read_text() == 'x\n' * 3
    found = [(row['step'], row['restart'], row['reason']) for row in rows(tmp_path)]
    assert found == [
        ('8', '1', 'the process was ended by SIGKILL, as where memory runs out'),
        ('8', '2', 'the process ended with exit code 1'),
    ]
    told = capfd.readouterr().err
    assert 'the last checkpoint is step 8; starting again in 0.01 s, 1 of 3' in told
    assert 'starting again in 0.02 s, 2 of 3' in told


@pytest.mark.parametrize('code', [0, USER_ERROR, 130, PEERS_MISSING])
def test_a_process_that_ends_by_itself_is_not(code, tmp_path):
    assert supervise(tmp_path, f'echo x >> "$1/starts"; exit {code}') == code
    assert (tmp_path / 'starts').read_text() == 'x\n'
    assert not (tmp_path / restarts.FILE).exists()


def test_it_goes_on_with_the_devices_that_are_left(tmp_path):
    """The command gets a flag, from the first restart on."""
    script = 'shift; echo "$*" >> starts; [ "$(wc -l < starts)" = 3 ] || kill -KILL $$'
    command = ['/bin/sh', '-c', f'cd "$1"; {script}', 'sh', str(tmp_path), '--flag']
    assert Supervisor(command, tmp_path, 3, environ={}, first_wait=0.01).run() == 0
    again = '--flag --fewer_devices'
    assert (tmp_path / 'starts').read_text().splitlines() == ['--flag', again, again]


def test_it_gives_up_without_a_new_checkpoint(tmp_path, capfd):
    assert supervise(tmp_path, 'echo x >> "$1/starts"; kill -ABRT $$', restarts=2) == 128 + 6
    assert (tmp_path / 'starts').read_text() == 'x\n' * 3
    assert 'error: the process was ended by SIGABRT; the last checkpoint is step 0, after 2 ' in (
        capfd.readouterr().err
    )


def test_a_new_checkpoint_counts_from_1_again(tmp_path):
    script = """
        echo x >> "$1/starts"
        n=$(wc -l < "$1/starts")
        mkdir -p "$1/checkpoints/$n" "$1/checkpoints/9.orbax-checkpoint-tmp"
        [ $n = 6 ] || kill -KILL $$
    """
    assert supervise(tmp_path, script, restarts=1) == 0
    assert [row['restart'] for row in rows(tmp_path)] == ['1'] * 5
    assert saved_steps(tmp_path) == [6, 5, 4, 3, 2, 1]


def test_a_table_of_an_older_version_goes_on(tmp_path):
    head = ','.join((*restarts.COLUMNS, *restarts.EARLIER_COLUMNS))
    (tmp_path / restarts.FILE).write_text(f'{head}\n8,1,it died,5,2026-01-01T00:00:00,7,2\n')
    assert supervise(tmp_path, 'kill -KILL $$', restarts=1) == 128 + 9
    assert [(row['step'], row['processes']) for row in rows(tmp_path)] == [('8', '2'), ('0', '')]


def fake_scontrol(folder, code):
    path = folder / 'scontrol'
    path.write_text(f'#!/bin/sh\necho "$@" >> {folder}/told\necho no requeue >&2\nexit {code}\n')
    path.chmod(0o755)
    return folder / 'told'


def test_slurm_requeues_the_job(tmp_path, monkeypatch, capfd):
    told = fake_scontrol(tmp_path, 0)
    monkeypatch.setenv('PATH', str(tmp_path), prepend=os.pathsep)
    job = {'SLURM_JOB_ID': '71'}
    kill = 'echo x >> "$1/starts"; kill -KILL $$'
    for _ in range(3):  # SLURM starts the same command again
        assert supervise(tmp_path, kill, restarts=2, environ=job) == 128 + 9
    assert told.read_text() == 'requeue 71\n' * 2
    assert 'giving up' in capfd.readouterr().err
    assert supervise(tmp_path, kill, restarts=2, environ={'SLURM_JOB_ID': '72'}) == 128 + 9
    assert told.read_text().endswith('requeue 72\n')
    monkeypatch.setattr(restarts, 'REQUEUE_SECONDS', 0.1)
    assert supervise(tmp_path, kill, environ={'SLURM_JOB_ID': '73'}, main=False) == 128 + 9
    assert '73' not in told.read_text()  # process 0 does it for all


def test_slurm_that_refuses(tmp_path, monkeypatch, capfd):
    fake_scontrol(tmp_path, 1)
    monkeypatch.setenv('PATH', str(tmp_path), prepend=os.pathsep)
    assert supervise(tmp_path, 'kill -KILL $$', environ={'SLURM_JOB_ID': '71'}) == 128 + 9
    assert 'error: scontrol requeue 71: no requeue; submit the job with sbatch' in (
        capfd.readouterr().err
    )


ROOT = pathlib.Path(__file__).parents[2]
JOB = {'JOB_COMPLETION_INDEX': '1', 'SLURM_JOB_ID': '7'}


def jobset_script():
    text = (ROOT / 'docs' / 'examples' / 'jobset.yaml').read_text()
    return textwrap.dedent(text.partition('- |\n')[2].partition('resources:')[0])


def sbatch_script():
    return (ROOT / 'docs' / 'examples' / 'train.sbatch').read_text()


@pytest.mark.parametrize(
    ('script', 'how', 'code', 'told'),
    [
        (jobset_script, None, 3, []),
        (jobset_script, signal.SIGTERM, 143, ['python']),
        (sbatch_script, None, 3, []),
        (
            sbatch_script,
            signal.SIGUSR1,
            128 + 10,
            ['scancel --signal=TERM 7', 'python', 'requeue 7'],
        ),
    ],
)
def test_the_examples_of_docs(script, how, code, told, tmp_path):
    """They end as the run does, or save and tell their system that it is not finished."""
    programs = {
        'python': 'echo "$@" > command; echo $$ > pid; trap "echo python >> told; exit 0" TERM; '
        f'touch on; {"while :; do sleep 0.01; done" if how else "exit 3"}',
        'srun': 'exec "$@"',
        'scancel': 'echo scancel "$@" >> told; kill -TERM $(cat pid)',
        'scontrol': 'echo "$@" >> told',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f'#!/bin/sh\n{text}\n')
        (tmp_path / name).chmod(0o755)
    path = f'{tmp_path}{os.pathsep}{os.environ["PATH"]}'
    shell = 'bash' if script is sbatch_script else 'sh'
    process = subprocess.Popen(
        [shell, '-c', script()], cwd=tmp_path, env=os.environ | JOB | {'PATH': path}
    )
    if how:
        wait_for(tmp_path / 'on')
        process.send_signal(how)
    assert process.wait(timeout=60) == code
    found = tmp_path / 'told'
    assert (found.read_text().splitlines() if found.exists() else []) == told
    _, module, *arguments = (tmp_path / 'command').read_text().split()
    assert module == 'jaxunet.train'
    known = re.findall(r"DEFINE_\w+\(\s*'(\w+)'", (ROOT / 'jaxunet' / 'train.py').read_text())
    assert {a.partition('=')[0][2:] for a in arguments if a.startswith('--')} <= {'config', *known}


def test_signals_are_passed_on(tmp_path):
    """The command is not started again, whatever becomes of it."""
    script = 'echo x >> "$1/starts"; trap "exit 1" TERM; while :; do sleep 0.01; done'
    timer = threading.Thread(target=signal_once_started, args=[tmp_path / 'starts'])
    timer.start()
    assert supervise(tmp_path, script) == 1
    timer.join()
    assert (tmp_path / 'starts').read_text() == 'x\n'


def signal_once_started(path, how=signal.SIGTERM):
    while not path.exists():
        time.sleep(0.01)
    time.sleep(0.05)
    os.kill(os.getpid(), how)


def test_the_command_ends_with_its_supervisor(tmp_path):
    (tmp_path / 'supervise.py').write_text(
        'import pathlib, sys\n'
        'from jaxunet.training.restarts import Supervisor\n'
        'Supervisor(["sh", "-c", sys.argv[1]], pathlib.Path(), 1, environ={}).run()\n'
    )
    script = 'trap "touch told; exit" TERM; touch on; while :; do sleep 0.01; done'
    process = Fork(['supervise', script], folder=tmp_path)
    wait_for(tmp_path / 'on')
    process.kill()
    wait_for(tmp_path / 'told')


@pytest.mark.usefixtures('hangup')
@pytest.mark.parametrize('how', [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_while_it_waits_to_restart(how, tmp_path, capfd):
    command = ['/bin/sh', '-c', 'echo x >> "$0"; kill -KILL $$', str(tmp_path / 'starts')]
    supervisor = Supervisor(command, tmp_path, 3, environ={}, first_wait=60)
    timer = threading.Thread(target=signal_once_started, args=[tmp_path / restarts.FILE, how])
    timer.start()
    assert supervisor.run() == 0
    timer.join()
    assert (tmp_path / 'starts').read_text() == 'x\n'
    told = f'{how.name}: stopped before the restart; the last checkpoint is step 0. The same '
    assert told in capfd.readouterr().err


def test_a_process_that_dies_of_a_signal_to_stop_is_told(tmp_path, capfd):
    """As one does that still imports."""
    timer = threading.Thread(target=signal_once_started, args=[tmp_path / 'starts'])
    timer.start()
    assert supervise(tmp_path, 'touch "$1/starts"; exec sleep 60') == 128 + signal.SIGTERM
    timer.join()
    assert 'SIGTERM: the process was ended by SIGTERM; the last checkpoint is step 0' in (
        capfd.readouterr().err
    )


FLOOD = """
import pathlib, sys
from jaxunet.training.restarts import Supervisor
command = ['sh', '-c', 'kill -KILL $$']
sys.exit(Supervisor(command, pathlib.Path(), 3, environ={}, first_wait=60).run())
"""


@pytest.mark.long
def test_a_flood_of_signals_never_locks_it(tmp_path):
    """`test_interrupt.test_handlers_take_no_locks` shows why."""
    (tmp_path / 'supervise.py').write_text(FLOOD)
    for number in range(8):
        process = Fork(['supervise'], folder=tmp_path)
        wait_for(tmp_path / restarts.FILE)
        for _ in range(3000):
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0, (number, process.stderr.read_text())
        (tmp_path / restarts.FILE).unlink()


def wait_for(path: pathlib.Path, seconds: float = 60):
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_how_a_process_ended():
    assert describe(1) == 'the process ended with exit code 1'
    assert describe(3) == 'the process ended with exit code 3: no memory left'
    assert describe(-signal.SIGSEGV) == 'the process was ended by SIGSEGV'
    assert describe(-99) == 'the process was ended by signal 99'


@pytest.mark.parametrize(
    ('there', 'asked', 'accumulate', 'found'),
    [(4, 0, 1, 4), (4, 2, 1, 2), (4, 64, 1, 4), (4, 64, 4, 2), (4, 3, 1, 2), (3, 0, 1, 2)],
)
def test_fewer_devices(there, asked, accumulate, found, monkeypatch, caplog):
    """For a batch of 8, in parts."""
    devices = jax.devices()[:there]
    monkeypatch.setattr(jax, 'devices', lambda: devices)
    config = tiny_config(parallel={'devices': asked}, optimizer={'accumulate_steps': accumulate})
    changed = on_fewer_devices(config)
    if found == (asked or there):
        assert changed == config
        return
    assert changed == config.replace(parallel={'devices': found})
    told = (
        f'{asked or "all"} asked for, {there} found; training on {found}: data.batch_size=8 in '
        f'optimizer.accumulate_steps={accumulate} parts gives {8 // accumulate} images, which'
    )
    assert told in caplog.text


SITE = """
import os, sys
if '--fewer_devices' in sys.orig_argv:
    os.environ['XLA_FLAGS'] += ' --xla_force_host_platform_device_count=3'
"""


@pytest.mark.long
def test_a_run_that_loses_a_device(tmp_path):
    """The restarted process sees three of four devices, and trains on two with the same batch."""
    (tmp_path / 'sitecustomize.py').write_text(SITE)
    workdir = tmp_path / 'run'
    variables = {'PYTHONPATH': f'{tmp_path}{os.pathsep}{python_path()}'}
    options = ['--config.parallel.devices=4', '--config.train.steps=40', '--restarts=2']
    process = Fork(
        ['jaxunet.train', f'--workdir={workdir}', *flags(), *options],
        environment(4) | variables,
    )
    wait_for(workdir / 'checkpoints' / '10')
    os.kill(
        int(re.findall(r'process (\d+) trains', process.stderr.read_text())[-1]), signal.SIGKILL
    )
    error = process.communicate()[1]
    assert process.returncode == 0, error
    assert 'parallel.devices: 4 asked for, 3 found; training on 2: data.batch_size=8 in' in error
    found = read_metrics(workdir / 'metrics.csv')
    assert [row['step'] for row in found] == [str(step) for step in range(1, 41)]
    assert {row['devices'] for row in found[:10]} == {''}
    assert {row['devices'] for row in found[-10:]} == {'2'}
