"""Folders of diffusers against the library itself: networks, pipelines, and its own folders.

Skips without diffusers and torch, which are not among the requirements of the tests. The bounds are
those of docs/weights.md.
"""

from __future__ import annotations

import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.diffusers_folders import CASES, PROCESSES, SMALL, tensors, written
from support.peer_values import QUICK
from support.samples import sample
from support.weight_cases import make, random_params, same

from jaxunet.config import Config
from jaxunet.diffusion.process import make_diffusion
from jaxunet.model.unet import build_unet
from jaxunet.ops.references import XLA
from jaxunet.sampling import sampler as ours
from jaxunet.sampling.generator import sampler_of
from jaxunet.sampling.options import SamplerConfig
from jaxunet.weights import read_weights, write_folder
from jaxunet.weights.diffusers_scheduler import DISCRETE as DISCRETE_SCHEDULERS

torch = pytest.importorskip('torch')
diffusers = pytest.importorskip('diffusers')

from diffusers.pipelines.ddim import pipeline_ddim  # noqa: E402
from diffusers.pipelines.ddpm import pipeline_ddpm  # noqa: E402
from diffusers.schedulers import scheduling_ddpm  # noqa: E402

# Deprecations inside the library, and what it says of schedulers with options of others.
pytestmark = pytest.mark.filterwarnings('ignore')
RELATIVE = 1e-5  # of outputs of networks, relative to the largest
PIXELS = 1 / 255  # of images from 0 to 1
STEPS, BATCH = 10, 2
TIMES = (0, 417, 999)
GUIDED = CASES['guided']
# Networks of which images are drawn; `PROCESSES` has the objectives.
NETWORKS = ('ddpm', 'resblock_updown', 'pool', 'non_square', 'one_channel', 'period')


def to_torch(images: Any) -> Any:
    return torch.tensor(np.asarray(images).transpose(0, 3, 1, 2))


def output(unet: Any, x: np.ndarray, t: Any, labels: Any = None) -> np.ndarray:
    """Returns the output of the library's network, NHWC."""
    classes = {} if labels is None else {'class_labels': torch.tensor(labels)}
    with torch.no_grad():
        found = unet(to_torch(x), torch.tensor(t), **classes).sample
    return found.numpy().transpose(0, 2, 3, 1)


def our_output(params: Any, config: Config, x: Any, t: Any, labels: Any = None) -> np.ndarray:
    given = (x, jnp.array(t)) if labels is None else (x, jnp.array(t), jnp.array(labels))
    predict = jax.jit(build_unet(config, XLA).predict, compiler_options=QUICK)
    return np.asarray(predict(params, *given))


def pictures(config: Config) -> np.ndarray:
    shape = (len(TIMES), *config.image_shape)
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=RELATIVE * np.abs(expected).max())


@pytest.mark.parametrize('name', CASES)
def test_the_library_computes_the_same(tmp_path: pathlib.Path, name: str) -> None:
    config, params = CASES[name], random_params(CASES[name])
    unet, report = diffusers.UNet2DModel.from_pretrained(
        written(tmp_path, config), subfolder='unet', output_loading_info=True
    )
    assert not report['missing_keys']
    assert not report['unexpected_keys']
    classes = config.model.num_classes
    labels = np.array([0, 1, classes - 1]) if classes else None
    x = pictures(config)
    expected = our_output(params, config, x, TIMES, labels)
    close(output(unet, x, TIMES, labels), expected)
    if name == 'guided':  # the last row of its labels is that of no class
        none = np.full(len(TIMES), classes)
        close(output(unet, x, TIMES, none), our_output(params, config, x, TIMES, none * 0 - 1))


# --- images


class Noise:
    """The noise of our sampler, which the library's functions draw from: the first, then each."""

    def __init__(self, config: Config) -> None:
        self.keys = ours.sample_keys(3, range(BATCH))
        self.shape, self.calls = config.image_shape, 0

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.calls += 1
        return to_torch(ours._noise(self.keys, self.calls - 1, self.shape))


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> Any:
    def patch(config: Config) -> Noise:
        found = Noise(config)
        for module in (pipeline_ddim, pipeline_ddpm, scheduling_ddpm):
            monkeypatch.setattr(module, 'randn_tensor', found)
        monkeypatch.setattr(torch, 'randn', found)
        return found

    return patch


def drawn(config: Config, how: SamplerConfig, labels: Any = None) -> np.ndarray:
    """Our images, from 0 to 1."""
    network = build_unet(config, XLA)

    def draw(params: Any, keys: Any) -> Any:
        sampler = sampler_of(config, how)
        classes = () if labels is None else (jnp.array(labels),)
        return sample(
            lambda x, t: network.predict(params, x, t, *classes), keys, config.image_shape, sampler
        )

    keys = ours.sample_keys(3, range(BATCH))
    found = jax.jit(draw, compiler_options=QUICK)(random_params(config), keys)
    return np.clip(np.asarray(found) / 2 + 0.5, 0, 1)


def visited(scheduler: Any) -> tuple[int, ...]:
    return tuple(int(t) for t in scheduler.timesteps.flip(0))


def quiet(pipeline: Any) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def same_images(found: np.ndarray, expected: np.ndarray) -> None:
    assert expected.std() > 0.1
    assert np.abs(found - expected).max() <= PIXELS


DRAWN = {name: SMALL.replace(diffusion=fields) for name, fields in PROCESSES.items()}
DRAWN |= {name: CASES[name] for name in NETWORKS}
DISCRETE = [name for name, config in DRAWN.items() if not config.diffusion.continuous]
LEARNED = [name for name in DISCRETE if DRAWN[name].diffusion.learn_sigma]


@pytest.mark.parametrize('name', [name for name in DISCRETE if name not in LEARNED])
def test_ddim_draws_the_same(tmp_path: pathlib.Path, noise: Any, name: str) -> None:
    config = DRAWN[name]
    noise(config)
    pipeline = quiet(diffusers.DDIMPipeline.from_pretrained(written(tmp_path, config)))
    found = pipeline(BATCH, None, 0.0, STEPS, use_clipped_model_output=True, output_type='np')
    how = SamplerConfig('ddim', timesteps=visited(pipeline.scheduler))
    assert len(how.timesteps or ()) == STEPS
    same_images(found.images, drawn(config, how))


@pytest.mark.parametrize('name', ['epsilon', 'x0', 'v', *LEARNED])
def test_ddpm_draws_the_same(tmp_path: pathlib.Path, noise: Any, name: str) -> None:
    config = DRAWN[name]
    source = noise(config)
    pipeline = quiet(diffusers.DDPMPipeline.from_pretrained(written(tmp_path, config)))
    found = pipeline(BATCH, num_inference_steps=STEPS, output_type='np')
    assert source.calls >= STEPS
    how = SamplerConfig('ddpm', timesteps=visited(pipeline.scheduler))
    if name in LEARNED:  # also our own choice of timesteps
        assert how.timesteps == visited_by_us(config)
    same_images(found.images, drawn(config, how))


def visited_by_us(config: Config) -> tuple[int, ...]:
    how = SamplerConfig('ddpm', steps=STEPS)
    sampler = ours.make_sampler(how, make_diffusion(config.diffusion))
    return tuple(int(t) for t in sampler.timesteps[::-1])


def test_flow_draws_the_same(tmp_path: pathlib.Path, noise: Any) -> None:
    config = DRAWN['flow']
    noise(config)
    pipeline = quiet(diffusers.DDPMPipeline.from_pretrained(written(tmp_path, config)))
    assert type(pipeline.scheduler).__name__ == 'FlowMatchEulerDiscreteScheduler'
    choose = pipeline.scheduler.set_timesteps
    pipeline.scheduler.set_timesteps = lambda n: choose(sigmas=np.linspace(1, 1 / n, n))
    found = pipeline(BATCH, num_inference_steps=STEPS, output_type='np')
    same_images(found.images, drawn(config, SamplerConfig('ddim', steps=STEPS, clip=False)))


@pytest.mark.parametrize('side', [16, 64])  # whose second level is another
@pytest.mark.parametrize('classes', [0, 5])
def test_consistency_draws_the_same(
    tmp_path: pathlib.Path, noise: Any, side: int, classes: int
) -> None:
    model = {'num_classes': classes}
    config = SMALL.replace(
        diffusion=PROCESSES['consistency'], data={'image_size': (side,)}, model=model
    )
    folder, labels = written(tmp_path, config), [3, 1]
    pipeline = quiet(diffusers.ConsistencyModelPipeline.from_pretrained(folder))
    assert type(diffusers.DiffusionPipeline.from_pretrained(folder)) is type(pipeline)
    chosen: dict[str, Any] = {'class_labels': labels} if classes else {}
    for steps in (1, 2):
        noise(config)
        found = pipeline(BATCH, num_inference_steps=steps, output_type='np', **chosen)
        how = SamplerConfig('consistency', steps=steps)
        same_images(found.images, drawn(config, how, labels if classes else None))


@pytest.mark.parametrize('objective', ['epsilon', 'flow', 'learned'])
def test_the_code_of_the_card_draws_classes(
    tmp_path: pathlib.Path, noise: Any, objective: str
) -> None:
    fields = PROCESSES.get(objective, {'learn_sigma': True})
    config = GUIDED.replace(diffusion=fields)
    source = noise(config)
    folder = written(tmp_path, config)
    blocks = re.findall(r'```python\n(.*?)```', (folder / 'README.md').read_text(), re.DOTALL)
    labels = [3, 1]
    code = blocks[1].replace('FOLDER', str(folder)).replace('tensor([0])', f'tensor({labels})')
    levels = f'sigmas=[1 - k / {STEPS} for k in range({STEPS})]' if objective == 'flow' else STEPS
    code = code.replace('set_timesteps(50)', f'set_timesteps({levels})')
    variables: dict[str, Any] = {}
    exec(code, variables)
    assert source.calls
    found = variables['pixels'].numpy().transpose(0, 2, 3, 1)
    if objective == 'flow':
        how = SamplerConfig('ddim', steps=STEPS, clip=False)
    else:
        name = 'ddpm' if objective == 'learned' else 'ddim'
        how = SamplerConfig(name, timesteps=visited(variables['scheduler']))
    same_images(found, drawn(config, how, labels))


# --- the library's own folders

SMALL_UNET: dict[str, Any] = {
    'sample_size': 16,
    'block_out_channels': (32, 64),
    'down_block_types': ('DownBlock2D', 'AttnDownBlock2D'),
    'up_block_types': ('AttnUpBlock2D', 'UpBlock2D'),
    'layers_per_block': 1,
}
RESNETS = {
    'down_block_types': ('ResnetDownsampleBlock2D', 'AttnDownBlock2D'),
    'up_block_types': ('AttnUpBlock2D', 'ResnetUpsampleBlock2D'),
    'upsample_type': 'resnet',
    'resnet_time_scale_shift': 'scale_shift',
    'attn_norm_num_groups': 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    'defaults': {},
    'google/ddpm': {
        'flip_sin_to_cos': False,
        'freq_shift': 1,
        'downsample_padding': 0,
        'attention_head_dim': None,
        'norm_eps': 1e-6,
        'down_block_types': ('DownBlock2D', 'AttnDownBlock2D', 'DownBlock2D'),
        'up_block_types': ('UpBlock2D', 'AttnUpBlock2D', 'UpBlock2D'),
        'block_out_channels': (32, 64, 64),
    },
    'two layers': {'layers_per_block': 2, 'attention_head_dim': 16},
    'resnets': RESNETS,
    'attention and resnets': {
        'down_block_types': ('AttnDownBlock2D', 'DownBlock2D'),
        'up_block_types': ('ResnetUpsampleBlock2D', 'AttnUpBlock2D'),
        'downsample_type': 'resnet',
        'upsample_type': 'resnet',
    },
    'scale and shift': {'resnet_time_scale_shift': 'scale_shift', 'attn_norm_num_groups': 32},
    'classes': {'num_class_embeds': 7, 'dropout': 0.1},
    'learned variance': {'out_channels': 6},
    'no attention outside the middle': {
        'down_block_types': ('DownBlock2D', 'DownBlock2D'),
        'up_block_types': ('UpBlock2D', 'UpBlock2D'),
    },
    'groups and grey': {'norm_num_groups': 16, 'in_channels': 1, 'out_channels': 1},
    'fractions': {'block_out_channels': (32, 48), 'norm_num_groups': 16},
    'not square': {'sample_size': (8, 16)},
}


@pytest.mark.parametrize('name', VARIANTS)
def test_a_folder_of_the_library(tmp_path: pathlib.Path, name: str) -> None:
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(**SMALL_UNET | VARIANTS[name])
    for parameter in unet.parameters():  # norms start at 1 and biases at 0
        parameter.data += 0.1 * torch.randn_like(parameter)
    variance = 'learned_range' if name == 'learned variance' else 'fixed_large'
    scheduler = diffusers.DDPMScheduler(500, 2e-4, 0.04, variance_type=variance)
    diffusers.DDPMPipeline(unet, scheduler).save_pretrained(tmp_path / 'theirs')
    found = read_weights(tmp_path / 'theirs')
    assert (found.config.diffusion.steps, found.config.diffusion.schedule) == (500, 'linear')
    classes = found.config.model.num_classes
    labels = np.array([0, 1, classes - 1]) if classes else None
    x = pictures(found.config)
    close(
        our_output(found.params, found.config, x, TIMES, labels),
        output(unet.eval(), x, TIMES, labels),
    )
    write_folder(tmp_path / 'ours', found.params, found.config)
    returned = tensors(tmp_path / 'ours')
    state = {name: value.numpy() for name, value in unet.state_dict().items()}
    assert returned.keys() == state.keys()
    for key, value in state.items():
        np.testing.assert_array_equal(returned[key], value)


@pytest.mark.parametrize('safe', [True, False], ids=['safetensors', 'bin'])
def test_shards_and_averages_of_the_library(tmp_path: pathlib.Path, safe: bool) -> None:
    from diffusers.training_utils import EMAModel  # noqa: PLC0415

    unet = diffusers.UNet2DModel(**SMALL_UNET)
    bias = unet.state_dict()['conv_out.bias'].numpy().copy()
    options = {'safe_serialization': safe, 'max_shard_size': '500KB'}
    unet.save_pretrained(tmp_path / 'unet', **options)
    assert list((tmp_path / 'unet').glob('*.index.json'))
    kind = {'model_cls': diffusers.UNet2DModel, 'model_config': unet.config}
    average = EMAModel(unet.parameters(), decay=0.99, **kind)
    for parameter in unet.parameters():
        parameter.data += 1
    average.step(unet.parameters())
    average.save_pretrained(tmp_path / 'unet_ema')
    stated: Any = {'schedule': 'cosine', 'diffusion_steps': 1000, 'objective': 'v'}
    averages = diffusers.UNet2DModel.from_pretrained(tmp_path / 'unet_ema')
    biases = {'': averages.state_dict()['conv_out.bias'].numpy(), 'none': bias}
    for ema, expected in biases.items():
        found = read_weights(tmp_path, ema=ema, **stated)
        np.testing.assert_array_equal(found.params['conv_out']['bias'], expected)
        assert ('its averages' in found.note) == (ema == '')


def test_a_folder_that_the_library_saved_again(tmp_path: pathlib.Path) -> None:
    """diffusers drops our metadata; the JSON files still describe the model."""
    config = make(conv_resample=True).replace(diffusion={'objective': 'v', 'schedule': 'cosine'})
    pipeline = diffusers.DDIMPipeline.from_pretrained(written(tmp_path, config))
    pipeline.save_pretrained(tmp_path / 'again')
    found = read_weights(tmp_path / 'again')
    assert found.config.diffusion == config.diffusion
    same(found.params, random_params(config))


def test_the_schedulers_of_the_library(tmp_path: pathlib.Path) -> None:
    unet = diffusers.UNet2DModel(**SMALL_UNET)
    linear = {'beta_start': 1e-4, 'beta_end': 0.02}
    for name in DISCRETE_SCHEDULERS:
        diffusers.DDPMPipeline(unet, getattr(diffusers, name)(**linear)).save_pretrained(tmp_path)
        assert read_weights(tmp_path).config.diffusion.schedule == 'linear'
