"""Folders of diffusers that are refused: options that one side lacks, and damage."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest
from support.diffusers_folders import (
    PROCESSES,
    SCHEDULER,
    SMALL,
    UNET,
    WEIGHTS,
    changed,
    foreign,
    metadata_of,
    shards,
    tensors,
    written,
)
from support.weight_cases import ADM, make, random_params

from jaxunet.checkpoint.load import load_model
from jaxunet.config import Config
from jaxunet.runtime.errors import UserError
from jaxunet.weights import read_weights, write_folder
from jaxunet.weights.diffusers import unet_config
from jaxunet.weights.own_metadata import METADATA, dump_metadata
from jaxunet.weights.safetensors_file import SafetensorsFile, write_safetensors

JUMPS = 'CMStochasticIterativeScheduler'


@pytest.mark.parametrize(
    ('config', 'message'),
    [
        (ADM['num_heads'], 'model.num_heads_upsample: expected heads of one width'),
        (make(num_heads=2, num_head_channels=0, attention_resolutions=(16,)), 'model.num_heads: '),
        (ADM['fractional'], 'model.channel_mult: expected a first level of model.base_channels=64'),
        (make(low_res_size=(8,)), r'model.low_res_size: expected \(\), found \(8,\)'),
        (SMALL.replace(diffusion={'objective': 'edm'}), 'diffusion.objective: .* found edm: EDM'),
        (
            SMALL.replace(diffusion={'objective': 'edm', 'edm_time_scale': 1.0}),
            'diffusion.objective: .* found edm, whose scheduler is not among',
        ),
        (
            SMALL.replace(diffusion={'objective': 'consistency', 'consistency_of': 'flow'}),
            'diffusion.consistency_of: expected edm, found flow, which CMStochastic',
        ),
        (
            SMALL.replace(diffusion=PROCESSES['consistency'] | {'edm_time_scale': 1.0}),
            'diffusion.edm_time_scale: expected 1000 .* found 1',
        ),
        (
            SMALL.replace(diffusion={'objective': 'flow'}, model={'max_period': 1000}),
            'model.max_period: expected 10000 with diffusion.objective=flow, found 1000',
        ),
    ],
)
def test_what_diffusers_lacks(tmp_path: pathlib.Path, config: Config, message: str) -> None:
    with pytest.raises(UserError, match=f'diffusers has no such model.*{message}'):
        write_folder(tmp_path / 'model', random_params(config), config)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('kind', ['FlowMatchEulerDiscreteScheduler', JUMPS])
def test_a_learned_variance_needs_a_scheduler_that_reads_it(tmp_path: pathlib.Path, kind: str):
    folder = foreign(tmp_path, SMALL.replace(diffusion={'learn_sigma': True}))
    scheduler = {'_class_name': kind, 'num_train_timesteps': 1000, 'sigma_min': 1e-6}
    with pytest.raises(UserError, match=f'{kind} has no learned variance, but the network has'):
        read_weights(changed(folder, SCHEDULER, **scheduler))


@pytest.mark.parametrize(
    ('file', 'values', 'message'),
    [
        (UNET, {'_class_name': 'UNet2DConditionModel'}, 'whose cross attention reads a text'),
        (UNET, {'_class_name': 'UNet1DModel'}, "expected UNet2DModel, found 'UNet1DModel'"),
        (UNET, {'flip_sin_to_cos': False}, r'flip_sin_to_cos, freq_shift: .*found \(False, 0\)'),
        (UNET, {'time_embedding_type': 'fourier'}, "expected positional, found 'fourier'"),
        (UNET, {'time_embedding_type': 'learned'}, "expected positional, found 'learned'"),
        (UNET, {'time_embedding_dim': 64}, 'time_embedding_dim: expected null or 128, found 64'),
        (UNET, {'act_fn': 'gelu'}, "act_fn: expected silu, found 'gelu'"),
        (UNET, {'center_input_sample': True}, 'center_input_sample: expected False, found True'),
        (UNET, {'mid_block_scale_factor': 1.4}, 'mid_block_scale_factor: expected 1, found 1.4'),
        (UNET, {'mid_block_type': None}, 'mid_block_type: expected UNetMidBlock2D, found null'),
        (UNET, {'add_attention': False}, 'add_attention: expected True, found False'),
        (UNET, {'attn_norm_num_groups': 8}, 'attn_norm_num_groups: expected 32 or null, found 8'),
        (UNET, {'class_embed_type': 'timestep'}, "class_embed_type: expected null, found 'timest"),
        (UNET, {'out_channels': 4}, 'out_channels: expected 3, found 4'),
        (UNET, {'down_block_types': ['SkipDownBlock2D']}, "down_block_types: .*'SkipDownBlock2D'"),
        (UNET, {'up_block_types': ['KUpBlock2D']}, "up_block_types: expected .*'KUpBlock2D'"),
        (UNET, {'up_block_types': ['UpBlock2D']}, r'up_block_types: .*levels of down.*found \(\)'),
        (UNET, {'down_block_types': []}, 'down_block_types: expected 1, as block_out_channels'),
        (UNET, {'block_out_channels': [0]}, 'block_out_channels: expected channels'),
        (UNET, {'block_out_channels': 'a'}, "block_out_channels: expected a list, found 'a'"),
        (UNET, {'attention_head_dim': [8]}, r'attention_head_dim: expected a whole number'),
        (UNET, {'attention_head_dim': 7}, 'attention_head_dim: 7 does not divide 32 channels'),
        (UNET, {'sample_size': [1, 2, 3]}, r'sample_size: expected a side or \[height, width\]'),
        (UNET, {'resnet_time_scale_shift': 'spatial'}, 'resnet_time_scale_shift: .* found .spatia'),
        (UNET, {'downsample_padding': 2}, 'downsample_padding: expected 1 or 0, found 2'),
        (UNET, {'layers_per_block': 2}, r'down_blocks\.0\.resnets\.1\.norm1\.weight: missing'),
        (SCHEDULER, {'_class_name': 'ScoreSdeVeScheduler'}, "_class_name: .*'ScoreSdeVeScheduler'"),
        (SCHEDULER, {'_class_name': 'EDMEulerScheduler'}, "_class_name: .*'EDMEulerScheduler'"),
        (SCHEDULER, {'beta_schedule': 'sigmoid'}, "beta_schedule: expected linear or squ.*'sig"),
        (SCHEDULER, {'beta_end': 0.03}, 'beta_end: expected 0.02 for 1000 timesteps .*found 0.03'),
        (SCHEDULER, {'trained_betas': [0.1] * 1000}, 'trained_betas: expected those of the linear'),
        (SCHEDULER, {'trained_betas': 'x'}, "trained_betas: expected those .*; found 'x'"),
        (
            SCHEDULER,
            {'_class_name': JUMPS},
            'sigma_min: expected at most 0.0001, found 0.002; here',
        ),
        (SCHEDULER, {'_class_name': JUMPS, 'sigma_max': 50.0}, 'sigma_max: expected 80'),
        (SCHEDULER, {'_class_name': JUMPS, 's_noise': 0.5}, 's_noise: expected 1, found 0.5'),
        (SCHEDULER, {'prediction_type': 'flow'}, "prediction_type: .*v_prediction, found 'flow'"),
        (SCHEDULER, {'variance_type': 'learned_range'}, 'variance_type: expected fixed_small or'),
        (SCHEDULER, {'rescale_betas_zero_snr': True}, 'rescale_betas_zero_snr: expected False'),
        (SCHEDULER, {'timestep_type': 'continuous'}, 'timestep_type: expected discrete, found'),
        (SCHEDULER, {'beta_end': float('nan')}, 'beta_end: expected 0.02 .* found nan'),
        (
            SCHEDULER,
            {'_class_name': JUMPS, 'sigma_min': 0, 'sigma_data': float('inf')},
            'sigma_data: expected .*found inf',
        ),
        (SCHEDULER, {'num_train_timesteps': '9'}, 'num_train_timesteps: expected a whole number'),
        (SCHEDULER, {'num_train_timesteps': 0}, 'num_train_timesteps: expected 1 or more, found 0'),
        (
            'model_index.json',
            {'vqvae': ['diffusers', 'VQModel']},
            'vqvae: a model of latents, .* is not supported',
        ),
        (
            'model_index.json',
            {'tokenizer': ['transformers', 'CLIPTokenizer']},
            'model_index.json: expected a pipeline of unet and scheduler, found tokenizer beside',
        ),
    ],
)
def test_what_our_network_lacks(
    tmp_path: pathlib.Path, file: str, values: dict[str, Any], message: str
) -> None:
    folder = changed(foreign(tmp_path), file, **values)
    with pytest.raises(UserError, match=message) as error:
        read_weights(folder)
    assert str(folder) in str(error.value)


def test_levels_that_resample_differently(tmp_path: pathlib.Path) -> None:
    folder = foreign(tmp_path, ADM['conv_resample'])
    changed(folder, UNET, down_block_types=['ResnetDownsampleBlock2D', 'AttnDownBlock2D'])
    with pytest.raises(UserError, match='resampling inside residual blocks at every level'):
        read_weights(folder)
    # The attention of the middle would have no norm.
    folder = foreign(tmp_path / 'b', ADM['resblock_updown'])
    changed(folder, UNET, attn_norm_num_groups=None)
    with pytest.raises(UserError, match='attn_norm_num_groups: expected 32, found null'):
        read_weights(folder)


def no_weights(folder: pathlib.Path) -> None:
    (folder / WEIGHTS).unlink()


def a_variant_alone(folder: pathlib.Path) -> None:
    (folder / WEIGHTS).rename(folder / 'unet' / 'diffusion_pytorch_model.fp16.safetensors')


def a_lost_shard(folder: pathlib.Path) -> None:
    shards(folder)
    (folder / 'unet' / 'diffusion_pytorch_model-00001-of-00002.safetensors').unlink()


def a_shard_elsewhere(folder: pathlib.Path) -> None:
    shards(folder)
    path = folder / f'{WEIGHTS}.index.json'
    path.write_text(json.dumps({'weight_map': {'a': '../secret.safetensors'}}))


def a_pickle_that_runs(folder: pathlib.Path) -> None:
    (folder / WEIGHTS).unlink()
    path = folder / 'unet' / 'diffusion_pytorch_model.bin'
    path.write_bytes(b'\x80\x02cos\nsystem\nX\x04\0\0\0echoR.')


def without_keys(folder: pathlib.Path) -> None:
    state = tensors(folder)
    del state['mid_block.attentions.0.to_k.bias']
    with (folder / WEIGHTS).open('wb') as file:
        write_safetensors(file, state, {})


def broken_json(folder: pathlib.Path) -> None:
    (folder / UNET).write_text('{')


def a_vae(folder: pathlib.Path) -> None:
    (folder / 'vae').mkdir()


def no_network(folder: pathlib.Path) -> None:
    shutil.rmtree(folder / 'unet')


@pytest.mark.parametrize(
    ('damage', 'message'),
    [
        (no_weights, 'expected diffusion_pytorch_model.safetensors or .*found no file'),
        (a_variant_alone, 'found diffusion_pytorch_model.fp16.safetensors'),
        (a_lost_shard, '00001-of-00002.safetensors: no such file'),
        (a_shard_elsewhere, "weight_map: expected names .*found '../secret.safetensors'"),
        (a_pickle_that_runs, 'a bare pickle.*which can run code when loaded'),
        (without_keys, r'attentions\.0\.to_k\.bias: expected shape \(32,\), found none'),
        (broken_json, 'config.json: expected a JSON object'),
        (a_vae, 'vae: a model of latents'),
        (no_network, 'expected unet/config.json or config.json of a UNet2DModel, found neither'),
    ],
)
def test_damage(
    tmp_path: pathlib.Path, damage: Callable[[pathlib.Path], None], message: str
) -> None:
    folder = written(tmp_path)
    damage(folder)
    with pytest.raises(UserError, match=message) as error:
        load_model(str(folder))
    assert '\n' not in str(error.value)


def test_metadata_and_files_that_disagree(tmp_path: pathlib.Path) -> None:
    folder = changed(written(tmp_path), UNET, norm_eps=1e-6)
    with pytest.raises(UserError, match='norm_eps: expected 1e-05, found 1e-06'):
        read_weights(folder)
    folder = changed(written(tmp_path / 'b'), SCHEDULER, prediction_type='sample')
    with pytest.raises(UserError, match=r"diffusion.objective: expected 'epsilon', found 'x0'"):
        read_weights(folder)
    folder = written(tmp_path / 'c', ADM['pool'])
    state = tensors(folder)
    name = 'down_blocks.0.downsamplers.0.conv.weight'
    state[name] = state[name] + 1
    metadata = metadata_of(folder)
    with (folder / WEIGHTS).open('wb') as file:
        write_safetensors(file, state, metadata)
    with pytest.raises(UserError, match=r'downsamplers.0.conv.weight: expected the constant'):
        read_weights(folder)


def test_another_sampler_is_no_contradiction(tmp_path: pathlib.Path) -> None:
    folder = written(tmp_path)
    changed(folder, SCHEDULER, _class_name='DDIMScheduler', clip_sample=False)
    assert read_weights(folder).config == SMALL


def test_options_that_do_not_apply(tmp_path: pathlib.Path) -> None:
    folder = written(tmp_path)
    with pytest.raises(UserError, match='schedule: the config of this file is known'):
        read_weights(folder, schedule='cosine')
    with pytest.raises(UserError, match=r'new_attention_order: diffusers has one order'):
        read_weights(folder, new_attention_order=True)
    with pytest.raises(UserError, match=r'not the network of the config: model.norm_eps'):
        read_weights(folder, SMALL.replace(model={'norm_eps': 1e-6}))
    with pytest.raises(UserError, match=f'expected the folder .*; give {folder / "unet"}'):
        read_weights(folder / WEIGHTS)
    with pytest.raises(UserError, match='expected a new folder, found a folder with files'):
        written(tmp_path)


def test_hostile_values(tmp_path: pathlib.Path) -> None:
    """A value of another type or size in any field loads or is refused in a message."""
    folder = foreign(tmp_path)
    refused = 0
    for file in (UNET, SCHEDULER):
        text = (folder / file).read_text()
        for name in json.loads(text):
            for value in (-1, 10**18, 'x', [None], {'a': []}):
                changed(folder, file, **{name: value})
                try:
                    read_weights(folder)
                except UserError as error:
                    refused += str(folder) in str(error)
            (folder / file).write_text(text)
    assert refused > 100


def test_metadata_of_a_huge_network(tmp_path: pathlib.Path) -> None:
    """The constants of a network are made only if the file has tensors of their shapes."""
    folder = written(tmp_path, ADM['pool'])
    huge = make(base_channels=2**15)
    (folder / UNET).write_text(json.dumps(unet_config(huge)))
    with (folder / WEIGHTS).open('rb') as file:
        state = SafetensorsFile(str(folder / WEIGHTS), file)
        values = {name: state.read(name) for name in state.shapes}
    metadata = {METADATA: dump_metadata(huge, new_order=False, class_names=())}
    with (folder / WEIGHTS).open('wb') as file:
        write_safetensors(file, values, metadata)
    with pytest.raises(UserError, match=r'downsamplers\.0\.conv\.weight: expected the constant'):
        read_weights(folder)


def test_an_empty_index(tmp_path: pathlib.Path) -> None:
    folder = written(tmp_path)
    (folder / WEIGHTS).unlink()
    (folder / f'{WEIGHTS}.index.json').write_text('{"weight_map": {}}')
    with pytest.raises(UserError, match='weight_map: expected names of'):
        read_weights(folder)
