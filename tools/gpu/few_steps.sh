#!/usr/bin/env bash
# Runs docs/results/few_steps/measure.py in one process per GPU, and packs what it made.
#   tools/gpu/few_steps.sh run DATA OUTPUT LIMIT TARGET GPU:CPUS:SETS ...   stops after LIMIT seconds; the same command goes on
#   tools/gpu/few_steps.sh commands OUTPUT TARGET GPU:SET ...          then: rounding of a set's teacher, and seconds of whole commands
# First build the kernels (tools/gpu/build.sh). Folders are relative to the checkout; DATA as measure.py says. TARGET gets few files.
# FEW_STEPS_FLAGS: further flags of measure.py, separated by spaces: --step_ms is needed. Several places may name one GPU, and share it.
# Example: FEW_STEPS_FLAGS='--step_ms 4.33,6.52' tools/gpu/few_steps.sh run data runs/few 540 packed 0:0-7:elephants64 0:8-15:objects64
set -euo pipefail
cd "$(dirname "$(realpath "$0")")/../.."
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
python=${PYTHON:-python3}

commands() { # SET: prints the rounding in the loss of its teacher, and a row of seconds for each command of 64 samples
  local teacher=$output/work/$1_teacher_seed0 tuned words start began
  tuned=$(printf '%s\n' "$output/work/$1"_muon-*s_seed0 | sort -V | tail -n 1) # the longest
  timeout 120 "$python" tools/consistency_precision.py "$teacher" --q 16,64,256 2>&1 | tr '\r' '\n' | tail -n 24 || true
  for words in "$teacher --sampler heun --steps 25" "$tuned --steps 1" "$tuned --steps 2" "$tuned --steps 4"; do
    for start in first second; do
      rm -f "$output/$1.png"*
      began=$(date +%s.%N)
      # shellcheck disable=SC2086
      timeout 90 "$python" -m jaxunet.sample --checkpoint $words --num_samples 64 --output "$output/$1.png" >"$output/$1.txt" 2>&1 ||
        tail -n 3 "$output/$1.txt"
      echo "$(date +%s.%N) $began" | awk -v words="$words" -v start="$start" \
        '{printf "{\"command\": \"python -m jaxunet.sample --checkpoint %s --num_samples 64\", \"start\": \"%s\", \"seconds\": %.2f}\n", words, start, $1 - $2}'
    done
  done
}

case ${1:-} in
  run)
    data=$2 output=$3 limit=$4 target=$5
    shift 5
    mkdir -p "$output" "$target"
    number=0 processes=()
    for place; do
      number=$((number + 1))
      IFS=: read -r gpu cpus sets <<<"$place"
      sharing=$(printf '%s\n' "$@" | grep -c "^$gpu:")
      XLA_PYTHON_CLIENT_MEM_FRACTION=$(printf '.%02d' $((80 / sharing))) CUDA_VISIBLE_DEVICES=$gpu \
        timeout -k 15 $((limit + 15)) taskset -c "$cpus" "$python" docs/results/few_steps/measure.py \
        --data "$data" --output "$output/$number" --sets "$sets" --limit "$limit" ${FEW_STEPS_FLAGS:-} >>"$output/$number.log" 2>&1 &
      processes+=($!)
    done
    for process in "${processes[@]}"; do wait "$process" || echo "a process ended with status $?"; done
    "$python" - "$output" <<'PYTHON'
import pathlib, sys
from PIL import Image

for path in pathlib.Path(sys.argv[1]).glob('*/pictures/*.png'):
    with Image.open(path) as image:
        image.convert('RGB').save(path.with_suffix('.jpg'), quality=88)
    path.unlink()
PYTHON
    tools/gpu/recipes.sh pack "$output" "$target"
    cat "$output"/*.log | tr '\r' '\n' | grep -oE '^ *\[[0-9]+ s\] .*|^error.*|^chosen: .*|Error: .*|compiled the step in .*' | cut -c 1-300 || true
    ;;
  commands)
    output=$2 target=$3
    shift 3
    mkdir -p "$target"
    for place; do
      CUDA_VISIBLE_DEVICES=${place%%:*} commands "${place#*:}" >"$target/commands_${place#*:}.txt" 2>&1 &
    done
    wait
    tail -n +1 "$target"/commands_*.txt
    ;;
  *)
    sed '1d; /^#/!Q' "$0" >&2 # the comment at the top
    exit 2
    ;;
esac
