"""Draws with a model in a browser: samples, variations of a picture, and parts painted anew.

    python -m jaxunet.demo --checkpoint runs/photos [--port PORT]

Needs Gradio: `pip install "jaxunet[demo]"`. The page is served on this machine alone (127.0.0.1).
"""

from __future__ import annotations

import jaxunet.runtime.quiet  # isort: skip  # noqa: F401 (before slow imports)

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

from jaxunet.config import cli
from jaxunet.config.samplers import SAMPLERS
from jaxunet.runtime.errors import UserError, printable
from jaxunet.runtime.paths import of_user
from jaxunet.sampling.model import Model, load

CHECKPOINT = flags.DEFINE_string(
    'checkpoint', None, 'A workdir, a checkpoint in it or a weight file.', required=True
)
EMA = flags.DEFINE_string('ema', '', 'Average of the weights, as --ema of jaxunet.sample.')
PORT = flags.DEFINE_integer(
    'port', 7860, 'Port of the page; 0 = any that is free.', lower_bound=0, upper_bound=65535
)
of_user(CHECKPOINT)

MOST = 64  # images at a time
USUAL, EVERY = 'usual', 'every class in turn'


def main(argv: Sequence[str]) -> None:
    """Serves the page until Ctrl-C."""
    del argv
    check_gradio()
    cli.enable_compilation_cache()
    page = make_page(load(CHECKPOINT.value, ema=EMA.value))
    try:
        page.launch(server_name='127.0.0.1', server_port=PORT.value, inbrowser=False, share=False)
    except OSError as error:
        raise UserError(f'--port: {PORT.value}: {error}; choose another, or 0') from None


def check_gradio() -> None:
    """Raises UserError if Gradio is missing. Turns off its reports to its makers."""
    os.environ.setdefault('GRADIO_ANALYTICS_ENABLED', 'False')
    if importlib.util.find_spec('gradio') is None:
        raise UserError('jaxunet.demo needs Gradio: pip install "jaxunet[demo]"')


def make_page(model: Model) -> Any:
    """Returns Gradio's page of a model (`gradio.Blocks`).

    Raises:
      UserError: the model needs pictures to enlarge, or its images are neither grey nor RGB.
    """
    import gradio as gr  # noqa: PLC0415 (an extra)

    height, width, channels = model.config.image_shape
    if model.config.low_res_shape is not None or channels not in (1, 3):
        raise UserError(
            'expected a model of grey or RGB images that draws from noise, found '
            f'model.image_channels={channels}, model.low_res_size={model.config.model.low_res_size}'
        )
    classes = model.config.model.num_classes
    names = [printable(name) for name in model.class_names] or [str(i) for i in range(classes)]

    def draw(progress: Any, how: Sequence[Any], **picture: Any) -> list[np.ndarray]:
        count, seed, steps, sampler, label, scale = how
        chosen = {} if label in (None, EVERY) else {'class_labels': names.index(label)}
        try:
            images = model.sample(
                int(count),
                seed=int(seed),
                steps=int(steps) or None,
                sampler=None if sampler == USUAL else sampler,
                guidance_scale=float(scale),
                progress=progress,
                **chosen,
                **picture,
            )
        except UserError as error:
            raise gr.Error(str(error), print_exception=False) from None
        return [image[..., 0] if channels == 1 else image for image in images]

    # Gradio hands a progress bar to functions that have one as their default.
    def samples(*how: Any, progress: Any = gr.Progress()) -> list[np.ndarray]:  # noqa: B008
        return draw(progress, how)

    def edited(
        picture: dict[str, Any] | None,
        strength: float,
        *how: Any,
        progress: Any = gr.Progress(),  # noqa: B008
    ) -> list[np.ndarray]:
        if picture is None or picture['background'] is None:
            raise gr.Error('Put a picture into the field first.', print_exception=False)
        image = picture['background']
        painted = [layer[..., 3] > 0 for layer in picture['layers']]
        mask = np.any(painted, axis=0) if painted else np.zeros(image.shape[:2], bool)
        more = {'mask': mask} if mask.any() else {'strength': float(strength)}
        pixels = image[..., :3] if channels == 3 else image[..., :3].mean(-1).astype(np.uint8)
        return draw(progress, how, init_image=pixels, **more)

    with gr.Blocks(title='jaxunet', analytics_enabled=False) as page:
        gr.Markdown(f'### jaxunet\n{printable(model.note)}; {height}x{width}x{channels}')
        with gr.Row():
            how = [
                gr.Slider(1, MOST, 16, step=1, label='images'),
                gr.Number(0, label='seed', minimum=0, maximum=2**32 - 1, precision=0),
                gr.Slider(0, 250, 0, step=1, label='steps (0 = usual)'),
                gr.Dropdown([USUAL, *SAMPLERS], value=USUAL, label='sampler'),
                gr.Dropdown([EVERY, *names], value=EVERY, label='class', visible=bool(classes)),
                gr.Slider(0, 8, 1, step=0.1, label='guidance', visible=bool(classes)),
            ]
        with gr.Tab('Draw'):
            button = gr.Button('Draw', variant='primary')
            button.click(samples, how, gr.Gallery(label='samples', columns=8), api_name='draw')
        with gr.Tab('Edit a picture'):
            gr.Markdown('Paint what to draw anew. Without paint, the whole picture is varied.')
            picture = gr.ImageEditor(type='numpy', label='picture', transforms=('crop',))
            strength = gr.Slider(0.05, 1, 0.6, step=0.05, label='strength of the variation')
            button = gr.Button('Draw', variant='primary')
            gallery = gr.Gallery(label='pictures', columns=8)
            button.click(edited, [picture, strength, *how], gallery, api_name='edit')
    return page


if __name__ == '__main__':
    cli.run(main)
