"""Decides which checkpoints are kept: the last ones, those at regular steps, the best ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from orbax.checkpoint import checkpoint_managers as policies

Scores: TypeAlias = Callable[[], Mapping[int, float]]


@dataclass(frozen=True)
class _Scored:
    """A checkpoint as orbax's policies need it, with its score."""

    step: int
    time: Any  # datetime of the checkpoint
    metrics: dict[str, float] | None


@dataclass
class _Best:
    """Keeps the `count` checkpoints with the highest scores.

    Checkpoints without a score are never kept. Scores are looked up when orbax decides, because a
    checkpoint is evaluated only after it is saved.
    """

    count: int
    scores: Scores

    def should_preserve(
        self,
        checkpoints: Sequence[policies.PolicyCheckpointInfo],
        *,
        context: policies.PreservationContext,
    ) -> Sequence[bool]:
        scores = self.scores()
        scored = [
            _Scored(c.step, c.time, {'score': scores[c.step]} if c.step in scores else None)
            for c in checkpoints
        ]
        best = policies.BestN(
            get_metric_fn=lambda metrics: metrics['score'],
            n=self.count,
            keep_checkpoints_without_metrics=False,
        )
        return best.should_preserve(scored, context=context)


def preservation_policy(
    keep: int, keep_every: int, keep_best: int, scores: Scores
) -> policies.PreservationPolicy:
    """Returns orbax's policy for the checkpoints to keep: any one of these reasons is enough.

    Args:
      keep: number of newest checkpoints.
      keep_every: keep the multiples of this many steps; 0 = none.
      keep_best: number of checkpoints with the highest scores.
      scores: returns the scores by step; checkpoints without a score are not among the best.
    """
    chosen: list[policies.PreservationPolicy] = [policies.LatestN(keep)]
    if keep_every:
        chosen.append(policies.EveryNSteps(keep_every))
    if keep_best:
        chosen.append(_Best(keep_best, scores))
    return policies.AnyPreservationPolicy(chosen)
