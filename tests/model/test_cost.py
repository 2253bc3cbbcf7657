"""Costs that follow from the config alone."""

from __future__ import annotations

import jax
import pytest
from support.configs import CONFIGS, load

from jaxunet.config import resolve
from jaxunet.model.cost import warn_if_long_on_a_cpu


@pytest.mark.parametrize(
    ('config', 'platform', 'warned'),
    [('digits', 'cpu', False), ('elephants64', 'cpu', True), ('elephants64', 'gpu', False)],
)
def test_a_run_too_long_for_a_cpu_is_announced(config, platform, warned, monkeypatch, caplog):
    monkeypatch.setattr(jax, 'default_backend', lambda: platform)
    (path,) = (path for path in CONFIGS if path.stem == config)
    warn_if_long_on_a_cpu(resolve(load(path)))
    assert ('docs/training.md#on-a-cpu' in caplog.text) == warned
