"""NVlabs/edm: DDPM++, NCSN++ and ADM's network from its snapshots.

`fixtures/edm_golden.npz` holds what its code computed on weights of a formula, and
`fixtures/edm_network.pkl.gz` a snapshot that PyTorch wrote.
"""

from __future__ import annotations

import functools
import gzip
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from edm_golden import LABELS, NETWORKS, SIGMAS, STEPS, augmentation, start, values_of
from support.edm_files import Call, Name, persistent, pickled, snapshot, storage, with_filters
from support.peer_values import FIXTURES, QUICK, close, pictures
from support.published import digest
from support.weight_cases import same

from configs.edm_cifar10 import get_config
from jaxunet.checkpoint.load import fit_initial
from jaxunet.config import Config, resolve, to_dict
from jaxunet.diffusion.objectives import per_sample_loss
from jaxunet.diffusion.process import make_diffusion, network_input, predict_x0_and_noise, q_sample
from jaxunet.model.cost import parameter_count
from jaxunet.model.unet import build_unet
from jaxunet.ops.references import XLA
from jaxunet.runtime.errors import UserError
from jaxunet.sampling.options import SamplerConfig
from jaxunet.sampling.sampler import State, make_sampler, run, sample_keys
from jaxunet.weights import edm, read_weights, write_weights
from jaxunet.weights.files import Weights
from jaxunet.weights.presets import PRESETS

GOLDEN = np.load(FIXTURES / 'edm_golden.npz')


def config_of(name: str) -> Config:
    """The config of one of NVlabs' networks, written down by hand."""
    options = NETWORKS[name]
    song = options['model_type'] == edm.SONG
    base = options['model_channels']
    model = (
        edm.FIXED
        | edm.FIXED_OF[options['model_type']]
        | {
            'image_channels': 3,
            'base_channels': base,
            'channel_mult': tuple(options['channel_mult']),
            'num_res_blocks': options['num_blocks'],
            'attention_resolutions': tuple(options['attn_resolutions']),
            'num_classes': options.get('label_dim', 0),
            'label_dropout': 0.0,
        }
    )
    if song:
        model |= {
            'conv_in_channels': base,
            'time_embedding': 'fourier' if options['embedding_type'] == 'fourier' else 'ddpm',
            'encoder_type': options['encoder_type'],
            'channel_mult_noise': options['channel_mult_noise'],
            'resample_filter': tuple(options['resample_filter']),
        }
    return resolve(
        to_dict(
            Config().replace(
                model=model,
                diffusion={'objective': 'edm', 'edm_time_scale': 1.0},
                data={
                    'path': '',
                    'image_size': (16,),
                    'augment': 'edm' if 'augment_dim' in options else 'none',
                },
                train={'sample_every': 0},
            )
        )
    )


@functools.cache
def state_of(name: str) -> dict[str, np.ndarray]:
    """The tensors of a network of the golden file, by NVlabs' names."""
    shapes = {entry.name: entry.shape for entry in edm.table(config_of(name))}
    if 'map_label.weight' in shapes:
        shapes['map_label.weight'] = shapes['map_label.weight'][::-1]
    return with_filters(values_of(shapes), config_of(name))


@pytest.fixture
def read(tmp_path: pathlib.Path) -> Any:
    """Writes a snapshot of a network; reads it."""

    def weights(name: str, **options: Any) -> Weights:
        path = tmp_path / f'{name}.pkl'
        path.write_bytes(snapshot(state_of(name), NETWORKS[name]['model_type']))
        return read_weights(path, **options)

    return weights


@pytest.mark.parametrize('name', NETWORKS)
def test_networks_and_losses_of_nvlabs(name: str, read: Any) -> None:
    weights = read(name)
    config = weights.config
    assert config == config_of(name)
    unet, diffusion = build_unet(config, XLA), make_diffusion(config.diffusion)
    time = jnp.asarray(250 * np.log(SIGMAS), jnp.float32)
    sigma = jnp.asarray(SIGMAS, jnp.float32)[:, None, None, None]
    x, noise = pictures(0.37), pictures(0.71)
    xt = q_sample(diffusion, x, time, noise)
    # NVlabs' networks denoise images x + σ ε, which are √(1 + σ²) times ours.
    scaled = x / jnp.sqrt(1 + sigma**2)
    inputs = [x, *(network_input(diffusion, each, time) for each in (xt, scaled))]
    labels = jnp.tile(jnp.array(LABELS), 3) if config.model.num_classes else None
    told = augmentation() if config.augmentation_inputs else None
    augment = None if told is None else jnp.concatenate([told, told, 0 * told])
    predict = jax.jit(unet.predict, compiler_options=QUICK)
    output = predict(
        weights.params, jnp.concatenate(inputs), jnp.tile(time, 3), labels, None, augment
    )
    direct, noisy, plain = jnp.split(output, 3)
    loss = per_sample_loss(diffusion, noisy, x, xt, time, noise)
    denoised = predict_x0_and_noise(diffusion, plain, scaled, time)[0]
    close(direct, GOLDEN[name].transpose(0, 2, 3, 1), 1e-5)
    close(denoised, GOLDEN[f'{name}_plain'].transpose(0, 2, 3, 1), 1e-5)
    close(loss, GOLDEN[f'{name}_loss'], 1e-5)


# --- the snapshot that PyTorch wrote


@pytest.fixture(scope='module')
def file(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A snapshot of a network of 8x8 images."""
    path = tmp_path_factory.mktemp('edm') / 'network-snapshot-200000.pkl'
    path.write_bytes(gzip.decompress((FIXTURES / 'edm_network.pkl.gz').read_bytes()))
    return path


def test_samples_of_nvlabs(file: pathlib.Path) -> None:
    """`edm_sampler` without churn, from the same noise."""
    weights = read_weights(file)
    assert weights.config.diffusion.edm_sigma_data == 0.5
    assert 'SongUNet' in weights.note
    sampler = make_sampler(
        SamplerConfig(name='heun', steps=STEPS, clip=False),
        make_diffusion(weights.config.diffusion),
    )
    unet = build_unet(weights.config, XLA)

    def draw(params: Any, noise: jax.Array) -> jax.Array:
        begin = State(sampler.initial * noise, jnp.zeros_like(noise))
        return run(lambda *x: unet.predict(params, *x), begin, sample_keys(0, [0, 1]), sampler).x

    noise = jnp.asarray(start().transpose(0, 2, 3, 1))
    found = jax.jit(draw, compiler_options=QUICK)(weights.params, noise)
    close(found, GOLDEN['samples'].transpose(0, 2, 3, 1), 1e-4)


def test_an_export_states_everything(file: pathlib.Path, tmp_path: pathlib.Path) -> None:
    weights = read_weights(file)
    write_weights(tmp_path / 'a.safetensors', weights.params, weights.config)
    again = read_weights(tmp_path / 'a.safetensors')
    assert again.config == weights.config
    same(again.params, weights.params)
    for name, message in (
        ('a.pkl', "expected one of .bin, .pt, .safetensors, found '.pkl'"),
        ('a.pt', r'(?s)no such model.*model\.skip_scale: expected 1.0, found 0.7.*found .edm.'),
        ('a.bin', r'(?s)no such model.*diffusion.objective: .*model\.skip_scale: expected 1.0'),
    ):
        with pytest.raises(UserError, match=message):
            write_weights(tmp_path / name, weights.params, weights.config)


def test_a_run_starts_from_a_snapshot(file: pathlib.Path) -> None:
    """With other classes, as --config.init_from of a recipe."""
    weights = read_weights(file)
    here = weights.config.replace(
        model={'num_classes': 3}, data={'augment': 'none'}, init_from=str(file)
    )
    initial = fit_initial(here)
    assert initial.params['label_embed'].keys() == {'embedding', 'bias'}
    np.testing.assert_array_equal(
        initial.params['middle_res_1']['conv_2']['kernel'],
        weights.params['middle_res_1']['conv_2']['kernel'],
    )
    assert any(line.startswith('fresh: the label table') for line in initial.report)
    with pytest.raises(UserError, match=r'model.skip_scale=0\.7071.* \(now 1.0\)'):
        fit_initial(here.replace(model={'skip_scale': 1.0}))


def test_the_recipe_is_the_published_run() -> None:
    """NVlabs' train.py with --arch=ddpmpp and its defaults, in images of 512 a step."""
    config = resolve(get_config())
    assert config.model == PRESETS['edm_cifar10_vp'].config().model
    assert parameter_count(config) == 55_733_891
    o, d = config.optimizer, config.diffusion
    assert (o.name, o.learning_rate, o.betas, o.eps) == ('adam', 10e-4, (0.9, 0.999), 1e-8)
    assert (o.schedule, o.clip_norm, o.weight_decay) == ('constant', 0, 0)
    assert abs(512 * o.warmup_steps - 10e6) < 512
    assert abs(512 * config.train.steps - 200e6) < 20 * 512
    assert config.ema.rates[0] ** (500_000 / 512) == pytest.approx(0.5)
    assert (config.model.dropout, config.data.augment_probability) == (0.13, 0.12)
    assert (d.edm_mean, d.edm_std, d.edm_sigma_data) == (-1.2, 1.2, 0.5)


@pytest.mark.parametrize(
    'name',
    [
        name if name == 'edm_cifar10_cond_ve' else pytest.param(name, marks=pytest.mark.long)
        for name in PRESETS
        if name.startswith('edm_')
    ],
)
def test_a_preset_has_the_tensors_of_its_network(name: str) -> None:
    entries = edm.table(PRESETS[name].config())
    assert digest({entry.name: entry.shape for entry in entries}) == GOLDEN[f'published_{name}']


# --- what is refused


def test_a_file_that_would_run_code(tmp_path: pathlib.Path) -> None:
    path = tmp_path / 'a.pkl'
    for name in (Name('os', 'system'), Name('builtins', 'eval'), Name('torch.nn', 'Module')):
        call = Call(name, ('touch executed',))
        for content in ({'ema': call}, {'ema': persistent('EDMPrecond', x=call)}):
            path.write_bytes(pickled(content))
            message = f'a.pkl, byte [0-9]+: the global "{name.module}.{name.name}" is not allowed'
            with pytest.raises(UserError, match=message) as error:
                read_weights(path)
            assert len(str(error.value).splitlines()) == 1
    assert list(tmp_path.iterdir()) == [path]


def whole(name: str = '', value: np.ndarray | None = None, **options: Any) -> bytes:
    """The snapshot of a network, with one tensor changed."""
    state = state_of('ddpmpp_cond')
    return snapshot(state if value is None else state | {name: value}, **options)


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def missing() -> bytes:
    return snapshot({k: v for k, v in state_of('ddpmpp_cond').items() if k != FIRST})


def short() -> bytes:
    data = storage(ones(8))[:-4]
    return pickled({'ema': Call(Name('torch.storage', '_load_from_bytes'), (data,))})


FIRST = 'enc.16x16_conv.weight'
DOWN = 'enc.8x8_down'
MISTAKES: dict[str, tuple[Callable[[], bytes], str]] = {
    'extra': (lambda: whole('extra.weight', ones(3)), r'extra.weight: unexpected, shape \(3,\)'),
    'shape': (
        lambda: whole(FIRST, ones(32, 3, 2, 3)),
        rf'{FIRST}: expected shape \(32, 3, 3, 3\), found \(32, 3, 2, 3\)',
    ),
    'missing': (missing, 'enc.SIDExSIDE_conv.weight is missing: this is not a UNet'),
    'augmentation': (
        lambda: whole('map_augment.weight', ones(32, 6)),
        'map_augment.weight: expected 9 augmentation labels, found 6',
    ),
    'skip encoder': (
        lambda: whole('enc.8x8_aux_skip.weight', ones(64, 3, 1, 1)),
        'enc.8x8_aux_skip.weight: encoder_type=skip is not supported',
    ),
    'nan': (
        lambda: whole('enc.16x16_block0.norm0.bias', ones(32) * np.nan),
        'enc.16x16_block0.norm0.bias, flat index 0, is nan, expected finite numbers',
    ),
    'filter': (
        lambda: whole(f'{DOWN}.conv0.resample_filter', 0.3 * ones(1, 1, 2, 2)),
        r'conv0.resample_filter: expected the filter \[1, 1\] or \[1, 3, 3, 1\], found another',
    ),
    'learned variance': (
        lambda: whole('dec.16x16_aux_conv.weight', ones(6, 32, 3, 3)),
        'aux_conv.weight: expected 3 output channels, found 6',
    ),
    'wide embedding': (
        lambda: whole('map_layer0.weight', ones(64, 32)),
        'map_layer0.weight: .*channel_mult_emb other than 4 is not supported',
    ),
    'baseline': (
        lambda: whole(outer='VEPrecond'),
        "expected a network of the class EDMPrecond, found 'VEPrecond', whose preconditioning",
    ),
    'classifier': (
        lambda: whole(kind='Classifier'),
        "expected a SongUNet or DhariwalUNet, found 'Classifier'",
    ),
    'sigma_data': (
        lambda: whole(sigma_data=-1.0),
        r'sigma_data: expected a number above 0, found -1\.0',
    ),
    'StyleGAN': (
        lambda: pickled({'G_ema': 1}),
        'ema is missing; expected the network snapshot of NVlabs/edm',
    ),
    'short storage': (short, 'expected 8 numbers of f4 in a storage, found 28 bytes for 8'),
    'truncated': (lambda: whole()[:5000], 'byte [0-9]+: the pickle is damaged or truncated'),
    'zip': (lambda: b'PK\x03\x04', 'byte 0: the pickle is damaged or truncated'),
}


@pytest.mark.parametrize(('data', 'message'), MISTAKES.values(), ids=list(MISTAKES))
def test_mistakes(data: Callable[[], bytes], message: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / 'a.pkl'
    path.write_bytes(data())
    with pytest.raises(UserError, match=message) as error:
        read_weights(path)
    assert str(path) in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_module_inside_itself_is_refused(tmp_path: pathlib.Path) -> None:
    inner = persistent('Layer', _parameters={}, _buffers={})
    for _ in range(40):  # 2^40 modules, if all are visited
        inner = persistent('Layer', _parameters={}, _buffers={}, _modules={'a': inner})
    net = persistent('EDMPrecond', sigma_data=0.5, _modules={'model': inner})
    (tmp_path / 'a.pkl').write_bytes(pickled({'ema': net}))
    with pytest.raises(UserError, match='expected a SongUNet'):
        read_weights(tmp_path / 'a.pkl')


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'image_size': (16,)}, 'image_size: the config of this file is known; leave this out'),
        ({'new_attention_order': True}, 'new_attention_order: NVlabs/edm has one order'),
        ({'ema': '0.999'}, '--ema: .* holds one set of weights; leave the flag out'),
        (
            {'config': PRESETS['edm_cifar10_vp'].config()},
            r'(?s)not the network of the config:.*model.channel_mult: expected',
        ),
    ],
)
def test_what_does_not_go_with_a_snapshot(
    file: pathlib.Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read_weights(file, **options)
