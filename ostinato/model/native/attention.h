// Paged keys and values, and attention over them.
//
// Blocks of 16 positions; a slot is block * 16 + offset. Keys [blocks, Hkv, Dk / pair, 16, pair] (pair = 2 for bf16,
// 1 for fp32): a vector holds one feature (pair) of 16 positions. Values [blocks, Hkv, 16, Dv].
#pragma once
#include "common.h"

constexpr long BLOCK = 16;
template <class T> constexpr long pair() { return sizeof(T) == 2 ? 2 : 1; }

// One layer of the cache.
template <class T> struct Cache {
  T *keys, *values;
  long Hkv, Dk, Dv;
};

// k [Hkv, Dk] and v [Hkv, Dv] of one position.
template <class T> void write_slot(const Cache<T>& cache, const T* k, const T* v, long slot);

// Row t of q [T, H, Dk] (rows `ldq` apart) sees the first lengths[t] positions of the blocks tables[sequence[t]].
template <class T> struct Attention {
  const T* q;
  long ldq;
  Cache<T> cache;
  const int32_t* tables;
  long ldt;
  const int32_t *sequence, *lengths;
  T* out;  // [T, H, Dv]
  long T_, H;
  float scale;
  float* lse = nullptr;  // [T, H] log of the sum of exp(scaled scores), for the backward of training; or null
  long window = 0;  // and of these the last so many; 0: all
};

// The calling thread's share of rows and key-value heads.
template <class T> void attend_share(const Attention<T>& a);
