"""What must hold between the fields of a config."""

from __future__ import annotations

from jaxunet.config.schema import Config
from jaxunet.runtime.errors import near_misses

# Of `train`; several steps of a call divide them.
STEP_COUNTS = ('steps', 'log_every', 'sample_every', 'evaluate_every', 'checkpoint_every')
METRICS = ('fid', 'kid', 'precision', 'recall', 'inception_score')


def check_relations(config: Config) -> list[str]:
    """What is wrong between fields, a line each."""
    m, d, o = config.model, config.data, config.optimizer
    problems = []

    def require(holds: bool, problem: str) -> None:
        if not holds:
            problems.append(problem)

    require(len(m.channel_mult) > 0, 'model.channel_mult: expected at least one level, found ()')
    require(
        len(d.image_size) in (1, 2),
        f'data.image_size: expected (side,) or (height, width), found {d.image_size}',
    )
    require(len(o.betas) == 2, f'optimizer.betas: expected two numbers, found {o.betas}')
    require(
        len(config.ema.rates) > 0,
        'ema.rates: expected at least one rate, found (); (0.0,) keeps a copy of the weights',
    )
    require(
        len(set(config.ema.rates)) == len(config.ema.rates),
        f'ema.rates: expected distinct rates, found {config.ema.rates}',
    )
    require(
        (m.num_heads > 0) != (m.num_head_channels > 0),
        f'model.num_heads, model.num_head_channels: set exactly one (the other 0), found {m.num_heads} and {m.num_head_channels}',
    )
    require(
        m.num_heads_upsample == 0 or m.num_heads > 0,
        f'model.num_heads_upsample: {m.num_heads_upsample} needs model.num_heads; with model.num_head_channels it has no meaning',
    )
    require(
        m.label_dropout == 0 or m.num_classes > 0,
        f'model.label_dropout: {m.label_dropout} needs model.num_classes > 0',
    )
    require(
        d.batch_size % o.accumulate_steps == 0,
        f'data.batch_size: {d.batch_size} is not a multiple of optimizer.accumulate_steps ({o.accumulate_steps})',
    )
    require(
        len(d.classes) <= m.num_classes or m.num_classes == 0,
        f'data.classes: {len(d.classes)} names for model.num_classes={m.num_classes}',
    )
    require(
        o.name != 'adam' or o.weight_decay == 0,
        f'optimizer.weight_decay: {o.weight_decay} has no effect with optimizer.name=adam; use adamw',
    )
    require(
        config.diffusion.schedule != 'linear' or config.diffusion.steps > 20,
        f'diffusion.steps: the linear schedule needs more than 20, found {config.diffusion.steps}; or use diffusion.schedule=cosine',
    )
    for name in ('adaptive_bins', 'policy_probes'):
        count = getattr(config.timesteps, name)
        require(
            config.timesteps.sampler != name.split('_', maxsplit=1)[0]
            or count <= config.diffusion.steps,
            f'timesteps.{name}: {count} is more than diffusion.steps ({config.diffusion.steps})',
        )
    t = config.train
    require(
        t.sample_every == 0 or t.sample_steps <= config.diffusion.steps,
        f'train.sample_steps: {t.sample_steps} is more than diffusion.steps ({config.diffusion.steps})',
    )
    require(
        t.sample_every == 0 or m.image_channels in (1, 3),
        f'model.image_channels: sample grids show 1 or 3, found {m.image_channels}; set train.sample_every=0',
    )
    for name in STEP_COUNTS if t.steps_per_call else ():
        count = getattr(t, name)
        require(
            count % t.steps_per_call == 0,
            f'train.{name}: {count} is not a multiple of train.steps_per_call ({t.steps_per_call})',
        )
    e = config.evaluation
    for name in e.metrics:
        require(
            name in METRICS,
            f'evaluation.metrics: expected some of {", ".join(METRICS)}, found {name!r}{near_misses(name, METRICS)}',
        )
    require(
        len(set(e.metrics)) == len(e.metrics) > 0,
        f'evaluation.metrics: expected one or more, each once, found {", ".join(e.metrics) or "none"}',
    )
    require(
        t.evaluate_every == 0 or e.steps <= config.diffusion.steps,
        f'evaluation.steps: {e.steps} is more than diffusion.steps ({config.diffusion.steps})',
    )
    require(
        not e.variance or e.sampler == 'ddpm',
        f'evaluation.variance: {e.variance} needs evaluation.sampler=ddpm, found {e.sampler}',
    )
    require(
        e.eta == 0 or e.sampler == 'ddim',
        f'evaluation.eta: {e.eta} needs evaluation.sampler=ddim, found {e.sampler}',
    )
    require(
        e.guidance_scale == 1 or (m.num_classes > 0 and m.label_dropout > 0),
        f'evaluation.guidance_scale: {e.guidance_scale} needs a model with classes, and without: model.label_dropout > 0',
    )
    require(
        e.variance != 'learned' or config.diffusion.learn_sigma,
        'evaluation.variance: learned needs diffusion.learn_sigma',
    )
    require(
        t.evaluate_every == 0 or m.image_channels in (1, 3),
        f'model.image_channels: evaluation compares images of 1 or 3, found {m.image_channels}; set train.evaluate_every=0',
    )
    if problems:
        return problems
    height, width, _ = config.image_shape
    factor = 2 ** (len(m.channel_mult) - 1)
    require(
        height % factor == 0 and width % factor == 0,
        f'data.image_size: {height}x{width} must be divisible by {factor}, as model.channel_mult has {len(m.channel_mult)} levels',
    )
    sides = [min(height, width) >> level for level in range(len(m.channel_mult))]
    for resolution in m.attention_resolutions:
        require(
            resolution in sides,
            f'model.attention_resolutions: {resolution} is none of the levels, whose shorter sides are {sides}',
        )
    for level, mult in enumerate(m.channel_mult):
        channels = int(mult * m.base_channels)
        attends = level in config.attention_levels or level == len(sides) - 1
        name, size = (
            ('num_heads', m.num_heads)
            if m.num_heads
            else ('num_head_channels', m.num_head_channels)
        )
        require(
            not attends or channels % size == 0,
            f'model.{name}: {size} does not divide the {channels} channels of level {level}',
        )
        require(
            channels > 0 and channels % m.norm_groups == 0,
            f'model.channel_mult: {mult} x base_channels {m.base_channels} = {channels} channels, '
            f'not a multiple of model.norm_groups ({m.norm_groups})',
        )
    return problems
