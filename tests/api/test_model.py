"""`jaxunet.load`, `Model` and `jaxunet.evaluate` from Python."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from support.commands import ROOT
from support.tiny import tiny_config
from support.untrained_features import write_untrained

import jaxunet
from jaxunet import api
from jaxunet.checkpoint.load import Model as Weights
from jaxunet.checkpoint.state import fresh_state
from jaxunet.data.sources import open_source
from jaxunet.sampling.arguments import as_whole
from jaxunet.sampling.model import Model

QUICK = {'steps': 2, 'progress': False}


@pytest.fixture(scope='module')
def model():
    config = tiny_config(
        model={'num_classes': 3, 'label_dropout': 0.1}, evaluation={'samples': 12, 'steps': 2}
    )
    params = jax.tree.map(np.asarray, fresh_state(config).params)
    # The last layer starts at 0, which would hide every input.
    noisy = jax.tree.map(
        lambda x: x + np.random.default_rng(0).normal(0, 0.1, x.shape).astype(np.float32), params
    )
    return Model(Weights(config, noisy, None, 'fresh', ('ape', 'bee', 'cat')), config)


def test_samples_depend_on_the_seed_the_place_and_the_class(model):
    images = model.sample(5, seed=1, **QUICK)
    assert (images.shape, images.dtype) == ((5, 8, 8, 1), np.uint8)
    np.testing.assert_array_equal(model.sample(3, seed=1, batch_size=8, **QUICK), images[:3])
    assert (model.sample(3, seed=2, **QUICK) != images[:3]).any()
    named = model.sample(5, seed=1, class_labels=['ape', 1, 'cat'], **QUICK)
    np.testing.assert_array_equal(named, images)  # as every class in turn
    assert (model.sample(5, seed=1, class_labels='cat', **QUICK)[:2] != images[:2]).any()
    guided = model.sample(5, seed=1, guidance_scale=3, **QUICK)
    assert (guided != images).any()


def test_a_weaker_model_guides(model):
    """Guided by itself, a model draws what it draws alone; by another, it moves away from it."""
    alone = model.sample(3, seed=1, sampler='ddim', **QUICK)
    options = {'seed': 1, 'sampler': 'ddim', 'guidance_scale': 3, **QUICK}
    same = model.sample(3, guide=model, **options)
    np.testing.assert_allclose(same.astype(int), alone, atol=1)
    config = model.config.replace(model={'base_channels': 64, 'num_classes': 0})
    params = jax.tree.map(lambda x: np.asarray(x) + 0.1, fresh_state(config).params)
    weaker = Model(Weights(config, params, None, 'fresh', ()), config)
    everywhere = model.sample(3, guide=weaker, **options)
    assert (everywhere != alone).any()
    within = model.sample(3, guide=weaker, guidance_range=(1e-3, 1.0), **options)
    assert (within != alone).any()
    assert (within != everywhere).any()


def test_a_sampler_is_compiled_once(model, monkeypatch):
    model.sample(4, **QUICK)
    monkeypatch.setattr(jax, 'jit', None)
    model.sample(4, seed=9, **QUICK)


def test_a_folder_for_diffusers(model, tmp_path):
    path = f'{tmp_path}/folder/'
    model.save(path, license='mit')
    again = jaxunet.load(path)
    assert again.class_names == ('ape', 'bee', 'cat')
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    assert 'mit' in (tmp_path / 'folder' / 'README.md').read_text()
    model.save(tmp_path / 'other', format='diffusers')
    assert (tmp_path / 'other' / 'model_index.json').exists()
    for options, message in (
        ({'license': 'mit'}, 'license: only a folder'),
        ({'license': 3}, 'license: expected a text, found 3'),
        ({'format': 'onnx'}, "format: expected diffusers, found 'onnx'"),
    ):
        with pytest.raises(jaxunet.UserError, match=message):
            model.save(tmp_path / 'a.safetensors', **options)


def test_progress_is_a_function_of_the_share_drawn(model):
    shares = []
    model.sample(4, batch_size=4, steps=2, progress=shares.append)
    assert shares == [0.5, 1.0]

    def stop(share):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.sample(4, batch_size=4, steps=2, progress=stop)


def test_a_picture_may_be_an_array_or_a_path(model, tmp_path):
    picture = open_source('digits:', image_shape=(8, 8, 1)).load(np.arange(1))[0]
    redraw = np.zeros((8, 8), bool)
    redraw[:, 4:] = True
    images = model.sample(2, init_image=picture, mask=redraw, **QUICK)
    np.testing.assert_array_equal(images[:, :, :4], np.stack([picture[:, :4]] * 2))
    Image.fromarray(picture[..., 0]).save(tmp_path / 'a.png')
    Image.fromarray(redraw).save(tmp_path / 'mask.png')
    paths = {'init_image': tmp_path / 'a.png', 'mask': tmp_path / 'mask.png'}
    np.testing.assert_array_equal(model.sample(2, **paths, **QUICK), images)


def test_the_network_is_a_function_of_its_parameters(model):
    x = jnp.ones((2, 8, 8, 1))
    both = model.predict(x, 3, np.array([0, 1]))
    np.testing.assert_allclose(both[:1], model.predict(x[:1], 3, np.array([0])), atol=1e-5)
    assert (np.asarray(both[0]) != np.asarray(both[1])).any()

    def loss(params):
        return (model.predict(x, 3, params=params) ** 2).mean()

    gradients = jax.jit(jax.grad(loss))(model.params)
    assert jax.tree.structure(gradients) == jax.tree.structure(model.params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    for other in (x[0], x[..., :0]):
        with pytest.raises(jaxunet.UserError, match=r'^x: expected shape \(n, height, width, 1\)'):
            model.predict(other, 3)


def test_a_saved_model_draws_the_same(model, tmp_path):
    path = tmp_path / 'model.safetensors'
    model.save(path)
    loaded = jaxunet.load(path)
    assert loaded.class_names == model.class_names
    np.testing.assert_array_equal(loaded.sample(2, **QUICK), model.sample(2, **QUICK))
    with pytest.raises(jaxunet.UserError, match='tiff'):
        model.save(tmp_path / 'model.tiff')


@pytest.mark.parametrize(
    ('options', 'error'),
    [
        ({'n': 0}, 'n: expected 1 or more, found 0'),
        ({'n': 2.0}, 'n: expected 1 or more, found 2.0'),
        ({'seed': None}, 'seed: expected 0 or more, found None'),
        ({'class_labels': 'dog'}, "found 'dog'"),
        ({'class_labels': []}, 'class_labels: expected labels or names, found none'),
        ({'sampler': 'dim'}, 'sampler: expected one of'),
        ({'sampler': 3}, 'sampler: expected a text, found 3'),
        (
            {'init_image': np.zeros((8, 8)), 'strength': 'a'},
            "strength: expected a number, found 'a'",
        ),
        ({'etta': 0.5}, 'etta: unknown option; did you mean "eta"'),
        ({'eta': 'high'}, "eta: expected a number, found 'high'"),
        ({'churn': True}, 'churn: expected a number, found True'),
        ({'lower_order_below': 2.5}, 'lower_order_below: expected a whole number, found 2.5'),
        ({'clip': 'no'}, "clip: expected True or False, found 'no'"),
        ({'levels': 3}, 'levels: expected a tuple of numbers, found 3'),
        ({'levels': [[1], [2, 3]]}, 'levels: expected a tuple of numbers, found [[1], [2, 3]]'),
        ({'guidance_range': (1, 2, 3)}, 'guidance_range: expected a tuple of 2 numbers, found (1'),
        ({'timesteps': (0, 1.5)}, 'timesteps: expected a tuple of whole numbers, found (0, 1.5)'),
        ({'progress': 'a'}, "progress: expected True or False or a function, found 'a'"),
        ({'progress': 1}, 'progress: expected True or False or a function, found 1'),
        ({'mask': np.ones((8, 8))}, 'mask: needs init_image'),
        ({'init_image': 'a\0b'}, r'a path has the character NUL (\0) in it'),
        ({'init_image': np.zeros((8, 8)), 'mask': np.zeros((4, 4))}, 'mask: expected the size'),
        ({'init_image': np.zeros((8, 8)), 'mask': np.zeros((8, 8))}, 'mask: nothing to redraw'),
        ({'low_res': np.zeros((1, 4, 4))}, 'low_res, condition: the model draws from noise alone'),
        ({'init_image': np.full((8, 8), 9.0)}, 'of the set, or scale the values'),
        ({'guide': 'runs/weak'}, "guide: expected a model, as of jaxunet.load(PATH), found 'runs"),
        ({'seed': -1}, 'seed'),
    ],
)
def test_options_that_do_not_fit_are_errors(options, error, model):
    with pytest.raises(jaxunet.UserError, match=re.escape(error)):
        model.sample(**{'n': 2, 'steps': 2, 'progress': False} | options)


@pytest.mark.parametrize('two', [2, np.int64(2), np.array(2), jnp.int32(2)], ids=repr)
def test_whole_numbers_of_numpy_and_jax_are_numbers(two):
    """Called by itself, as the types of `sample` are checked in tests."""
    found = as_whole('n', two, 1)
    assert (found, type(found)) == (2, int)


def test_lists_and_arrays_are_tuples(model):
    same = model.sample(2, sampler='ddim', timesteps=(0, 20), progress=False)
    for timesteps in ([0, 20], np.array([0, 20])):
        drawn = model.sample(2, sampler='ddim', timesteps=timesteps, progress=False)
        np.testing.assert_array_equal(drawn, same)


def test_files_that_do_not_fit_are_errors(tmp_path):
    with pytest.raises(jaxunet.UserError, match='no such file or folder'):
        jaxunet.load(tmp_path / 'nowhere.pt')
    with pytest.raises(jaxunet.UserError, match='image_sise: unknown option'):
        jaxunet.load(tmp_path, image_sise=64)
    with pytest.raises(jaxunet.UserError, match='preset: expected one of'):
        jaxunet.load(tmp_path, preset='adm')


@pytest.mark.parametrize(
    ('options', 'error'),
    [
        ({'ema': 0.999}, 'ema: expected a text, found 0.999'),
        (
            {'new_attention_order': 'old'},
            "new_attention_order: expected True or False, found 'old'",
        ),
        ({'rescale_timesteps': 'no'}, "rescale_timesteps: expected True or False, found 'no'"),
        ({'diffusion_steps': '100'}, "diffusion_steps: expected a whole number, found '100'"),
        ({'image_size': 'big'}, "image_size: expected a tuple of whole numbers, found 'big'"),
        ({'config': 'digits'}, "config: expected a jaxunet.config.Config, found 'digits'"),
    ],
)
def test_what_a_file_leaves_open_has_types(options, error, tmp_path):
    with pytest.raises(jaxunet.UserError, match=re.escape(error)):
        jaxunet.load(tmp_path / 'a.pt', **options)


def test_what_is_no_path_is_an_error(model, tmp_path):
    for call in (jaxunet.load, model.save):
        with pytest.raises(jaxunet.UserError, match=r'^path: expected a path, .* found None$'):
            call(None)
        with pytest.raises(jaxunet.UserError, match=r"^path: .* found 'a.x00b', with a NUL in it$"):
            call('a\0b')
    network = str(write_untrained(tmp_path))
    for sides in (('a\0b', 'digits:'), ('digits:', 'a\0b')):
        with pytest.raises(jaxunet.UserError, match='no such file or folder'):
            jaxunet.evaluate(*sides, features=network)
    with pytest.raises(jaxunet.UserError, match=r'^model: expected a Model, .* found None$'):
        jaxunet.evaluate(None)
    with pytest.raises(jaxunet.UserError, match=r'^metrics: expected some of fid, .* found none$'):
        jaxunet.evaluate('digits:', 'digits:', None)
    with pytest.raises(jaxunet.UserError, match=r'^metrics: expected names .* found 3$'):
        jaxunet.evaluate('digits:', 'digits:', 3)
    with pytest.raises(jaxunet.UserError, match=r'^features: expected the name .* type int$'):
        jaxunet.evaluate('digits:', 'digits:', features=3)
    with pytest.raises(jaxunet.UserError, match=r"^seed: expected 0 or more, found 'a'$"):
        jaxunet.evaluate('digits:', 'digits:', features='inception', seed='a')


def test_a_model_and_images_are_measured(model, tmp_path):
    features = write_untrained(tmp_path)
    real = open_source('digits:', image_shape=(8, 8, 1)).load(np.arange(20))
    found = jaxunet.evaluate(model, real, ('fid', 'kid'), features=features)
    again = jaxunet.evaluate(
        model, real, ('fid', 'kid'), features=features, num_samples=np.int64(6)
    )
    assert found.keys() == again.keys()
    assert found != again
    same = jaxunet.evaluate(real, real, 'fid', features=features)
    assert abs(next(iter(same.values()))) < 1e-3
    with pytest.raises(jaxunet.UserError, match='reference: missing; needed by fid'):
        jaxunet.evaluate(real, features=features)


def test_importing_is_quick_and_starts_nothing():
    code = (
        'import signal, sys, time; began = time.perf_counter(); import jaxunet; '
        'print(time.perf_counter() - began, signal.getsignal(signal.SIGINT) is '
        "signal.default_int_handler, 'jax' in sys.modules, 'flax' in sys.modules, "
        "'numpy' in sys.modules, 'load' in dir(jaxunet))"
    )
    found = subprocess.run(
        [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    seconds, *others = found.stdout.split()
    assert float(seconds) < 0.3
    assert others == ['True', 'False', 'False', 'False', 'True']


def test_ctrl_c_while_importing_leaves_nothing_half_imported(monkeypatch):
    """The import goes on in its thread, as Python could not import the rest of JAX later."""
    imported, whole = importlib.import_module, threading.Event()

    def interrupted(name):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        imported(name)
        whole.set()

    monkeypatch.delattr(jaxunet, 'api')
    monkeypatch.setattr(importlib, 'import_module', interrupted)
    with pytest.raises(KeyboardInterrupt):
        _ = jaxunet.train
    assert whole.wait(60)


def test_the_names_of_commands_are_functions_too():
    """Also once the module of the command was imported, as by `python -m jaxunet.train`."""
    code = (
        'import jaxunet; import jaxunet.evaluate\n'
        'try: jaxunet.evaluate(3, metrics=())\n'
        'except jaxunet.UserError as error: print(error)'
    )
    found = subprocess.run(
        [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.startswith('metrics: expected some of fid')
    assert jaxunet.__all__ == api.__all__
    with pytest.raises(AttributeError, match='no attribute'):
        _ = jaxunet.trian


EXITS = {('os', '_exit'), ('sys', 'exit'), ('sys', 'argv'), ('signal', 'signal')}
COMMANDS = {  # only commands import them
    'train.py',
    'sample.py',
    'export.py',
    'prepare_data.py',
    'config/cli.py',
    'runtime/command.py',
    'runtime/subprocesses.py',
}
COMMAND_ROOMS = {'compare', 'sweep', 'benchmark', 'profile', 'evaluate'}
# Functions that commands call, or processes of their own.
FUNCTIONS = {
    'runtime/interrupt.py',
    'runtime/distributed.py',
    'data/pipeline.py',
}


def test_a_library_raises():
    """Nothing below the commands ends the process, reads its arguments or handles its signals."""
    package = pathlib.Path(inspect.getfile(jaxunet)).parent
    found = set()
    for path in sorted(package.rglob('*.py')):
        name = str(path.relative_to(package))
        if name in COMMANDS | FUNCTIONS or path.name == '__main__.py':
            continue
        if name.split('/', maxsplit=1)[0] in COMMAND_ROOMS:
            continue
        for node in ast.walk(ast.parse(path.read_text('utf-8'))):
            if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
                continue
            if (node.value.id, node.attr) in EXITS:
                found.add(f'{name}:{node.lineno}')
    assert not found
