// bf16 products where the processor has them (vdpbf16ps): pairs of K, two forms, one order of additions.
//
// nt: "columns" (a few rows) turns tiles of w in registers until 16 columns are the lanes, and broadcasts x. "lanes"
// (more rows) packs 64 rows of x at a time, makes them the lanes and broadcasts w as it streams by. Both add the pairs
// of K in the same order, so a row's result depends on neither the form nor the number of rows. Codes (codes.h) are
// bf16 values in half the memory, turned already: "columns" widens them as they stream by, "lanes" widens 16 rows of w
// into a scratch for many rows of x.
// nn: panels of 64 columns of w, packed.
#pragma once
#include "gemm.h"

namespace {

using Pack16 = __m512bh;
inline Pack16 load_pack(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
inline vec multiply_add(vec acc, Pack16 a, Pack16 b) { return (vec)_mm512_dpbf16_ps((__m512)acc, a, b); }

// r[i][j] -> r[j][i], 16 x 16 of 32 bits.
inline void transpose16(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

inline vec load_some(const float* p, __mmask16 m) { return (vec)_mm512_maskz_loadu_ps(m, p); }
inline vec load_some(const bf16* p, __mmask16 m) {
  return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, p)), 16);
}
inline void store_some(float* p, __mmask16 m, vec v) { _mm512_mask_storeu_ps(p, m, (__m512)v); }
inline void store_some(bf16* p, __mmask16 m, vec v) {
  _mm256_mask_storeu_epi16(p, m, (__m256i)_mm512_cvtneps_pbh((__m512)v));
}

// The first n of 16 lanes.
inline __mmask16 first_lanes(long n) { return n >= 16 ? 0xffff : (1u << n) - 1; }

// From sums of columns [n, n + some) to y: times scale (1 for a plain w), plus bias, rounded to fp32 once.
template <class Y> struct Finish {
  __mmask16 mask;
  vec scale, offset;
  bool add;
  Finish(const Product<bf16, Y>& p, long n, long some)
      : mask(first_lanes(some)), scale(p.w.scale ? load_some(p.w.scale + n, mask) : vec{} + 1.0f),
        offset(p.bias ? load_some(p.bias + n, mask) : vec{}), add(p.add) {}
  void store(vec sum, Y* to) const {
    vec value = (vec)_mm512_fmadd_ps((__m512)sum, (__m512)scale, (__m512)offset);
    if (add) value = value + load_some(to, mask);
    store_some(to, mask, value);
  }
};

// Up to 16 rows from m on, as pairs: out[p][lane][2], one vector every `stride` elements; zeros where there is no row.
inline void pack_pairs(const RowsOf<bf16>& x, long m, long rows, long K, bf16* out, long stride) {
  const bf16* from[16];
  for (long i = 0; i < rows; i++) from[i] = x[m + i];
  for (long k = 0; k < K; k += 32) {
    const __mmask32 inside = K - k >= 32 ? ~0u : (1u << (K - k)) - 1;
    __m512i r[16];
    for (long i = 0; i < 16; i++)
      r[i] = i < rows ? _mm512_maskz_loadu_epi16(inside, from[i] + k) : _mm512_setzero_si512();
    transpose16(r);
    for (long p = 0; p < std::min(16L, (K - k + 1) / 2); p++) _mm512_storeu_si512(out + (k / 2 + p) * stride, r[p]);
  }
}

// ---- columns form: a few rows. 16 columns of w become lanes in registers, the pairs of x are broadcast

// At most M rows of x, pair by pair; where there are fewer, the last is computed again.
template <int M> struct Few {
  const bf16* row[M];
  explicit Few(const RowsOf<bf16>& x, long rows, long) {
    for (long m = 0; m < M; m++) row[m] = x[std::min(m, rows - 1)];
  }
  Pack16 pair(int m, long k) const {
    int pair;
    memcpy(&pair, row[m] + k, 4);
    return (Pack16)_mm512_set1_epi32(pair);
  }
};
// More rows than there are registers for pointers: side by side.
template <> struct Few<16> {
  const bf16* packed;
  explicit Few(const RowsOf<bf16>& x, long rows, long K) {
    static thread_local std::vector<bf16> memory;
    if (long(memory.size()) < (K + 32) * 16) memory.resize((K + 32) * 16);
    pack_pairs(x, 0, rows, K, memory.data(), 32);
    packed = memory.data();
  }
  Pack16 pair(int m, long k) const {
    int pair;
    memcpy(&pair, packed + k * 16 + 2 * m, 4);
    return (Pack16)_mm512_set1_epi32(pair);
  }
};

// 16 columns of w (the last of them clamped to `columns`) for rows x[0 .. M).
template <int M, int>
inline void columns_tile(const Few<M>& x, const bf16* w, long K, long columns, vec* sums) {
  vec acc[M] = {};
  for (long k = 0; k < K; k += 32) {
    const __mmask32 inside = K - k >= 32 ? ~0u : (1u << (K - k)) - 1;
    __m512i r[16];
    for (long i = 0; i < 16; i++) {
      const bf16* from = w + std::min(i, columns - 1) * K + k;
      r[i] = _mm512_maskz_loadu_epi16(inside, from);
      __builtin_prefetch(from + 16 * K);
    }
    transpose16(r);
    const long pairs = std::min(16L, (K - k) / 2);
#pragma GCC unroll 16
    for (long p = 0; p < 16; p++) {
      if (p >= pairs) break;
      for (int m = 0; m < M; m++) acc[m] = multiply_add(acc[m], x.pair(m, k + 2 * p), (Pack16)r[p]);
    }
  }
  for (int m = 0; m < M; m++) sums[m] = acc[m];
}

// V times 16 columns of codes, whole tiles: sums[v * M + m]. The sums of 16 columns are one chain of additions, each
// waiting for the one before: V M of them keep the processor busy.
template <int M, int V, class C>
inline void columns_tile(const Few<M>& x, const C* w, long K, long, vec* sums) {
  const Widen<C> widen;
  const long tile = tile_of_codes(K);
  vec acc[V][M] = {};
  auto add = [&](long k, const Pack16* values) {
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      const Pack16 both = x.pair(m, k);
      for (int v = 0; v < V; v++) acc[v][m] = multiply_add(acc[v][m], both, values[v]);
    }
  };
  for (long k = 0; k < K; k += 4, w += 64) {
    Pack16 first[V], second[V];
    for (int v = 0; v < V; v++) {
      widen(w + v * tile, first[v], second[v]);
      __builtin_prefetch(w + v * tile + tile * V);
    }
    add(k, first);
    if (k + 2 < K) add(k + 2, second);
  }
  for (int v = 0; v < V; v++)
    for (int m = 0; m < M; m++) sums[v * M + m] = acc[v][m];
}

template <int M, class W, class Y> void columns(const Product<bf16, Y>& p, long first, long last) {
  constexpr int V = sizeof(W) == 1 ? std::min(4, 16 / M) : 1;
  const Few<M> x(p.x, p.M, p.K);
  vec sums[V * M];
  for (long n = first, some; n < last; n += some) {
    some = last - n >= 16 * V ? 16 * V : std::min(16L, last - n);
    const W* w = rows_at((const W*)p.w.data, n, p.K);
    if (some == 16 * V) columns_tile<M, V>(x, w, p.K, some, sums);
    else columns_tile<M, 1>(x, w, p.K, some, sums);
    for (long v = 0; v * 16 < some; v++) {
      const Finish<Y> finish(p, n + v * 16, some - v * 16);
      for (long m = 0; m < p.M; m++) finish.store(sums[v * M + m], p.y + m * p.ldy + n + v * 16);
    }
  }
}

// ---- lanes form: x is packed once, its rows are the lanes, and weights are broadcast as they stream by

// Pair p of row r is w[r * row + p * step]. The next tile, `next`, is NR * 64 / HALF bytes for every 16 pairs of this.
template <int MV, int NR, int HALF = 1>
inline void lanes_tile(const bf16* w, long row, long step, const bf16* packed, long pairs, const char* next,
                       vec* out) {
  vec acc[NR][MV] = {};
  for (long block = 0; block < pairs; block += 16) {
    for (int r = 0; r < NR; r += HALF, next += 64) __builtin_prefetch(next);
    for (long p = block; p < std::min(pairs, block + 16); p++) {
      Pack16 b[MV];
      for (int v = 0; v < MV; v++) b[v] = load_pack(packed + (p * MV + v) * 32);
      for (int r = 0; r < NR; r++) {
        int pair;
        memcpy(&pair, w + r * row + p * step, 4);
        const Pack16 a = (Pack16)_mm512_set1_epi32(pair);
        for (int v = 0; v < MV; v++) acc[r][v] = multiply_add(acc[r][v], b[v], a);
      }
    }
  }
  for (int r = 0; r < NR; r++)
    for (int v = 0; v < MV; v++) out[r * MV + v] = acc[r][v];
}

// Sums of 16 columns, rows in lanes -> y of rows [m, m + rows).
template <class Y>
inline void store_lanes(const Product<bf16, Y>& p, const vec* sums, long MV, long m, long rows, long n, long some) {
  const Finish<Y> finish(p, n, some);
  __m512i r[16];
  for (long i = 0; i < 16; i++) r[i] = i < some ? (__m512i)sums[i * MV] : _mm512_setzero_si512();
  transpose16(r);
  for (long i = 0; i < rows; i++) finish.store((vec)r[i], p.y + (m + i) * p.ldy + n);
}

// MV vectors of packed rows times `columns` columns of w from n on: sums[column * MV + v].
template <int MV, class Y>
inline void lanes_columns(const Product<bf16, Y>& p, const bf16*, const bf16* packed, long n, long columns,
                          vec* sums) {
  // 24 accumulators, but with one vector 24 rows of w and the next 24 would not fit the first cache.
  constexpr int NR = MV == 1 ? 12 : 24 / MV;
  const long K = p.K, end = n + columns;
  const bf16* w = (const bf16*)p.w.data + n * K;
  auto tile = [&](auto rows) {
    constexpr int R = decltype(rows)::value;
    lanes_tile<MV, R>(w, K, 2, packed, K / 2, (const char*)(w + R * K), sums);
    n += R, w += R * K, sums += R * MV;
  };
  while (n + NR <= end) tile(std::integral_constant<int, NR>());
  while (n + 4 <= end) tile(std::integral_constant<int, 4>());
  while (n < end) tile(std::integral_constant<int, 1>());
}

// The same of codes, which are widened 16 columns at a time.
template <int MV, class Y, class C>
inline void lanes_columns(const Product<bf16, Y>& p, const C*, const bf16* packed, long n, long columns,
                          vec* sums) {
  constexpr int NR = MV == 1 ? 16 : MV == 4 ? 4 : 8;
  const long pairs = p.K / 2;
  for (long c = 0; c < columns; c += 16) {
    const C* tile = rows_at((const C*)p.w.data, n + c, p.K);
    const bf16* w = widen_tile(tile, p.K, scratch<bf16, WIDENED>(UNIT * (p.K + 3)));
    for (int r = 0; r < 16; r += NR, sums += NR * MV) {
      const char* next = (const char*)(tile + tile_of_codes(p.K) * (16 + r) / 16);
      lanes_tile<MV, NR, 2>(w + 2 * r, 2, 32, packed, pairs, next, sums);
    }
  }
}

// MV vectors of rows from m on.
template <int MV, class W, class Y> void lanes_rows(const Product<bf16, Y>& p, long m, long first, long last) {
  constexpr long GROUP = 48;
  const long pairs = p.K / 2, M = std::min(16L * MV, p.M - m);
  static thread_local std::vector<bf16> packed;
  if (long(packed.size()) < (pairs + 16) * MV * 32) packed.resize((pairs + 16) * MV * 32);
  for (long v = 0; v < MV; v++)
    pack_pairs(p.x, m + v * 16, std::min(16L, M - v * 16), p.K, packed.data() + v * 32, MV * 32);
  vec sums[GROUP * MV];
  for (long n = first; n < last; n += GROUP) {
    const long columns = std::min(GROUP, last - n);
    lanes_columns<MV>(p, (const W*)nullptr, packed.data(), n, columns, sums);
    for (long c = 0; c < columns; c += 16)
      for (long v = 0; v < MV; v++)
        store_lanes(p, sums + c * MV + v, MV, m + v * 16, std::min(16L, M - v * 16), n + c,
                    std::min(16L, columns - c));
  }
}

// Every output is the sum of its pairs in order, in both forms.
template <class W, class Y> void pairs(const Product<bf16, Y>& p, long first, long last) {
  if (p.M == 1) return columns<1, W>(p, first, last);
  if (p.M <= 4) return columns<4, W>(p, first, last);
  if (p.M <= 8) return columns<8, W>(p, first, last);
  if constexpr (sizeof(W) == 1)  // to widen a scratch costs more
    if (p.M <= 16) return columns<16, W>(p, first, last);
  long m = 0;
  for (; p.M - m > 48; m += 64) lanes_rows<4, W>(p, m, first, last);
  if (p.M - m > 32) return lanes_rows<3, W>(p, m, first, last);
  if (p.M - m > 16) return lanes_rows<2, W>(p, m, first, last);
  if (p.M - m > 0) lanes_rows<1, W>(p, m, first, last);
}

// ---- nn: panels hold pairs along the summed dimension, [pairs][PANEL][2]

constexpr long PANEL = 64;   // output columns of one panel: four vectors
constexpr long MROWS = 6;    // 6 x 4 accumulators of 32 registers

template <int MR>
inline void panel_tile(const bf16* x, long ldx, const bf16* panel, long pairs, vec acc[MR][4]) {
  for (long p = 0; p < pairs; p++) {
    const bf16* b = panel + p * PANEL * 2;
    Pack16 b0 = load_pack(b), b1 = load_pack(b + 32), b2 = load_pack(b + 64), b3 = load_pack(b + 96);
    for (int m = 0; m < MR; m++) {
      int pair;
      memcpy(&pair, x + m * ldx + 2 * p, 4);
      Pack16 a = (Pack16)_mm512_set1_epi32(pair);
      acc[m][0] = multiply_add(acc[m][0], a, b0);
      acc[m][1] = multiply_add(acc[m][1], a, b1);
      acc[m][2] = multiply_add(acc[m][2], a, b2);
      acc[m][3] = multiply_add(acc[m][3], a, b3);
    }
  }
}

// Pack columns [k, k + cols) of w over rows [n, n + depth): rows interleaved in pairs.
inline void pack_nn(const bf16* w, long K, long k, long cols, long n, long depth, bf16* out) {
  const __m512i low = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), high = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
  for (long d = 0; d < depth; d += 2) {
    bf16* to = out + d / 2 * PANEL * 2;
    const bf16 *even = w + (n + d) * K + k, *odd = even + K;
    if (cols == PANEL && d + 2 <= depth) {
      for (int h = 0; h < 2; h++) {
        __m512i a = _mm512_loadu_si512(even + 32 * h), b = _mm512_loadu_si512(odd + 32 * h);
        __m512i lo = _mm512_unpacklo_epi16(a, b), hi = _mm512_unpackhi_epi16(a, b);
        _mm512_storeu_si512(to + 64 * h, _mm512_permutex2var_epi64(lo, low, hi));
        _mm512_storeu_si512(to + 64 * h + 32, _mm512_permutex2var_epi64(lo, high, hi));
      }
    } else {
      for (long c = 0; c < PANEL; c++) {
        to[2 * c] = c < cols ? even[c] : bf16{0};
        to[2 * c + 1] = c < cols && d + 1 < depth ? odd[c] : bf16{0};
      }
    }
  }
}


template <int MR>
inline void panel_rows(const bf16* x, long ldx, const bf16* panel, long pairs, bf16* y, long ldy, long cols,
                       float* sums, bool first, bool final) {
  vec acc[MR][4];
  for (int m = 0; m < MR; m++)
    for (int j = 0; j < 4; j++) acc[m][j] = first ? vec{} : load(sums + m * PANEL + j * 16);
  panel_tile<MR>(x, ldx, panel, pairs, acc);
  for (int m = 0; m < MR; m++)
    for (int j = 0; j < 4; j++) {
      if (!final) store(sums + m * PANEL + j * 16, acc[m][j]);
      else if (cols > j * 16) store_some(y + m * ldy + j * 16, first_lanes(cols - j * 16), acc[m][j]);
    }
}

// The calling thread's panels of y[M, K] = x[M, N] w[N, K].
void nn_share(const bf16* x, long ldx, const bf16* w, bf16* y, long ldy, long M, long N, long K) {
  constexpr long DEPTH = 768;
  static thread_local std::vector<bf16> panel(DEPTH * PANEL);
  static thread_local std::vector<float> sums;
  if (N > DEPTH) sums.resize(M * PANEL);
  long first, last;
  share((K + PANEL - 1) / PANEL, first, last);
  for (long k = first * PANEL; k < std::min(last * PANEL, K); k += PANEL)
    for (long n = 0; n < N; n += DEPTH) {
      const long cols = std::min(PANEL, K - k), depth = std::min(DEPTH, N - n), pairs = (depth + 1) / 2;
      pack_nn(w, K, k, cols, n, depth, panel.data());
      for (long m = 0; m < M; m += MROWS) {
        const bf16* xs = x + m * ldx + n;
        bf16* ys = y + m * ldy + k;
        float* sm = sums.data() + m * PANEL;
        const bool start = n == 0, final = n + depth == N;
        switch (std::min(MROWS, M - m)) {
          case 6: panel_rows<6>(xs, ldx, panel.data(), pairs, ys, ldy, cols, sm, start, final); break;
          case 5: panel_rows<5>(xs, ldx, panel.data(), pairs, ys, ldy, cols, sm, start, final); break;
          case 4: panel_rows<4>(xs, ldx, panel.data(), pairs, ys, ldy, cols, sm, start, final); break;
          case 3: panel_rows<3>(xs, ldx, panel.data(), pairs, ys, ldy, cols, sm, start, final); break;
          case 2: panel_rows<2>(xs, ldx, panel.data(), pairs, ys, ldy, cols, sm, start, final); break;
          default: panel_rows<1>(xs, ldx, panel.data(), pairs, ys, ldy, cols, sm, start, final);
        }
      }
    }
}

}  // namespace
