"""Configs with any values in any fields: accepted, and then the same after JSON, or refused with
one line for each problem.
"""

import dataclasses
import json
import os

import jax
import pytest
from support.bounded import outcome
from support.fuzzing import STEPS, fuzz, st
from support.memory import drop_compiled_programs
from support.mutations import EDGES
from support.tiny import tiny_config

from jaxunet.checkpoint.state import fresh_state
from jaxunet.config import CHOICES, Config, diff, identity, resolve, to_dict
from jaxunet.data.sources import open_source
from jaxunet.runtime.errors import UserError
from jaxunet.training.session import Session

FIELDS = [
    (section, field)
    for section, fields in to_dict(Config()).items()
    for field in (fields if isinstance(fields, dict) else [None])
]
NUMBERS = [2, 3, 4, 5, 8, 16, 32, 0.5, 0.9, 0.999, 1.5, 1e-8, 1e-300, 1e308]
TEXTS = ['', 'auto', 'cuda+adamw=xla', 'pallas+', '1', 'x' * 200, '\ud800', 'a\nb', 'fid', '../x']
VALUES = st.one_of(
    st.sampled_from([*EDGES, 2**70, *NUMBERS, float('nan'), float('inf'), -0.5]),
    st.sampled_from([*TEXTS, *sorted({value for values in CHOICES.values() for value in values})]),
    st.sampled_from([None, True, False, b'x', object, {}, {'a': 1}]),
    st.lists(st.sampled_from([*EDGES, *NUMBERS, 'fid', 'kid', None]), max_size=3),
)


# Values with which a network stays small; the limits of the others are `test_configs`'s.
MODEST = st.sampled_from([0, 1, 2, 3, 4, 8, 16, 0.1, 0.5, 0.9, 1.5, True, False])


@st.composite
def modest(draw):
    """Fields of a small config with other values of their types, which many steps accept."""
    values = to_dict(tiny_config(parallel={'devices': 1}))
    for section, field in draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=3)):
        path = f'{section}.{field}'
        if path in CHOICES:
            values[section][field] = draw(st.sampled_from(CHOICES[path]))
        elif field and type(before := values[section][field]) in (int, float, bool):
            values[section][field] = type(before)(draw(MODEST))
    return values


@st.composite
def changes(draw):
    """Fields of a config with other values: of any type, or numbers near those they have."""
    values = to_dict(tiny_config())
    for section, field in draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=4)):
        target, name = (values, section) if field is None else (values[section], field)
        before = target[name] if isinstance(target, dict) else None
        near = type(before) in (int, float) and draw(st.booleans())
        value = draw(st.sampled_from(NUMBERS)) if near else draw(VALUES)
        if isinstance(target, dict):
            target[name] = type(before)(value) if near else value
    return values


def test_configs():
    def read(values):
        config = resolve(values)
        stored = json.loads(json.dumps(to_dict(config)))
        assert resolve(stored) == config
        assert diff(config, config) == []
        identity(stored)
        dataclasses.replace(config)

    fuzz('configs', 60, changes(), lambda values: outcome(read, values))


@pytest.mark.skipif(STEPS not in os.environ, reason=f'{STEPS} steps are compiled: by hand')
def test_accepted_configs_train():
    def check(values):
        try:
            config = resolve(values)
            source = open_source('digits:', image_shape=config.image_shape)
            with Session(config, source) as session:
                session.load(fresh_state(config))
                session.open_stream()
                session.compile()
                metrics = session.call(session.next_data())
                assert metrics, 'no metrics'
                jax.block_until_ready(session.state)
        except UserError as error:
            return str(error)
        finally:
            drop_compiled_programs()
        return ''

    fuzz('trained steps', int(os.environ[STEPS]), modest(), check)
