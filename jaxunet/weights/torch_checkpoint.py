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
    if not ema and trained and optimizer is not None:
        ema = 'none'
    quoted = '' if plain is None else f"'{plain}'"
    averaged, note = takes_averages(ema, inner.get(RATE), quoted, f"'{average}'", source)
    if plain is not None and not averaged:
        return Chosen(tree[plain], note, optimizer)
    return Chosen(inner[SHADOW] if type(inner.get(SHADOW)) is dict else inner, note, None)


def takes_averages(
    ema: str, rate: object, plain: str, average: str, source: object
) -> tuple[bool, str]:
    """Returns True to take averages, False to take the weights themselves; and a note on which.

    Args:
      ema: as for `choose`.
      rate: what is stored with the averages as their rate.
      plain, average: names of both for the note; plain '' = there are only averages.

    Raises:
      UserError: `ema` names weights that are not there.
    """
    if plain and ema == 'none':
        return False, f'its weights {plain} (not the averages {average})'
    stored = f'{rate}' if type(rate) is float else ''
    if ema and ema != stored:
        allowed = ' or '.join([*[stored] * bool(stored), *['none'] * bool(plain)])
        raise UserError(f'--ema: {source}: expected {allowed or "no value"}, found {ema!r}')
    note = f'its averages {average}' + (f' of rate {stored}' if stored else '')
    return True, note + (f' (--ema=none takes {plain})' if plain else '')
