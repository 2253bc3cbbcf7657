"""Runs on images with opacity, and on images of 16 bits."""

from __future__ import annotations

import numpy as np
import pytest
from support.data_files import random_pixels
from support.tiny import TINY

import jaxunet
from jaxunet.api import train
from jaxunet.runtime.errors import UserError

FIELDS = {k: v for k, v in TINY.items() if k not in ('train', 'data')} | {
    'parallel': {'devices': 1},
    'train': TINY['train'] | {'holdout_every': 0, 'checkpoint_every': 50},
    'precision': 'float32',
    'progress': False,
}


def fields(**data: object) -> dict:
    return FIELDS | {'data': TINY['data'] | data}


def emoji(junk: int) -> np.ndarray:
    """Discs with a soft edge; `junk` draws the colours that their opacity hides."""
    y, x = np.mgrid[:8, :8] - 3.5
    opacity = np.clip((3 - np.hypot(x, y)) * 200, 0, 255).astype(np.uint8)
    images = random_pixels(junk, (16, 8, 8, 4))
    images[:, opacity > 0, :3] = random_pixels(0, (16, 1, 3))
    images[..., 3] = opacity
    return images


@pytest.mark.long
def test_hidden_colours_do_not_change_a_run(tmp_path):
    keep = fields(background='keep')
    runs = [train(emoji(i), workdir=tmp_path / str(i), steps=2, **keep) for i in (1, 2)]
    np.testing.assert_array_equal(*(run.metrics['loss'] for run in runs))
    model = runs[0].model
    assert model.config.image_shape == (8, 8, 4)
    images = model.sample(4, steps=2, progress=False)
    assert (images.dtype, images.shape) == (np.uint8, (4, 8, 8, 4))
    # A picture with opacity to start from, whose hidden colours do not count either.
    varied = [
        model.sample(2, steps=4, strength=0.5, init_image=emoji(junk)[0], progress=False)
        for junk in (1, 2)
    ]
    np.testing.assert_array_equal(*varied)
    with pytest.raises(UserError, match=r'evaluation: compares images of 8 bits and 1 or 3'):
        jaxunet.evaluate(model, emoji(0), metrics='fid', num_samples=2)


def test_a_run_of_16_bits(tmp_path):
    scans = np.random.default_rng(0).integers(0, 4095, (16, 8, 8), np.uint16, endpoint=True)
    np.save(tmp_path / 'scans.npy', scans)
    wide = fields(bits=16, range=(0, 4095))
    run = train(scans, workdir=tmp_path / 'arrays', steps=2, **wide)
    streamed = fields(bits=16, range=(0, 4095), cache='stream')
    other = train(tmp_path / 'scans.npy', workdir=tmp_path / 'npy', steps=2, **streamed)
    np.testing.assert_array_equal(run.metrics['loss'], other.metrics['loss'])
    images = run.model.sample(4, steps=2, progress=False)
    assert (images.dtype, images.shape) == (np.uint16, (4, 8, 8, 1))
    assert 255 < images.max() <= 4095
    with pytest.raises(UserError, match=r'data.range: \(0.*4095.*\) -> \(0.*8191'):
        train(scans, workdir=tmp_path / 'arrays', steps=4, **fields(bits=16, range=(0, 8191)))
