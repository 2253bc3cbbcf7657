#!/usr/bin/env bash
# Measures the rows behind the times in the docs: whole steps, sampling, budgets and single kernels.
#   tools/gpu/benchmarks.sh OUTPUT [PART ...]
# PARTS: step networks sampling budget kernels; all by default. Each is one or more jobs. Nothing else may use the GPUs, all or
# those of CUDA_VISIBLE_DEVICES: each runs one job after another, on its own share of the CPU cores.
# SECONDS_OF_KERNELS (default 600): a job of `kernels` compiles nothing more after this time.
# The exit status is 1 if a job failed. The checkout must be built (tools/gpu/build.sh) and have no changes.
# Appends to files of OUTPUT, whose rows belong at the end of those in docs/results; jobs.log has what the jobs print:
#   step.jsonl     step/rows.jsonl: elephants64 beside PyTorch, then cifar10 and imagenet64, forward passes and sampling
#   budget.jsonl   budget/rows.jsonl
#   kernels.jsonl  kernels/rows.jsonl
set -uo pipefail
mkdir -p "$1"
OUT=$(realpath "$1")
known=' step networks sampling budget kernels '
parts=" ${*:2} "
[ $# -gt 1 ] || parts=$known
for part in $parts; do
  [[ $known == *" $part "* ]] || { echo "error: part $part: expected some of$known"; exit 2; }
done
cd "$(dirname "$0")/../.." || exit
export OUT PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
GPUS=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd ,)}
[ -n "$GPUS" ] || { echo 'error: expected an NVIDIA GPU, found none'; exit 2; }
COUNT=$(tr , '\n' <<<"$GPUS" | wc -l)
CORES='' # of this process
for range in $(taskset -cp $$ | sed 's/.*: //; s/,/ /g'); do
  CORES+=" $(seq -s ' ' "${range%-*}" "${range#*-}")"
done
export GPUS COUNT CORES

jobs=() # PART FILE MODULE FLAGS..., without spaces in a flag; the longest first
add() { [[ $parts != *" $1 "* ]] || jobs+=("$*"); }
steps() { # PART CONFIG FLAGS...
  add "$1" step.jsonl jaxunet.benchmark --config "configs/$2.py" --synthetic "${@:3}"
}
kernels() { add kernels kernels.jsonl jaxunet.benchmark.kernels --seconds "${SECONDS_OF_KERNELS:-600}" "$@"; }
budget() { add budget budget.jsonl jaxunet.benchmark.kernels --roofline --config "configs/$1.py" --batch_sizes "$2"; }

steps step elephants64 --directions step --backends xla,pallas,auto --batch_sizes 32,256 --peers pytorch
kernels --ops conv3x3 --cases '^norm_'
kernels --ops conv3x3 --cases '^(?!norm_)'
steps networks cifar10 --directions step --backends xla,auto --batch_sizes 128
kernels --ops linear,project,attention,group_norm,adamw
steps networks imagenet64 --directions step --backends auto --batch_sizes 64
steps sampling elephants64 --directions forward --backends xla,auto --batch_sizes 64 --peers pytorch-best
steps sampling elephants64 --directions sample --backends xla,auto --batch_sizes 64,256
budget elephants64 32,256
budget cifar10 128

run() { # JOB; SLOT counts the simultaneous jobs from 0
  local began=$SECONDS code=0 job pin=() cores share
  read -ra job <<<"$1"
  CUDA_VISIBLE_DEVICES=$(cut -d , -f $((SLOT + 1)) <<<"$GPUS")
  export CUDA_VISIBLE_DEVICES
  read -ra cores <<<"$CORES"
  share=$((${#cores[@]} / COUNT))
  ((COUNT == 1 || share == 0)) || pin=(taskset -c "$(IFS=, && echo "${cores[*]:SLOT * share:share}")")
  "${pin[@]}" python3 -m "${job[@]:2}" --output "$OUT/${job[1]}" >>"$OUT/jobs.log" 2>&1 || code=$?
  echo "${job[0]}: exit status $code after $((SECONDS - began)) s: ${job[*]:2}"
  return $code
}
export -f run
printf '%s\n' "${jobs[@]}" |
  xargs -d '\n' -n 1 -P "$COUNT" --process-slot-var=SLOT bash -c 'run "$1"' run || exit 1
