"""The config of a weight file of another program, from its tensors' shapes and what a user states.

Names and shapes of tensors show most of a network. They show neither how attention is divided into
heads nor what the network was trained for: image size, noise schedule, number of timesteps, what it
predicts. A wrong guess gives wrong pictures, so the user must state these facts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypedDict

from jaxunet.config import Config, resolve, to_dict
from jaxunet.config.schema import Fields
from jaxunet.runtime.errors import UserError, itemized
from jaxunet.weights.fields import check_reusable, differences
from jaxunet.weights.names import Shape, parameter_shapes

OBJECTIVES = ('epsilon', 'x0')  # objectives of the other programs; the first is the usual one
TIME_SCALE = 1000  # number of timesteps at which rescale_timesteps has no effect
ORDER_FLAGS = '--new_attention_order or --nonew_attention_order'


class Stated(TypedDict, total=False):
    """Facts that the user states about the model of a file; flags have the same names."""

    image_size: tuple[int, ...]
    num_heads: int
    num_head_channels: int
    schedule: str
    diffusion_steps: int
    rescale_timesteps: bool
    objective: str
    low_res_size: tuple[int, ...]


class Inferred(NamedTuple):
    """A model, as far as the names and shapes of its tensors show it.

    Fields:
      program: the program whose names they are.
      fields: fields of `model`; with `num_heads` and `num_head_channels` if the program allows only
        one choice.
      attention_levels: levels with attention, 0 = full resolution.
      learn_sigma: the network also predicts a variance.
      constants: fields of `diffusion`, and `image_size`, that are constants of the program.
      super_resolution: True if the network also sees a picture as large as the image.
    """

    program: str
    fields: Fields
    attention_levels: tuple[int, ...]
    learn_sigma: bool
    constants: Fields
    super_resolution: bool = False


class ForeignModel(NamedTuple):
    """The config of a weight file of another program.

    Fields:
      assumed: the assumptions behind the config, one phrase each.
    """

    config: Config
    assumed: list[str]


class Shapes:
    """The shapes of a state dict by name, with checked look-ups.

    Args:
      program: the program whose names are expected.
    """

    def __init__(self, shapes: Mapping[str, Shape], source: str, program: str) -> None:
        self.by_name, self.source, self.program = shapes, source, program

    def __len__(self) -> int:
        return len(self.by_name)

    def get(self, name: str, rank: int) -> Shape:
        """Returns a tensor's shape. Raises UserError: it is missing or has another rank."""
        if name not in self.by_name:
            raise self.missing(name)
        shape = self.by_name[name]
        if len(shape) != rank:
            raise UserError(f'{self.source}: {name}: expected {rank} axes, found shape {shape}')
        return shape

    def missing(self, name: str) -> UserError:
        """Returns the error for a tensor that is not there."""
        some = ', '.join(list(self.by_name)[:3])
        return UserError(
            f"{self.source}: {name} is missing: this is not a UNet with {self.program}'s "
            f'names (found {len(self)} tensors: {some}, ...)'
        )

    def base_channels(self, name: str) -> int:
        """Returns the base channels, from the weight of the first layer of the time embedding."""
        width, base = self.get(name, 2)
        if width != 4 * base:
            raise UserError(
                f'{self.source}: {name}: expected shape (4 base, base), found {(width, base)}'
            )
        return base


def stated_config(
    inferred: Inferred,
    source: str,
    stated: Stated,
    *,
    order_known: bool = True,
    preset: str | None = None,
) -> ForeignModel:
    """Returns the config of a foreign file, and the assumptions behind it.

    Args:
      stated: facts that the shapes do not show.
      order_known: True if the order of qkv's rows is stated or has no effect.
      preset: the published model whose file has this name; None if there is none.

    Raises:
      UserError: a needed fact is not stated, or a stated one does not fit the shapes.
    """
    missing = list(_missing(inferred, stated))
    if not order_known and stated.get('num_heads') != 1:
        missing.append(ORDER_FLAGS)
    if missing:
        published = f'--preset={preset}' if preset else '--preset if it is a published one'
        raise UserError(
            f'{source}: a file of {inferred.program} does not say all about its model, and a guess '
            f'could give wrong pictures: give {published}, --config, or {", ".join(missing)}'
        )
    _check_stated(inferred, source, stated)
    size = tuple(stated.get('image_size', inferred.constants.get('image_size', ())))
    config = Config().replace(
        model=_model_fields(inferred, stated, size),
        diffusion=_diffusion_fields(inferred, stated),
        data={'path': '', 'image_size': size},  # a file does not name its training images
        train={'sample_every': 0},  # sample grids need 1 or 3 channels
    )
    try:
        config = resolve(to_dict(config))
        parameter_shapes(config)
    except UserError as error:
        raise UserError(
            f'{source}: what was stated and the shapes do not make a network that can be run: '
            f'{error}'
        ) from None
    return ForeignModel(config, _assumed(inferred, stated))


def _model_fields(inferred: Inferred, stated: Stated, size: tuple[int, ...]) -> Fields:
    """Returns the section `model`; `size` is (height, width) of the images in pixels."""
    fields: Fields = {'num_heads': 0, 'num_head_channels': 0, 'label_dropout': 0.0}
    fields |= inferred.fields
    own = ('num_heads', 'num_head_channels', 'low_res_size')
    fields |= {name: value for name, value in stated.items() if name in own}
    resolutions = tuple(min(size) >> level for level in inferred.attention_levels)
    return fields | {'attention_resolutions': resolutions}


def _diffusion_fields(inferred: Inferred, stated: Stated) -> Fields:
    """Returns the section `diffusion`."""
    fields = {name: value for name, value in inferred.constants.items() if name != 'image_size'}
    fields |= {
        {'diffusion_steps': 'steps'}.get(name, name): value
        for name, value in stated.items()
        if name in ('schedule', 'diffusion_steps', 'rescale_timesteps', 'objective')
    }
    return fields | {'learn_sigma': inferred.learn_sigma}


def _assumed(inferred: Inferred, stated: Stated) -> list[str]:
    """Returns the assumptions behind a config, one phrase each."""
    # No rescaling is no assumption: it is what a config means that does not mention it.
    assumed = [
        f'{name}={value} as in {inferred.program}'
        for name, value in inferred.constants.items()
        if {'steps': 'diffusion_steps'}.get(name, name) not in stated
        and name != 'rescale_timesteps'
    ]
    if stated.get('num_heads', 1) > 1:
        assumed.append('as many heads on the way up')
    return assumed


def _check_stated(inferred: Inferred, source: str, stated: Stated) -> None:
    """Checks what is stated against the program and the shapes.

    Raises:
      UserError: heads are stated, but the program has a fixed number; or a size of pictures is
        stated, but the network takes none.
    """
    if 'low_res_size' in stated and not inferred.super_resolution:
        raise UserError(
            f'{source}: --low_res_size: the network draws from noise alone, as it takes no more '
            'channels than those of an image; leave this out'
        )
    known = inferred.fields
    for name in ('num_heads', 'num_head_channels') if 'num_heads' in known else ():
        if name in stated and stated[name] != known[name]:
            owner = 'num_heads' if known['num_heads'] else 'num_head_channels'
            raise UserError(
                f'{source}: --{name}: {inferred.program} always has {owner}={known[owner]}; '
                'leave this out'
            )


def states_all(inferred: Inferred) -> bool:
    """Returns True if nothing about a model is open."""
    return not list(_missing(inferred, {}))


def _missing(inferred: Inferred, stated: Stated) -> Iterator[str]:
    """Yields the flags for what is neither inferred nor stated."""
    if 'num_heads' not in inferred.fields | stated and 'num_head_channels' not in stated:
        yield '--num_heads or --num_head_channels'
    for name, flag in (
        ('image_size', 'image_size'),
        ('schedule', 'schedule'),
        ('steps', 'diffusion_steps'),
        ('objective', 'objective'),
    ):
        if name not in inferred.constants and flag not in stated:
            yield f'--{flag}'
    if inferred.super_resolution and 'low_res_size' not in stated:
        yield '--low_res_size'
    steps = stated.get('diffusion_steps', inferred.constants.get('steps'))
    known = 'rescale_timesteps' in stated or 'rescale_timesteps' in inferred.constants
    if not known and steps != TIME_SCALE:
        unless = '' if steps else f' (unless --diffusion_steps={TIME_SCALE})'
        yield f'--rescale_timesteps or --norescale_timesteps{unless}'


def config_like(inferred: Inferred, source: str, like: Config) -> Config:
    """Returns the config of a state dict, with `like`'s values for what the shapes do not show.

    The objective is `like`'s if the other programs have it, and otherwise the usual one.

    Raises:
      UserError: a run of `like` cannot start from this network.
    """
    fields = dict(inferred.fields)
    side = min(like.image_shape[:2])
    base, mult = fields['base_channels'], like.model.channel_mult
    if [int(m * base) for m in mult] == [int(m * base) for m in fields['channel_mult']]:
        fields['channel_mult'] = mult  # the same widths, written as `like` writes them
    if inferred.attention_levels != like.attention_levels:
        fields['attention_resolutions'] = tuple(side >> n for n in inferred.attention_levels)
    diffusion: Fields = {'learn_sigma': inferred.learn_sigma}
    if like.diffusion.objective not in OBJECTIVES:
        diffusion['objective'] = OBJECTIVES[0]
    config = like.replace(model=fields, diffusion=diffusion)
    check_reusable(config, like, source)
    return config


def check_against_shapes(config: Config, inferred: Inferred, source: str) -> None:
    """Checks a file's config against its shapes, before a network of that size is built.

    Raises:
      UserError: the config describes another network, or no network.
    """
    model, fields = config.model, inferred.fields
    names = ('image_channels', 'base_channels', 'num_res_blocks', 'num_classes', 'channel_mult')
    expected = {f'model.{name}': fields[name] for name in names}
    found = {f'model.{name}': getattr(model, name) for name in names}
    if model.base_channels == fields['base_channels']:  # other fractions may give the same widths
        for values in (expected, found):
            mult: tuple[float, ...] = values['model.channel_mult']
            values['model.channel_mult'] = [int(m * model.base_channels) for m in mult]
    if problems := differences(expected, found):
        raise UserError(f'{source}: not the network of the tensors beside it:{itemized(problems)}')
    try:
        parameter_shapes(config)
    except UserError as error:
        raise UserError(f'{source}: {error}') from None
