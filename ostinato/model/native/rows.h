// What is done to one row: norms, rotary positions, gated activations, the low-rank half of an adapter.
//
// Each is compiled once, in rows.cpp, and called by the single kernels and by the fused step alike: with contracted
// multiply-adds, two inlined copies need not round alike.
#pragma once
#include "gemm.h"

// y = x / rms(x) * weight, rounded to T before the weight as Hugging Face does.
template <class T> void normalise(const T* x, const T* weight, T* y, long D, float eps);
// y = a + b; y may be one of them.
template <class T> void add_row(const T* a, const T* b, T* y, long D);
template <class T> void scale_row(T* y, float scale, long D);
// Rotate-half of H heads side by side; cos and sin [D] in T's type. y may be x.
template <class T> void rotate(const T* x, const T* cos, const T* sin, T* y, long H, long D);
// y[f] = silu(g[f]) * g[F + f]; the silu is rounded to T first, as torch does.
template <class T> void silu_row(const T* g, T* y, long F);
// low[m] = round(scale * round(x[m] a^T)) for a [R, K]; rows of low are `ldl` apart.
template <class T>
void project_low(const RowsOf<T>& x, const Matrix& a, float scale, T* low, long ldl, long M, long R, long K);
