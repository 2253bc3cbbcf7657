"""Command-line flags for facts that a weight file of another program does not state."""

from __future__ import annotations

from typing import Any, NamedTuple

from absl import flags

from jaxunet.config import CHOICES, cli, resolve
from jaxunet.runtime.errors import UserError
from jaxunet.weights.inference import OBJECTIVES
from jaxunet.weights.presets import PRESETS

DIGITS = 5  # most digits in the side of an image
UNSTATED = 'For a .pt or .safetensors file that does not state it'


class ModelFlags(NamedTuple):
    """The flags, from `define`.

    Fields:
      config: the flag `--config`; its value is a `ConfigDict` or None.
      preset: the flag `--preset`.
      order: the flag `--new_attention_order`.
      stated: the flags of `jaxunet.weights.Stated`, by name.
    """

    config: flags.FlagHolder
    preset: flags.FlagHolder
    order: flags.FlagHolder
    stated: dict[str, flags.FlagHolder]

    def given(self) -> dict[str, Any]:
        """Returns the arguments of `load_model` that the flags stand for.

        Raises:
          UserError: flags exclude each other, or a config or image size is wrong.
        """
        stated = {name: flag.value for name, flag in self.stated.items() if flag.value is not None}
        for name in ('image_size', 'low_res_size'):
            if name in stated:
                stated[name] = parse_size(name, stated[name])
        order = self.order.value
        if self.preset.value is None:
            config = resolve(self.config.value) if self.config.value is not None else None
            return stated | {'config': config, 'new_attention_order': order}
        others = [*(['config'] if self.config.value is not None else []), *stated]
        others += ['new_attention_order'] if order is not None else []
        if others:
            names = ', '.join(f'--{name}' for name in others)
            raise UserError(
                f'--preset: {self.preset.value} already describes the model, found '
                f'{names} beside it; leave one of them out'
            )
        preset = PRESETS[self.preset.value]
        return {'config': preset.config(), 'new_attention_order': preset.new_attention_order}


def define(config_help: str, *, image_size_help: str = '') -> ModelFlags:
    """Defines the flags; a command calls this while it is imported.

    Args:
      image_size_help: a further meaning of `--image_size` in this command.
    """
    config = cli.define_optional_config(config_help)
    preset = flags.DEFINE_enum(
        'preset',
        None,
        sorted(PRESETS),
        'Which published model the weight file is (docs/weights.md).',
    )
    order = flags.DEFINE_bool(
        'new_attention_order',
        None,
        f"{UNSTATED}: guided-diffusion's use_new_attention_order; its scripts' default is false.",
    )
    stated = {
        'image_size': flags.DEFINE_list(
            'image_size',
            None,
            f'{UNSTATED}: SIDE or HEIGHT,WIDTH of the images.{image_size_help}',
        ),
        'num_heads': flags.DEFINE_integer(
            'num_heads', None, f'{UNSTATED}: heads per attention block.', lower_bound=1
        ),
        'num_head_channels': flags.DEFINE_integer(
            'num_head_channels', None, f'{UNSTATED}: channels per head.', lower_bound=1
        ),
        'schedule': flags.DEFINE_enum(
            'schedule', None, CHOICES['diffusion.schedule'], f'{UNSTATED}: noise schedule.'
        ),
        'diffusion_steps': flags.DEFINE_integer(
            'diffusion_steps', None, f'{UNSTATED}: number of timesteps T.', lower_bound=1
        ),
        'rescale_timesteps': flags.DEFINE_bool(
            'rescale_timesteps', None, f'{UNSTATED}: the network reads 1000 t/T in place of t.'
        ),
        'objective': flags.DEFINE_enum(
            'objective', None, OBJECTIVES, f'{UNSTATED}: what the network predicts.'
        ),
        'low_res_size': flags.DEFINE_list(
            'low_res_size',
            None,
            f'{UNSTATED}: SIDE or HEIGHT,WIDTH of the pictures that the network enlarges '
            '(super-resolution).',
        ),
    }
    return ModelFlags(config, preset, order, stated)


def parse_size(name: str, parts: list[str]) -> tuple[int, ...]:
    """Parses the value SIDE or HEIGHT,WIDTH of a flag.

    Raises:
      UserError: the value has another form.
    """
    whole = [p.isascii() and p.isdigit() and len(p) <= DIGITS and int(p) > 0 for p in parts]
    if len(parts) not in (1, 2) or not all(whole):
        raise UserError(
            f'--{name}: expected SIDE or HEIGHT,WIDTH, such as 64 or 48,64; '
            f'found {",".join(parts)!r}'
        )
    return tuple(map(int, parts))
