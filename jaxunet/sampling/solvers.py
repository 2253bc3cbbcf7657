"""The arithmetic of the samplers, in float64: their coefficients for each evaluation.

An evaluation of the network at (x, t) gives x_0 and ε. Every sampler then updates x by one linear
rule,

    x ← state · x + x0 · x_0 + noise · ε + memory · M + older · M' + draw · z,    z ~ N(0, 1),

where M is a result of the previous evaluation: x_0 (DPM-Solver++, UniPC), ε (Heun), ε − x_0 (Heun
in t) or nothing, and M' that of the one before (UniPC). A sampler is its table of these factors.
Objectives without timesteps pass the ᾱ of the levels that they visit as a table, and the places in
it as timesteps.

ᾱ, α = √ᾱ, √(1 − ᾱ) and the noise-to-signal ratio σ = √((1 − ᾱ)/ᾱ) belong to the timestep at which
an evaluation starts; a prime marks those of the timestep to which it leads. The last step leads to
the image itself, where ᾱ' = 1 and σ' = 0.

Sources: DDPM, Ho et al. 2020, arXiv 2006.11239; DDIM, Song et al. 2021, arXiv 2010.02502;
DPM-Solver++, Lu et al. 2022, arXiv 2211.01095; UniPC, Zhao et al. 2023, arXiv 2302.04867; EDM,
Karras et al. 2022, arXiv 2206.00364; consistency models, Song et al. 2023, arXiv 2303.01469.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Float64, Int, Int32

# With fewer evaluations, DPM-Solver++ does not extrapolate on the step to the lowest noise level.
# diffusers and the text of Lu et al.'s code say 15; what that code tests is 11 in our count, which
# includes the step to the image. Measured in docs/sampling.md.
FEW_STEPS = 15

# ᾱ of the model's T timesteps, or of the levels that an objective without timesteps visits.
Alphas = Float64[np.ndarray, ' steps']
Subset = Int32[np.ndarray, ' subset']  # the timesteps (or levels) that are visited, ascending
Picked = Float64[np.ndarray, ' subset']  # the values at a Subset


@dataclass(frozen=True, eq=False)
class Coefficients:
    """The factors of the rule, one row per evaluation in order of execution (noisiest first).

    Fields:
      timesteps: t, the network's input.
      state, x0, noise, memory, older, draw: the factors of x, x_0, ε, M, M' and z.
    """

    timesteps: Int32[np.ndarray, ' evaluations']
    state: Float64[np.ndarray, ' evaluations']
    x0: Float64[np.ndarray, ' evaluations']
    noise: Float64[np.ndarray, ' evaluations']
    memory: Float64[np.ndarray, ' evaluations']
    older: Float64[np.ndarray, ' evaluations']
    draw: Float64[np.ndarray, ' evaluations']


def _coefficients(
    timesteps: Int[np.ndarray, ' evaluations'], **factors: np.ndarray
) -> Coefficients:
    names = [field.name for field in fields(Coefficients)][1:]
    rows = {
        name: np.asarray(factors.get(name, np.zeros(len(timesteps))), np.float64) for name in names
    }
    return Coefficients(np.asarray(timesteps, np.int32), **rows)


def ancestral(alphas_cumprod: Alphas, timesteps: Subset, *, large: bool) -> Coefficients:
    """Returns DDPM's coefficients: the posterior's mean (eq. 7) and variance (section 3.2).

    Args:
      large: use the variance β instead of β̃. The last evaluation adds no noise in either case.
    """
    alphas, previous = _from_to(alphas_cumprod, timesteps)
    betas = 1 - alphas / previous
    small = betas * (1 - previous) / (1 - alphas)
    return _coefficients(
        timesteps[::-1],
        state=np.sqrt(1 - betas) * (1 - previous) / (1 - alphas),
        x0=np.sqrt(previous) * betas / (1 - alphas),
        draw=np.sqrt(np.where(small > 0, betas, 0) if large else small),
    )


def ddim(alphas_cumprod: Alphas, timesteps: Subset, *, eta: float) -> Coefficients:
    """Returns DDIM's coefficients (eq. 12) with the variance η² β̃ (eq. 16).

    Args:
      eta: η; 0 is deterministic.
    """
    alphas, previous = _from_to(alphas_cumprod, timesteps)
    variance = eta**2 * (1 - alphas / previous) * (1 - previous) / (1 - alphas)
    return _coefficients(
        timesteps[::-1],
        x0=np.sqrt(previous),
        noise=np.sqrt(np.maximum(1 - previous - variance, 0)),
        draw=np.sqrt(variance),
    )


def consistency(alphas_cumprod: Alphas, timesteps: Subset) -> Coefficients:
    """Returns the coefficients of multistep consistency sampling (arXiv 2303.01469, algorithm 1).

    Each evaluation gives the image, x' = √ᾱ' x_0 + √(1 − ᾱ') z, with fresh noise z of the next
    level; the last one is the sample.
    """
    _, previous = _from_to(alphas_cumprod, timesteps)
    return _coefficients(timesteps[::-1], x0=np.sqrt(previous), draw=np.sqrt(1 - previous))


def dpm_solver_2m(
    alphas_cumprod: Alphas,
    timesteps: Subset,
    *,
    eta: float = 0.0,
    lower_order_below: int = FEW_STEPS,
) -> Coefficients:
    """Returns the coefficients of DPM-Solver++(2M) (Lu et al. algorithm 2), or of its SDE.

    With λ = −log σ, h = λ' − λ, r = h_previous / h and M the previous evaluation's x_0,
        x' = √(1−ᾱ')/√(1−ᾱ) e^−ηh x + α' (1 − e^−(1+η)h) D + √(1−ᾱ') √(1 − e^−2ηh) z,
        D = (1 + 1/2r) x_0 − 1/2r M.
    Three steps are first order (D = x_0): the first; the last, which leads to the image (h is
    infinite and x' = x_0); and, with few evaluations, the one to the lowest noise level.

    Args:
      eta: η; 0 is deterministic, 1 is SDE-DPM-Solver++(2M).
      lower_order_below: the fewest evaluations with a second-order step to the lowest level.
    """
    alphas, previous = _from_to(alphas_cumprod, timesteps)
    h = _log_snr_steps(alphas)
    decay = np.append(np.exp(-eta * h) if eta else np.ones_like(h), 1.0)
    x0 = np.append(-np.sqrt(previous[:-1]) * np.expm1(-(1 + eta) * h), 1.0)
    extrapolation = np.zeros(len(alphas))  # 1/2r
    extrapolation[1:-1] = h[1:] / (2 * h[:-1])
    if len(alphas) < lower_order_below:
        extrapolation[-2:] = 0
    return _coefficients(
        timesteps[::-1],
        state=np.sqrt((1 - previous) / (1 - alphas)) * decay,
        x0=x0 * (1 + extrapolation),
        memory=-x0 * extrapolation,
        draw=np.sqrt((1 - previous) * (1 - decay**2)),
    )


def unipc(alphas_cumprod: Alphas, timesteps: Subset) -> Coefficients:
    """Returns the coefficients of UniPC of order 2 with B(h) = e^h − 1 (Zhao et al. algorithm 1).

    Predictor: the step of DPM-Solver++(2M). Corrector: the evaluation at x gives m, the two before
    it gave M and M'. With h the step that led to x, r = h_previous / h and φ = e^−h − 1, x becomes
        x − α φ (c (m − M) + (1/2 − d) (M' − M)/r),
    before the next predictor, where d + c = b_1 and c − r d = b_2 with b_1 = −(φ/h + 1)/φ and
    b_2 = 2 ((φ/h + 1)/h − 1/2)/φ; after the first step, which is first order, c = d = 1/2. The step
    to the image is first order, too (x' = x_0).
    """
    alphas = alphas_cumprod[timesteps][::-1]
    h = _log_snr_steps(alphas)
    predictor = dpm_solver_2m(alphas_cumprod, timesteps, lower_order_below=0)
    correction = np.zeros((3, len(alphas)))  # factors of m, M and M' in the corrected x
    for i in range(1, len(alphas)):
        phi, scale = np.expm1(-h[i - 1]), -np.sqrt(alphas[i]) * np.expm1(-h[i - 1])
        c, older = 0.5, 0.0
        if i > 1:
            inner, ratio = phi / h[i - 1] + 1, h[i - 2] / h[i - 1]
            first, second = -inner / phi, 2 * (inner / h[i - 1] - 0.5) / phi
            d = (first - second) / (1 + ratio)
            c, older = first - d, (0.5 - d) / ratio
        correction[:, i] = scale * c, -scale * (c + older), scale * older
    return _coefficients(
        timesteps[::-1],
        state=predictor.state,
        x0=predictor.x0 + predictor.state * correction[0],
        memory=predictor.memory + predictor.state * correction[1],
        older=predictor.state * correction[2],
    )


def _log_snr_steps(alphas: Picked) -> Float64[np.ndarray, ' steps']:
    """Returns h = λ' − λ of all steps but the last, which leads to the image."""
    return np.diff(-np.log(noise_to_signal(alphas)))


def heun(
    alphas_cumprod: Alphas,
    timesteps: Subset,
    *,
    churn: float = 0.0,
    churn_range: tuple[float, float],
    churn_noise: float = 1.0,
) -> Coefficients:
    """Returns the coefficients of EDM's second-order sampler (algorithms 1 and 2).

    S steps take 2S − 1 evaluations. In x̂ = x/α the probability flow is dx̂/dσ = ε. An Euler step
    to σ' gives x' = α' x_0 + √(1−ᾱ') ε. The evaluation at x' gives ε' and corrects x' by
    α' (σ' − σ)/2 · (ε' − ε). The step to the image (σ' = 0) has no correction.

    Args:
      churn: EDM's S_churn. Before a step that starts at a σ within `churn_range`, fresh noise
        raises σ by the factor 1 + min(S_churn/S, √2 − 1), rounded to the nearest noise level of
        the model. For the first step, see `churned_start`.
      churn_range: EDM's (S_tmin, S_tmax).
      churn_noise: EDM's S_noise, the factor of the fresh noise.
    """
    sigmas = noise_to_signal(alphas_cumprod)
    start = timesteps[::-1].astype(np.int64)  # t at the start of every step
    raised = _raised(sigmas, start, churn_factor(churn, len(start)), churn_range)
    alphas, hat = np.sqrt(alphas_cumprod[start]), np.sqrt(alphas_cumprod[raised])
    evaluations = 2 * len(start) - 1
    t = np.empty(evaluations, np.int64)
    t[::2], t[1::2] = raised, start[1:]
    state, x0, noise, memory, draw = np.zeros((5, evaluations))
    x0[::2] = np.append(alphas[1:], 1)
    noise[::2] = np.sqrt(1 - x0[::2] ** 2)
    correction = alphas[1:] * (sigmas[start[1:]] - sigmas[raised[:-1]]) / 2
    scale = hat[1:] / alphas[1:]  # scales x when the next step raises its noise
    state[1::2], noise[1::2], memory[1::2] = scale, scale * correction, -scale * correction
    draw[1::2] = hat[1:] * np.sqrt(sigmas[raised[1:]] ** 2 - sigmas[start[1:]] ** 2) * churn_noise
    return _coefficients(t, state=state, x0=x0, noise=noise, memory=memory, draw=draw)


def churn_factor(churn: float, steps: int) -> float:
    """Returns the relative rise of σ before a step: min(S_churn/S, √2 − 1) (EDM algorithm 2)."""
    return min(churn / steps, float(np.sqrt(2)) - 1)


def churned_start(alpha_cumprod: float, raised: float, churn_noise: float) -> float:
    """Returns the factor of the noise that sampling starts from at the raised level.

    Before the first step the samples are noise alone. The fresh noise of churn adds to it, so that
    it is drawn at once, with the variance of their sum; the factor is 1 if `churn_noise` is 1.

    Args:
      alpha_cumprod, raised: ᾱ of the first step, before and after churn.
      churn_noise: EDM's S_noise.
    """
    if raised == alpha_cumprod:
        return 1.0
    share = (1 / alpha_cumprod - 1) / (1 / raised - 1)  # of the variance, from before
    return float(np.sqrt(share + churn_noise**2 * (1 - share)))


def heun_in_t(alphas_cumprod: Alphas, timesteps: Subset) -> Coefficients:
    """Returns the coefficients of Heun's method in the t of rectified flow, t = σ/(1 + σ).

    S steps take 2S − 1 evaluations. In x̂ = (1 − t) x_0 + t ε = x/c, c = √ᾱ + √(1−ᾱ), the
    probability flow is dx̂/dt = ε − x_0. An Euler step to t' gives x' = α' x_0 + √(1−ᾱ') ε. The
    evaluation at x' gives the velocity there and corrects x' by c' (t' − t)/2 · (its change). The
    step to the image (t' = 0) has no correction. Unlike σ, t is finite for pure noise.
    """
    start = timesteps[::-1].astype(np.int64)
    alpha, noise_level = np.sqrt(alphas_cumprod[start]), np.sqrt(1 - alphas_cumprod[start])
    t = noise_level / (alpha + noise_level)
    numbers = np.repeat(start, 2)[1:]
    state, x0, noise, memory = np.zeros((4, len(numbers)))
    x0[::2], noise[::2] = np.append(alpha[1:], 1), np.append(noise_level[1:], 0)
    correction = (alpha[1:] + noise_level[1:]) * np.diff(t) / 2
    state[1::2], noise[1::2], x0[1::2] = 1, correction, -correction
    memory[1::2] = -correction
    return _coefficients(numbers, state=state, x0=x0, noise=noise, memory=memory)


def _from_to(alphas_cumprod: Alphas, timesteps: Subset) -> tuple[Picked, Picked]:
    """Returns ᾱ and ᾱ' of every step, the noisiest first."""
    alphas = alphas_cumprod[timesteps]
    return alphas[::-1], np.append(1.0, alphas[:-1])[::-1]


def _raised(
    sigmas: Alphas, timesteps: np.ndarray, factor: float, churn_range: tuple[float, float]
) -> np.ndarray:
    """Returns the timesteps whose σ is nearest to (1 + factor) σ, and no less noisy than before.

    Steps outside `churn_range` are unchanged.
    """
    wanted = np.log(sigmas[timesteps]) + np.log1p(factor)
    nearest = np.rint(np.interp(wanted, np.log(sigmas), np.arange(len(sigmas)))).astype(np.int64)
    within = (sigmas[timesteps] >= churn_range[0]) & (sigmas[timesteps] <= churn_range[1])
    return np.where(within, np.maximum(nearest, timesteps), timesteps)


def noise_to_signal(alphas_cumprod: Alphas) -> Alphas:
    """Returns σ = √((1 − ᾱ)/ᾱ), EDM's noise level; λ = −log σ is half the log-SNR."""
    with np.errstate(divide='ignore'):
        return np.sqrt((1 - alphas_cumprod) / alphas_cumprod)
