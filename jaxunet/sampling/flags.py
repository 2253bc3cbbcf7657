"""The flags of `jaxunet.sample` that set how images are drawn, and the options they stand for."""

from __future__ import annotations

import math
import os

from absl import flags

from jaxunet.checkpoint.load import load_model
from jaxunet.config import Config
from jaxunet.config.samplers import SAMPLERS
from jaxunet.data.classes import Classes
from jaxunet.data.picture import read_mask, read_picture
from jaxunet.data.reading import Reading
from jaxunet.diffusion.process import make_diffusion
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.paths import of_user
from jaxunet.sampling.classifier_guidance import SCALE as SCALE_DEFAULT
from jaxunet.sampling.classifier_guidance import Guide, check_guide
from jaxunet.sampling.guidance import Weaker
from jaxunet.sampling.low_res import LowRes, missing, read_pictures
from jaxunet.sampling.options import (
    PEERS,
    VARIANCES,
    SamplerConfig,
    as_peer,
    check_can_be_guided,
    resolve_options,
    usual_steps,
)
from jaxunet.sampling.picture import RESAMPLE as RESAMPLE_DEFAULT
from jaxunet.sampling.picture import STRENGTH as STRENGTH_DEFAULT
from jaxunet.sampling.picture import Picture
from jaxunet.sampling.solvers import FEW_STEPS
from jaxunet.sampling.subsets import SKIP_SCHEDULES
from jaxunet.weights import read_classifier

SAMPLER = flags.DEFINE_enum(
    'sampler',
    None,
    SAMPLERS,
    'ddpm: ancestral sampling; ddim: needs fewer steps; dpmpp_2m: DPM-Solver++(2M), and unipc: '
    "need still fewer; heun: EDM's second-order sampler, with two evaluations per step; "
    'consistency: jumps to the image, the only one of consistency models. Default: that of the '
    "model's objective (dpmpp_2m for v and edm, heun for flow, consistency for consistency, else "
    'ddpm).',
)
STEPS = flags.DEFINE_integer(
    'steps',
    None,
    'Sampling steps; default: 50 with ddim, 20 with dpmpp_2m, unipc and heun, 2 with consistency, '
    'which takes 1 to 4; with ddpm every timestep of the model, or 250 where its objective has '
    'none (edm, flow).',
    lower_bound=1,
)
ETA = flags.DEFINE_float(
    'eta',
    None,
    'ddim, dpmpp_2m: amount of fresh noise, from 0 (none, the default) to 1 (as ddpm, or as '
    'DPM-Solver++(2M) SDE).',
)
SKIP_SCHEDULE = flags.DEFINE_enum(
    'skip_schedule',
    None,
    SKIP_SCHEDULES,
    'Spacing of the timesteps where some are skipped, or of the noise levels of edm and flow. '
    'Default: log_snr with dpmpp_2m and unipc; else karras for edm and linear for flow; for other '
    'objectives karras with heun, else linear.',
)
RESPACING = flags.DEFINE_string(
    'respacing',
    None,
    "Instead of --steps: guided-diffusion's timestep_respacing, such as 250, 10,20,30 (steps from "
    "equal sections) or ddim50, or ddpm-torch's linear50 and quadratic50. Not for edm and flow.",
)
TIMESTEPS = flags.DEFINE_list(
    'timesteps',
    None,
    'Instead of --steps: the timesteps to visit, such as 0,250,500,999 (not for edm and flow).',
)
LIKE = flags.DEFINE_enum(
    'like',
    None,
    PEERS,
    "Take the defaults of this program's sampling script; other flags override them. Both: "
    '--truncate, and with ddpm every timestep and --variance=fixed_large unless the model has a '
    'learned variance. ddpm_torch with ddim: its own choice of timesteps, 10 by default.',
)
TRUNCATE = flags.DEFINE_bool(
    'truncate',
    None,
    'Cut pixels down to whole numbers, as guided-diffusion and ddpm-torch do; default: round.',
)
VARIANCE = flags.DEFINE_enum(
    'variance',
    None,
    VARIANCES,
    'ddpm: variance of each step; default: learned if the model has it, else fixed_small.',
)
CHURN = flags.DEFINE_float(
    'churn', None, "heun: EDM's S_churn, fresh noise before each step; default: 0 (none)."
)
CHURN_RANGE = flags.DEFINE_list(
    'churn_range',
    None,
    "heun: EDM's S_tmin,S_tmax, the range of noise levels where --churn acts, such as 0.05,50.",
)
CHURN_NOISE = flags.DEFINE_float(
    'churn_noise', None, "heun: EDM's S_noise, factor of the noise of --churn; default: 1."
)
LOWER_ORDER_BELOW = flags.DEFINE_integer(
    'lower_order_below',
    None,
    'dpmpp_2m: with fewer steps than this, the step to the lowest noise level is first order; '
    f"default: {FEW_STEPS}; 11 = as the authors' code, 0 = never, as k-diffusion.",
)
LEVELS = flags.DEFINE_list(
    'levels',
    None,
    'consistency: the noise levels after the first, as falling sigma, such as 3 or 5,1; instead of '
    '--steps, which has its own.',
)
CLIP = flags.DEFINE_bool('clip', True, 'Clip the predicted image to [-1, 1] at every step.')
GUIDANCE_SCALE = flags.DEFINE_float(
    'guidance_scale',
    1.0,
    'Classifier-free guidance: 1 = none; larger values follow the class more closely; 0 = ignore '
    'the class. Needs a model trained with model.label_dropout above 0, or --guide.',
)
GUIDANCE_RANGE = flags.DEFINE_list(
    'guidance_range',
    None,
    'Guide only at noise levels above the first and up to the second, as sigma, such as 0.28,2.9; '
    'default: at all.',
)
GUIDE = flags.DEFINE_string(
    'guide',
    None,
    'Autoguidance: a weaker model of the same images (smaller, or trained for less time), as '
    '--checkpoint; with it, --guidance_scale moves samples away from its mistakes.',
)
GUIDE_EMA = flags.DEFINE_string(
    'guide_ema', None, 'With --guide: the average of its weights, as --ema; default: the first.'
)
CLASSIFIER = flags.DEFINE_string(
    'classifier',
    None,
    "guided-diffusion's classifier of noisy images, .pt or .safetensors, which guides the samples "
    'to --class_labels, also with an unconditional model. It must have been trained on images of '
    "the model's size with the model's noise schedule.",
)
CLASSIFIER_SCALE = flags.DEFINE_float(
    'classifier_scale',
    None,
    'With --classifier: factor on its gradient; larger values follow the class more closely; '
    f'default: {SCALE_DEFAULT:g}.',
)
LOW_RES = flags.DEFINE_string(
    'low_res',
    None,
    'For a super-resolution network: the pictures to enlarge (.npz, folder, archive, .png grid or '
    'one picture), of the size model.low_res_size that it was trained with. For a network trained '
    'with data.condition=folder:PATH: pictures of any size. Samples get the classes of their '
    'pictures unless --class_labels is given.',
)
# The name of the flag for models of pairs (data.condition=folder:PATH).
flags.DEFINE_alias('condition', 'low_res')
INIT_IMAGE = flags.DEFINE_string(
    'init_image',
    None,
    "Start from this picture (SDEdit). It is resized and cropped to the model's size.",
)
STRENGTH = flags.DEFINE_float(
    'strength',
    None,
    'With --init_image: amount of noise to start from, above 0 (the picture) to 1 (only noise); '
    f'default: {STRENGTH_DEFAULT}, or 1 with --mask.',
)
MASK = flags.DEFINE_string(
    'mask',
    None,
    "With --init_image: an image of the picture's size; white is redrawn, black kept (RePaint).",
)
RESAMPLE = flags.DEFINE_integer(
    'resample',
    None,
    'With --mask: how often each stretch of steps is done, so that the redrawn part fits the kept '
    f'one; multiplies the time; default: {RESAMPLE_DEFAULT}.',
)
JUMP_LENGTH = flags.DEFINE_integer(
    'jump_length',
    None,
    'With --mask: steps of a stretch that is repeated; default: a twentieth of the steps.',
)
of_user(CLASSIFIER, GUIDE, LOW_RES, INIT_IMAGE, MASK)


def sampler_config(config: Config) -> SamplerConfig:
    """Returns the sampling options that the flags describe.

    Raises:
      UserError: a range is not two numbers, --timesteps are not whole numbers, the model
        does not suit --like, or --skip_schedule has no effect.
    """
    steps, model_steps = STEPS.value, config.diffusion.steps
    continuous = config.diffusion.continuous
    spaced = any(flag.value is not None for flag in (STEPS, RESPACING, TIMESTEPS, LIKE))
    diffusion = make_diffusion(config.diffusion)
    if not spaced:
        steps = usual_steps(SAMPLER.value, diffusion)
    timesteps = None
    if TIMESTEPS.value is not None:
        if not all(t.strip().isdecimal() for t in TIMESTEPS.value):
            raise UserError(
                '--timesteps: expected whole numbers such as 0,250,500,999, '
                f'found {",".join(TIMESTEPS.value)!r}'
            )
        timesteps = tuple(map(int, TIMESTEPS.value))
    options = SamplerConfig(
        name=SAMPLER.value,
        steps=steps,
        eta=ETA.value,
        skip_schedule=SKIP_SCHEDULE.value,
        variance=VARIANCE.value,
        guidance_scale=GUIDANCE_SCALE.value,
        guidance_range=_limits(GUIDANCE_RANGE, '0.28,2.9'),
        clip=CLIP.value,
        churn=CHURN.value,
        churn_range=_limits(CHURN_RANGE, '0.05,50'),
        churn_noise=CHURN_NOISE.value,
        lower_order_below=LOWER_ORDER_BELOW.value,
        levels=None if LEVELS.value is None else _numbers(LEVELS, '5,1'),
        respacing=RESPACING.value,
        timesteps=timesteps,
        truncate=TRUNCATE.value,
    )
    if LIKE.value:
        options = as_peer(options, LIKE.value, diffusion)
    if SKIP_SCHEDULE.value and not continuous:
        resolved = resolve_options(
            options, diffusion, config.model.num_classes, weaker=GUIDE.value is not None
        )
        _check_skips(resolved, model_steps)
    return options


def _limits(flag: flags.FlagHolder, example: str) -> tuple[float, float] | None:
    """Returns the two noise levels of a flag; None if it is not given."""
    if flag.value is None:
        return None
    low, high = _numbers(flag, example, 2)
    return low, high


def _numbers(flag: flags.FlagHolder, example: str, count: int = 0) -> tuple[float, ...]:
    """Returns the numbers of a flag; `count` of them unless it is 0."""
    try:
        numbers = tuple(map(float, flag.value))
    except ValueError:
        numbers = ()
    if not numbers or len(numbers) != (count or len(numbers)):
        raise UserError(
            f'--{flag.name}: expected {"two " if count else ""}numbers such as {example}, found '
            f'{",".join(flag.value)!r}'
        )
    return numbers


def _check_skips(options: SamplerConfig, model_steps: int) -> None:
    """Raises `UserError` if --skip_schedule has no effect, as there is one way to choose the steps.

    Args:
      options: from `resolve_options`.
    """
    if options.steps in (1, model_steps):
        raise UserError(
            f'--skip_schedule: {options.skip_schedule} has no effect on {options.steps} of '
            f'{model_steps} timesteps; leave it out, or give --steps of 2 to {model_steps - 1}'
        )


def check_owned_flags() -> None:
    """Raises `UserError` if a flag of --init_image, --mask, --classifier or --guide is given
    without it."""
    for owner, needy in (
        (INIT_IMAGE, (STRENGTH, MASK)),
        (MASK, (RESAMPLE, JUMP_LENGTH)),
        (CLASSIFIER, (CLASSIFIER_SCALE,)),
        (GUIDE, (GUIDE_EMA,)),
    ):
        for flag in needy:
            if owner.value is None and flag.value is not None:
                raise UserError(
                    f'--{flag.name}: needs --{owner.name}, which is not given; '
                    f'add it or leave --{flag.name} out'
                )


def picture(config: Config) -> Picture | None:
    """Returns the picture that the flags name; None without --init_image.

    Raises:
      UserError: a file that cannot be read or does not fit the model.
    """
    if INIT_IMAGE.value is None:
        return None
    shape = config.image_shape
    return Picture(
        read_picture(INIT_IMAGE.value, shape, Reading.of(config)),
        None if MASK.value is None else read_mask(MASK.value, INIT_IMAGE.value, shape),
        STRENGTH.value,
        RESAMPLE.value,
        JUMP_LENGTH.value,
    )


def low_res(config: Config, limit: int | None, classes: Classes) -> LowRes | None:
    """Returns the pictures that the model sees; None for a model that draws from noise alone.

    Args:
      limit: number of pictures to read, the first ones; None = all.
      classes: of the model; a count of 0 leaves out the pictures' classes.

    Raises:
      UserError: the model sees pictures and there are none, or the other way round, or they cannot
        be read or have another size.
    """
    shape = config.low_res_shape
    if shape is None:
        if LOW_RES.value is not None:
            raise UserError(
                '--low_res, --condition: the model draws from noise alone (model.low_res_size=()); '
                'leave it out'
            )
        return None
    if LOW_RES.value is None:
        raise UserError(f'--{missing(config)}')
    return read_pictures(config, LOW_RES.value, limit, classes)


def guide(config: Config) -> Guide | None:
    """Returns the classifier that the flags name; None without --classifier.

    Raises:
      UserError: a file that cannot be read, or a classifier of other images or classes.
    """
    if CLASSIFIER.value is None:
        return None
    classifier = read_classifier(CLASSIFIER.value, config)
    scale = SCALE_DEFAULT if CLASSIFIER_SCALE.value is None else CLASSIFIER_SCALE.value
    found = Guide(classifier, scale)
    check_guide(found, make_diffusion(config.diffusion), config.model.num_classes)
    return found


def weaker() -> Weaker | None:
    """Returns the model of --guide; None without the flag."""
    if GUIDE.value is None:
        return None
    model = load_model(GUIDE.value, ema=GUIDE_EMA.value or '')
    return Weaker(model.config, model.params, model.note)


def check_guidance(config: Config) -> None:
    """Raises `UserError` if --guidance_scale needs an unconditional model that was not trained."""
    if GUIDE.value is None:
        check_can_be_guided(config, GUIDANCE_SCALE.value, '--guidance_scale')


def check_memory(count: int, config: Config) -> None:
    """Raises `UserError` if the samples exceed this machine's memory, where they are collected."""
    needed = count * math.prod(config.image_shape) * config.data.bits // 8
    memory = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    if needed > memory:
        raise UserError(
            f'--num_samples: {count} images of {"x".join(map(str, config.image_shape))} take '
            f'{needed / 2**30:,.1f} GiB, more than the {memory / 2**30:,.1f} GiB of memory of this '
            'machine; draw fewer at a time, with other seeds (--seed) and outputs'
        )
