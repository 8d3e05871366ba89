// Matrix products for skinny activations x [M, K] and row-major weights w [N, K].
//
// nt: y[M, N] = x w^T, in three forms. "dot" packs nothing: 16 lanes run along K and are summed at the end.
// "columns" (bf16, a few rows) turns tiles of w in registers until 16 columns are the lanes, and broadcasts x.
// "lanes" (bf16, more rows) packs 64 rows of x at a time, makes them the lanes and broadcasts w as it streams by. The
// last two add the pairs of K in the same order, so a row's result depends on neither the form nor the number of rows.
// nn: y[M, K] = x[M, N] w[N, K], the gradient of nt with respect to x: panels of 64 columns of w, packed.
//
// bf16 accumulates in fp32 (vdpbf16ps where the machine has it, widened multiply-add elsewhere).
// Codes (codes.h) are bf16 values in half the memory, turned already: "columns" widens them as they stream by, the
// others widen 16 rows of w into a scratch for many rows of x. The same values in the same order give the same sums.
// Plain vectors of the compiler: the same source serves AVX-512, AVX2 and NEON.

#include "gemm.h"

namespace {

constexpr long TILE = 4;
constexpr int FETCH = 8;  // rows of w fetched ahead

// acc += sum over 32 (bf16) or 16 (fp32) lanes of a * b, lane by lane.
#if defined(__AVX512BF16__)
using Pack16 = __m512bh;
inline Pack16 load_pack(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
inline v16f multiply_add(v16f acc, Pack16 a, Pack16 b) { return (v16f)_mm512_dpbf16_ps((__m512)acc, a, b); }
#else
struct Pack16 { v16f even, odd; };
inline Pack16 load_pack(const bf16* p) {
  v16u raw; memcpy(&raw, p, 64);
  return {(v16f)(raw << 16), (v16f)(raw & 0xffff0000u)};
}
inline v16f multiply_add(v16f acc, Pack16 a, Pack16 b) { return acc + a.even * b.even + a.odd * b.odd; }
#endif
inline v16f load_pack(const float* p) { return load16(p); }
inline v16f multiply_add(v16f acc, v16f a, v16f b) { return acc + a * b; }

template <class T> constexpr long lanes() { return 64 / sizeof(T); }

// The last, short step along K: zero-filled copy.
template <class T> inline auto load_tail(const T* p, long n) {
  T buffer[lanes<T>()] = {};
  memcpy(buffer, p, n * sizeof(T));
  return load_pack(buffer);
}

// Sum each of 16 vectors over its lanes: result lane i = sum(v[i]).
inline v16f sum_lanes_16(v16f* v) {
#if defined(__AVX512F__)
  __m512* a = (__m512*)v;
  __m512 t[8];
  for (int i = 0; i < 8; i++)
    t[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
  __m512 u[4];
  for (int i = 0; i < 4; i++) {
    __m512d x = _mm512_castps_pd(t[2 * i]), y = _mm512_castps_pd(t[2 * i + 1]);
    u[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  // u[i]: in each 128-bit block, partial sums of vectors 4i .. 4i+3.
  __m512 p = _mm512_add_ps(_mm512_shuffle_f32x4(u[0], u[1], 0x88), _mm512_shuffle_f32x4(u[0], u[1], 0xdd));
  __m512 q = _mm512_add_ps(_mm512_shuffle_f32x4(u[2], u[3], 0x88), _mm512_shuffle_f32x4(u[2], u[3], 0xdd));
  return (v16f)_mm512_add_ps(_mm512_shuffle_f32x4(p, q, 0x88), _mm512_shuffle_f32x4(p, q, 0xdd));
#else
  v16f out;
  for (int i = 0; i < 16; i++) {
    float s[8];
    for (int j = 0; j < 8; j++) s[j] = v[i][j] + v[i][j + 8];
    out[i] = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
  }
  return out;
#endif
}

// One tile of up to 4 rows of x and 4 rows of w.
template <class T, class Y, int MR, int NR, int AHEAD>
inline void dot_tile(const T* const* x, const T* w, const float* scale, long K, Y* y, long ldy, const T* bias,
                     bool add) {
  v16f acc[16];
  for (int i = 0; i < 16; i++) acc[i] = v16f{};
  const long step = lanes<T>(), full = K / step * step;
  for (long k = 0; k < full; k += step) {
    decltype(load_pack(w)) b[NR];
    for (int n = 0; n < NR; n++) {
      b[n] = load_pack(w + n * K + k);
      if (AHEAD) __builtin_prefetch(w + (n + AHEAD) * K + k);
    }
    for (int m = 0; m < MR; m++) {
      auto a = load_pack(x[m] + k);
      for (int n = 0; n < NR; n++) acc[m * TILE + n] = multiply_add(acc[m * TILE + n], a, b[n]);
    }
  }
  if (full < K)
    for (int m = 0; m < MR; m++)
      for (int n = 0; n < NR; n++)
        acc[m * TILE + n] = multiply_add(acc[m * TILE + n], load_tail(x[m] + full, K - full),
                                         load_tail(w + n * K + full, K - full));
  v16f sums = sum_lanes_16(acc);
  for (int m = 0; m < MR; m++)
    for (int n = 0; n < NR; n++)
      store1(y + m * ldy + n, std::fma(sums[m * TILE + n], scale ? scale[n] : 1.0f, bias ? to_float(bias[n]) : 0.0f) +
                                  (add ? to_float(y[m * ldy + n]) : 0.0f));
}

template <class T, class Y, int AHEAD>
inline void dot_block(const Product<T, Y>& p, const T* w, long m, long mr, long n, long nr) {
  const T *xs[TILE], *bias = p.bias ? p.bias + n : nullptr;
  const float* scale = p.w.scale ? p.w.scale + n : nullptr;
  for (long i = 0; i < mr; i++) xs[i] = p.x[m + i];
  Y* y = p.y + m * p.ldy + n;
#define CASE(M_, N_) \
  if (mr == M_ && nr == N_) return dot_tile<T, Y, M_, N_, AHEAD>(xs, w, scale, p.K, y, p.ldy, bias, p.add);
  CASE(4, 4) CASE(1, 4) CASE(2, 4) CASE(3, 4)
  CASE(1, 1) CASE(1, 2) CASE(1, 3) CASE(2, 1) CASE(2, 2) CASE(2, 3)
  CASE(3, 1) CASE(3, 2) CASE(3, 3) CASE(4, 1) CASE(4, 2) CASE(4, 3)
#undef CASE
}

// Memory of the calling thread, until it asks again.
template <class T> inline T* scratch(long count) {
  static thread_local std::vector<T> memory;
  if (long(memory.size()) < count) memory.resize(count);
  return memory.data();
}

// The 16 rows of w from n on: where they lie, or widened into a scratch.
template <class W, class T, class Y> inline const T* plain_rows(const Product<T, Y>& p, long n) {
  if constexpr (std::is_same<W, T>::value) return (const T*)p.w.data + n * p.K;
  else return widen_rows((const W*)p.w.data, n, p.K, scratch<T>(UNIT * p.K));
}

template <class W, class T, class Y> void dot(const Product<T, Y>& p, long first, long last) {
  constexpr long ROWS = 64;  // rows of x held in L2 while a block of w passes by
  for (long m0 = 0; m0 < p.M; m0 += ROWS)
    for (long n0 = first; n0 < last; n0 += UNIT) {
      const T* w = plain_rows<W>(p, n0);
      for (long n = n0; n < std::min(n0 + UNIT, last); n += TILE, w += TILE * p.K) {
        const long nr = std::min(TILE, last - n), m1 = std::min(m0 + ROWS, p.M);
        // The first tile of rows fetches the columns that come next: memory and arithmetic overlap.
        dot_block<T, Y, FETCH>(p, w, m0, std::min(TILE, m1 - m0), n, nr);
        for (long m = m0 + TILE; m < m1; m += TILE) dot_block<T, Y, 0>(p, w, m, std::min(TILE, m1 - m), n, nr);
      }
    }
}

#if defined(__AVX512BF16__)
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

inline v16f load_some(const float* p, __mmask16 m) { return (v16f)_mm512_maskz_loadu_ps(m, p); }
inline v16f load_some(const bf16* p, __mmask16 m) {
  return (v16f)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, p)), 16);
}
inline void store_some(float* p, __mmask16 m, v16f v) { _mm512_mask_storeu_ps(p, m, (__m512)v); }
inline void store_some(bf16* p, __mmask16 m, v16f v) {
  _mm256_mask_storeu_epi16(p, m, (__m256i)_mm512_cvtneps_pbh((__m512)v));
}

// The first n of 16 lanes.
inline __mmask16 first_lanes(long n) { return n >= 16 ? 0xffff : (1u << n) - 1; }

// From sums of columns [n, n + some) to y: times scale (1 for a plain w), plus bias, rounded to fp32 once.
template <class Y> struct Finish {
  __mmask16 mask;
  v16f scale, offset;
  bool add;
  Finish(const Product<bf16, Y>& p, long n, long some)
      : mask(first_lanes(some)), scale(p.w.scale ? load_some(p.w.scale + n, mask) : v16f{} + 1.0f),
        offset(p.bias ? load_some(p.bias + n, mask) : v16f{}), add(p.add) {}
  void store(v16f sum, Y* to) const {
    v16f value = (v16f)_mm512_fmadd_ps((__m512)sum, (__m512)scale, (__m512)offset);
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
inline void columns_tile(const Few<M>& x, const bf16* w, long K, long columns, v16f* sums) {
  v16f acc[M] = {};
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
inline void columns_tile(const Few<M>& x, const C* w, long K, long, v16f* sums) {
  const Widen<C> widen;
  const long tile = tile_of_codes(K);
  v16f acc[V][M] = {};
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
  v16f sums[V * M];
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
                       v16f* out) {
  v16f acc[NR][MV] = {};
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
inline void store_lanes(const Product<bf16, Y>& p, const v16f* sums, long MV, long m, long rows, long n, long some) {
  const Finish<Y> finish(p, n, some);
  __m512i r[16];
  for (long i = 0; i < 16; i++) r[i] = i < some ? (__m512i)sums[i * MV] : _mm512_setzero_si512();
  transpose16(r);
  for (long i = 0; i < rows; i++) finish.store((v16f)r[i], p.y + (m + i) * p.ldy + n);
}

// MV vectors of packed rows times `columns` columns of w from n on: sums[column * MV + v].
template <int MV, class Y>
inline void lanes_columns(const Product<bf16, Y>& p, const bf16*, const bf16* packed, long n, long columns,
                          v16f* sums) {
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
                          v16f* sums) {
  constexpr int NR = MV == 1 ? 16 : MV == 4 ? 4 : 8;
  const long pairs = p.K / 2;
  for (long c = 0; c < columns; c += 16) {
    const C* tile = rows_at((const C*)p.w.data, n + c, p.K);
    const bf16* w = widen_tile(tile, p.K, scratch<bf16>(UNIT * (p.K + 3)));
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
  v16f sums[GROUP * MV];
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
inline void panel_tile(const bf16* x, long ldx, const bf16* panel, long pairs, v16f acc[MR][4]) {
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
  v16f acc[MR][4];
  for (int m = 0; m < MR; m++)
    for (int j = 0; j < 4; j++) acc[m][j] = first ? v16f{} : load16(sums + m * PANEL + j * 16);
  panel_tile<MR>(x, ldx, panel, pairs, acc);
  for (int m = 0; m < MR; m++)
    for (int j = 0; j < 4; j++) {
      if (!final) store16(sums + m * PANEL + j * 16, acc[m][j]);
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
#endif

// An odd K has a last half pair: the dot form, for any number of rows.
template <class W, class Y> void of_bf16(const Product<bf16, Y>& p, long first, long last) {
#if defined(__AVX512BF16__)
  if (p.K % 2 == 0) return pairs<W>(p, first, last);
#endif
  dot<W>(p, first, last);
}
inline void any(const Product<bf16, bf16>& p, long first, long last) {
  switch (p.w.format) {
    case INT8: return of_bf16<Int8>(p, first, last);
    case E4M3: return of_bf16<E4m3>(p, first, last);
    default: return of_bf16<bf16>(p, first, last);
  }
}
inline void any(const Product<bf16, float>& p, long first, long last) { of_bf16<bf16>(p, first, last); }
inline void any(const Product<float, float>& p, long first, long last) { dot<float>(p, first, last); }

template <class T, class Y>
void nt(const T* x, long ldx, Matrix w, Y* y, long ldy, const T* bias, long M, long N, long K, bool add = false) {
  const Product<T, Y> p{{x, ldx}, w, bias, y, ldy, M, N, K, add};
#pragma omp parallel
  multiply_share(p);
}

}  // namespace

template <class T, class Y> void multiply(const Product<T, Y>& p, long first, long last) {
  if (p.M > 0 && first < last) any(p, first, last);
}
template void multiply(const Product<float, float>&, long, long);
template void multiply(const Product<bf16, bf16>&, long, long);
template void multiply(const Product<bf16, float>&, long, long);

extern "C" {
void nt_f32(const float* x, long ldx, const float* w, float* y, long ldy, const float* bias, long M, long N, long K) {
  nt(x, ldx, w, y, ldy, bias, M, N, K);
}
void nt_bf16(const bf16* x, long ldx, const bf16* w, bf16* y, long ldy, const bf16* bias, long M, long N, long K) {
  nt(x, ldx, w, y, ldy, bias, M, N, K);
}
void nt_bf16_f32(const bf16* x, long ldx, const bf16* w, float* y, long ldy, const bf16* bias, long M, long N, long K) {
  nt(x, ldx, w, y, ldy, bias, M, N, K);
}
// A weight in codes, of a format other than PLAIN.
void nt_codes(const bf16* x, long ldx, const void* codes, const float* scale, long format, bf16* y, long ldy,
              const bf16* bias, long M, long N, long K) {
  nt(x, ldx, Matrix(codes, scale, format), y, ldy, bias, M, N, K);
}
// y += x w^T: the second product of a low-rank adapter.
void nt_add_f32(const float* x, const float* w, float* y, long ldy, long M, long N, long K) {
  nt(x, K, w, y, ldy, (const float*)nullptr, M, N, K, true);
}
void nt_add_bf16(const bf16* x, const bf16* w, bf16* y, long ldy, long M, long N, long K) {
  nt(x, K, w, y, ldy, (const bf16*)nullptr, M, N, K, true);
}
#if defined(__AVX512BF16__)
// N is even: see the caller.
void nn_bf16(const bf16* x, long ldx, const bf16* w, bf16* y, long ldy, long M, long N, long K) {
#pragma omp parallel
  nn_share(x, ldx, w, y, ldy, M, N, K);
}
#endif
}
