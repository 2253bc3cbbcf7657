"""Finds the weights in a checkpoint of PyTorch, which may also hold averages and an optimizer."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxunet.runtime.errors import UserError

WEIGHTS = ('state_dict', 'model', 'model_state_dict')  # keys of a state dict inside a dict
AVERAGES = ('ema', 'ema_state_dict', 'model_ema')  # keys of averaged weights
# ddpm-torch puts averaged weights and their rate under these keys of `ema`.
SHADOW, RATE = 'shadow', 'decay'
OPTIMIZER = 'optimizer'  # key of the state of the optimizer that trained the weights


class Chosen(NamedTuple):
    """The weights to take from a checkpoint.

    Fields:
      weights: a state dict, unless the file holds something else (the caller checks).
      note: says which weights they are, if there are several.
      optimizer: the state of the optimizer that trained them; None if there is none, or if they are
        averages.
    """

    weights: object
    note: str
    optimizer: dict[Any, Any] | None


def choose(tree: dict[Any, Any], ema: str, source: str, *, trained: bool = False) -> Chosen:
    """Returns the state dict to take from a dict.

    Args:
      tree: a state dict, or a dict that holds one or several state dicts.
      ema: '' = averaged weights if there are any; 'none' = the weights themselves; or the rate that
        is stored with the averages.
      trained: if the dict also has the state of an optimizer, '' means the weights themselves.

    Raises:
      UserError: `ema` names weights that are not there.
    """
    plain = next((key for key in WEIGHTS if type(tree.get(key)) is dict), None)
    average = next((key for key in AVERAGES if type(tree.get(key)) is dict), None)
    state = tree.get(OPTIMIZER)
    optimizer = state if plain is not None and type(state) is dict else None
    if average is None:
        if ema:
            raise UserError(f'--ema: {source} holds one set of weights; leave the flag out')
        return Chosen(tree if plain is None else tree[plain], '', optimizer)
    inner = tree[average]
    shadow = inner[SHADOW] if type(inner.get(SHADOW)) is dict else inner
    rate = inner.get(RATE)
    stored = f'{rate}' if type(rate) is float else ''
    if plain is not None and (ema == 'none' or (not ema and trained and optimizer is not None)):
        note = f"its weights '{plain}' (not the averages '{average}')"
        return Chosen(tree[plain], note, optimizer)
    if ema and ema != stored:
        allowed = ' or '.join([*[stored] * bool(stored), *['none'] * (plain is not None)])
        raise UserError(f'--ema: {source}: expected {allowed or "no value"}, found {ema!r}')
    note = f"its averages '{average}'" + (f' of rate {stored}' if stored else '')
    if plain is not None:
        note += f" (--ema=none takes '{plain}')"
    return Chosen(shadow, note, None)
