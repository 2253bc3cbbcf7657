"""Samples that start from a picture (SDEdit) or keep a part of it (RePaint), with any sampler.

Every objective has x = √ᾱ x_0 + √(1 − ᾱ) ε, and both methods need nothing else:

- SDEdit starts from the picture at a noise level below pure noise. The *strength* s of a level is
  its angle, √ᾱ = cos(s π/2) and √(1 − ᾱ) = sin(s π/2), so that a strength means the same amount of
  noise for every objective, schedule and sampler. 1 is pure noise.
- RePaint replaces the known pixels by the picture at the current noise level after every
  evaluation, with fresh noise. The redrawn pixels match them better if stretches of steps are
  repeated: the sampler jumps back to a higher noise level, x ← √(ᾱ'/ᾱ) x + √(1 − ᾱ'/ᾱ) z, and
  goes on from there.

Sources: SDEdit, Meng et al. 2021, arXiv 2108.01073; RePaint, Lugmayr et al. 2022, arXiv 2201.09865,
algorithm 1 and appendix.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float64, Int, UInt

from jaxunet.config.samplers import CONSISTENCY_LEVELS, FIRST_LEVEL
from jaxunet.data.crop import Pixels
from jaxunet.data.images import from_pixels
from jaxunet.data.picture import Redraw
from jaxunet.diffusion.levels import signal_and_noise
from jaxunet.diffusion.process import Images
from jaxunet.runtime.errors import UserError
from jaxunet.sampling.options import SamplerConfig
from jaxunet.sampling.sampler import Keys, Sampler, State, initial_noise, initial_state
from jaxunet.sampling.solvers import Coefficients

Levels = Float64[np.ndarray, ' rows']  # by row of a sampler's table
Rows = Int[np.ndarray, ' executed']  # rows in order of execution
Executed = Float64[np.ndarray, ' executed']

STRENGTH = 0.6  # default without a mask
RESAMPLE = 5  # default with a mask
JUMPS = 20  # stretches into which the steps are divided by default
JUMP, KNOWN = 2**31, 2**31 + 1  # streams of noise, above all numbers of evaluations


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture to start from.

    Fields:
      pixels: at the model's size.
      redraw: mask of the pixels to redraw; None = all of them.
      strength: noise level to start from, above 0 and at most 1 (pure noise); None = `STRENGTH`,
        or 1 with `redraw`.
      resample: number of times that each stretch of steps is run, 1 = no repetition; needs
        `redraw`; None = `RESAMPLE` with it.
      jump_length: steps of a stretch; None = a twentieth of the steps, at least 1.
    """

    pixels: Pixels
    redraw: Redraw | None = None
    strength: float | None = None
    resample: int | None = None
    jump_length: int | None = None

    def start(self) -> float:
        """Returns the strength, or its default; raises `UserError` if it is out of range."""
        strength = self.strength
        if strength is None:
            strength = STRENGTH if self.redraw is None else 1.0
        if not 0 < strength <= 1:
            raise UserError(f'strength: expected more than 0 and at most 1, found {strength}')
        return strength


@dataclass(frozen=True, eq=False)
class Schedule:
    """A sampler's evaluations and the changes to samples between them; see `make_schedule`.

    Fields:
      picture: the picture that sampling starts from.
      sampler: its evaluations in order of execution; repeated ones occur several times.
      strength, resample, jump_length: those of `Picture` with defaults filled in.
      signal, noise: √ᾱ and √(1 − ᾱ) at each evaluation, then those of the image, 1 and 0.
      draws: for each of these levels, the number of the noise that the known pixels get.
      scale, raised: the jump x ← scale · x + raised · z after each evaluation; 1 and 0 for none.
    """

    picture: Picture
    sampler: Sampler
    strength: float
    resample: int
    jump_length: int
    signal: Float64[np.ndarray, ' levels']
    noise: Float64[np.ndarray, ' levels']
    draws: Int[np.ndarray, ' levels']
    scale: Executed
    raised: Executed

    @property
    def identity(self) -> dict[str, object]:
        """Everything that determines the samples, beside the sampler, as JSON values."""
        facts: dict[str, object] = {
            'init_image': _digest(self.picture.pixels),
            'strength': self.strength,
        }
        if self.picture.redraw is not None:
            facts |= {
                'mask': _digest(self.picture.redraw),
                'resample': self.resample,
                'jump_length': self.jump_length,
            }
        return facts


def _digest(pixels: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(pixels).tobytes()).hexdigest()[:16]


def beginning_with(picture: Picture, sampler: SamplerConfig) -> SamplerConfig:
    """Returns the options of a consistency model, which can begin at any noise level.

    Without steps or levels, it jumps from that of the strength; a strength of 1 changes nothing.
    With a mask, it takes all its levels, on which the redrawn part comes to fit the kept one.
    Another sampler stays as it is, for `resolve_options` to refuse.
    """
    given = sampler.steps is not None or sampler.levels is not None
    if given or sampler.name not in (None, 'consistency'):
        return sampler
    if picture.redraw is not None:
        return dataclasses.replace(sampler, steps=max(CONSISTENCY_LEVELS))
    level = math.tan(picture.start() * math.pi / 2)
    return sampler if level >= FIRST_LEVEL else dataclasses.replace(sampler, levels=(level,))


def make_schedule(sampler: Sampler, picture: Picture) -> Schedule:
    """Returns the evaluations that redraw a picture.

    They begin at the sampler's noise level that is nearest to the strength.

    Raises:
      UserError: a strength or a number of repetitions out of range.
    """
    strength = picture.start()
    signal, noise = _levels(sampler)
    per_step = 2 if sampler.memory in ('noise', 'velocity') else 1  # evaluations of a Heun step
    angles = np.arctan2(noise, signal)[::per_step] * 2 / np.pi
    first = 0 if strength == 1 else int(np.argmin(np.abs(angles - strength)))
    resample, jump = _repetitions(picture, len(angles) - first)
    rows = _rows(first, angles, per_step, resample, jump)
    scale, raised = _jumps(signal, noise, rows)
    # Both evaluations of a Heun step see the known pixels with the same noise.
    ends = (rows + 1) % per_step == 0
    return Schedule(
        picture,
        _reordered(sampler, rows),
        strength,
        resample,
        jump,
        signal=np.append(signal[rows], 1.0),
        noise=np.append(noise[rows], 0.0),
        draws=np.cumsum(np.append(0, ends)),
        scale=scale,
        raised=raised,
    )


def _levels(sampler: Sampler) -> tuple[Levels, Levels]:
    """Returns √ᾱ and √(1 − ᾱ) at each evaluation."""
    if sampler.diffusion.continuous:
        return signal_and_noise(sampler.diffusion.config, np.asarray(sampler.times, np.float64))
    alphas = sampler.diffusion.alphas_cumprod[sampler.timesteps]
    return np.sqrt(alphas), np.sqrt(1 - alphas)


def _repetitions(picture: Picture, steps: int) -> tuple[int, int]:
    """Returns `resample` and `jump_length`, checked or with their defaults, for this many steps."""
    resample, jump = picture.resample, picture.jump_length
    if picture.redraw is None:
        for name, value in (('resample', resample), ('jump_length', jump)):
            if value is not None:
                raise UserError(f'{name}: {value} needs a mask; leave it out, or give one')
        return 1, 1
    if resample is not None and resample < 1:
        raise UserError(f'resample: expected 1 (no repetition) or more, found {resample}')
    if resample is not None and resample > 1 and steps == 1:
        raise UserError(
            f'resample: {resample} has nothing to repeat, as one step starts at this strength; '
            'raise strength or steps'
        )
    if jump is not None and not 1 <= jump < max(steps, 2):
        raise UserError(
            f'jump_length: expected 1 to {max(steps - 1, 1)}, as {steps} steps start at this '
            f'strength, found {jump}'
        )
    return RESAMPLE if resample is None else resample, jump or max(1, steps // JUMPS)


def _rows(first: int, angles: Levels, per_step: int, resample: int, jump: int) -> Rows:
    """Returns the rows of a sampler's table in the order in which they are run.

    From every `jump`-th step, counted from the last, the sampler goes back by `jump` steps, until
    the stretch was run `resample` times. With churn, a step may start at less noise than a later
    one, which then does not jump back to it.

    Args:
      first: the first step.
      angles: of the noise levels at which the steps start.
      per_step: rows of a step; the last step has one.
    """
    total = len(angles)
    left = {
        step: resample - 1
        for step in range(total - 1, first + jump - 1, -jump)
        if angles[step - jump] >= angles[step]
    }
    rows, step = list[int](), first
    while step < total:
        rows += range(per_step * step, min(per_step * (step + 1), per_step * (total - 1) + 1))
        step += 1
        if left.get(step, 0) > 0:
            left[step] -= 1
            step -= jump
    return np.array(rows)


def _jumps(signal: Levels, noise: Levels, rows: Rows) -> tuple[Executed, Executed]:
    """Returns the factors of x and of fresh noise after each row; 1 and 0 where none is a jump."""
    scale, raised = np.ones(len(rows)), np.zeros(len(rows))
    for k in np.flatnonzero(np.diff(rows) != 1):
        arrived, next_row = rows[k] + 1, rows[k + 1]
        scale[k] = signal[next_row] / signal[arrived]
        raised[k] = np.sqrt(noise[next_row] ** 2 - (scale[k] * noise[arrived]) ** 2)
    return scale, raised


def _reordered(sampler: Sampler, rows: Rows) -> Sampler:
    """Returns the sampler that runs these rows of its table.

    A row that does not follow its predecessor has no memory of it. Its x_0 takes the memory's
    place, which makes the step of DPM-Solver++ first order; steps of Heun begin without memory. In
    the row after it, the memory takes the place of the older one.
    """
    table = sampler.coefficients
    columns = {field.name: getattr(table, field.name)[rows] for field in dataclasses.fields(table)}
    forgets = np.diff(rows, prepend=-2) != 1
    second = np.append(False, forgets[:-1]) & ~forgets
    forgotten = np.where(forgets, columns['memory'] + columns['older'], 0.0)
    assert sampler.memory == 'x0' or not forgotten.any()
    columns['x0'] = columns['x0'] + forgotten
    columns['memory'] = np.where(forgets, 0.0, columns['memory'] + second * columns['older'])
    columns['older'] = np.where(forgets | second, 0.0, columns['older'])
    return dataclasses.replace(
        sampler,
        coefficients=Coefficients(**columns),
        times=sampler.times[rows],
        guided=None if sampler.guided is None else sampler.guided[rows],
    )


class Canvas(NamedTuple):
    """A picture as arrays on a device.

    Fields:
      pixels: in [−1, 1].
      redraw: 1 where pixels are redrawn; None = everywhere.
    """

    pixels: Float[Array, '1 height width channels']
    redraw: Bool[Array, '1 height width 1'] | None

    @classmethod
    def of(cls, picture: Picture) -> Canvas:
        """Returns the arrays of a picture, with pixels as in training."""
        pixels = jnp.asarray(from_pixels(picture.pixels))[None]
        redraw = picture.redraw
        return cls(pixels, None if redraw is None else jnp.asarray(redraw)[None, :, :, None])


def start_state(keys: Keys, schedule: Schedule, canvas: Canvas) -> State:
    """Returns the state before the first evaluation."""
    _, height, width, channels = canvas.pixels.shape
    state = initial_state(keys, (height, width, channels), schedule.sampler)
    if schedule.strength < 1:
        noise = initial_noise(keys, (height, width, channels))
        x = float(schedule.signal[0]) * canvas.pixels + float(schedule.noise[0]) * noise
        state = state._replace(x=x)
    return state._replace(x=_with_known(state.x, keys, schedule, canvas, jnp.asarray(0)))


def after_evaluation(
    x: Images, keys: Keys, schedule: Schedule, canvas: Canvas, k: Int[Array, '']
) -> Images:
    """Returns the samples before the evaluation that follows the k-th one."""
    if schedule.raised.any():
        scale, raised = (
            jnp.asarray(factors, x.dtype)[k] for factors in (schedule.scale, schedule.raised)
        )
        x = scale * x + raised * _noise(keys, JUMP, k, x)
    return _with_known(x, keys, schedule, canvas, k + 1)


def _with_known(
    x: Images, keys: Keys, schedule: Schedule, canvas: Canvas, level: Int[Array, '']
) -> Images:
    """Returns x with the known pixels replaced by the picture at a noise level."""
    if canvas.redraw is None:
        return x
    signal, noise = (
        jnp.asarray(table, x.dtype)[level] for table in (schedule.signal, schedule.noise)
    )
    fresh = _noise(keys, KNOWN, jnp.asarray(schedule.draws)[level], x)
    return jnp.where(canvas.redraw, x, signal * canvas.pixels + noise * fresh)


def with_kept_pixels(
    images: UInt[np.ndarray, 'samples height width channels'], picture: Picture
) -> UInt[np.ndarray, 'samples height width channels']:
    """Returns finished images with the picture's own pixels where they are kept."""
    if picture.redraw is None:
        return images
    return np.where(picture.redraw[None, :, :, None], images, picture.pixels[None])


def _noise(keys: Keys, stream: int, draw: Int[Array, ''], like: Images) -> Images:
    """Returns noise of the shape of `like` that no evaluation of the sampler uses."""
    fold = jax.random.fold_in
    _, height, width, channels = like.shape
    return initial_noise(
        jax.vmap(lambda key: fold(fold(key, stream), draw))(keys), (height, width, channels)
    )
