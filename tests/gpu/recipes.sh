#!/usr/bin/env bash
# Runs the jobs of docs/results/recipes on two GPUs, in processes that go on when this command ends.
#   tests/gpu/recipes.sh start DATA OUTPUT LIMIT   trains the features, then parts a and b, for LIMIT seconds in all
#   tests/gpu/recipes.sh wait OUTPUT SECONDS       waits until both parts end, at most SECONDS; prints their rows
#   tests/gpu/recipes.sh pack OUTPUT TARGET        copies rows, logs and pictures to TARGET, in few files; at any time
# Folders are relative to the checkout. DATA: the folder of objects64_train.zip, objects64_test.zip and elephants64.zip. Build the kernels before (tests/gpu/build.sh).
# RECIPE_JOBS (default docs/results/recipes/jobs.py) names another file of jobs, RECIPE_FEATURES the flags of train_features.
set -euo pipefail
self=$(realpath "$0")
cd "$(dirname "$self")/../.."
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
jobs=${RECIPE_JOBS:-docs/results/recipes/jobs.py}

part() { # PART DATA OUTPUT LIMIT: one GPU's process; part a trains the features first
  local part=$1 data=$2 out=$3 limit=$4
  trap "touch '$out/$part.done'" EXIT
  if [ "$part" = a ] && [ ! -f "$out/features.npz" ]; then
    # shellcheck disable=SC2086
    python3 -m jaxunet.metrics.train_features --reference "$data/objects64_train.zip" --test "$data/objects64_test.zip" \
      --output "$out/features.npz" ${RECIPE_FEATURES:---channels 48 --seconds 25}
  fi
  python3 -m jaxunet.compare.queue --jobs "$jobs:$part" --data "$data" --features "$out/features.npz" \
    --limit $((limit - SECONDS)) --output "$out/$part" || echo "part $part: exit status $?"
}

case ${1:-} in
  start)
    mkdir -p "$3"
    out=$(realpath "$3") gpu=0
    for name in a b; do
      rm -f "$out/$name.done"
      CUDA_VISIBLE_DEVICES=$gpu setsid nohup "$self" part "$name" "$2" "$out" "$4" >"$out/$name.log" 2>&1 </dev/null &
      gpu=$((gpu + 1))
    done
    ;;
  part) part "${@:2}" ;;
  wait)
    until [ -f "$2/a.done" ] && [ -f "$2/b.done" ] || [ $SECONDS -ge "$3" ]; do sleep 2; done
    for name in a b; do
      echo "== $name"
      # A progress bar may stand before a line.
      tr '\r' '\n' <"$2/$name.log" | grep -oE '\[[0-9]+ s\] .*|^error.*|^test accuracy.*|^part .*' || tail -n 20 "$2/$name.log"
    done
    ;;
  pack)
    mkdir -p "$3"
    find "$2" -path '*/[ab]/rows.jsonl' -exec cat {} + >"$3/rows.jsonl"
    for name in a b; do tr '\r' '\n' <"$2/$name.log" >"$3/$name.log"; done
    [ ! -f "$2/features.npz" ] || cp "$2/features.npz" "$3/"
    find "$2" \( -path '*/[ab]/logs/*' -o -path '*/[ab]/pictures/*' \) -type f -printf '%P\0' |
      tar -C "$2" --null -T - --transform 's,^[ab]/,,' -cf "$3/pictures.tar"
    ;;
  *)
    sed -n '2,7p' "$self" >&2
    exit 2
    ;;
esac
