// Weights of 8 bits: w[n][k] = scale[n] * value of the code at (n, k). Every value is exact in bf16, so a product of
// codes is the bf16 product of their values, bit for bit, and the scale is applied to its fp32 sum.
//
// Codes lie in tiles of 16 rows, [rows / 16][K / 4][64], filled up with zeros: 64 bytes are 4 inputs of 16 rows, as the
// lanes of a product want them. In every 16 of the 64: 4 rows of the first two inputs, then of the last two. weights.py
// makes the same.
#pragma once
#include "common.h"

constexpr long CODE_ROWS = 16;
inline long tile_of_codes(long K) { return (K + 3) / 4 * 64; }  // bytes

enum Format : long { PLAIN, INT8, E4M3, BF16 };  // matrix.py's order; PLAIN: of the type that it meets

// A matrix of rows, plain, in codes, or in bf16 whatever it meets.
struct Matrix {
  const void* data = nullptr;
  const float* scale = nullptr;  // one for each row; null when plain
  long format = PLAIN;
  Matrix() = default;
  Matrix(const void* plain) : data(plain) {}
  Matrix(const void* data, const float* scale, long format) : data(data), scale(scale), format(format) {}
};

struct Int8 {
  uint8_t bits;
  float value() const { return float(int8_t(bits)); }
};
// 1 sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, and one NaN of each sign (arXiv 2209.05433).
struct E4m3 {
  uint8_t bits;
  float value() const {
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    const float size = exponent == 15 && mantissa == 7 ? NAN
                       : exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(float(mantissa), -9);
    return bits & 0x80 ? -size : size;
  }
};

// What the 256 codes of C mean; for the first 128, the low and the high bytes by themselves.
template <class C> struct Values {
  bf16 of[256];
  uint8_t low[128], high[128];
  Values() {
    for (int code = 0; code < 256; code++) store1(of + code, C{uint8_t(code)}.value());
    for (int code = 0; code < 128; code++) low[code] = uint8_t(of[code].bits), high[code] = uint8_t(of[code].bits >> 8);
  }
  static const Values& all() {
    static const Values made;
    return made;
  }
};

// From row n on, a multiple of 16 for codes.
inline const bf16* rows_at(const bf16* w, long n, long K) { return w + n * K; }
template <class C> inline const C* rows_at(const C* w, long n, long K) { return w + n / CODE_ROWS * tile_of_codes(K); }

// 16 rows from n on, one after the other.
template <class C> inline const bf16* widen_rows(const C* w, long n, long K, bf16* to) {
  const bf16* values = Values<C>::all().of;
  const C* tile = rows_at(w, n, K);
  for (long k = 0; k < K; k++)
    for (long row = 0; row < CODE_ROWS; row++) {
      const long at = k / 4 * 64 + row / 4 * 16 + k % 4 / 2 * 8 + row % 4 * 2 + k % 2;
      to[row * K + k] = values[tile[at].bits];
    }
  return to;
}

#if defined(__AVX512BF16__)
// 64 codes as bf16: the first two inputs of 16 rows, side by side, and the last two.
template <class C> struct Widen {
#if defined(__AVX512VBMI__)
  // Two permutations of 128 bytes look a value up; its sign is bit 7 of the code in both formats. Arithmetic would take
  // as long for int8, and of e4m3 it would make subnormals, which bf16 products flush to zero.
  __m512i low[2], high[2];
  Widen() {
    const Values<C>& values = Values<C>::all();
    for (int half = 0; half < 2; half++) {
      low[half] = _mm512_loadu_si512(values.low + 64 * half);
      high[half] = _mm512_loadu_si512(values.high + 64 * half);
    }
  }
  void operator()(const C* from, __m512bh& first, __m512bh& second) const {
    const __m512i codes = _mm512_loadu_si512(from);
    const __m512i size = std::is_same<C, Int8>::value ? _mm512_abs_epi8(codes) : codes;  // bit 7 is not looked at
    const __m512i lows = _mm512_permutex2var_epi8(low[0], size, low[1]);
    const __m512i sizes = _mm512_permutex2var_epi8(high[0], size, high[1]);
    __m512i highs = _mm512_ternarylogic_epi32(sizes, codes, _mm512_set1_epi8(char(0x80)), 0xf8);  // a | b & c
    if (std::is_same<C, Int8>::value) {  // the one code whose size has bit 7: -128, in bf16 0xc300
      const __mmask64 least = _mm512_cmpeq_epi8_mask(codes, _mm512_set1_epi8(char(0x80)));
      highs = _mm512_mask_mov_epi8(highs, least, _mm512_set1_epi8(char(0xc3)));
    }
    first = (__m512bh)_mm512_unpacklo_epi8(lows, highs);
    second = (__m512bh)_mm512_unpackhi_epi8(lows, highs);
  }
#else
  const bf16* values = Values<C>::all().of;
  void operator()(const C* from, __m512bh& first, __m512bh& second) const {
    bf16 wide[2][32];
    for (long i = 0; i < 64; i++) wide[i / 8 % 2][i / 16 * 8 + i % 8] = values[from[i].bits];
    memcpy(&first, wide[0], 64);
    memcpy(&second, wide[1], 64);
  }
#endif
};

// A tile as pairs of inputs: [K / 2][16 rows][2].
template <class C> inline const bf16* widen_tile(const C* tile, long K, bf16* to) {
  const Widen<C> widen;
  for (long at = 0; at < tile_of_codes(K); at += 64) {
    __m512bh first, second;
    widen(tile + at, first, second);
    _mm512_storeu_si512(to + at, (__m512i)first);
    _mm512_storeu_si512(to + at + 32, (__m512i)second);
  }
  return to;
}
#endif
