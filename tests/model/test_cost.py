"""Costs that follow from the config alone."""

from __future__ import annotations

import jax
import pytest
from support.configs import CONFIGS, load

from jaxunet.config import resolve
from jaxunet.model.cost import FOR_A_CPU, warn_if_long_on_a_cpu


@pytest.mark.parametrize(
    ('config', 'platform', 'minutes', 'warned'),
    [
        ('digits', 'cpu', 0.0, False),
        ('elephants64', 'cpu', 0.0, True),
        ('elephants64', 'cpu', 3.0, False),
        ('elephants64', 'gpu', 0.0, False),
    ],
)
def test_a_run_too_long_for_a_cpu_is_announced(
    config, platform, minutes, warned, monkeypatch, caplog
):
    monkeypatch.setattr(jax, 'default_backend', lambda: platform)
    (path,) = (path for path in CONFIGS if path.stem == config)
    warn_if_long_on_a_cpu(resolve(load(path)).replace(train={'minutes': minutes}))
    assert (f'For a CPU, add {FOR_A_CPU}' in caplog.text) == warned
