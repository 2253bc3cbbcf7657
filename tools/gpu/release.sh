#!/usr/bin/env bash
# Runs everything that a release must pass on GPUs: tests, sanitizers, step times, starts and a long run.
#   IMAGES=elephants64.zip tools/gpu/release.sh OUTPUT [MINUTES] [PART ...]
# MINUTES: time limit for all parts together, 28 by default. PARTS: scaling steps starts tests sanitizers soak; all by default.
# The exit status is 1 if a part failed or had too little time.
# The checkout must be built (tools/gpu/build.sh). IMAGES: a set that configs/elephants64.py reads.
# It uses all GPUs, or those of CUDA_VISIBLE_DEVICES. The long run (soak) has the last one and six CPU cores to itself. The other
# parts run on the first: those that measure times one after another, then sanitizers and tests at the same time. With a single
# GPU, scaling and soak are left out.
# Writes to OUTPUT:
#   scaling/ amp/       sweeps of one and all GPUs, and of the precisions
#   turns.jsonl         step times of xla and auto, measured in turns, bfloat16 and float32
#   starts.jsonl        time to the first step and the first picture
#   tests.log           pytest -m gpu; tests_all_gpus.log: training on all GPUs
#   sanitizer.jsonl     docs/results/sanitizer/rows.jsonl and the rows of the cases that it lacks; sanitizer.log
#   soak/ and soak.log  rows, measurements and picture of the long run
set -uo pipefail
mkdir -p "$1"
out=$(realpath "$1")
minutes=${2:-28}
known=' scaling steps starts tests sanitizers soak '
parts=" ${*:3} "
[ $# -gt 2 ] || parts=$known
for part in $parts; do
  [[ $known == *" $part "* ]] || { echo "error: part $part: expected some of$known"; exit 2; }
done
images=$(realpath "${IMAGES:-elephants64.zip}")
cd "$(dirname "$0")/../.." || exit
[ -f "$images" ] || { echo "error: $images: no such file; IMAGES names a set of images of 64x64"; exit 2; }
export PYTHONPATH=.:tests:tools/gpu${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_PREALLOCATE=false
IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd ,)}"
((${#gpus[@]})) || { echo 'error: expected an NVIDIA GPU, found none'; exit 2; }
cores=$(nproc)
end=$((SECONDS + 60 * minutes))
failed=0
sweep=(python3 -m jaxunet.sweep --config configs/elephants64.py "--config.data.path=$images" --noplot)

wanted() { [[ $parts == *" $1 "* ]]; }
# Prints how a part ended.
ended() {
  echo "[$SECONDS s] $1: exit status $2"
  (($2 == 0)) || failed=1
}
# Runs a command until the time is up; `timeout` then stops it, with the status 124.
within() {
  local name=$1 left=$((end - SECONDS))
  shift
  timeout --kill-after=10 "$((left < 1 ? 1 : left))" "$@"
  ended "$name" $?
}

if ((${#gpus[@]} < 2)); then
  for part in scaling soak; do
    if wanted $part; then echo "$part: needs two GPUs, left out"; fi
  done
fi
if wanted scaling && ((${#gpus[@]} > 1)); then
  within tests-of-all-gpus python3 -m pytest -m gpu -n 6 -q -p no:benchmark tests/gpu/test_gpu.py tests/gpu/test_processes.py -k every_gpu \
    >"$out/tests_all_gpus.log" 2>&1
  tail -2 "$out/tests_all_gpus.log"
  within scaling "${sweep[@]}" --preset devices_batch --vary "parallel.devices=1,${#gpus[@]}" --vary batch_per_device=32,128 \
    --output "$out/scaling"
fi

trap 'kill $(jobs -p) 2>/dev/null' EXIT
soak=
if wanted soak && ((${#gpus[@]} > 1)); then
  # Ends 15 seconds before the other parts, to have time to write its results.
  left=$(python3 -c "print(($end - $SECONDS - 15) / 60)")
  CUDA_VISIBLE_DEVICES=${gpus[-1]} taskset -c 0-5 python3 tools/soak/run.py --minutes "$left" --output "$out/soak" -- \
    --config=configs/elephants64.py "--config.data.path=$images" --config.backend=cuda --config.train.steps=10000000 \
    --config.train.log_every=500 --config.train.checkpoint_every=5000 --config.train.sample_every=5000 \
    --config.train.evaluate_every=5000 --config.evaluation.samples=256 --config.evaluation.steps=50 \
    --config.evaluation.metrics=fid,recall --config.evaluation.features=docs/results/methods/features.npz \
    >"$out/soak.log" 2>&1 &
  soak=$!
  taskset -p -c "6-$((cores - 1))" $$ >/dev/null
fi

export CUDA_VISIBLE_DEVICES=${gpus[0]}
if wanted steps; then
  within amp "${sweep[@]}" --config.parallel.devices=1 --preset amp --output "$out/amp"
  for flags in '--batch_sizes 32,256' '--batch_sizes 32 --precision float32'; do
    # shellcheck disable=SC2086
    within steps python3 tools/gpu/steps.py . --backends xla,auto $flags --output "$out/turns.jsonl"
  done
fi
if wanted starts; then
  within starts python3 tools/gpu/starts.py --auto --lanes 4 --seconds 120 --output "$out/starts.jsonl"
fi
sanitizers=
if wanted sanitizers; then
  [ -f "$out/sanitizer.jsonl" ] || cp docs/results/sanitizer/rows.jsonl "$out/sanitizer.jsonl"
  python3 tools/sanitizer/sanitize.py --seconds $((end - SECONDS)) --processes 10 \
    --output "$out/sanitizer.jsonl" >"$out/sanitizer.log" 2>&1 &
  sanitizers=$!
fi
if wanted tests; then
  within tests python3 -m pytest -m gpu -n 6 -q -p no:benchmark -p show_failures >"$out/tests.log" 2>&1
  tail -3 "$out/tests.log"
fi
for part in sanitizers soak; do
  if [ -n "${!part}" ]; then
    wait "${!part}"
    ended "$part" $?
  fi
done
exit $failed
