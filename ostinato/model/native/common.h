// Shared by the kernels: 16-lane vectors, bf16, and the split of work over threads.
#pragma once
#include <omp.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

struct bf16 { uint16_t bits; };
typedef float v16f __attribute__((vector_size(64)));
typedef int32_t v16i __attribute__((vector_size(64)));
typedef uint32_t v16u __attribute__((vector_size(64)));
typedef uint16_t v16h __attribute__((vector_size(32)));

inline float to_float(float v) { return v; }
inline float to_float(bf16 v) {
  uint32_t u = uint32_t(v.bits) << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
inline void store1(float* p, float v) { *p = v; }
// Round to nearest even, as torch does; NaN stays NaN.
inline void store1(bf16* p, float v) {
  uint32_t u;
  memcpy(&u, &v, 4);
  p->bits = v != v ? 0x7fc0 : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline v16f load16(const float* p) { v16f v; memcpy(&v, p, 64); return v; }
inline v16f load16(const bf16* p) {
  v16h h;
  memcpy(&h, p, 32);
  return (v16f)(__builtin_convertvector(h, v16u) << 16);
}
inline void store16(float* p, v16f v) { memcpy(p, &v, 64); }
inline void store16(bf16* p, v16f v) {
#if defined(__AVX512BF16__)
  __m256bh h = _mm512_cvtneps_pbh((__m512)v);
  memcpy(p, &h, 32);
#else
  for (int i = 0; i < 16; i++) store1(p + i, v[i]);
#endif
}

// What is left of v when it is stored as T.
template <class T> inline v16f rounded16(v16f v);
template <> inline v16f rounded16<float>(v16f v) { return v; }
template <> inline v16f rounded16<bf16>(v16f v) {
  bf16 p[16];
  store16(p, v);
  return load16(p);
}

// exp for x <= 88; below -87 it is 0. Relative error under 2e-7 (checked against double by the tests).
inline v16f exp16(v16f x) {
  const v16f tiny = v16f{} - 87.0f;
  const v16i keep = x > tiny;
  x = (v16f)(((v16i)x & keep) | ((v16i)tiny & ~keep));
  v16f t = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer in the low bits
  v16i n = (v16i)t - 0x4b400000;
  v16f k = t - 12582912.0f;
  v16f r = x - k * 0.693145751953125f;
  r = r - k * 1.42860682030941723212e-6f;
  v16f p = v16f{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return (v16f)((v16i)((v16f)((n + 127) << 23) * p) & keep);
}

// ((0+8)+(4+12) + (2+10)+(6+14)) + the same of the odd lanes.
inline float sum16(v16f v) {
#if defined(__AVX512F__)
  const __m256 low = _mm512_castps512_ps256((__m512)v), high = _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)v, 1));
  const __m256 eight = _mm256_add_ps(low, high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  float s[8];
  for (int i = 0; i < 8; i++) s[i] = v[i] + v[i + 8];
  return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
#endif
}
inline v16f max16(v16f a, v16f b) {
  v16i m = a > b;
  return (v16f)(((v16i)a & m) | ((v16i)b & ~m));
}
inline float max_lane(v16f v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float m = v[0];
  for (int i = 1; i < 16; i++) m = std::max(m, v[i]);
  return m;
#endif
}
// The first n lanes of v, -inf in the others.
inline v16f first_lanes_or_low(v16f v, long n) {
  const v16i lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const v16i inside = lane < int32_t(std::min(n, 16L));
  return (v16f)(((v16i)v & inside) | ((v16i)(v16f{} - INFINITY) & ~inside));
}

// This thread's share [first, last) of n equal items.
inline void share(long n, long& first, long& last) {
  const long threads = omp_get_num_threads(), me = omp_get_thread_num();
  first = n * me / threads;
  last = n * (me + 1) / threads;
}

// Hands out the pieces of one allocation; with a null base it only measures.
struct Arena {
  char* base;
  long used = 0;
  template <class T> T* take(long count) {
    const long at = used;
    used += (count * long(sizeof(T)) + 63) / 64 * 64;
    return base ? (T*)(base + at) : nullptr;
  }
};
