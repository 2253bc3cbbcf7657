"""Facts and checks of `diffusion.objective=consistency`, which tunes a trained network.

`jaxunet.training.consistency` has the loss and its source.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from jaxunet.config.samplers import CONSISTENCY_LEVELS
from jaxunet.config.schema import Config
from jaxunet.runtime.errors import UserError

# The finest discretisation of a run that does not set q; tunings of minutes by Muon end there. On a
# digits model, rounding to bfloat16 changes what the loss compares by 28% to 142% of it at q = 256,
# depending on the noise level, and by 16% to 64% at q = 64 (docs/few_steps.md).
FINEST = 16
MOST = 2**20  # largest q^stages
NEEDS_WEIGHTS = (
    'diffusion.objective: consistency tunes a trained network: set init_from to a run, a '
    'checkpoint or the weights of a model that predicts v, edm or flow'
)
# Fields of the networks that can be tuned without which their prediction has no meaning.
MEANING = {
    'v': ('schedule', 'steps', 'rescale_timesteps'),
    'edm': ('edm_sigma_data', 'edm_time_scale'),
    'flow': (),
}
TUNED = tuple(MEANING)


def q_of(config: Config) -> int:
    """Returns q of the first stage: `diffusion.consistency_q`, or the choice where that is 0."""
    d = config.diffusion
    return d.consistency_q or chosen_q(d.consistency_stages)


def chosen_q(stages: int) -> int:
    """Returns the q whose power q^stages is about the finest."""
    return max(round(FINEST ** (1 / stages)), 2)


def chosen_stages(q: int) -> int:
    """Returns the number of stages whose power q^stages is about the finest."""
    return max(round(math.log(FINEST, max(q, 2))), 1)


def check_teacher(config: Config, path: str, run: Config | None = None) -> None:
    """Checks that a network can be tuned.

    Args:
      config: of the model that holds it.
      path: of the model, for the message.
      run: config of the run that tunes it; None = a run that takes all fields from the model.

    Raises:
      UserError: it predicts something else, or the run gives its prediction another meaning.
    """
    d, of = config.diffusion, run.diffusion.consistency_of if run else ''
    if d.prediction not in ([of] if of else TUNED) or d.learn_sigma:
        raise UserError(
            f'init_from: {path}: consistency tuning needs a network that predicts '
            f'{of or "v, edm or flow"}, found {d.prediction}{" and the variance" * d.learn_sigma}'
        )
    if run is None:
        return
    for name in MEANING[d.prediction]:
        value, asked = getattr(d, name), getattr(run.diffusion, name)
        if value != asked:
            raise UserError(
                f'diffusion.{name}: expected {value}, with which the network of {path} was '
                f'trained, found {asked}; leave it out'
            )


def check_guiding(teacher: Config, config: Config) -> None:
    """Checks that the guidance of a network can be folded into a run, and that none is lost.

    Args:
      teacher: config of the model of `init_from`.
      config: of the run that tunes it.

    Raises:
      UserError: the network has no prediction without a class, or was tuned already.
    """
    scale, folded = (c.diffusion.consistency_guidance for c in (config, teacher))
    if teacher.diffusion.objective == 'consistency' and (scale, folded) != (1, 1):
        found = f' with guidance {folded:g}' if folded != 1 else ''
        raise UserError(
            f'init_from: {config.init_from}: guidance is folded in with the predictions of a v, '
            f'edm or flow model, found a consistency model{found}; start from the model that it '
            'was tuned from, or resume its run with a larger train.steps'
        )
    if scale != 1 and not (teacher.model.num_classes and teacher.model.label_dropout):
        raise UserError(
            f'init_from: {config.init_from}: diffusion.consistency_guidance={scale:g} needs a '
            'model of classes that was also trained without them (model.label_dropout > 0)'
        )


def check_guidance(scale: float, option: str, folded: float) -> None:
    """Raises `UserError` for a scale of classifier-free guidance other than 0 and 1.

    Args:
      option: the option that gave the scale.
      folded: the scale that the model was tuned with, `diffusion.consistency_guidance`.
    """
    if scale not in (0, 1):
        reason = 'guidance follows the direction of small steps, and a consistency model jumps'
        if folded != 1:
            reason = f'guidance {folded:g} is folded into this consistency model, which jumps'
        raise UserError(
            f'{option}: {reason} to the image; expected 1, or 0 to ignore the class, found '
            f'{scale:g}'
        )


def consistency_problems(config: Config) -> Iterator[str]:
    """Yields a line for each field that does not go with the objective `consistency`."""
    d, e, sample_steps = config.diffusion, config.evaluation, config.train.sample_steps
    if not d.consistency_of:
        yield (
            'diffusion.consistency_of: expected v, edm or flow, what the network predicts, found '
            "''; a training run takes it from init_from"
        )
    q, stages = q_of(config), d.consistency_stages
    if q**stages > MOST:
        yield (
            f'diffusion.consistency_stages: expected q^stages of at most {MOST}, found '
            f'{q}^{stages}; lower diffusion.consistency_q'
        )
    if d.folds_guidance and not config.model.num_classes:
        yield (
            f'diffusion.consistency_guidance: {d.consistency_guidance:g} needs classes '
            '(model.num_classes > 0)'
        )
    for path, value in (
        ('timesteps.sampler', config.timesteps.sampler),
        ('loss.weighting', config.loss.weighting),
    ):
        if value != 'uniform':
            yield f'{path}: expected uniform with diffusion.objective=consistency, found {value}'
    if e.sampler not in ('', 'consistency'):
        yield (
            'evaluation.sampler: expected consistency, as these models jump to the image, found '
            f'{e.sampler}; leave it out'
        )
    most = max(CONSISTENCY_LEVELS)
    for path, steps in (('train.sample_steps', sample_steps), ('evaluation.steps', e.steps)):
        if steps > most:
            yield (
                f'{path}: expected 1 to {most} evaluations of a consistency model, found {steps}'
            )
    if e.skip_schedule:
        yield (
            f'evaluation.skip_schedule: {e.skip_schedule} spaces noise levels, which the sampler '
            'consistency has fixed; leave it out'
        )
    try:
        check_guidance(e.guidance_scale, 'evaluation.guidance_scale', d.consistency_guidance)
    except UserError as error:
        yield str(error)
