// Products that a team of threads shares: every thread calls, each computes its own columns.
#pragma once
#include "codes.h"

// Rows of a matrix, in order or picked by index.
template <class T> struct RowsOf {
  const T* base;
  long stride;
  const int32_t* pick = nullptr;
  const T* operator[](long m) const { return base + (pick ? long(pick[m]) : m) * stride; }
};

// y[M, N] = x w^T + bias, or y += x w^T + bias; w [N, K] and bias [N] as torch has them. Codes are for bf16 only; w in
// bf16 under fp32 rows is widened as it streams by.
template <class T, class Y> struct Product {
  RowsOf<T> x;
  Matrix w;
  const T* bias;
  Y* y;
  long ldy, M, N, K;
  bool add = false;
};

constexpr long UNIT = CODE_ROWS;  // columns that stay together when threads share a product
inline long units(long columns) { return (columns + UNIT - 1) / UNIT; }

// Columns [first, last) by the calling thread alone; `first` is a multiple of UNIT. What a row becomes depends
// on nothing but the row: not on M, not on the range, not on who computes it. Defined for (float, float), (bf16, bf16)
// and (bf16, float).
template <class T, class Y> void multiply(const Product<T, Y>& p, long first, long last);
template <class T, class Y> void multiply(const Product<T, Y>& p) { multiply(p, 0, p.N); }

// The calling thread's share of all columns.
template <class T, class Y> void multiply_share(const Product<T, Y>& p) {
  long first, last;
  share(units(p.N), first, last);
  multiply(p, first * UNIT, std::min(last * UNIT, p.N));
}

// Memory of the calling thread, one for each use.
enum Use { PACKED, WIDENED, PANEL_OF_W, KEPT };
template <class T, Use> inline T* scratch(long count) {
  static thread_local std::vector<T> memory;
  if (long(memory.size()) < count) memory.resize(count);
  return memory.data();
}
