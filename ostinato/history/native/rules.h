// What Python sets and reads; the same structures stand in history/drafter.py.
#pragma once
#include <cstdint>

#include "estimate.h"
#include "live.h"

constexpr int MOST_DEPTH = 32;  // of a draft
constexpr int BINS = 10;        // of the table of reliability

// Meanings in history/rules.py.
struct Rules {
  int32_t sources[SOURCES];
  int32_t noise, most, least, epochs, length, walk;
  Levels ladder, live, shared;
  int64_t ring, group, total;
};

struct Stats {
  int64_t passes, naps, looked, slept, emitted;
  int64_t drafted[SOURCES], accepted[SOURCES];
  int64_t drafted_at[MOST_DEPTH], accepted_at[MOST_DEPTH];
  int64_t labels[BINS], hits[BINS];
  double predicted[BINS];
  int64_t live_bytes, sequences, groups;
};
