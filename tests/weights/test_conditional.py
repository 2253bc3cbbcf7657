"""Classifiers of noisy images, super-resolution, the bound as a loss: as in guided-diffusion.

`fixtures/conditional_golden.npz` holds what its code computed, on weights of a formula and without
noise; the files here are made of the same weights.
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conditional_golden import CLASSES, LABELS, LOW_RES, RESPACING, SCALE, prediction, slope
from peers_golden import SIDE, T
from support.peer_values import FIXTURES, QUICK, close, pictures, state_of
from support.published import digest
from support.weight_cases import NETWORK, safetensors_bytes, same, torch_bytes

from jaxunet.config import Config, resolve, to_dict
from jaxunet.diffusion.objectives import per_sample_loss
from jaxunet.diffusion.process import make_diffusion, q_sample
from jaxunet.evaluate.variational_bound import check_has_bound
from jaxunet.model.low_res import check_condition, enlarged
from jaxunet.model.noisy_classifier import build_classifier
from jaxunet.model.unet import build_unet
from jaxunet.ops.references import XLA
from jaxunet.runtime.errors import UserError
from jaxunet.sampling import sampler as sampler_module
from jaxunet.sampling.classifier_guidance import Guide, check_guide, class_gradient
from jaxunet.sampling.options import SamplerConfig
from jaxunet.sampling.sampler import State, make_sampler, run, sample_keys
from jaxunet.weights import (
    guided_diffusion,
    noisy_classifier,
    read_classifier,
    read_weights,
    write_weights,
)
from jaxunet.weights.fields import network_fields
from jaxunet.weights.presets import PRESETS

GOLDEN = np.load(FIXTURES / 'conditional_golden.npz')
ADM = NETWORK | {'num_head_channels': 16, 'scale_shift_norm': True, 'resblock_updown': True}


def config(model: dict[str, Any] | None = None, **diffusion: Any) -> Config:
    changed = Config().replace(
        model=ADM | (model or {}), diffusion=diffusion, data={'image_size': (SIDE,)}
    )
    return resolve(to_dict(changed))


MODEL = config()
CLASSIFIER = config({'channel_mult': (1, 4), 'num_head_channels': 64})


def nhwc(name: str) -> np.ndarray:
    return GOLDEN[name].transpose(0, 2, 3, 1)


@pytest.fixture(scope='module')
def classifier_state() -> dict[str, np.ndarray]:
    return state_of(noisy_classifier.table(CLASSIFIER, CLASSES))


@pytest.fixture(scope='module')
def classifier(
    classifier_state: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory
) -> noisy_classifier.Classifier:
    path = tmp_path_factory.mktemp('classifier') / 'classifier.pt'
    path.write_bytes(torch_bytes(classifier_state))
    return read_classifier(path, MODEL)


def gradient_of(classifier: noisy_classifier.Classifier, params: Any) -> Any:
    network = build_classifier(classifier.config, classifier.classes, XLA)
    return class_gradient(network, params, jnp.array(LABELS), SCALE)


def test_a_classifier_and_its_gradient(classifier: noisy_classifier.Classifier) -> None:
    assert classifier.classes == CLASSES
    assert classifier.config.model == CLASSIFIER.model
    network = build_classifier(classifier.config, classifier.classes, XLA)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def both(params: Any, x: jax.Array, t: jax.Array) -> Any:
        return network.predict(params, x, t), gradient_of(classifier, params)(x, t)

    logits, gradient = both(classifier.params, pictures(0.37), jnp.array(T))
    close(logits, GOLDEN['logits'])
    close(gradient, nhwc('gradient'), 1e-4)


@pytest.mark.parametrize(
    ('name', 'variance'),
    [
        ('ddpm', 'fixed_small'),
        ('ddpm', 'fixed_large'),
        ('ddpm', 'learned'),
        ('ddim', 'fixed_large'),
    ],
)
def test_guided_samples(name: str, variance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples agree in every step, without noise, with formulas in place of both networks."""
    monkeypatch.setattr(
        sampler_module, '_noise', lambda keys, _, shape: jnp.zeros((len(keys), *shape))
    )
    learned, labels = variance == 'learned', jnp.array(LABELS, jnp.float32)[:, None, None, None]
    options = SamplerConfig(
        name=name, respacing=RESPACING, variance=variance if name == 'ddpm' else None
    )
    sampler = make_sampler(options, make_diffusion(config(learn_sigma=learned).diffusion))

    def denoise(x: jax.Array, t: jax.Array) -> jax.Array:
        return jnp.concatenate(prediction(jnp, x, t[:, None, None, None])[: 1 + learned], axis=-1)

    def gradient(x: jax.Array, t: jax.Array) -> jax.Array:
        return slope(jnp, x, t[:, None, None, None], labels)

    state, keys = State(pictures(0.53)), sample_keys(0, [0, 1])
    found, plain = (
        run(denoise, state, keys, sampler, class_gradient=g).x for g in (gradient, None)
    )
    expected = nhwc(f'{name}_{variance}')
    close(found, expected, 1e-4)
    assert np.abs(plain - expected).max() > 0.05


@pytest.mark.long
def test_the_published_classifier_is_inferred() -> None:
    """Its names and shapes are those of guided-diffusion's own network of 64x64 images."""
    like = PRESETS['adm_imagenet64'].config()
    model = ADM | {
        'base_channels': 128,
        'channel_mult': (1, 2, 3, 4),
        'num_res_blocks': 4,
        'attention_resolutions': (32, 16, 8),
        'num_head_channels': 64,
    }
    expected = resolve(
        to_dict(Config().replace(model=model, diffusion=like.diffusion, data=like.data))
    )
    shapes = {row.name: row.shape for row in noisy_classifier.table(expected, 1000)}
    assert digest(shapes) == GOLDEN['published_classifier']
    config, classes = noisy_classifier.infer(shapes, 'a.pt', like)
    assert (classes, config.model) == (1000, expected.model)
    with pytest.raises(UserError, match='expected a classifier of 256x256 images, which'):
        noisy_classifier.infer(shapes, 'a.pt', PRESETS['adm_imagenet256'].config())


def test_other_architectures_of_a_classifier_have_other_weights() -> None:
    """So `jaxunet.sampling.identity` tells classifiers apart by their weights alone."""
    like = config()
    base = {'base_channels': 64, 'num_head_channels': 64, 'conv_resample': False}
    changes: list[dict[str, object]] = [
        {},
        {'base_channels': 128},
        {'channel_mult': (1, 1)},
        {'channel_mult': (1, 2, 2)},
        {'num_res_blocks': 2},
        {'attention_resolutions': (16,)},
        {'resblock_updown': False},
        {'resblock_updown': False, 'conv_resample': True},
        {'scale_shift_norm': False},
    ]
    seen = []
    for change in changes:
        given = config(base | change)
        shapes = {row.name: row.shape for row in noisy_classifier.table(given, CLASSES)}
        found, classes = noisy_classifier.infer(shapes, 'a.pt', like)
        assert (found.model, classes) == (given.model, CLASSES)
        seen.append(frozenset(shapes.items()))
    assert len(set(seen)) == len(changes)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'output_blocks.0.0.x': (1,)}, 'this is a diffusion model; expected a classifier'),
        ({'out.2.positional_embedding': (128, 64)}, 'a square and one for their mean, found 64'),
        ({'out.2.positional_embedding': (128, 37)}, 'classifier of 16x16 images, .* 6x6 pixels'),
        ({'out.2.positional_embedding': (128, 17)}, '4 input_blocks that do not make 3 levels'),
        ({'out.2.c_proj.bias': (6,)}, r'classifier of 16x16 images: out.2.c_proj.bias'),
        ({'input_blocks.0.0.weight': (32, 1, 3, 3)}, 'expected 3 channels, those of the images'),
        (
            {'input_blocks.3.0.in_layers.2.weight': (96, 32, 3, 3)},
            'level 1: expected a multiple of 64 channels',
        ),
    ],
)
def test_mistakes_in_a_classifier(
    classifier_state: dict[str, np.ndarray], file: Any, change: dict[str, Any], message: str
) -> None:
    state = classifier_state | {k: np.ones(v, np.float32) for k, v in change.items()}
    with pytest.raises(UserError, match=message) as error:
        read_classifier(file(state), MODEL)
    assert 'names and shapes' in str(error.value) or '\n' not in str(error.value)


@pytest.mark.parametrize(
    ('pool', 'out'),
    [
        ('adaptive', {'0': (128,), '3': (5, 128, 1, 1)}),
        ('spatial', {'0': (2048, 288), '2': (5, 2048)}),
        ('spatial_v2', {'0': (2048, 288), '1': (2048,), '3': (5, 2048)}),
    ],
)
def test_other_pools_are_refused(
    classifier_state: dict[str, np.ndarray], file: Any, pool: str, out: dict[str, Any]
) -> None:
    state = {k: v for k, v in classifier_state.items() if not k.startswith('out.')}
    state |= {f'out.{i}.weight': np.ones(shape, np.float32) for i, shape in out.items()}
    with pytest.raises(UserError, match=f'classifier_pool={pool}: only attention is supported'):
        read_classifier(file(state), MODEL)


def test_a_classifier_must_suit_the_model(
    classifier: noisy_classifier.Classifier,
    classifier_state: dict[str, np.ndarray],
    file: Any,
    tmp_path: pathlib.Path,
) -> None:
    path = file(classifier_state)
    with pytest.raises(
        UserError, match=r'classifier of noisy images .* draws nothing; .* with --classifier$'
    ):
        read_weights(path, MODEL, new_attention_order=False)
    with pytest.raises(UserError, match='takes square images, but the model draws 16x8'):
        read_classifier(path, MODEL.replace(data={'image_size': (16, 8)}))
    (tmp_path / 'a.bin').write_bytes(b'')
    with pytest.raises(UserError, match=r'in a \.pt or \.safetensors, found a \.bin'):
        read_classifier(tmp_path / 'a.bin', MODEL)
    again = tmp_path / 'a.safetensors'
    again.write_bytes(safetensors_bytes(classifier_state))
    same(read_classifier(again, MODEL).params, classifier.params)
    for scale, objective, classes, message in (
        (-1.0, 'epsilon', 0, 'classifier_scale: expected 0'),
        (float('nan'), 'epsilon', 0, 'classifier_scale: expected 0'),
        (1.0, 'flow', 0, 'classifier: reads the timesteps of .*objective=flow'),
        (1.0, 'epsilon', 7, 'classifier: has 5 classes, but the model has 7'),
    ):
        process = make_diffusion(config(objective=objective).diffusion)
        with pytest.raises(UserError, match=message):
            check_guide(Guide(classifier, scale), process, classes)


def test_the_variational_bound_of_a_fixed_variance() -> None:
    """`use_kl` without `learn_sigma`, which guided-diffusion trains with the large variance."""
    diffusion = make_diffusion(config(kl_loss=True).diffusion)
    x0, noise, t = pictures(0.37), pictures(0.71), jnp.array(T)
    xt = q_sample(diffusion, x0, t, noise)
    output = prediction(jnp, xt, t[:, None, None, None])[0]
    found = per_sample_loss(diffusion, output, x0, xt, t, noise)
    # Late variances are nearly equal, and the rounding of their difference is multiplied by T.
    np.testing.assert_allclose(found, GOLDEN['kl_fixed_large'], rtol=1e-5, atol=3e-4)
    assert found[1] > 0.2


# --- super-resolution


UPSAMPLER = config({'low_res_size': LOW_RES}, learn_sigma=True)
STATED: dict[str, Any] = {
    'image_size': (SIDE,),
    'schedule': 'linear',
    'diffusion_steps': 1000,
    'objective': 'epsilon',
    'num_head_channels': 16,
    'new_attention_order': False,
}


def small_pictures() -> jax.Array:
    return pictures(0.91)[:, : LOW_RES[0], : LOW_RES[1]]


def test_pictures_are_enlarged_as_by_pytorch() -> None:
    found = enlarged(small_pictures(), (2, SIDE, SIDE, 6))
    np.testing.assert_allclose(found, nhwc('enlarged'), rtol=0, atol=1e-6)


def test_super_resolution(file: Any, tmp_path: pathlib.Path) -> None:
    """Read by flags; our own files of it state all."""
    path = file(state_of(guided_diffusion.table(UPSAMPLER)))
    weights = read_weights(path, low_res_size=LOW_RES, **STATED)
    assert network_fields(weights.config) == network_fields(UPSAMPLER)
    predict = jax.jit(build_unet(weights.config, XLA).predict, compiler_options=QUICK)
    output = predict(
        weights.params, pictures(0.37), jnp.array(T), None, None, None, small_pictures()
    )
    close(output, nhwc('super_resolution'))
    for name in ('b.pt', 'b.safetensors'):
        write_weights(tmp_path / name, weights.params, weights.config)
        again = read_weights(tmp_path / name)
        assert again.config == weights.config
        same(again.params, weights.params)
    flags = guided_diffusion.flags(UPSAMPLER, new_attention_order=False)
    assert flags.startswith('--large_size 16 --small_size 5 --num_channels 32 ')
    assert flags.endswith('; in its code: channel_mult=(1, 2)')


def test_super_resolution_has_no_bound() -> None:
    with pytest.raises(UserError, match='nll: a super-resolution network'):
        check_has_bound(UPSAMPLER)


def test_low_res_size_belongs_to_super_resolution(file: Any) -> None:
    path = file(state_of(guided_diffusion.table(MODEL)))
    with pytest.raises(UserError, match='--low_res_size: the network draws from noise alone'):
        read_weights(path, low_res_size=(8,), **STATED)
    for size, message in (
        ((8, 8, 8), r'expected \(side,\)'),
        ((17, 8), r'expected at most data.image_size \(16x16\), .*, found 17x8'),
    ):
        with pytest.raises(UserError, match=f'model.low_res_size: {message}'):
            config({'low_res_size': size})


def test_pictures_of_the_images_size_condition_a_network_of_elsewhere(file: Any) -> None:
    """A file may be of a network that colours or restores; a run needs something to learn."""
    colours = config({'low_res_size': (SIDE,)})
    path = file(state_of(guided_diffusion.table(colours)))
    weights = read_weights(path, low_res_size=(SIDE,), **STATED)
    assert weights.config.low_res_shape == weights.config.image_shape
    with pytest.raises(UserError, match=r'the network would see the image that it should draw'):
        check_condition(colours)
    check_condition(colours.replace(data={'condition': 'grey'}))
