"""Names the fields of a config that the compiled step does not depend on.

They may change without compiling the step again.
"""

from __future__ import annotations

from jaxunet.config import Config, to_dict
from jaxunet.config.schema import Fields

# Top-level fields and sections, and fields of other sections, that describe what happens around a
# step and do not enter it.
OUTSIDE = ('init_from', 'init_from_order', 'init_from_ema', 'evaluation')
OUTSIDE_FIELDS = {
    'ema': ('snapshot_every',),
    'data': ('path', 'num_workers', 'cache', 'classes', 'holdout'),
    'train': (
        'epochs',
        'steps_per_call',
        'sample_every',
        'sample_count',
        'sample_steps',
        'evaluate_every',
        'holdout_every',
        'checkpoint_every',
        'keep',
        'keep_every',
        'keep_best',
        'max_bad_steps',
        'rollbacks',
        'check_replicas_every',
        'stall_seconds',
    ),
}


def relevant(config: Config) -> Fields:
    """Returns the fields of a config that the compiled step depends on, as nested dicts."""
    raw = {name: value for name, value in to_dict(config).items() if name not in OUTSIDE}
    return raw | {
        section: {k: v for k, v in raw[section].items() if k not in fields}
        for section, fields in OUTSIDE_FIELDS.items()
    }
