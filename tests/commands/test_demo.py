"""The page of the demo, drawn with a stub instead of a network; skips without Gradio."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import os
import pathlib
import subprocess
import sys
import warnings

import numpy as np
import pytest
from support.browser import dumped

from jaxunet.config import default_config, resolve
from jaxunet.runtime.errors import UserError
from jaxunet.sampling.demo_page import check_gradio, make_page

pytestmark = pytest.mark.filterwarnings('ignore')  # of Gradio and what it brings
gradio = pytest.mark.skipif(
    importlib.util.find_spec('gradio') is None, reason='needs Gradio (the extra demo)'
)


@pytest.fixture(autouse=True)
def collected():
    """Collects what Gradio leaves open while its warnings are ignored."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        with contextlib.suppress(RuntimeError):
            asyncio.get_event_loop_policy().get_event_loop().close()
        gc.collect()


class Stub:
    """Has what the page uses of `jaxunet.sampling.model.Model`, and keeps what it was asked."""

    def __init__(self, **changes):
        values = default_config()
        for path, value in changes.items():
            section, name = path.split('__')
            values[section][name] = value
        self.config, self.class_names, self.note = resolve(values), (), 'a stub'

    def sample(self, n, *, progress, **how):
        self.asked = how
        if how['seed'] == 13:
            raise UserError('seed: not this one')
        progress(1.0)
        return np.zeros((n, *self.config.image_shape), np.uint8)


def function(page, name):
    return next(f.fn for f in page.fns.values() if f.api_name == name)


@gradio
def test_the_fields_reach_the_model():
    model = Stub()
    page = make_page(model)
    images = function(page, 'draw')(3, 7, 0, 'usual', '2', 1.5, progress=lambda share: None)
    assert len(images) == 3
    assert images[0].shape == (8, 8)
    wanted = {'seed': 7, 'steps': None, 'sampler': None, 'guidance_scale': 1.5, 'class_labels': 2}
    assert model.asked == wanted
    function(page, 'draw')(1, 0, 5, 'ddim', 'every class in turn', 1, progress=lambda share: None)
    assert model.asked['steps'] == 5
    assert model.asked['sampler'] == 'ddim'
    assert model.asked['class_labels'] is None


@gradio
def test_paint_is_a_mask_and_no_paint_a_variation():
    model = Stub()
    edit = function(make_page(model), 'edit')
    background, layer = np.full((20, 20, 3), 9, np.uint8), np.zeros((20, 20, 4), np.uint8)
    picture = {'background': background, 'layers': [layer]}
    how = (1, 0, 0, 'usual', 'every class in turn', 1)
    edit(picture, 0.4, *how, progress=lambda share: None)
    assert model.asked['strength'] == 0.4
    assert model.asked['init_image'].shape == (20, 20)
    layer[3:5, 3:5, 3] = 255
    edit(picture, 0.4, *how, progress=lambda share: None)
    assert model.asked['mask'].sum() == 4
    assert 'strength' not in model.asked


@gradio
def test_mistakes_are_shown_in_the_page():
    import gradio as gr  # noqa: PLC0415

    page = make_page(Stub())
    with pytest.raises(gr.Error, match='seed: not this one'):
        function(page, 'draw')(1, 13, 0, 'usual', '2', 1, progress=lambda share: None)
    with pytest.raises(gr.Error, match='Put a picture'):
        function(page, 'edit')(None, 0.5, *[0] * 6, progress=lambda share: None)


@gradio
def test_models_that_the_page_cannot_show():
    with pytest.raises(UserError, match=r'model\.image_channels=4'):
        make_page(Stub(model__image_channels=4, train__sample_every=0))


# In a process of its own, as Gradio leaves sockets and event loops open.
SERVE = """
import sys
sys.path.insert(0, sys.argv[1])
from test_demo import Stub, make_page
page = make_page(Stub())
_, address, _ = page.launch(server_name='127.0.0.1', prevent_thread_lock=True, quiet=True)
print(address, flush=True)
sys.stdin.read()
"""


@gradio
def test_a_browser_shows_the_page():
    here = pathlib.Path(__file__).resolve().parent
    folders = [str(here.parents[1]), str(here.parent), os.environ.get('PYTHONPATH', '')]
    with subprocess.Popen(
        [sys.executable, '-c', SERVE, str(here)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {'PYTHONPATH': os.pathsep.join(folders)},
    ) as process:
        assert process.stdout is not None
        try:
            shown = dumped(process.stdout.readline().strip())
        finally:
            process.kill()
    for text in ('guidance', 'Edit a picture', 'every class in turn'):
        assert text in shown


def test_without_gradio_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(UserError, match='pip install "jaxunet\\[demo\\]"'):
        check_gradio()
