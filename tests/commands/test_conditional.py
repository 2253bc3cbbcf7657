"""`jaxunet.sample` with a classifier: samples of an unconditional model follow a class."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from support.commands import call
from support.tiny import tiny_config
from support.weight_cases import torch_bytes

from jaxunet.checkpoint.state import fresh_state
from jaxunet.config import Config
from jaxunet.weights import noisy_classifier, write_weights

CLASSES = 3


def fresh(config: Config) -> Any:
    """Parameters in which no last layer is zero, so that every image differs."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda p: (p + 0.02 * rng.standard_normal(p.shape)).astype(np.float32),
        jax.tree.map(np.asarray, fresh_state(config).params),
    )


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A model without classes, and a classifier of its images."""
    folder = tmp_path_factory.mktemp('conditional')
    config = tiny_config(model={'num_classes': 0, 'label_dropout': 0.0})
    write_weights(folder / 'model.safetensors', fresh(config), config)
    wide = {'base_channels': 64, 'norm_groups': 32, 'num_head_channels': 64}
    rng = np.random.default_rng(1)
    state = {
        row.name: (0.2 * rng.standard_normal(row.shape)).astype(np.float32)
        for row in noisy_classifier.table(config.replace(model=wide), CLASSES)
    }
    (folder / 'classifier.pt').write_bytes(torch_bytes(state))
    return folder


def command(folder: pathlib.Path, output: pathlib.Path, *flags: str) -> list[str]:
    return [
        'jaxunet.sample',
        f'--checkpoint={folder / "model.safetensors"}',
        f'--output={output}',
        '--sampler=ddim',
        '--steps=3',
        '--num_samples=4',
        *flags,
    ]


def images(path: pathlib.Path) -> dict[str, np.ndarray]:
    with np.load(path) as arrays:
        return dict(arrays)


def test_a_classifier_guides_a_model_without_classes(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    classifier = f'--classifier={folder / "classifier.pt"}'
    plain, guided = tmp_path / 'plain.npz', tmp_path / 'guided.npz'
    call(*command(folder, plain))
    strong = ('--classifier_scale=30', '--class_labels=2,0')
    out = call(*command(folder, guided, classifier, *strong))
    assert f'guided by {folder / "classifier.pt"}: classifier of 3 classes, ' in out
    found = images(guided)
    assert found['labels'].tolist() == [2, 0, 2, 0]
    difference = found['images'].astype(int) - images(plain)['images']
    assert (np.abs(difference).mean(axis=(1, 2, 3)) > 1).all()


def test_mistakes_are_one_line(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    classifier = f'--classifier={folder / "classifier.pt"}'
    for flags, message in (
        (['--classifier_scale=2'], '--classifier_scale: needs --classifier, which is not given'),
        ([classifier, '--classifier_scale=-1'], 'classifier_scale: expected 0 (no guidance) or'),
        ([classifier, '--class_labels=3'], '--class_labels: expected whole numbers from 0 to 2'),
    ):
        error = call(*command(folder, tmp_path / 'x.npz', *flags), code=2)
        assert error.splitlines()[-1].startswith(f'error: {message}')
