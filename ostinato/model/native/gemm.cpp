// Matrix products for skinny activations x [M, K] and row-major weights w [N, K].
//
// nt: y[M, N] = x w^T, in three forms. "dot" packs nothing: 16 lanes run along K and are summed at the end.
// "lanes" (bf16, up to 64 rows) packs x once, makes its rows the lanes and broadcasts w as it streams by, read
// exactly once. "panel" (bf16, more rows) packs 64 columns of w at a time and broadcasts x. The last two add the
// pairs of K in the same order, so a row's result depends on neither the form nor the number of rows.
// nn: y[M, K] = x[M, N] w[N, K], the gradient of nt with respect to x.
//
// bf16 accumulates in fp32 (vdpbf16ps where the machine has it, widened multiply-add elsewhere).
// Plain vectors of the compiler: the same source serves AVX-512, AVX2 and NEON.

#include "common.h"

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
template <class T, class Y, int MR, int NR, int AHEAD, bool ADD>
inline void dot_tile(const T* x, long ldx, const T* w, long K, Y* y, long ldy, const T* bias) {
  v16f acc[16];
  for (int i = 0; i < 16; i++) acc[i] = v16f{};
  const long step = lanes<T>(), full = K / step * step;
  for (long k = 0; k < full; k += step) {
    decltype(load_pack(x)) b[NR];
    for (int n = 0; n < NR; n++) {
      b[n] = load_pack(w + n * K + k);
      if (AHEAD) __builtin_prefetch(w + (n + AHEAD) * K + k);
    }
    for (int m = 0; m < MR; m++) {
      auto a = load_pack(x + m * ldx + k);
      for (int n = 0; n < NR; n++) acc[m * TILE + n] = multiply_add(acc[m * TILE + n], a, b[n]);
    }
  }
  if (full < K)
    for (int m = 0; m < MR; m++)
      for (int n = 0; n < NR; n++)
        acc[m * TILE + n] = multiply_add(acc[m * TILE + n], load_tail(x + m * ldx + full, K - full),
                                         load_tail(w + n * K + full, K - full));
  v16f sums = sum_lanes_16(acc);
  for (int m = 0; m < MR; m++)
    for (int n = 0; n < NR; n++)
      store1(y + m * ldy + n,
             sums[m * TILE + n] + (bias ? to_float(bias[n]) : 0.0f) + (ADD ? to_float(y[m * ldy + n]) : 0.0f));
}

template <class T, class Y, int AHEAD, bool ADD>
inline void dot_block(const T* x, long ldx, long mr, const T* w, long nr, long K, Y* y, long ldy, const T* bias) {
#define CASE(M_, N_) if (mr == M_ && nr == N_) return dot_tile<T, Y, M_, N_, AHEAD, ADD>(x, ldx, w, K, y, ldy, bias);
  CASE(4, 4) CASE(1, 4) CASE(2, 4) CASE(3, 4)
  CASE(1, 1) CASE(1, 2) CASE(1, 3) CASE(2, 1) CASE(2, 2) CASE(2, 3)
  CASE(3, 1) CASE(3, 2) CASE(3, 3) CASE(4, 1) CASE(4, 2) CASE(4, 3)
#undef CASE
}

template <class T, class Y, bool ADD = false>
void nt_dot(const T* x, long ldx, const T* w, Y* y, long ldy, const T* bias, long M, long N, long K) {
  constexpr long ROWS = 64;  // rows of x held in L2 while a block of w passes by
  const long tiles = (N + TILE - 1) / TILE;
#pragma omp parallel
  {
    long first, last;
    share(tiles, first, last);
    for (long m0 = 0; m0 < M; m0 += ROWS)
      for (long t = first; t < last; t++) {
        const long n = t * TILE, nr = std::min(TILE, N - n), m1 = std::min(m0 + ROWS, M);
        const T* b = bias ? bias + n : nullptr;
        // The first tile of rows fetches the columns that come next: memory and arithmetic overlap.
        dot_block<T, Y, FETCH, ADD>(x + m0 * ldx, ldx, std::min(TILE, m1 - m0), w + n * K, nr, K, y + m0 * ldy + n, ldy, b);
        for (long m = m0 + TILE; m < m1; m += TILE)
          dot_block<T, Y, 0, ADD>(x + m * ldx, ldx, std::min(TILE, m1 - m), w + n * K, nr, K, y + m * ldy + n, ldy, b);
      }
  }
}

#if defined(__AVX512BF16__)
// ---- panel form: b holds pairs along the summed dimension, [pairs][LANES][2] -------------------------------

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

template <int MR, bool ADD, class Y>
inline void panel_rows(const bf16* x, long ldx, const bf16* panel, long pairs, Y* y, long ldy, long cols,
                       const bf16* bias, float* sums, bool first, bool final) {
  v16f acc[MR][4];
  for (int m = 0; m < MR; m++)
    for (int j = 0; j < 4; j++) acc[m][j] = first ? v16f{} : load16(sums + m * PANEL + j * 16);
  panel_tile<MR>(x, ldx, panel, pairs, acc);
  for (int m = 0; m < MR; m++) {
    if (!final) {
      for (int j = 0; j < 4; j++) store16(sums + m * PANEL + j * 16, acc[m][j]);
    } else if (cols == PANEL && !bias) {
      for (int j = 0; j < 4; j++) {
        Y* to = y + m * ldy + j * 16;
        store16(to, ADD ? acc[m][j] + load16(to) : acc[m][j]);
      }
    } else {
      for (long c = 0; c < cols; c++)
        store1(y + m * ldy + c, acc[m][c / 16][c % 16] + (bias ? to_float(bias[c]) : 0.0f) +
                                    (ADD ? to_float(y[m * ldy + c]) : 0.0f));
    }
  }
}

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

// Columns [0, depth) of up to 16 rows, as pairs: out[p][lane][2], one vector every `stride` elements; zeros where
// there is no row or column.
inline void pack_pairs(const bf16* x, long ldx, long rows, long depth, bf16* out, long stride) {
  for (long d = 0; d < depth; d += 32) {
    const __mmask32 inside = depth - d >= 32 ? ~0u : (1u << (depth - d)) - 1;
    __m512i r[16];
    for (long i = 0; i < 16; i++) {
      r[i] = i < rows ? _mm512_maskz_loadu_epi16(inside, x + i * ldx + d) : _mm512_setzero_si512();
      __builtin_prefetch(x + (i + 16) * ldx + d);
    }
    transpose16(r);
    for (long p = 0; p < std::min(16L, (depth - d + 1) / 2); p++) _mm512_storeu_si512(out + (d / 2 + p) * stride, r[p]);
  }
}

// Pack columns [n, n + cols) of w^T over [k, k + depth): pairs along k.
inline void pack_nt(const bf16* w, long K, long n, long cols, long k, long depth, bf16* out) {
  for (long c = 0; c < PANEL; c += 16)
    pack_pairs(w + (n + c) * K + k, K, std::max(0L, std::min(16L, cols - c)), depth, out + c * 2, PANEL * 2);
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

// y[M, C] = x[M, S] B, where pack(c, cols, s, depth, out) yields panels of B.
template <bool ADD, class Y, class Pack>
void panels(const bf16* x, long ldx, Y* y, long ldy, const bf16* bias, long M, long S, long C, Pack pack) {
  constexpr long DEPTH = 768, ROWS = 192;
  const long blocks = (C + PANEL - 1) / PANEL;
#pragma omp parallel
  {
    static thread_local std::vector<bf16> panel;
    static thread_local std::vector<float> sums;
    panel.resize(DEPTH * PANEL);
    long first, last;
    share(blocks, first, last);
    for (long b = first; b < last; b++) {
      const long c = b * PANEL, cols = std::min(PANEL, C - c);
      if (S > DEPTH) sums.resize(M * PANEL);
      for (long s = 0; s < S; s += DEPTH) {
        const long depth = std::min(DEPTH, S - s), pairs = (depth + 1) / 2;
        pack(c, cols, s, depth, panel.data());
        for (long m = 0; m < M; m += MROWS) {
          const bf16* xs = x + m * ldx + s;
          Y* ys = y + m * ldy + c;
          float* sm = sums.data() + m * PANEL;
          const bf16* bs = bias ? bias + c : nullptr;
          const bool start = s == 0, final = s + depth == S;
          switch (std::min(MROWS, M - m)) {
            case 6: panel_rows<6, ADD>(xs, ldx, panel.data(), pairs, ys, ldy, cols, bs, sm, start, final); break;
            case 5: panel_rows<5, ADD>(xs, ldx, panel.data(), pairs, ys, ldy, cols, bs, sm, start, final); break;
            case 4: panel_rows<4, ADD>(xs, ldx, panel.data(), pairs, ys, ldy, cols, bs, sm, start, final); break;
            case 3: panel_rows<3, ADD>(xs, ldx, panel.data(), pairs, ys, ldy, cols, bs, sm, start, final); break;
            case 2: panel_rows<2, ADD>(xs, ldx, panel.data(), pairs, ys, ldy, cols, bs, sm, start, final); break;
            default: panel_rows<1, ADD>(xs, ldx, panel.data(), pairs, ys, ldy, cols, bs, sm, start, final);
          }
        }
      }
    }
  }
}

// ---- lanes form: few rows. x is packed once, its rows are the lanes, and weights are broadcast as they stream by

template <int MV, int NR>
inline void lanes_tile(const bf16* w, long K, const bf16* packed, long pairs, v16f* out) {
  v16f acc[NR][MV] = {};
  for (long block = 0; block < pairs; block += 16) {
    for (int r = 0; r < NR; r++) __builtin_prefetch(w + (NR + r) * K + 2 * block);  // the next tile
    for (long p = block; p < std::min(pairs, block + 16); p++) {
      Pack16 b[MV];
      for (int v = 0; v < MV; v++) b[v] = load_pack(packed + (p * MV + v) * 32);
      for (int r = 0; r < NR; r++) {
        int pair;
        memcpy(&pair, w + r * K + 2 * p, 4);
        const Pack16 a = (Pack16)_mm512_set1_epi32(pair);
        for (int v = 0; v < MV; v++) acc[r][v] = multiply_add(acc[r][v], b[v], a);
      }
    }
  }
  for (int r = 0; r < NR; r++)
    for (int v = 0; v < MV; v++) out[r * MV + v] = acc[r][v];
}

inline v16f load_some(const float* p, __mmask16 m) { return (v16f)_mm512_maskz_loadu_ps(m, p); }
inline v16f load_some(const bf16* p, __mmask16 m) {
  return (v16f)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, p)), 16);
}
inline void store_some(float* p, __mmask16 m, v16f v) { _mm512_mask_storeu_ps(p, m, (__m512)v); }
inline void store_some(bf16* p, __mmask16 m, v16f v) {
  _mm256_mask_storeu_epi16(p, m, (__m256i)_mm512_cvtneps_pbh((__m512)v));
}

// MV vectors of rows: M in (16 (MV - 1), 16 MV].
template <int MV, bool ADD, class Y>
void nt_lanes(const bf16* x, long ldx, const bf16* w, Y* y, long ldy, const bf16* bias, long M, long N, long K) {
  // 24 accumulators, but with one vector 24 rows of w and the next 24 would not fit the first cache.
  constexpr long GROUP = 48, NR = MV == 1 ? 12 : 24 / MV;
  const long pairs = K / 2, groups = (N + GROUP - 1) / GROUP;
#pragma omp parallel
  {
    static thread_local std::vector<bf16> packed;
    packed.resize((pairs + 16) * MV * 32);
    for (long v = 0; v < MV; v++)
      pack_pairs(x + v * 16 * ldx, ldx, std::min(16L, M - v * 16), K, packed.data() + v * 32, MV * 32);
    v16f sums[GROUP * MV];
    long first, last;
    share(groups, first, last);
    for (long g = first; g < last; g++) {
      const long n0 = g * GROUP, columns = std::min(GROUP, N - n0);
      long n = 0;
      for (; n + NR <= columns; n += NR) lanes_tile<MV, NR>(w + (n0 + n) * K, K, packed.data(), pairs, sums + n * MV);
      for (; n < columns; n++) lanes_tile<MV, 1>(w + (n0 + n) * K, K, packed.data(), pairs, sums + n * MV);
      for (long c = 0; c < columns; c += 16) {
        const long some = std::min(16L, columns - c);
        const __mmask16 mask = some == 16 ? 0xffff : (1u << some) - 1;
        const v16f offset = bias ? load_some(bias + n0 + c, mask) : v16f{};
        for (int v = 0; v < MV; v++) {
          __m512i r[16];
          for (long i = 0; i < 16; i++) r[i] = i < some ? (__m512i)sums[(c + i) * MV + v] : _mm512_setzero_si512();
          transpose16(r);
          for (long m = v * 16; m < std::min(M, v * 16 + 16L); m++) {
            Y* to = y + m * ldy + n0 + c;
            v16f value = (v16f)r[m - v * 16] + offset;
            if (ADD) value = value + load_some(to, mask);
            store_some(to, mask, value);
          }
        }
      }
    }
  }
}

// Every output is the sum of its pairs in order, in both forms: a row's result does not depend on their number.
template <bool ADD, class Y>
void nt_pairs(const bf16* x, long ldx, const bf16* w, Y* y, long ldy, const bf16* bias, long M, long N, long K) {
  if (M <= 16) return nt_lanes<1, ADD>(x, ldx, w, y, ldy, bias, M, N, K);
  if (M <= 32) return nt_lanes<2, ADD>(x, ldx, w, y, ldy, bias, M, N, K);
  if (M <= 48) return nt_lanes<3, ADD>(x, ldx, w, y, ldy, bias, M, N, K);
  if (M <= 64) return nt_lanes<4, ADD>(x, ldx, w, y, ldy, bias, M, N, K);
  panels<ADD>(x, ldx, y, ldy, bias, M, K, N,
              [=](long c, long cols, long s, long depth, bf16* out) { pack_nt(w, K, c, cols, s, depth, out); });
}
#endif

}  // namespace

extern "C" {

void nt_f32(const float* x, long ldx, const float* w, float* y, long ldy, const float* bias, long M, long N, long K) {
  nt_dot(x, ldx, w, y, ldy, bias, M, N, K);
}

#if defined(__AVX512BF16__)
// An odd K has a last half pair: the dot form, for any number of rows.
#define NT_BF16(NAME, Y)                                                                                        \
  void NAME(const bf16* x, long ldx, const bf16* w, Y* y, long ldy, const bf16* bias, long M, long N, long K) { \
    if (K % 2) return nt_dot(x, ldx, w, y, ldy, bias, M, N, K);                                                 \
    nt_pairs<false>(x, ldx, w, y, ldy, bias, M, N, K);                                                          \
  }
// N is even: see the caller.
void nn_bf16(const bf16* x, long ldx, const bf16* w, bf16* y, long ldy, long M, long N, long K) {
  panels<false>(x, ldx, y, ldy, (const bf16*)nullptr, M, N, K,
                [=](long c, long cols, long s, long depth, bf16* out) { pack_nn(w, K, c, cols, s, depth, out); });
}
#else
#define NT_BF16(NAME, Y)                                                                                        \
  void NAME(const bf16* x, long ldx, const bf16* w, Y* y, long ldy, const bf16* bias, long M, long N, long K) { \
    nt_dot(x, ldx, w, y, ldy, bias, M, N, K);                                                                   \
  }
#endif
NT_BF16(nt_bf16, bf16)
NT_BF16(nt_bf16_f32, float)
// y += x w^T: the second product of a low-rank adapter.
void nt_add_f32(const float* x, const float* w, float* y, long ldy, long M, long N, long K) {
  nt_dot<float, float, true>(x, K, w, y, ldy, nullptr, M, N, K);
}
void nt_add_bf16(const bf16* x, const bf16* w, bf16* y, long ldy, long M, long N, long K) {
#if defined(__AVX512BF16__)
  if (K % 2 == 0) return nt_pairs<true>(x, K, w, y, ldy, (const bf16*)nullptr, M, N, K);
#endif
  nt_dot<bf16, bf16, true>(x, K, w, y, ldy, nullptr, M, N, K);
}
}
