"""The state before step 0, and its shapes."""

from support.tiny import tiny_config

from jaxunet.checkpoint.state import draw_state, fresh_state, state_config
from jaxunet.checkpoint.store import state_template


def test_the_draw_is_traced_once():
    """Its shapes and its values need one trace."""
    config, traced = tiny_config(), []

    def draw(config):
        traced.append(config)
        return draw_state(config)

    state_template(config, draw)
    fresh_state(config, draw)
    state_template(config, draw)
    assert traced == [state_config(config)]
