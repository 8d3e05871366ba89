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

// This thread's share [first, last) of n equal items.
inline void share(long n, long& first, long& last) {
  const long threads = omp_get_num_threads(), me = omp_get_thread_num();
  first = n * me / threads;
  last = n * (me + 1) / threads;
}
