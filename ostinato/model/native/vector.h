// The vector of the instruction set that the compiler builds for: LANES floats wide, REGISTERS of them.
//
// Kernels are written once, with the vectors of GCC and clang, in units of LANES. What needs intrinsics is here: sums
// over lanes, and the conversion to bf16 where the processor has one.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__AVX2__) || defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int LANES = 4, REGISTERS = 32;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif

struct bf16 { uint16_t bits; };
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t veci __attribute__((vector_size(4 * LANES)));
typedef uint32_t vecu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vech __attribute__((vector_size(2 * LANES)));
typedef float vec4 __attribute__((vector_size(16)));

inline vec splat(float v) { return vec{} + v; }

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
inline vec load(const float* p) { vec v; memcpy(&v, p, sizeof v); return v; }
inline vec load(const bf16* p) {
  vech h;
  memcpy(&h, p, sizeof h);
  return (vec)(__builtin_convertvector(h, vecu) << 16);
}
inline void store(float* p, vec v) { memcpy(p, &v, sizeof v); }
inline void store(bf16* p, vec v) {
#if defined(__AVX512BF16__)
  __m256bh h = _mm512_cvtneps_pbh((__m512)v);
#else
  const vecu u = (vecu)v, nan = (vecu)(v != v);
  const vecu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  const vech h = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), vech);
#endif
  memcpy(p, &h, sizeof h);
}

// What is left of v when it is stored as T.
template <class T> inline vec rounded_to(vec v);
template <> inline vec rounded_to<float>(vec v) { return v; }
template <> inline vec rounded_to<bf16>(vec v) {
  bf16 p[LANES];
  store(p, v);
  return load(p);
}

// LANES bf16 values at even places and LANES at odd ones, of 2 LANES values in order.
struct Halves { vec even, odd; };
inline Halves halves(const bf16* p) {
  vecu raw;
  memcpy(&raw, p, sizeof raw);
  return {(vec)(raw << 16), (vec)(raw & 0xffff0000u)};
}

inline vec select(veci mask, vec yes, vec no) { return (vec)(((veci)yes & mask) | ((veci)no & ~mask)); }
inline vec max(vec a, vec b) { return select(a > b, a, b); }

// exp for x <= 88; below -87 it is 0. Relative error under 2e-7 (checked against double by the tests).
inline vec exp(vec x) {
  const vec tiny = splat(-87.0f);
  const veci keep = x > tiny;
  x = select(keep, x, tiny);
  vec t = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer in the low bits
  veci n = (veci)t - 0x4b400000;
  vec k = t - 12582912.0f;
  vec r = x - k * 0.693145751953125f;
  r = r - k * 1.42860682030941723212e-6f;
  vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return (vec)((veci)((vec)((n + 127) << 23) * p) & keep);
}

// The upper half of the lanes onto the lower, until four are left.
inline vec4 fold(vec v) {
#if defined(__AVX512F__)
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)v, 1));
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), high);
  return (vec4)_mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
#elif defined(__AVX2__)
  return (vec4)_mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
#else
  return (vec4)v;
#endif
}

// Lane i is the sum of the lanes of vectors[i]: (0 + 2) + (1 + 3) of what `fold` leaves.
inline vec4 sums4(const vec* vectors) {
  const vec4 a = fold(vectors[0]), b = fold(vectors[1]), c = fold(vectors[2]), d = fold(vectors[3]);
#if defined(__SSE2__)
  const __m128 ab = _mm_add_ps(_mm_unpacklo_ps((__m128)a, (__m128)b), _mm_unpackhi_ps((__m128)a, (__m128)b));
  const __m128 cd = _mm_add_ps(_mm_unpacklo_ps((__m128)c, (__m128)d), _mm_unpackhi_ps((__m128)c, (__m128)d));
  return (vec4)_mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab));
#elif defined(__aarch64__)
  const float32x4_t ab = vaddq_f32(vzip1q_f32((float32x4_t)a, (float32x4_t)b), vzip2q_f32((float32x4_t)a, (float32x4_t)b));
  const float32x4_t cd = vaddq_f32(vzip1q_f32((float32x4_t)c, (float32x4_t)d), vzip2q_f32((float32x4_t)c, (float32x4_t)d));
  return (vec4)vaddq_f32(vcombine_f32(vget_low_f32(ab), vget_low_f32(cd)), vcombine_f32(vget_high_f32(ab), vget_high_f32(cd)));
#else
  const vec4 all[4] = {a, b, c, d};
  vec4 sums;
  for (int i = 0; i < 4; i++) sums[i] = (all[i][0] + all[i][2]) + (all[i][1] + all[i][3]);
  return sums;
#endif
}
// r[i][j] -> r[j][i].
inline void transpose4(vec4 r[4]) {
#if defined(__SSE2__)
  _MM_TRANSPOSE4_PS((__m128&)r[0], (__m128&)r[1], (__m128&)r[2], (__m128&)r[3]);
#else
  const vec4 a = r[0], b = r[1], c = r[2], d = r[3];
  for (int i = 0; i < 4; i++) r[i] = vec4{a[i], b[i], c[i], d[i]};
#endif
}
inline float lane_sum(vec v) {
  const vec4 four = fold(v);
  return (four[0] + four[2]) + (four[1] + four[3]);
}
inline float max_lane(vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float m = v[0];
  for (int i = 1; i < LANES; i++) m = std::max(m, v[i]);
  return m;
#endif
}
// v with -inf in its first n lanes.
inline vec without_first_lanes(vec v, long n) {
  static const int32_t order[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  veci lane;
  memcpy(&lane, order, sizeof lane);
  return select(lane < int32_t(std::min(n, long(LANES))), splat(-INFINITY), v);
}
// The first n lanes of v, -inf in the others.
inline vec first_lanes_or_low(vec v, long n) {
  static const int32_t order[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  veci lane;
  memcpy(&lane, order, sizeof lane);
  return select(lane < int32_t(std::max(0L, std::min(n, long(LANES)))), v, splat(-INFINITY));
}
