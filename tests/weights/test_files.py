"""Weight files: round trips, what is inferred, what cannot be expressed."""

from __future__ import annotations

import io
import itertools
import pathlib
import zipfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from support.turns import in_turn
from support.weight_cases import ADM, STATED, UNETCU_SMALL, make, moments_of, random_params

from jaxunet.model.unet import build_unet
from jaxunet.ops.references import XLA
from jaxunet.runtime.errors import UserError
from jaxunet.weights import check_tree, guided_diffusion, read_weights, unetcu, write_weights
from jaxunet.weights.fields import network_fields
from jaxunet.weights.inference import stated_config
from jaxunet.weights.names import flatten, parameter_shapes, unflatten
from jaxunet.weights.safetensors_file import write_safetensors
from jaxunet.weights.torch_file import TorchFile

FIXTURES = pathlib.Path(__file__).parents[1] / 'fixtures'
NVLABS_OPTIONS = [  # another value of each of `NVLABS_ONLY`
    ('skip_scale', 0.5),
    ('conv_in_channels', 64),
    ('resample_filter', (1, 3, 3, 1)),
    ('resample_proj', True),
    ('encoder_type', 'residual'),
    ('decoder_attention', 'last'),
    ('channel_mult_noise', 2),
    ('norm_group_channels', 4),
]


def assert_same(a: Any, b: Any) -> None:
    """Two trees, bit for bit."""
    left, right = flatten(a), flatten(b)
    assert left.keys() == right.keys()
    for path, value in left.items():
        assert value.dtype == right[path].dtype == np.float32
        assert value.shape == right[path].shape
        assert value.tobytes() == right[path].tobytes(), path


@pytest.mark.parametrize('with_moments', [False, True])
def test_bin_round_trip_is_bit_exact(tmp_path: pathlib.Path, with_moments: bool) -> None:
    params = random_params(UNETCU_SMALL)
    params['conv_in']['bias'][:3] = (
        -0.0,
        1e-45,
        3.4e38,
    )  # signed zero, the smallest and nearly the largest number
    moments = moments_of(UNETCU_SMALL) if with_moments else None
    write_weights(tmp_path / 'a.bin', params, UNETCU_SMALL, moments)
    weights = read_weights(tmp_path / 'a.bin')
    assert weights.config == UNETCU_SMALL
    assert_same(weights.params, params)
    assert (weights.moments is not None) == with_moments
    if moments and weights.moments:
        assert_same(weights.moments[0], moments[0])
        assert_same(weights.moments[1], moments[1])
    write_weights(tmp_path / 'new' / 'b.bin', weights.params, weights.config, weights.moments)
    assert (tmp_path / 'new' / 'b.bin').read_bytes() == (tmp_path / 'a.bin').read_bytes()
    words = np.fromfile(tmp_path / 'a.bin', '<i4', 256)
    assert words[:10].tolist() == [12345678, 2, 3, 32, 3, 16, 16, 1000, int(with_moments), 0]
    assert not words[10:].any()


def test_bin_layout(tmp_path: pathlib.Path) -> None:
    """Numbers are where unet.cu expects them: convolutions OIHW, linear layers (out, in), in the
    order of its list.
    """
    params = random_params(UNETCU_SMALL)
    write_weights(tmp_path / 'a.bin', params, UNETCU_SMALL)
    values = np.fromfile(tmp_path / 'a.bin', '<f4', offset=1024)
    linear = params['time_embed_0']['kernel']
    np.testing.assert_array_equal(values[: linear.size].reshape(128, 32), linear.T)
    start = 128 * 32 + 128 + 128 * 128 + 128
    conv = params['conv_in']['kernel']
    np.testing.assert_array_equal(
        values[start : start + conv.size].reshape(32, 3, 3, 3), conv.transpose(3, 2, 0, 1)
    )
    np.testing.assert_array_equal(values[-3:], params['conv_out']['bias'])


def test_bin_random_states_are_skipped_and_trailing_words_ignored(tmp_path: pathlib.Path) -> None:
    params, moments = random_params(UNETCU_SMALL), moments_of(UNETCU_SMALL)
    write_weights(tmp_path / 'a.bin', params, UNETCU_SMALL, moments)
    data = bytearray((tmp_path / 'a.bin').read_bytes())
    words = np.frombuffer(data, '<i4', 256)
    words[9] = 1
    words[10:] = -123456
    (tmp_path / 'a.bin').write_bytes(bytes(data) + b'\xff' * (2 * 3 * 16 * 16 * 48))
    weights = read_weights(tmp_path / 'a.bin')
    assert_same(weights.params, params)
    assert weights.moments is not None
    assert_same(weights.moments[1], moments[1])


def test_bin_with_learned_variance_and_non_square(tmp_path: pathlib.Path) -> None:
    config = unetcu.config_of(unetcu.Header(unetcu.MAGIC, 4, 1, 32, 2, 16, 24, 10000, 0, 0))
    assert config.diffusion.learn_sigma
    assert config.image_shape == (16, 24, 1)
    write_weights(tmp_path / 'a.bin', random_params(config), config)
    assert read_weights(tmp_path / 'a.bin').config == config


@pytest.mark.parametrize(
    ('section', 'field', 'value'),
    [
        ('model', 'channel_mult', (1, 2, 3, 3)),
        ('model', 'num_res_blocks', 1),
        ('model', 'attention_resolutions', (4,)),
        ('model', 'num_head_channels', 16),
        ('model', 'conv_resample', True),
        ('model', 'resblock_updown', True),
        ('model', 'scale_shift_norm', True),
        ('model', 'num_classes', 3),
        ('model', 'time_embedding', 'ddpm'),
        ('model', 'norm_groups', 16),
        ('model', 'norm_eps', 1e-6),
        ('diffusion', 'objective', 'v'),
        ('diffusion', 'objective', 'flow'),
        ('diffusion', 'schedule', 'cosine'),
        ('diffusion', 'steps', 500),
        *(('model', field, value) for field, value in NVLABS_OPTIONS),
    ],
)
def test_bin_refuses_what_unetcu_lacks(
    tmp_path: pathlib.Path, section: str, field: str, value: Any
) -> None:
    config = UNETCU_SMALL.replace(**{section: {field: value}})
    with pytest.raises(UserError, match=rf'(?s)unet.cu has no such model.*{section}\.{field}'):
        write_weights(tmp_path / 'a.bin', {}, config)
    assert list(tmp_path.iterdir()) == []


def test_bin_names_all_that_unetcu_lacks(tmp_path: pathlib.Path) -> None:
    """Words of the header that it cannot hold, too; the objective, which nothing mends, first."""
    changes = {'base_channels': 40, 'num_res_blocks': 3}
    config = UNETCU_SMALL.replace(model=changes, diffusion={'objective': 'v'})
    with pytest.raises(UserError) as error:
        write_weights(tmp_path / 'a.bin', {}, config)
    assert str(error.value).splitlines()[1:] == [
        "  diffusion.objective: expected 'epsilon', found 'v'",
        '  model.base_channels: expected a multiple of 32, found 40',
        '  model.num_res_blocks: expected 2, found 3',
    ]


def test_a_bin_and_its_config_name_attention_by_the_sides_in_pixels(tmp_path: pathlib.Path) -> None:
    """The messages give the values that the field takes, at the image size of the config."""
    larger = UNETCU_SMALL.replace(
        data={'image_size': (32, 40)}, model={'attention_resolutions': (16, 8)}
    )
    with pytest.raises(
        UserError, match=r'model\.attention_resolutions: expected \(8, 4\), found \(16, 8\)$'
    ):
        write_weights(tmp_path / 'a.bin', {}, larger)
    write_weights(tmp_path / 'a.bin', random_params(UNETCU_SMALL), UNETCU_SMALL)
    with pytest.raises(
        UserError, match=r'model\.attention_resolutions: expected \(16, 8\), found \(8, 4\)$'
    ):
        read_weights(tmp_path / 'a.bin', larger)


@pytest.mark.parametrize('extension', ['bin', 'pt', 'safetensors'])
def test_others_may_read_a_file_if_the_umask_lets_them(
    tmp_path: pathlib.Path, extension: str
) -> None:
    config = UNETCU_SMALL if extension == 'bin' else ADM['pool']
    (tmp_path / 'plain').touch()
    write_weights(tmp_path / f'a.{extension}', random_params(config), config)
    modes = {path.name: path.stat().st_mode for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(('plain', f'a.{extension}'), modes['plain'])


def test_bin_for_a_given_config(tmp_path: pathlib.Path) -> None:
    """The caller's training settings are kept; another network is refused by its fields."""
    write_weights(tmp_path / 'a.bin', random_params(UNETCU_SMALL), UNETCU_SMALL)
    mine = UNETCU_SMALL.replace(
        data={'image_size': (32,)},
        model={'attention_resolutions': (8, 4), 'dropout': 0.3},
        train={'steps': 5},
    )
    assert read_weights(tmp_path / 'a.bin', mine).config == mine
    with pytest.raises(UserError, match=r'model.max_period: expected 10000, found 1000'):
        read_weights(tmp_path / 'a.bin', mine.replace(model={'max_period': 10000}))


@pytest.mark.parametrize(
    ('name', 'extension', 'new_order'),
    in_turn({name: name for name in ADM}, *itertools.product(('pt', 'safetensors'), (False, True))),
)
def test_round_trip(tmp_path: pathlib.Path, name: str, extension: str, new_order: bool) -> None:
    config, params = ADM[name], random_params(ADM[name])
    path = tmp_path / 'new' / 'folder' / f'a.{extension}'
    write_weights(path, params, config, new_attention_order=new_order)
    weights = read_weights(path)
    assert weights.config == config
    assert 'assumed' not in weights.note
    assert_same(weights.params, params)
    assert_same(read_weights(path, config).params, params)


@pytest.mark.parametrize('name', ADM)
def test_inference_from_shapes(name: str) -> None:
    """Without metadata: names and shapes show the architecture; the rest is stated."""
    config = ADM[name]
    shapes = {entry.name: entry.shape for entry in guided_diffusion.table(config)}
    heads = 'num_heads' if config.model.num_heads else 'num_head_channels'
    stated = {
        'image_size': config.data.image_size,
        heads: getattr(config.model, heads),
        'schedule': 'cosine',
        'diffusion_steps': 4000,
        'rescale_timesteps': True,
        'objective': 'x0',
    }
    inferred, assumed = stated_config(guided_diffusion.infer(shapes, 'file'), 'file', stated)
    expected = network_fields(config)
    if name == 'num_heads':  # heads on the way up cannot be seen
        expected['model.num_heads_upsample'] = config.model.num_heads
    assert network_fields(inferred) == expected
    d = inferred.diffusion
    assert (d.schedule, d.steps, d.rescale_timesteps, d.objective) == ('cosine', 4000, True, 'x0')
    assert assumed == (['as many heads on the way up'] if name == 'num_heads' else [])


def test_foreign_files_are_read_as_stated(tmp_path: pathlib.Path) -> None:
    config = make((64,), base_channels=64, attention_resolutions=(32,), num_head_channels=64)
    params = random_params(config)
    state = guided_diffusion.from_tree(params, config, new_attention_order=False)
    safetensors.numpy.save_file(state, tmp_path / 'a.safetensors')
    stated = STATED | {'num_head_channels': 64, 'image_size': (64,)}
    weights = read_weights(tmp_path / 'a.safetensors', new_attention_order=False, **stated)
    assert network_fields(weights.config) == network_fields(config)
    assert_same(weights.params, params)
    assert 'assumed' not in weights.note
    del stated['num_head_channels']
    hinted = read_weights(
        tmp_path / 'a.safetensors',
        new_attention_order=True,
        **stated | {'image_size': (16, 32), 'num_heads': 8},
    )
    assert hinted.config.image_shape == (16, 32, 3)
    assert (hinted.config.model.num_heads, hinted.config.model.num_head_channels) == (8, 0)
    assert hinted.config.model.attention_resolutions == (8,)
    changed = {
        path
        for path, leaf in flatten(hinted.params).items()
        if not np.array_equal(leaf, flatten(params)[path])
    }
    assert {path[1] for path in changed} == {
        'qkv'
    }  # kernels and biases of the attention blocks alone


def test_safetensors_hold_moments_and_any_option(tmp_path: pathlib.Path) -> None:
    config = make(
        time_embedding='ddpm',
        downsample_padding='same',
        conv_resample=True,
        norm_eps=1e-6,
        norm_groups=16,
    )
    params, moments = random_params(config), moments_of(config)
    write_weights(tmp_path / 'a.safetensors', params, config, moments)
    weights = read_weights(tmp_path / 'a.safetensors')
    assert weights.config == config
    assert weights.moments is not None
    assert_same(weights.params, params)
    assert_same(weights.moments[0], moments[0])
    assert_same(weights.moments[1], moments[1])


@pytest.mark.parametrize(
    ('field', 'value'),
    [
        ('time_embedding', 'ddpm'),
        ('max_period', 1000),
        ('norm_groups', 16),
        ('norm_eps', 1e-6),
        ('downsample_padding', 'same'),
        *NVLABS_OPTIONS,
    ],
)
def test_pt_refuses_what_guided_diffusion_lacks(
    tmp_path: pathlib.Path, field: str, value: Any
) -> None:
    config = make(conv_resample=True).replace(model={field: value})
    with pytest.raises(UserError, match=rf'(?s)write .safetensors.*model.{field}: .* found'):
        write_weights(tmp_path / 'a.pt', {}, config)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('extension', ['bin', 'pt', 'safetensors'])
def test_the_augmentation_layer(tmp_path: pathlib.Path, extension: str) -> None:
    """.safetensors holds it; the other formats are those of the network without it."""
    plain = ADM['pool'] if extension == 'pt' else UNETCU_SMALL
    told = plain.replace(data={'augment': 'edm'})
    params = random_params(told)
    assert params['time_embed_augmentation']['kernel'].shape == (9, 32)
    moments = None if extension == 'pt' else moments_of(told)
    path = tmp_path / f'a.{extension}'
    write_weights(path, params, told, moments)
    weights = read_weights(path)
    if extension == 'safetensors':
        assert weights.config == told
        assert weights.moments is not None
        assert_same(weights.params, params)
        assert_same(weights.moments[0], moments_of(told)[0])
        return
    del params['time_embed_augmentation']
    assert_same(weights.params, params)
    assert weights.config.augmentation_inputs == 0
    for tree in moments or ():
        del tree['time_embed_augmentation']
    write_weights(tmp_path / f'b.{extension}', params, plain, moments)
    assert path.read_bytes() == (tmp_path / f'b.{extension}').read_bytes()


def test_same_weights_same_bytes(tmp_path: pathlib.Path) -> None:
    params = random_params(ADM['pool'])
    for extension in ('pt', 'safetensors'):
        for name in 'ab':
            write_weights(tmp_path / f'{name}.{extension}', params, ADM['pool'])
        assert (tmp_path / f'a.{extension}').read_bytes() == (
            tmp_path / f'b.{extension}'
        ).read_bytes()


def test_safetensors_have_the_bytes_of_the_library(tmp_path: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        'b/10': rng.normal(size=(2, 3)).astype(np.float16),
        'b/2': rng.normal(size=(3, 2)).T.astype(np.float16),
        'é"': np.ones((), np.float32),
        'a': np.arange(5, dtype=np.float32)[::2],
    }
    metadata = {'text': '{"x": "é\\"\n"}'}
    with (tmp_path / 'ours').open('wb') as file:
        write_safetensors(file, arrays, metadata)
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    contiguous['é"'] = arrays['é"']  # of no dimension
    assert (tmp_path / 'ours').read_bytes() == safetensors.numpy.save(contiguous, metadata)


def test_torch_save_fixture() -> None:
    """A file that torch 2.13 wrote: views, shared storage, every number type, a parameter, nested
    under state_dict.
    """
    with open(FIXTURES / 'torch_save.pt', 'rb') as file, TorchFile('fixture', file) as state:
        w = np.arange(12, dtype=np.float32).reshape(3, 4) / 8
        flat = np.arange(10, dtype=np.float32) - 3
        expected = {
            'contiguous': w,
            'transposed': w.T,
            'strided': flat[1:9:2],
            'first': flat[:6].reshape(2, 3),
            'scalar': np.float32(2.5),
            'half': w[0] + np.float32(0.5),
            'bfloat16': np.array([1, -2.5, 3e38, 1e-30]).astype(jnp.bfloat16).astype(np.float32),
            'double': np.float32([0.1, -7]),
            'long': np.float32([[1, -2], [3, 40000]]),
            'byte': np.float32([0, 255]),
            'parameter': np.float32([1.5, 2.5]),
        }
        assert state.shapes == {name: value.shape for name, value in expected.items()}
        for name, value in expected.items():
            found = state.read(name)
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found, value)


def test_big_endian_torch_file() -> None:
    """Files from big-endian machines say so in `byteorder`."""
    old, new = zipfile.ZipFile(FIXTURES / 'torch_save.pt'), io.BytesIO()
    sizes = {'0': 4, '1': 4, '2': 4, '3': 2, '4': 2, '5': 8, '6': 8, '7': 1, '8': 4}
    with old, zipfile.ZipFile(new, 'w') as archive:
        for info in old.infolist():
            data = old.read(info)
            part = info.filename.split('/')
            if part[-1] == 'byteorder':
                data = b'big'
            elif part[-2] == 'data':
                size = sizes[part[-1]]
                data = np.frombuffer(data, f'u{size}').byteswap().tobytes()
            archive.writestr(info.filename, data)
    new.seek(0)
    with (
        open(FIXTURES / 'torch_save.pt', 'rb') as file,
        TorchFile('little', file) as little,
        TorchFile('big', new) as big,
    ):
        for name in little.shapes:
            np.testing.assert_array_equal(little.read(name), big.read(name))


def test_table_covers_the_initialised_tree() -> None:
    """The trees of the tables are the trees that training makes."""
    for config in ADM.values():
        height, width, channels = config.image_shape
        labels = np.zeros(1, np.int32) if config.model.num_classes else None
        x = jax.ShapeDtypeStruct((1, height, width, channels), np.float32)
        tree = jax.eval_shape(
            build_unet(config, XLA).init,
            jax.random.key(0),
            x,
            jax.ShapeDtypeStruct((1,), np.int32),
            labels,
        )['params']
        assert {path: leaf.shape for path, leaf in flatten(tree).items()} == dict(
            parameter_shapes(config)
        )
        assert len(guided_diffusion.table(config)) == len(parameter_shapes(config))


def test_check_tree() -> None:
    config, params = ADM['pool'], random_params(ADM['pool'])
    check_tree(params, config)
    leaves = flatten(params)
    bias, kernel = ('conv_in', 'bias'), ('conv_in', 'kernel')
    cases: dict[str, dict[Any, Any]] = {
        'conv_in/bias: missing': {k: v for k, v in leaves.items() if k != bias},
        'conv_in/extra: unexpected': leaves | {('conv_in', 'extra'): leaves[bias]},
        r'conv_in/kernel: expected shape \(3, 3, 3, 32\), found \(3, 3, 32, 3\)': leaves
        | {kernel: leaves[kernel].swapaxes(2, 3)},
        'conv_in/bias, flat index 5, is nan': leaves
        | {bias: np.where(np.arange(32) == 5, np.float32(np.nan), leaves[bias])},
        'conv_in/bias: expected float32, found float64': leaves
        | {bias: leaves[bias].astype(np.float64)},
    }
    for message, changed in cases.items():
        with pytest.raises(UserError, match=message):
            check_tree(unflatten(changed), config)
