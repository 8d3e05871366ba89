// What is done to one row: norms, rotary positions, gated activations, routing, and exp itself.

#include "kernels.h"

namespace {

constexpr long ROWS = 70;  // with WIDTHS, both sides of the size from which rows are shared by threads
constexpr long WIDTHS[] = {1, 7, 16, 33, 64, 300, 576};
constexpr double EXP = 4 * U;  // what exp may be off, relative; common.h promises 2e-7

// run(first row, rows, y) of rows `width` wide, as one call and row by row, under all numbers of threads.
template <class T, class Run> std::vector<T> lawful(Test& test, long width, Run run) {
  std::vector<T> all(ROWS * width), y(ROWS * width);
  omp_set_num_threads(1);
  run(0, ROWS, all.data());
  for (int threads : THREADS) {
    omp_set_num_threads(threads);
    run(0, ROWS, y.data());
    test.same(y.data(), all.data(), ROWS * width, "other bits with (threads, width)", threads, width);
  }
  for (long t = 0; t < ROWS; t++) {
    run(t, 1, y.data());
    test.same(y.data(), &all[t * width], width, "other bits alone (row, width)", t, width);
  }
  return all;
}

// x / sqrt(mean of squares + eps) * weight: the root halves the error of the sum, the reciprocal and three products
// round once each, and the result is rounded to T before the weight and after it.
template <class T> Approx normed(const T* x, long D, double eps, long d, double weight) {
  Sum squares;
  for (long i = 0; i < D; i++) squares.add(exactly(wide(x[i])), exactly(wide(x[i])));
  const double mean = squares.total().value / D + eps;
  const double off = squares.total().error / D / mean / 2 + 6 * U;
  const double value = wide(x[d]) / std::sqrt(mean);
  return rounded<T>(rounded<T>(Approx{value, off * std::fabs(value)}) * exactly(weight));
}

template <class T> void rms_norm() {
  Test test(sizeof(T) == 2 ? "rms_norm_bf16" : "rms_norm_f32");
  Random random(5);
  const double eps = 1e-5;
  for (long D : WIDTHS) {
    const long ldx = D + 3;
    const auto x = random.vector<T>(ROWS * ldx, 3), weight = random.vector<T>(D);
    const auto y = lawful<T>(test, D, [&](long t, long rows, T* to) {
      Kernels<T>::rms_norm(&x[t * ldx], ldx, weight.data(), to, rows, D, eps);
    });
    for (long t = 0; t < ROWS; t++)
      for (long d = 0; d < D; d++)
        test.near(wide(y[t * D + d]), normed(&x[t * ldx], D, eps, d, wide(weight[d])), "(row, feature)", t, d, D);
  }
}

template <class T> void add_rms_norm() {
  Test test(sizeof(T) == 2 ? "add_rms_norm_bf16" : "add_rms_norm_f32");
  Random random(6);
  const double eps = 1e-6;
  for (long D : WIDTHS) {
    const auto x = random.vector<T>(ROWS * D), residual = random.vector<T>(ROWS * D, 5), weight = random.vector<T>(D);
    std::vector<T> sum(ROWS * D), ignored(ROWS * D);
    const auto y = lawful<T>(test, D, [&](long t, long rows, T* to) {
      Kernels<T>::add_rms_norm(&x[t * D], &residual[t * D], weight.data(), to, ignored.data(), rows, D, eps);
    });
    lawful<T>(test, D, [&](long t, long rows, T* to) {
      Kernels<T>::add_rms_norm(&x[t * D], &residual[t * D], weight.data(), ignored.data(), to, rows, D, eps);
      if (rows == ROWS) std::copy_n(to, ROWS * D, sum.begin());
    });
    for (long t = 0; t < ROWS; t++)
      for (long d = 0; d < D; d++) {
        const long i = t * D + d;
        test.near(wide(sum[i]), rounded<T>(exactly(wide(x[i])) + exactly(wide(residual[i]))), "sum", t, d, D);
        test.near(wide(y[i]), normed(&sum[t * D], D, eps, d, wide(weight[d])), "norm of the sum", t, d, D);
      }
  }
}

template <class T> void rope() {
  Test test(sizeof(T) == 2 ? "rope_bf16" : "rope_f32");
  Random random(7);
  for (long D : {2L, 16L, 32L, 48L, 64L, 128L}) {
    const long H = 3, ldx = H * D + 5, half = D / 2;
    const auto x = random.vector<T>(ROWS * ldx), cos = random.vector<T>(ROWS * D), sin = random.vector<T>(ROWS * D);
    const auto y = lawful<T>(test, H * D, [&](long t, long rows, T* to) {
      Kernels<T>::rope(&x[t * ldx], ldx, &cos[t * D], &sin[t * D], to, rows, H, D);
    });
    for (long t = 0; t < ROWS; t++)
      for (long i = 0; i < H * D; i++) {
        const long d = i % D, other = d < half ? i + half : i - half;
        Sum sum;
        sum.add(exactly(wide(x[t * ldx + i])), exactly(wide(cos[t * D + d])));
        sum.add(exactly((d < half ? -1 : 1) * wide(x[t * ldx + other])), exactly(wide(sin[t * D + d])));
        test.near(wide(y[t * H * D + i]), rounded<T>(sum.total()), "(row, feature, head width)", t, i, D);
      }
  }
}

template <class T> void silu_mul() {
  Test test(sizeof(T) == 2 ? "silu_mul_bf16" : "silu_mul_f32");
  Random random(8);
  for (long F : WIDTHS) {
    const auto g = random.vector<T>(ROWS * 2 * F, 20);
    const auto y = lawful<T>(test, F, [&](long t, long rows, T* to) {
      Kernels<T>::silu_mul(&g[t * 2 * F], to, rows, F);
    });
    for (long t = 0; t < ROWS; t++)
      for (long f = 0; f < F; f++) {
        const double v = wide(g[t * 2 * F + f]), silu = v / (1 + std::exp(-v));
        const Approx gate = rounded<T>(Approx{silu, (EXP + 4 * U) * std::fabs(silu)});
        test.near(wide(y[t * F + f]), rounded<T>(gate * exactly(wide(g[t * 2 * F + F + f]))), "(row, feature)", t, f, F);
      }
  }
  std::vector<T> extreme(32), y(16);
  for (long i = 0; i < 16; i++) set(extreme[i], i % 2 ? 1e30 : -1e30), set(extreme[16 + i], 1);
  Kernels<T>::silu_mul(extreme.data(), y.data(), 1, 16);
  for (long i = 0; i < 16; i++)
    test.that(i % 2 ? wide(y[i]) == wide(extreme[i]) : std::fabs(wide(y[i])) < 1e-6, "silu of a huge number", i);
}

void exponential() {
  Test test("exp_f32");
  std::vector<float> x(16 * 4096), y(x.size());
  for (size_t i = 0; i < x.size(); i++) x[i] = float(-87.0 + 175.0 * double(i) / double(x.size()));
  exp_f32(x.data(), y.data(), long(x.size()));
  for (size_t i = 1; i < x.size(); i++) test.near(y[i], {std::exp(double(x[i])), EXP * std::exp(double(x[i]))}, "exp", i);
  std::fill_n(x.begin(), 16, -1000.0f);
  x[3] = -INFINITY;
  exp_f32(x.data(), y.data(), 16);
  for (int i = 0; i < 16; i++) test.that(y[i] == 0, "exp of a very negative number is 0", i);
}

void route() {
  Test test("route_rows");
  Random random(9);
  for (long E : {2L, 10L, 16L, 60L, 128L})
    for (long K = 1; K <= std::min(E, 8L); K++)
      for (long norm : {0L, 1L}) {
        const double scaling = 2.5;
        auto logits = random.vector<float>(ROWS * E, 4);
        if (E >= 10) std::fill_n(logits.begin(), E, 0.5f);  // all equal: the lowest index first
        std::vector<int32_t> ids(ROWS * K), one(K);
        std::vector<float> weights(ROWS * K), alone(K);
        route_rows(logits.data(), nullptr, ids.data(), weights.data(), ROWS, E, K, norm, scaling);
        for (long t = 0; t < ROWS; t++) {
          const float* z = &logits[t * E];
          std::vector<long> order(E);
          for (long e = 0; e < E; e++) order[e] = e;
          std::stable_sort(order.begin(), order.end(), [&](long a, long b) { return z[a] > z[b]; });
          double all = 0, chosen = 0;
          for (long e = 0; e < E; e++) all += std::exp(double(z[e]));
          for (long k = 0; k < K; k++) chosen += std::exp(double(z[order[k]]));
          for (long k = 0; k < K; k++) {
            const double want = std::exp(double(z[order[k]])) / (norm ? chosen : all) * scaling;
            const double off = 2 * EXP + (E + K + 6 + 2 * 8) * U;  // logits up to 8 apart
            test.that(ids[t * K + k] == order[k], "expert (row, place)", t, k, E);
            test.near(weights[t * K + k], {want, off * want}, "weight (row, place)", t, k, E);
          }
          route_rows(z, nullptr, one.data(), alone.data(), 1, E, K, norm, scaling);
          test.same(alone.data(), &weights[t * K], K, "other bits alone (row, experts)", t, E);
          route_rows(z, &ids[t * K], one.data(), alone.data(), 1, E, K, norm, scaling);
          test.same(alone.data(), &weights[t * K], K, "other bits where the same are given (row, experts)", t, E);
        }
      }
}

}  // namespace

void test_rows() {
  rms_norm<float>(), rms_norm<bf16>();
  add_rms_norm<float>(), add_rms_norm<bf16>();
  rope<float>(), rope<bf16>();
  silu_mul<float>(), silu_mul<bf16>();
  exponential();
  route();
}
