// Matrix products.

#include "kernels.h"

namespace {

constexpr long MOST = 70;  // rows
constexpr long SOME_ROWS[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 15, 16, 17, 24, 31, 33, 47, 48, 49, 63, 64, 65, 70};
constexpr long SHARED_ROWS[] = {1, 5, 17, 48, 70};           // by several threads
constexpr long DEPTHS[] = {1, 2, 7, 16, 33, 64, 98, 129};  // odd, shorter than a vector, not a multiple of one
constexpr long COLUMNS[] = {1, 16, 19, 31, 50};
constexpr long PAD = 3;  // columns that belong to somebody else

// x [MOST, K] in rows K + PAD apart, with NaN between them: whoever reads it in a product spoils the result.
template <class T> std::vector<T> padded(Random& random, long rows, long K) {
  std::vector<T> x = random.vector<T>(rows * (K + PAD));
  for (long m = 0; m < rows; m++)
    for (long k = 0; k < PAD; k++) set(x[m * (K + PAD) + K + k], NAN);
  return x;
}

// call(x, M, y) computes y [M, N] in rows N + PAD apart. Compares all MOST rows with want(m, n), then every smaller
// number of rows, and every row alone, with these bits, under all numbers of threads.
template <class X, class Y, class Call, class Want>
void check(Test& test, const std::vector<X>& x, long ldx, long N, long K, const std::vector<Y>& before, Call call,
           Want want) {
  const long ldy = N + PAD;
  std::vector<Y> all = before, y;
  omp_set_num_threads(1);
  call(x.data(), MOST, all.data());
  for (long m = 0; m < MOST; m++) {
    for (long n = 0; n < N; n++) test.near(wide(all[m * ldy + n]), want(m, n), "(row, column, depth)", m, n, K);
    test.same(&all[m * ldy + N], &before[m * ldy + N], PAD, "a write behind (row, columns, depth)", m, N, K);
  }
  auto some = [&](long M) {
    y = before;
    call(x.data(), M, y.data());
    test.same(y.data(), all.data(), M * ldy, "other bits with (rows, columns, depth)", M, N, K);
    test.same(y.data() + M * ldy, before.data() + M * ldy, (MOST - M) * ldy, "a write below", M, N, K);
  };
  for (long M : SOME_ROWS) some(M);
  for (int threads : THREADS) {
    omp_set_num_threads(threads);
    for (long M : SHARED_ROWS) some(M);
  }
  omp_set_num_threads(1);
  for (long m = 0; m < MOST; m++) {
    y = before;
    std::copy_n(&before[m * ldy], ldy, y.begin());
    call(x.data() + m * ldx, 1, y.data());
    test.same(y.data(), &all[m * ldy], N, "other bits alone (row, columns, depth)", m, N, K);
  }
}

template <class X, class W> Approx dot(const X* x, const W* w, long K) {
  Sum sum;
  for (long k = 0; k < K; k++) sum.add(exactly(wide(x[k])), exactly(wide(w[k])));
  return sum.total();
}

template <class X, class W, class Y, class Kernel> void nt(const char* name, Kernel kernel) {
  Test test(name);
  Random random(1);
  for (long K : DEPTHS)
    for (long N : COLUMNS) {
      const auto x = padded<X>(random, MOST, K);
      const auto w = random.vector<W>(N * K);
      const auto bias = random.vector<X>(N);
      const auto before = random.vector<Y>(MOST * (N + PAD));
      const X* b = K % 2 == N % 2 ? bias.data() : nullptr;
      check(test, x, K + PAD, N, K, before,
            [&](const X* from, long M, Y* y) { kernel(from, K + PAD, w.data(), y, N + PAD, b, M, N, K); },
            [&](long m, long n) {
              const Approx product = dot(&x[m * (K + PAD)], &w[n * K], K);
              return rounded<Y>(b ? product + exactly(wide(b[n])) : product);
            });
    }
}

template <class T> void nt_add(const char* name) {
  Test test(name);
  Random random(2);
  for (long K : {1L, 4L, 16L, 33L})
    for (long N : COLUMNS) {
      const auto x = random.vector<T>(MOST * K), w = random.vector<T>(N * K);
      const auto before = random.vector<T>(MOST * (N + PAD));
      check(test, x, K, N, K, before,
            [&](const T* from, long M, T* y) { Kernels<T>::nt_add(from, w.data(), y, N + PAD, M, N, K); },
            [&](long m, long n) {
              return rounded<T>(dot(&x[m * K], &w[n * K], K) + exactly(wide(before[m * (N + PAD) + n])));
            });
    }
}

// Codes of 8 bits [N, K] in tiles, and their values.
std::vector<double> draw_codes(Random& random, long format, long N, long K, std::vector<uint8_t>& packed) {
  packed.assign(code_bytes(N, K), 0);
  std::vector<double> w(N * K);
  for (long n = 0; n < N; n++)
    for (long k = 0; k < K; k++) {
      const uint8_t code = random_code(random, format);
      packed[place_of_code(n, k, K)] = code;
      w[n * K + k] = value_of_code(code, format);
    }
  return w;
}

template <class T, class Kernel> void codes(const char* name, long format, Kernel kernel) {
  Test test(name);
  Random random(3);
  for (long K : {1L, 2L, 7L, 16L, 33L, 66L, 128L, 257L})
    for (long N : COLUMNS) {
      const auto x = padded<T>(random, MOST, K);
      const auto bias = random.vector<T>(N);
      auto scale = random.vector<float>(N);
      for (float& s : scale) s = 0.01f * (1.5f + s);
      std::vector<uint8_t> packed;
      const auto w = draw_codes(random, format, N, K, packed);
      const auto before = random.vector<T>(MOST * (N + PAD));
      const T* b = K % 2 == N % 2 ? bias.data() : nullptr;
      check(test, x, K + PAD, N, K, before,
            [&](const T* from, long M, T* y) {
              kernel(from, K + PAD, packed.data(), scale.data(), format, y, N + PAD, b, M, N, K);
            },
            [&](long m, long n) {
              std::vector<Approx> row;
              for (long k = 0; k < K; k++) row.push_back(exactly(wide(x[m * (K + PAD) + k])));
              row = inputs_of_codes<T>(row, format);
              Sum sum;
              for (long k = 0; k < K; k++) sum.add(row[k], exactly(w[n * K + k]));
              const Approx product = sum.total() * exactly(scale[n]);
              return rounded<T>(b ? product + exactly(wide(b[n])) : product);
            });
    }
}

void nn_of_codes(const char* name) {
  Test test(name);
  Random random(5);
  for (long N : {1L, 16L, 50L, 270L})  // the summed dimension
    for (long K : {1L, 17L, 64L, 130L}) {
      const auto x = padded<float>(random, MOST, N);
      const auto scale = random.vector<float>(N);
      std::vector<uint8_t> packed;
      const auto w = draw_codes(random, 1, N, K, packed);
      const auto before = random.vector<float>(MOST * (K + PAD));
      check(test, x, N + PAD, K, N, before,
            [&](const float* from, long M, float* y) {
              nn_codes_f32(from, N + PAD, packed.data(), scale.data(), y, K + PAD, M, N, K);
            },
            [&](long m, long k) {
              Sum sum;
              for (long n = 0; n < N; n++)
                sum.add(exactly(x[m * (N + PAD) + n]), exactly(scale[n]) * exactly(w[n * K + k]));
              return sum.total();
            });
    }
}

void nn(const char* name) {
  Test test(name);
  Random random(4);
  for (long N : {2L, 16L, 50L, 64L, 770L, 800L})  // the summed dimension
    for (long K : {1L, 17L, 64L, 130L}) {
      if (N >= 770 && K > 64) continue;
      const auto x = padded<bf16>(random, MOST, N), w = random.vector<bf16>(N * K);
      const auto before = random.vector<bf16>(MOST * (K + PAD));
      check(test, x, N + PAD, K, N, before,
            [&](const bf16* from, long M, bf16* y) { nn_bf16(from, N + PAD, w.data(), y, K + PAD, M, N, K); },
            [&](long m, long k) {
              Sum sum;
              for (long n = 0; n < N; n++) sum.add(exactly(wide(x[m * (N + PAD) + n])), exactly(wide(w[n * K + k])));
              return rounded<bf16>(sum.total());
            });
    }
}

}  // namespace

void test_products() {
  nt<float, float, float>("nt_f32", nt_f32);
  nt<bf16, bf16, bf16>("nt_bf16", nt_bf16);
  nt<bf16, bf16, float>("nt_bf16_f32", nt_bf16_f32);
  if (nt_f32_bf16) nt<float, bf16, float>("nt_f32_bf16", nt_f32_bf16);
  else puts("absent nt_f32_bf16");
  nt_add<float>("nt_add_f32");
  nt_add<bf16>("nt_add_bf16");
  codes<bf16>("nt_codes_bf16, int8", 1, nt_codes_bf16);
  codes<bf16>("nt_codes_bf16, e4m3", 2, nt_codes_bf16);
  codes<float>("nt_codes_f32, int8", 1, nt_codes_f32);
  nn_of_codes("nn_codes_f32");
  if (nn_bf16) nn("nn_bf16");
  else puts("absent nn_bf16");
}
