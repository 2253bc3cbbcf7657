#!/usr/bin/env bash
# Measures the rows behind the times in the docs: whole steps, sampling, budgets and single kernels.
#   tools/gpu/benchmarks.sh OUTPUT [PART ...]
# PARTS: step networks sampling budget kernels; all by default. Each is one or more jobs. Nothing else may use the GPUs, all or
# those of CUDA_VISIBLE_DEVICES. First each runs three jobs of whole networks at a time, which compile beside each other and
# measure alone (--lock; their rows' compile times are longer); then one other job after another, on its own share of the cores.
# SECONDS_OF_KERNELS (default 600): a job of `kernels` compiles nothing more after this time.
# The exit status is 1 if a job failed. The checkout must be built (tools/gpu/build.sh) and have no changes.
# Appends to files of OUTPUT, whose rows belong at the end of those in docs/results; jobs.log has what the jobs print:
#   step.jsonl     step/rows.jsonl: elephants64, cifar10, imagenet64 and larger images beside PyTorch, forward passes, sampling
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
larger() { # SIDE CHANNEL_MULT BATCH: the network that configs/images.py chooses for photographs of this size
  steps networks images --config.data.image_size="$1" --config.model.channel_mult="$2" --config.data.batch_size="$3" \
    --config.model.image_channels=3 --config.model.attention_resolutions=16,8 --config.diffusion.objective=v \
    --config.optimizer.learning_rate=1e-4 --config.train.steps=1 --directions step --backends xla,auto --peers pytorch-best
}
kernels() { add kernels kernels.jsonl jaxunet.benchmark.kernels --seconds "${SECONDS_OF_KERNELS:-600}" "$@"; }
budget() { add budget budget.jsonl jaxunet.benchmark.kernels --roofline --config "configs/$1.py" --batch_sizes "$2"; }

for size in 256 32; do
  steps step elephants64 --directions step --backends xla,pallas,auto --batch_sizes "$size" --peers pytorch
done
steps networks imagenet64 --directions step --backends xla,auto --batch_sizes 64 --peers pytorch-best
steps networks cifar10 --directions step --backends xla,auto --batch_sizes 128 --peers pytorch-best
larger 256 1,1,2,2,4,4 16
larger 128 1,1,2,3,4 32
kernels --ops conv3x3 --cases '^norm_'
kernels --ops conv3x3 --cases '^(?!norm_)'
kernels --ops linear,project,attention,group_norm,adamw
steps sampling elephants64 --directions forward --backends xla,auto --batch_sizes 64 --peers pytorch-best
steps sampling elephants64 --directions sample --backends xla,auto --batch_sizes 64,256
budget elephants64 32,256
budget cifar10 128

run() { # JOB; SLOT counts the simultaneous jobs from 0
  local began=$SECONDS code=0 job pin=() cores share gpu=$((SLOT % COUNT))
  read -ra job <<<"$1"
  CUDA_VISIBLE_DEVICES=$(cut -d , -f $((gpu + 1)) <<<"$GPUS")
  export CUDA_VISIBLE_DEVICES
  if ((TOGETHER > 1)); then
    job+=(--lock "$OUT/lock.$CUDA_VISIBLE_DEVICES")
    export XLA_PYTHON_CLIENT_PREALLOCATE=false
  fi
  read -ra cores <<<"$CORES"
  share=$((${#cores[@]} / COUNT))
  ((COUNT == 1 || share == 0)) || pin=(taskset -c "$(IFS=, && echo "${cores[*]:gpu * share:share}")")
  "${pin[@]}" python3 -m "${job[@]:2}" --output "$OUT/${job[1]}" >>"$OUT/jobs.log" 2>&1 || code=$?
  echo "${job[0]}: exit status $code after $((SECONDS - began)) s: ${job[*]:2}"
  return $code
}
all() { # TOGETHER: runs the jobs of standard input, this many at a time on each GPU
  TOGETHER=$1 xargs -r -d '\n' -n 1 -P $((COUNT * $1)) --process-slot-var=SLOT bash -c 'run "$1"' run
}
export -f run
failed=0
all 3 < <(printf '%s\n' "${jobs[@]}" | grep -F ' jaxunet.benchmark ') || failed=1
all 1 < <(printf '%s\n' "${jobs[@]}" | grep -vF ' jaxunet.benchmark ') || failed=1
exit $failed
