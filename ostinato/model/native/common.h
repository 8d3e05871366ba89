// Shared by the kernels: the split of work over threads, and workspaces.
#pragma once
#include <omp.h>
#include <vector>
#include "vector.h"

// This thread's share [first, last) of n equal items.
inline void share(long n, long& first, long& last) {
  const long threads = omp_get_num_threads(), me = omp_get_thread_num();
  first = n * me / threads;
  last = n * (me + 1) / threads;
}

// Hands out the pieces of one allocation; with a null base it only measures.
struct Arena {
  char* base;
  long used = 0;
  template <class T> T* take(long count) {
    const long at = used;
    used += (count * long(sizeof(T)) + 63) / 64 * 64;
    return base ? (T*)(base + at) : nullptr;
  }
};
