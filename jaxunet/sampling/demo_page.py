"""The page of `jaxunet.demo`, made with Gradio."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxunet.config.samplers import CONSISTENCY_LEVELS, samplers_of
from jaxunet.runtime.errors import UserError, printable
from jaxunet.sampling.model import Model

MOST = 64  # images at a time
USUAL, EVERY = 'usual', 'every class in turn'


def check_gradio() -> None:
    """Raises UserError if Gradio is missing. Turns off its reports to its makers."""
    os.environ.setdefault('GRADIO_ANALYTICS_ENABLED', 'False')
    if importlib.util.find_spec('gradio') is None:
        raise UserError('jaxunet.demo needs Gradio: pip install "jaxunet[demo]"')


def class_names(model: Model) -> list[str]:
    """Returns the names of a model's classes as the page shows them; [] if it has none."""
    classes = model.config.model.num_classes
    return [printable(name) for name in model.class_names] or [str(i) for i in range(classes)]


def _drawing(model: Model) -> Callable[..., list[np.ndarray]]:
    """Returns a function that draws with the values of the page's fields."""
    import gradio as gr  # noqa: PLC0415 (an extra)

    names, grey = class_names(model), model.config.image_shape[2] == 1

    def draw(progress: Any, how: Sequence[Any], **picture: Any) -> list[np.ndarray]:
        count, seed, steps, sampler, label, scale = how
        chosen = None if label in (None, EVERY) else names.index(label)
        try:
            images = model.sample(
                int(count),
                seed=int(seed),
                steps=int(steps) or None,
                sampler=None if sampler == USUAL else sampler,
                guidance_scale=float(scale),
                progress=progress,
                class_labels=chosen,
                **picture,
            )
        except UserError as error:
            raise gr.Error(str(error), print_exception=False) from None
        return [image[..., 0] if grey else image for image in images]

    return draw


def make_page(model: Model) -> Any:
    """Returns Gradio's page of a model (`gradio.Blocks`).

    Raises:
      UserError: the model needs pictures to enlarge, or its images are neither grey nor RGB.
    """
    import gradio as gr  # noqa: PLC0415 (an extra)

    height, width, channels = model.config.image_shape
    low_res, bits = model.config.model.low_res_size, model.config.data.bits
    if low_res or channels not in (1, 3) or bits != 8:
        raise UserError(
            'expected a model of grey or RGB images of 8 bits that draws from noise, found '
            f'model.image_channels={channels}, model.low_res_size={low_res}, data.bits={bits}'
        )
    names, objective = class_names(model), model.config.diffusion.objective
    most = max(CONSISTENCY_LEVELS) if objective == 'consistency' else 250
    draw = _drawing(model)

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
                gr.Slider(0, most, 0, step=1, label='steps (0 = usual)'),
                gr.Dropdown([USUAL, *samplers_of(objective)], value=USUAL, label='sampler'),
                gr.Dropdown([EVERY, *names], value=EVERY, label='class', visible=bool(names)),
                gr.Slider(0, 8, 1, step=0.1, label='guidance', visible=bool(names)),
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
