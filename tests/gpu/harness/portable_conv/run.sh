#!/bin/bash
# Checks and times the kernels on a GPU, in the folder that build.sh made: run.sh [check | 32 | 256]
cd "$(dirname "$0")"
timeout -k 2 300 ./bench "$@" || { echo "bench exit $?"; exit 1; }
