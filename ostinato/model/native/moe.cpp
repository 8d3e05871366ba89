// The mixture of experts: see moe.h.

#include "moe.h"

void choose_experts(const float* logits, long E, long K, bool norm, float scaling, int32_t* ids, float* weights) {
  static thread_local std::vector<float> scores;
  const long padded = (E + 15) / 16 * 16;
  scores.assign(padded, -INFINITY);
  std::copy(logits, logits + E, scores.begin());
  v16f top = v16f{} - INFINITY, total{};
  for (long e = 0; e < padded; e += 16) top = max16(top, load16(scores.data() + e));
  const float peak = max_lane(top);
  for (long e = 0; e < padded; e += 16) {
    const v16f mass = exp16(load16(scores.data() + e) - peak);
    store16(scores.data() + e, mass);
    total = total + mass;
  }
  const float all = sum16(total);
  float chosen = 0;
  for (long k = 0; k < K; k++) {
    const long best = std::max_element(scores.begin(), scores.begin() + E) - scores.begin();
    ids[k] = int32_t(best);
    weights[k] = scores[best] / all;
    chosen += weights[k];
    scores[best] = -1;
  }
  for (long k = 0; k < K; k++) weights[k] = (norm ? weights[k] / chosen : weights[k]) * scaling;
}

namespace {

template <class T> const T* of_expert(const void* factor, long e, long rows, long columns) {
  return (const T*)factor + e * rows * columns;
}

// Rows of expert e among the sorted.
template <class T> inline void rows_of(const Mixture<T>& m, long e, long& first, long& last) {
  first = e ? m.ends[e - 1] : 0;
  last = m.ends[e];
}

// part(e, first row, rows, first unit, last unit) for this thread's share of `count` units of columns of every
// expert that has rows. Weights are read once whatever the rows, and products take 16 of them at a time: hence the cost.
template <class T, class Part> void share_experts(const Mixture<T>& m, long count, Part part) {
  auto cost = [&](long rows) { return rows ? 1 + (rows + 15) / 16 : 0; };
  const long threads = omp_get_num_threads(), me = omp_get_thread_num();
  long total = 0, first, last;
  for (long e = 0; e < m.w.E; e++) {
    rows_of(m, e, first, last);
    total += cost(last - first) * count;
  }
  const long from = total * me / threads, to = total * (me + 1) / threads;
  long at = 0;
  for (long e = 0; e < m.w.E && at < to; e++) {
    rows_of(m, e, first, last);
    const long c = cost(last - first);
    if (!c) continue;
    auto unit = [&](long place) { return std::max(0L, std::min(count, (place - at + c - 1) / c)); };
    if (unit(from) < unit(to)) part(e, first, last - first, unit(from), unit(to));
    at += c * count;
  }
}

// part(e, first row, rows) for this thread's share of the sorted rows, cut where the expert changes.
template <class T, class Part> void share_rows(const Mixture<T>& m, Part part) {
  long from, to, first, last;
  share(m.S(), from, to);
  for (long e = 0; e < m.w.E; e++) {
    rows_of(m, e, first, last);
    first = std::max(first, from);
    last = std::min(last, to);
    if (first < last) part(e, first, last - first);
  }
}

// y = sum_k weights[k] * rows[place[k]].
template <class T>
void combine(const T* rows, const int32_t* place, const float* weights, long K, long N, T* y) {
  long d = 0;
  for (; d + 16 <= N; d += 16) {
    v16f sum{};
    for (long k = 0; k < K; k++) sum = sum + weights[k] * load16(rows + place[k] * N + d);
    store16(y + d, sum);
  }
  for (; d < N; d++) {
    float sum = 0;
    for (long k = 0; k < K; k++) sum += weights[k] * to_float(rows[place[k] * N + d]);
    store1(y + d, sum);
  }
}

}  // namespace

template <class T> void project_tokens(const Mixture<T>& m, long first, long last) {
  if (m.w.gate_up_a && m.w.shared)
    project_low(RowsOf<T>{m.x + first * m.w.D, m.w.D}, (const T*)m.w.gate_up_a, float(m.w.scale), m.low + first * m.w.R,
                m.w.R, last - first, m.w.R, m.w.D);
}

template <class T> void sort_rows(const Mixture<T>& m) {
  std::fill(m.ends, m.ends + m.w.E, 0);
  for (long i = 0; i < m.S(); i++) m.ends[m.ids[i]]++;
  for (long e = 0, sum = 0; e < m.w.E; e++) {  // for now: where its rows begin
    const long rows = m.ends[e];
    m.ends[e] = int32_t(sum);
    sum += rows;
  }
  for (long i = 0; i < m.S(); i++) {
    m.place[i] = m.ends[m.ids[i]]++;
    m.token[m.place[i]] = int32_t(i / m.K);
  }
}

template <class T> void expert_up_share(const Mixture<T>& m) {
  const Experts& w = m.w;
  const long own = w.gate_up_a && !w.shared ? units(w.R) : 0, all = units(2 * w.F);  // an A per expert: more columns
  share_experts(m, all + own, [&](long e, long row, long rows, long first, long last) {
    const RowsOf<T> x{m.x, w.D, m.token + row};
    const long end = std::min(last * UNIT, 2 * w.F);
    T* y = m.hidden + row * 2 * w.F;
    multiply(Product<T, T>{x, of_expert<T>(w.gate_up, e, 2 * w.F, w.D), nullptr, y, 2 * w.F, rows, 2 * w.F, w.D},
             first * UNIT, end);
    if (w.gate_up_a && w.shared)
      multiply(Product<T, T>{RowsOf<T>{m.low, w.R, m.token + row}, of_expert<T>(w.gate_up_b, e, 2 * w.F, w.R), nullptr, y,
                             2 * w.F, rows, 2 * w.F, w.R, true}, first * UNIT, end);
    if (own)
      multiply(Product<T, T>{x, of_expert<T>(w.gate_up_a, e, w.R, w.D), nullptr, m.low + row * w.R, w.R, rows, w.R, w.D},
               std::max(0L, first - all) * UNIT, std::min(std::max(0L, last - all) * UNIT, w.R));
  });
}

template <class T> void expert_act_share(const Mixture<T>& m) {
  const Experts& w = m.w;
  share_rows(m, [&](long e, long row, long rows) {
    T *hidden = m.hidden + row * 2 * w.F, *act = m.act + row * w.F, *low = m.low + row * w.R;
    if (w.gate_up_a && !w.shared) {
      for (long i = 0; i < rows; i++) scale_row(low + i * w.R, float(w.scale), w.R);
      multiply(Product<T, T>{RowsOf<T>{low, w.R}, of_expert<T>(w.gate_up_b, e, 2 * w.F, w.R), nullptr, hidden, 2 * w.F,
                             rows, 2 * w.F, w.R, true});
    }
    for (long i = 0; i < rows; i++) silu_row(hidden + i * 2 * w.F, act + i * w.F, w.F);
    if (w.down_a)
      project_low(RowsOf<T>{act, w.F}, of_expert<T>(w.down_a, e, w.r, w.F), float(w.scale), m.low_act + row * w.r, w.r,
                  rows, w.r, w.F);
  });
}

template <class T> void expert_down_share(const Mixture<T>& m) {
  const Experts& w = m.w;
  share_experts(m, units(w.D), [&](long e, long row, long rows, long first, long last) {
    const long begin = first * UNIT, end = std::min(last * UNIT, w.D);
    T* y = m.out + row * w.D;
    multiply(Product<T, T>{RowsOf<T>{m.act + row * w.F, w.F}, of_expert<T>(w.down, e, w.D, w.F), nullptr, y, w.D, rows,
                           w.D, w.F}, begin, end);
    if (w.down_a && !w.shared)
      multiply(Product<T, T>{RowsOf<T>{m.low_act + row * w.r, w.r}, of_expert<T>(w.down_b, e, w.D, w.r), nullptr, y, w.D,
                             rows, w.D, w.r, true}, begin, end);
  });
}

template <class T> void mix(const Mixture<T>& m, T* y, long first, long last) {
  const Experts& w = m.w;
  for (long t = first; t < last; t++) combine(m.out, m.place + t * m.K, m.weights + t * m.K, m.K, w.D, y + t * w.D);
  if (!w.down_a || !w.shared) return;
  // a shared B commutes with the weighted sum
  for (long t = first; t < last; t++)
    combine(m.low_act, m.place + t * m.K, m.weights + t * m.K, m.K, w.r, m.mixed + t * w.r);
  multiply(Product<T, T>{RowsOf<T>{m.mixed + first * w.r, w.r}, (const T*)w.down_b, nullptr, y + first * w.D, w.D,
                         last - first, w.D, w.r, true});
}

namespace {

// The whole mixture as one operation of the decoder. Without a workspace it only says how many bytes it needs.
template <class T>
long experts(const Experts& w, const T* x, const int32_t* ids, const float* weights, T* y, long T_, long K, char* workspace) {
  Mixture<T> m{w, x, T_, K, ids, weights};
  Arena arena{workspace};
  m.take(arena);
  if (!workspace) return arena.used;
#pragma omp parallel
  {
    long first, last;
    share(m.T_, first, last);
    project_tokens(m, first, last);
#pragma omp single
    sort_rows(m);
    expert_up_share(m);
#pragma omp barrier
    expert_act_share(m);
#pragma omp barrier
    expert_down_share(m);
#pragma omp barrier
    mix(m, y, first, last);
  }
  return arena.used;
}

}  // namespace

#define INSTANCES(T)                                                  \
  template void project_tokens(const Mixture<T>&, long, long);        \
  template void sort_rows(const Mixture<T>&);                         \
  template void expert_up_share(const Mixture<T>&);                   \
  template void expert_act_share(const Mixture<T>&);                  \
  template void expert_down_share(const Mixture<T>&);                 \
  template void mix(const Mixture<T>&, T*, long, long);
INSTANCES(float)
INSTANCES(bf16)

extern "C" {
void route_rows(const float* logits, int32_t* ids, float* weights, long T, long E, long K, long norm, double scaling) {
  for (long t = 0; t < T; t++)
    choose_experts(logits + t * E, E, K, norm, float(scaling), ids + t * K, weights + t * K);
}

#define EXPERTS(SUFFIX, T)                                                                                               \
  long experts_##SUFFIX(const Experts* w, const T* x, const int32_t* ids, const float* weights, T* y, long n, long K,    \
                        char* workspace) {                                                                               \
    return experts(*w, x, ids, weights, y, n, K, workspace);                                                             \
  }
EXPERTS(f32, float)
EXPERTS(bf16, bf16)
}
