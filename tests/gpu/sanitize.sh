#!/usr/bin/env bash
# Runs the small cases of every kernel under compute-sanitizer: calls tests/gpu/sanitize.py with these tools.
#   tests/gpu/sanitize.sh [TOOL ...]      default: all four
# JAXUNET_KERNELS=portable runs only the portable kernels; without it, these and the kernels for this GPU run.
set -euo pipefail
cd "$(dirname "$0")/../.."
tools="${*:-memcheck racecheck synccheck initcheck}"
exec python3 tests/gpu/sanitize.py --tools "${tools// /,}" --kernels "${JAXUNET_KERNELS:-fastest,portable}"
