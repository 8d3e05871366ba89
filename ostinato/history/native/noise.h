// The keys and addressed uniforms of algo/noise.py, bit for bit.
#pragma once
#include <cstdint>

inline uint64_t mix(uint64_t value) {  // the finaliser of splitmix64
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
  return value ^ (value >> 31);
}

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15ull;

inline uint64_t key_of(const int64_t* seed, long parts) {
  uint64_t state = mix(uint64_t(parts) + GOLDEN);
  for (long i = 0; i < parts; ++i) state = mix(state ^ mix(uint64_t(seed[i]) + GOLDEN));
  return state;
}

inline double uniform(uint64_t key, int64_t position) {
  const uint64_t bits = mix(key ^ mix(uint64_t(position) + GOLDEN));
  return (double(bits >> 12) + 0.5) * 0x1p-52;
}
