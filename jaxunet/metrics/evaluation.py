"""Computes the requested metrics from two sides; every result states its protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxunet.config.relations import METRICS, unknown_metric
from jaxunet.metrics.features import FeatureNetwork
from jaxunet.metrics.kernel_distance import SUBSET_SIZE, SUBSETS
from jaxunet.metrics.table import TABLE, ImageSummary, Inputs, Protocol, general_label
from jaxunet.runtime.errors import UserError


@dataclass(frozen=True)
class Result:
    """A number and how it was computed.

    Fields:
      label: the metric's name, with the features unless they are Inception's.
      std: standard deviation over subsets or parts, where the metric has one.
      protocol: images, features and settings that produced the number.
    """

    label: str
    value: float
    std: float | None
    protocol: Protocol = field(default_factory=dict)

    def row(self) -> Protocol:
        """Returns the result as a flat dict for JSON."""
        return {
            'metric': self.label,
            'value': self.value,
            **({} if self.std is None else {'std': self.std}),
            **self.protocol,
        }

    def line(self) -> str:
        """Returns the result as one line of text: the number, then the protocol in brackets."""
        spread = '' if self.std is None else f' ± {self.std:.6g}'
        shown = {
            name: f'{value:.6g}' if isinstance(value, float) else value
            for name, value in self.protocol.items()
        }
        protocol = '; '.join(f'{name}={value}' for name, value in shown.items())
        return f'{self.label}: {self.value:.6g}{spread}  [{protocol}]'


def check_metrics(
    metrics: Sequence[str], network: FeatureNetwork | None = None, option: str = '--metrics'
) -> None:
    """Checks a list of metrics, and that the features allow each of them.

    Args:
      network: the features; None skips that check.
      option: the option that gave the list, for messages.

    Raises:
      UserError: there are no metrics, or one is unknown, given twice, or needs other features.
    """
    if not metrics:
        raise UserError(f'{option}: expected some of {", ".join(METRICS)}, found none')
    for metric in metrics:
        if metric not in METRICS:
            raise UserError(f'{option}: {unknown_metric(metric)}')
        if metrics.count(metric) > 1:
            raise UserError(f'{option}: {metric} is given twice; remove one')
        if network and not network.is_inception and TABLE[metric].needs_inception:
            raise UserError(
                f'{option}: {metric} needs the features inception, found {network.name}; '
                'leave it out'
            )


def compute(
    metrics: Sequence[str],
    network: FeatureNetwork,
    samples: ImageSummary,
    reference: ImageSummary | None,
    *,
    seed: int = 0,
    kid_subsets: int = SUBSETS,
    kid_subset_size: int = SUBSET_SIZE,
) -> list[Result]:
    """Computes the metrics, in the order requested.

    Args:
      reference: None only if no metric needs one (`Metric.needs_reference`).
      seed: for KID's subsets and the Inception Score's parts.
      kid_subsets, kid_subset_size: see `kernel_distance`.

    Raises:
      UserError: an unknown metric, one that the features do not allow, or too few images.
    """
    check_metrics(metrics, network)
    inputs = Inputs(network, samples, reference, seed, kid_subsets, kid_subset_size)
    results = []
    for metric in metrics:
        entry = TABLE[metric]
        values = entry.compute(inputs)
        protocol = protocol_of(network, samples, reference if entry.needs_reference else None, seed)
        label = result_label(metric, network)
        results.append(Result(label, values.value, values.std, protocol | values.settings))
    return results


def result_label(metric: str, network: FeatureNetwork) -> str:
    """Returns the name of a result; only Inception's features give an FID or a KID."""
    if network.is_inception:
        return metric
    return f'{general_label(metric)}[features={network.name}]'


def protocol_of(
    network: FeatureNetwork, samples: ImageSummary, reference: ImageSummary | None, seed: int
) -> Protocol:
    """Returns what a result states about its images, features and seed."""
    protocol: Protocol = {
        'samples': samples.name,
        'num_samples': samples.count or 'unknown',
        'sample_size': samples.size,
    }
    if reference is not None:
        protocol |= {
            'reference': reference.name,
            'num_reference': reference.count or 'unknown',
            'reference_size': reference.size,
        }
    return protocol | {'features': network.name, 'resize': network.resize, 'seed': seed}
