#!/usr/bin/env bash
# Measures the rows behind the times in the docs: whole steps, sampling, budgets and single kernels.
#   tests/gpu/benchmarks.sh OUTPUT [PART ...]
# PARTS: step networks sampling budget kernels; all by default, one after another, on one GPU that nothing else uses.
# SECONDS_OF_KERNELS (default 600): after this time, `kernels` compiles nothing more; compiling uses all CPU cores.
# The exit status is 1 if a part failed. The checkout must be built (tests/gpu/build.sh) and have no changes.
# Appends to files of OUTPUT, whose rows belong at the end of those in docs/results:
#   step.jsonl     step/rows.jsonl: elephants64 beside PyTorch, then cifar10 and imagenet64, forward passes and sampling
#   budget.jsonl   budget/rows.jsonl
#   kernels.jsonl  kernels/rows.jsonl
set -uo pipefail
mkdir -p "$1"
out=$(realpath "$1")
known=' step networks sampling budget kernels '
parts=" ${*:2} "
[ $# -gt 1 ] || parts=$known
for part in $parts; do
  [[ $known == *" $part "* ]] || { echo "error: part $part: expected some of$known"; exit 2; }
done
cd "$(dirname "$0")/../.." || exit
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
failed=0

measure() { # PART MODULE FLAGS...
  [[ $parts == *" $1 "* ]] || return 0
  local began=$SECONDS code=0
  python3 -m "${@:2}" || code=$?
  echo "[$SECONDS s] $1: exit status $code after $((SECONDS - began)) s"
  ((code == 0)) || failed=1
}
steps() { # PART CONFIG FLAGS...
  measure "$1" jaxunet.benchmark --config "configs/$2.py" --synthetic --output "$out/step.jsonl" "${@:3}"
}

steps step elephants64 --directions step --backends xla,pallas,auto --batch_sizes 32,256 --peers pytorch
steps networks cifar10 --directions step --backends xla,auto --batch_sizes 128
steps networks imagenet64 --directions step --backends auto --batch_sizes 64
steps sampling elephants64 --directions forward --backends xla,auto --batch_sizes 64 --peers pytorch-best
steps sampling elephants64 --directions sample --backends xla,auto --batch_sizes 64,256
for of in 'elephants64 32,256' 'cifar10 128'; do
  measure budget jaxunet.benchmark.kernels --roofline --config "configs/${of% *}.py" --batch_sizes "${of#* }" \
    --output "$out/budget.jsonl"
done
measure kernels jaxunet.benchmark.kernels --seconds "${SECONDS_OF_KERNELS:-600}" --output "$out/kernels.jsonl"
exit $failed
