#!/usr/bin/env bash
# Runs jobs of docs/results/recipes in several processes per GPU, which keep running when this command ends.
# (python -m jaxunet.compare --file runs comparison files such as docs/results/methods/methods.toml, and stays until they are done.)
#   tools/gpu/recipes.sh start DATA OUTPUT LIMIT STEP_MS GPU:CPUS ...   starts a process for each GPU named, bound to CPUS; call it again for more
#   tools/gpu/recipes.sh wait OUTPUT SECONDS       waits until all end, at most SECONDS; prints their rows
#   tools/gpu/recipes.sh pack OUTPUT TARGET        copies rows, logs and pictures to TARGET, in few files; at any time
#   tools/gpu/recipes.sh run DATA OUTPUT LIMIT STEP_MS TARGET GPU:CPUS ...   start, wait for LIMIT and two minutes, and pack
# First build the kernels (tools/gpu/build.sh). Folders are relative to the checkout. DATA: folder of the archives that the jobs name.
# LIMIT: seconds after which training stops; unfinished runs stay in OUTPUT/work, and the next start resumes them.
# RECIPE_RESUME=false, for a machine that keeps no files: saves no checkpoints, and begins no training that would not end by LIMIT.
# RECIPE_MPS=true: processes share a GPU through NVIDIA's multi-process service (nvidia-cuda-mps-control -d), so that their kernels run at
# the same time: two train 1.16 times as fast (docs/results.md, Recipes). `start` starts the service in OUTPUT/mps; the last process ends it.
# All processes must belong to one user. A fault of one of them ends the others on its GPU. If a process was killed, end the service yourself:
#   echo quit | CUDA_MPS_PIPE_DIRECTORY=$PWD/OUTPUT/mps nvidia-cuda-mps-control
# RECIPE_PROCESSES: number of processes that will share the memory of a GPU, including later calls of `start`; default: those of this call.
# RECIPE_SLOWDOWN: expected training time, divided by the time alone on the GPU; default: the number of processes on the GPU.
# STEP_MS: milliseconds of a step measured alone (python -m jaxunet.benchmark), or a file with a number for each case (python -m jaxunet.compare.step_cost).
# RECIPE_JOBS (default docs/results/recipes/jobs.py:objects) names the jobs; RECIPE_KNOWN names a file of rows that are not measured again.
# The feature network is OUTPUT/features.npz, or else features.npz beside the jobs; if neither exists, the first process trains it with
# RECIPE_FEATURES, flags of train_features (default: those of docs/results/recipes/jobs.py).
# RECIPE_JUDGE: file of a second feature network, as --judge of jaxunet.compare.queue; default: none.
# Example, two processes on each of two GPUs with 16 cores each: start data out 1200 5.8 0:0-7 1:16-23 0:8-15 1:24-31
set -euo pipefail
self=$(realpath "$0")
cd "$(dirname "$self")/../.."
jobs=${RECIPE_JOBS:-docs/results/recipes/jobs.py:objects}
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

part() { # one process; reads NUMBER, PROCESSES (on its GPU), DATA, OUTPUT, LIMIT and STEP_MS, which start exports
  trap ended EXIT
  XLA_PYTHON_CLIENT_MEM_FRACTION=$(printf '.%02d' $((88 / (PROCESSES + 1))))  # leaves a share for tests
  export XLA_PYTHON_CLIENT_MEM_FRACTION
  if [ "$NUMBER" = 1 ] && [ ! -f "$OUTPUT/features.npz" ]; then
    # shellcheck disable=SC2086
    python3 -m jaxunet.metrics.train_features --output "$OUTPUT/features.npz" \
      ${RECIPE_FEATURES:---reference $DATA/objects64_train.zip --test $DATA/objects64_test.zip --channels 32 --seconds 25}
  fi
  python3 -m jaxunet.compare.queue --jobs "$jobs" --data "$DATA" \
    --features "$OUTPUT/features.npz" --judge "${RECIPE_JUDGE:-}" --known "${RECIPE_KNOWN:-}" --claims "$OUTPUT/claims" \
    --step_ms "$STEP_MS" --shared_by "$PROCESSES" --slowdown "${RECIPE_SLOWDOWN:-0}" \
    --limit $((LIMIT - SECONDS)) --output "$OUTPUT/$NUMBER" \
    --work "$OUTPUT/work" --resume="${RECIPE_RESUME:-true}" ||
    echo "part $NUMBER: exit status $?"
}

ended() { # says that a process has ended; the last one ends the multi-process service
  exec 9>"$OUTPUT/lock"
  flock 9
  touch "$OUTPUT/$NUMBER.done"
  if ! running "$OUTPUT" && [ -d "$OUTPUT/mps" ]; then
    CUDA_MPS_PIPE_DIRECTORY=$(realpath "$OUTPUT/mps")
    export CUDA_MPS_PIPE_DIRECTORY
    ! served || echo quit | nvidia-cuda-mps-control
  fi
}

share() { # starts the multi-process service of OUTPUT, unless it runs
  if ! command -v nvidia-cuda-mps-control >/dev/null; then
    echo "error: RECIPE_MPS=true needs nvidia-cuda-mps-control, a program of NVIDIA's driver, on the PATH" >&2
    exit 1
  fi
  mkdir -p "$OUTPUT/mps"
  CUDA_MPS_PIPE_DIRECTORY=$(realpath "$OUTPUT/mps")
  export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
  # The service is for all GPUs, whatever the caller has chosen.
  served || env -u CUDA_VISIBLE_DEVICES nvidia-cuda-mps-control -d >"$OUTPUT/mps/start.log" 2>&1 9>&- || true
  if ! served; then
    echo "error: NVIDIA's multi-process service did not start; see the logs in $OUTPUT/mps" >&2
    exit 1
  fi
}

served() { # succeeds if the multi-process service of CUDA_MPS_PIPE_DIRECTORY runs
  local answer
  answer=$(echo get_server_list | nvidia-cuda-mps-control 2>&1) && [[ $answer != *"Cannot find"* ]]
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
    mkdir -p "$3"
    OUTPUT=$(realpath --relative-base=. "$3") # rows have it in their commands, without a machine's folders
    export OUTPUT DATA=$2 LIMIT=$4 STEP_MS=$5
    shift 5
    exec 9>"$OUTPUT/lock" # no process ends meanwhile, and with the last one the service
    flock 9
    [ "${RECIPE_MPS:-false}" != true ] || share
    running "$OUTPUT" || rm -rf "$OUTPUT"/*.done "$OUTPUT"/*.log "$OUTPUT/claims"
    kept=$(dirname "${jobs%%:*}")/features.npz
    [ -f "$OUTPUT/features.npz" ] || [ ! -f "$kept" ] || cp "$kept" "$OUTPUT/"
    started=$(find "$OUTPUT" -maxdepth 1 -name '*.log' | wc -l)
    for place; do
      started=$((started + 1))
      gpu=${place%%:*}
      log=$OUTPUT/$started.log
      : >"$log"
      processes=${RECIPE_PROCESSES:-$(printf '%s\n' "$@" | grep -c "^$gpu:")}
      NUMBER=$started PROCESSES=$processes CUDA_VISIBLE_DEVICES=$gpu \
        setsid nohup taskset -c "${place#*:}" "$self" part >"$log" 2>&1 </dev/null 9>&- &
    done
    ;;
  part) part ;;
  run)
    data=$2 output=$3 limit=$4 step_ms=$5 target=$6
    shift 6
    "$self" start "$data" "$output" "$limit" "$step_ms" "$@"
    "$self" wait "$output" $((limit + 120))
    "$self" pack "$output" "$target"
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
    output=${2%/}
    mkdir -p "$3"
    for name in rows stretches; do
      find "$output" -maxdepth 2 -path "$output/[0-9]*/$name.jsonl" -exec cat {} + >"$3/$name.jsonl"
    done
    for log in "$output"/*.log; do tr '\r' '\n' <"$log" >"$3/$(basename "$log")"; done
    [ ! -f "$output/features.npz" ] || cp "$output/features.npz" "$3/"
    find "$output" \( -path "$output/[0-9]*/logs/*" -o -path "$output/[0-9]*/pictures/*" \) -type f -printf '%P\0' |
      tar -C "$output" --null -T - --transform 's,^[0-9]*/,,' -cf "$3/pictures.tar"
    ;;
  *)
    sed '1d; /^#/!Q' "$self" >&2 # the comment at the top
    exit 2
    ;;
esac
