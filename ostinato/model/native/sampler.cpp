// Sampling: every row depends on its own logits and its own uniform only.

#include <cfloat>

#include "common.h"

namespace {

// A scaled logit that at least k logits reach: the k-th best of the maxima of chunks.
float reached_by(const float* z, long V, float inverse, long k) {
  const long chunk = std::max(16L, V / (8 * k) / 16 * 16), chunks = V / chunk;
  if (chunks < k) return -INFINITY;
  static thread_local std::vector<float> maxima;
  maxima.resize(chunks);
  for (long c = 0; c < chunks; c++) {
    vec top = load(z + c * chunk);
    for (long j = LANES; j < chunk; j += LANES) top = max(top, load(z + c * chunk + j));
    maxima[c] = max_lane(top);
  }
  std::nth_element(maxima.begin(), maxima.begin() + (k - 1), maxima.end(), std::greater<>());
  return maxima[k - 1] * inverse;
}

// Scaled logits [j, j + LANES), -inf beyond the vocabulary.
inline vec scaled(const float* z, long V, float inverse, long j) {
  if (j + LANES <= V) return load(z + j) * inverse;
  vec s;
  for (long l = 0; l < LANES; l++) s[l] = j + l < V ? z[j + l] * inverse : -INFINITY;
  return s;
}

// The k-th best scaled logit. The maxima of chunks give a bound that few logits reach.
float top_k_cut(const float* z, long V, float inverse, long k) {
  static thread_local std::vector<float> found;
  const float bound = reached_by(z, V, inverse, k);
  found.clear();
  for (long j = 0; j < V; j += LANES) {
    const vec s = scaled(z, V, inverse, j);
    if (max_lane(s) < bound) continue;
    for (long l = 0; l < std::min(long(LANES), V - j); l++)
      if (s[l] >= bound) found.push_back(s[l]);
  }
  std::nth_element(found.begin(), found.begin() + (k - 1), found.end(), std::greater<>());
  return found[k - 1];
}

// The smallest scaled logit of the nucleus: the best logits of at least `above` that together hold p of their mass.
// Masses are computed once; halving the interval of the edge in log space leaves few logits to sort.
float top_p_cut(const float* z, long V, float inverse, float peak, float p, float above) {
  static thread_local std::vector<float> mass;
  static thread_local std::vector<std::pair<float, long>> inside;
  mass.assign((V + LANES - 1) / LANES * LANES, 0);
  vec sum{};
  for (long j = 0; j < V; j += LANES) {
    const vec s = scaled(z, V, inverse, j);
    const vec e = (vec)((veci)exp(s - peak) & (s >= vec{} + above));
    store(mass.data() + j, e);
    sum = sum + e;
  }
  const double want = double(p) * lane_sum(sum);
  auto held = [&](float edge) {  // by the masses of at least `edge`
    vec total{};
    for (long j = 0; j < V; j += LANES) {
      const vec m = load(mass.data() + j);
      total = total + (vec)((veci)m & (m >= vec{} + edge));
    }
    return double(lane_sum(total));
  };
  float low = (1.0f - p) / V, high = 2.0f;  // V masses below `low` are less than 1 - p in all; the peak has mass 1
  double above_high = 0;
  for (int round = 0; round < 8; round++) {
    const float middle = std::sqrt(low * high);
    const double m = held(middle);
    if (m >= want) low = middle;
    else { high = middle; above_high = m; }
  }
  inside.clear();
  for (long j = 0; j < V; j += LANES) {
    const vec m = load(mass.data() + j);
    const veci in = (m >= vec{} + low) & (m < vec{} + high);
    if (max_lane((vec)((veci)m & in)) <= 0) continue;
    for (long l = 0; l < LANES; l++)
      if (in[l]) inside.push_back({m[l], j + l});
  }
  std::sort(inside.begin(), inside.end(), std::greater<>());
  double total = above_high;
  for (auto [m, i] : inside)
    if ((total += m) >= want) return z[i] * inverse;
  return inside.empty() ? above : z[inside.back().second] * inverse;
}

// The smallest scaled logit that top-k and top-p keep; ties at the edge are kept. top-p is taken over what top-k
// left, as vLLM and transformers do.
float cut_off(const float* z, long V, float inverse, float peak, long top_k, float top_p) {
  float cut = -INFINITY;
  if (top_k > 0 && top_k < V) cut = top_k_cut(z, V, inverse, top_k);
  if (top_p < 1) cut = std::max(cut, top_p_cut(z, V, inverse, peak, top_p, cut));
  return cut;
}

// How many scaled logits reach `cut`; 0 stands for all of them, as it does where nothing was filtered.
int32_t count_kept(const float* z, long V, float inverse, float cut) {
  veci minus{};
  for (long j = 0; j < V; j += LANES) minus += scaled(z, V, inverse, j) >= vec{} + cut;  // true is -1
  long total = 0;
  for (long l = 0; l < LANES; l++) total -= minus[l];
  return total == V ? 0 : int32_t(total);
}

// Their ids, ascending.
void list_kept(const float* z, long V, float inverse, float cut, int32_t* ids) {
  for (long j = 0; j < V; j += LANES) {
    const vec s = scaled(z, V, inverse, j);
    if (max_lane(s) < cut) continue;
    for (long l = 0; l < std::min(long(LANES), V - j); l++)
      if (s[l] >= cut) *ids++ = int32_t(j + l);
  }
}

constexpr long CHUNK = 256;

inline vec masses(const float* z, long V, float inverse, float peak, float cut, long j) {  // of LANES logits
  const vec s = scaled(z, V, inverse, j);
  return (vec)((veci)exp(s - peak) & (s >= vec{} + cut));
}
// Of the logits [first, first + CHUNK). Compiled once: both that call it get the same bits.
__attribute__((noinline)) float mass_of(const float* z, long V, float inverse, float peak, float cut, long first) {
  vec mass{};
  for (long j = first; j < std::min(V, first + CHUNK); j += LANES) mass = mass + masses(z, V, inverse, peak, cut, j);
  return lane_sum(mass);
}
inline float greatest(const float* z, long V) {
  vec top = vec{} - INFINITY;
  long i = 0;
  for (; i + LANES <= V; i += LANES) top = max(top, load(z + i));
  float peak = max_lane(top);
  for (; i < V; i++) peak = std::max(peak, z[i]);
  return peak;
}
__attribute__((noinline)) float log_of(float logit, float inverse, float peak, double total) {
  return float(double(logit) * inverse - peak - std::log(total));
}

// One row by inverse transform: the first index whose cumulative kept mass exceeds u times the total; `edge` is the
// share of the mass before it. Chunks of 256 logits hold partial masses so that the second walk touches one only.
// `cut_at` gets the least scaled logit that was kept, NaN where nothing was filtered.
void sample_row(const float* z, long V, float temperature, long top_k, float top_p, float min_p, double u, int64_t* token,
                float* logprob, float* edge, float* cut_at, std::vector<float>& partial) {
  *cut_at = NAN;
  long best = 0;
  vec top = vec{} - INFINITY;
  veci nan{};
  long i = 0;
  for (; i + LANES <= V; i += LANES) {
    const vec v = load(z + i);
    top = max(top, v);
    nan |= v != v;
  }
  float raw_peak = max_lane(top);
  bool broken = false;
  for (long l = 0; l < LANES; l++) broken |= nan[l] != 0;
  for (; i < V; i++) { raw_peak = std::max(raw_peak, z[i]); broken |= z[i] != z[i]; }
  if (broken || !std::isfinite(raw_peak)) { *token = -1; *logprob = *edge = NAN; return; }  // the caller names the request
  while (!(z[best] == raw_peak)) best++;
  if (temperature <= 0) { *token = best; *logprob = *edge = 0; return; }  // greedy is a point mass
  const float inverse = 1.0f / temperature, peak = raw_peak * inverse;
  float cut = -INFINITY;
  const bool ranked = (top_k > 0 && top_k < V) || top_p < 1;
  if (ranked) cut = cut_off(z, V, inverse, peak, top_k, top_p);
  if (min_p > 0) cut = std::max(cut, peak + std::log(min_p));
  if (ranked || min_p > 0) *cut_at = std::max(cut, -FLT_MAX);  // a banned token, at -inf, is not kept
  const long chunks = (V + CHUNK - 1) / CHUNK;
  partial.resize(chunks);
  double total = 0;
  for (long c = 0; c < chunks; c++) total += partial[c] = mass_of(z, V, inverse, peak, cut, c * CHUNK);
  const double want = u * total;
  double before = 0, below = 0;  // mass up to and including the last token seen, and without it
  long c = 0, last = -1;
  for (; c < chunks; c++) {
    if (before + partial[c] > want) break;
    before += partial[c];
  }
  // Rounding may leave want just past the end of a chunk: the last token with mass stands in.
  for (c = std::min(c, chunks - 1); c < chunks; c++) {
    for (long j = c * CHUNK; j < std::min(V, (c + 1) * CHUNK); j += LANES) {
      const vec mass = masses(z, V, inverse, peak, cut, j);
      for (long l = 0; l < LANES && j + l < V; l++)
        if (mass[l] > 0) {
          below = before;
          before += mass[l];
          last = j + l;
          if (before > want) goto found;
        }
    }
    if (last >= 0) break;
  }
  if (last < 0) last = best;
found:
  *token = last;
  *edge = float(below / total);
  *logprob = log_of(z[last], inverse, peak, total);
}

}  // namespace

extern "C" {
void sample(const float* logits, long V, const float* temperature, const int32_t* top_k, const float* top_p,
            const float* min_p, const double* u, int64_t* tokens, float* logprobs, float* edges, float* cuts,
            long rows) {
#pragma omp parallel
  {
    static thread_local std::vector<float> partial;
    float nobody_asked;
#pragma omp for schedule(dynamic, 1)
    for (long r = 0; r < rows; r++)
      sample_row(logits + r * V, V, temperature[r], top_k[r], top_p[r], min_p[r], u[r], tokens + r, logprobs + r, edges + r,
                 cuts ? cuts + r : &nobody_asked, partial);
  }
}

// How many tokens `sample` had kept in each row, by the cuts that it gave; 0: the whole vocabulary.
void support_counts(const float* logits, long V, const float* temperature, const float* cuts, int32_t* counts, long rows) {
#pragma omp parallel for schedule(dynamic, 1)
  for (long r = 0; r < rows; r++)
    counts[r] = std::isnan(cuts[r]) ? 0 : count_kept(logits + r * V, V, 1.0f / temperature[r], cuts[r]);
}

// Their ids in vocabulary order, row after row: `ends` are the running sums of the counts.
void support_ids(const float* logits, long V, const float* temperature, const float* cuts, const int32_t* counts,
                 const int64_t* ends, int32_t* ids, long rows) {
#pragma omp parallel for schedule(dynamic, 1)
  for (long r = 0; r < rows; r++)
    if (counts[r]) list_kept(logits + r * V, V, 1.0f / temperature[r], cuts[r], ids + ends[r] - counts[r]);
}

// Log-probabilities of given tokens, as `sample` has them where it draws these: a logit of -inf was not kept.
void score(const float* logits, long V, float temperature, const int64_t* tokens, float* logprobs, long rows) {
#pragma omp parallel for schedule(dynamic, 1)
  for (long r = 0; r < rows; r++) {
    const float* z = logits + r * V;
    const float inverse = 1.0f / temperature, peak = greatest(z, V) * inverse;
    double total = 0;
    for (long first = 0; first < V; first += CHUNK) total += mass_of(z, V, inverse, peak, -FLT_MAX, first);
    logprobs[r] = log_of(z[tokens[r]], inverse, peak, total);
  }
}

void exp_f32(const float* x, float* y, long n) {
  for (long i = 0; i + LANES <= n; i += LANES) store(y + i, exp(load(x + i)));
}
}
