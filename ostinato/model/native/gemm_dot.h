// Products for every instruction set, with sums in fp32: y[M, N] = x[M, K] w[N, K]^T, nothing of w packed.
//
// "dot": the lanes run along K and are summed at the end; a tile of rows of x and rows of w fills the registers.
// "short" (small K, as the second product of an adapter has it): the lanes are columns, and K is summed in order.
// Which of the two depends on K alone, and neither lets a row see another, so a row's result does not depend on M.
// w in bf16 is widened in registers, its values at even places first and then those at odd ones; x lies in fp32, in the
// same order.
#pragma once
#include <type_traits>

#include "gemm.h"

namespace {

// ---- rows of x as fp32

// Values of K that a step takes.
template <class W> constexpr long step() { return std::is_same<W, float>::value ? LANES : 2 * LANES; }
template <class W> inline long padded(long K) { return (K + step<W>() - 1) / step<W>() * step<W>(); }

// K values in the order in which a step of W takes them; zeros up to the end of the last step.
inline void widen_row(const float* from, long K, float* to, const float*) {
  memcpy(to, from, K * sizeof(float));
  std::fill(to + K, to + padded<float>(K), 0.0f);
}
inline void widen_row(const bf16* from, long K, float* to, const float*) {
  long k = 0;
  for (; k + LANES <= K; k += LANES) store(to + k, load(from + k));
  for (; k < K; k++) to[k] = to_float(from[k]);
  std::fill(to + K, to + padded<float>(K), 0.0f);
}
template <class T> inline void widen_row(const T* from, long K, float* to, const bf16*) {
  for (long k = 0; k < padded<bf16>(K); k += 2 * LANES)
    if (K - k >= 2 * LANES)
      for (long i = 0; i < LANES; i++) {
        to[k + i] = to_float(from[k + 2 * i]);
        to[k + LANES + i] = to_float(from[k + 2 * i + 1]);
      }
    else
      for (long i = 0; i < LANES; i++) {
        to[k + i] = k + 2 * i < K ? to_float(from[k + 2 * i]) : 0.0f;
        to[k + LANES + i] = k + 2 * i + 1 < K ? to_float(from[k + 2 * i + 1]) : 0.0f;
      }
}

// Rows [m, m + count) of x as W's products read them.
template <class W, class T> struct Wide {
  const float* base;
  long stride;
  const int32_t* pick = nullptr;
  Wide(const RowsOf<T>& x, long m, long count, long K) : stride(padded<W>(K)) {
    if constexpr (std::is_same<T, float>::value && std::is_same<W, float>::value)
      if (K % LANES == 0) {  // they are what is needed
        base = x.pick ? x.base : x.base + m * x.stride;
        stride = x.stride;
        pick = x.pick ? x.pick + m : nullptr;
        return;
      }
    float* to = scratch<float, PACKED>(count * stride);
    for (long i = 0; i < count; i++) widen_row(x[m + i], K, to + i * stride, (const W*)nullptr);
    base = to;
  }
  const float* operator[](long m) const { return base + (pick ? long(pick[m]) : m) * stride; }
};

// ---- what becomes of four sums

typedef uint32_t vec4u __attribute__((vector_size(16)));
typedef uint16_t vec4h __attribute__((vector_size(8)));

inline vec4 load4(const float* p, long some) {
  vec4 v{};
  if (some == 4) memcpy(&v, p, 16);
  else memcpy(&v, p, some * sizeof(float));
  return v;
}
inline vec4 load4(const bf16* p, long some) {
  vec4h h{};
  if (some == 4) memcpy(&h, p, 8);
  else memcpy(&h, p, some * sizeof(bf16));
  return (vec4)(__builtin_convertvector(h, vec4u) << 16);
}
inline void store4(float* p, vec4 v, long some) {
  if (some == 4) memcpy(p, &v, 16);
  else memcpy(p, &v, some * sizeof(float));
}
inline void store4(bf16* p, vec4 v, long some) {
  const vec4u u = (vec4u)v, nan = (vec4u)(v != v), rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  const vec4h h = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), vec4h);
  if (some == 4) memcpy(p, &h, 8);
  else memcpy(p, &h, some * sizeof(bf16));
}

// From sums of columns [n, n + some) to y: times scale (of codes), plus bias, rounded to Y once.
template <class Y> struct Finish4 {
  vec4 scale, offset;
  long some;
  bool add;
  template <class T> Finish4(const Product<T, Y>& p, long n, long columns)
      : scale(p.w.scale ? load4(p.w.scale + n, std::min(4L, columns)) : vec4{} + 1.0f),
        offset(p.bias ? load4(p.bias + n, std::min(4L, columns)) : vec4{}), some(std::min(4L, columns)), add(p.add) {}
  void operator()(vec4 sums, Y* y) const {
    sums = sums * scale + offset;
    if (add) sums = sums + load4(y, some);
    store4(y, sums, some);
  }
};

// ---- dot form

constexpr int ROWS = REGISTERS == 32 ? 6 : 3, COLUMNS = 4;  // ROWS * COLUMNS sums, ROWS of x and one of w in registers
constexpr int LONE = 8;  // columns for a single row of x: fewer sums than that wait for each other
constexpr long NEAR = 4 << 20;  // bytes that some cache holds: there the processor's own fetching is faster than ours

// Once for every line of memory: the rows of w that come next.
template <class W> inline void fetch_ahead(const W* w, long k) {
  if (k * sizeof(W) % 64 == 0) __builtin_prefetch(w + k);
}

template <int M, int N, bool FETCH>
inline void add_steps(const float* const* x, const float* const* w, long from, long to, long ahead, vec sums[M][N]) {
#pragma GCC unroll 2
  for (long k = from; k < to; k += LANES) {
    vec a[M];
    for (int m = 0; m < M; m++) a[m] = load(x[m] + k);
    for (int n = 0; n < N; n++) {
      const vec b = load(w[n] + k);
      if (FETCH) fetch_ahead(w[n] + ahead, k);
      for (int m = 0; m < M; m++) sums[m][n] += a[m] * b;
    }
  }
}
template <int M, int N, bool FETCH>
inline void add_steps(const float* const* x, const bf16* const* w, long from, long to, long ahead, vec sums[M][N]) {
  for (long k = from; k < to; k += 2 * LANES) {
    vec a[M];
    for (int m = 0; m < M; m++) a[m] = load(x[m] + k);
    for (int n = 0; n < N; n++) {
      const vec b = halves(w[n] + k).even;
      if (FETCH) fetch_ahead(w[n] + ahead, k);
      for (int m = 0; m < M; m++) sums[m][n] += a[m] * b;
    }
    for (int m = 0; m < M; m++) a[m] = load(x[m] + k + LANES);
    for (int n = 0; n < N; n++) {
      const vec b = halves(w[n] + k).odd;
      for (int m = 0; m < M; m++) sums[m][n] += a[m] * b;
    }
  }
}

// M rows of x times N rows of w, of which the last of `columns` stands in for those that are not there.
template <int M, int N, bool FETCH, class W, class Y>
void dot_tile(const float* const* x, const W* w, long K, const Finish4<Y>* finish, long columns, Y* y, long ldy) {
  const W* rows[N];
  for (long n = 0; n < N; n++) rows[n] = w + std::min(n, columns - 1) * K;
  vec sums[M][N] = {};
  const long full = K / step<W>() * step<W>();
  add_steps<M, N, FETCH>(x, rows, 0, full, N * K, sums);
  if (full < K) {
    W rest[N][step<W>()] = {};
    const W* last[N];
    const float* end[M];
    for (int n = 0; n < N; n++) memcpy(rest[n], rows[n] + full, (K - full) * sizeof(W)), last[n] = rest[n];
    for (int m = 0; m < M; m++) end[m] = x[m] + full;
    add_steps<M, N, false>(end, last, 0, step<W>(), 0, sums);
  }
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N && n < columns; n += 4) finish[n / 4](sums4(&sums[m][n]), y + m * ldy + n);
}

template <int M, bool FETCH, class W, class Y>
inline void dot_rows(long rows, const float* const* x, const W* w, long K, const Finish4<Y>* finish, long columns,
                     Y* y, long ldy) {
  if (rows == M) return dot_tile<M, COLUMNS, FETCH>(x, w, K, finish, columns, y, ldy);
  if constexpr (M > 1) dot_rows<M - 1, FETCH>(rows, x, w, K, finish, columns, y, ldy);
}

// UNIT rows of w from n on, in a type that is multiplied.
inline const float* plain_rows(const float* w, long n, long K) { return w + n * K; }
inline const bf16* plain_rows(const bf16* w, long n, long K) { return w + n * K; }
template <class C> inline const bf16* plain_rows(const C* w, long n, long K) {
  return widen_rows(w, n, K, scratch<bf16, WIDENED>(UNIT * K));
}
template <class C> using PlainType = typename std::conditional<std::is_same<C, float>::value, float, bf16>::type;

// A single row: w is read once, and nothing else takes time.
template <class C, class T, class Y> void dot_one(const Product<T, Y>& p, long first, long last) {
  using W = PlainType<C>;
  const Wide<W, T> x(p.x, 0, 1, p.K);
  const float* row[1] = {x[0]};
  const bool far = p.N * p.K * long(sizeof(W)) > NEAR;
  for (long n0 = first; n0 < last; n0 += UNIT) {
    const W* w = plain_rows((const C*)p.w.data, n0, p.K);
    for (long n = n0; n < std::min(n0 + UNIT, last); n += LONE, w += LONE * p.K) {
      const long columns = std::min(long(LONE), last - n);
      const Finish4<Y> finish[2] = {{p, n, columns}, {p, columns > 4 ? n + 4 : n, columns > 4 ? columns - 4 : columns}};
      if (far) dot_tile<1, LONE, true>(row, w, p.K, finish, columns, p.y + n, p.ldy);
      else dot_tile<1, LONE, false>(row, w, p.K, finish, columns, p.y + n, p.ldy);
    }
  }
}

template <class C, class T, class Y> void dot(const Product<T, Y>& p, long first, long last) {
  using W = PlainType<C>;
  if (p.M == 1) return dot_one<C>(p, first, last);
  // rows of x that stay in the second cache while w passes by
  const long block = std::max(4L * ROWS, (128 << 10) / long(sizeof(float)) / p.K);
  for (long m0 = 0; m0 < p.M; m0 += block) {
    const long count = std::min(block, p.M - m0);
    const Wide<W, T> x(p.x, m0, count, p.K);
    for (long n0 = first; n0 < last; n0 += UNIT) {
      const W* w = plain_rows((const C*)p.w.data, n0, p.K);
      for (long n = n0; n < std::min(n0 + UNIT, last); n += COLUMNS, w += COLUMNS * p.K) {
        const long columns = std::min(long(COLUMNS), last - n);
        const Finish4<Y> finish(p, n, columns);
        for (long m = 0, some; m < count; m += some) {
          const long left = count - m;
          some = left <= ROWS ? left : left < 2 * ROWS ? (left + 1) / 2 : ROWS;
          const float* rows[ROWS];
          for (long i = 0; i < some; i++) rows[i] = x[m + i];
          Y* y = p.y + (m0 + m) * p.ldy + n;
          // the first rows fetch the columns that come next: memory and arithmetic overlap
          if (m == 0) dot_rows<ROWS, true>(some, rows, w, p.K, &finish, columns, y, p.ldy);
          else dot_rows<ROWS, false>(some, rows, w, p.K, &finish, columns, y, p.ldy);
        }
      }
    }
  }
}

// ---- short form

constexpr long SHORT = 128;  // the largest K whose lane sums take as long as turning w does
constexpr int WIDE = 2, TALL = REGISTERS == 32 ? 8 : 4;  // a tile: TALL rows, WIDE vectors of columns
constexpr long BROAD = WIDE * LANES;

// w[columns][K] -> panel[K][BROAD]; where there is no column, the last of them.
template <class W> inline void turn_columns(const W* w, long K, long columns, float* panel) {
  for (long n = 0; n < BROAD; n += 4) {
    const W* rows[4];
    for (long i = 0; i < 4; i++) rows[i] = w + std::min(n + i, columns - 1) * K;
    long k = 0;
    for (; k + 4 <= K; k += 4) {
      vec4 r[4];
      for (int i = 0; i < 4; i++) r[i] = load4(rows[i] + k, 4);
      transpose4(r);
      for (int i = 0; i < 4; i++) store4(panel + (k + i) * BROAD + n, r[i], 4);
    }
    for (; k < K; k++)
      for (int i = 0; i < 4; i++) panel[k * BROAD + n + i] = to_float(rows[i][k]);
  }
}

template <class T> inline void read_lanes(const T* from, long columns, vec* to) {
  T buffer[BROAD] = {};
  if (columns < BROAD) memcpy(buffer, from, columns * sizeof(T));
  for (int v = 0; v < WIDE; v++) to[v] = load((columns < BROAD ? buffer : from) + v * LANES);
}
template <class Y> inline void write_lanes(Y* to, long columns, const vec* from) {
  if (columns >= BROAD)
    for (int v = 0; v < WIDE; v++) store(to + v * LANES, from[v]);
  else {
    Y buffer[BROAD];
    for (int v = 0; v < WIDE; v++) store(buffer + v * LANES, from[v]);
    memcpy(to, buffer, columns * sizeof(Y));
  }
}

template <int M, class T, class Y>
void short_tile(const Product<T, Y>& p, const Wide<float, T>& x, long m0, long m, const float* panel, long n,
                long columns) {
  const float* rows[M];
  vec sums[M][WIDE] = {};
  for (int i = 0; i < M; i++) rows[i] = x[m + i];
  for (long k = 0; k < p.K; k++) {
    vec b[WIDE];
    for (int v = 0; v < WIDE; v++) b[v] = load(panel + k * BROAD + v * LANES);
    for (int i = 0; i < M; i++)
      for (int v = 0; v < WIDE; v++) sums[i][v] += rows[i][k] * b[v];
  }
  vec offset[WIDE] = {}, before[WIDE];
  if (p.bias) read_lanes(p.bias + n, columns, offset);
  for (int i = 0; i < M; i++) {
    Y* y = p.y + (m0 + m + i) * p.ldy + n;
    if (p.bias)
      for (int v = 0; v < WIDE; v++) sums[i][v] += offset[v];
    if (p.add) {
      read_lanes(y, columns, before);
      for (int v = 0; v < WIDE; v++) sums[i][v] += before[v];
    }
    write_lanes(y, columns, sums[i]);
  }
}

template <int M, class T, class Y>
inline void short_rows(long rows, const Product<T, Y>& p, const Wide<float, T>& x, long m0, long m, const float* panel,
                       long n, long columns) {
  if (rows == M) return short_tile<M>(p, x, m0, m, panel, n, columns);
  if constexpr (M > 1) short_rows<M - 1>(rows, p, x, m0, m, panel, n, columns);
}

// w is plain: what has so few inputs is never quantised.
template <class W, class T, class Y> void short_form(const Product<T, Y>& p, long first, long last) {
  constexpr long BLOCK = 256;  // rows of x in the first cache
  float* panel = scratch<float, PANEL_OF_W>(SHORT * BROAD);
  for (long m0 = 0; m0 < p.M; m0 += BLOCK) {
    const long count = std::min(BLOCK, p.M - m0);
    const Wide<float, T> x(p.x, m0, count, p.K);
    for (long n = first; n < last; n += BROAD) {
      const long columns = std::min(BROAD, last - n);
      turn_columns((const W*)p.w.data + n * p.K, p.K, columns, panel);
      for (long m = 0; m < count; m += TALL)
        short_rows<TALL>(std::min(long(TALL), count - m), p, x, m0, m, panel, n, columns);
    }
  }
}

}  // namespace
