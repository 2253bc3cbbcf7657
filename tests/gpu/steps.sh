#!/usr/bin/env bash
# Times whole training steps of two checkouts in turns (old, new, old, new), so that their ratio holds where the machine's speed drifts.
#   tests/gpu/steps.sh OLD NEW OUTPUT_FOLDER [FLAGS OF jaxunet.benchmark]
# Both must be built (tests/gpu/build.sh). Writes OUTPUT_FOLDER/{old,new}_{1,2}.jsonl and prints a table of medians.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
old=$1 new=$2 out=$(realpath "$3")
shift 3
flags=("$@")
[ ${#flags[@]} -gt 0 ] || flags=(--config configs/elephants64.py --synthetic --directions step --backends auto --batch_sizes 32,256)
for turn in 1 2; do
  for side in old new; do
    tree=$old
    [ $side = new ] && tree=$new
    (cd "$tree" && PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} python3 -m jaxunet.benchmark "${flags[@]}" --output "$out/${side}_$turn.jsonl" >"$out/${side}_$turn.log" 2>&1) ||
      { tail -20 "$out/${side}_$turn.log"; exit 1; }
  done
done
python3 "$here/compare_rows.py" "$out"
