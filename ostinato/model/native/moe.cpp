// The mixture of experts: see moe.h.

#include "moe.h"

void choose_experts(const float* logits, long E, long K, bool norm, float scaling, int32_t* ids, float* weights,
                    const int32_t* given) {
  static thread_local std::vector<float> scores;
  const long padded = (E + LANES - 1) / LANES * LANES;
  scores.assign(padded, -INFINITY);
  std::copy(logits, logits + E, scores.begin());
  vec top = vec{} - INFINITY, total{};
  for (long e = 0; e < padded; e += LANES) top = max(top, load(scores.data() + e));
  const float peak = max_lane(top);
  for (long e = 0; e < padded; e += LANES) {
    const vec mass = exp(load(scores.data() + e) - peak);
    store(scores.data() + e, mass);
    total = total + mass;
  }
  const float all = lane_sum(total);
  float chosen = 0;  // those that are given may all underflow; beside others 1e-20 is nothing
  for (long k = 0; k < K; k++) {
    const long best = given ? given[k] : std::max_element(scores.begin(), scores.begin() + E) - scores.begin();
    ids[k] = int32_t(best);
    weights[k] = scores[best] / all;
    chosen += weights[k];
    scores[best] = -1;
  }
  for (long k = 0; k < K; k++) weights[k] = (norm ? weights[k] / (chosen + 1e-20f) : weights[k]) * scaling;
}

namespace {

template <class T> Matrix of_expert(const Matrix& all, long e, long rows, long columns) {
  const long each = all.format == PLAIN ? sizeof(T) : all.format == BF16 ? sizeof(bf16) : 0;  // bytes of a value
  const long bytes = each ? rows * columns * each : units(rows) * tile_of_codes(columns);
  return {(const char*)all.data + e * bytes, all.scale ? all.scale + e * rows : nullptr, all.format};
}

// Rows of expert e among the sorted.
template <class T> inline void rows_of(const Mixture<T>& m, long e, long& first, long& last) {
  first = e ? m.ends[e - 1] : 0;
  last = m.ends[e];
}

// What a product of so many rows takes, as measured.
#if defined(__AMX_BF16__)
inline long cost(long rows) { return rows == 0 ? 0 : 2 + (rows + 15) / 16; }  // mostly reading w
#elif defined(__AVX512BF16__)
inline long cost(long rows) { return rows == 0 ? 0 : rows <= 8 ? 3 : 1 + (rows + 15) / 16 * 4; }  // two forms
#else
inline long cost(long rows) { return rows == 0 ? 0 : rows + 2; }
#endif

// part(e, first row, rows, first unit, last unit) for this thread's share of `count` units of columns of every
// expert that has rows: shares of equal cost, so that a thread mostly has whole experts.
template <class T, class Part> void share_experts(const Mixture<T>& m, long count, Part part) {
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

// f(the experts of a policy, first, last) for tokens [first, last).
template <class T, class F> void by_token(const Mixture<T>& m, long first, long last, F f) {
  if (!m.policies) return f(m.w, first, last);
  m.spans.over(first, last, [&](long policy, long a, long b) { f(m.policies[policy], a, b); });
}

// f(the experts of a policy, first row, rows) for sorted rows of one expert: their tokens ascend, so policies do.
template <class T, class F> void by_run(const Mixture<T>& m, long row, long rows, F f) {
  if (!m.policies) return f(m.w, row, rows);
  const long end = row + rows;
  for (long s = 0; s < m.spans.count && row < end; s++) {
    const long begin = row;
    while (row < end && m.token[row] < m.spans.at[s].last) row++;
    if (begin < row) f(m.policies[m.spans.at[s].policy], begin, row - begin);
  }
}

// Units of columns of the widest A that a policy has for each expert by itself.
template <class T> long own_units(const Mixture<T>& m) {
  long widest = 0;
  const Experts* all = m.policies ? m.policies : &m.w;
  for (long n = 0; n < (m.policies ? m.num_policies : 1); n++)
    if (all[n].gate_up_a && !all[n].shared) widest = std::max(widest, units(all[n].R));
  return widest;
}

// y = sum_k weights[k] * rows[place[k]]; rows lie ld apart.
template <class T>
void combine(const T* rows, long ld, const int32_t* place, const float* weights, long K, long N, T* y) {
  long d = 0;
  for (; d + LANES <= N; d += LANES) {
    vec sum{};
    for (long k = 0; k < K; k++) sum = sum + weights[k] * load(rows + place[k] * ld + d);
    store(y + d, sum);
  }
  for (; d < N; d++) {
    float sum = 0;
    for (long k = 0; k < K; k++) sum += weights[k] * to_float(rows[place[k] * ld + d]);
    store1(y + d, sum);
  }
}

}  // namespace

template <class T> void project_tokens(const Mixture<T>& m, long first, long last) {
  const long ld = m.w.R;
  by_token(m, first, last, [&](const Experts& w, long a, long b) {
    if (w.gate_up_a && w.shared)
      project_low(RowsOf<T>{m.x + a * w.D, w.D}, (const T*)w.gate_up_a, float(w.scale), m.low + a * ld, ld, b - a,
                  w.R, w.D);
  });
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

// y = x w^T, or y += x w^T, where the rows of y lie side by side.
template <class T>
inline Product<T, T> plain(const RowsOf<T>& x, const Matrix& w, T* y, long M, long N, long K, bool add = false) {
  return {x, w, nullptr, y, N, M, N, K, add};
}

template <class T> void expert_up_share(const Mixture<T>& m) {
  const Experts& w = m.w;
  const long N = 2 * w.F, all = units(N), ld = w.R;
  const long own = own_units(m);  // an A per expert: more columns
  share_experts(m, all + own, [&](long e, long row, long rows, long first, long last) {
    const RowsOf<T> x{m.x, w.D, m.token + row};
    const long begin = first * UNIT, end = std::min(last * UNIT, N);
    multiply(plain(x, of_expert<T>(w.gate_up, e, N, w.D), m.hidden + row * N, rows, N, w.D), begin, end);
    by_run(m, row, rows, [&](const Experts& p, long at, long count) {
      const RowsOf<T> low{m.low, ld, m.token + at}, mine{m.x, w.D, m.token + at};
      if (p.gate_up_a && p.shared)
        multiply(plain(low, of_expert<T>(p.gate_up_b, e, N, p.R), m.hidden + at * N, count, N, p.R, true), begin, end);
      if (p.gate_up_a && !p.shared)
        multiply(Product<T, T>{mine, of_expert<T>(p.gate_up_a, e, p.R, w.D), nullptr, m.low_own + at * ld, ld, count,
                               p.R, w.D},
                 std::max(0L, first - all) * UNIT, std::min(std::max(0L, last - all) * UNIT, p.R));
    });
  });
}

template <class T> void expert_act_share(const Mixture<T>& m) {
  const Experts& w = m.w;
  const long N = 2 * w.F, ld = w.R, ld_act = w.r;
  share_rows(m, [&](long e, long first, long all) {
    by_run(m, first, all, [&](const Experts& p, long row, long rows) {
      T *hidden = m.hidden + row * N, *act = m.act + row * w.F, *low = m.low_own + row * ld;
      if (p.gate_up_a && !p.shared) {
        for (long i = 0; i < rows; i++) scale_row(low + i * ld, float(p.scale), p.R);
        multiply(plain(RowsOf<T>{low, ld}, of_expert<T>(p.gate_up_b, e, N, p.R), hidden, rows, N, p.R, true));
      }
      for (long i = 0; i < rows; i++) silu_row(hidden + i * N, act + i * w.F, w.F);
      if (p.down_a)
        project_low(RowsOf<T>{act, w.F}, of_expert<T>(p.down_a, e, p.r, w.F), float(p.scale), m.low_act + row * ld_act,
                    ld_act, rows, p.r, w.F);
    });
  });
}

template <class T> void expert_down_share(const Mixture<T>& m) {
  const Experts& w = m.w;
  share_experts(m, units(w.D), [&](long e, long row, long rows, long first, long last) {
    const RowsOf<T> act{m.act + row * w.F, w.F};
    const long begin = first * UNIT, end = std::min(last * UNIT, w.D), ld = w.r;
    multiply(plain(act, of_expert<T>(w.down, e, w.D, w.F), m.out + row * w.D, rows, w.D, w.F), begin, end);
    by_run(m, row, rows, [&](const Experts& p, long at, long count) {
      const RowsOf<T> low{m.low_act + at * ld, ld};
      if (p.down_a && !p.shared)
        multiply(plain(low, of_expert<T>(p.down_b, e, w.D, p.r), m.out + at * w.D, count, w.D, p.r, true), begin, end);
    });
  });
}

template <class T> void mix(const Mixture<T>& m, T* y, long first, long last) {
  const Experts& w = m.w;
  for (long t = first; t < last; t++)
    combine(m.out, w.D, m.place + t * m.K, m.weights + t * m.K, m.K, w.D, y + t * w.D);
  // a shared B commutes with the weighted sum
  by_token(m, first, last, [&](const Experts& p, long a, long b) {
    if (!p.down_a || !p.shared) return;
    for (long t = a; t < b; t++)
      combine(m.low_act, w.r, m.place + t * m.K, m.weights + t * m.K, m.K, p.r, m.mixed + t * w.r);
    const RowsOf<T> mixed{m.mixed + a * w.r, w.r};
    multiply(plain(mixed, p.down_b, y + a * w.D, b - a, w.D, p.r, true));
  });
}

namespace {

// The whole mixture as one operation of the decoder. Without a workspace it only says how many bytes it needs.
template <class T>
long experts(const Experts& w, const T* x, const int32_t* ids, const float* weights, T* y, long T_, long K,
             char* workspace) {
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
void route_rows(const float* logits, const int32_t* given, int32_t* ids, float* weights, long T, long E, long K,
                long norm, double scaling) {
  for (long t = 0; t < T; t++)
    choose_experts(logits + t * E, E, K, norm, float(scaling), ids + t * K, weights + t * K,
                   given ? given + t * K : nullptr);
}

#define EXPERTS(SUFFIX, T)                                                                                      \
  long experts_##SUFFIX(const Experts* w, const T* x, const int32_t* ids, const float* weights, T* y, long n,   \
                        long K, char* workspace) {                                                              \
    return experts(*w, x, ids, weights, y, n, K, workspace);                                                    \
  }
EXPERTS(f32, float)
EXPERTS(bf16, bf16)
}
