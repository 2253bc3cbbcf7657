"""The model card of a folder of diffusers: README.md, as the Hugging Face hub shows it."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Sequence

from jaxunet.config import Config
from jaxunet.runtime.errors import listed, printable
from jaxunet.runtime.paths import shown_path
from jaxunet.weights.diffusers import label_rows
from jaxunet.weights.names import parameter_shapes

NO_LICENSE = 'unknown'
PACKAGE = 'jaxunet'
FOLDER = 'FOLDER'  # stands for the folder or its name on the hub


def model_card(
    config: Config,
    *,
    license_name: str = '',
    step: int | None = None,
    class_names: Sequence[str] = (),
    metrics: Sequence[str] = (),
) -> str:
    """Returns the text of a model card.

    Args:
      license_name: the licence as the hub names it, such as mit; '' = not stated.
      step: optimizer steps of training; None = not known.
      class_names: names of the labels 0, 1, ...
      metrics: measured values, a line each.
    """
    # Their class is an argument of one pipeline only.
    loops = config.model.num_classes > 0 and config.diffusion.objective != 'consistency'
    header = {
        'license': license_name or NO_LICENSE,
        'library_name': 'diffusers',
        'pipeline_tag': 'unconditional-image-generation',
        'tags': [PACKAGE, 'diffusion', 'pytorch', 'jax'],
    }
    parts = [
        '---\n'
        + ''.join(f'{name}: {json.dumps(value)}\n' for name, value in header.items())
        + '---',
        f'# A diffusion model of {"x".join(map(str, config.image_shape[:2]))} images',
        _list(_facts(config, step, class_names)),
        '## Metrics\n\n' + (_list(metrics) if metrics else 'Not measured.'),
        f'## Use in jaxunet\n\n{_code(_own_use(config))}',
        f'## Use in diffusers\n\n{_code(_loop(config) if loops else _pipeline(config))}',
        _agreement(config),
        f'## Licence\n\n{license_name or "Not stated."}',
    ]
    return '\n\n'.join(parts) + '\n'


def _list(lines: Sequence[str]) -> str:
    return '\n'.join(f'- {line}' for line in lines)


def _code(text: str) -> str:
    return f'```python\n{text}\n```'


def _facts(config: Config, step: int | None, class_names: Sequence[str]) -> list[str]:
    """Returns the lines on data, network and training."""
    diffusion, optimizer = config.diffusion, config.optimizer
    name = printable(pathlib.PurePath(shown_path(config.data.path)).name)
    count = sum(math.prod(shape) for shape in parameter_shapes(config).values())
    process = diffusion.objective
    if not diffusion.continuous:
        process += f', {diffusion.schedule} schedule of {diffusion.steps:,} timesteps'
    if diffusion.learn_sigma:
        process += ', learned variance'
    lines = [
        f'Data: {name or "not stated"}, {_pixels(config)}, augmentation {config.data.augment}',
        f'Network: UNet of {count:,} parameters',
        f'Prediction: {process}',
    ]
    if config.model.num_classes:
        names = f': {listed(list(map(printable, class_names)))}' if class_names else ''
        lines.append(f'Classes: {config.model.num_classes}{names}')
    if step is not None:
        rate, weighting = optimizer.learning_rate, config.loss.weighting
        lines.append(
            f'Training: {step:,} steps of {config.data.batch_size} images, {optimizer.name} with a '
            f'learning rate of {rate:g}, {weighting} loss weights, {config.precision}'
        )
    return lines


def _pixels(config: Config) -> str:
    """Returns what the channels of an image are, and the values that they stand for."""
    data, text = config.data, f'{config.image_shape[2]} channels'
    if data.background == 'keep':
        text = 'RGBA whose colours are multiplied by their opacity (divide them to save a PNG)'
    if data.bits > 8 or data.range:
        low, high = data.range or (0, 2**data.bits - 1)
        text += f' of {data.bits} bits, whose outputs -1 to 1 stand for {low:g} to {high:g}'
    return text


def _own_use(config: Config) -> str:
    chosen = ', class_labels=0' if config.model.num_classes else ''
    return (
        f"import {PACKAGE}\n\nmodel = {PACKAGE}.load('{FOLDER}')\nimages = model.sample(16{chosen})"
    )


def pipeline_of(config: Config) -> str:
    """Returns the name of the pipeline of diffusers that draws from a model."""
    jumps = config.diffusion.objective == 'consistency'
    return 'ConsistencyModelPipeline' if jumps else 'DDPMPipeline'


def _pipeline(config: Config) -> str:
    """Returns the code that draws from a model whose pipeline takes its classes."""
    if config.diffusion.continuous or config.diffusion.learn_sigma:
        kind, options = pipeline_of(config), ''
        if config.diffusion.objective == 'consistency':
            options = 'num_inference_steps=2' + ', class_labels=0' * bool(config.model.num_classes)
        elif config.diffusion.continuous:
            options = 'num_inference_steps=50'
        return (
            f'from diffusers import {kind}\n\n'
            f"pipeline = {kind}.from_pretrained('{FOLDER}')\n"
            f'image = pipeline({options}).images[0]'
        )
    return (
        'from diffusers import DDIMPipeline, DDPMPipeline\n\n'
        f"pipeline = DDIMPipeline.from_pretrained('{FOLDER}')\n"
        'image = pipeline(num_inference_steps=50, use_clipped_model_output=True).images[0]\n\n'
        '# In all timesteps:\n'
        f"image = DDPMPipeline.from_pretrained('{FOLDER}')().images[0]"
    )


def _loop(config: Config) -> str:
    """Returns the code that draws from a class-conditional model, which no pipeline does."""
    height, width, channels = config.image_shape
    kind, options = 'DDIMScheduler', ', use_clipped_model_output=True'
    if config.diffusion.continuous:
        kind, options = 'FlowMatchEulerDiscreteScheduler', ''
    elif config.diffusion.learn_sigma:
        kind, options = 'DDPMScheduler', ''
    none = config.model.num_classes
    guided = label_rows(config) > none
    call = 'output = unet(x, t, class_labels=labels).sample'
    if guided:
        call += (
            f'\n        # Guidance of scale s, as label {none} is no class:\n'
            f'        # plain = unet(x, t, class_labels=torch.full_like(labels, {none})).sample\n'
            '        # output = plain + s * (output - plain)'
        )
    return (
        f'import torch\nfrom diffusers import {kind}, UNet2DModel\n\n'
        f"unet = UNet2DModel.from_pretrained('{FOLDER}', subfolder='unet')\n"
        f"scheduler = {kind}.from_pretrained('{FOLDER}', subfolder='scheduler')\n"
        'scheduler.set_timesteps(50)\n'
        'labels = torch.tensor([0])\n'
        f'x = torch.randn(1, {channels}, {height}, {width})\n'
        'with torch.no_grad():\n'
        '    for t in scheduler.timesteps:\n'
        f'        {call}\n'
        f'        x = scheduler.step(output, t, x{options}).prev_sample\n'
        'pixels = (x / 2 + 0.5).clamp(0, 1)'
    )


def _agreement(config: Config) -> str:
    """Returns what makes both libraries draw the same images from the same noise."""
    if config.diffusion.objective == 'consistency':
        return (
            "From the same noise, one or two steps draw the images of jaxunet's sampler "
            '`consistency`. Other numbers of steps visit other noise levels.'
        )
    if config.diffusion.continuous:
        return (
            "From the same noise, `FlowMatchEulerDiscreteScheduler` draws the images of jaxunet's "
            'sampler `ddim` if jaxunet does not clip (`clip=False`) and both visit the same '
            'levels: `scheduler.set_timesteps(sigmas=numpy.linspace(1, 1 / steps, steps))`.'
        )
    if config.diffusion.learn_sigma:
        return (
            'The network also predicts a variance, which only `DDPMScheduler` reads; '
            '`DDIMScheduler` and other fast samplers of diffusers need the outputs of the image '
            'alone.'
        )
    return (
        "From the same noise and timesteps, `DDIMScheduler` draws the images of jaxunet's sampler "
        '`ddim` with `use_clipped_model_output=True`. Its default does not correct the noise for '
        'the clipping of the image, and draws others.'
    )
