// What the tests of the kernels share: numbers with a bound on their rounding, random inputs, and a count of failures.
#pragma once
#include <omp.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

struct bf16 { uint16_t bits; };

inline double wide(double v) { return v; }
inline double wide(float v) { return v; }
inline double wide(bf16 v) {
  const uint32_t u = uint32_t(v.bits) << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
inline void set(float& to, double v) { to = float(v); }
inline void set(bf16& to, double v) {  // to nearest even
  const float f = float(v);
  uint32_t u;
  memcpy(&u, &f, 4);
  to.bits = f != f ? 0x7fc0 : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// Unit roundoff: half the distance of neighbours, relative.
template <class T> constexpr double unit() { return sizeof(T) == 2 ? 0x1p-8 : 0x1p-24; }
constexpr double U = 0x1p-24;  // of the sums, which are fp32 for every type

// A value in double, and how far fp32 arithmetic in any order may end from it.
struct Approx {
  double value = 0, error = 0;
  double most() const { return std::fabs(value) + error; }
};
inline Approx exactly(double v) { return {v, 0}; }
template <class T> Approx rounded(Approx a) { return {a.value, a.error + unit<T>() * a.most()}; }
inline Approx operator+(Approx a, Approx b) {
  const Approx sum{a.value + b.value, a.error + b.error};
  return rounded<float>(sum);
}
inline Approx operator*(Approx a, Approx b) {
  const Approx product{a.value * b.value, a.most() * b.most() - std::fabs(a.value * b.value)};
  return rounded<float>(product);
}

// A sum of products in fp32: n terms in any order, with or without fused multiply-adds, stray from the true sum by at
// most n U / (1 - n U) of the sum of their sizes (Higham, Accuracy and Stability, 4.2). Twice that, because Arm's bf16
// instruction rounds to odd, which may be off by two units.
class Sum {
  double value_ = 0, size_ = 0, error_ = 0;
  long terms_ = 0;

 public:
  void add(Approx a, Approx b) {
    const double size = a.most() * b.most();
    value_ += a.value * b.value;
    size_ += size;
    error_ += size - std::fabs(a.value * b.value);
    terms_++;
  }
  Approx total() const { return {value_, error_ + 2 * (terms_ + 1) * U * size_}; }
};

struct Random {
  std::mt19937 engine;
  explicit Random(unsigned seed) : engine(seed) {}
  double uniform() { return (engine() + 0.5) * 0x1p-32; }
  double centred() { return 2 * uniform() - 1; }
  long below(long n) { return long(uniform() * double(n)); }
  template <class T> std::vector<T> vector(long n, double size = 1) {
    std::vector<T> out(n);
    for (T& v : out) set(v, size * centred());
    return out;
  }
};

// Counts what a test looked at; says the first failures and the last line of the test.
class Test {
  const char* name_;
  long checks_ = 0, failures_ = 0;
  static long& all() { static long failures = 0; return failures; }

 public:
  explicit Test(const char* name) : name_(name) {}
  ~Test() {
    printf("%-6s %s: %ld checks\n", failures_ ? "FAILED" : "ok", name_, checks_);
    fflush(stdout);
    all() += failures_;
  }
  static long failures() { return all(); }

  void that(bool good, const char* what, long a = 0, long b = 0, long c = 0) {
    checks_++;
    if (good || failures_++ >= 5) return;
    printf("  %s: %s (%ld, %ld, %ld)\n", name_, what, a, b, c);
  }
  void near(double got, Approx want, const char* what, long a = 0, long b = 0, long c = 0) {
    const bool good = std::fabs(got - want.value) <= want.error;  // false for NaN
    checks_++;
    if (good || failures_++ >= 5) return;
    printf("  %s: %s (%ld, %ld, %ld) is %.9g, not %.9g +- %.3g\n", name_, what, a, b, c, got, want.value, want.error);
  }
  template <class T> void same(const T* a, const T* b, long n, const char* what, long i = 0, long j = 0, long k = 0) {
    that(memcmp(a, b, n * sizeof(T)) == 0, what, i, j, k);
  }
};

// The law that every kernel keeps: what a row becomes depends on no other row and on no number of threads.
constexpr int THREADS[] = {1, 2, 3};
