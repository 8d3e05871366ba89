// The rest of a decode step: norms, rotary positions, gated activations, paged attention, sampling.
//
// Every output row depends on its own inputs only and is summed in a fixed order, so a row's result does not
// depend on what else is in the batch, on threads, or on how a prompt was cut into chunks.

#include "common.h"

namespace {

// exp for x <= 88; below -87 it is 0. Relative error under 2e-7 (checked against double by the tests).
inline v16f exp16(v16f x) {
  const v16f tiny = v16f{} - 87.0f;
  const v16i keep = x > tiny;
  x = (v16f)(((v16i)x & keep) | ((v16i)tiny & ~keep));
  v16f t = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer in the low bits
  v16i n = (v16i)t - 0x4b400000;
  v16f k = t - 12582912.0f;
  v16f r = x - k * 0.693145751953125f;
  r = r - k * 1.42860682030941723212e-6f;
  v16f p = v16f{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return (v16f)((v16i)((v16f)((n + 127) << 23) * p) & keep);
}

inline float sum16(v16f v) {
  float s[8];
  for (int i = 0; i < 8; i++) s[i] = v[i] + v[i + 8];
  return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}
inline v16f max16(v16f a, v16f b) {
  v16i m = a > b;
  return (v16f)(((v16i)a & m) | ((v16i)b & ~m));
}
inline float max_lane(v16f v) {
  float m = v[0];
  for (int i = 1; i < 16; i++) m = std::max(m, v[i]);
  return m;
}

// y = x / rms(x) * weight, rounded to T before the weight as Hugging Face does.
template <class T>
inline void normalise(const T* x, const T* weight, T* y, long D, float eps) {
  v16f squares{};
  long d = 0;
  for (; d + 16 <= D; d += 16) { v16f v = load16(x + d); squares = squares + v * v; }
  float sum = sum16(squares);
  for (; d < D; d++) sum += to_float(x[d]) * to_float(x[d]);
  const float inverse = 1.0f / std::sqrt(sum / D + eps);
  for (d = 0; d + 16 <= D; d += 16) {
    T rounded[16];
    store16(rounded, load16(x + d) * inverse);
    store16(y + d, load16(rounded) * load16(weight + d));
  }
  for (; d < D; d++) {
    T rounded;
    store1(&rounded, to_float(x[d]) * inverse);
    store1(y + d, to_float(rounded) * to_float(weight[d]));
  }
}

template <class T>
void rms_norm(const T* x, long ldx, const T* weight, T* y, long T_, long D, float eps) {
#pragma omp parallel for schedule(static) if (T_ * D > 16384)
  for (long t = 0; t < T_; t++) normalise(x + t * ldx, weight, y + t * D, D, eps);
}

// sum = x + residual (rounded to T), y = norm(sum).
template <class T>
void add_rms_norm(const T* x, const T* residual, const T* weight, T* y, T* sum, long T_, long D, float eps) {
#pragma omp parallel for schedule(static) if (T_ * D > 16384)
  for (long t = 0; t < T_; t++) {
    const T *a = x + t * D, *b = residual + t * D;
    T* s = sum + t * D;
    long d = 0;
    for (; d + 16 <= D; d += 16) store16(s + d, load16(a + d) + load16(b + d));
    for (; d < D; d++) store1(s + d, to_float(a[d]) + to_float(b[d]));
    normalise(s, weight, y + t * D, D, eps);
  }
}

// Rotate-half on heads [0, H) of each row; cos and sin are [T, D] in T's type.
template <class T>
void rope(const T* x, long ldx, const T* cos, const T* sin, T* y, long T_, long H, long D) {
  const long half = D / 2;
#pragma omp parallel for schedule(static) if (T_ * H * D > 16384)
  for (long t = 0; t < T_; t++)
    for (long h = 0; h < H; h++) {
      const T *a = x + t * ldx + h * D, *b = a + half, *c = cos + t * D, *s = sin + t * D;
      T *ya = y + (t * H + h) * D, *yb = ya + half;
      long d = 0;
      for (; d + 16 <= half; d += 16) {
        v16f u = load16(a + d), v = load16(b + d);
        store16(ya + d, u * load16(c + d) - v * load16(s + d));
        store16(yb + d, v * load16(c + half + d) + u * load16(s + half + d));
      }
      for (; d < half; d++) {
        float u = to_float(a[d]), v = to_float(b[d]);
        store1(ya + d, u * to_float(c[d]) - v * to_float(s[d]));
        store1(yb + d, v * to_float(c[half + d]) + u * to_float(s[half + d]));
      }
    }
}

// y[t, f] = silu(g[t, f]) * g[t, F + f]; the silu is rounded to T first, as torch does.
template <class T>
void silu_mul(const T* g, T* y, long T_, long F) {
#pragma omp parallel for schedule(static) if (T_ * F > 16384)
  for (long t = 0; t < T_; t++) {
    const T *a = g + t * 2 * F, *b = a + F;
    T* out = y + t * F;
    long f = 0;
    for (; f + 16 <= F; f += 16) {
      v16f v = load16(a + f);
      v16f m = max16(v16f{} - 87.0f, v);
      T rounded[16];
      store16(rounded, v / (1.0f + exp16(v16f{} - m)));
      store16(out + f, load16(rounded) * load16(b + f));
    }
    for (; f < F; f++) {
      float v = to_float(a[f]);
      T rounded;
      store1(&rounded, v / (1.0f + std::exp(-v)));
      store1(out + f, to_float(rounded) * to_float(b[f]));
    }
  }
}

// ---- paged attention --------------------------------------------------------------------------------------
// Blocks of 16 positions. Keys [blocks, Hkv, Dk / pair, 16, pair] (pair = 2 for bf16, 1 for fp32): a vector holds
// one feature (pair) of 16 positions. Values [blocks, Hkv, 16, Dv].

constexpr long BLOCK = 16;
template <class T> constexpr long pair() { return sizeof(T) == 2 ? 2 : 1; }

template <class T>
void write_cache(const T* k, long ldk, const T* v, long ldv, const int64_t* slots, T* keys, T* values, long T_, long Hkv,
                 long Dk, long Dv) {
  constexpr long P = pair<T>();
#pragma omp parallel for schedule(static) if (T_ > 64)
  for (long t = 0; t < T_; t++) {
    const long block = slots[t] / BLOCK, offset = slots[t] % BLOCK;
    for (long h = 0; h < Hkv; h++) {
      T* to = keys + (block * Hkv + h) * Dk * BLOCK + offset * P;
      const T* from = k + t * ldk + h * Dk;
      for (long d = 0; d < Dk; d += P) memcpy(to + d * BLOCK, from + d, P * sizeof(T));
      memcpy(values + ((block * Hkv + h) * BLOCK + offset) * Dv, v + t * ldv + h * Dv, Dv * sizeof(T));
    }
  }
}

// Scores of one query head against the 16 positions of one block.
inline v16f block_scores(const float* q, const float* keys, long D) {
  v16f a{}, b{}, c{}, e{};
  long d = 0;
  for (; d + 4 <= D; d += 4) {
    a = a + q[d] * load16(keys + d * BLOCK);
    b = b + q[d + 1] * load16(keys + (d + 1) * BLOCK);
    c = c + q[d + 2] * load16(keys + (d + 2) * BLOCK);
    e = e + q[d + 3] * load16(keys + (d + 3) * BLOCK);
  }
  for (; d < D; d++) a = a + q[d] * load16(keys + d * BLOCK);
  return (a + b) + (c + e);
}
inline v16f block_scores(const bf16* q, const bf16* keys, long D) {
#if defined(__AVX512BF16__)
  __m512 a{}, b{}, c{}, e{};
  auto step = [&](__m512 acc, long d) {
    int two;
    memcpy(&two, q + d, 4);
    return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_loadu_si512(keys + d * BLOCK), (__m512bh)_mm512_set1_epi32(two));
  };
  long d = 0;
  for (; d + 8 <= D; d += 8) { a = step(a, d); b = step(b, d + 2); c = step(c, d + 4); e = step(e, d + 6); }
  for (; d < D; d += 2) a = step(a, d);
  return (v16f)_mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, e));
#else
  v16f acc{};
  for (long d = 0; d < D; d += 2) {
    v16u raw;
    memcpy(&raw, keys + d * BLOCK, 64);
    acc = acc + to_float(q[d]) * (v16f)(raw << 16) + to_float(q[d + 1]) * (v16f)(raw & 0xffff0000u);
  }
  return acc;
#endif
}

// out[Dv] = sum over n positions of p[i] * value[i], in position order.
template <class T, int VECTORS>
inline void weigh_values(const float* p, const int32_t* table, const T* values, long n, long Hkv, long h, long Dv, T* out) {
  v16f acc[VECTORS] = {};
  for (long i = 0; i < n; i++) {
    const T* v = values + ((table[i / BLOCK] * Hkv + h) * BLOCK + i % BLOCK) * Dv;
    for (int j = 0; j < VECTORS; j++) acc[j] = acc[j] + p[i] * load16(v + 16 * j);
  }
  for (int j = 0; j < VECTORS; j++) store16(out + 16 * j, acc[j]);
}
template <class T>
inline void weigh_values_any(const float* p, const int32_t* table, const T* values, long n, long Hkv, long h, long Dv, T* out) {
  constexpr long WIDTH = 256;  // features at a time
  for (long first = 0; first < Dv; first += WIDTH) {
    float acc[WIDTH] = {};
    const long width = std::min(WIDTH, Dv - first);
    for (long i = 0; i < n; i++) {
      const T* v = values + ((table[i / BLOCK] * Hkv + h) * BLOCK + i % BLOCK) * Dv + first;
      for (long d = 0; d < width; d++) acc[d] += p[i] * to_float(v[d]);
    }
    for (long d = 0; d < width; d++) store1(out + first + d, acc[d]);
  }
}

// Row t attends to the first lengths[t] positions of the sequence whose blocks are tables[sequence[t]].
template <class T>
void paged_attention(const T* q, long ldq, const T* keys, const T* values, const int32_t* tables, long ldt,
                     const int32_t* sequence, const int32_t* lengths, T* out, long T_, long H, long Hkv, long Dk,
                     long Dv, float scale) {
  const long G = H / Hkv;
#pragma omp parallel
  {
    static thread_local std::vector<float> scores;
#pragma omp for schedule(dynamic, 4)
    for (long item = 0; item < T_ * Hkv; item++) {
      const long t = item / Hkv, h = item % Hkv, n = lengths[t], blocks = (n + BLOCK - 1) / BLOCK;
      const int32_t* table = tables + sequence[t] * ldt;
      scores.resize(std::max<size_t>(scores.size(), blocks * BLOCK));
      for (long g = 0; g < G; g++) {
        const T* query = q + t * ldq + (h * G + g) * Dk;
        v16f top = v16f{} - INFINITY;
        for (long b = 0; b < blocks; b++) {
          v16f s = block_scores(query, keys + (table[b] * Hkv + h) * Dk * BLOCK, Dk) * scale;
          for (long i = n - b * BLOCK; i < BLOCK; i++) s[i] = -INFINITY;
          store16(scores.data() + b * BLOCK, s);
          top = max16(top, s);
        }
        const float peak = max_lane(top);
        v16f total{};
        for (long b = 0; b < blocks; b++) {
          v16f e = exp16(load16(scores.data() + b * BLOCK) - peak);
          store16(scores.data() + b * BLOCK, e);
          total = total + e;
        }
        const float inverse = 1.0f / sum16(total);
        for (long b = 0; b < blocks; b++)
          store16(scores.data() + b * BLOCK, load16(scores.data() + b * BLOCK) * inverse);
        T* to = out + (t * H + h * G + g) * Dv;
        switch (Dv) {
          case 32: weigh_values<T, 2>(scores.data(), table, values, n, Hkv, h, Dv, to); break;
          case 64: weigh_values<T, 4>(scores.data(), table, values, n, Hkv, h, Dv, to); break;
          case 128: weigh_values<T, 8>(scores.data(), table, values, n, Hkv, h, Dv, to); break;
          default: weigh_values_any(scores.data(), table, values, n, Hkv, h, Dv, to);
        }
      }
    }
  }
}

// ---- sampling ---------------------------------------------------------------------------------------------

// A scaled logit that at least k logits reach: the k-th best of the maxima of chunks.
float reached_by(const float* z, long V, float inverse, long k) {
  const long chunk = std::max(16L, V / (8 * k) / 16 * 16), chunks = V / chunk;
  if (chunks < k) return -INFINITY;
  static thread_local std::vector<float> maxima;
  maxima.resize(chunks);
  for (long c = 0; c < chunks; c++) {
    v16f top = load16(z + c * chunk);
    for (long j = 16; j < chunk; j += 16) top = max16(top, load16(z + c * chunk + j));
    maxima[c] = max_lane(top);
  }
  std::nth_element(maxima.begin(), maxima.begin() + (k - 1), maxima.end(), std::greater<>());
  return maxima[k - 1] * inverse;
}

// Scaled logits [j, j + 16), -inf beyond the vocabulary.
inline v16f scaled16(const float* z, long V, float inverse, long j) {
  if (j + 16 <= V) return load16(z + j) * inverse;
  v16f s;
  for (long l = 0; l < 16; l++) s[l] = j + l < V ? z[j + l] * inverse : -INFINITY;
  return s;
}

// The k-th best scaled logit. The maxima of chunks give a bound that few logits reach.
float top_k_cut(const float* z, long V, float inverse, long k) {
  static thread_local std::vector<float> found;
  const float bound = reached_by(z, V, inverse, k);
  found.clear();
  for (long j = 0; j < V; j += 16) {
    const v16f s = scaled16(z, V, inverse, j);
    if (max_lane(s) < bound) continue;
    for (long l = 0; l < std::min(16L, V - j); l++)
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
  mass.assign((V + 15) / 16 * 16, 0);
  v16f sum{};
  for (long j = 0; j < V; j += 16) {
    const v16f s = scaled16(z, V, inverse, j);
    const v16f e = (v16f)((v16i)exp16(s - peak) & (s >= v16f{} + above));
    store16(mass.data() + j, e);
    sum = sum + e;
  }
  const double want = double(p) * sum16(sum);
  auto held = [&](float edge) {  // by the masses of at least `edge`
    v16f total{};
    for (long j = 0; j < V; j += 16) {
      const v16f m = load16(mass.data() + j);
      total = total + (v16f)((v16i)m & (m >= v16f{} + edge));
    }
    return double(sum16(total));
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
  for (long j = 0; j < V; j += 16) {
    const v16f m = load16(mass.data() + j);
    const v16i in = (m >= v16f{} + low) & (m < v16f{} + high);
    if (max_lane((v16f)((v16i)m & in)) <= 0) continue;
    for (long l = 0; l < 16; l++)
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

// One row by inverse transform: the first index whose cumulative kept mass exceeds u times the total.
// Chunks of 256 logits hold partial masses so that the second walk touches one chunk only.
void sample_row(const float* z, long V, float temperature, long top_k, float top_p, float min_p, double u, int64_t* token,
                float* logprob, std::vector<float>& partial) {
  constexpr long CHUNK = 256;
  long best = 0;
  v16f top = v16f{} - INFINITY;
  v16i nan{};
  long i = 0;
  for (; i + 16 <= V; i += 16) {
    const v16f v = load16(z + i);
    top = max16(top, v);
    nan |= v != v;
  }
  float raw_peak = max_lane(top);
  bool broken = false;
  for (long l = 0; l < 16; l++) broken |= nan[l] != 0;
  for (; i < V; i++) { raw_peak = std::max(raw_peak, z[i]); broken |= z[i] != z[i]; }
  if (broken || !std::isfinite(raw_peak)) { *token = -1; *logprob = NAN; return; }  // the caller names the request
  while (!(z[best] == raw_peak)) best++;
  if (temperature <= 0) { *token = best; *logprob = 0; return; }  // greedy is a point mass
  const float inverse = 1.0f / temperature, peak = raw_peak * inverse;
  float cut = -INFINITY;
  if ((top_k > 0 && top_k < V) || top_p < 1) cut = cut_off(z, V, inverse, peak, top_k, top_p);
  if (min_p > 0) cut = std::max(cut, peak + std::log(min_p));
  const long chunks = (V + CHUNK - 1) / CHUNK;
  partial.resize(chunks);
  double total = 0;
  auto mass16 = [&](long j) {  // of logits j .. j + 15
    const v16f s = scaled16(z, V, inverse, j);
    return (v16f)((v16i)exp16(s - peak) & (s >= v16f{} + cut));
  };
  for (long c = 0; c < chunks; c++) {
    v16f mass{};
    for (long j = c * CHUNK; j < std::min(V, (c + 1) * CHUNK); j += 16) mass = mass + mass16(j);
    partial[c] = sum16(mass);
    total += partial[c];
  }
  const double want = u * total;
  double before = 0;
  long c = 0, last = -1;
  for (; c < chunks; c++) {
    if (before + partial[c] > want) break;
    before += partial[c];
  }
  // Rounding may leave want just past the end of a chunk: the last token with mass stands in.
  for (c = std::min(c, chunks - 1); c < chunks; c++) {
    for (long j = c * CHUNK; j < std::min(V, (c + 1) * CHUNK); j += 16) {
      v16f mass = mass16(j);
      for (long l = 0; l < 16 && j + l < V; l++)
        if (mass[l] > 0) {
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
  *logprob = float(double(z[last]) * inverse - peak - std::log(total));
}

}  // namespace

#define FOR_TYPE(SUFFIX, T)                                                                                          \
  void rms_norm_##SUFFIX(const T* x, long ldx, const T* w, T* y, long n, long D, double eps) {                       \
    rms_norm(x, ldx, w, y, n, D, float(eps));                                                                        \
  }                                                                                                                  \
  void add_rms_norm_##SUFFIX(const T* x, const T* r, const T* w, T* y, T* sum, long n, long D, double eps) {         \
    add_rms_norm(x, r, w, y, sum, n, D, float(eps));                                                                 \
  }                                                                                                                  \
  void rope_##SUFFIX(const T* x, long ldx, const T* cos, const T* sin, T* y, long n, long H, long D) {               \
    rope(x, ldx, cos, sin, y, n, H, D);                                                                              \
  }                                                                                                                  \
  void silu_mul_##SUFFIX(const T* g, T* y, long n, long F) { silu_mul(g, y, n, F); }                                 \
  void write_cache_##SUFFIX(const T* k, long ldk, const T* v, long ldv, const int64_t* slots, T* keys, T* values,    \
                            long n, long Hkv, long Dk, long Dv) {                                                    \
    write_cache(k, ldk, v, ldv, slots, keys, values, n, Hkv, Dk, Dv);                                                \
  }                                                                                                                  \
  void paged_attention_##SUFFIX(const T* q, long ldq, const T* keys, const T* values, const int32_t* tables,         \
                                long ldt, const int32_t* sequence, const int32_t* lengths, T* out, long n, long H,   \
                                long Hkv, long Dk, long Dv, double scale) {                                          \
    paged_attention(q, ldq, keys, values, tables, ldt, sequence, lengths, out, n, H, Hkv, Dk, Dv, float(scale));     \
  }

extern "C" {
FOR_TYPE(f32, float)
FOR_TYPE(bf16, bf16)

void sample(const float* logits, long V, const float* temperature, const int32_t* top_k, const float* top_p,
            const float* min_p, const double* u, int64_t* tokens, float* logprobs, long rows) {
#pragma omp parallel
  {
    static thread_local std::vector<float> partial;
#pragma omp for schedule(dynamic, 1)
    for (long r = 0; r < rows; r++)
      sample_row(logits + r * V, V, temperature[r], top_k[r], top_p[r], min_p[r], u[r], tokens + r, logprobs + r, partial);
  }
}

void exp_f32(const float* x, float* y, long n) {
  for (long i = 0; i + 16 <= n; i += 16) store16(y + i, exp16(load16(x + i)));
}
}
