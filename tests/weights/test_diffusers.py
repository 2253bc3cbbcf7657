"""Folders of diffusers, without diffusers: written, read back, and refused.

`test_diffusers_library.py` compares them with the library.
"""

from __future__ import annotations

import csv
import json
import pathlib
import shutil
from collections.abc import Callable

import jax
import numpy as np
import pytest
from support.commands import call
from support.diffusers_folders import (
    CASES,
    SCHEDULER,
    SMALL,
    UNET,
    WEIGHTS,
    changed,
    foreign,
    shards,
    tensors,
    written,
)
from support.weight_cases import make, random_params, same, torch_bytes

from jaxunet.checkpoint.load import load_initial, load_model
from jaxunet.runtime.errors import UserError
from jaxunet.training.evaluation import COLUMNS, metrics_at
from jaxunet.weights import read_weights, write_folder
from jaxunet.weights.fields import network_fields
from jaxunet.weights.model_card import model_card


@pytest.mark.parametrize('name', CASES)
def test_a_folder_returns_weights_and_config(tmp_path: pathlib.Path, name: str) -> None:
    config = CASES[name]
    found = read_weights(written(tmp_path, config))
    same(found.params, random_params(config))
    assert found.config == config
    assert found.moments is None
    assert found.new_attention_order is None


def test_the_files(tmp_path: pathlib.Path) -> None:
    config = CASES['ddpm'].replace(diffusion={'objective': 'v', 'schedule': 'cosine'})
    folder = written(tmp_path, config, license_name='mit', step=7, metrics=['FID 3.1'])
    files = sorted(str(p.relative_to(folder)) for p in folder.rglob('*') if p.is_file())
    assert files == ['README.md', 'model_index.json', SCHEDULER, UNET, WEIGHTS]
    index = json.loads((folder / 'model_index.json').read_text())
    assert index['_class_name'] == 'DDPMPipeline'
    assert index['unet'] == ['diffusers', 'UNet2DModel']
    assert index['scheduler'] == ['diffusers', 'DDPMScheduler']
    unet = json.loads((folder / UNET).read_text())
    expected = {
        'sample_size': 16,
        'block_out_channels': [32, 64],
        'down_block_types': ['AttnDownBlock2D', 'DownBlock2D'],
        'up_block_types': ['UpBlock2D', 'AttnUpBlock2D'],
        'downsample_padding': 0,
        'flip_sin_to_cos': False,
        'freq_shift': 1,
        'attention_head_dim': None,
        'norm_eps': 1e-6,
    }
    assert {name: unet[name] for name in expected} == expected
    scheduler = json.loads((folder / SCHEDULER).read_text())
    assert scheduler['prediction_type'] == 'v_prediction'
    assert scheduler['beta_schedule'] == 'squaredcos_cap_v2'
    card = (folder / 'README.md').read_text()
    assert card.startswith('---\nlicense: "mit"\n')
    for text in ('7 steps', 'FID 3.1', 'use_clipped_model_output=True', 'jaxunet.load'):
        assert text in card
    names = tensors(folder)
    assert names['down_blocks.0.attentions.0.to_k.weight'].shape == (32, 32)
    kernel = random_params(config)['middle_attention']['qkv']['kernel']
    np.testing.assert_array_equal(
        names['mid_block.attentions.0.to_v.weight'], kernel[:, 2 * 64 :].T
    )


def test_a_folder_holds_no_password(tmp_path: pathlib.Path) -> None:
    """It is meant to be published; what the pixels are follows from the fields of the data."""
    url = 'https://me:secret@host/photos.zip?token=secret'
    config = SMALL.replace(init_from=url, data={'path': url, 'bits': 16, 'range': (0.0, 4095.0)})
    folder = written(tmp_path, config)
    for file in (path for path in folder.rglob('*') if path.is_file()):
        assert b'secret' not in file.read_bytes(), file
    assert read_weights(folder).config.data.path == 'https://host/photos.zip'
    card = (folder / 'README.md').read_text()
    assert (
        '- Data: photos.zip, 3 channels of 16 bits, whose outputs -1 to 1 stand for 0 to 4095, '
        in card
    )
    keeps = {'image_channels': 4}, {'background': 'keep'}
    card = model_card(SMALL.replace(model=keeps[0], data=keeps[1]))
    assert 'RGBA whose colours are multiplied by their opacity' in card


@pytest.mark.parametrize('name', ['pool', 'classes_and_sigma', 'resblock_updown', 'guided'])
def test_a_foreign_folder(tmp_path: pathlib.Path, name: str) -> None:
    """Without metadata, the JSON files state the network and the process."""
    config = CASES[name].replace(diffusion={'schedule': 'cosine'})
    found = read_weights(foreign(tmp_path, config))
    # These layers are then trained ones.
    same(found.params['conv_in'], random_params(config)['conv_in'])
    if name == 'pool':
        kernel = found.params['down_0_resample']['kernel']
        np.testing.assert_array_equal(kernel[1:, 1:, 3, 3], np.full((2, 2), 0.25))
        config = config.replace(model={'conv_resample': True})
    if name == 'guided':
        assert not found.params['label_embed']['embedding'][5].any()
        config = config.replace(model={'num_classes': 6})
    assert network_fields(found.config) == network_fields(config)
    assert found.config.diffusion.schedule == 'cosine'
    assert found.config.image_shape == config.image_shape


def flat(folder: pathlib.Path) -> None:
    """The layout of google/ddpm-*: everything in the folder itself, with old names."""
    names = {'to_q': 'query', 'to_k': 'key', 'to_v': 'value', 'to_out.0': 'proj_attn'}
    state = {}
    for name, value in tensors(folder).items():
        for new, old in names.items():
            name = name.replace(f'.{new}.', f'.{old}.')  # noqa: PLW2901
        state[name] = value
    (folder / 'diffusion_pytorch_model.bin').write_bytes(torch_bytes(state))
    (folder / UNET).rename(folder / 'config.json')
    (folder / SCHEDULER).rename(folder / 'scheduler_config.json')
    for name in ('unet', 'scheduler'):
        shutil.rmtree(folder / name)


def averages_alone(folder: pathlib.Path) -> None:
    (folder / 'unet').rename(folder / 'unet_ema')


def without_index(folder: pathlib.Path) -> None:
    (folder / 'model_index.json').unlink()


def dpm_solver(folder: pathlib.Path) -> None:
    """diffusers writes the option as -Infinity, which is not JSON."""
    name = 'DPMSolverMultistepScheduler'
    changed(folder, SCHEDULER, _class_name=name, lambda_min_clipped=-np.inf)


@pytest.mark.parametrize('change', [flat, shards, averages_alone, without_index, dpm_solver])
def test_layouts(tmp_path: pathlib.Path, change: Callable[[pathlib.Path], None]) -> None:
    folder = foreign(tmp_path)
    change(folder)
    same(read_weights(folder).params, random_params(SMALL))


def test_averages(tmp_path: pathlib.Path) -> None:
    folder = written(tmp_path)
    write_folder(tmp_path / 'other', random_params(SMALL, 3), SMALL)
    shutil.copytree(tmp_path / 'other' / 'unet', folder / 'unet_ema')
    changed(folder, 'unet_ema/config.json', decay=0.999)
    found = load_model(str(folder))
    same(found.params, random_params(SMALL, 3))
    assert 'its averages unet_ema/ of rate 0.999 (--ema=none takes unet/)' in found.note
    same(load_model(str(folder), ema='0.999').params, random_params(SMALL, 3))
    same(load_model(str(folder), ema='none').params, random_params(SMALL))
    with pytest.raises(UserError, match=r"expected 0\.999 or none, found '0\.5'"):
        load_model(str(folder), ema='0.5')
    with pytest.raises(UserError, match='holds one set of weights'):
        load_model(str(tmp_path / 'other'), ema='none')


def test_a_network_alone(tmp_path: pathlib.Path) -> None:
    """Without a scheduler, the process must be stated."""
    folder = foreign(tmp_path)
    alone = folder / 'unet'
    same(read_weights(alone).params, random_params(SMALL))  # the scheduler is beside it
    shutil.rmtree(folder / 'scheduler')
    with pytest.raises(UserError, match='--schedule, --diffusion_steps, --objective'):
        read_weights(alone)
    stated = {'schedule': 'cosine', 'diffusion_steps': 50, 'objective': 'x0'}
    found = read_weights(alone, **stated).config.diffusion
    assert (found.objective, found.schedule, found.steps) == ('x0', 'cosine', 50)
    v = SMALL.replace(diffusion={'objective': 'v'})
    assert read_weights(alone, v).config == v


def test_the_start_of_a_run(tmp_path: pathlib.Path) -> None:
    flow = SMALL.replace(diffusion={'objective': 'flow'})
    folder = foreign(tmp_path, flow)
    state = load_initial(SMALL.replace(init_from=str(folder), diffusion={'objective': 'flow'}))
    assert state is not None
    same(jax.device_get(state.params), random_params(SMALL))
    other = make(channel_mult=(1,), attention_resolutions=(16,), scale_shift_norm=True)
    with pytest.raises(UserError, match=r'To start from it, set .*scale_shift_norm=False'):
        load_initial(other.replace(init_from=str(folder)))


def test_the_command(tmp_path: pathlib.Path) -> None:
    """A folder becomes a file and a folder again; flags without effect are refused."""
    source, file, folder = written(tmp_path), tmp_path / 'a.safetensors', tmp_path / 'b'
    call('jaxunet.export', f'--checkpoint={source}', f'--output={file}')
    out = call('jaxunet.export', f'--checkpoint={file}', f'--output={folder}/', '--license=cc0-1.0')
    assert out.endswith(f'-> {folder}/ (diffusers)\n')
    for path in (UNET, SCHEDULER, WEIGHTS):
        assert (folder / path).read_bytes() == (source / path).read_bytes()
    assert 'license: "cc0-1.0"' in (folder / 'README.md').read_text()
    for flags, message in (
        ([f'--output={folder}/'], 'expected a new folder, found a folder with files'),
        ([f'--output={tmp_path}/c', '--format=diffusers', '--names=unet.cu'], '--names: no effect'),
        ([f'--output={tmp_path}/c.pt', '--license=mit'], '--license: only a folder of diffusers'),
        ([f'--output={tmp_path}/c'], 'a folder for diffusers ends with a slash'),
    ):
        assert message in call('jaxunet.export', f'--checkpoint={file}', *flags, code=2)
    drawn = [f'--output={tmp_path}/c.npz', '--num_samples=2', '--sampler=ddim', '--steps=1']
    assert '2 images' in call('jaxunet.sample', f'--checkpoint={folder}', *drawn)


def test_measured_values(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """The card has the metrics of the checkpoint's step."""
    (tmp_path / 'checkpoints').mkdir()
    row = {'metric': 'fid', 'value': '12.345', 'num_samples': '50', 'sampler': 'ddim'}
    row |= {'evaluations': '20', 'num_reference': '60', 'features': 'inception'}
    with (tmp_path / 'evaluation.csv').open('w', newline='') as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        for step, value in ((5, '12.345'), (10, '9.5')):
            table.writerow(row | {'step': step, 'training_seconds': 1, 'value': value})
    assert metrics_at(str(tmp_path), 10) == [
        'fid 9.5 of 50 samples (ddim, 20 evaluations) against 60 images, features inception'
    ]
    assert metrics_at(str(tmp_path), None) == []
