"""Reads the state of PyTorch's Adam in a checkpoint.

`Adam.state_dict()` numbers the parameters in the order of the tensors in the model's state dict.
`state[i]` has `exp_avg` and `exp_avg_sq`, the first and second moments, and `step`, the number of
updates.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from jaxunet.runtime.errors import UserError
from jaxunet.runtime.untrusted import shown
from jaxunet.weights.torch_file import TorchFile
from jaxunet.weights.torch_pickle import TensorView

FIELDS = ('exp_avg', 'exp_avg_sq')  # keys of the first and second moments


class AdamState(NamedTuple):
    """Adam's moments in a file.

    Fields:
      moments: first and second moments, each as tensors by name of the parameter.
      corrections: 1 − β^steps for each, which the moments are divided by to correct their bias.
    """

    moments: tuple[dict[str, TensorView], dict[str, TensorView]]
    corrections: tuple[float, float]


def adam_state(file: TorchFile) -> AdamState | None:
    """Returns the moments of a file's weights; None if it has none.

    Raises:
      UserError: the optimizer is not Adam, or its state does not fit the weights.
    """
    if file.optimizer is None:
        return None
    source, names = f'{file.path}: optimizer', list(file.shapes)
    state, groups = file.optimizer.get('state'), file.optimizer.get('param_groups')
    if type(state) is not dict or type(groups) is not list:
        raise UserError(
            f"{source}: expected the dict of PyTorch's Adam, with state and param_groups, "
            f'found {shown(list(file.optimizer))}; give a file without it'
        )
    if len(groups) != 1 or set(state) != set(range(len(names))):
        raise UserError(
            f'{source}: expected one group with the state of all {len(names)} parameters, found '
            f'{len(groups)} with {len(state)}; give a file without it'
        )
    moments: tuple[dict[str, TensorView], dict[str, TensorView]] = ({}, {})
    for i, name in enumerate(names):
        for field, moment in zip(FIELDS, moments, strict=True):
            view = state[i].get(field) if type(state[i]) is dict else None
            if type(view) is not TensorView or view.shape != file.shapes[name]:
                what = f'shape {view.shape}' if type(view) is TensorView else shown(view)
                raise UserError(
                    f'{source}.state[{i}].{field}: expected a tensor of shape '
                    f'{file.shapes[name]}, that of {name}, found {what}'
                )
            file.check({f'optimizer.state[{i}].{field}': view})
            moment[name] = view
    steps = {file.number(state[i].get('step'), f'optimizer.state[{i}].step') for i in state}
    if len(steps) != 1 or min(steps) < 1:
        raise UserError(
            f'{source}: step: expected one number of updates of all parameters, 1 or more, '
            f'found {", ".join(f"{step:g}" for step in sorted(steps)[:3])}'
        )
    return AdamState(moments, _corrections(groups[0], steps.pop(), source))


def _corrections(group: Any, steps: float, source: str) -> tuple[float, float]:
    """Returns 1 − β^steps for both β of a group of parameters."""
    betas: Any = group.get('betas') if type(group) is dict else None
    numbers = type(betas) in (tuple, list) and all(type(beta) is float for beta in betas)
    if not numbers or len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise UserError(
            f'{source}.param_groups[0].betas: expected two numbers from 0 to 1, '
            f'found {shown(betas)}'
        )
    first, second = (-math.expm1(steps * math.log(beta)) if beta else 1.0 for beta in betas)
    return first, second
