#!/usr/bin/env bash
# Checks and times the Hopper attention kernels (bench.cu), in the folder that build.sh made, on a
# GPU of compute capability 9.0. The exit status is 1 if a family of widths failed.
cd "$(dirname "$0")" || exit 1
failed=0
for family in 32 64 256; do
  timeout 40 ./bench $family 2>&1 || failed=1
done
exit $failed
