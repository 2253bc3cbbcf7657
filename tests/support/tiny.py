"""A model that compiles in seconds, for tests of everything around it."""

from __future__ import annotations

from jaxunet.config import Config, resolve, to_dict

TINY: dict[str, dict[str, object]] = {
    'model': {
        'base_channels': 8,
        'channel_mult': (1,),
        'num_res_blocks': 1,
        'attention_resolutions': (),
        'num_head_channels': 8,
        'norm_groups': 4,
    },
    'diffusion': {'steps': 40},
    'data': {'batch_size': 8},
    # Constant, so that runs of any length share one program, which is compiled once.
    'optimizer': {'warmup_steps': 2, 'schedule': 'constant'},
    'train': {
        'steps': 6,
        'log_every': 1,
        'sample_every': 0,
        'checkpoint_every': 2,
        'sample_count': 4,
        'sample_steps': 2,
    },
}


def tiny_config(**changes: object) -> Config:
    """The tiny config with changed fields; arguments as for `Config.replace`."""
    return resolve(to_dict(Config().replace(**TINY).replace(**changes)))


def flags() -> list[str]:
    """The tiny config as command-line overrides of the default one."""
    return [
        f'--config.{section}.{name}={value}'
        for section, fields in TINY.items()
        for name, value in fields.items()
    ]
