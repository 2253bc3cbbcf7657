"""Earlier names and defaults of fields, and the identity of a config across versions."""

from __future__ import annotations

from jaxunet.config.schema import SUITS, Config, Fields, to_dict

# Earlier names of fields, still read from checkpoints and .safetensors files: old -> new.
RENAMED = {'diffusion.prediction': 'diffusion.objective'}
# Fields added after version 0.1.0; see `identity`.
ADDED = (
    'init_from_order',
    'init_from_ema',
    'diffusion.rescale_timesteps',
    'diffusion.kl_loss',
    'model.low_res_size',
    'diffusion.edm_mean',
    'diffusion.edm_std',
    'diffusion.edm_sigma_data',
    'diffusion.flow_mean',
    'diffusion.flow_std',
    'timesteps.infonoise_bins',
    'timesteps.infonoise_memory',
    'timesteps.infonoise_warmup',
    'timesteps.infonoise_pivot',
    'timesteps.infonoise_uniform',
    'data.augment_probability',
    'data.augment_rule',
    'data.condition',
    'data.crop',
    'data.crop_least',
    'data.holdout',
    'data.noise_candidates',
    'data.noise_assignment',
    'train.epochs',
    'train.holdout_every',
    'ema.widths',
    'ema.snapshot_every',
    'train.keep_every',
    'train.keep_best',
    'train.spike_sigmas',
    'train.rollbacks',
    'train.check_replicas_every',
    'train.stall_seconds',
)
# Defaults that changed: what the new one stood for in version 0.1.0; see `identity`.
CHANGED_DEFAULTS = {
    'parallel.concurrent_kernels': (True, False),
    'train.sample_steps': (0, 50),
    'evaluation.sampler': ('', 'ddim'),
    'evaluation.steps': (SUITS, 50),
}


def as_now(values: Fields, prefix: str) -> Fields:
    """Returns the fields of a section, of any version, with their names and meaning of now.

    Args:
      prefix: of the section, 'data.', or '' for the whole config.
    """
    values = {
        RENAMED.get(prefix + str(k), prefix + str(k)).removeprefix(prefix): v
        for k, v in values.items()
    }
    if prefix == 'data.' and values.get('augment') == 'edm':
        values.setdefault('augment_rule', 'earlier')  # from before there was a choice
    return values


def identity(values: Fields) -> Fields:
    """Returns the values that identify a config, in the form of version 0.1.0.

    Fields have their earlier names, and later ones are left out where they have their defaults, so
    that results of earlier versions are recognised as those of the same config.

    Args:
      values: a config as nested dicts, of any version.
    """
    earlier = {new: old.rsplit('.', maxsplit=1)[-1] for old, new in RENAMED.items()}
    defaults = to_dict(Config())

    def is_default(path: str, value: object) -> bool:
        if path == 'data.augment_rule':  # earlier versions had no other
            return value == 'earlier' or values['data'].get('augment') != 'edm'
        section, _, field = path.rpartition('.')
        default = (defaults[section] if section else defaults)[field]
        return bool(default == (tuple(value) if isinstance(value, list) else value))

    def as_before(path: str, value: object) -> object:
        now, then = CHANGED_DEFAULTS.get(path, (None, None))
        return then if path in CHANGED_DEFAULTS and value == now else value

    def section(name: str, fields: Fields) -> Fields:
        return {
            earlier.get(f'{name}.{field}', field): as_before(f'{name}.{field}', value)
            for field, value in fields.items()
            if f'{name}.{field}' not in ADDED or not is_default(f'{name}.{field}', value)
        }

    return {
        name: section(name, value) if isinstance(value, dict) else value
        for name, value in values.items()
        if name not in ADDED or not is_default(name, value)
    }
