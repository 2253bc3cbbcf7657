"""A trained model in a Python program: its weights, its network as a function, and its samples."""

from __future__ import annotations

import collections
import os
import threading
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, Shaped, UInt

from jaxunet.checkpoint.load import Model as Weights
from jaxunet.checkpoint.load import load_model
from jaxunet.config import Config, resolve, to_dict
from jaxunet.data.arrays import values_of
from jaxunet.data.classes import Classes
from jaxunet.data.crop import Pixels, Shape
from jaxunet.data.fitting import fit
from jaxunet.data.picture import WHITE, read_mask, read_picture
from jaxunet.data.reading import PLAIN, Reading
from jaxunet.diffusion.process import make_diffusion
from jaxunet.model.unet import Params, build_unet
from jaxunet.ops.backends import choose
from jaxunet.runtime.errors import UserError, near_misses
from jaxunet.runtime.guarded import guarded
from jaxunet.runtime.paths import check_path
from jaxunet.runtime.progress import progress_bar
from jaxunet.sampling.arguments import as_options, as_progress, as_type, as_whole
from jaxunet.sampling.generator import Generator
from jaxunet.sampling.guidance import Weaker
from jaxunet.sampling.low_res import given_pictures
from jaxunet.sampling.options import SamplerConfig, check_can_be_guided, usual_steps
from jaxunet.sampling.picture import Picture
from jaxunet.weights import Stated, names_folder, write_folder, write_weights
from jaxunet.weights.presets import PRESETS

Progress: TypeAlias = bool | Callable[[float], object]
PathLike: TypeAlias = str | os.PathLike[str]
KEPT = 4  # most samplers of a model that stay compiled


class Model:
    """Weights with the network and the process that they were trained for.

    Attributes:
      config: `jaxunet.config.Config` of the model.
      params: the weights, a tree of float32 arrays. They may be replaced by a tree of the same
        shapes.
      class_names: names of the labels 0, 1, ...; empty if there are none.
      note: says which weights these are.
    """

    def __init__(self, weights: Weights, config: Config) -> None:
        self.config = config
        self.params: Params = weights.params
        self.class_names = weights.class_names
        self.note = weights.note
        self._new_attention_order, self._step = bool(weights.new_attention_order), weights.step
        self._network = build_unet(config, choose(config.backend, config.precision).ops)
        self._generators: collections.OrderedDict[object, Generator] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        shape = 'x'.join(map(str, self.config.image_shape))
        return f'<jaxunet model of {shape} images: {self.note}>'

    def predict(
        self,
        x: Float[ArrayLike, 'batch height width channels'],
        t: ArrayLike,
        labels: Int[ArrayLike, ' batch'] | None = None,
        *,
        low_res: Float[ArrayLike, 'batch low_height low_width low_channels'] | None = None,
        params: Params | None = None,
    ) -> Float[Array, 'batch height width out_channels']:
        """Calls the network; a function that JAX can differentiate and compile.

        Args:
          x: noisy images, scaled as in `jaxunet.diffusion.process`; clean pixels are −1 to 1.
          t: for each image, or for all, the timestep 0 to T − 1 or, for continuous noise levels,
            250 ln σ of edm, with any `diffusion.edm_time_scale`, and 1000 t of flow.
          labels: classes of a conditional model, −1 = unconditional; None = all unconditional.
          low_res: the pictures that a super-resolution network enlarges, from −1 to 1.
          params: weights to use; None = `Model.params`.

        Returns what the objective predicts, such as the noise; float32.

        Raises:
          UserError: images of another shape, or labels for an unconditional model.
        """
        images, channels = jnp.asarray(x), self.config.image_shape[2]
        if images.ndim != 4 or images.shape[3] != channels:
            raise UserError(
                f'x: expected shape (n, height, width, {channels}), found {images.shape}'
            )
        t = jnp.broadcast_to(jnp.asarray(t), images.shape[:1])
        if self.config.model.num_classes:
            labels = jnp.broadcast_to(jnp.asarray(-1 if labels is None else labels), t.shape)
        elif labels is not None:
            raise UserError('labels: the model is unconditional (model.num_classes=0)')
        weights = jax.tree.map(jnp.asarray, self.params if params is None else params)
        pictures = None if low_res is None else jnp.asarray(low_res)
        return self._network.predict(weights, images, t, labels, low_res=pictures)

    def save(self, path: PathLike, *, format: str = '', license: str = '') -> None:
        """Writes the weights for other programs; the extension names the format.

        Args:
          path: .safetensors (any model), .bin (for unet.cu) or .pt (for guided-diffusion); or a new
            folder for diffusers, with a slash at its end or `format='diffusers'`.
          format: diffusers; '' = as the path says.
          license: for a folder: the licence in its model card, such as mit.

        Raises:
          UserError: an unknown extension, a format that cannot hold the model, or a file that
            cannot be written.
        """
        check_path(path, 'path')
        as_type('license', license, str)
        params = jax.tree.map(np.asarray, self.params)
        with guarded('the weights'):
            if names_folder(path, format):
                names, step = self.class_names, self._step
                write_folder(
                    path, params, self.config, class_names=names, license_name=license, step=step
                )
                return
            if license:
                raise UserError(
                    'license: only a folder of diffusers has a model card; leave it out'
                )
            write_weights(
                path,
                params,
                self.config,
                new_attention_order=self._new_attention_order
                and not os.fspath(path).lower().endswith('.bin'),
                class_names=self.class_names,
            )

    @guarded('drawing samples')
    def sample(
        self,
        n: int | None = None,
        *,
        seed: int = 0,
        steps: int | None = None,
        sampler: str | None = None,
        class_labels: int | str | Sequence[int | str] | None = None,
        guidance_scale: float = 1.0,
        guide: Model | None = None,
        init_image: PathLike | ArrayLike | None = None,
        mask: PathLike | ArrayLike | None = None,
        strength: float | None = None,
        low_res: PathLike | ArrayLike | None = None,
        condition: PathLike | ArrayLike | None = None,
        batch_size: int = 64,
        progress: Progress = True,
        **options: Any,
    ) -> Shaped[np.ndarray, 'n height width channels']:
        """Draws images.

        Image i depends on the weights, the seed, i and its class, not on `n` or `batch_size`, up to
        rounding. A sampler is compiled at its first use and kept.

        Args:
          n: number of images; None = 16, or one of each picture of `low_res` or `condition`.
          seed: 0 to 2³² − 1.
          steps: sampling steps; None = the usual number of the sampler.
          sampler: ddpm, ddim, dpmpp_2m, unipc, heun or consistency; None = that of the model's
            objective.
          class_labels: labels or names of classes, which take turns; None = every class in turn.
          guidance_scale: classifier-free guidance, or that by `guide`; 1 = none.
          guide: a weaker model of the same images, for autoguidance.
          init_image: a picture to vary (SDEdit), as a path or an array.
          mask: the part of `init_image` to redraw, where it is white or True (RePaint).
          strength: with `init_image`: noise to start from, above 0 to 1 (only noise).
          low_res: pictures for a super-resolution network, as a path or arrays.
          condition: the same argument, by the name for a model of pairs (data.condition=
            folder:PATH), whose pictures may have any size.
          batch_size: images drawn at a time, over all devices.
          progress: show a bar, or a function of the share that is drawn, 0 to 1. Whatever it raises
            ends the drawing.
          options: other fields of `jaxunet.sampling.options.SamplerConfig`, such as eta and
            guidance_range.

        Returns uint8 images. With data.bits=16 they are uint16, or have the range of the set
        (data.range), as float32 if it is not one of whole numbers of 16 bits.

        Raises:
          UserError: an option that the model or the sampler does not have, or a picture that does
            not fit.
        """
        if low_res is not None and condition is not None:
            raise UserError('low_res, condition: are one argument; give one of them')
        pictures = given_pictures(self.config, low_res if condition is None else condition)
        n = n if n is not None else 16 if pictures is None else len(pictures)
        progress = as_progress(progress)
        n, batch_size = as_whole('n', n, 1), as_whole('batch_size', batch_size, 1)
        seed = as_whole('seed', seed, 0)
        if not (guide is None or isinstance(guide, Model)):
            raise UserError(f'guide: expected a model, as of jaxunet.load(PATH), found {guide!r}')
        if guide is None:
            check_can_be_guided(self.config, guidance_scale, 'guidance_scale')
        labels = self._labels(class_labels, n)
        name = as_type('sampler', sampler, str | None)
        how = self._options(name, steps, guidance_scale, options)
        strength = as_type('strength', strength, float | None)
        picture = self._picture(init_image, mask, strength)
        generator = self._generator(how, min(batch_size, n), picture, guide)
        return self._drawn(generator, n, seed, labels, pictures, progress)

    def _drawn(
        self,
        generator: Generator,
        n: int,
        seed: int,
        labels: Int[np.ndarray, ' n'] | None,
        pictures: UInt[np.ndarray, 'pictures h w c'] | None,
        progress: Progress,
    ) -> Shaped[np.ndarray, 'n height width channels']:
        placed, images = generator.put(self.params), []
        with progress_bar(total=n, unit='image', disable=progress is not True) as bar:
            for first in range(0, n, generator.batch_size):
                indices = np.arange(first, min(first + generator.batch_size, n))

                def tell(share: float, first: int = first, drawn: int = len(indices)) -> bool:
                    bar.update(first + share * drawn - bar.n)
                    if callable(progress):
                        progress((first + share * drawn) / n)
                    return True

                images.append(
                    generator(
                        placed,
                        seed=seed,
                        indices=indices,
                        labels=None if labels is None else labels[indices],
                        low_res=None if pictures is None else pictures[indices % len(pictures)],
                        progress=tell,
                    )
                )
        return generator.reading.stored(np.concatenate(images))

    def _options(
        self, name: str | None, steps: int | None, scale: float, options: dict[str, Any]
    ) -> SamplerConfig:
        if steps is None and not {'respacing', 'timesteps'} & set(options):
            steps = usual_steps(name, make_diffusion(self.config.diffusion))
        return SamplerConfig(
            name=name, **as_options({'steps': steps, 'guidance_scale': scale} | options)
        )

    def _generator(
        self, how: SamplerConfig, batch_size: int, picture: Picture | None, guide: Model | None
    ) -> Generator:
        def made() -> Generator:
            return Generator(
                self.config,
                how,
                batch_size=batch_size,
                devices=jax.local_devices(),
                picture=picture,
                weaker=None if guide is None else Weaker(guide.config, guide.params, guide.note),
            )

        # A sampler is compiled with a picture's strength, and holds the weights of its guide.
        if picture is not None or guide is not None:
            return made()
        key = (how, batch_size)
        with self._lock:
            if key not in self._generators:
                generator = made()
                generator.compile(generator.put(self.params))
                self._generators[key] = generator
            self._generators.move_to_end(key)
            while len(self._generators) > KEPT:
                self._generators.popitem(last=False)
            return self._generators[key]

    def _labels(
        self, given: int | str | Sequence[int | str] | None, n: int
    ) -> Int[np.ndarray, ' n'] | None:
        count = self.config.model.num_classes
        if not count:
            if given is not None:
                raise UserError(
                    'class_labels: the model is unconditional (model.num_classes=0); leave it out'
                )
            return None
        one = given is None or isinstance(given, int | np.integer | str)
        items = [] if given is None else [given] if one else list(given)  # type: ignore[arg-type]
        if given is not None and not items:
            raise UserError('class_labels: expected labels or names, found none')
        classes = Classes(count, self.class_names)
        chosen = classes.labels_of([str(item) for item in items])
        return np.resize(np.array(chosen or range(count), np.int32), n)

    def _picture(
        self,
        image: PathLike | ArrayLike | None,
        mask: PathLike | ArrayLike | None,
        strength: float | None,
    ) -> Picture | None:
        if image is None:
            for name, value in (('mask', mask), ('strength', strength)):
                if value is not None:
                    raise UserError(f'{name}: needs init_image, which is not given')
            return None
        shape, redraw = self.config.image_shape, None
        reading = Reading.of(self.config)
        if mask is not None and _is_path(mask) != _is_path(image):
            raise UserError('mask: expected a path beside a path, or an array beside an array')
        if _is_path(image):
            if mask is not None:
                redraw = read_mask(mask, image, shape)  # type: ignore[arg-type]
            pixels = read_picture(image, shape, reading)  # type: ignore[arg-type]
            return Picture(pixels, redraw, strength)
        pixels = _fitted(image, shape, 'init_image', reading)
        if mask is not None:
            given, size = np.asarray(mask), np.asarray(image).shape[:2]
            if given.shape[:2] != size:
                raise UserError(
                    f'mask: expected the size of init_image, {size}, found {given.shape[:2]}'
                )
            whites = given.astype(np.float32) if given.dtype == bool else given
            redraw = _fitted(whites, (*shape[:2], 1), 'mask')[..., 0] >= WHITE
            if not redraw.any():
                raise UserError('mask: nothing to redraw: it has no white; white is redrawn')
        return Picture(pixels, redraw, strength)


@guarded('the weights')
def load(
    path: PathLike,
    *,
    ema: str = '',
    preset: str | None = None,
    config: Config | None = None,
    new_attention_order: bool | None = None,
    backend: str | None = None,
    precision: str | None = None,
    **stated: Any,
) -> Model:
    """Reads a model.

    Args:
      path: a workdir, one checkpoint in it, a weight file: .safetensors, .bin (unet.cu) or .pt
        (guided-diffusion, unet.cu, ddpm-torch), a folder of diffusers, or the name of a model on
        the Hugging Face hub, OWNER/NAME or OWNER/NAME@REVISION (needs the extra `hub`).
      ema: rate or width of the average of a run's weights; '' = its first rate, none = the weights
        themselves.
      preset: name of the published model that a weight file is (docs/weights.md).
      config: the model of a weight file that does not describe it.
      new_attention_order: guided-diffusion's option, for a file that does not state it.
      backend: as the field of a config; None = that of the model.
      precision: as `backend`.
      stated: what a weight file leaves open, as the flags of `jaxunet.sample`: image_size,
        num_heads, schedule, diffusion_steps, objective, ...

    Raises:
      UserError: nothing there can be read, or it leaves open what the message names.
    """
    check_path(path, 'path')
    as_type('ema', ema, str)
    if not (config is None or isinstance(config, Config)):
        raise UserError(f'config: expected a jaxunet.config.Config, found {config!r}')
    order = as_type('new_attention_order', new_attention_order, bool | None)
    given: dict[str, Any] = {'config': config, 'new_attention_order': order, **stated}
    if preset is not None:
        if preset not in PRESETS:
            known = f'{", ".join(sorted(PRESETS))}, found {preset!r}{near_misses(preset, PRESETS)}'
            raise UserError(f'preset: expected one of {known}')
        if config is not None or new_attention_order is not None or stated:
            raise UserError(f'preset: {preset} already describes the model; leave the others out')
        found = PRESETS[preset]
        given = {'config': found.config(), 'new_attention_order': found.new_attention_order}
    hints = typing.get_type_hints(Stated)
    for name, value in stated.items():
        if name not in hints:
            raise UserError(f'{name}: unknown option{near_misses(name, hints)}')
        one = name.endswith('_size') and isinstance(value, int)
        given[name] = as_type(name, (value,) if one else value, hints[name])
    weights = load_model(os.fspath(path), ema=ema, **given)
    changes = {'backend': backend, 'precision': precision}
    fields = to_dict(weights.config) | {k: v for k, v in changes.items() if v is not None}
    return Model(weights, resolve(fields))


def _is_path(value: object) -> bool:
    return isinstance(value, str | os.PathLike)


def _fitted(image: object, shape: Shape, what: str, reading: Reading = PLAIN) -> Pixels:
    return fit(values_of(image, what, single=True), shape, what, reading=reading)[0]
