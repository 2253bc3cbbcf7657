"""The configuration of a run: fields, defaults and checks."""

from jaxunet.config.checks import diff, resolve, split_backend
from jaxunet.config.schema import (
    CHOICES,
    OPS,
    PRECISIONS,
    Config,
    DataConfig,
    DiffusionConfig,
    EmaConfig,
    EvaluationConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TimestepsConfig,
    TrainConfig,
    by_path,
    default_config,
    get_config,
    to_dict,
)
from jaxunet.config.versions import identity

__all__ = [
    'CHOICES',
    'OPS',
    'PRECISIONS',
    'Config',
    'DataConfig',
    'DiffusionConfig',
    'EmaConfig',
    'EvaluationConfig',
    'LossConfig',
    'ModelConfig',
    'OptimizerConfig',
    'ParallelConfig',
    'TimestepsConfig',
    'TrainConfig',
    'by_path',
    'default_config',
    'diff',
    'get_config',
    'identity',
    'resolve',
    'split_backend',
    'to_dict',
]
