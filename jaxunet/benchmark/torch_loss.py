"""The loss of the PyTorch side: `jaxunet.diffusion.objectives` in plain PyTorch.

Importing this module needs PyTorch (extra `peers`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import numpy as np
import torch

from jaxunet.config import Config
from jaxunet.diffusion.process import make_diffusion

Tables = dict[str, torch.Tensor]  # constants by timestep, by the names of `Diffusion`'s fields
NAMES = ('signal', 'noise', 'posterior_x0', 'posterior_xt', 'posterior_log_variance', 'log_betas')


def make_loss(
    config: Config, model: torch.nn.Module, put: Callable[[np.ndarray], torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """Returns `loss(x0, t, noise, labels)`, the mean of `per_sample_loss` over a batch.

    Args:
      put: copies an array to the device.
    """
    dtype, diffusion = getattr(torch, config.precision), make_diffusion(config.diffusion)
    tables = {name: put(getattr(diffusion, name)) for name in NAMES}

    def loss(
        x0: torch.Tensor, t: torch.Tensor, noise: torch.Tensor, labels: torch.Tensor | None
    ) -> torch.Tensor:
        a, b = _at(tables['signal'], t), _at(tables['noise'], t)
        xt = a * x0 + b * noise
        # No weight cache: a CUDA graph must not refer to casts that are freed before its replay.
        mixed = (
            torch.autocast(x0.device.type, dtype, cache_enabled=False)
            if dtype != torch.float32
            else contextlib.nullcontext()
        )
        with mixed:
            output = model(xt, t, labels).float()
        targets = {'epsilon': noise, 'x0': x0, 'v': a * noise - b * x0}
        prediction = output[:, : x0.shape[1]]
        error = torch.nn.functional.mse_loss(prediction, targets[diffusion.prediction])
        if not diffusion.learn_sigma:
            return error
        values = output[:, x0.shape[1] :]
        predicted = _predict_x0(diffusion.prediction, prediction.detach(), xt, a, b)
        bound = _variational_bound(tables, predicted, values, x0, xt, t)
        return error + diffusion.vlb_weight * diffusion.steps * bound

    return loss


def _at(table: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return table[t][:, None, None, None]


def _predict_x0(
    objective: str, prediction: torch.Tensor, xt: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    """Returns x_0 from a prediction, where x_t = a x_0 + b ε."""
    if objective == 'epsilon':
        return (xt - b * prediction) / a
    return prediction if objective == 'x0' else a * xt - b * prediction


def _variational_bound(
    tables: Tables,
    predicted: torch.Tensor,
    values: torch.Tensor,
    x0: torch.Tensor,
    xt: torch.Tensor,
    t: torch.Tensor,
) -> torch.Tensor:
    """Returns the mean of the bound's terms at timesteps t over a batch, in bits per dimension."""
    small = _at(tables['posterior_log_variance'], t)
    weight = (values + 1) / 2
    log_variance = weight * _at(tables['log_betas'], t) + (1 - weight) * small
    from_x0, from_xt = _at(tables['posterior_x0'], t), _at(tables['posterior_xt'], t)
    mean, true_mean = from_x0 * predicted + from_xt * xt, from_x0 * x0 + from_xt * xt
    kl = 0.5 * (
        log_variance
        - small
        - 1
        + torch.exp(small - log_variance)
        + (true_mean - mean) ** 2 * torch.exp(-log_variance)
    )
    nats = torch.where((t == 0)[:, None, None, None], _decoder_nll(x0, mean, log_variance), kl)
    return nats.mean() / math.log(2)


def _decoder_nll(x0: torch.Tensor, mean: torch.Tensor, log_variance: torch.Tensor) -> torch.Tensor:
    """Returns −log p(x_0) of pixels in 256 bins, in nats."""
    inverse_std = torch.exp(-0.5 * log_variance)
    lower = torch.where(x0 < -0.999, -math.inf, (x0 - mean - 1 / 255) * inverse_std)
    upper = torch.where(x0 > 0.999, math.inf, (x0 - mean + 1 / 255) * inverse_std)
    # The distribution function is more accurate where its values are small.
    mirror = lower + upper > 0
    lower, upper = torch.where(mirror, -upper, lower), torch.where(mirror, -lower, upper)
    # By erfc, because torch.special.ndtr is 0 in the tails in float32.
    below_lower, below_upper = (0.5 * torch.erfc(-z * math.sqrt(0.5)) for z in (lower, upper))
    mass = below_upper - below_lower
    return -torch.log(mass.clamp(min=1e-12))
