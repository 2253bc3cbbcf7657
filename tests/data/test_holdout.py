"""Images held out of training: which ones, that they never reach a step, and mistakes."""

from __future__ import annotations

import numpy as np
import pytest
from support.tiny import tiny_config

from jaxunet.checkpoint.resumable import check_resumable
from jaxunet.data import pipeline
from jaxunet.data.holdout import held_out_rows, hold_out
from jaxunet.data.source import ArraySource
from jaxunet.data.sources import open_images
from jaxunet.runtime.errors import UserError


def numbered(count: int) -> ArraySource:
    """Image i has the value i."""
    images = np.arange(count, dtype=np.uint8)[:, None, None, None] * np.ones((1, 2, 2, 1), np.uint8)
    labels = np.arange(count, dtype=np.int32) % 3
    return ArraySource('numbered', images, (2, 2, 1), labels, ('a', 'b', 'c'))


def values(source) -> list[int]:
    return source.load(np.arange(len(source)))[:, 0, 0, 0].tolist()


@pytest.mark.parametrize(
    ('holdout', 'count'), [(1, 1), (7, 7), (99, 99), (0.1, 10), (0.001, 1), (0.255, 26)]
)
def test_a_number_or_a_share(holdout, count):
    source = numbered(100)
    training = hold_out(source, holdout)
    held_out = training.held_out
    assert len(held_out) == count
    assert sorted(values(training) + values(held_out)) == list(range(100))
    for part in (training, held_out):
        assert values(part) == sorted(values(part))
        np.testing.assert_array_equal(part.labels, np.array(values(part)) % 3)
        assert part.class_names == source.class_names
        assert part.stored_size(0) == (2, 2)


def test_nothing_held_out_is_the_source_itself():
    source = numbered(5)
    assert hold_out(source, 0) is source
    assert source.held_out is None


def test_the_choice_is_spread_nested_and_repeated():
    rows = held_out_rows(100, 1000)
    np.testing.assert_array_equal(rows, held_out_rows(0.1, 1000))
    assert set(held_out_rows(50, 1000)) < set(rows)
    assert 350 < rows.mean() < 650
    assert np.diff(rows).max() > 1  # no block of neighbours


@pytest.mark.parametrize('holdout', [10, 11, 0.999])
def test_no_image_left_to_train_on(holdout):
    with pytest.raises(UserError) as caught:
        hold_out(numbered(10), holdout)
    assert str(caught.value) == (
        f'data.holdout: {holdout:g} of 10 images leaves none to train on; hold out at most 9'
    )


def test_one_image_cannot_be_divided():
    """configs/images.py holds out a share; advice to hold out "at most 0" would break it again."""
    with pytest.raises(UserError, match=r'set data\.holdout=0 and train\.holdout_every=0'):
        hold_out(numbered(1), 0.05)


def test_held_out_images_reach_no_step():
    """Neither resident nor streamed, in all batches of three epochs; for any seed."""
    for seed in (0, 1):
        config = tiny_config(
            seed=seed, data={'holdout': 0.25, 'batch_size': 90}, train={'steps': 45}
        )
        source = open_images(config)
        whole = open_images(tiny_config())
        assert (len(source), len(source.held_out)) == (1348, 449)
        np.testing.assert_array_equal(
            source.held_out.load(np.arange(449)), whole.load(held_out_rows(0.25, 1797))
        )
        images, _ = pipeline.load_all(source, progress=False)
        resident = {image.tobytes() for image in images}
        with pipeline.stream(source, config, 0, slice(0, 90)) as batches:
            streamed = {image.tobytes() for batch in batches for image in batch['image']}
        assert streamed == resident  # three epochs visit every training image
        held_out = source.held_out.load(np.arange(449))
        assert not resident & {image.tobytes() for image in held_out}  # no two digits are alike


def test_a_resumed_run_keeps_its_held_out_images(tmp_path):
    saved = tiny_config(data={'holdout': 0.1})
    assert check_resumable(saved, saved, tmp_path) == []
    with pytest.raises(UserError, match=r'data\.holdout: 0\.1 -> 0\.2'):
        check_resumable(saved, saved.replace(data={'holdout': 0.2}), tmp_path)
