// Paged attention: see attention.h. Every row walks its own blocks and is summed in a fixed order.

#include "attention.h"

template <class T> void write_slot(const Cache<T>& cache, const T* k, const T* v, long slot) {
  constexpr long P = pair<T>();
  const long block = slot / BLOCK, offset = slot % BLOCK, Dk = cache.Dk, Dv = cache.Dv;
  for (long h = 0; h < cache.Hkv; h++) {
    T* to = cache.keys + (block * cache.Hkv + h) * Dk * BLOCK + offset * P;
    for (long d = 0; d < Dk; d += P) memcpy(to + d * BLOCK, k + h * Dk + d, P * sizeof(T));
    memcpy(cache.values + ((block * cache.Hkv + h) * BLOCK + offset) * Dv, v + h * Dv, Dv * sizeof(T));
  }
}

namespace {

constexpr int VECTORS = BLOCK / LANES;  // that hold one feature of a block's positions

// The largest power of two up to `most` whose Q * `vectors` fold of sums leaves registers for what they are made of.
constexpr int sums_at_once(int Q, int vectors, int most) {
  int n = most;
  while (n > 1 && n * Q * vectors > REGISTERS * 3 / 4) n /= 2;
  return n;
}

// Scores of Q query heads, Dk apart, against the 16 positions of one block: its keys are loaded once.
// Several running sums per query hide the latency of the multiply-add.
template <int Q> inline void block_scores(const float* q, const float* keys, long D, vec (*scores)[VECTORS]) {
  constexpr int RUNNING = sums_at_once(Q, VECTORS, 4);
  vec sums[Q][RUNNING][VECTORS] = {};
  auto step = [&](int j, long d) {
    for (int v = 0; v < VECTORS; v++) {
      const vec key = load(keys + d * BLOCK + v * LANES);
      for (int i = 0; i < Q; i++) sums[i][j][v] += q[i * D + d] * key;
    }
  };
  long d = 0;
  for (; d + RUNNING <= D; d += RUNNING)
    for (int j = 0; j < RUNNING; j++) step(j, d + j);
  for (; d < D; d++) step(0, d);
  for (int i = 0; i < Q; i++)
    for (int v = 0; v < VECTORS; v++) {
      vec* s = &sums[i][0][v];
      if (RUNNING == 4) scores[i][v] = (s[0] + s[VECTORS]) + (s[2 * VECTORS] + s[3 * VECTORS]);
      else scores[i][v] = RUNNING == 2 ? s[0] + s[VECTORS] : s[0];
    }
}
#if defined(__AVX512BF16__)
template <int Q> inline void block_scores(const bf16* q, const bf16* keys, long D, vec (*scores)[VECTORS]) {
  __m512 sums[Q][4] = {};
  auto step = [&](int j, long d) {
    const __m512bh key = (__m512bh)_mm512_loadu_si512(keys + d * BLOCK);
    for (int i = 0; i < Q; i++) {
      int two;
      memcpy(&two, q + i * D + d, 4);
      sums[i][j] = _mm512_dpbf16_ps(sums[i][j], key, (__m512bh)_mm512_set1_epi32(two));
    }
  };
  long d = 0;
  for (; d + 8 <= D; d += 8) { step(0, d); step(1, d + 2); step(2, d + 4); step(3, d + 6); }
  for (; d < D; d += 2) step(0, d);
  for (int i = 0; i < Q; i++)
    scores[i][0] = (vec)_mm512_add_ps(_mm512_add_ps(sums[i][0], sums[i][1]), _mm512_add_ps(sums[i][2], sums[i][3]));
}
#else
template <int Q> inline void block_scores(const bf16* q, const bf16* keys, long D, vec (*scores)[VECTORS]) {
  vec sums[Q][VECTORS] = {};
  for (long d = 0; d < D; d += 2)
    for (int v = 0; v < VECTORS; v++) {
      const Halves key = halves(keys + d * BLOCK + v * 2 * LANES);  // features d and d + 1 of LANES positions
      for (int i = 0; i < Q; i++) sums[i][v] += to_float(q[i * D + d]) * key.even;
      for (int i = 0; i < Q; i++) sums[i][v] += to_float(q[i * D + d + 1]) * key.odd;
    }
  for (int i = 0; i < Q; i++)
    for (int v = 0; v < VECTORS; v++) scores[i][v] = sums[i][v];
}
#endif

// What Q query heads of one key-value head of one row need.
template <class T> struct Heads {
  const T *q, *keys, *values;  // keys and values: of this head in block 0
  const int32_t* table;
  long from, n;  // positions from to n - 1 are seen
  long Dk, Dv, key_stride, value_stride;  // elements from block to block
  float scale;
  float* p;  // [Q, room] probabilities
  long room;
  T* out;
  float* lse;  // [Q] or null
};

// Blocks lie anywhere in the cache, out of reach of the processor's own prefetching.
inline void fetch(const void* from, long bytes) {
  for (long b = 0; b < bytes; b += 64) __builtin_prefetch((const char*)from + b);
}

// p[i] = softmax(scale * q[i] keys^T), normalised. Fetches the values on the way.
template <class T, int Q> inline void weigh_positions(const Heads<T>& a) {
  const long blocks = (a.n + BLOCK - 1) / BLOCK, begin = a.from / BLOCK;
  vec top[Q], s[Q][VECTORS];
  for (int i = 0; i < Q; i++) top[i] = splat(-INFINITY);
  for (long b = begin; b < blocks; b++) {
    if (b + 1 < blocks) fetch(a.keys + a.table[b + 1] * a.key_stride, a.Dk * BLOCK * sizeof(T));
    fetch(a.values + a.table[b] * a.value_stride, a.Dv * BLOCK * sizeof(T));
    block_scores<Q>(a.q, a.keys + a.table[b] * a.key_stride, a.Dk, s);
    for (int i = 0; i < Q; i++)
      for (int v = 0; v < VECTORS; v++) {
        const long at = b * BLOCK + v * LANES;
        vec scaled = first_lanes_or_low(s[i][v] * a.scale, a.n - at);
        if (at < a.from) scaled = without_first_lanes(scaled, a.from - at);
        store(a.p + i * a.room + at, scaled);
        top[i] = max(top[i], scaled);
      }
  }
  for (int i = 0; i < Q; i++) {
    float* p = a.p + i * a.room;
    const float peak = max_lane(top[i]);
    vec total{};
    for (long at = begin * BLOCK; at < blocks * BLOCK; at += LANES) {
      const vec e = exp(load(p + at) - peak);
      store(p + at, e);
      total = total + e;
    }
    const float mass = lane_sum(total), inverse = 1.0f / mass;
    if (a.lse) a.lse[i] = peak + std::log(mass);
    for (long at = begin * BLOCK; at < blocks * BLOCK; at += LANES) store(p + at, load(p + at) * inverse);
  }
}

// Features [d, d + COUNT vectors) of out[i] = sum over n positions of p[i] * value, in position order; a value is
// loaded and widened once for all i.
template <class T, int Q, int COUNT> inline void weigh_features(const Heads<T>& a, long d) {
  vec acc[Q][COUNT] = {};
  for (long first = a.from / BLOCK * BLOCK; first < a.n; first += BLOCK) {
    const long own = std::max(a.from, first);
    const T* v = a.values + a.table[first / BLOCK] * a.value_stride + (own - first) * a.Dv + d;
    for (long j = own; j < std::min(a.n, first + BLOCK); j++, v += a.Dv)
      for (int k = 0; k < COUNT; k++) {
        const vec value = load(v + k * LANES);
        for (int i = 0; i < Q; i++) acc[i][k] += a.p[i * a.room + j] * value;
      }
  }
  for (int i = 0; i < Q; i++)
    for (int k = 0; k < COUNT; k++) store(a.out + i * a.Dv + d + k * LANES, acc[i][k]);
}
template <class T, int Q> inline void weigh_values(const Heads<T>& a) {
  constexpr int COUNT = sums_at_once(Q, 1, 8);
  long d = 0;
  for (; d + COUNT * LANES <= a.Dv; d += COUNT * LANES) weigh_features<T, Q, COUNT>(a, d);
  for (; d + LANES <= a.Dv; d += LANES) weigh_features<T, Q, 1>(a, d);
  for (; d < a.Dv; d++)
    for (int i = 0; i < Q; i++) {
      float acc = 0;
      for (long j = a.from; j < a.n; j++)
        acc += a.p[i * a.room + j] * to_float(a.values[a.table[j / BLOCK] * a.value_stride + j % BLOCK * a.Dv + d]);
      store1(a.out + i * a.Dv + d, acc);
    }
}

template <class T, int Q> void attend_heads(const Heads<T>& a) {
  weigh_positions<T, Q>(a);
  weigh_values<T, Q>(a);
}

// All query heads of key-value head h of row t.
template <class T> void attend(const Attention<T>& a, long t, long h, std::vector<float>& p) {
  const Cache<T>& c = a.cache;
  const long from = a.window ? std::max(0L, a.lengths[t] - a.window) : 0;
  const long G = a.H / c.Hkv, room = (a.lengths[t] + BLOCK - 1) / BLOCK * BLOCK;
  constexpr long most = 4;  // query heads at once
  if (long(p.size()) < most * room) p.resize(most * room);
  for (long g = 0; g < G;) {
    const long count = std::min(most, G - g), head = h * G + g;
    const Heads<T> heads{a.q + t * a.ldq + head * c.Dk, c.keys + h * c.Dk * BLOCK, c.values + h * BLOCK * c.Dv,
                         a.tables + a.sequence[t] * a.ldt, from, a.lengths[t], c.Dk, c.Dv, c.Hkv * c.Dk * BLOCK,
                         c.Hkv * BLOCK * c.Dv, a.scale, p.data(), room, a.out + (t * a.H + head) * c.Dv,
                         a.lse ? a.lse + t * a.H + head : nullptr};
    switch (count) {
      case 4: attend_heads<T, 4>(heads); break;
      case 3: attend_heads<T, 3>(heads); break;
      case 2: attend_heads<T, 2>(heads); break;
      default: attend_heads<T, 1>(heads);
    }
    g += count;
  }
}

// The first keys of row t and head h, while the item before is computed.
template <class T> inline void fetch_first(const Attention<T>& a, long t, long h) {
  if (t >= a.T_) return;
  const long block = a.tables[a.sequence[t] * a.ldt];
  fetch(a.cache.keys + (block * a.cache.Hkv + h) * a.cache.Dk * BLOCK, a.cache.Dk * BLOCK * sizeof(T));
}

}  // namespace

template <class T> void attend_share(const Attention<T>& a) {
  static thread_local std::vector<float> p;
  const long Hkv = a.cache.Hkv, threads = omp_get_num_threads(), me = omp_get_thread_num();
  auto cost = [&](long t) { return long(a.lengths[t]) + 2 * BLOCK; };  // long rows cost more
  long total = 0, at = 0;
  for (long t = 0; t < a.T_; t++) total += cost(t) * Hkv;
  const long from = total * me / threads, to = total * (me + 1) / threads;
  for (long t = 0; t < a.T_; t++)
    for (long h = 0; h < Hkv; h++, at += cost(t))
      if (at >= from && at < to) {
        fetch_first(a, h + 1 < Hkv ? t : t + 1, (h + 1) % Hkv);
        attend(a, t, h, p);
      }
}

#define INSTANCES(T)                                                       \
  template void write_slot(const Cache<T>&, const T*, const T*, long);     \
  template void attend_share(const Attention<T>&);
INSTANCES(float)
INSTANCES(bf16)

#define FOR_TYPE(SUFFIX, T)                                                                                           \
  /* Slot i takes row i. */                                                                                           \
  void write_cache_##SUFFIX(const T* k, long ldk, const T* v, long ldv, const int64_t* slots, T* keys, T* values,     \
                            long n, long Hkv, long Dk, long Dv) {                                                     \
    const Cache<T> cache{keys, values, Hkv, Dk, Dv};                                                                  \
    _Pragma("omp parallel for schedule(static) if (n > 64)") for (long i = 0; i < n; i++) {                           \
      write_slot(cache, k + i * ldk, v + i * ldv, slots[i]);                                                          \
    }                                                                                                                 \
  }                                                                                                                   \
  void paged_attention_##SUFFIX(const T* q, long ldq, const T* keys, const T* values, const int32_t* tables,          \
                                long ldt, const int32_t* sequence, const int32_t* lengths, T* out, float* lse,        \
                                long n, long H, long Hkv, long Dk, long Dv, long window, double scale) {              \
    const Cache<T> cache{const_cast<T*>(keys), const_cast<T*>(values), Hkv, Dk, Dv};                                  \
    const Attention<T> a{q, ldq, cache, tables, ldt, sequence, lengths, out, n, H, float(scale), lse, window};        \
    _Pragma("omp parallel") attend_share(a);                                                                          \
  }

extern "C" {
FOR_TYPE(f32, float)
FOR_TYPE(bf16, bf16)
}
