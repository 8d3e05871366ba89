// Norms, rotary positions, gated activations: see rows.h.
//
// Every row depends on its own inputs only and is summed in a fixed order, so its result does not depend on what
// else is in the batch, on threads, or on how a prompt was cut into chunks.

#include "rows.h"

template <class T>
void normalise(const T* x, const T* weight, T* y, long D, float eps) {
  vec squares{};
  long d = 0;
  for (; d + LANES <= D; d += LANES) { vec v = load(x + d); squares = squares + v * v; }
  float sum = lane_sum(squares);
  for (; d < D; d++) sum += to_float(x[d]) * to_float(x[d]);
  const float inverse = 1.0f / std::sqrt(sum / D + eps);
  for (d = 0; d + LANES <= D; d += LANES) store(y + d, rounded_to<T>(load(x + d) * inverse) * load(weight + d));
  for (; d < D; d++) {
    T rounded;
    store1(&rounded, to_float(x[d]) * inverse);
    store1(y + d, to_float(rounded) * to_float(weight[d]));
  }
}

template <class T> void add_row(const T* a, const T* b, T* y, long D) {
  long d = 0;
  for (; d + LANES <= D; d += LANES) store(y + d, load(a + d) + load(b + d));
  for (; d < D; d++) store1(y + d, to_float(a[d]) + to_float(b[d]));
}

template <class T> void scale_row(T* y, float scale, long D) {
  for (long d = 0; d < D; d++) store1(y + d, to_float(y[d]) * scale);
}

template <class T> void rotate(const T* x, const T* cos, const T* sin, T* y, long H, long D) {
  const long half = D / 2;
  for (long h = 0; h < H; h++, x += D, y += D) {
    const T *a = x, *b = x + half;
    long d = 0;
    for (; d + LANES <= half; d += LANES) {
      vec u = load(a + d), v = load(b + d);
      store(y + d, u * load(cos + d) - v * load(sin + d));
      store(y + half + d, v * load(cos + half + d) + u * load(sin + half + d));
    }
    for (; d < half; d++) {
      float u = to_float(a[d]), v = to_float(b[d]);
      store1(y + d, u * to_float(cos[d]) - v * to_float(sin[d]));
      store1(y + half + d, v * to_float(cos[half + d]) + u * to_float(sin[half + d]));
    }
  }
}

template <class T> void silu_row(const T* g, T* y, long F) {
  const T *a = g, *b = g + F;
  long f = 0;
  for (; f + LANES <= F; f += LANES) {
    vec v = load(a + f);
    vec m = max(vec{} - 87.0f, v);
    store(y + f, rounded_to<T>(v / (1.0f + exp(vec{} - m))) * load(b + f));
  }
  for (; f < F; f++) {
    float v = to_float(a[f]);
    T rounded;
    store1(&rounded, v / (1.0f + std::exp(-v)));
    store1(y + f, to_float(rounded) * to_float(b[f]));
  }
}

template <class T>
void project_low(const RowsOf<T>& x, const Matrix& a, float scale, T* low, long ldl, long M, long R, long K) {
  multiply(Product<T, T>{x, a, nullptr, low, ldl, M, R, K});
  for (long m = 0; m < M; m++) scale_row(low + m * ldl, scale, R);
}

#define INSTANCES(T)                                                            \
  template void normalise(const T*, const T*, T*, long, float);                 \
  template void add_row(const T*, const T*, T*, long);                          \
  template void scale_row(T*, float, long);                                     \
  template void rotate(const T*, const T*, const T*, T*, long, long);           \
  template void silu_row(const T*, T*, long);                                   \
  template void project_low(const RowsOf<T>&, const Matrix&, float, T*, long, long, long, long);
INSTANCES(float)
INSTANCES(bf16)

namespace {

template <class T>
void rms_norm(const T* x, long ldx, const T* weight, T* y, long T_, long D, float eps) {
#pragma omp parallel for schedule(static) if (T_ * D > 16384)
  for (long t = 0; t < T_; t++) normalise(x + t * ldx, weight, y + t * D, D, eps);
}

// sum = x + residual (rounded to T), y = norm(sum).
template <class T>
void add_rms_norm(const T* x, const T* residual, const T* weight, T* y, T* sum, long T_, long D, float eps) {
#pragma omp parallel for schedule(static) if (T_ * D > 16384)
  for (long t = 0; t < T_; t++) {
    add_row(x + t * D, residual + t * D, sum + t * D, D);
    normalise(sum + t * D, weight, y + t * D, D, eps);
  }
}

// Heads [0, H) of each row; cos and sin are [T, D] in T's type.
template <class T>
void rope(const T* x, long ldx, const T* cos, const T* sin, T* y, long T_, long H, long D) {
#pragma omp parallel for schedule(static) if (T_ * H * D > 16384)
  for (long t = 0; t < T_; t++) rotate(x + t * ldx, cos + t * D, sin + t * D, y + t * H * D, H, D);
}

template <class T>
void silu_mul(const T* g, T* y, long T_, long F) {
#pragma omp parallel for schedule(static) if (T_ * F > 16384)
  for (long t = 0; t < T_; t++) silu_row(g + t * 2 * F, y + t * F, F);
}

}  // namespace

#define FOR_TYPE(SUFFIX, T)                                                                                          \
  void rms_norm_##SUFFIX(const T* x, long ldx, const T* w, T* y, long n, long D, double eps) {                       \
    rms_norm(x, ldx, w, y, n, D, float(eps));                                                                        \
  }                                                                                                                  \
  void add_rms_norm_##SUFFIX(const T* x, const T* r, const T* w, T* y, T* sum, long n, long D, double eps) {         \
    add_rms_norm(x, r, w, y, sum, n, D, float(eps));                                                                 \
  }                                                                                                                  \
  void rope_##SUFFIX(const T* x, long ldx, const T* cos, const T* sin, T* y, long n, long H, long D) {               \
    rope(x, ldx, cos, sin, y, n, H, D);                                                                              \
  }                                                                                                                  \
  void silu_mul_##SUFFIX(const T* g, T* y, long n, long F) { silu_mul(g, y, n, F); }

extern "C" {
FOR_TYPE(f32, float)
FOR_TYPE(bf16, bf16)
}
