#!/usr/bin/env bash
# Measures starts, short jobs and this machine's fastest backends: what backend=auto follows in addition to its table.
#   tools/gpu/starts.sh OUTPUT_FOLDER [SECONDS_OF_STARTS]
# The checkout must be built (tools/gpu/build.sh). Writes to OUTPUT_FOLDER:
#   commands.jsonl        training and sampling of every kind of checkpoint, cold and warm (tools/gpu/starts.py)
#   sampling_costs.json   the costs by which auto chooses for short jobs, also in this checkout's jaxunet/ops/
#   auto.jsonl            the cases that leave the backend to auto, measured again with these costs
#   choices.json          the fastest backend of every op (jaxunet.benchmark --choose), with all times
#   followed.jsonl        step times in turns: xla, auto by its table, and auto by choices.json
set -euo pipefail
mkdir -p "$1"
out=$(realpath "$1")
cd "$(dirname "$0")/../.."
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
python3 tools/gpu/starts.py --output "$out/commands.jsonl" --seconds "${2:-300}"
python3 tools/gpu/starts.py --fit "$out/commands.jsonl"
cp jaxunet/ops/sampling_costs.json "$out"
python3 tools/gpu/starts.py --auto --output "$out/auto.jsonl" --seconds "${2:-300}"
JAXUNET_CHOICES=$out/choices.json python3 -m jaxunet.benchmark --config configs/elephants64.py --synthetic --choose \
  --precisions bfloat16,float32 --rounds 6
table=$(JAXUNET_CHOICES=$out/none.json python3 -c "
from jaxunet.ops.backends import named
ops = named('auto', 'bfloat16')
print('+'.join(['xla', *(f'{op}={name}' for op, name in ops.items())]))")
JAXUNET_CHOICES=$out/choices.json python3 -m jaxunet.benchmark --config configs/elephants64.py --synthetic \
  --directions step --precisions bfloat16 --batch_sizes 32,256 --backends "xla,$table,auto" --output "$out/followed.jsonl"
