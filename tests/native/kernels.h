// The kernels' functions and structs as Python declares them (ostinato/model/native), by type.
#pragma once
#include "check.h"

struct Matrix {  // of matrix.py
  const void* data = nullptr;
  const float* scale = nullptr;
  long format = 0;  // 0 plain, 1 int8, 2 e4m3
};
struct Experts {  // of experts.py
  Matrix gate_up, down;
  const void *gate_up_a, *gate_up_b, *down_a, *down_b;
  long count, width, hidden, rank_up, rank_down, shared;
  double scale;
};

#define NT(NAME, X, W, Y) void NAME(const X*, long, const W*, Y*, long, const X*, long, long, long)
#define TYPED(SUFFIX, T)                                                                                              \
  NT(nt_##SUFFIX, T, T, T);                                                                                           \
  void nt_add_##SUFFIX(const T*, const T*, T*, long, long, long, long);                                               \
  void rms_norm_##SUFFIX(const T*, long, const T*, T*, long, long, double);                                           \
  void add_rms_norm_##SUFFIX(const T*, const T*, const T*, T*, T*, long, long, double);                               \
  void rope_##SUFFIX(const T*, long, const T*, const T*, T*, long, long, long);                                       \
  void silu_mul_##SUFFIX(const T*, T*, long, long);                                                                   \
  void write_cache_##SUFFIX(const T*, long, const T*, long, const int64_t*, T*, T*, long, long, long, long);          \
  void paged_attention_##SUFFIX(const T*, long, const T*, const T*, const int32_t*, long, const int32_t*,             \
                                const int32_t*, T*, float*, long, long, long, long, long, double);                    \
  long experts_##SUFFIX(const Experts*, const T*, const int32_t*, const float*, T*, long, long, char*);

extern "C" {
TYPED(f32, float)
TYPED(bf16, bf16)
NT(nt_bf16_f32, bf16, bf16, float);
void nt_f32_bf16(const float*, long, const bf16*, float*, long, const float*, long, long, long) __attribute__((weak));
void nt_codes_bf16(const bf16*, long, const void*, const float*, long, bf16*, long, const bf16*, long, long, long);
void nt_codes_f32(const float*, long, const void*, const float*, long, float*, long, const float*, long, long, long);
void nn_codes_f32(const float*, long, const void*, const float*, float*, long, long, long, long);
long multiplies_bf16();
void nn_bf16(const bf16*, long, const bf16*, bf16*, long, long, long, long) __attribute__((weak));
void route_rows(const float*, const int32_t*, int32_t*, float*, long, long, long, long, double);
void sample(const float*, long, const float*, const int32_t*, const float*, const float*, const double*, int64_t*,
            float*, float*, float*, long);
void support_counts(const float*, long, const float*, const float*, int32_t*, long);
void support_ids(const float*, long, const float*, const float*, const int32_t*, const int64_t*, int32_t*, long);
void score(const float*, long, float, const int64_t*, float*, long);
void exp_f32(const float*, float*, long);
}

// One set of functions for a type.
template <class T> struct Kernels;
#define SET(SUFFIX, T)                                               \
  template <> struct Kernels<T> {                                    \
    static constexpr const char* name = #SUFFIX;                     \
    static constexpr auto nt = nt_##SUFFIX;                          \
    static constexpr auto nt_add = nt_add_##SUFFIX;                  \
    static constexpr auto rms_norm = rms_norm_##SUFFIX;              \
    static constexpr auto add_rms_norm = add_rms_norm_##SUFFIX;      \
    static constexpr auto rope = rope_##SUFFIX;                      \
    static constexpr auto silu_mul = silu_mul_##SUFFIX;              \
    static constexpr auto write_cache = write_cache_##SUFFIX;        \
    static constexpr auto paged_attention = paged_attention_##SUFFIX; \
    static constexpr auto experts = experts_##SUFFIX;                \
  };
SET(f32, float)
SET(bf16, bf16)

// Weights of 8 bits (codes.h): values, and codes of `rows` rows in tiles of 16.
inline double value_of_code(uint8_t code, long format) {
  if (format == 1) return int8_t(code);
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double size = exponent ? std::ldexp(8.0 + mantissa, exponent - 10) : std::ldexp(double(mantissa), -9);
  return code & 0x80 ? -size : size;
}
// Inputs of K products of codes. Of int8 they become whole numbers where bf16 is not multiplied: half a 32767th part of
// the largest of every 256 may be lost.
template <class T> std::vector<Approx> inputs_of_codes(const std::vector<Approx>& x, long format) {
  std::vector<Approx> out = x;
  if (format != 1 || (sizeof(T) == 2 && multiplies_bf16())) return out;
  for (size_t from = 0; from < x.size(); from += 256) {
    const size_t to = std::min(x.size(), from + 256);
    double peak = 0;
    for (size_t k = from; k < to; k++) peak = std::max(peak, x[k].most());
    for (size_t k = from; k < to; k++) out[k].error += 0.501 * peak / 32767;
  }
  return out;
}
inline long code_bytes(long rows, long K) { return (rows + 15) / 16 * ((K + 3) / 4) * 64; }
inline long place_of_code(long n, long k, long K) {
  return n / 16 * ((K + 3) / 4 * 64) + k / 4 * 64 + n % 16 / 4 * 16 + k % 4 / 2 * 8 + n % 4 * 2 + k % 2;
}
inline uint8_t random_code(Random& random, long format) {
  for (;;) {
    const uint8_t code = uint8_t(random.below(256));
    if (format == 1 || (code & 0x7f) != 0x7f) return code;  // e4m3's NaN
  }
}
