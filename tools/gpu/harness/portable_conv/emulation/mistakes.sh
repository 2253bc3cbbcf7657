#!/bin/sh
# Tests the emulation: puts one mistake at a time into a copy of the multistage kernels, and runs
# run.sh, which must fail.
#   tools/gpu/harness/portable_conv/emulation/mistakes.sh [FOLDER]     FOLDER: for the programs
# Prints a line per mistake. NOT APPLIED: the kernel no longer has the text that is replaced. The
# exit status is the number of mistakes that were not noticed, did not apply or did not compile.
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-$(mktemp -d)}
sources=$(cd "$here/../../../../../xla_ffi" && pwd)
mkdir -p "$folder/built"
missed=0

mistake() { # end of the file name, after multistage_; what is wrong; sed expression
  rm -rf "$folder/kernels"
  mkdir -p "$folder/kernels/conv3x3/portable"
  cp "$sources"/conv3x3/portable/multistage* "$folder/kernels/conv3x3/portable/"
  file=conv3x3/portable/multistage_$1
  sed -i "$3" "$folder/kernels/$file"
  if cmp -s "$folder/kernels/$file" "$sources/$file"; then
    echo "NOT APPLIED: $2"
    missed=$((missed + 1))
  elif timeout 300 "$here/run.sh" "$folder/built" "$folder/kernels" quick >"$folder/log" 2>&1; then
    echo "MISSED: $2"
    missed=$((missed + 1))
  elif grep -q ': error:' "$folder/log"; then
    echo "DOES NOT COMPILE: $2"
    missed=$((missed + 1))
  else
    echo "noticed: $2 ($(grep -E -m 1 'BAD|EMULATION' "$folder/log" | cut -c 1-70))"
  fi
}

mistake tile.cuh 'waits for too few copies' \
  's/cp_async_wait<M::kStages - 2>/cp_async_wait<M::kStages - 1>/'
mistake tile.cuh 'no barrier between stages' \
  '/if (step == M::kSteps - 1) {/,/}/ s/__syncthreads();//'
mistake tile.cuh 'leaves out the last stage' \
  's/(step == 0) fill(stage + M::kStages - 1/(step == 0) fill(stage + M::kStages/'
mistake tile.cuh 'no swizzle' \
  's/row \/ 2 % 4 : row % 8/0 : 0/'
mistake tile.cuh 'no swizzle between passes' \
  's/(offset ^ 16 \* Layout::swizzle(pass \* kRows))/offset/'
mistake tile.cuh 'matrices of a fragment exchanged' \
  's/kLeft ? low : high/kLeft ? high : low/'
mistake tile.cuh 'multiplies the wrong fragments' \
  's/a\[step % 2\], b\[step % 2\]/a[(step + 1) % 2], b[step % 2]/'
mistake tile.cuh 'slices multiply the same steps' \
  's/warp.slice \* M::kSteps \* 16/0/'
mistake tile.cuh 'slices are added before they are written' \
  '/bool add_slices/,/^}/ s/^  __syncthreads();$//'
mistake tile.cuh 'rows of the partial results' \
  '/void each_row/,/^}/ s/8 \* n + lane \/ 4/8 * n + lane % 4/'
mistake tile.cuh 'rows of the outputs' \
  '/void write(/,/^  }/ s/8 \* n + lane/8 * (1 - n) + lane/'
mistake tile.cuh 'writes outputs to the ring while warps read it' \
  's/if constexpr (M::kSlices == 1) __syncthreads();//'
mistake tile.cuh 'reads a piece before it is written' \
  's/__syncwarp();//'
mistake tile.cuh 'writes a piece before the one before is read' \
  's/i % 2 \* kPieceBytes/0/'
mistake tile.cuh 'warps share a piece' \
  's/% M::kWarps \* 2 \* kPieceBytes/% M::kWarps * kPieceBytes/'
mistake tile.cuh 'writes a piece over the sums of slices' \
  's/kFirstByte = .*;/kFirstByte = 0;/'
mistake tile.cuh 'no padding of the rows of a piece' \
  's/4 \* (M::kWarpN + 8)/4 * M::kWarpN/'
mistake tile.cuh 'halves of a vector exchanged' \
  's/16 \* (lane \/ 4 % 2)/16 * (lane \/ 4 % 2 ^ 1)/'
mistake forward.cu 'reads the previous line at the left edge' \
  's/if (x > 0) left/if (x >= 0) left/'
mistake forward.cu 'reads the next image at the bottom edge' \
  's/y + 1 < static/y < static/'
mistake forward.cu 'reads past the last pixel' \
  's/if (pixel >= p.pixels) return;//'
mistake forward.cu 'reads past the channels of a part' \
  's/channel + 8 \* copy_a.vector < width ? rows : 0/rows/'
mistake forward.cu 'reads weights past a part' \
  's/features > 0 ? channels : 0/features > 0 ? 999 : 0/'
mistake forward.cu 'taps of a flipped kernel in order' \
  's/plan.flipped ? -1 : 1/plan.flipped ? 1 : 1/'
mistake forward.cu 'the shift of the wrong sample' \
  's/(sample + 1) \* static/(sample + 2) * static/'
mistake forward.cu 'the residual of the first part' \
  '/void load_residual/,/^}/ s/, feature)/, feature % residual.widths[0])/'
mistake forward.cu 'rows of a part of the residual' \
  's/residual.at<T>(pixel + 1, feature) - from/residual.total/'
mistake forward.cu 'the residual of the previous row' \
  's/wide(residual\[n\]/wide(residual[n > 0 ? n - 1 : 0]/'
mistake forward.cu 'writes past the last pixel' \
  's/? p.pixels - pixel : 0/? p.pixels - pixel + 1 : 0/'
mistake forward.cu 'writes past the columns of a warp' \
  's/vectors.active && //'
mistake forward.cu 'writes past the features' \
  's/vectors.active && feature < p.features/vectors.active/'
mistake forward.cu 'reads past the features' \
  's/channels > 0 ? features : 0/channels > 0 ? 999 : 0/'
mistake forward.cu 'the next row of taps' \
  's/static_cast<int>(p.width.divisor) - 2 : 1/static_cast<int>(p.width.divisor) - 1 : 1/'
mistake forward.cu 'counts the taps of a part without channels' \
  '/parts.channels\[i\] == 0/d'
mistake weight_gradient.cu 'does not count from the next image on' \
  's/if (y >= high) y -= high;//'
mistake weight_gradient.cu 'reads x past the split' \
  's/copy_a.row + i \* CopyA::kRows < left/true/'
mistake weight_gradient.cu 'does not count the pixels left' \
  's/left -= M::kDepth;//'
mistake weight_gradient.cu 'the place of the shortcut' \
  's/split \* projected + m - taps/split * projected + m/'
mistake weight_gradient.cu 'lines are not counted modulo the height' \
  's/kRows \/ plan.width % plan.height/kRows \/ plan.width/'
mistake weight_gradient.cu 'no padding at the sides' \
  's/static_cast<uint32_t>(x + dx) < p.width.divisor/true/'
[ $missed = 0 ] && echo "all mistakes were noticed" || echo "$missed mistakes were not noticed"
exit $missed
