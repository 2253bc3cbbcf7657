"""The rows of `jaxunet.compare.queue`, and the images that its runs train on."""

from __future__ import annotations

import math
import pathlib

import numpy as np
import pytest
from support.data_files import encoded, put
from support.queues import make_queue

from jaxunet.compare.comparison_file import read_jobs
from jaxunet.compare.measure import check_finite
from jaxunet.runtime.errors import UserError

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
    queue = make_queue(tmp_path / 'out', '')
    source = queue._source(config)
    for images in (source, source.held_out):
        assert images.in_memory == (crop == 'center')
        assert images.stored_size(0) == ((8, 8) if crop == 'center' else (32, 32))
