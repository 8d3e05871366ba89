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

// Scores of Q query heads, Dk apart, against the 16 positions of one block: its keys are loaded once.
// Four running sums per query hide the latency of the multiply-add.
template <int Q> inline void block_scores(const float* q, const float* keys, long D, v16f* scores) {
  v16f sums[Q][4] = {};
  long d = 0;
  for (; d + 4 <= D; d += 4)
    for (int j = 0; j < 4; j++) {
      const v16f key = load16(keys + (d + j) * BLOCK);
      for (int i = 0; i < Q; i++) sums[i][j] = sums[i][j] + q[i * D + d + j] * key;
    }
  for (; d < D; d++)
    for (int i = 0; i < Q; i++) sums[i][0] = sums[i][0] + q[i * D + d] * load16(keys + d * BLOCK);
  for (int i = 0; i < Q; i++) scores[i] = (sums[i][0] + sums[i][1]) + (sums[i][2] + sums[i][3]);
}
#if defined(__AVX512BF16__)
template <int Q> inline void block_scores(const bf16* q, const bf16* keys, long D, v16f* scores) {
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
    scores[i] = (v16f)_mm512_add_ps(_mm512_add_ps(sums[i][0], sums[i][1]), _mm512_add_ps(sums[i][2], sums[i][3]));
}
#else
template <int Q> inline void block_scores(const bf16* q, const bf16* keys, long D, v16f* scores) {
  v16f sums[Q] = {};
  for (long d = 0; d < D; d += 2) {
    v16u raw;
    memcpy(&raw, keys + d * BLOCK, 64);
    const v16f even = (v16f)(raw << 16), odd = (v16f)(raw & 0xffff0000u);
    for (int i = 0; i < Q; i++) sums[i] = sums[i] + to_float(q[i * D + d]) * even + to_float(q[i * D + d + 1]) * odd;
  }
  for (int i = 0; i < Q; i++) scores[i] = sums[i];
}
#endif

// What Q query heads of one key-value head of one row need.
template <class T> struct Heads {
  const T *q, *keys, *values;  // keys and values: of this head in block 0
  const int32_t* table;
  long n, Dk, Dv, key_stride, value_stride;  // elements from block to block
  float scale;
  float* p;  // [Q, room] probabilities
  long room;
  T* out;
};

// Blocks lie anywhere in the cache, out of reach of the processor's own prefetching.
inline void fetch(const void* from, long bytes) {
  for (long b = 0; b < bytes; b += 64) __builtin_prefetch((const char*)from + b);
}

// p[i] = softmax(scale * q[i] keys^T), normalised. Fetches the values on the way.
template <class T, int Q> inline void weigh_positions(const Heads<T>& a) {
  const long blocks = (a.n + BLOCK - 1) / BLOCK;
  v16f top[Q], s[Q];
  for (int i = 0; i < Q; i++) top[i] = v16f{} - INFINITY;
  for (long b = 0; b < blocks; b++) {
    if (b + 1 < blocks) fetch(a.keys + a.table[b + 1] * a.key_stride, a.Dk * BLOCK * sizeof(T));
    fetch(a.values + a.table[b] * a.value_stride, a.Dv * BLOCK * sizeof(T));
    block_scores<Q>(a.q, a.keys + a.table[b] * a.key_stride, a.Dk, s);
    for (int i = 0; i < Q; i++) {
      const v16f scaled = first_lanes_or_low(s[i] * a.scale, a.n - b * BLOCK);
      store16(a.p + i * a.room + b * BLOCK, scaled);
      top[i] = max16(top[i], scaled);
    }
  }
  for (int i = 0; i < Q; i++) {
    float* p = a.p + i * a.room;
    const float peak = max_lane(top[i]);
    v16f total{};
    for (long b = 0; b < blocks; b++) {
      const v16f e = exp16(load16(p + b * BLOCK) - peak);
      store16(p + b * BLOCK, e);
      total = total + e;
    }
    const float inverse = 1.0f / sum16(total);
    for (long b = 0; b < blocks; b++) store16(p + b * BLOCK, load16(p + b * BLOCK) * inverse);
  }
}

// out[i] = sum over n positions of p[i] * value, in position order; a value is loaded and widened once for all i.
template <class T, int Q, int VECTORS> inline void weigh_values(const Heads<T>& a) {
  v16f acc[Q][VECTORS] = {};
  for (long first = 0; first < a.n; first += BLOCK) {
    const T* v = a.values + a.table[first / BLOCK] * a.value_stride;
    for (long j = first; j < std::min(a.n, first + BLOCK); j++, v += 16 * VECTORS)
      for (int k = 0; k < VECTORS; k++) {
        const v16f value = load16(v + 16 * k);
        for (int i = 0; i < Q; i++) acc[i][k] = acc[i][k] + a.p[i * a.room + j] * value;
      }
  }
  for (int i = 0; i < Q; i++)
    for (int k = 0; k < VECTORS; k++) store16(a.out + i * a.Dv + 16 * k, acc[i][k]);
}
template <class T, int Q> inline void weigh_values_any(const Heads<T>& a) {
  constexpr long WIDTH = 256;  // features at a time
  for (int i = 0; i < Q; i++)
    for (long first = 0; first < a.Dv; first += WIDTH) {
      float acc[WIDTH] = {};
      const long width = std::min(WIDTH, a.Dv - first);
      for (long j = 0; j < a.n; j++) {
        const T* v = a.values + a.table[j / BLOCK] * a.value_stride + j % BLOCK * a.Dv + first;
        for (long d = 0; d < width; d++) acc[d] += a.p[i * a.room + j] * to_float(v[d]);
      }
      for (long d = 0; d < width; d++) store1(a.out + i * a.Dv + first + d, acc[d]);
    }
}

template <class T, int Q> void attend_heads(const Heads<T>& a) {
  weigh_positions<T, Q>(a);
  switch (a.Dv) {
    case 32: return weigh_values<T, Q, 2>(a);
    case 64: return weigh_values<T, Q, 4>(a);
    case 128: return weigh_values<T, Q, 8>(a);
    default: return weigh_values_any<T, Q>(a);
  }
}

// All query heads of key-value head h of row t.
template <class T> void attend(const Attention<T>& a, long t, long h, std::vector<float>& p) {
  const Cache<T>& c = a.cache;
  const long G = a.H / c.Hkv, room = (a.lengths[t] + BLOCK - 1) / BLOCK * BLOCK;
  const long most = c.Dv > 64 ? 2 : 4;  // query heads whose sums fit the registers
  if (long(p.size()) < most * room) p.resize(most * room);
  for (long g = 0; g < G;) {
    const long count = std::min(most, G - g), head = h * G + g;
    const Heads<T> heads{a.q + t * a.ldq + head * c.Dk, c.keys + h * c.Dk * BLOCK, c.values + h * BLOCK * c.Dv,
                         a.tables + a.sequence[t] * a.ldt, a.lengths[t], c.Dk, c.Dv, c.Hkv * c.Dk * BLOCK,
                         c.Hkv * BLOCK * c.Dv, a.scale, p.data(), room, a.out + (t * a.H + head) * c.Dv};
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
  /* Slot i takes row rows[i], or row i without rows. */                                                              \
  void write_cache_##SUFFIX(const T* k, long ldk, const T* v, long ldv, const int64_t* slots, const int32_t* rows,    \
                            T* keys, T* values, long n, long Hkv, long Dk, long Dv) {                                 \
    const Cache<T> cache{keys, values, Hkv, Dk, Dv};                                                                  \
    _Pragma("omp parallel for schedule(static) if (n > 64)") for (long i = 0; i < n; i++) {                           \
      const long row = rows ? rows[i] : i;                                                                            \
      write_slot(cache, k + row * ldk, v + row * ldv, slots[i]);                                                      \
    }                                                                                                                 \
  }                                                                                                                   \
  void paged_attention_##SUFFIX(const T* q, long ldq, const T* keys, const T* values, const int32_t* tables,          \
                                long ldt, const int32_t* sequence, const int32_t* lengths, T* out, long n, long H,    \
                                long Hkv, long Dk, long Dv, double scale) {                                           \
    const Cache<T> cache{const_cast<T*>(keys), const_cast<T*>(values), Hkv, Dk, Dv};                                  \
    const Attention<T> a{q, ldq, cache, tables, ldt, sequence, lengths, out, n, H, float(scale)};                     \
    _Pragma("omp parallel") attend_share(a);                                                                          \
  }

extern "C" {
FOR_TYPE(f32, float)
FOR_TYPE(bf16, bf16)
}
