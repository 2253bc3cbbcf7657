#!/bin/bash
# Checks and times the kernels on a GPU, in the folder that build.sh made; stops after 300 s.
#   run.sh [check | 32 | 256]     only the checks, or the times of one batch; default: all
# The exit status is 1 if the bench fails.
cd "$(dirname "$0")"
timeout -k 2 300 ./bench "$@" || { echo "bench exit $?"; exit 1; }
