// y[M, K] = x[M, N] w[N, K], the gradient of nt with respect to x: panels of columns of w, widened to fp32 once.
#pragma once
#include "gemm_dot.h"

namespace {

constexpr long DEEP = 256;                     // rows of w in a panel, so that it stays in the first cache
constexpr int HIGH = REGISTERS == 32 ? 12 : 6;  // rows of x: HIGH * WIDE sums in registers

// Rows [n, n + depth) of w, columns [k, k + columns) -> panel[depth][BROAD].
template <class W> struct PlainRows {
  const W* w;
  long K;
  void widen(long n, long k, long columns, long depth, float* panel) const {
    for (long d = 0; d < depth; d++) {
      vec row[WIDE];
      read_lanes(w + (n + d) * K + k, columns, row);
      for (int v = 0; v < WIDE; v++) store(panel + d * BROAD + v * LANES, row[v]);
    }
  }
};
struct CodedRows {  // n and k: multiples of a tile's sides
  const Int8* w;
  const float* scale;
  long K;
  void widen(long n, long k, long columns, long depth, float* panel) const {
    for (long d = 0; d < depth; d += CODE_ROWS, panel += CODE_ROWS * BROAD) {
      const Int8* tile = rows_at(w, n + d, K) + k * 16;
      const long rows = std::min(CODE_ROWS, depth - d);
      float values[64];
      for (long c = 0; c < columns; c += 4, tile += 64) {
        for (int i = 0; i < 64; i++) values[i] = float(int8_t(tile[i].bits));
        for (long row = 0; row < rows; row++) {
          const float *low = values + row / 4 * 16 + row % 4 * 2, s = scale[n + d + row];
          float* to = panel + row * BROAD + c;
          to[0] = s * low[0], to[1] = s * low[1], to[2] = s * low[8], to[3] = s * low[9];
        }
      }
    }
  }
};

// Sums go on where the panel before left them, and into y after the last.
template <int M, class T>
void sum_panel(const T* x, long ldx, const float* panel, long depth, float* kept, bool first, bool final, T* y,
                long ldy, long columns) {
  vec sums[M][WIDE];
  for (int m = 0; m < M; m++)
    for (int v = 0; v < WIDE; v++) sums[m][v] = first ? vec{} : load(kept + m * BROAD + v * LANES);
  for (long d = 0; d < depth; d++) {
    vec b[WIDE];
    for (int v = 0; v < WIDE; v++) b[v] = load(panel + d * BROAD + v * LANES);
    for (int m = 0; m < M; m++) {
      const float a = to_float(x[m * ldx + d]);
      for (int v = 0; v < WIDE; v++) sums[m][v] += a * b[v];
    }
  }
  for (int m = 0; m < M; m++) {
    if (final) write_lanes(y + m * ldy, columns, sums[m]);
    else
      for (int v = 0; v < WIDE; v++) store(kept + m * BROAD + v * LANES, sums[m][v]);
  }
}

// The calling thread's columns.
template <class T, class Rows>
void panels_share(const T* x, long ldx, const Rows& w, T* y, long ldy, long M, long N, long K) {
  long first, last;
  share((K + BROAD - 1) / BROAD, first, last);
  float *panel = scratch<float, PANEL_OF_W>(std::max(SHORT, DEEP) * BROAD), *kept = scratch<float, KEPT>(M * BROAD);
  for (long k = first * BROAD; k < std::min(last * BROAD, K); k += BROAD)
    for (long n = 0; n < N; n += DEEP) {
      const long columns = std::min(BROAD, K - k), depth = std::min(DEEP, N - n);
      const bool start = n == 0, final = n + depth == N;
      w.widen(n, k, columns, depth, panel);
      long m = 0;
      for (; m + HIGH <= M; m += HIGH)
        sum_panel<HIGH>(x + m * ldx + n, ldx, panel, depth, kept + m * BROAD, start, final, y + m * ldy + k, ldy, columns);
      for (; m < M; m++)
        sum_panel<1>(x + m * ldx + n, ldx, panel, depth, kept + m * BROAD, start, final, y + m * ldy + k, ldy, columns);
    }
}

}  // namespace
