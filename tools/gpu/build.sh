#!/usr/bin/env bash
# Builds the extension of a checkout in place, for this machine's GPU, with installed packages only (no network).
#   tools/gpu/build.sh [CHECKOUT]
# A build for Hopper (90a-real) also has the portable kernels: JAXUNET_KERNELS chooses between them when they run.
# Needs CMake, Ninja, nvcc, pybind11 and jaxlib. Afterwards run from the checkout's folder with PYTHONPATH=.
set -euo pipefail
cd "${1:-$(dirname "$0")/../..}"
python=$(command -v python3)
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1)
case $capability in
  9.0) architectures=90a-real ;;
  *) architectures=${capability/./}-real ;;
esac
cmake -S xla_ffi -B build/gpu -G Ninja -DCMAKE_BUILD_TYPE=Release -DJAXUNET_CUDA=ON \
  -DCMAKE_CUDA_ARCHITECTURES="$architectures" -DPython_EXECUTABLE="$python" \
  -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" >build_gpu.log
ninja -C build/gpu >>build_gpu.log
mv build_gpu.log build/gpu/build.log
cp build/gpu/_cpu*.so build/gpu/_cuda*.so xla_ffi/
# Python finds the kernel backends by entry points. An installation would write them; here this script does.
mkdir -p jaxunet.egg-info
printf 'Metadata-Version: 2.1\nName: jaxunet\nVersion: 0\n' >jaxunet.egg-info/PKG-INFO
"$python" - <<'PYTHON'
import pathlib, tomllib

project = tomllib.loads(pathlib.Path('pyproject.toml').read_text())['project']
lines = []
for group, points in project.get('entry-points', {}).items():
    lines += [f'[{group}]', *(f'{name} = {value}' for name, value in points.items())]
pathlib.Path('jaxunet.egg-info/entry_points.txt').write_text('\n'.join(lines) + '\n')
PYTHON
echo "built $(pwd) for $architectures"
