// The mixture of experts, in phases that a team of threads shares with a barrier between them.
#pragma once
#include "rows.h"

// The best K of E experts by softmax of the logits, best first and the lowest index among equals; their weights are
// the softmax itself, or with `norm` what it is relative to their sum; times `scaling`. With `given` [K] these are the
// experts, in that order.
void choose_experts(const float* logits, long E, long K, bool norm, float scaling, int32_t* ids, float* weights,
                    const int32_t* given = nullptr);

// Weights of all experts of a layer with their adapters (null where there are none); experts.py has the same layout.
// A shared adapter has one gate_up_a [R, D] and one down_b [D, r] for all experts.
struct Experts {
  Matrix gate_up, down;                                         // [E, 2F, D], [E, D, F]
  const void *gate_up_a, *gate_up_b, *down_a, *down_b;          // [E, R, D], [E, 2F, R], [E, r, F], [E, D, r]
  long E, F, D, R, r, shared;
  double scale;
};

// Rows of several policies of one base: those of span s end before row `last`, and begin where span s - 1 ends.
struct Span {
  int32_t last, policy;
};
struct Spans {
  const Span* at = nullptr;
  long count = 0;
  // f(policy, first row, last row + 1) for what lies in [first, last).
  template <class F> void over(long first, long last, F f) const {
    for (long s = 0, begin = 0; s < count && begin < last; begin = at[s++].last)
      if (at[s].last > first) f(at[s].policy, std::max(first, begin), std::min(last, long(at[s].last)));
  }
};

// S = T K rows, one for each token and each of its experts, sorted by expert: an expert is one product over its own
// rows, and a token's results are added in the order of its top-k, so the sum does not depend on the batch.
template <class T> struct Mixture {
  Experts w;  // R and r are the largest of all policies, which is how rows of `low` and `low_act` lie apart
  const T* x;  // [T, D]
  long T_, K;
  const int32_t* ids;    // [T, K]
  const float* weights;  // [T, K]
  const Experts* policies = nullptr;  // [num_policies] the same weights, each with its adapters; null: w alone
  long num_policies = 0;
  Spans spans{};
  // workspace
  int32_t *place, *token, *ends;  // [T, K] where it stands in the sorted rows; [S] whose row; [E] last row + 1
  T *low, *low_own;               // x gate_up_a^T: [T, R] of a shared A, by token; [S, R] of an A for each expert
  T *hidden, *act, *low_act, *out, *mixed;  // [S, 2F], [S, F], [S, r], [S, D], [T, r]

  long S() const { return T_ * K; }
  // Takes what lies between x and the result; the router's part (ids and weights) is the caller's.
  void take(Arena& arena) {
    place = arena.take<int32_t>(S());
    token = arena.take<int32_t>(S());
    ends = arena.take<int32_t>(w.E);
    low = arena.take<T>(T_ * w.R);
    low_own = arena.take<T>(S() * w.R);
    hidden = arena.take<T>(S() * 2 * w.F);
    act = arena.take<T>(S() * w.F);
    low_act = arena.take<T>(S() * w.r);
    out = arena.take<T>(S() * w.D);
    mixed = arena.take<T>(T_ * w.r);
  }
};

template <class T> void project_tokens(const Mixture<T>& m, long first, long last);  // a shared A, of tokens
template <class T> void sort_rows(const Mixture<T>& m);                              // by one thread
template <class T> void expert_up_share(const Mixture<T>& m);
template <class T> void expert_act_share(const Mixture<T>& m);
template <class T> void expert_down_share(const Mixture<T>& m);
template <class T> void mix(const Mixture<T>& m, T* y, long first, long last);       // y [T, D], of tokens
