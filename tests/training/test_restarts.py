"""A run that heals itself: its process is started again where it died."""

from __future__ import annotations

import os
import pathlib
import signal
import threading
import time

import pytest
from support.commands import Fork

from jaxunet.runtime.errors import USER_ERROR
from jaxunet.training import restarts
from jaxunet.training.logs import read_rows
from jaxunet.training.restarts import Supervisor, describe, newest_step

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
    assert newest_step(tmp_path) == 6


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


def signal_once_started(path):
    while not path.exists():
        time.sleep(0.01)
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)


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


def wait_for(path: pathlib.Path, seconds: float = 60):
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_how_a_process_ended():
    assert describe(1) == 'the process ended with exit code 1'
    assert describe(-signal.SIGSEGV) == 'the process was ended by SIGSEGV'
    assert describe(-99) == 'the process was ended by signal 99'
