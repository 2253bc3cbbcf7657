#!/usr/bin/env bash
# Runs the small cases of every kernel under compute-sanitizer: calls tools/sanitizer/sanitize.py with these tools.
#   tools/sanitizer/sanitize.sh [TOOL ...]      default: all four
# JAXUNET_KERNELS=portable runs only the portable kernels; without it, these and the kernels for this GPU run.
set -euo pipefail
cd "$(dirname "$0")/../.."
tools="${*:-memcheck racecheck synccheck initcheck}"
exec python3 tools/sanitizer/sanitize.py --tools "${tools// /,}" --kernels "${JAXUNET_KERNELS:-fastest,portable}"
