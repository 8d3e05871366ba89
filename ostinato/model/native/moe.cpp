// Tokens sorted by expert: every expert is one product over its own rows (grouped GEMM), and a token's
// results are added in the order of its top-k, so the sum does not depend on the batch.

#include "common.h"

extern "C" {
void nt_f32(const float*, long, const float*, float*, long, const float*, long, long, long);
void nt_bf16(const bf16*, long, const bf16*, bf16*, long, const bf16*, long, long, long);

// ids [T, K] -> place [T * K]: where (t, k) stands among the rows grouped by expert; ends [E]: last row + 1 of each.
void moe_sort(const int64_t* ids, int64_t* place, int32_t* ends, long T, long K, long E) {
  std::vector<long> next(E + 1);
  for (long i = 0; i < T * K; i++) next[ids[i] + 1]++;
  for (long e = 0; e < E; e++) {
    next[e + 1] += next[e];
    ends[e] = int32_t(next[e + 1]);
  }
  for (long i = 0; i < T * K; i++) place[i] = next[ids[i]]++;
}

// rows[place[t, k]] = x[t], any type of row_bytes.
void moe_gather(const char* x, const int64_t* place, char* rows, long T, long K, long row_bytes) {
  for (long t = 0; t < T; t++)
    for (long k = 0; k < K; k++) memcpy(rows + place[t * K + k] * row_bytes, x + t * row_bytes, row_bytes);
}
}

namespace {
template <class T>
void combine(const T* rows, const int64_t* place, const float* weights, T* y, long n, long K, long N) {
#pragma omp parallel for schedule(static) if (n * K * N > 16384)
  for (long t = 0; t < n; t++) {
    long d = 0;
    for (; d + 16 <= N; d += 16) {
      v16f sum{};
      for (long k = 0; k < K; k++) sum = sum + weights[t * K + k] * load16(rows + place[t * K + k] * N + d);
      store16(y + t * N + d, sum);
    }
    for (; d < N; d++) {
      float sum = 0;
      for (long k = 0; k < K; k++) sum += weights[t * K + k] * to_float(rows[place[t * K + k] * N + d]);
      store1(y + t * N + d, sum);
    }
  }
}
}  // namespace

extern "C" {
// y[t] = sum_k weights[t, k] * rows[place[t, k]].
void moe_combine_f32(const float* rows, const int64_t* place, const float* w, float* y, long T, long K, long N) {
  combine(rows, place, w, y, T, K, N);
}
void moe_combine_bf16(const bf16* rows, const int64_t* place, const float* w, bf16* y, long T, long K, long N) {
  combine(rows, place, w, y, T, K, N);
}
// Rows [ends[e-1], ends[e]) of x times weight[e]^T, weight [E, N, K].
void grouped_nt_f32(const float* x, const float* w, float* y, const int32_t* ends, long E, long N, long K) {
  for (long e = 0, first = 0; e < E; first = ends[e++])
    if (ends[e] > first) nt_f32(x + first * K, K, w + e * N * K, y + first * N, N, nullptr, ends[e] - first, N, K);
}
void grouped_nt_bf16(const bf16* x, const bf16* w, bf16* y, const int32_t* ends, long E, long N, long K) {
  for (long e = 0, first = 0; e < E; first = ends[e++])
    if (ends[e] > first) nt_bf16(x + first * K, K, w + e * N * K, y + first * N, N, nullptr, ends[e] - first, N, K);
}
}
