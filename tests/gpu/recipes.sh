#!/usr/bin/env bash
# Runs jobs of docs/results/recipes or docs/results/methods, several processes a GPU, which go on when this command ends.
#   tests/gpu/recipes.sh start DATA OUTPUT LIMIT STEP_MS GPU:CPUS ...   starts a process for each GPU named, bound to CPUS; again for more
#   tests/gpu/recipes.sh wait OUTPUT SECONDS       waits until all end, at most SECONDS; prints their rows
#   tests/gpu/recipes.sh pack OUTPUT TARGET        copies rows, logs and pictures to TARGET, in few files; at any time
#   tests/gpu/recipes.sh run DATA OUTPUT LIMIT STEP_MS TARGET GPU:CPUS ...   start, wait for LIMIT and two minutes, and pack
# Folders are relative to the checkout. DATA: the folder of the archives that the jobs name. Build the kernels before (tests/gpu/build.sh).
# LIMIT: seconds after which no training begins that would not end by then. STEP_MS: milliseconds of a step measured alone
# (python -m jaxunet.benchmark), or a file with those of each case (python -m jaxunet.compare.step_cost).
# RECIPE_JOBS (default docs/results/recipes/jobs.py:objects) names the jobs, RECIPE_KNOWN rows whose times are left out.
# The features are OUTPUT/features.npz, else features.npz beside the jobs, else the first process trains them with
# RECIPE_FEATURES, flags of train_features (default: those of docs/results/recipes/jobs.py).
# Example, two processes on each of two GPUs with 16 cores each: start data out 1200 5.8 0:0-7 1:16-23 0:8-15 1:24-31
set -euo pipefail
self=$(realpath "$0")
cd "$(dirname "$self")/../.."
jobs=${RECIPE_JOBS:-docs/results/recipes/jobs.py:objects}
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

part() { # NUMBER PROCESSES-A-GPU DATA OUTPUT LIMIT STEP_MS
  local part=$1 shared=$2 data=$3 out=$4 limit=$5 step_ms=$6
  trap "touch '$out/$part.done'" EXIT
  XLA_PYTHON_CLIENT_MEM_FRACTION=$(printf '.%02d' $((88 / (shared + 1))))  # leaves a share for tests
  export XLA_PYTHON_CLIENT_MEM_FRACTION
  if [ "$part" = 1 ] && [ ! -f "$out/features.npz" ]; then
    # shellcheck disable=SC2086
    python3 -m jaxunet.metrics.train_features --output "$out/features.npz" \
      ${RECIPE_FEATURES:---reference $data/objects64_train.zip --test $data/objects64_test.zip --channels 32 --seconds 25}
  fi
  python3 -m jaxunet.compare.queue --jobs "$jobs" --data "$data" \
    --features "$out/features.npz" --known "${RECIPE_KNOWN:-}" --claims "$out/claims" --step_ms "$step_ms" --shared_by "$shared" \
    --limit $((limit - SECONDS)) --output "$out/$part" || echo "part $part: exit status $?"
}

running() { # OUTPUT: succeeds if a process has not ended
  local log
  for log in "$1"/*.log; do
    [ ! -f "$log" ] || [ -f "${log%.log}.done" ] || return 0
  done
  return 1
}

case ${1:-} in
  start)
    data=$2 limit=$4 step_ms=$5
    mkdir -p "$3"
    out=$(realpath "$3")
    shift 5
    running "$out" || rm -rf "$out"/*.done "$out"/*.log "$out/claims"
    kept=$(dirname "${jobs%%:*}")/features.npz
    [ -f "$out/features.npz" ] || [ ! -f "$kept" ] || cp "$kept" "$out/"
    number=$(find "$out" -name '*.log' | wc -l)
    for place; do
      number=$((number + 1))
      gpu=${place%%:*}
      shared=$(printf '%s\n' "$@" | grep -c "^$gpu:")
      : >"$out/$number.log"
      CUDA_VISIBLE_DEVICES=$gpu setsid nohup taskset -c "${place#*:}" "$self" part $number "$shared" "$data" "$out" "$limit" "$step_ms" \
        >"$out/$number.log" 2>&1 </dev/null &
    done
    ;;
  part) part "${@:2}" ;;
  run)
    "$self" start "${@:2:4}" "${@:7}"
    "$self" wait "$3" $(($4 + 120))
    "$self" pack "$3" "$6"
    ;;
  wait)
    while running "$2" && [ $SECONDS -lt "$3" ]; do sleep 2; done
    for log in "$2"/*.log; do
      echo "== $(basename "$log" .log)"
      # A progress bar may stand before a line.
      tr '\r' '\n' <"$log" | grep -oE '\[[0-9]+ s\] .*|^error.*|^test accuracy.*|^part .*' || tail -n 20 "$log"
    done
    ;;
  pack)
    mkdir -p "$3"
    find "$2" -path '*/[0-9]/rows.jsonl' -exec cat {} + >"$3/rows.jsonl"
    for log in "$2"/*.log; do tr '\r' '\n' <"$log" >"$3/$(basename "$log")"; done
    [ ! -f "$2/features.npz" ] || cp "$2/features.npz" "$3/"
    find "$2" \( -path '*/[0-9]/logs/*' -o -path '*/[0-9]/pictures/*' \) -type f -printf '%P\0' |
      tar -C "$2" --null -T - --transform 's,^[0-9]/,,' -cf "$3/pictures.tar"
    ;;
  *)
    sed -n '2,13p' "$self" >&2
    exit 2
    ;;
esac
