#!/usr/bin/env bash
# Checks and times the attention kernels: `bench`, as build.sh made it, on a machine with an H200.
cd "$(dirname "$0")" || exit 1
for family in 32 64 256; do
  timeout 40 ./bench $family 2>&1
  echo "exit $?"
done
