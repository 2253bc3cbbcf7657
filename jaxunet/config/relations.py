"""Checks that involve several fields of a config."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator

from jaxunet.config.consistency import consistency_problems
from jaxunet.config.network_relations import check_network_options, check_network_shape
from jaxunet.config.samplers import evaluation_sampler
from jaxunet.config.schema import FACTS, Config
from jaxunet.runtime.errors import near_misses

# Fewest timesteps for which a distribution or weights are defined. speed: with fewer, the cosine
# schedule has no timestep before the last whose slope is small enough.
LEAST_STEPS_OF_SAMPLER = {'speed': 25, 'speed_code': 25, 'policy': 2, 'infonoise': 2}
LEAST_STEPS_OF_WEIGHTING = {'speed': 3}
# More steps per call would save little more host time, and a signal waits for all of them.
MAX_STEPS_PER_CALL = 20
# The largest width of an average: the plain mean over the run.
MAX_WIDTH = 12**-0.5
BACKGROUNDS = ('white', 'black', 'keep', 'drop')
METRICS = ('fid', 'sfid', 'kid', 'precision', 'recall', 'copies', 'inception_score')
HIGHER_IS_BETTER = ('precision', 'recall', 'inception_score')


def unknown_metric(name: str) -> str:
    """Returns the message for an unknown metric: the known ones, and those with similar names.

    Initials (`is`, `IS`) and capitals (`FID`) are similar, too.
    """
    initials = {''.join(w[0] for w in m.split('_')): m for m in METRICS if '_' in m}
    similar = near_misses(initials.get(name.lower(), name.lower()), METRICS)
    return f'expected some of {", ".join(METRICS)}, found {name!r}{similar}'


def step_counts(config: Config) -> dict[str, int]:
    """Returns the fields that must be multiples of `train.steps_per_call`; 0 = never."""
    counts = (path for path, facts in FACTS.items() if facts.counts_steps)
    return {path: operator.attrgetter(path)(config) for path in counts}


def check_relations(config: Config) -> list[str]:
    """Returns one line per problem between fields whose own values are valid.

    The UNet's shape is checked only if all other checks pass, because it relies on them.
    """
    sections = (
        _start,
        _parallel,
        _model,
        _diffusion,
        check_pixels,
        _data,
        _optimizer,
        _ema,
        _train,
        _evaluation,
    )
    problems = [problem for check in sections for problem in check(config)]
    return problems or list(check_network_shape(config))


def _start(config: Config) -> Iterator[str]:
    for name in ('init_from_order', 'init_from_ema'):
        if (value := getattr(config, name)) and not config.init_from:
            yield f'{name}: {value} needs init_from'


def _model(config: Config) -> Iterator[str]:
    m = config.model
    if not m.channel_mult:
        yield 'model.channel_mult: expected at least one level, found ()'
    if m.base_channels < 2:
        yield (
            'model.base_channels: expected 2 or more, as the sine and the cosine of the time take '
            f'one each, found {m.base_channels}'
        )
    if (m.num_heads > 0) == (m.num_head_channels > 0):
        yield (
            'model.num_heads, model.num_head_channels: set exactly one (the other 0), '
            f'found {m.num_heads} and {m.num_head_channels}'
        )
    if m.num_heads_upsample and not m.num_heads:
        yield (
            f'model.num_heads_upsample: {m.num_heads_upsample} needs model.num_heads; '
            'it has no meaning with model.num_head_channels'
        )
    if len(m.low_res_size) > 2:
        yield f'model.low_res_size: expected (side,) or (height, width), found {m.low_res_size}'
    if m.condition_channels and not config.picture_path:
        yield f'model.condition_channels: {m.condition_channels} needs data.condition=folder:PATH'
    if m.label_dropout and not m.num_classes:
        yield f'model.label_dropout: {m.label_dropout} needs model.num_classes > 0'
    yield from check_network_options(config)


def _diffusion(config: Config) -> Iterator[str]:
    steps = config.diffusion.steps
    if config.diffusion.continuous:
        yield from _continuous(config)
    elif config.diffusion.schedule == 'linear' and steps <= 20:
        yield (
            f'diffusion.steps: the linear schedule needs more than 20, found {steps}; '
            'or use diffusion.schedule=cosine'
        )
    if config.timesteps.sampler == 'infonoise':
        yield from _infonoise(config)
    for field, chosen, least in (
        ('timesteps.sampler', config.timesteps.sampler, LEAST_STEPS_OF_SAMPLER),
        ('loss.weighting', config.loss.weighting, LEAST_STEPS_OF_WEIGHTING),
    ):
        if steps < least.get(chosen, 1):
            yield (
                f'{field}: {chosen} needs diffusion.steps of {least[chosen]} or more, found {steps}'
            )
    for name in ('adaptive_bins', 'policy_probes', 'infonoise_bins'):
        sampler = name.split('_', maxsplit=1)[0]
        count = getattr(config.timesteps, name)
        if config.timesteps.sampler == sampler and count > steps:
            yield f'timesteps.{name}: {count} is more than diffusion.steps ({steps})'


def _infonoise(config: Config) -> Iterator[str]:
    """Checks that losses are squared errors, and their weights known beforehand."""
    d = config.diffusion
    for name in ('learn_sigma', 'kl_loss'):
        if getattr(d, name):
            yield (
                'timesteps.sampler: infonoise reads the squared error of the image from the loss, '
                f'which is another one with diffusion.{name}; use another sampler'
            )
    if config.loss.weighting == 'uncertainty':
        yield (
            'timesteps.sampler: infonoise divides by a fixed weight of each level, which '
            'loss.weighting=uncertainty learns; use another weighting or sampler'
        )


def _continuous(config: Config) -> Iterator[str]:
    """Checks options that only objectives with timesteps have: schedule, variance, bound."""
    d, e = config.diffusion, config.evaluation
    if d.schedule != 'linear' and d.prediction != 'v':
        yield (
            f'diffusion.schedule: {d.schedule} belongs to the objectives epsilon, x0 and v; '
            f'{d.objective} has continuous noise levels, set by diffusion.{d.prediction}_mean and '
            f'{d.prediction}_std; leave schedule out'
        )
    if d.rescale_timesteps and d.prediction != 'v':
        yield (
            f'diffusion.rescale_timesteps: {d.objective} has no timesteps, and its times lie on '
            'that scale; leave it out'
        )
    if d.learn_sigma:
        yield (
            f'diffusion.learn_sigma: needs the timesteps of epsilon, x0 or v; {d.objective} has no '
            'step whose variance could be learned'
        )
    if d.kl_loss:
        yield (
            f'diffusion.kl_loss: needs the timesteps of epsilon, x0 or v; {d.objective} has no '
            'steps for a variational bound'
        )
    if d.objective == 'consistency':
        yield from consistency_problems(config)
        return
    if config.timesteps.sampler in ('speed', 'speed_code', 'policy'):
        yield (
            f'timesteps.sampler: {config.timesteps.sampler} is defined by the timesteps of '
            f'epsilon, x0 and v; with {d.objective} use uniform, loss_second_moment, adaptive or '
            'infonoise'
        )
    if config.loss.weighting == 'speed':
        yield (
            'loss.weighting: speed is defined by the timesteps of epsilon, x0 and v; with '
            f'{d.objective} use uniform, min_snr, soft_min_snr, p2 or uncertainty'
        )
    if d.objective == 'edm' and e.skip_schedule in ('linear', 'quadratic'):
        yield (
            f'evaluation.skip_schedule: {e.skip_schedule} spaces timesteps, which edm does not '
            'have; use karras or log_snr'
        )


def check_pixels(config: Config) -> Iterator[str]:
    """Yields one line per problem of the fields that say how stored values become pixels."""
    d, channels = config.data, config.model.image_channels
    if d.background not in BACKGROUNDS and not re.fullmatch('#[0-9a-fA-F]{6}', d.background):
        hint = near_misses(d.background, BACKGROUNDS)
        yield (
            f'data.background: expected white, black, #rrggbb, keep or drop, found '
            f'{d.background!r}{hint}'
        )
    if d.background == 'keep' and channels != 4:
        yield (
            'data.background: keep draws opacity as a fourth channel; '
            f'expected model.image_channels=4, found {channels}'
        )
    if d.range and not (len(d.range) == 2 and d.range[0] < d.range[1]):
        yield f'data.range: expected LOWEST,HIGHEST, such as 0,4095, found {d.range}'
    if d.range and d.background == 'keep':
        yield (
            'data.range: images with opacity (data.background=keep) use the full range of their '
            'type; leave it out'
        )


def _data(config: Config) -> Iterator[str]:
    d, classes = config.data, config.model.num_classes
    accumulate_steps = config.optimizer.accumulate_steps
    if len(d.image_size) not in (1, 2):
        yield f'data.image_size: expected (side,) or (height, width), found {d.image_size}'
    if d.batch_size % accumulate_steps:
        yield (
            f'data.batch_size: {d.batch_size} is not a multiple of optimizer.accumulate_steps '
            f'({accumulate_steps})'
        )
    if d.holdout >= 1 and d.holdout != round(d.holdout):
        yield (
            f'data.holdout: expected a whole number of images or a share below 1, found {d.holdout}'
        )
    if d.condition not in ('image', 'grey') and not config.picture_path:
        hint = near_misses(d.condition, ('image', 'grey', 'folder:PATH'))
        yield f'data.condition: expected image, grey or folder:PATH, found {d.condition!r}{hint}'
    if d.condition == 'grey' and not (
        config.model.low_res_size and config.model.image_channels == 3
    ):
        yield (
            'data.condition: grey needs a network that sees pictures (model.low_res_size) and '
            f'draws colours (model.image_channels=3, found {config.model.image_channels})'
        )
    if config.picture_path and config.timesteps.sampler == 'policy':
        yield (
            'timesteps.sampler: policy measures images without pictures of their own '
            '(data.condition=folder:PATH); use another sampler'
        )
    if d.crop == 'random' and d.cache == 'device':
        yield (
            'data.crop: random cuts images anew every epoch, but data.cache=device keeps each as '
            'it was cut first; set data.cache=stream'
        )
    if d.noise_assignment == 'batch' and d.noise_candidates > 1:
        yield (
            'data.noise_assignment: batch gives each image one of the noise samples of the batch, '
            f'found data.noise_candidates={d.noise_candidates}; set that to 1'
        )
    if d.noise_assignment == 'batch' and d.batch_size == 1:
        yield 'data.noise_assignment: batch needs data.batch_size of 2 or more, found 1'
    if d.noise_assignment == 'batch' and config.model.low_res_size:
        yield (
            'data.noise_assignment: batch would let the pictures that the network sees '
            f'(model.low_res_size={config.model.low_res_size}) tell it the noise; set none'
        )
    if classes and len(d.classes) > classes:
        yield f'data.classes: {len(d.classes)} names for model.num_classes={classes}'


def _parallel(config: Config) -> Iterator[str]:
    if not config.parallel.shard_optimizer:
        return
    if config.optimizer.name == 'muon':
        yield (
            'parallel.shard_optimizer: a step of optimizer.name=muon needs whole matrices, and a '
            'device has only a part of each; use adamw, or leave shard_optimizer out'
        )
    if config.train.check_replicas_every:
        yield (
            f'train.check_replicas_every: {config.train.check_replicas_every} has nothing to '
            'compare, as parallel.shard_optimizer keeps each number on one device; set one of them '
            'to its default'
        )


def _optimizer(config: Config) -> Iterator[str]:
    o = config.optimizer
    if len(o.betas) != 2:
        yield f'optimizer.betas: expected two numbers, found {o.betas}'
    if o.name == 'adam' and o.weight_decay:
        yield (
            f'optimizer.weight_decay: {o.weight_decay} has no effect with optimizer.name=adam; '
            'use adamw'
        )


def _ema(config: Config) -> Iterator[str]:
    rates = config.ema.rates
    if not rates:
        yield 'ema.rates: expected at least one rate, found (); (0.0,) keeps a copy of the weights'
    if len(set(rates)) < len(rates):
        yield f'ema.rates: expected distinct rates, found {rates}'
    widths = config.ema.widths
    if len(set(widths)) < len(widths):
        yield f'ema.widths: expected distinct widths, found {widths}'
    for width in widths:
        if width >= MAX_WIDTH:
            yield f'ema.widths: expected less than {MAX_WIDTH:.4f} (1/√12), found {width}'
    for rate in rates if widths else ():
        if 0 < rate < MAX_WIDTH:
            yield (
                f'ema.rates: {rate} could be mistaken for a width by --ema; beside ema.widths, '
                f'use rates above {MAX_WIDTH:.4f}'
            )
    if config.ema.snapshot_every and not widths:
        yield f'ema.snapshot_every: {config.ema.snapshot_every} needs ema.widths'


def _train(config: Config) -> Iterator[str]:
    t, steps, channels = config.train, config.diffusion.steps, config.model.image_channels
    if t.sample_every and t.sample_steps > steps and not config.diffusion.continuous:
        yield f'train.sample_steps: {t.sample_steps} is more than diffusion.steps ({steps})'
    if t.sample_every and channels not in (1, 3) and config.data.background != 'keep':
        yield (
            f'model.image_channels: sample grids need 1 (grey) or 3 (RGB), found {channels}; other '
            'channels, which only .npz, .npy and .bin have, need train.sample_every=0'
        )
    if t.minutes and t.epochs:
        yield (
            f'train.minutes: {t.minutes:g} and train.epochs={t.epochs:g} both set the length of '
            'the run; leave one out'
        )
    if len(set(t.loggers)) < len(t.loggers):
        yield f'train.loggers: expected each once, found {", ".join(t.loggers)}'
    if t.holdout_every and not config.data.holdout:
        yield (
            f'train.holdout_every: {t.holdout_every} needs images held out of training; '
            'set data.holdout, or this to 0'
        )
    if t.holdout_every % t.log_every:
        yield (
            f'train.holdout_every: {t.holdout_every} is not a multiple of train.log_every '
            f'({t.log_every})'
        )
    for name, count in step_counts(config).items() if t.steps_per_call else ():
        if count % t.steps_per_call and not (name == 'train.steps' and (t.epochs or t.minutes)):
            yield (
                f'{name}: {count} is not a multiple of train.steps_per_call ({t.steps_per_call})'
            )
    if t.keep_every % t.checkpoint_every:
        yield (
            f'train.keep_every: {t.keep_every} is not a multiple of train.checkpoint_every '
            f'({t.checkpoint_every})'
        )
    if t.keep_best and (t.evaluate_every == 0 or t.evaluate_every % t.checkpoint_every):
        yield (
            'train.keep_best: needs a checkpoint at every evaluation: set train.evaluate_every to '
            f'a multiple of train.checkpoint_every ({t.checkpoint_every}), '
            f'found {t.evaluate_every}'
        )


def _evaluation(config: Config) -> Iterator[str]:
    e, m, sampler = config.evaluation, config.model, evaluation_sampler(config).name
    objective = config.diffusion.objective
    found = e.sampler or f"'', which is {sampler} for diffusion.objective={objective}"
    evaluates = config.train.evaluate_every > 0
    for name in e.metrics:
        if name not in METRICS:
            yield f'evaluation.metrics: {unknown_metric(name)}'
    if not e.metrics or len(set(e.metrics)) < len(e.metrics):
        listed = ', '.join(e.metrics) or 'none'
        yield f'evaluation.metrics: expected one or more, each once, found {listed}'
    if evaluates and e.steps > config.diffusion.steps and not config.diffusion.continuous:
        yield (
            f'evaluation.steps: {e.steps} is more than diffusion.steps ({config.diffusion.steps})'
        )
    if sampler == 'consistency' != objective:
        yield (
            'evaluation.sampler: consistency draws with models of diffusion.objective=consistency, '
            f'found {objective}'
        )
    if e.variance and sampler != 'ddpm':
        yield f'evaluation.variance: {e.variance} needs evaluation.sampler=ddpm, found {found}'
    if e.variance == 'learned' and not config.diffusion.learn_sigma:
        yield 'evaluation.variance: learned needs diffusion.learn_sigma'
    if e.eta and sampler not in ('ddim', 'dpmpp_2m'):
        yield f'evaluation.eta: {e.eta} needs evaluation.sampler=ddim or dpmpp_2m, found {found}'
    if e.guidance_scale != 1 and not (m.num_classes and m.label_dropout):
        yield (
            f'evaluation.guidance_scale: {e.guidance_scale} needs a model with classes that was '
            'also trained without labels; set model.label_dropout > 0'
        )
    if evaluates and m.image_channels not in (1, 3):
        yield (
            'model.image_channels: evaluation compares images of 1 or 3, '
            f'found {m.image_channels}; set train.evaluate_every=0'
        )
    if evaluates and config.data.bits != 8:
        yield (
            f'data.bits: evaluation compares images of 8 bits, found {config.data.bits}; set '
            'train.evaluate_every=0'
        )
