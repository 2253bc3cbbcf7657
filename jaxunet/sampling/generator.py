"""Draws batches of images from parameters, on any number of devices, with one compiled program."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, UInt

from jaxunet.config import Config, to_dict
from jaxunet.data.images import from_pixels, plain_colours, to_pixels
from jaxunet.data.reading import Reading
from jaxunet.diffusion.process import make_diffusion
from jaxunet.model.encoder import Encoder
from jaxunet.model.noisy_classifier import build_classifier
from jaxunet.model.unet import Params, build_unet
from jaxunet.ops.backends import choose
from jaxunet.ops.references import UPDATE
from jaxunet.runtime import compiled_cache
from jaxunet.sampling.classifier_guidance import Gradient, Guide, class_gradient
from jaxunet.sampling.evaluation import LabelledDenoiser
from jaxunet.sampling.guidance import Weaker, check_weaker, guided
from jaxunet.sampling.options import SamplerConfig
from jaxunet.sampling.picture import (
    Canvas,
    Picture,
    Schedule,
    after_evaluation,
    beginning_with,
    make_schedule,
    start_state,
    with_kept_pixels,
)
from jaxunet.sampling.sampler import (
    Keys,
    Sampler,
    State,
    initial_state,
    make_sampler,
    run,
    sample_keys,
)

SEGMENTS = 20  # compiled calls per batch; progress is reported after each


def sampler_of(config: Config, sampler: SamplerConfig, *, weaker: bool = False) -> Sampler:
    """Returns the sampler of a model; raises `UserError` for options that do not fit the model."""
    diffusion = make_diffusion(config.diffusion)
    classes, side = config.model.num_classes, min(config.data.image_size)
    return make_sampler(sampler, diffusion, num_classes=classes, weaker=weaker, side=side)


class StoppedError(Exception):
    """Samples whose `progress` returned False."""


class Inputs(NamedTuple):
    """The inputs of a batch, on the devices, besides its noise.

    Fields:
      keys: one per sample.
      labels: int32; −1 = unconditional.
      low_res: the pictures that a super-resolution network enlarges, in [−1, 1]; None for others.
    """

    keys: Keys
    labels: Int[Array, ' batch']
    low_res: Float[Array, 'batch low_height low_width low_channels'] | None


class Others(NamedTuple):
    """The weights of the networks that guide the samples; None where there is none."""

    classifier: Params | None
    weaker: Params | None


class Generator:
    """Draws samples of the model that `config` describes.

    Sample i depends only on (seed, i, its label), not on the batch size or the number of devices,
    up to the rounding of kernels for other batch sizes.

    Args:
      config: the model, its diffusion process, backend and precision.
      sampler: the sampling options.
      batch_size: samples drawn at a time, over all devices; rounded up to a multiple of their
        number.
      devices: local devices that share each batch.
      picture: a picture to start from; None = start from noise.
      guide: a classifier, checked, that guides the samples to their labels; None = none does.
      weaker: a model that guides by its mistakes, in place of the unconditional prediction; None =
        none does.

    Attributes:
      config: as given.
      kernels: those of its backend.
      guide, weaker: as given.
      reading: how values became the pixels that the model was trained on.
      sampler: the evaluations in order of execution.
      schedule: the changes to samples between evaluations; None without a picture.

    Raises:
      UserError: options that the sampler or the model does not support, or a weaker model of
        another kind.
    """

    def __init__(
        self,
        config: Config,
        sampler: SamplerConfig,
        *,
        batch_size: int,
        devices: Sequence[jax.Device],
        picture: Picture | None = None,
        guide: Guide | None = None,
        weaker: Weaker | None = None,
    ) -> None:
        self.image_shape, self.low_res_shape = config.image_shape, config.low_res_shape
        self.reading = Reading.of(config)
        if picture is not None and config.diffusion.objective == 'consistency':
            sampler = beginning_with(picture, sampler)
        self.sampler = sampler_of(config, sampler, weaker=weaker is not None)
        self.guide, self.weaker = guide, weaker
        if weaker is not None:
            check_weaker(weaker, config, sampler.guidance_scale)
        self.schedule: Schedule | None = None
        if picture is not None:
            self.schedule = make_schedule(self.sampler, picture)
            self.sampler = self.schedule.sampler
        self.batch_size = -(-batch_size // len(devices)) * len(devices)
        mesh = Mesh(np.array(devices), ('data',))
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._split = NamedSharding(mesh, PartitionSpec('data'))
        self.config, self._devices = config, list(devices)
        self.kernels = choose(config.backend, config.precision)
        self._segment = self._jit_segment(mesh)
        self._initial = jax.jit(self._initial_state, out_shardings=self._split)
        # Not constants of the program, which would then be compiled anew for every picture, and
        # hold a classifier's weights twice.
        self._canvas = (
            None if picture is None else jax.device_put(Canvas.of(picture), self._replicated)
        )
        self._others = Others(
            None if guide is None else self.put(guide.classifier.params),
            None if weaker is None else self.put(weaker.params),
        )
        self._compiled: jax.stages.Compiled | None = None

    def _gradient(self, params: Params | None, labels: Array) -> Gradient | None:
        """Returns the gradient that guides samples to their labels; None without a classifier."""
        if self.guide is None:
            return None
        classifier, scale = self.guide
        network = build_classifier(classifier.config, classifier.classes, self.kernels.ops)
        params = self._narrowed(network, params, classifier.config.precision)
        return class_gradient(network, params, labels, scale)

    def _narrowed(self, network: Encoder, params: Params | None, precision: str) -> Params:
        """Converts weights to a network's type before the loop over evaluations.

        XLA would leave the casts of the layers in the loop.
        """
        narrow = (self.kernels.update or UPDATE).narrow
        return network.narrowed(params, lambda arrays: narrow(arrays, precision))

    def _jit_segment(self, mesh: Mesh) -> jax.stages.Wrapped:
        """Returns the program that runs a range of evaluations on every device's samples."""
        config = self.config

        def segment(
            params: Params,
            state: State,
            inputs: Inputs,
            start: Array,
            stop: Array,
            canvas: Canvas | None,
            others: Others,
        ) -> State:
            keys, labels = inputs.keys, inputs.labels
            guidance_scale = self.sampler.config.guidance_scale
            denoise = self._denoiser(config, params, inputs)
            weaker = None
            if self.weaker is not None:
                theirs = self.weaker.config_beside(config)
                weaker = self._denoiser(theirs, others.weaker, inputs)

            def after(x: Array, k: Array) -> Array:
                assert self.schedule is not None
                assert canvas is not None
                return after_evaluation(x, keys, self.schedule, canvas, k)

            return run(
                guided(denoise, labels, guidance_scale, weaker),
                state,
                keys,
                self.sampler,
                start=start,
                stop=stop,
                after=None if canvas is None else after,
                class_gradient=self._gradient(others.classifier, labels),
                unguided=guided(denoise, labels, 1.0),
            )

        # shard_map instead of automatic partitioning: XLA cannot partition hand-written kernels.
        whole, split = PartitionSpec(), PartitionSpec('data')
        in_specs = (whole, split, split, whole, whole, whole, whole)
        mapped = jax.shard_map(
            segment, mesh=mesh, in_specs=in_specs, out_specs=split, check_vma=False
        )
        return jax.jit(mapped, donate_argnums=1)

    def _denoiser(self, config: Config, params: Params | None, inputs: Inputs) -> LabelledDenoiser:
        """Returns a network with its weights; guidance may double the batch of `inputs`."""
        model = build_unet(config, self.kernels.ops)
        params = self._narrowed(model, params, config.precision)

        def denoise(x: Array, t: Array, labels: Array) -> Array:
            pictures = inputs.low_res
            if pictures is not None:
                pictures = jnp.repeat(pictures, len(x) // len(pictures), axis=0)
            given = labels if config.model.num_classes else None
            return model.predict(params, x, t, given, low_res=pictures)

        return denoise

    def put(self, params: Params) -> Params:
        """Returns the parameters, replicated on this generator's devices."""
        return jax.device_put(params, self._replicated)

    def compile(self, params: Params) -> None:
        """Compiles the sampling loop ahead of its first use.

        Args:
          params: parameters from `put`, or their shapes.
        """
        shape = self.low_res_shape
        inputs = self._inputs(
            0,
            np.arange(self.batch_size),
            np.full(self.batch_size, -1, np.int32),
            None if shape is None else np.zeros((self.batch_size, *shape), self.reading.dtype),
        )
        bound = jax.device_put(np.int32(0), self._replicated)
        state = self._initial(inputs.keys, self._canvas)
        arguments = (params, state, inputs, bound, bound, self._canvas, self._others)

        def build() -> jax.stages.Compiled:
            return self._segment.lower(*arguments).compile()

        began = time.perf_counter()
        if compiled_cache.keeps(self._devices, self.kernels.names.values()):
            self._compiled = compiled_cache.compiled(
                build, self._fields(), arguments, self._devices, {}, result=state
            )
        else:
            self._compiled = build()
        logging.info('the sampler was ready after %.1f s', time.perf_counter() - began)

    def _fields(self) -> dict[str, object]:
        """Returns everything that the compiled sampler depends on, except its arguments."""
        constants, tree = jax.tree.flatten((_constants(self.sampler), _constants(self.schedule)))
        digest = hashlib.sha256(str(tree).encode())
        for value in constants:
            digest.update(np.asarray(value).tobytes() if np.ndim(value) else repr(value).encode())
        fields: dict[str, object] = {
            'config': to_dict(self.config),
            'ops': dict(self.kernels.names),
            'sampler': dataclasses.asdict(self.sampler.config),
            'constants': digest.hexdigest(),
        }
        for other in (self.guide, self.weaker):
            if other is not None:
                fields |= other.fields()
        return fields

    def compile_for(self, template: Params) -> None:
        """Compiles as `compile`, before there are parameters.

        Args:
          template: their shapes and types, as from `state_template`.
        """
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._replicated), template
        )
        self.compile(shapes)

    def __call__(
        self,
        params: Params,
        *,
        seed: int,
        indices: Int[np.ndarray, ' samples'],
        labels: Int[np.ndarray, ' samples'] | None = None,
        low_res: UInt[np.ndarray, 'samples low_height low_width low_channels'] | None = None,
        progress: Callable[[float], bool] = lambda _: True,
    ) -> UInt[np.ndarray, 'samples height width channels']:
        """Draws the samples with the given indices.

        Args:
          params: parameters from `put`.
          seed: seed of all samples, 0 to 2³² − 1.
          indices: sample numbers, at most `batch_size` of them.
          labels: class of each sample, −1 = unconditional; None = all unconditional.
          low_res: the pictures that a super-resolution network enlarges.
          progress: called with the completed fraction of the batch; returning False stops.

        Returns:
          Pixels of shape (samples, height, width, channels): uint8, or uint16 with data.bits=16.
          With data.background=keep, their colours are plain, not multiplied by their opacity.

        Raises:
          StoppedError: `progress` returned False.
          ValueError: more indices than `batch_size`, or pictures of another shape.
          UserError: a seed out of range.
        """
        count = len(indices)
        if count > self.batch_size:
            raise ValueError(f'{count} samples do not fit in a batch of {self.batch_size}')
        found = None if low_res is None else low_res.shape[1:]
        if found != self.low_res_shape:
            raise ValueError(f'low_res: expected shape {self.low_res_shape}, found {found}')
        if self._compiled is None:
            self.compile(params)
            assert self._compiled is not None
        pad = (0, self.batch_size - count)
        labels = np.full(count, -1, np.int32) if labels is None else labels.astype(np.int32)
        if low_res is not None:
            low_res = np.pad(low_res, (pad, (0, 0), (0, 0), (0, 0)))
        inputs = self._inputs(seed, np.pad(indices, pad), np.pad(labels, pad), low_res)
        state = self._initial(inputs.keys, self._canvas)
        steps = self.sampler.evaluations
        bounds = np.linspace(0, steps, min(SEGMENTS, steps) + 1).astype(np.int32)
        for start, stop in itertools.pairwise(bounds):
            limits = jax.device_put((start, stop), self._replicated)
            state = self._compiled(params, state, inputs, *limits, self._canvas, self._others)
            state.x.block_until_ready()
            if not progress(stop / steps):
                raise StoppedError
        truncate = bool(self.sampler.config.truncate)
        images = to_pixels(state.x, self.reading.dtype, truncate=truncate)[:count]
        if self.schedule is not None:  # truncated pixels of the picture would be too dark by 1
            images = with_kept_pixels(images, self.schedule.picture)
        return plain_colours(images) if self.reading.keeps else images

    def _initial_state(self, keys: Array, canvas: Canvas | None) -> State:
        if canvas is None:
            return initial_state(keys, self.image_shape, self.sampler)
        assert self.schedule is not None
        return start_state(keys, self.schedule, canvas)

    def _inputs(
        self, seed: int, indices: np.ndarray, labels: np.ndarray, low_res: np.ndarray | None
    ) -> Inputs:
        """Puts the inputs of a batch on the devices; `low_res` are pixels."""
        keys = jax.device_put(sample_keys(seed, indices), self._split)
        pictures = None
        if low_res is not None:
            pictures = jax.device_put(from_pixels(low_res), self._split)
        return Inputs(keys, jax.device_put(jnp.asarray(labels), self._split), pictures)


def _constants(of: Sampler | Schedule | None) -> object:
    """Returns the program's constants that come from a sampler or a schedule, as a tree.

    A picture is not a constant: the program takes it as an argument. Only the presence of a mask
    counts.
    """
    if of is None:
        return None
    fields = dataclasses.asdict(of)
    if isinstance(of, Schedule):
        fields |= {'sampler': None, 'picture': of.picture.redraw is None}
    return fields
