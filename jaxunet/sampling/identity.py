"""Everything that determines the pixels of all samples of a command.

When an interrupted command is repeated, it keeps the finished samples only if this is unchanged.
"""

from __future__ import annotations

import dataclasses

from jaxunet.checkpoint.store import checksum
from jaxunet.config import DiffusionConfig, ModelConfig
from jaxunet.config.samplers import CONSISTENCY_LEVELS
from jaxunet.config.schema import FACTS
from jaxunet.model.unet import Params
from jaxunet.sampling.generator import Generator
from jaxunet.sampling.low_res import LowRes

# Sampling options that interrupted samples of earlier versions lack; left out where not in use.
LATER_OPTIONS = ('churn_noise', 'lower_order_below', 'guidance_range', 'levels')


def process_fields(diffusion: DiffusionConfig) -> dict[str, object]:
    """Returns the fields of the diffusion process that determine samples.

    Models with timesteps keep the names that interrupted samples of earlier versions recorded.
    """
    if diffusion.continuous:
        fields = {'objective': diffusion.objective, 'edm_sigma_data': diffusion.edm_sigma_data}
        tunes = diffusion.objective == 'consistency'
        return fields | ({'consistency_of': diffusion.consistency_of} if tunes else {})
    return {
        'steps': diffusion.steps,
        'schedule': diffusion.schedule,
        'prediction': diffusion.objective,
        'learn_sigma': diffusion.learn_sigma,
        'vlb_weight': diffusion.vlb_weight,
        **({'rescale_timesteps': True} if diffusion.rescale_timesteps else {}),
    }


def identity(
    generator: Generator, params: Params, seed: int, chosen: list[int], low_res: LowRes | None
) -> dict[str, object]:
    """Returns everything that determines the pixels of all samples.

    The number of samples, the batch size and the devices do not determine them. The picture that
    each sample is made from is left out: `LowRes.checksums` covers it.
    The architecture of a classifier is left out: it follows from the names and shapes of its
    weights and from the model (`jaxunet.weights.noisy_classifier`), so that another architecture
    has other weights.

    Args:
      params: the model's weights.
      seed: seed of the images.
      chosen: the classes that samples have in turn; empty = every class, or those of `low_res`.
      low_res: the pictures that a super-resolution network enlarges.
    """
    config, guide = generator.config, generator.guide
    more: dict[str, object] = {}
    if guide is not None:
        more['classifier'] = f'{checksum(guide.classifier.params):08x}'
        more['classifier_scale'] = guide.scale
    if generator.weaker is not None:
        more['guide'] = f'{checksum(generator.weaker.params):08x}'
    if low_res is not None:
        more['low_res'] = low_res.note
    # Interrupted samples of earlier versions lack the fields that came later.
    model = {
        name: value
        for name, value in dataclasses.asdict(config.model).items()
        if not FACTS[f'model.{name}'].since or value != getattr(ModelConfig(), name)
    }
    sampler = dataclasses.asdict(generator.sampler.config)
    if sampler['levels'] in CONSISTENCY_LEVELS.values():  # once the only ones
        sampler['levels'] = None
    for name in LATER_OPTIONS:
        if sampler[name] is None:
            del sampler[name]
    sections = {'model': model, 'diffusion': process_fields(config.diffusion), 'sampler': sampler}
    if config.data.bits != 8:
        more['bits'] = config.data.bits
    if config.data.background == 'keep':
        more['background'] = 'keep'
    labels = ','.join(map(str, chosen)) or 'every class in turn'
    return {
        **(generator.schedule.identity if generator.schedule else {}),
        'weights': f'{checksum(params):08x}',
        'image_shape': config.image_shape,
        'precision': config.precision,
        'seed': seed,
        **({'class_labels': labels} if config.model.num_classes or guide else {}),
        **more,
        **{
            f'{section}.{name}': value
            for section, values in sections.items()
            for name, value in values.items()
        },
    }
