"""Finds the weights in a checkpoint of PyTorch, which may hold averages of them, too."""

from __future__ import annotations

from typing import Any

from jaxunet.runtime.errors import UserError

WEIGHTS = ('state_dict', 'model', 'model_state_dict')  # keys of a state dict inside a dict
AVERAGES = ('ema', 'ema_state_dict', 'model_ema')  # keys of averaged weights
# ddpm-torch puts averaged weights and their rate under these keys of `ema`.
SHADOW, RATE = 'shadow', 'decay'


def choose(tree: dict[Any, Any], ema: str, source: str) -> tuple[object, str]:
    """Returns the state dict to take from a dict, and a note on which one it is.

    Args:
      tree: a state dict, or a dict with one or several.
      ema: '' = averaged weights if there are any; 'none' = the weights themselves; or the rate that
        is stored with the averages.
      source: begins every message.

    Raises:
      UserError: `ema` names weights that are not there.
    """
    plain = next((key for key in WEIGHTS if type(tree.get(key)) is dict), None)
    average = next((key for key in AVERAGES if type(tree.get(key)) is dict), None)
    if average is None:
        if ema:
            raise UserError(f'--ema: {source} holds one set of weights; leave the flag out')
        return (tree if plain is None else tree[plain]), ''
    inner = tree[average]
    shadow = inner[SHADOW] if type(inner.get(SHADOW)) is dict else inner
    rate = inner.get(RATE)
    stored = f'{rate}' if type(rate) is float else ''
    if ema == 'none' and plain is not None:
        return tree[plain], f"its weights '{plain}' (not the averages '{average}')"
    if ema and ema != stored:
        allowed = ' or '.join([*[stored] * bool(stored), *['none'] * (plain is not None)])
        raise UserError(f'--ema: {source}: expected {allowed or "no value"}, found {ema!r}')
    note = f"its averages '{average}'" + (f' of rate {stored}' if stored else '')
    return shadow, note + (f" (--ema=none takes '{plain}')" if plain is not None else '')
