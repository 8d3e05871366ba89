// What has just been written, by the tokens before it: a ring of observations with hash chains through it, newest
// first. A chain joins what came after the same ``shortest`` context; each observation knows hashes of longer contexts
// too, so that one walk finds matches of every length and one token costs one insertion.
//
// An observation stands alone (it holds its token and its interval), so that a draft needs no text to follow, and the
// text of a sequence can go when the sequence ends. Bounded: at most ``most`` observations (rounded up to a power of
// two), of 32 bytes and at most four slots of 8; the oldest are overwritten.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "noise.h"

constexpr int MOST_LEVELS = 7;
constexpr int MOST_CONTEXT = 32;  // the longest context length

// Context lengths, longest first.
struct Levels {
  int32_t count = 0;
  int32_t lengths[MOST_LEVELS] = {};
};

// The contexts of a place, hashed; ``known`` is false where even the shortest one is longer than the text.
struct Contexts {
  bool known = false;
  uint32_t shortest = 0;
  uint16_t longer[MOST_LEVELS - 1] = {};  // by level; 0 where the text is too short, and never 0 otherwise
};

inline Contexts contexts_before(const int32_t* end, long available, const Levels& levels) {
  Contexts contexts;
  uint64_t hash = 0;
  long taken = 0;
  for (int level = levels.count - 1; level >= 0 && levels.lengths[level] <= available; --level) {
    for (; taken < levels.lengths[level]; ++taken)
      hash = (hash + uint64_t(uint32_t(end[-1 - taken])) + 1) * GOLDEN;
    const uint64_t mixed = hash ^ (hash >> 32);  // upper bits of a product depend on all that was multiplied
    if (contexts.known) contexts.longer[level] = uint16_t(mixed >> 16) | 1;
    else contexts.known = true, contexts.shortest = uint32_t(mixed);
  }
  return contexts;
}

struct Seen {
  int32_t token;
  float edge, prob;     // prob 0: nobody sampled it (a prompt)
  uint32_t writer;      // of the sequence that wrote it, 0 for a prompt
  uint32_t before = 0;  // the observation before it in its chain
  uint16_t longer[MOST_LEVELS - 1] = {};
};

class Live {
 public:
  explicit Live(uint32_t most) {
    while (most_ < most) most_ *= 2;  // a power of two: places are ids without their upper bits
  }

  void add(const Contexts& contexts, Seen seen) {
    if (!contexts.known) return;  // nothing would ever find it
    if (last_ == UINT32_MAX) *this = Live(most_);  // ids would begin again
    if (4 * used_ >= 3 * slots_.size()) rebuild();
    const uint32_t id = ++last_, place = place_of(id);
    Slot& slot = slots_[find(contexts.shortest)];
    used_ += slot.head == 0;
    seen.before = slot.head;
    std::copy(contexts.longer, contexts.longer + MOST_LEVELS - 1, seen.longer);
    slot = {contexts.shortest, id};
    if (place == seen_.size()) seen_.push_back(seen);
    else seen_[place] = seen;
  }

  // f(const Seen&) for the newest observations after this context, at most ``walk`` of them.
  template <class F>
  void walk(const Contexts& contexts, long walk, F f) const {
    if (slots_.empty() || !contexts.known) return;
    for (uint32_t id = slots_[find(contexts.shortest)].head; alive(id) && walk-- > 0;) {
      const Seen& seen = seen_[place_of(id)];
      f(seen);
      id = seen.before;
    }
  }

  int64_t size() const { return int64_t(seen_.size()); }
  int64_t bytes() const { return int64_t(seen_.capacity() * sizeof(Seen) + slots_.capacity() * sizeof(Slot)); }

 private:
  struct Slot {
    uint32_t hash, head;  // head 0: empty
  };

  uint32_t place_of(uint32_t id) const { return (id - 1) & (most_ - 1); }
  bool alive(uint32_t id) const { return id != 0 && last_ - id < most_; }

  // The slot of this context, or the empty one where it belongs.
  size_t find(uint32_t hash) const {
    const size_t mask = slots_.size() - 1;
    size_t at = hash & mask;
    while (slots_[at].head != 0 && slots_[at].hash != hash) at = (at + 1) & mask;
    return at;
  }

  // Drop the contexts whose last observation has been overwritten; room for at least twice those that are left.
  void rebuild() {
    std::vector<Slot> old;
    old.swap(slots_);
    size_t left = 0, size = 256;
    for (const Slot& slot : old) left += alive(slot.head);
    while (size < 2 * left) size *= 2;
    slots_.assign(size, Slot{0, 0});
    used_ = left;
    for (const Slot& slot : old)
      if (alive(slot.head)) slots_[find(slot.hash)] = slot;
  }

  uint32_t most_ = 1, last_ = 0;
  size_t used_ = 0;
  std::vector<Seen> seen_;   // by place
  std::vector<Slot> slots_;  // open addressing
};
