// Matrix products for skinny activations x [M, K] and row-major weights w [N, K]: which form serves, and the C names.
//
// The same source serves every instruction set: the vector is a parameter (vector.h). Where the processor multiplies
// bf16, products of bf16 take the forms of gemm_pairs.h, or where it has tiles those of gemm_tiles.h, all others those
// of gemm_dot.h, and of int8 codes that of gemm_codes.h.

#include "gemm_codes.h"
#include "gemm_panels.h"
#if defined(__AVX512BF16__)
#include "gemm_pairs.h"
#endif
#if defined(__AMX_BF16__) && defined(__linux__)
#include "gemm_tiles.h"
#endif

namespace {

template <class W, class T, class Y> void plain(const Product<T, Y>& p, long first, long last) {
  if (p.K <= SHORT) short_form<W>(p, first, last);
  else dot<W>(p, first, last);
}

template <class W, class Y> void of_bf16(const Product<bf16, Y>& p, long first, long last) {
#if defined(__AMX_BF16__) && defined(__linux__)
  if (p.K % DEPTH_OF_TILE == 0 && has_tiles()) return tiles<W>(p, first, last);
#endif
#if defined(__AVX512BF16__)
  if (p.K % 2 == 0) return pairs<W>(p, first, last);  // an odd K has a last half pair
#else
  if constexpr (std::is_same<W, Int8>::value) return whole_numbers(p, first, last);
#endif
  if constexpr (sizeof(W) == 1) dot<W>(p, first, last);
  else plain<W>(p, first, last);
}
inline void any(const Product<bf16, bf16>& p, long first, long last) {
  switch (p.w.format) {
    case INT8: return of_bf16<Int8>(p, first, last);
    case E4M3: return of_bf16<E4m3>(p, first, last);
    default: return of_bf16<bf16>(p, first, last);
  }
}
inline void any(const Product<bf16, float>& p, long first, long last) { of_bf16<bf16>(p, first, last); }
inline void any(const Product<float, float>& p, long first, long last) {
  if (p.w.format == INT8) whole_numbers(p, first, last);
  else if (p.w.format == BF16) plain<bf16>(p, first, last);
  else plain<float>(p, first, last);
}

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
// Whether the processor multiplies bf16: then its products, and those of codes, beat fp32's.
long multiplies_bf16() {
#if defined(__AVX512BF16__)
  return 1;
#else
  return 0;
#endif
}

void nt_f32(const float* x, long ldx, const float* w, float* y, long ldy, const float* bias, long M, long N, long K) {
  nt(x, ldx, w, y, ldy, bias, M, N, K);
}
void nt_bf16(const bf16* x, long ldx, const bf16* w, bf16* y, long ldy, const bf16* bias, long M, long N, long K) {
  nt(x, ldx, w, y, ldy, bias, M, N, K);
}
void nt_bf16_f32(const bf16* x, long ldx, const bf16* w, float* y, long ldy, const bf16* bias, long M, long N, long K) {
  nt(x, ldx, w, y, ldy, bias, M, N, K);
}
// fp32 arithmetic on weights that are stored in bf16.
void nt_f32_bf16(const float* x, long ldx, const bf16* w, float* y, long ldy, const float* bias, long M, long N,
                 long K) {
  nt(x, ldx, Matrix(w, nullptr, BF16), y, ldy, bias, M, N, K);
}
// A weight in codes, of a format other than PLAIN; under fp32 of INT8.
void nt_codes_bf16(const bf16* x, long ldx, const void* codes, const float* scale, long format, bf16* y, long ldy,
                   const bf16* bias, long M, long N, long K) {
  nt(x, ldx, Matrix(codes, scale, format), y, ldy, bias, M, N, K);
}
void nt_codes_f32(const float* x, long ldx, const void* codes, const float* scale, long format, float* y, long ldy,
                  const float* bias, long M, long N, long K) {
  nt(x, ldx, Matrix(codes, scale, format), y, ldy, bias, M, N, K);
}
// y += x w^T: the second product of a low-rank adapter.
void nt_add_f32(const float* x, const float* w, float* y, long ldy, long M, long N, long K) {
  nt(x, K, w, y, ldy, (const float*)nullptr, M, N, K, true);
}
void nt_add_bf16(const bf16* x, const bf16* w, bf16* y, long ldy, long M, long N, long K) {
  nt(x, K, w, y, ldy, (const bf16*)nullptr, M, N, K, true);
}
// y[M, K] = x[M, N] w[N, K]: the gradient of nt with respect to x.
void nn_bf16(const bf16* x, long ldx, const bf16* w, bf16* y, long ldy, long M, long N, long K) {
#pragma omp parallel
  {
#if defined(__AMX_BF16__) && defined(__linux__)
    if (N % DEPTH_OF_TILE == 0 && has_tiles()) nn_tiles_share(x, ldx, w, y, ldy, M, N, K);
    else
#endif
#if defined(__AVX512BF16__)
    if (N % 2 == 0) nn_share(x, ldx, w, y, ldy, M, N, K);
    else
#endif
      panels_share(x, ldx, PlainRows<bf16>{w, K}, y, ldy, M, N, K);
  }
}
void nn_f32_bf16(const float* x, long ldx, const bf16* w, float* y, long ldy, long M, long N, long K) {
#pragma omp parallel
  panels_share(x, ldx, PlainRows<bf16>{w, K}, y, ldy, M, N, K);
}
// The same of int8 codes.
void nn_codes_bf16(const bf16* x, long ldx, const Int8* w, const float* scale, bf16* y, long ldy, long M, long N,
                   long K) {
#pragma omp parallel
  panels_share(x, ldx, CodedRows{w, scale, K}, y, ldy, M, N, K);
}
void nn_codes_f32(const float* x, long ldx, const Int8* w, const float* scale, float* y, long ldy, long M, long N,
                  long K) {
#pragma omp parallel
  panels_share(x, ldx, CodedRows{w, scale, K}, y, ldy, M, N, K);
}
}
