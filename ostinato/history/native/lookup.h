// From occurrences of a context to candidates for the next token.
#pragma once
#include <algorithm>
#include <cstdint>

#include "blocks.h"
#include "estimate.h"

constexpr int MOST_OCCURRENCES = 32;  // counted in one look-up
constexpr int MOST_WALK = 512;        // of live text
constexpr int MOST_CANDIDATES = 8;    // kept at one node
constexpr double FAR = 0.05;          // outside its interval by this much, a token is not looked at
constexpr double GOOD = 0.95;         // an estimate from which on no further source is asked

struct Candidate {
  int32_t token;
  Source source;
  int length;  // tokens of context it was found with
  double estimate;
  double x[FEATURES];
};

// Distinct tokens, each with its best estimate; the first found comes first among equals.
struct Candidates {
  Candidate at[MOST_CANDIDATES];
  int count = 0;
  bool ended = false;  // history knows no more: every match stands at the end of its response

  void offer(const Candidate& candidate) {
    int place = 0;
    while (place < count && at[place].token != candidate.token) ++place;
    if (place < count && at[place].estimate >= candidate.estimate) return;
    if (place == count) {
      if (count == MOST_CANDIDATES && at[count - 1].estimate >= candidate.estimate) return;
      if (count == MOST_CANDIDATES) --place; else ++count;
    }
    for (; place > 0 && at[place - 1].estimate < candidate.estimate; --place) at[place] = at[place - 1];
    at[place] = candidate;
  }
  bool good() const { return count > 0 && at[0].estimate >= GOOD; }
};

// One occurrence of a token after the context.
struct Occurrence {
  int32_t token;
  float edge, prob;  // prob 0: not known
  int32_t place;     // in the order of its block, for its reward; -1 outside of history
  Source source;
};

// The occurrences of one context in one source, by token.
class Tally {
 public:
  explicit Tally(double u) : u_(u) {}

  void add(const Occurrence& seen) {
    if (total_ == MOST_OCCURRENCES) return;
    ++total_;
    int at = size_ - 1;  // spans are sorted by token: it is most often the last one
    while (at >= 0 && items_[at].token != seen.token) --at;
    if (at < 0) items_[at = size_++] = {seen.token, 0, 0, -2.0, seen};
    Item& item = items_[at];
    ++item.count;
    if (seen.prob <= 0) return;
    const double inside = std::min(u_ - double(seen.edge), double(seen.edge) + double(seen.prob) - u_);
    item.votes += inside > 0, votes_ += inside > 0;
    if (inside > item.inside) item.inside = inside, item.best = seen;
  }

  int total() const { return total_; }

  // Every token that may come, with its estimate. ``block``: where they were found, null outside of history.
  void offer(const Estimator& estimator, double odds, const Block* block, int length, double age,
             Candidates& candidates) const {
    const double scaled = std::log2(1.0 + length);
    for (const Item* item = items_; item < items_ + size_; ++item) {
      if (item->best.prob > 0 && item->inside < -FAR) continue;
      const double reward = block ? next_at(*block, item->best.place, length).reward : 0;
      Candidate candidate{item->token, item->best.source, length, 0.0, {}};
      const double votes = votes_ ? double(item->votes) / votes_ : 0;
      features({odds, item->best.edge, item->best.prob, double(item->count), double(total_), votes, reward, age,
                scaled, item->best.source}, candidate.x);
      candidate.estimate = estimator.probability(candidate.x);
      candidates.offer(candidate);
    }
  }

 private:
  struct Item {
    int32_t token, count, votes;  // how often it came, and how often with an interval that u lies in
    double inside;    // of its best occurrence: distance of u to the nearer end of the interval, negative outside
    Occurrence best;  // the first one, where no interval is known
  };
  double u_;
  int size_ = 0, total_ = 0, votes_ = 0;
  Item items_[MOST_OCCURRENCES];
};

// What lies ``depth`` behind a place, as ``next_at`` has it but without the reward, whose document takes a search.
class Reader {
 public:
  Reader() {
    for (int code = 0; code < 256; ++code) probs_[code] = prob_of_code(uint8_t(code));
  }
  Occurrence read(const Block& block, int32_t place, long depth) const {
    const int32_t position = block.order[place] + int32_t(depth);
    return {token(block, position), float(block.edges[position]) / 65536, probs_[block.probs[position]], place,
            HISTORY};
  }
  int32_t token(const Block& block, int32_t position) const {
    if (!block.narrow) return block.wide[position];
    return block.narrow[position] == 0xffff ? END : block.narrow[position];
  }

 private:
  float probs_[256];
};

// The places of a span that are worth reading: those that go on and, with noise, of a long span those around ``u``
// (it is sorted by its next token, and intervals lie in the order of tokens).
inline Span window(const Reader& reader, const Block& block, Span span, long depth, bool noise, double u) {
  if (reader.read(block, span.low, depth).token == END) span.low = narrow(block, span, depth, END).high;
  if (!noise || span.size() <= MOST_OCCURRENCES) return span;
  int32_t low = span.low, high = span.high;
  while (low < high) {  // the first place whose interval begins behind u
    const int32_t middle = low + (high - low) / 2;
    if (double(reader.read(block, middle, depth).edge) <= u) low = middle + 1; else high = middle;
  }
  low = std::min(std::max(low - 3 * MOST_OCCURRENCES / 4, span.low), span.high - MOST_OCCURRENCES);
  return {low, low + MOST_OCCURRENCES};
}

// Add the next tokens of a span, evenly spaced where there are too many.
inline void add_span(const Reader& reader, const Block& block, Span span, long depth, bool noise, Tally& tally) {
  const int64_t count = std::min(span.size(), MOST_OCCURRENCES);
  for (int64_t i = 0; i < count; ++i) {
    Occurrence seen = reader.read(block, span.low + int32_t(i * span.size() / count), depth);
    if (!noise) seen.prob = 0;
    tally.add(seen);
  }
}
