"""Predefined sweeps: the experiments of a performance study, for any config.

`--vary` of the same field replaces the values of a preset. `STUDY` combines several presets in one
report.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxunet.sweep.runner import PROFILE, STEP


class Preset(NamedTuple):
    """One experiment.

    Fields:
      question: the question that it answers, for the title of the report.
      axes: the axes, each as a value of `--vary`.
      tool: `STEP` times the steps of each point, `PROFILE` traces them.
      steps: timed or traced steps of each point.
      warmup: steps before the timed or traced ones.
    """

    question: str
    axes: tuple[str, ...]
    tool: str = STEP
    steps: int = 100
    warmup: int = 10


PRESETS = {
    'top_operations': Preset(
        'Which operations take the time of a step?', ('backend=xla,auto',), PROFILE, 5, 5
    ),
    'devices_batch': Preset(
        'How does throughput grow with devices, and with the batch of each?',
        ('parallel.devices=1,2,4', 'batch_per_device=32,64,128'),
    ),
    'amp': Preset(
        'What does a narrower compute type give?', ('precision=float32,bfloat16,float16',)
    ),
    'loader_workers': Preset(
        'How many workers keep the device fed, and what does a set in device memory save?',
        ('data.cache=stream,device', 'data.num_workers=0,2,4,8'),
        steps=200,
    ),
    'devices_batch_workers': Preset(
        'How many workers keep one device and two fed, at small and large batches?',
        ('parallel.devices=1,2', 'batch_per_device=32,128', 'data.num_workers=0,2,4,8'),
        steps=200,
    ),
    'compiled': Preset(
        'What does compiling the step as one program give?', ('jit=on,off',), steps=50
    ),
}

STUDY = 'study'
STUDY_PARTS = ('amp', 'compiled', 'devices_batch_workers', 'top_operations')
