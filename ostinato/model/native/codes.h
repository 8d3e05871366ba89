// Weights of 8 bits: w[n][k] = scale[n] * value of codes[n][k]. Every value is exact in bf16, so a product of codes is
// the bf16 product of their values, bit for bit, and the scale is applied to its fp32 sum.
#pragma once
#include "common.h"

enum Format : long { PLAIN, INT8, E4M3 };  // quantise.py's order

// A matrix of rows, plain (of the type that it meets) or in codes.
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

// How 64 codes of C become bf16 in registers. Nothing to do for what is bf16 already.
template <class C> struct Widen {};

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define WIDENS_IN_REGISTERS 1
// Two permutations of 128 bytes look a value up; its sign is bit 7 of the code in both formats. Arithmetic would take
// as long for int8, and of e4m3 it would make subnormals, which bf16 products flush to zero.
template <class C> struct WidenCodes {
  __m512i low[2], high[2];
  WidenCodes() {
    const Values<C>& values = Values<C>::all();
    for (int half = 0; half < 2; half++) {
      low[half] = _mm512_loadu_si512(values.low + 64 * half);
      high[half] = _mm512_loadu_si512(values.high + 64 * half);
    }
  }
  // In every 16 codes the first 8 go to `first`, the last 8 to `second`.
  void halves(__m512i codes, __m512i& first, __m512i& second) const {
    const __m512i size = std::is_same<C, Int8>::value ? _mm512_abs_epi8(codes) : codes;  // bit 7 is not looked at
    const __m512i lows = _mm512_permutex2var_epi8(low[0], size, low[1]);
    const __m512i sizes = _mm512_permutex2var_epi8(high[0], size, high[1]);
    const __m512i highs = _mm512_ternarylogic_epi32(sizes, codes, _mm512_set1_epi8(char(0x80)), 0xf8);  // a | b & c
    first = _mm512_unpacklo_epi8(lows, highs);
    second = _mm512_unpackhi_epi8(lows, highs);
  }
  // Of the 4 codes in every 32 bits the first pair and the second, as 32 bits each.
  void pairs(__m512i codes, __m512i& first, __m512i& second) const {
    const __m128i apart = _mm_set_epi8(15, 14, 11, 10, 7, 6, 3, 2, 13, 12, 9, 8, 5, 4, 1, 0);
    halves(_mm512_shuffle_epi8(codes, _mm512_broadcast_i32x4(apart)), first, second);
  }
  // The first 32 codes and the last.
  void in_order(__m512i codes, __m512i& first, __m512i& second) const {
    halves(_mm512_permutexvar_epi64(_mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0), codes), first, second);
  }
};
template <> struct Widen<Int8> : WidenCodes<Int8> {};
template <> struct Widen<E4m3> : WidenCodes<E4m3> {};
#endif

// n codes as bf16.
template <class C> inline void widen(const C* codes, bf16* to, long n) {
#if defined(WIDENS_IN_REGISTERS)
  const Widen<C> widen;
  for (; n >= 64; n -= 64, codes += 64, to += 64) {
    __m512i first, second;
    widen.in_order(_mm512_loadu_si512(codes), first, second);
    _mm512_storeu_si512(to, first);
    _mm512_storeu_si512(to + 32, second);
  }
#endif
  const bf16* values = Values<C>::all().of;
  for (long i = 0; i < n; i++) to[i] = values[codes[i].bits];
}
