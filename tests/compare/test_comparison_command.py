"""`python -m jaxunet.compare --file`: the runs of a comparison file, in this process or several."""

from __future__ import annotations

import json
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import unittest.mock

import pytest
from support.commands import Fork, call, environment, python_path
from support.counting_step import move_weights
from support.untrained_features import write_untrained

from jaxunet.compare import collected, report, runner, tables
from jaxunet.compare.comparison_file import read_comparison
from jaxunet.compare.runner import Options
from jaxunet.runtime.errors import UserError
from jaxunet.sweep.points import Machine
from jaxunet.training.session import Session

ROOT = pathlib.Path(__file__).parents[2]
TINY = ROOT / 'docs/results/methods/tiny.toml'
CHANGES = {
    '"../../../': f'"{ROOT}/',
    '"PROTOCOL.md"': f'"{TINY.parent}/PROTOCOL.md"',
    f'{ROOT}/runs/features_tiny.npz': 'random.npz',  # of write_untrained
    'seconds = [0.2, 0.4, 0.8]': 'seconds = [0.04, 0.2]',
    '"heun:2", "ddim:2"': '"heun:2"',
    '"data.holdout" = 20\n': '',
}

# Begins a config. A signal comes while the images are read.
SIGNALLED = """
import os, time
from jaxunet.compare import job_runner

def read(config):
    time.sleep(0.01)
    os.kill(os.getpid(), {number})
    time.sleep(60)

job_runner.open_images = read
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A folder with a comparison file whose runs take four tenths of a second, and features."""
    folder = tmp_path_factory.mktemp('comparison')
    text = TINY.read_text()
    for old, new in CHANGES.items():
        assert old in text, old
        text = text.replace(old, new)
    (folder / 'comparison.toml').write_text(text)
    write_untrained(folder)
    return folder


@pytest.fixture(scope='module')
def comparison(folder):
    return read_comparison(folder / 'comparison.toml')


def options_of(output, *, part='uniform', devices=(), limit=600.0):
    return Options(part, '', output, devices, limit, 0.0, True, time.perf_counter())


@pytest.fixture(scope='module')
def done(folder, comparison):
    """An output with the runs of the baseline."""
    output = folder / 'out'
    with unittest.mock.patch.object(Session, 'compile', move_weights):
        assert runner.run(comparison, options_of(output), 'the command') == []
    runner.collect(comparison, output, ())
    return output


def test_the_runs_of_a_file(done, comparison):
    found = runner.collect(comparison, done, ())
    assert [(r['case'], r['seed'], r['seconds']) for r in found.rows] == [
        ('uniform', seed, seconds) for seed in (0, 1) for seconds in (0.04, 0.2)
    ]
    assert [row['step'] for row in found.rows] == [2, 10] * 2
    assert {'training', 'compiling', 'sampling', 'measuring'} <= {
        name for row in found.stretches for name in row['wall']
    }
    assert collected.read_rows([done / collected.ROWS]) == found.rows
    assert not list((done / 'work').iterdir())
    text, _ = report.write(found, done, report.about_file(comparison, done, 'c'), plot=False)
    assert '- all of `flow+immiscible`' in text
    assert 'CPU minutes' in text


def test_the_same_command_repeats_nothing(done, comparison, capsys):
    before = (done / '1' / collected.ROWS).read_bytes()
    assert runner.run(comparison, options_of(done), 'the command') == []
    assert (done / '1' / collected.ROWS).read_bytes() == before
    assert capsys.readouterr().out.count('is done already') == 2


def test_rows_beside_the_file_are_not_repeated(done, folder, tmp_path):
    (folder / 'kept.jsonl').write_bytes((done / collected.ROWS).read_bytes())
    path = folder / 'known.toml'
    path.write_text(f'rows = "kept.jsonl"\n{(folder / "comparison.toml").read_text()}')
    assert runner.run(read_comparison(path), options_of(tmp_path), 'the command') == []
    assert not (tmp_path / '1').exists()
    assert (tmp_path / collected.ROWS).read_bytes() == (done / collected.ROWS).read_bytes()


def test_the_report_is_made_again_with_rows_of_other_folders(done, folder, tmp_path):
    out = call(
        'jaxunet.compare',
        f'--file={folder}/comparison.toml',
        '--plot_only',
        f'--add={done}',
        f'--output={tmp_path}/new',
    )
    text = (tmp_path / 'new/report.md').read_text()
    assert text in out
    assert '| uniform | Fréchet distance |' in text
    assert 'CPU minutes' in text
    for name in ('quality.png', 'rows.jsonl', 'stretches.jsonl'):
        assert (tmp_path / 'new' / name).stat().st_size > 1000
    found = tables.measured(
        read_comparison(folder / 'comparison.toml'), [tmp_path / 'new/rows.jsonl']
    )
    assert tables.sooner(found) in text


def test_what_is_missing_is_told_before_anything_runs(comparison, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, 'probe', lambda: Machine('cpu', 1))

    def with_changes(**changes):
        text = (folder / 'comparison.toml').read_text()
        for key, value in changes.items():
            (line,) = (line for line in text.splitlines() if line.startswith(f'{key} ='))
            text = text.replace(line, f'{key} = {value}')
        path = folder / f'other{len(list(folder.glob("other*")))}.toml'
        path.write_text(text)
        return read_comparison(path)

    for other, options, message in (
        (with_changes(features='"no.npz"'), {}, r'other\d.toml: features: no file .*no.npz'),
        (with_changes(step_ms='"no.jsonl"'), {}, 'step_ms: no file .*no.jsonl; make it'),
        (with_changes(step_ms='0'), {'devices': ('0', '0')}, 'step_ms: .* share a GPU'),
        (with_changes(step_ms='0'), {'devices': ('0', '1')}, 'step_ms: .* share a CPU'),
        (
            comparison,
            {'devices': ('0+1', '2')},
            '--devices: 0.1: expected one device, as .* no GPU',
        ),
        (
            with_changes(**{'"data.batch_size"': '8\n"timesteps.adaptive_bins" = 64'}),
            {},
            r'other\d.toml: .*adaptive_bins: 64 has no effect: .*=adaptive, found uniform; leave',
        ),
        (comparison, {'part': 'flow'}, "expected methods of its rounds, found 'flow'"),
    ):
        with pytest.raises(UserError, match=message):
            runner.run(other, options_of(tmp_path, **options), '')
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    'devices', [('0+1', '1'), ('0+1', '0+1'), ('0+0',), ('0+',), ('0+1', '2+0')]
)
def test_groups_of_gpus_that_overlap(comparison, tmp_path, monkeypatch, devices):
    monkeypatch.setattr(runner, 'probe', lambda: Machine('gpu', 4))
    with pytest.raises(UserError, match=r'--devices: .*: expected GPUs that are named once'):
        runner.run(comparison, options_of(tmp_path, devices=devices), '')


def test_a_group_of_gpus_needs_the_time_of_a_step(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, 'probe', lambda: Machine('gpu', 4))
    path = folder / 'untimed.toml'
    path.write_text((folder / 'comparison.toml').read_text().replace('step_ms = 20', 'step_ms = 0'))
    with pytest.raises(UserError, match=r'step_ms: .* a step on several GPUs .0.1. takes another'):
        runner.run(read_comparison(path), options_of(tmp_path, devices=('0+1', '2+3')), '')


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--devices=0+1'], '--devices: 0+1: several GPUs for a run need --file'),
        (['--devices=0,1,0'], '--devices: 0 is named twice; runs that share a GPU slow each other'),
        (
            ['--file={}', '--devices=0,'],
            "--devices: expected names of GPUs, such as 0,1, found '0,'",
        ),
        (['--limit=5'], '--limit: is for a comparison file; give --file, too'),
        (['--file={}', '--seeds=2'], '--seeds: the comparison file states this'),
        (['--file={}', '--config.seed=2'], '--config.seed: the comparison file states this'),
        (['--file={}', '--add=x'], '--add: gathers results, and runs nothing; give --plot_only'),
        (['--file={}', '--plot_only', '--add=nowhere'], '--add: no folder nowhere'),
        (['--file={}:uniform', '--plot_only'], '--file: the methods after the colon are those to'),
        (['--file={}.toml', '--plot_only'], 'comparison.toml.toml; did you mean "comparison.toml"'),
    ],
)
def test_flags_that_do_not_go_together(arguments, message, folder, tmp_path):
    named = [argument.format(folder / 'comparison.toml') for argument in arguments]
    error = call('jaxunet.compare', *named, '--noplot', f'--output={tmp_path}', code=2)
    assert message in error
    assert error.count('\n') == 1


@pytest.mark.parametrize(
    ('module', 'flag'), [('jaxunet.compare', '--file'), ('jaxunet.compare.queue', '--jobs')]
)
def test_the_time_limit_counts_from_before_the_imports(module, flag, folder, tmp_path):
    """They take two seconds longer here than the limit."""
    arguments = [f'{flag}={folder}/comparison.toml', '--limit=1', f'--output={tmp_path}/out']
    run = (
        'import jaxunet.compare, runpy, sys, time\n'
        "assert 'jax' not in sys.modules\n"
        'time.sleep(3)\n'
        f'sys.argv = {[module, *arguments]}\n'
        f"runpy.run_module('{module}', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, '-c', run]
    env = environment() | {'PYTHONPATH': python_path()}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    left = re.findall('left out, (.*) s are left', done.stdout)
    assert left
    assert all(int(seconds) <= -2 for seconds in left)


@pytest.fixture
def fake(monkeypatch):
    """Has processes run `support.fake_queue`, which does what the returned function is told."""
    monkeypatch.setattr(runner, 'QUEUE', 'support.fake_queue')
    monkeypatch.setenv('PYTHONPATH', f'{python_path()}:{ROOT / "tests"}')
    return lambda act: monkeypatch.setenv('FAKE_QUEUE', act)


def called(output, number):
    return json.loads((output / str(number) / 'called.json').read_text())


def test_each_device_has_a_process(comparison, tmp_path, fake, capsys):
    fake('end')
    options = options_of(tmp_path, part='', devices=('0', '2', '0'), limit=100.0)
    (tmp_path / 'claims').mkdir()
    (tmp_path / 'claims/old').touch()
    assert runner.run(comparison, options, 'the command') == []
    first, second, third = (called(tmp_path, number) for number in (1, 2, 3))
    assert [c['CUDA_VISIBLE_DEVICES'] for c in (first, second, third)] == ['0', '2', '0']
    assert [c['shared_by'] for c in (first, second, third)] == ['2', '1', '2']
    assert first['XLA_PYTHON_CLIENT_MEM_FRACTION'] == '0.45'
    assert second['XLA_PYTHON_CLIENT_MEM_FRACTION'] is None
    assert first['jobs'] == str(comparison.path)
    assert first['output'] == str(tmp_path / '1')
    for name, value in (
        ('work', str(tmp_path / 'work')),
        ('claims', str(tmp_path / 'claims')),
        ('features', str(comparison.features)),
        ('step_ms', '20'),
        ('known', ''),
        ('resume', 'true'),
    ):
        assert first[name] == second[name] == third[name] == value
    assert 0 < float(first['limit']) <= 100
    assert not (tmp_path / 'claims/old').exists(), 'claims of an earlier command count'
    assert sorted(capsys.readouterr().out.splitlines()) == [
        f'{number}: [0 s] {number} begins' for number in (1, 2, 3)
    ]


def test_a_group_of_gpus_has_one_process(comparison, tmp_path, fake, monkeypatch):
    fake('end')
    monkeypatch.setattr(runner, 'probe', lambda: Machine('gpu', 4))
    assert runner.run(comparison, options_of(tmp_path, devices=('0+1', '2+3')), '') == []
    first, second = (called(tmp_path, number) for number in (1, 2))
    assert [c['CUDA_VISIBLE_DEVICES'] for c in (first, second)] == ['0,1', '2,3']
    assert [(c['shared_by'], c['devices']) for c in (first, second)] == [('1', '2')] * 2


def test_processes_that_fail_are_told(comparison, tmp_path, fake):
    for act, reason in (
        ('fail', 'crash: exit code 2: error: no file features.npz'),
        ('partial', 'did not do all of its runs'),
    ):
        fake(act)
        (problem,) = runner.run(comparison, options_of(tmp_path, devices=('0',)), '')
        assert problem == f'process 1: {reason} (see {tmp_path}/1/log.txt)'


def test_a_run_that_crashes_its_process_fails_alone(comparison, tmp_path, fake, capsys):
    fake('crash')
    options = options_of(tmp_path, devices=('0',))
    late, killed = runner.run(comparison, options, '')
    log = f'(see {tmp_path}/1/log.txt)'
    assert late == f'digits_uniform_seed0: timeout: seed 0: not done after 5 s (--timeout) {log}'
    assert killed.startswith('digits_uniform_seed1: out of memory: killed by the system (SIGKILL)')
    told = capsys.readouterr().out.splitlines()
    assert [line for line in told if line.endswith('it goes on without this run')] == [
        f'1: {problem}; it goes on without this run' for problem in (late, killed)
    ]
    failed = runner.collect(comparison, tmp_path, ()).stretches
    assert [(row['seed'], row['outcome']) for row in failed] == [(0, 'failed'), (1, 'failed')]
    found = tables.missing(tables.Results(comparison, [], failed))
    assert '- failed: `uniform`, seed 0: timeout: seed 0: not done after 5 s' in found


def test_a_process_whose_devices_stall_starts_again(comparison, tmp_path, fake, capsys):
    fake('stall')
    options = options_of(tmp_path, devices=('0', '1'), limit=100.0)
    assert runner.run(comparison, options, '') == []
    told = capsys.readouterr().out.splitlines()
    for number in (1, 2):
        assert [line for line in told if line.startswith(f'{number}: ')] == [
            f'{number}: [0 s] {number} begins',
            f'{number}: the devices finished no step; it starts again, 1 of 3',
            f'{number}: [0 s] {number} begins',
        ]


def test_a_process_starts_again_only_so_often(comparison, tmp_path, fake, capsys):
    fake('hang')
    (problem,) = runner.run(comparison, options_of(tmp_path, devices=('0',)), '')
    assert problem.startswith('process 1: crash: exit code 6: error: the devices finished no step')
    assert capsys.readouterr().out.count('begins') == 1 + runner.RESTARTS


def begun(output):
    """Waits until both processes have begun."""
    end = time.monotonic() + 60
    while len(list(output.glob('*/called.json'))) < 2 and time.monotonic() < end:
        time.sleep(0.01)


def test_a_signal_reaches_all_processes(comparison, tmp_path, fake):
    """They save and end, and then this command ends."""
    fake('wait')

    def stop():
        begun(tmp_path)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        runner.run(comparison, options_of(tmp_path, devices=('0', '1')), '')
    assert [(tmp_path / f'{n}/saved').exists() for n in (1, 2)] == [True, True]


@pytest.mark.parametrize(
    ('owner', 'name', 'error'),
    [
        (subprocess.Popen, '__init__', BlockingIOError(11, 'Resource temporarily unavailable')),
        (threading.Thread, 'start', RuntimeError("can't start new thread")),
    ],
)
def test_one_that_cannot_be_started_stops_the_others(
    owner, name, error, comparison, tmp_path, fake, monkeypatch
):
    """They save, and end."""
    fake('wait')
    real, calls = getattr(owner, name), []

    def fail(self, *arguments, **options):
        if len(calls) == 2:
            begun(tmp_path)
            raise error
        calls.append(self)
        real(self, *arguments, **options)

    monkeypatch.setattr(runner.collected, 'read_rows', lambda paths: [])
    monkeypatch.setattr(runner, '_check_measured', lambda *_: None)
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(UserError) as stopped:
        runner.run(comparison, options_of(tmp_path, devices=('0', '1', '2')), '')
    assert str(stopped.value) == (
        f'a process of 3 cannot be started: {error}; the others were stopped. The same command '
        'goes on from here'
    )
    assert len(list(tmp_path.glob('*/saved'))) == 2


def test_a_stalled_one_that_cannot_be_started_again(
    comparison, tmp_path, fake, monkeypatch, capsys
):
    """It counts as stalled, and the other process is not stopped."""
    fake('hang')
    real = runner.subprocesses.follow

    def follow(command, env, log, say):
        if f'{tmp_path}/1' in command[-1] and (tmp_path / '1/called.json').exists():
            raise BlockingIOError(11, 'Resource temporarily unavailable')
        return real(command, env, log, say)

    monkeypatch.setattr(runner.subprocesses, 'follow', follow)
    problems = runner.run(comparison, options_of(tmp_path, devices=('0', '1')), '')
    assert [problem.split(':')[0] for problem in problems] == ['process 1', 'process 2']
    said = capsys.readouterr().out
    assert '1: it cannot start again: [Errno 11] Resource' in said
    assert said.count('begins') == 2 + runner.RESTARTS


def test_a_signal_while_a_run_compiles_is_not_success(folder, tmp_path):
    """The runs are not done, so a script that waits for them must not go on."""
    empty = {'JAX_COMPILATION_CACHE_DIR': str(tmp_path / 'cache')}
    arguments = [f'--file={folder}/comparison.toml:uniform', f'--output={tmp_path}/out']
    process = Fork(['jaxunet.compare', *arguments], environment() | empty)
    while 'compiling: ' not in process.stderr.read_text():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130, error
    assert 'The same command goes on from here' in error
    (row,) = collected.read_stretches([tmp_path / 'out/1' / collected.STRETCHES])
    assert (row['outcome'], row['reason']) == ('stopped', 'stopped by a signal')
    assert row['wall']['compiling'] > 0


@pytest.mark.parametrize(
    ('module', 'flag', 'number'),
    [
        ('jaxunet.compare', 'file', signal.SIGTERM),
        ('jaxunet.compare.queue', 'jobs', signal.SIGTERM),
        ('jaxunet.compare.queue', 'jobs', signal.SIGINT),
    ],
)
def test_a_signal_before_training_leaves_a_row(module, flag, number, folder, tmp_path):
    (tmp_path / 'config.py').write_text(
        SIGNALLED.format(number=number.value) + (ROOT / 'configs/digits.py').read_text()
    )
    text = (folder / 'comparison.toml').read_text()
    config = f'"{ROOT}/configs/digits.py"'
    assert config in text
    (tmp_path / 'comparison.toml').write_text(
        text.replace(config, '"config.py"').replace('"random.npz"', f'"{folder}/random.npz"')
    )
    arguments = [f'--{flag}={tmp_path}/comparison.toml:uniform', f'--output={tmp_path}/out']
    error = call(module, *arguments, code=130)
    assert 'stopped; the same command goes on from here' in error
    output = tmp_path / 'out' / ('1' if flag == 'file' else '')
    (row,) = collected.read_stretches([output / collected.STRETCHES])
    assert (row['outcome'], row['reason']) == ('stopped', 'stopped by a signal')
    assert row['wall']['compiling'] >= 0.01


@pytest.mark.long
def test_a_comparison_that_is_interrupted_goes_on(folder, done, tmp_path):
    """Two processes are stopped in the middle of their runs; the same command ends them."""
    text = (folder / 'comparison.toml').read_text().replace('[0.04, 0.2]', '[0.04, 0.2, 20.0]')
    (folder / 'longer.toml').write_text(text)
    arguments = [
        'jaxunet.compare',
        f'--file={folder}/longer.toml:uniform',
        '--devices=0,1',
        '--reserve=0',
        f'--output={tmp_path}',
    ]
    process = Fork(arguments)
    end = time.monotonic() + 300
    while len(list(tmp_path.glob('work/*/checkpoints/10'))) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate()
    assert process.returncode == 130, out + error
    assert 'stopped; the same command goes on' in error
    assert len(list(tmp_path.glob('work/*/checkpoints/*'))) == 2
    out = call(*arguments)
    assert 'resuming' in ''.join(path.read_text() for path in tmp_path.glob('*/log.txt'))
    comparison = read_comparison(folder / 'longer.toml')
    rows = runner.collect(comparison, tmp_path, ()).rows
    assert [row['step'] for row in rows] == [2, 10, 1000] * 2
    names = ('seed', 'seconds', 'step', 'average')
    expected = [{n: row[n] for n in names} for row in collected.read_rows([done / 'rows.jsonl'])]
    assert [{n: r[n] for n in names} for r in rows if r['step'] < 1000] == expected
    assert '| uniform | Fréchet distance |' in out
