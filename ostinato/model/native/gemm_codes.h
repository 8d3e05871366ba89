// Products of int8 codes in whole numbers: y[M, N] = x[M, K] w[N, K]^T, under fp32 and where no bf16 is multiplied.
//
// A row of x becomes whole numbers of 16 bits with a scale for every SPAN inputs. A tile of 16 rows of w is widened to
// 16 bits, with AVX-512 in registers, else a SPAN at a time for all rows of x: the sums of a SPAN are exact in 32 bits,
// whatever their order, and then added up in fp32, SPAN after SPAN. So a row's result depends on the row alone.
#pragma once
#include "gemm_dot.h"

namespace {

constexpr long SPAN = 256;        // 32767 * 128 * SPAN < 2^31
constexpr long CROWD = 256;       // rows of x that are multiplied while a tile is near
#if defined(__AVX512BW__)
constexpr int WHOLE_ROWS = 12;    // rows of x at a time: as many sums of 32 registers, at 8 or fewer two a row
#else
constexpr int WHOLE_ROWS = 3;     // 12 sums, 3 inputs and a weight in 16 registers
#endif

// Rows of x in whole numbers; where a SPAN has a value that is not finite, its scale is NaN.
struct WholeRows {
  int16_t* values;  // [count][stride]
  float* scales;    // [count][spans]
  long stride, spans;
  template <class T> WholeRows(const RowsOf<T>& x, long m, long count, long K) {
    stride = (K + 3) / 4 * 4, spans = (K + SPAN - 1) / SPAN;
    values = scratch<int16_t, PACKED>(count * stride + 16), scales = scratch<float, PACKED>(count * spans);
    for (long i = 0; i < count; i++)
      for (long s = 0; s < spans; s++) whole(x[m + i] + s * SPAN, std::min(SPAN, K - s * SPAN), i, s);
  }
  template <class T> void whole(const T* from, long some, long i, long s) {
    float wide[SPAN];
    int32_t peak = 0;
    for (long k = 0; k < some; k++) {
      wide[k] = to_float(from[k]);
      int32_t bits;
      memcpy(&bits, wide + k, 4);
      peak = std::max(peak, bits & 0x7fffffff);  // ordered as the magnitudes are, those that are not finite last
    }
    int16_t* to = values + i * stride + s * SPAN;
    float top;
    memcpy(&top, &peak, 4);
    const bool finite = peak < 0x7f800000;
    const float inverse = finite && top > 1e-30f ? 32767.0f / top : 0.0f;  // smaller ones count for nothing
    scales[i * spans + s] = finite ? top * (1.0f / 32767.0f) : NAN;
    if (!finite) std::fill(wide, wide + some, 0.0f);
    for (long k = 0; k < some; k++) {
      const float rounded = wide[k] * inverse + 12582912.0f;  // 1.5 * 2^23: a whole number in the low bits
      int32_t bits;
      memcpy(&bits, &rounded, 4);
      to[k] = int16_t(bits - 0x4b400000);
    }
    for (long k = some; k % 4; k++) to[k] = 0;
  }
};

#if defined(__AVX512BW__)

inline __m512i add_pairs(__m512i sums, const int16_t* pair, __m512i weights) {
  int32_t both;
  memcpy(&both, pair, 4);
#if defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(sums, _mm512_set1_epi32(both), weights);
#else
  return _mm512_add_epi32(sums, _mm512_madd_epi16(_mm512_set1_epi32(both), weights));
#endif
}

// A vector widens 64 codes where they are multiplied.
inline const Int8* widen_span(const Int8* tile, long, int16_t*) { return tile; }

// sums[m][row] += scales[m] * (x[m] times row) for 16 rows.
template <int M>
inline void add_span(const int16_t* const* x, const Int8* w, long groups, const float* scales, float (*sums)[16]) {
  constexpr int APART = M <= 8 ? 2 : 1;  // sums that do not wait for each other: at least 8
  __m512i acc[M][APART] = {};
  for (long g = 0; g < groups; g++, w += 64) {
    const __m512i codes = _mm512_loadu_si512(w);  // of 16 rows, the first two of 4 inputs and the last two
    const __m512i first = _mm512_srai_epi16(_mm512_unpacklo_epi8(codes, codes), 8);
    const __m512i last = _mm512_srai_epi16(_mm512_unpackhi_epi8(codes, codes), 8);
    __builtin_prefetch(w + 2048);
    for (int m = 0; m < M; m++) acc[m][0] = add_pairs(acc[m][0], x[m] + 4 * g, first);
    for (int m = 0; m < M; m++) acc[m][APART - 1] = add_pairs(acc[m][APART - 1], x[m] + 4 * g + 2, last);
  }
  for (int m = 0; m < M; m++) {
    const __m512i sum = APART == 2 ? _mm512_add_epi32(acc[m][0], acc[m][1]) : acc[m][0];
    const __m512 whole = _mm512_cvtepi32_ps(sum);
    _mm512_storeu_ps(sums[m], _mm512_fmadd_ps(whole, _mm512_set1_ps(scales[m]), _mm512_loadu_ps(sums[m])));
  }
}

#else

// Codes of 16 rows and `groups` times 4 inputs -> 16 bits, [groups][16 rows][4].
inline const int16_t* widen_span(const Int8* tile, long groups, int16_t* to) {
#if defined(__AVX2__)
  const __m128i order = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
  for (long at = 0; at < groups * 64; at += 16) {
    const __m128i codes = _mm_loadu_si128((const __m128i*)(tile + at));
    if (at % 64 == 0) __builtin_prefetch(tile + at + 2048);
    _mm256_storeu_si256((__m256i*)(to + at), _mm256_cvtepi8_epi16(_mm_shuffle_epi8(codes, order)));
  }
#else
  for (long at = 0; at < groups * 64; at += 16)
    for (long row = 0; row < 4; row++)
      for (long k = 0; k < 4; k++) to[at + 4 * row + k] = int8_t(tile[at + k / 2 * 8 + row * 2 + k % 2].bits);
#endif
  return to;
}

// sums[m][row] += scales[m] * (x[m] times row) for 16 rows.
template <int M>
inline void add_span(const int16_t* const* x, const int16_t* w, long groups, const float* scales, float (*sums)[16]) {
#if defined(__AVX2__)
  __m256i acc[M][4] = {};
  for (long g = 0; g < groups; g++, w += 64) {
    __m256i in[M];
    for (int m = 0; m < M; m++) {
      long long four;
      memcpy(&four, x[m] + 4 * g, 8);
      in[m] = _mm256_set1_epi64x(four);
    }
    for (int r = 0; r < 4; r++) {
      const __m256i four = _mm256_loadu_si256((const __m256i*)(w + 16 * r));
      for (int m = 0; m < M; m++) acc[m][r] = _mm256_add_epi32(acc[m][r], _mm256_madd_epi16(in[m], four));
    }
  }
  for (int m = 0; m < M; m++)
    for (int h = 0; h < 2; h++) {
      const __m256i both = _mm256_hadd_epi32(acc[m][2 * h], acc[m][2 * h + 1]);
      const __m256 whole = _mm256_cvtepi32_ps(_mm256_permute4x64_epi64(both, 0xd8));
      float* to = sums[m] + 8 * h;
      _mm256_storeu_ps(to, _mm256_fmadd_ps(whole, _mm256_set1_ps(scales[m]), _mm256_loadu_ps(to)));
    }
#else
  for (int m = 0; m < M; m++)
    for (int row = 0; row < 16; row++) {
      int32_t sum = 0;
      for (long g = 0; g < groups; g++)
        for (int k = 0; k < 4; k++) sum += int32_t(x[m][4 * g + k]) * w[64 * g + 4 * row + k];
      sums[m][row] = std::fma(float(sum), scales[m], sums[m][row]);
    }
#endif
}

#endif

template <int M, class W>
inline void add_spans(long rows, const int16_t* const* x, const W* w, long groups, const float* scales,
                      float (*sums)[16]) {
  if (rows == M) return add_span<M>(x, w, groups, scales, sums);
  if constexpr (M > 1) add_spans<M - 1>(rows, x, w, groups, scales, sums);
}

template <class T, class Y> void whole_numbers(const Product<T, Y>& p, long first, long last) {
  int16_t* wide = scratch<int16_t, WIDENED>(SPAN * CODE_ROWS);
  for (long m0 = 0; m0 < p.M; m0 += CROWD) {
    const long count = std::min(CROWD, p.M - m0);
    const WholeRows x(p.x, m0, count, p.K);
    float(*sums)[16] = (float(*)[16])scratch<float, KEPT>(count * 16);
    for (long n = first; n < last; n += CODE_ROWS) {
      std::fill(sums[0], sums[count], 0.0f);
      const Int8* tile = rows_at((const Int8*)p.w.data, n, p.K);
      for (long s = 0; s < x.spans; s++) {
        const long groups = (std::min(SPAN, p.K - s * SPAN) + 3) / 4;
        const auto* codes = widen_span(tile + s * SPAN * 16, groups, wide);
        for (long m = 0, some; m < count; m += some) {
          const long left = count - m;
          some = left <= WHOLE_ROWS ? left : left < 2 * WHOLE_ROWS ? (left + 1) / 2 : WHOLE_ROWS;
          const int16_t* rows[WHOLE_ROWS];
          float scales[WHOLE_ROWS];
          for (long i = 0; i < some; i++)
            rows[i] = x.values + (m + i) * x.stride + s * SPAN, scales[i] = x.scales[(m + i) * x.spans + s];
          add_spans<WHOLE_ROWS>(some, rows, codes, groups, scales, sums + m);
        }
      }
      const long columns = std::min(CODE_ROWS, last - n);
      for (long c = 0; c < columns; c += 4) {
        const Finish4<Y> finish(p, n + c, columns - c);
        for (long m = 0; m < count; m++) finish(load4(sums[m] + c, 4), p.y + (m0 + m) * p.ldy + n + c);
      }
    }
  }
}

}  // namespace
