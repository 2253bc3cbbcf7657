"""The loggers that `train.loggers` names: third parties, wandb and MLflow, and their failures."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest
from support.commands import python_path
from support.tiny import TINY, tiny_config

import jaxunet
from jaxunet.config import Config
from jaxunet.data.sources import open_source
from jaxunet.runtime.errors import UserError
from jaxunet.training.loggers import beside_steps
from jaxunet.training.loggers.installed import GROUP
from jaxunet.training.loggers.interface import RunStart
from jaxunet.training.loggers.logs import Logs
from jaxunet.training.logs import COLUMNS, read_metrics

TOY = """
from jaxunet.training.loggers.interface import Logger
CALLS = []
FAILS = ()
WAIT = None  # an event
class Toy(Logger):
    def _take(self, method, *arguments):
        CALLS.append((method, *arguments))
        if WAIT: WAIT.wait(20)
        if method in FAILS: raise ConnectionError('no\\nnetwork')
    def start(self, run): self._take('start', run.config, run.workdir, run.step)
    def metrics(self, step, values): self._take('metrics', step, values)
    def image(self, step, name, picture): self._take('image', step, name, picture.shape)
    def table(self, name, rows): self._take('table', name, rows)
    def close(self): self._take('close')
def broken(): raise RuntimeError('out of ideas')
def needy():
    from jaxunet.runtime.errors import UserError
    raise UserError('no key; make one')
"""
POINTS = {
    'toy': 'toy_logger:Toy',
    'broken': 'toy_logger:broken',
    'needy': 'toy_logger:needy',
    'number': 'builtins:int',
    'gone': 'toy_logger_that_is_gone:Toy',
    'csv': 'toy_logger:Toy',  # shipped names cannot be taken
}


@pytest.fixture
def toy(tmp_path_factory, monkeypatch):
    """Installs a package with loggers, as pip would; its module."""
    site = tmp_path_factory.mktemp('site')
    (site / 'toy_logger.py').write_text(TOY)
    info = site / 'toy-1.2.dist-info'
    info.mkdir()
    (info / 'METADATA').write_text('Metadata-Version: 2.1\nName: toy\nVersion: 1.2\n')
    points = '\n'.join(f'{name} = {value}' for name, value in POINTS.items())
    (info / 'entry_points.txt').write_text(f'[{GROUP}]\n{points}\n')
    monkeypatch.syspath_prepend(site)
    import toy_logger  # noqa: PLC0415

    yield toy_logger
    sys.modules.pop('toy_logger')


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('wand', r"expected some of csv, tensorboard, wandb, mlflow, .*found 'wand'; did you mean"),
        ('broken', r'broken: toy_logger:broken: RuntimeError: out of ideas; mend or update'),
        ('needy', r'needy: no key; make one$'),
        ('number', r"number: builtins:int: expected a subclass of .*Logger, found <class 'int'>"),
        ('gone', r'gone: toy_logger_that_is_gone:Toy: ModuleNotFoundError: No module named'),
        ('wandb', r'wandb: cannot be imported .*; pip install "jaxunet\[wandb\]", or leave it out'),
        ('mlflow', r'mlflow: cannot be imported .*pip install "jaxunet\[mlflow\]"'),
    ],
)
def test_a_logger_that_cannot_log_ends_the_run_before_it_begins(
    name, message, toy, tmp_path, monkeypatch
):
    for package in ('wandb', 'mlflow'):
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(UserError, match=rf'^train\.loggers: {message}') as caught:
        jaxunet.train(
            'digits:', workdir=tmp_path / 'run', loggers=('csv', name), **TINY, progress=False
        )
    assert '\n' not in str(caught.value)
    assert not (tmp_path / 'run').exists()
    with pytest.raises(UserError, match=r'train\.loggers: expected each once, found csv, csv'):
        tiny_config(train={'loggers': ('csv', 'csv')})


@pytest.fixture(scope='module')
def images():
    return open_source('digits:', image_shape=(8, 8, 1)).load(np.arange(64))


def train_on(images, workdir, *loggers, steps, **changes):
    """A run of few steps on one device."""
    fields = TINY | {'train': TINY['train'] | changes, 'parallel': {'devices': 1}}
    jaxunet.train(images, workdir=workdir, steps=steps, loggers=loggers, progress=False, **fields)


@pytest.mark.usefixtures('counted_steps')
def test_a_third_party_gets_everything_that_a_run_logs(toy, tmp_path, images):
    every = dict.fromkeys(('sample_every', 'checkpoint_every', 'holdout_every'), 2)
    for steps in (2, 4):
        train_on(images, tmp_path, 'csv', 'toy', steps=steps, **every)
    kinds = [call[0] for call in toy.CALLS]
    part = ['start', 'metrics', 'metrics', 'image', 'close']
    assert kinds == part * 2
    begun = [call[1:] for call in toy.CALLS if call[0] == 'start']
    assert [(workdir, step) for _, workdir, step in begun] == [(tmp_path, 0), (tmp_path, 2)]
    assert begun[1][0].train.loggers == ('csv', 'toy')
    assert isinstance(begun[0][0], Config)
    found = [call[1:] for call in toy.CALLS if call[0] == 'metrics']
    assert [step for step, _ in found] == [1, 2, 3, 4]
    rows = read_metrics(tmp_path / 'metrics.csv')
    assert [f'{values["train/loss"]:.9g}' for _, values in found] == [row['loss'] for row in rows]
    assert 'held_out/held_out_loss' in found[1][1]
    assert next(call for call in toy.CALLS if call[0] == 'image')[1:3] == (2, 'samples')
    assert not (tmp_path / 'tensorboard').exists()


@pytest.mark.usefixtures('counted_steps')
def test_a_run_without_loggers(tmp_path, images):
    train_on(images, tmp_path, steps=2, holdout_every=2)
    assert not {'metrics.csv', 'tensorboard'} & {path.name for path in tmp_path.iterdir()}
    assert jaxunet.api.Run(tmp_path, 2).metrics == {}


def logs(workdir, *loggers, start=0):
    config = tiny_config(train={'loggers': loggers})
    return Logs(RunStart(config, workdir, start, COLUMNS[1:]), ())


def test_no_logger_gets_a_password(tmp_path):
    config = Config().replace(data={'path': 'https://user:word@host/x.zip?key=1'})
    fields = RunStart(config, tmp_path, 0).fields
    assert (fields['data.path'], fields['seed']) == ('https://host/x.zip', 0)


def row(step):
    return dict.fromkeys(COLUMNS, 0.5) | {'step': step}


@pytest.mark.parametrize('method', ['start', 'metrics', 'close'])
def test_a_failing_logger_is_reported_once_and_ends_nothing(method, toy, tmp_path, caplog):
    toy.FAILS = (method,)
    written = logs(tmp_path, 'toy', 'csv')
    for step in (1, 2, 3):
        written.row(row(step))
    written.close([{'metric': 'fid', 'value': '3.5'}])
    assert [int(row['step']) for row in read_metrics(tmp_path / 'metrics.csv')] == [1, 2, 3]
    (warning,) = [record.getMessage() for record in caplog.records]
    rest = 'without it' if method == 'start' else 'and tries later values'
    assert warning == (
        rf'train.loggers: toy: {method} failed (ConnectionError: no\nnetwork); the run goes on '
        f'{rest}'
    )
    kinds = [call[0] for call in toy.CALLS]
    whole = ['start', 'metrics', 'metrics', 'metrics', 'table', 'close']
    assert kinds == (['start'] if method == 'start' else whole)
    if method != 'start':
        assert toy.CALLS[4][1:] == ('evaluation', [{'metric': 'fid', 'value': 3.5}])


def test_a_slow_logger_costs_the_steps_nothing(toy, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(beside_steps, 'WAITING', 2)
    monkeypatch.setattr(beside_steps, 'CLOSE_SECONDS', 0.05)
    toy.WAIT = threading.Event()
    written = logs(tmp_path, 'toy', 'csv')
    for step in range(1, 10):
        written.row(row(step))  # while `start` waits
    written.close()
    assert [int(row['step']) for row in read_metrics(tmp_path / 'metrics.csv')] == [*range(1, 10)]
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith('train.loggers: toy: takes too long; 2 values wait for it, and later')
    assert [call[0] for call in toy.CALLS] == ['start']
    toy.WAIT.set()


# With the packages themselves.


def fill(workdir, name, start):
    workdir.mkdir(exist_ok=True)
    written = logs(workdir, name, start=start)
    for step in range(start + 1, start + 4):
        written.row(row(step) | {'loss': 1 / step})
    written.image(start + 3, np.full((8, 12, 1), 99, np.uint8))
    written.image(start + 3, np.full((8, 12, 3), 99, np.uint8))
    written.metrics(start + 3, {'evaluation/fid': 7.5})
    written.close([{'step': '3', 'metric': 'fid', 'value': 7.5, 'std': ''}])


@pytest.mark.filterwarnings('ignore')  # of the packages that it uses
def test_mlflow_keeps_everything_in_one_run(tmp_path, monkeypatch, caplog):
    mlflow = pytest.importorskip('mlflow')
    mlflow.set_tracking_uri(f'sqlite:///{tmp_path}/mlflow.db')
    mlflow.set_experiment(
        experiment_id=mlflow.create_experiment('toys', f'file://{tmp_path}/artifacts')
    )
    for start in (0, 2):  # the second goes on from step 2
        fill(tmp_path / 'run', 'mlflow', start)
    assert not caplog.records
    (found,) = mlflow.MlflowClient().search_runs(['1'])
    assert (found.info.status, found.info.run_name) == ('FINISHED', 'run')
    assert (tmp_path / 'run' / 'mlflow_id.txt').read_text().strip() == found.info.run_id
    assert found.data.params['model.base_channels'] == '8'
    history = mlflow.MlflowClient().get_metric_history(found.info.run_id, 'train/loss')
    assert {(point.step, point.value) for point in history} == {(i, 1 / i) for i in range(1, 6)}
    assert found.data.metrics['evaluation/fid'] == 7.5
    (folder,) = (tmp_path / 'artifacts').iterdir()
    files = {path.name for path in (folder / 'artifacts').rglob('*') if path.is_file()}
    assert {'config.json', 'evaluation.csv'} < files
    assert sum(name.startswith('samples') and name.endswith('.png') for name in files) == 4
    stored = json.loads((folder / 'artifacts' / 'config.json').read_text())
    assert stored['train.loggers'] == ['mlflow']


def test_wandb_writes_a_run_offline(tmp_path, monkeypatch, caplog):
    wandb = pytest.importorskip('wandb')
    monkeypatch.setenv('WANDB_MODE', 'offline')
    for name in ('WANDB_CACHE_DIR', 'WANDB_CONFIG_DIR', 'WANDB_DATA_DIR'):
        monkeypatch.setenv(name, str(tmp_path / 'wandb_home'))
    for start in (0, 2):
        fill(tmp_path / 'run', 'wandb', start)
    assert not caplog.records
    name = (tmp_path / 'run' / 'wandb_id.txt').read_text().strip()
    folders = sorted((tmp_path / 'run' / 'wandb').glob('offline-run-*'))
    assert len(folders) == 2
    assert all(f'-{name}' in folder.name for folder in folders)
    first = records(folders[0] / f'run-{name}.wandb')
    config = {item.key: json.loads(item.value_json) for r in first for item in r.run.config.update}
    assert config['model.base_channels'] == 8
    history = [
        {
            '.'.join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in r.history.item
        }
        for r in first
        if r.WhichOneof('record_type') == 'history'
    ]
    losses = {int(h['step']): h['train/loss'] for h in history if 'train/loss' in h}
    assert losses == {i: pytest.approx(1 / i) for i in (1, 2, 3)}
    assert any(h.get('evaluation/fid') == 7.5 for h in history)
    assert [h['samples._type'] for h in history if 'samples._type' in h] == ['image-file'] * 2
    assert [h['evaluation._type'] for h in history if 'evaluation._type' in h] == ['table-file']
    assert wandb.run is None  # a run of the calling program stays its own


def records(path):
    """The records of a file that wandb writes offline, in the format of LevelDB's logs."""
    from wandb.proto import wandb_internal_pb2  # noqa: PLC0415

    data, place, part, found = path.read_bytes(), 7, b'', []
    while place + 7 <= len(data):
        length, kind = struct.unpack_from('<HB', data, place + 4)  # after a checksum
        part += data[place + 7 : place + 7 + length]
        if kind in (1, 4):  # the whole record, or its last part
            found.append(wandb_internal_pb2.Record.FromString(part))
            part = b''
        place += 7 + length
        if (left := -place % 32768) < 7:  # a header never crosses the end of a block
            place += left
    return found


def test_wandb_without_a_key_is_refused(tmp_path):
    pytest.importorskip('wandb')
    script = 'from jaxunet.training.loggers.installed import make_loggers; make_loggers(["wandb"])'
    variables = {name: v for name, v in os.environ.items() if not name.startswith('WANDB_')}
    found = subprocess.run(
        [sys.executable, '-c', script],
        env=variables | {'HOME': str(tmp_path), 'PYTHONPATH': python_path()},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    last = found.stderr.splitlines()[-1]
    assert 'UserError: train.loggers: wandb: no API key; run "wandb login", set WANDB_API' in last
