"""Averages of several widths against a metric."""

from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
import pytest
from PIL import Image
from support.commands import call
from support.tiny import tiny_config
from support.untrained_features import write_untrained

from jaxunet.checkpoint.load import load_model
from jaxunet.checkpoint.snapshots import SnapshotWriter
from jaxunet.checkpoint.state import fresh_state
from jaxunet.checkpoint.store import Checkpoints
from jaxunet.evaluate.average_sweep import measure_averages
from jaxunet.runtime.errors import UserError
from jaxunet.training.evaluation import Evaluator
from jaxunet.training.loop import train

FIELDS = {'samples': 10, 'batch_size': 10, 'steps': 2}


@pytest.fixture(scope='module')
def features(tmp_path_factory) -> pathlib.Path:
    return write_untrained(tmp_path_factory.mktemp('features'))


STEPS = 32
CONFIG = tiny_config(
    ema={'widths': (0.05, 0.10)},
    train={'steps': STEPS, 'checkpoint_every': STEPS, 'log_every': STEPS},
    evaluation=FIELDS,
    parallel={'devices': 1},
)


@pytest.fixture(scope='module')
def run(source, tmp_path_factory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp('run')
    train(CONFIG, workdir, source)
    return workdir


@pytest.fixture(scope='module')
def untrained(tmp_path_factory) -> pathlib.Path:
    """Folder of a run whose weights did not move."""
    workdir = tmp_path_factory.mktemp('untrained')
    state = fresh_state(CONFIG).replace(step=np.int32(STEPS))
    checkpoints = Checkpoints(workdir, keep=1)
    checkpoints.save(STEPS, state, CONFIG)
    checkpoints.close()
    averages = {name: state.ema[name] for name in CONFIG.ema.width_names}
    snapshots = SnapshotWriter(workdir, CONFIG, start=0)
    for step in range(1, STEPS + 1):
        assert snapshots.write(step, step, averages) == ''
    assert snapshots.wait() == ''
    snapshots.close()
    return workdir


@pytest.mark.long
def test_a_sweep_writes_rows_and_a_plot(run, features, source, tmp_path) -> None:
    rows_path, plot_path = tmp_path / 'rows.jsonl', tmp_path / 'widths.png'
    out = call(
        'jaxunet.evaluate', f'--checkpoint={run}', f'--features={features}',
        '--ema=0.05,0.15,none', '--metrics=fid,precision', '--num_samples=12', '--batch_size=8',
        '--seed=3', f'--output={rows_path}', f'--plot={plot_path}',
    )  # fmt: skip
    assert 'the average of width 0.15, from 32 snapshots' in out
    rows = [json.loads(line) for line in rows_path.read_text().splitlines()]
    assert [(r['ema'], r['width'], r['metric'].split('[')[0]) for r in rows] == [
        (ema, width, metric)
        for ema, width in (('0.05', 0.05), ('0.15', 0.15), ('none', None))
        for metric in ('frechet_distance', 'precision')
    ]
    assert {(r['step'], r['num_samples'], r['sampler'], r['seed']) for r in rows} == {
        (32, 12, 'ddpm fixed_small', 3)
    }
    assert len({r['value'] for r in rows[::2]}) == 3
    # The same samples, drawn and compared by hand.
    model = load_model(str(run), ema='0.15')
    config = model.config.replace(
        seed=3,
        evaluation={'samples': 12, 'metrics': ('fid', 'precision'), 'features': str(features)},
    )
    by_hand = Evaluator(config, source, jax.local_devices()[:1]).measure(model.params)
    assert rows[2]['value'] == pytest.approx(by_hand[0].value, rel=0.01)
    assert rows[2]['metric'] == by_hand[0].label
    with Image.open(plot_path) as picture:
        assert picture.width > 2 * picture.height  # two panels


def test_mistakes_are_told_before_samples_are_drawn(untrained) -> None:
    def measure(*averages: str, **evaluation: object) -> None:
        next(measure_averages(str(untrained), averages, evaluation=evaluation, changes={}))

    with pytest.raises(UserError, match=r'--ema: 0.1 is given twice'):
        measure('0.1', '0.2', '0.1')
    with pytest.raises(UserError, match=r'do not allow width 0.001'):
        measure('0.1', '0.001')
    with pytest.raises(UserError, match=r'evaluation.metrics: expected some of'):
        measure('0.1', metrics=('speed',))
