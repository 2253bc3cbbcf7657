"""Kept training steps and samplers: loaded without building, same results, and made anew whenever
something they depend on differs.
"""

import itertools
import logging
import os
import pathlib
import re
import resource
import types

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from support.tiny import tiny_config

from jaxunet.checkpoint.optimizer import make_optimizer
from jaxunet.checkpoint.state import draw_state, fresh_state, state_config
from jaxunet.config import Config, to_dict
from jaxunet.config.schema import FACTS
from jaxunet.data import pipeline
from jaxunet.data.sources import open_source
from jaxunet.diffusion.process import make_diffusion
from jaxunet.model.unet import build_unet
from jaxunet.ops.backends import choose
from jaxunet.runtime import compiled_cache as executables
from jaxunet.runtime import ownership
from jaxunet.sampling.generator import Generator
from jaxunet.sampling.options import SamplerConfig
from jaxunet.sampling.picture import Picture
from jaxunet.training import noisy_classifier, step_fields
from jaxunet.training.parallel import Parallel
from jaxunet.training.step import make_train_step

ROOT = pathlib.Path(__file__).parents[2]
STEP = (  # the modules whose code is traced
    'model/unet.py',
    'diffusion/process.py',
    'diffusion/weighting.py',
    'diffusion/timesteps.py',
    'diffusion/timestep_policy.py',
    'data/order.py',
    'training/batch.py',
    'training/step.py',
    'training/all_reduce.py',
    'training/ema.py',
    'training/update.py',
    'checkpoint/state.py',
    'checkpoint/optimizer.py',
    'checkpoint/recent_norms.py',
    'training/parallel.py',
)


COMPILED = {}  # steps by how they are spread


class Maker:
    """Builds steps, counts them, and asks for kept ones."""

    def __init__(self, config):
        self.config, self.kernels, self.built = config, choose('xla'), 0
        self.parallel = Parallel(config, self.kernels)
        images, labels = pipeline.load_all(
            open_source('digits:', image_shape=(8, 8, 1)), progress=False
        )
        self.data = self.parallel.replicate({'images': images, 'labels': labels})
        self.model, self.optimizer = build_unet(config, self.kernels.ops), make_optimizer(config)
        self.state = fresh_state(config)

    def build(self):
        """Compiles only the first step of each kind: the others stand for compiling again."""
        self.built += 1
        c = self.config
        if c.parallel in COMPILED:
            return COMPILED[c.parallel]
        make = lambda axis: make_train_step(  # noqa: E731
            c, self.model, make_diffusion(c.diffusion), self.optimizer, self.kernels, axis_name=axis
        )
        COMPILED[c.parallel] = self.parallel.lower(
            make, self.parallel.replicate(self.state), self.data
        ).compile()
        return COMPILED[c.parallel]

    def get(self, **changes):
        config = self.config.replace(**changes)
        return executables.compiled(
            self.build,
            step_fields.relevant(config),
            (self.parallel.replicate(self.state), self.data),
            self.parallel.devices,
            {},
        )

    def losses(self, step):
        state, out = self.parallel.replicate(self.state), []
        for _ in range(3):
            state, metrics = step(state, self.data)
            out.append(float(self.parallel.local(metrics)['step_loss']))
        return out, self.parallel.fetch(state)


@pytest.fixture
def cache(cache_settings, tmp_path, monkeypatch):
    # A program from JAX's own cache cannot be kept again on a CPU: its functions are lost.
    jax.config.update('jax_enable_compilation_cache', False)
    compilation_cache.reset_cache()
    monkeypatch.setattr(executables, 'folder', lambda: tmp_path / 'steps')
    yield tmp_path / 'steps'
    compilation_cache.reset_cache()


@pytest.mark.parametrize(
    ('mode', 'devices'),
    [('jit', 1), *(pytest.param(m, 2, marks=pytest.mark.long) for m in ('jit', 'pmap'))],
)
def test_a_kept_step_is_loaded_and_gives_the_same(mode, devices, cache):
    maker = Maker(tiny_config(parallel={'mode': mode, 'devices': devices}))
    losses, state = maker.losses(maker.get())
    (file,) = cache.glob('*.step')
    again, other = maker.losses(maker.get())
    assert maker.built == 1
    assert losses == again
    assert jax.tree.structure(state) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)
    maker.get(optimizer={'learning_rate': 0.5})
    assert file.exists()
    assert (maker.built, len(list(cache.glob('*.step')))) == (2, 2)


def test_a_step_is_kept_under_all_that_it_is_made_from():
    """A field that is left out of the digest is one that no module of the step reads."""
    outside = [path for path, facts in FACTS.items() if facts.outside_step]
    assert len(outside) > 20
    raw = to_dict(Config())
    for path in outside:
        reads = re.compile(rf'\b{path if "." in path else f"config.{path}"}\b')
        for module in STEP:
            assert not reads.search((ROOT / 'jaxunet' / module).read_text()), (module, path)
    kept = step_fields.relevant(Config())
    assert kept['train'].keys() == {'steps', 'log_every', 'spike_sigmas'}
    assert kept['optimizer'] == raw['optimizer']


@pytest.mark.parametrize('draw', [draw_state, noisy_classifier.draw_state])
def test_a_state_is_drawn_from_all_that_enters_it(draw):
    """Runs that differ in other fields have the same program for it."""
    entering = tiny_config(
        model={
            'base_channels': 32,
            'channel_mult': (1, 2),
            'num_head_channels': 64,
            'norm_groups': 32,
        },
        timesteps={'sampler': 'adaptive'},
        loss={'weighting': 'uncertainty'},
        train={'spike_sigmas': 4.0},
        seed=3,
    )
    config = entering.replace(
        backend='pallas',
        init_from='a.pt',
        parallel={'mode': 'pmap', 'devices': 2},
        data={'path': 'images', 'batch_size': 4, 'augment': 'flip', 'holdout': 5, 'crop': 'random'},
        optimizer={'clip_norm': 0.0, 'weight_decay': 0.1, 'warmup_steps': 0, 'schedule': 'linear'},
        train={'steps': 50, 'log_every': 5, 'evaluate_every': 5},
        evaluation={'samples': 7},
    )
    programs = [
        str(jax.make_jaxpr(draw, static_argnums=0)(each))
        for each in (config, state_config(config), state_config(entering))
    ]
    assert programs[0] == programs[1] == programs[2]


def test_a_damaged_file_costs_a_warning_and_is_replaced(cache, caplog):
    maker = Maker(tiny_config(parallel={'devices': 1}))
    expected, _ = maker.losses(maker.get())
    (file,) = cache.glob('*.step')
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 3])
    with caplog.at_level(logging.WARNING):
        losses, _ = maker.losses(maker.get())
    assert 'cannot be loaded' in caplog.text
    assert maker.built == 2
    assert losses == expected
    assert len(file.read_bytes()) > len(whole) // 2


def test_a_full_disk_costs_a_warning_and_leaves_nothing(cache, caplog, monkeypatch):
    monkeypatch.setattr(executables.serialize_executable, 'serialize', lambda _: (b'x' * 99, 0, 0))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        executables.save(cache / 'a.sampler', None, result=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert 'a.sampler: the compiled sampler cannot be kept (OSError: ' in caplog.text
    assert list(cache.iterdir()) == []


def test_a_kept_file_is_of_its_user_alone(cache, monkeypatch):
    monkeypatch.setattr(executables.serialize_executable, 'serialize', lambda _: (b'x', 0, 0))
    before = os.umask(0o002)  # under which files are writable for the group
    try:
        executables.save(cache / 'a.sampler', None, result=0)
    finally:
        os.umask(before)
    assert (cache / 'a.sampler').stat().st_mode & 0o777 == 0o600


def test_the_least_recently_used_files_go(cache, monkeypatch):
    monkeypatch.setattr(executables, 'KEPT', 2)
    maker = Maker(tiny_config(parallel={'devices': 1}))
    step = maker.build()
    for name in 'abc':
        executables.save(cache / f'{name}.step', step)
    assert sorted(p.name for p in cache.iterdir()) == ['b.step', 'c.step']


def generator(config, **changes):
    options = {'name': 'ddim', 'steps': 2} | changes
    picture = options.pop('picture', None)
    return Generator(
        config, SamplerConfig(**options), batch_size=2, devices=jax.devices()[:1], picture=picture
    )


def test_a_kept_sampler_is_loaded_and_draws_the_same(cache, monkeypatch):
    monkeypatch.setattr(executables, 'keeps', lambda devices, backends: True)
    config, indices = tiny_config(), np.arange(2)
    first = generator(config)
    params = first.put(fresh_state(config).params)
    images = first(params, seed=3, indices=indices)
    (file,) = cache.glob('*.sampler')
    again = generator(config)
    monkeypatch.setattr(again, '_segment', None)  # so that it cannot be compiled
    np.testing.assert_array_equal(again(params, seed=3, indices=indices), images)
    assert list(cache.iterdir()) == [file]


def test_a_sampler_is_kept_under_all_that_it_is_made_from():
    """Constants of its program are in the digest, but not the picture, which is an argument."""
    config = tiny_config()
    pixels = np.zeros(config.image_shape, np.uint8)
    mask = np.ones(config.image_shape[:2], bool)
    same = [generator(config, picture=Picture(pixels + i, strength=0.5)) for i in range(2)]
    assert same[0]._fields() == same[1]._fields()
    made = [
        *same[:1],
        generator(config),
        generator(config, steps=3),
        generator(config, eta=0.5),
        generator(config, name='ddpm'),
        generator(config, clip=False),
        generator(config.replace(diffusion={'schedule': 'cosine'})),
        generator(config, steps=10, picture=Picture(pixels, strength=0.9)),
        generator(config, steps=10, picture=Picture(pixels, mask, strength=0.9)),
    ]
    found = [each._fields() for each in made]
    assert all(a != b for a, b in itertools.combinations(found, 2))
    constants = [fields['constants'] for fields in found]
    assert len(set(constants)) == len(constants)


@pytest.mark.parametrize(
    ('platform', 'processes', 'backend', 'kept'),
    [
        ('gpu', 1, 'cuda', True),
        ('gpu', 1, 'mine', False),  # whose sources `key` does not have
        ('gpu', 2, 'cuda', False),
        ('cpu', 1, 'cuda', False),
    ],
)
def test_programs_are_kept_in_one_process_on_gpus(platform, processes, backend, kept, monkeypatch):
    monkeypatch.setattr(jax, 'process_count', lambda: processes)
    devices = [types.SimpleNamespace(platform=platform)]
    assert executables.keeps(devices, ('xla', backend)) == kept


def test_the_folder_is_that_of_the_compilation_cache(cache_settings, tmp_path):
    jax.config.update('jax_compilation_cache_dir', str(tmp_path))
    jax.config.update('jax_enable_compilation_cache', True)
    assert executables.folder() == tmp_path / 'jaxunet_steps'
    jax.config.update('jax_enable_compilation_cache', False)
    assert executables.folder() is None


def test_a_folder_that_others_can_write_to_is_not_used(cache, caplog):
    cache.mkdir()
    cache.chmod(0o777)
    (cache / 'made_by_others').write_bytes(b'')
    step = executables.compiled(lambda: 'built', {}, ({}, {}), [], {})
    assert step == 'built'
    assert [path.name for path in cache.iterdir()] == ['made_by_others']
    assert 'neither read nor kept there, as others can write to it (mode 0777)' in caplog.text


def test_a_file_that_others_can_write_to_is_not_read(cache, caplog):
    cache.mkdir(mode=0o700)
    file = cache / 'x.step'
    file.write_bytes(b'{"metrics": []}\ncode')
    file.chmod(0o620)
    assert executables.load(file, ({}, {}), []) is None
    assert 'cannot be loaded (PermissionError: others can write to it (mode 0620)' in caplog.text


def test_a_cache_that_cannot_be_made_is_not_enabled(cache_settings, tmp_path, monkeypatch, caplog):
    """As on a read-only disk, where JAX would warn of each program in several lines."""
    (tmp_path / 'file').touch()
    monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', str(tmp_path / 'file' / 'new'))
    executables.enable_compilation_cache()
    assert not jax.config.jax_enable_compilation_cache
    assert 'compiled programs are not kept: [Errno 20] Not a directory: ' in caplog.text


def test_a_cache_of_another_user_is_not_enabled(cache_settings, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', str(tmp_path / 'new'))
    executables.enable_compilation_cache()
    assert (tmp_path / 'new').stat().st_mode & 0o777 == 0o700
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / 'new')
    monkeypatch.setattr(ownership.os, 'geteuid', lambda: 12345)
    executables.enable_compilation_cache()
    assert not jax.config.jax_enable_compilation_cache
    assert 'it belongs to user' in caplog.text
    assert 'not to 12345' in caplog.text
