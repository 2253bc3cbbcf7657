"""Grids and machines of sweeps, for their tests."""

from jaxunet.sweep.points import Machine, expand, parse_axes
from support.tiny import tiny_config

ORIGIN = {
    'git': 'abc1234',
    'device': 'thing',
    'devices': 4,
    'driver': None,
    'versions': {'jax': '1.2.3'},
}
CPU = Machine('cpu', 1, ORIGIN)
GPU = Machine('gpu', 4, ORIGIN)


def grid(*axes, machine=GPU, **changes):
    """Returns the points of the tiny config with these axes, and notes on them."""
    return expand(tiny_config(**changes), parse_axes(axes), machine)
