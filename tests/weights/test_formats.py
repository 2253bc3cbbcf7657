"""Every row of the table of docs/weights.md is run, on small networks."""

from __future__ import annotations

import gzip
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from support.commands import ROOT
from support.edm_files import persistent, pickled, snapshot
from support.weight_cases import (
    SMALL,
    STATED,
    UNETCU_SMALL,
    archive,
    make,
    moments_of,
    nested_torch_bytes,
    random_params,
    safetensors_bytes,
    same,
    state,
    torch_bytes,
)

from jaxunet.config import Config
from jaxunet.runtime.errors import UserError
from jaxunet.weights import (
    ddpm_torch,
    guided_diffusion,
    noisy_classifier,
    read_classifier,
    read_weights,
    unetcu,
    write_classifier,
    write_folder,
    write_weights,
)
from jaxunet.weights.fields import network_fields
from jaxunet.weights.names import from_tree
from jaxunet.weights.torch_pickle import dump

ONE_LEVEL: dict[str, Any] = {'channel_mult': (1,), 'attention_resolutions': ()}
LEGACY = {'new_attention_order': False}
DDPM = make(**ONE_LEVEL | ddpm_torch.FIXED)
DDPM_STATED = {name: value for name, value in STATED.items() if name != 'num_head_channels'}
UPSAMPLER = make(**ONE_LEVEL, low_res_size=(8,), learn_sigma=True)
IMPROVED = make(**ONE_LEVEL).replace(diffusion={'steps': 4000, 'rescale_timesteps': True})
CLASSIFIER = make(base_channels=64, num_head_channels=64, **ONE_LEVEL)


class Row(NamedTuple):
    """The cells of a row."""

    program: str
    file: str
    read: str
    written: str
    states: str
    caveats: str


def written(path: pathlib.Path, config: Config, given: Any = None, **options: Any) -> Any:
    """Writes weights and returns what is read from them."""
    write_weights(path, random_params(config), config, given, **options)
    found = read_weights(path)
    same(found.params, random_params(config))
    return found


def refused(message: str, act: Callable[[], object]) -> None:
    with pytest.raises(UserError, match=message):
        act()


def given(path: pathlib.Path, data: bytes) -> pathlib.Path:
    path.write_bytes(data)
    return path


def own_safetensors(folder: pathlib.Path) -> None:
    flow = SMALL.replace(diffusion={'objective': 'flow'})
    found = written(folder / 'a.safetensors', flow, moments_of(flow), class_names=())
    assert found.config == flow
    same(found.moments, moments_of(flow))


def own_pt(folder: pathlib.Path) -> None:
    classes = make(num_classes=2, **ONE_LEVEL)
    found = written(folder / 'a.pt', classes, class_names=('cat', 'dog'))
    assert (found.config, found.class_names) == (classes, ('cat', 'dog'))
    v = SMALL.replace(diffusion={'objective': 'v'})
    for config, more, message in (
        (v, None, "expected 'epsilon' or 'x0'"),
        (SMALL, moments_of(SMALL), 'holds no optimizer moments'),
    ):
        refused(message, lambda c=config, m=more: write_weights(folder / 'b.pt', {}, c, m))


def diffusers_folder(folder: pathlib.Path) -> None:
    classes = make(num_classes=2, **ONE_LEVEL)
    write_folder(folder / 'a', random_params(classes), classes, class_names=('cat', 'dog'))
    found = read_weights(folder / 'a')
    same(found.params, random_params(classes))
    assert (found.config, found.class_names) == (classes, ('cat', 'dog'))
    edm = SMALL.replace(diffusion={'objective': 'edm'})
    refused('diffusion.objective', lambda: write_folder(folder / 'b', random_params(edm), edm))


def other_diffusers(folder: pathlib.Path) -> None:
    write_folder(folder / 'a', random_params(SMALL), SMALL)
    (folder / 'a' / 'vae').mkdir()
    refused('vae: a model of latents', lambda: read_weights(folder / 'a'))


def unetcu_bin(folder: pathlib.Path) -> None:
    found = written(folder / 'a.bin', UNETCU_SMALL, moments_of(UNETCU_SMALL))
    assert found.config == UNETCU_SMALL
    same(found.moments, moments_of(UNETCU_SMALL))
    refused('unet.cu has no such model', lambda: write_weights(folder / 'b.bin', {}, SMALL))
    advice = r'model.max_period: expected 10000, .*\. A .pt with --names=unet.cu can hold it'
    refused(advice, lambda: write_weights(folder / 'b.pt', {}, UNETCU_SMALL))


def unetcu_pt(folder: pathlib.Path) -> None:
    written(folder / 'model_100.pt', UNETCU_SMALL, program='unet.cu')
    plain = from_tree(random_params(UNETCU_SMALL), unetcu.table(UNETCU_SMALL))
    for prefix in ('', '_orig_mod.'):
        data = torch_bytes({prefix + name: value for name, value in plain.items()})
        path = given(folder / 'theirs.pt', data)
        same(read_weights(path, image_size=(16,)).params, random_params(UNETCU_SMALL))
        assert read_weights(path).config.image_shape == (64, 64, 3)


def guided(folder: pathlib.Path) -> None:
    path = given(folder / 'ema_0.9999_100.pt', torch_bytes(state()))
    same(read_weights(path, **STATED, **LEGACY).params, random_params(SMALL))
    refused('does not say all about its model', lambda: read_weights(path))


def upsampler(folder: pathlib.Path) -> None:
    written(folder / 'a.pt', UPSAMPLER)
    theirs = guided_diffusion.from_tree(random_params(UPSAMPLER), UPSAMPLER, **LEGACY)
    path = given(folder / '8_16_upsampler.pt', torch_bytes(theirs))
    found = read_weights(path, low_res_size=(8,), **STATED, **LEGACY)
    assert network_fields(found.config) == network_fields(UPSAMPLER)
    refused('--low_res_size', lambda: read_weights(path, **STATED, **LEGACY))


def classifier(folder: pathlib.Path) -> None:
    rows = noisy_classifier.table(CLASSIFIER, 5)
    theirs = {row.name: np.ones(row.shape, np.float32) for row in rows}
    found = read_classifier(given(folder / 'a_classifier.pt', torch_bytes(theirs)), CLASSIFIER)
    for name in ('b.pt', 'b.safetensors'):
        write_classifier(folder / name, found.params, found.config, found.classes)
        same(read_classifier(folder / name, CLASSIFIER).params, found.params)


def optimizer_alone(folder: pathlib.Path) -> None:
    tree = {'state': {0: {'exp_avg': np.ones(3, np.float32)}}, 'param_groups': [{'lr': 1e-4}]}
    path = given(folder / 'opt000100.pt', nested_torch_bytes(tree))
    refused("'state': expected a tensor, found a dict", lambda: read_weights(path, SMALL, **LEGACY))


def improved(folder: pathlib.Path) -> None:
    theirs = guided_diffusion.from_tree(random_params(IMPROVED), IMPROVED, **LEGACY)
    path = given(folder / 'ema_0.9999_100.pt', torch_bytes(theirs))
    stated = STATED | LEGACY | {'diffusion_steps': 4000}
    assert read_weights(path, rescale_timesteps=True, **stated).config.diffusion.time_scale == 0.25
    refused('--rescale_timesteps or --norescale_timesteps', lambda: read_weights(path, **stated))
    assert written(folder / 'b.pt', IMPROVED).config == IMPROVED


def ddpm(folder: pathlib.Path) -> None:
    table = ddpm_torch.table(DDPM)
    weights, averages = (from_tree(random_params(DDPM, seed), table) for seed in (0, 3))
    mu, nu = (from_tree(tree, table).values() for tree in moments_of(DDPM))
    adam = {
        i: {'step': 10**6, 'exp_avg': first, 'exp_avg_sq': second}
        for i, (first, second) in enumerate(zip(mu, nu, strict=True))
    }
    tree = {
        'model': weights,
        'ema': {'decay': 0.9999, 'shadow': averages},
        'optimizer': {'state': adam, 'param_groups': [{'betas': (0.9, 0.999)}]},
    }
    path = given(folder / 'cifar10_120.pt', nested_torch_bytes(tree))
    found = read_weights(path, **DDPM_STATED)
    same(found.params, random_params(DDPM, 3))
    assert found.moments is None
    found = read_weights(path, ema='none', **DDPM_STATED)
    same(found.params, random_params(DDPM))
    same(found.moments, moments_of(DDPM))


def other_ddpm(folder: pathlib.Path) -> None:
    plain = from_tree(random_params(DDPM), ddpm_torch.table(DDPM))
    variance = plain | {'out_conv.2.weight': np.ones((6, 32, 3, 3), np.float32)}
    shuffled = {f'_model.{name}': value for name, value in plain.items()}
    for theirs, stated, message in (
        (variance, {}, 'learned variance'),
        (shuffled, {}, 'block_size above 1'),
        (plain, {'schedule': 'cosine'}, 'expected linear'),
        (plain, {'diffusion_steps': 500}, 'expected 1000'),
    ):
        path = given(folder / 'a.pt', torch_bytes(theirs))
        refused(message, lambda path=path, more=stated: read_weights(path, **DDPM_STATED | more))


def nvlabs(folder: pathlib.Path) -> None:
    path = folder / 'network-snapshot-200000.pkl'
    path.write_bytes(gzip.decompress((ROOT / 'tests/fixtures/edm_network.pkl.gz').read_bytes()))
    config = read_weights(path).config
    assert (config.model.skip_scale, config.diffusion.objective) == (0.5**0.5, 'edm')


def other_nvlabs(folder: pathlib.Path) -> None:
    for kind in ('VPPrecond', 'VEPrecond', 'iDDPMPrecond'):
        path = given(folder / 'a.pkl', pickled({'ema': persistent(kind)}))
        message = f"expected a network of the class EDMPrecond, found '{kind}', whose precond"
        refused(message, lambda path=path: read_weights(path))
    skip = {'enc.8x8_conv.weight': np.ones((8, 3, 3, 3), np.float32)}
    skip |= {'map_layer0.weight': np.ones((32, 8), np.float32)}
    skip |= {'dec.8x8_aux_conv.weight': np.ones((3, 8, 3, 3), np.float32)}
    skip |= {'enc.4x4_aux_skip.weight': np.ones((8, 3, 1, 1), np.float32)}
    path = given(folder / 'b.pkl', snapshot(skip))
    refused('encoder_type=skip is not supported', lambda: read_weights(path))
    content = pickled({'net': persistent('EDMPrecond')}, 2)
    path = given(folder / 'training-state-1.pt', archive({'a/data.pkl': content}))
    refused('could run code when it is loaded', lambda: read_weights(path))


def other_safetensors(folder: pathlib.Path) -> None:
    theirs = from_tree(random_params(DDPM), ddpm_torch.table(DDPM))
    path = given(folder / 'a.safetensors', safetensors_bytes(theirs))
    same(read_weights(path, **DDPM_STATED).params, random_params(DDPM))
    plain = from_tree(random_params(UNETCU_SMALL), unetcu.table(UNETCU_SMALL))
    path = given(folder / 'b.safetensors', safetensors_bytes(plain))
    same(read_weights(path, image_size=(16,)).params, random_params(UNETCU_SMALL))
    path = given(folder / 'c.safetensors', safetensors_bytes(state()))
    same(read_weights(path, **STATED, **LEGACY).params, random_params(SMALL))


def prefixes(folder: pathlib.Path) -> None:
    for prefix in ('module.', '_orig_mod.'):
        data = torch_bytes({prefix + name: value for name, value in state().items()})
        path = given(folder / 'a.pt', data)
        same(read_weights(path, **STATED, **LEGACY).params, random_params(SMALL))


def several(folder: pathlib.Path) -> None:
    average = {name: 0.5 * value for name, value in state().items()}
    for weights in ('model', 'state_dict', 'model_state_dict'):
        for averages in ('ema', 'ema_state_dict', 'model_ema'):
            tree = {weights: state(), averages: average, 'epoch': 3}
            path = given(folder / 'a.pt', nested_torch_bytes(tree))
            for ema, factor in (('', 0.5), ('none', 1.0)):
                found = read_weights(path, ema=ema, **STATED, **LEGACY)
                same(found.params, jax.tree.map(lambda x, f=factor: f * x, random_params(SMALL)))
                assert f"'{weights if ema else averages}'" in found.note


def types(folder: pathlib.Path) -> None:
    for kind, dtype in (('Half', '<f2'), ('Double', '<f8'), ('BFloat16', '<u2')):
        values = state()
        if kind == 'BFloat16':  # the upper half of a float32
            values = {name: value.view('<u4') >> 16 for name, value in values.items()}
        data = stored_as(kind, {name: value.astype(dtype) for name, value in values.items()})
        found = read_weights(given(folder / 'a.pt', data), **STATED, **LEGACY)
        for leaf, value in zip(
            jax.tree.leaves(found.params), jax.tree.leaves(random_params(SMALL)), strict=True
        ):
            np.testing.assert_allclose(leaf, value, rtol=2**-7, atol=1e-6)


def stored_as(kind: str, values: dict[str, np.ndarray]) -> bytes:
    """A state dict with another type of storage than float32."""
    pickle = dump({name: value.shape for name, value in values.items()})
    entries = {'a/data.pkl': pickle.replace(b'FloatStorage', f'{kind}Storage'.encode())}
    entries |= {f'a/data/{i}': value.tobytes() for i, value in enumerate(values.values())}
    return archive(entries)


def old_formats(folder: pathlib.Path) -> None:
    for name, data, message in (
        ('a.pt', b'\x80\x02}.', "PyTorch's old format .* torch.save"),
        ('a.pt', archive({'a/data.pkl': b'', 'a/constants.pkl': b''}), 'TorchScript .* torch.save'),
        ('a.pth', torch_bytes(state()), ".safetensors, .pkl, found '.pth'"),
        ('a.ckpt', torch_bytes(state()), ".safetensors, .pkl, found '.ckpt'"),
    ):
        path = given(folder / name, data)
        refused(message, lambda path=path: read_weights(path))


CHECKS: dict[tuple[str, str], Callable[[pathlib.Path], None]] = {
    ('jaxunet', '`.safetensors`'): own_safetensors,
    ('jaxunet', '`.pt`'): own_pt,
    ('diffusers', 'folder of a'): diffusers_folder,
    ('diffusers', 'latent and text-conditional'): other_diffusers,
    ('unet.cu', '`.bin`'): unetcu_bin,
    ('unet.cu', '`model_100.pt`'): unetcu_pt,
    ('guided-diffusion', '`model*.pt`'): guided,
    ('guided-diffusion', '`*_upsampler.pt`'): upsampler,
    ('guided-diffusion', '`*_classifier.pt`'): classifier,
    ('guided-diffusion', '`opt*.pt`'): optimizer_alone,
    ('improved-diffusion', '`model*.pt`'): improved,
    ('ddpm-torch', '`NAME_EPOCH.pt`'): ddpm,
    ('ddpm-torch', 'a learned variance'): other_ddpm,
    ('NVlabs/edm', '`edm-*.pkl`'): nvlabs,
    ('NVlabs/edm', '`baseline-*.pkl`'): other_nvlabs,
    ("any but unet.cu's `.bin`", 'the same names'): other_safetensors,
    ('any `.pt`', 'names that begin'): prefixes,
    ('any `.pt`', 'a dict with weights'): several,
    ('any `.pt`', 'float16'): types,
    ('any `.pt`', "PyTorch's format before 1.6"): old_formats,
}


def test_every_row_has_its_check() -> None:
    text = (ROOT / 'docs' / 'weights.md').read_text()
    table = text[text.index('| program | file |') :].split('\n\n')[0].splitlines()[2:]
    rows = [Row(*(cell.strip() for cell in line.strip('|').split('|'))) for line in table]
    assert len(rows) == len(CHECKS)
    for row, (program, file) in zip(rows, CHECKS, strict=True):
        assert row.program == program
        assert row.file.startswith(file)


@pytest.mark.parametrize('check', CHECKS.values(), ids=lambda check: check.__name__)
def test_a_row(check: Callable[[pathlib.Path], None], tmp_path: pathlib.Path) -> None:
    check(tmp_path)
