"""Streams of sets that are read in large pieces: parquet's row groups beyond the memory."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from support.data_files import encoded, random_pixels
from support.tiny import tiny_config

from jaxunet.data import parquet
from jaxunet.data.holdout import hold_out
from jaxunet.data.order import Pieces, piecewise_indices
from jaxunet.data.pipeline import stream
from jaxunet.data.sources import open_source

COUNTS = np.array([7, 1, 30, 12, 12, 9, 40])
ENDS = np.cumsum(COUNTS)


def order(batch, steps, window=2, seed=3, counts=COUNTS):
    pieces = Pieces(counts, window)
    return np.concatenate([piecewise_indices(s, batch, pieces, seed) for s in range(steps)])


@pytest.mark.parametrize('window', [1, 2, 7, 50])
def test_every_epoch_shows_each_image_once_from_few_pieces_at_a_time(window):
    n = int(COUNTS.sum())
    found = order(n, 3, window).reshape(3, n)
    np.testing.assert_array_equal(np.sort(found), np.tile(np.arange(n), (3, 1)))
    assert not (found[0] == found[1]).all()
    for piece in np.searchsorted(ENDS, found, 'right'):
        left = COUNTS.copy()
        for each in piece:
            left[each] -= 1
            assert ((left > 0) & (left < COUNTS)).sum() <= window  # pieces in use
    assert (order(n, 1, window, seed=4) != found[0]).any()


@pytest.mark.parametrize('batch', [1, 13, 111, 500])
def test_the_order_does_not_depend_on_the_batch(batch):
    np.testing.assert_array_equal(order(batch, 2000 // batch)[:1500], order(100, 20)[:1500])


@pytest.mark.parametrize('held', [0, 40])
def test_a_stream_reads_each_row_group_about_once_an_epoch_and_resumes_exactly(
    tmp_path, held, monkeypatch
):
    pa, pq = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
    images = [encoded(random_pixels(i, (8, 8, 3))) for i in range(400)]
    path = tmp_path / 'x.parquet'
    pq.write_table(pa.table({'image': images}), path, row_group_size=20)
    monkeypatch.setattr(parquet, 'KEPT', 8 * 20 * len(images[0]))
    source = hold_out(open_source(str(path), image_shape=(8, 8, 3)), held)
    assert source.pieces.window in (3, 4)
    reads = collections.Counter()
    cache = parquet._Cache
    real = cache._read

    def counted(*args):
        reads[args[-2]] += 1
        return real(*args)

    monkeypatch.setattr(cache, '_read', staticmethod(counted))
    config = tiny_config(
        data={'batch_size': 10, 'image_size': (8,)},
        train={'steps': (400 - held) // 10},
        parallel={'devices': 1},
    )
    with stream(source, config, 0, slice(0, 10)) as first:
        batches = list(first)
    assert len({image.tobytes() for batch in batches for image in batch['image']}) == 400 - held
    assert sum(reads.values()) < 1.5 * 20
    again = hold_out(open_source(str(path), image_shape=(8, 8, 3)), held)
    with stream(again, config, 30, slice(0, 10)) as later:
        for batch, expected in zip(later, batches[30:], strict=True):
            np.testing.assert_array_equal(batch['image'], expected['image'])
