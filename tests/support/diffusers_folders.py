"""Folders of diffusers, written by `jaxunet.weights` and then changed."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np

from jaxunet.config import Config
from jaxunet.weights import write_folder
from jaxunet.weights.safetensors_file import SafetensorsFile, write_safetensors
from support.weight_cases import ADM, make, random_params

SMALL = ADM['one_level']
PROCESSES: dict[str, dict[str, Any]] = {
    'epsilon': {'steps': 500},
    'x0': {'objective': 'x0', 'schedule': 'cosine'},
    'v': {'objective': 'v', 'schedule': 'cosine', 'steps': 4000},
    'rescaled': {'steps': 4000, 'rescale_timesteps': True, 'learn_sigma': True},
    'flow': {'objective': 'flow'},
    'consistency': {'objective': 'consistency', 'consistency_of': 'edm', 'edm_sigma_data': 0.4},
}
CASES = {name: config for name, config in ADM.items() if name not in ('num_heads', 'fractional')}
CASES |= {f'process_{name}': SMALL.replace(diffusion=p) for name, p in PROCESSES.items()}
CASES |= {
    'guided': make(num_classes=5, label_dropout=0.1, channel_mult=(1,), attention_resolutions=()),
    'period': make(max_period=1000, channel_mult=(1,), attention_resolutions=()),
    'ddpm': make(
        time_embedding='ddpm',
        conv_resample=True,
        downsample_padding='same',
        norm_eps=1e-6,
        num_heads=1,
        num_head_channels=0,
        attention_resolutions=(16,),
    ),
}
UNET = 'unet/config.json'
SCHEDULER = 'scheduler/scheduler_config.json'
WEIGHTS = 'unet/diffusion_pytorch_model.safetensors'


def written(folder: pathlib.Path, config: Config = SMALL, **options: Any) -> pathlib.Path:
    write_folder(folder / 'model', random_params(config), config, **options)
    return folder / 'model'


def changed(folder: pathlib.Path, file: str, **values: Any) -> pathlib.Path:
    """Changes fields of a JSON file; None removes one."""
    path = folder / file
    fields = json.loads(path.read_text()) | values
    path.write_text(json.dumps(fields))
    return folder


def tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    path = folder / WEIGHTS
    with path.open('rb') as file:
        state = SafetensorsFile(str(path), file)
        return {name: state.read(name) for name in state.shapes}


def foreign(folder: pathlib.Path, config: Config = SMALL) -> pathlib.Path:
    """A folder without our metadata, as diffusers saves it."""
    path = written(folder, config)
    state = tensors(path)
    with (path / WEIGHTS).open('wb') as file:
        write_safetensors(file, state, {'format': 'pt'})
    return path


def metadata_of(folder: pathlib.Path) -> dict[str, str]:
    path = folder / WEIGHTS
    with path.open('rb') as file:
        return dict(SafetensorsFile(str(path), file).metadata)


def shards(folder: pathlib.Path) -> None:
    state = list(tensors(folder).items())
    (folder / WEIGHTS).unlink()
    where = {}
    for k, part in enumerate((state[::2], state[1::2])):
        name = f'diffusion_pytorch_model-0000{k + 1}-of-00002.safetensors'
        with (folder / 'unet' / name).open('wb') as file:
            write_safetensors(file, dict(part), {})
        where |= dict.fromkeys(dict(part), name)
    index = {'metadata': {'total_size': 1}, 'weight_map': where}
    (folder / f'{WEIGHTS}.index.json').write_text(json.dumps(index))
