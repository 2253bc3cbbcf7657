"""The rows of `jaxunet.compare.queue`, and the images that its runs train on."""

from __future__ import annotations

import dataclasses
import math
import pathlib

import numpy as np
import pytest
from support.data_files import encoded, put
from support.untrained_features import write_untrained

from jaxunet.compare import measure
from jaxunet.compare.comparison_file import read_jobs
from jaxunet.compare.job_runner import Queue
from jaxunet.compare.measure import Measurements, check_finite
from jaxunet.compare.stopwatch import Limit
from jaxunet.runtime.errors import UserError
from jaxunet.sampling.generator import Generator
from jaxunet.training.held_out import HeldOutLoss

pytestmark = pytest.mark.usefixtures('shared_steps')

TINY = pathlib.Path(__file__).parents[2] / 'docs/results/methods/tiny.toml'


@pytest.mark.parametrize('value', [math.inf, math.nan])
def test_the_numbers_of_a_row_are_finite(value):
    check_finite({'values': {'train': {'fid': 1.0}}, 'references': {'train': None}, 'n': 3})
    with pytest.raises(UserError, match=rf'values\.train\.fid: .* found {value}'):
        check_finite({'values': {'train': {'kid': 0.1, 'fid': value}}})


@pytest.mark.parametrize('crop', ['center', 'random'])
def test_random_crops_are_cut_out_of_the_stored_images(crop, tmp_path):
    """Other images are decoded once, at the size of the model."""
    photo = np.random.default_rng(0).integers(0, 256, (32, 32), dtype=np.uint8)
    files = {f'{i}.png': encoded(photo) for i in range(3)}
    data = {'path': str(put(tmp_path, files, 'folder')), 'crop': crop, 'holdout': 1}
    job = read_jobs(str(TINY), '')[0]
    config = job.load_config().replace(data=data)
    queue = Queue(tmp_path / 'out', Measurements('', tmp_path), limit=Limit(60), command='')
    source = queue._source(config)
    for images in (source, source.held_out):
        assert images.in_memory == (crop == 'center')
        assert images.stored_size(0) == ((8, 8) if crop == 'center' else (32, 32))


@pytest.mark.parametrize('step_ms', [{}, {'uniform': 20.0}])
def test_references_are_measured_during_training_whose_clock_counts_steps(
    step_ms, tmp_path, monkeypatch
):
    open_side, opened, seen = measure.open_side, [], []

    def spy(path, *args, **kwargs):
        opened.append(path)
        return open_side(path, *args, **kwargs)

    def look(self, checkpoint, keep_on):
        self.wait()
        seen.append(list(opened))
        return iter(())

    monkeypatch.setattr(measure, 'open_side', spy)
    monkeypatch.setattr(Measurements, 'measure', look)
    monkeypatch.setattr(Generator, 'compile_for', lambda self, template: None)  # not needed here
    monkeypatch.setattr(HeldOutLoss, 'compile', lambda self: self)
    jobs = [dataclasses.replace(job, seconds=(0.02,)) for job in read_jobs(str(TINY), '')[:2]]
    features = Measurements(str(write_untrained(tmp_path)), tmp_path)
    queue = Queue(tmp_path / 'out', features, limit=Limit(600), command='', step_ms=step_ms)
    assert queue.run(jobs) == []
    assert {job.case for job in jobs} == {'uniform'}
    assert seen == [list(jobs[0].references) if step_ms else []] * 2, 'and only once'
