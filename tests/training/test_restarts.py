"""A run that heals itself: its process is started again where it died."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
from support.commands import Fork, environment, python_path
from support.tiny import flags, tiny_config

from jaxunet.checkpoint.newest import saved_steps
from jaxunet.runtime.errors import USER_ERROR
from jaxunet.training import restarts
from jaxunet.training.logs import read_metrics, read_rows
from jaxunet.training.meeting import Place
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
    return read_rows(workdir / restarts.FILE, restarts.COLUMNS, restarts.TEXTS)


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


@pytest.mark.parametrize('code', [0, USER_ERROR, 130])
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


def test_it_goes_on_without_a_process_that_does_not_come_back(tmp_path, capfd):
    script = """
        cd "$1"; shift; echo "$*" >> starts
        case $(wc -l < starts) in 1) kill -KILL $$;; 2) exit 4;; esac
    """
    command = ['/bin/sh', '-c', script, 'sh', str(tmp_path)]
    supervisor = Supervisor(
        command, tmp_path, 3, environ={}, first_wait=0.01, place=Place(0, 2), wait_seconds=0.1
    )
    assert supervisor.run() == 0
    alone = '--fewer_devices --num_processes=1 --process_id=0'
    assert (tmp_path / 'starts').read_text().splitlines() == ['', alone, alone]
    assert 'the run goes on with 1 of 2 processes: 0' in capfd.readouterr().err
    assert [(row['processes'], row['reason']) for row in rows(tmp_path)] == [
        ('2', 'the process was ended by SIGKILL, as where memory runs out'),
        ('1', 'the process ended with exit code 4: the other processes were not there'),
    ]


def test_a_process_that_hangs_while_the_others_meet_is_ended(tmp_path, capfd, monkeypatch):
    """Process 1 is started again in its place as soon as process 0 has called."""
    monkeypatch.setattr(restarts, 'CALL_SECONDS', 0.05)
    script = """
        cd "$1"; shift; echo "$*" >> "starts$0"
        case "$0$(wc -l < "starts$0")" in 01) sleep 0.3; kill -KILL $$;; 11) sleep 600;; esac
    """
    supervisors = [
        Supervisor(
            ['/bin/sh', '-c', script, str(process), str(tmp_path)],
            tmp_path,
            3,
            main=process == 0,
            environ={},
            first_wait=0.01,
            place=Place(process, 2),
        )
        for process in range(2)
    ]
    for supervisor in supervisors:  # only the main thread may handle signals
        monkeypatch.setattr(supervisor, '_signals_passed_on', contextlib.nullcontext)
    with ThreadPoolExecutor(2) as threads:
        codes = list(threads.map(Supervisor.run, supervisors))
    assert codes == [0, 0]
    for process in range(2):
        again = f'--fewer_devices --num_processes=2 --process_id={process}'
        assert (tmp_path / f'starts{process}').read_text().splitlines() == ['', again]
    assert 'process 0 calls, as its part died; the last checkpoint is step 0; starting again' in (
        capfd.readouterr().err
    )


def test_processes_that_never_met_are_not_started_again(tmp_path):
    assert supervise(tmp_path, 'exit 4', place=Place(0, 2)) == 4


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
