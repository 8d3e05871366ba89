#include "blocks.h"

#include <algorithm>
#include <array>
#include <unordered_map>
#include <utility>
#include <vector>

// Tokens as they are compared: END is 0, a token its id + 1.
static inline int64_t code(uint16_t stored) { return uint16_t(stored + 1); }  // END = 0xffff wraps to 0
static inline int64_t code(int32_t stored) { return int64_t(stored) + 1; }

// f(tokens), tokens in the width in which the block holds them.
template <class F>
static inline auto with_tokens(const Block& block, F f) {
  return block.narrow ? f(block.narrow) : f(block.wide);
}

// ---- sorting: prefix doubling (Manber and Myers 1993), which ends at DEPTH ----

namespace {

struct Keyed {
  uint64_t key;  // the first tokens of a suffix; what lies behind its END is 0
  int32_t position;
  bool operator<(const Keyed& other) const {
    return key != other.key ? key < other.key : position < other.position;
  }
};

struct Sorting {
  int32_t* order;
  std::vector<int32_t> rank;  // by position: 1 + first place of its group; 0 at an END
  std::vector<int32_t> left;  // by position: tokens before the END of its document
  std::vector<Span> groups;   // of two places or more, whose suffixes agree so far
  std::vector<Span> next;     // the groups after this round
  std::vector<std::pair<int32_t, int32_t>> finer;  // (position, rank) after this round

  // Cut a sorted span where ``key`` changes from one place to the next.
  template <class Key>
  void split(Span span, Key key) {
    for (int32_t low = span.low, high; low < span.high; low = high) {
      for (high = low + 1; high < span.high && key(high) == key(low);) ++high;
      if (high - low > 1) next.push_back({low, high});
      if (low > span.low)  // the first part keeps its rank
        for (int32_t place = low; place < high; ++place) finer.push_back({order[place], 1 + low});
    }
  }

  // A rank that changed before the round is over would compare more than DEPTH tokens in the last one.
  void end_round() {
    for (const auto& [position, number] : finer) rank[position] = number;
    finer.clear();
    groups.swap(next);
    next.clear();
  }

  // Suffixes that agree in ``agreed`` tokens are sorted by what follows these: by twice as many.
  void deepen(int32_t agreed) {
    std::vector<uint64_t> keys;
    for (const Span group : groups) {
      if (left[order[group.low]] < agreed) continue;  // all of them end within these tokens: equal
      keys.clear();
      for (int32_t place = group.low; place < group.high; ++place)
        keys.push_back(uint64_t(rank[order[place] + agreed]) << 32 | uint32_t(order[place]));
      std::sort(keys.begin(), keys.end());
      for (int32_t place = group.low; place < group.high; ++place)
        order[place] = int32_t(uint32_t(keys[place - group.low]));
      split(group, [&](int32_t place) { return keys[place - group.low] >> 32; });
    }
    end_round();
  }
};

template <class T>
void sort_suffixes(const Block& block, const T* tokens) {
  constexpr int bits = 8 * sizeof(T), packed = 64 / bits;
  Sorting sorting{block.order, std::vector<int32_t>(block.length), std::vector<int32_t>(block.length), {}, {}, {}};
  std::vector<Keyed> suffixes;
  suffixes.reserve(block.size());
  uint64_t key = 0;
  for (int32_t position = block.length - 1; position >= 0; --position) {
    const uint64_t first = code(tokens[position]);
    key = first ? first << (64 - bits) | key >> bits : 0;
    sorting.rank[position] = first != 0;
    sorting.left[position] = first ? sorting.left[position + 1] + 1 : 0;
    if (first) suffixes.push_back({key, position});
  }
  std::sort(suffixes.begin(), suffixes.end());
  for (int32_t place = 0; place < block.size(); ++place) block.order[place] = suffixes[place].position;
  sorting.split({0, block.size()}, [&](int32_t place) { return suffixes[place].key; });
  sorting.end_round();
  for (int32_t agreed = packed; agreed < DEPTH && !sorting.groups.empty(); agreed *= 2) sorting.deepen(agreed);
}

}  // namespace

static void sort(Block& block) {
  if (block.sorted) return;
  with_tokens(block, [&](const auto* tokens) { sort_suffixes(block, tokens); });
  block.sorted = true;
}

// ---- searching ----

// Leading tokens of the suffix at ``position`` that equal the context's, from ``agreed`` known ones on.
template <class T>
static inline long common(const T* tokens, int32_t position, const int32_t* context, long n, long agreed) {
  while (agreed < n && code(tokens[position + agreed]) == int64_t(context[agreed]) + 1) ++agreed;
  return agreed;
}

// First place in [low, high) where ``holds``, true up to somewhere, is false; by halving.
template <class Holds>
static inline int32_t first_false(int32_t low, int32_t high, Holds holds) {
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (holds(middle)) low = middle + 1; else high = middle;
  }
  return low;
}

// The same where it is likely near ``low``, at which it holds: by steps that double, then by halving.
template <class Holds>
static inline int32_t end_of_run(int32_t low, int32_t high, Holds holds) {
  int32_t step = 1;
  for (; step < high - low && holds(low + step); step *= 2) low += step;
  return first_false(low + 1, std::min(high, low + step), holds);
}

Span find(const Block& block, const int32_t* context, long n) {
  return with_tokens(block, [&](const auto* tokens) -> Span {
    long below = 0, above = 0;  // what both ends share with the context, all between them share too
    const int32_t low = first_false(0, block.size(), [&](int32_t place) {
      const int32_t position = block.order[place];
      const long agreed = common(tokens, position, context, n, std::min(below, above));
      const bool less = agreed < n && code(tokens[position + agreed]) < int64_t(context[agreed]) + 1;
      (less ? below : above) = agreed;
      return less;
    });
    const auto begins = [&](int32_t place) { return common(tokens, block.order[place], context, n, 0) == n; };
    if (low == block.size() || !begins(low)) return {low, low};
    return {low, end_of_run(low, block.size(), begins)};
  });
}

Span narrow(const Block& block, Span span, long depth, int32_t token) {
  return with_tokens(block, [&](const auto* tokens) -> Span {
    const int64_t wanted = int64_t(token) + 1;
    const auto at = [&](int32_t place) { return code(tokens[block.order[place] + depth]); };
    const int32_t low = first_false(span.low, span.high, [&](int32_t place) { return at(place) < wanted; });
    if (low == span.high || at(low) != wanted) return {low, low};
    return {low, end_of_run(low, span.high, [&](int32_t place) { return at(place) == wanted; })};
  });
}

// How much longer a match could be: tokens before its places that equal those before ``context``, at most ``most``.
// Only places count that go on behind the match, ``length`` tokens.
static long more_to_the_left(const Block& block, Span span, const int32_t* context, long length, long most) {
  return with_tokens(block, [&](const auto* tokens) {
    long best = 0;
    for (int32_t place = span.low; place < span.high && best < most; ++place) {
      const int32_t position = block.order[place];
      if (code(tokens[position + length]) == 0) continue;
      long agreed = 0;  // the END of the document before equals no token
      while (agreed < std::min<long>(most, position) &&
             code(tokens[position - 1 - agreed]) == int64_t(context[-1 - agreed]) + 1)
        ++agreed;
      best = std::max(best, agreed);
    }
    return best;
  });
}

long longest(const Block& block, const int32_t* context, long n, long least, Span* span) {
  constexpr int32_t few = 16;  // places, looked at one by one
  const int32_t* end = context + n;
  const auto search = [&](long length) {  // END sorts first: if any place goes on, the last one does
    const Span found = find(block, end - length, length);
    return found.size() && next_at(block, found.high - 1, length).token != END ? found : Span{};
  };
  long good = least, bad = std::min(n, DEPTH - 1) + 1;  // a match of ``good`` tokens is known, of ``bad`` none
  *span = good < bad ? search(good) : Span{};
  if (!span->size()) return 0;
  while (good + 1 < bad && span->size() > few) {
    const long longer = std::min(2 * good, (good + bad) / 2);
    const Span found = search(longer);
    if (found.size()) good = longer, *span = found; else bad = longer;
  }
  const long more = more_to_the_left(block, *span, end - good, good, bad - 1 - good);
  if (more) good += more, *span = search(good);
  return good;
}

static std::array<float, 256> prob_table() {
  std::array<float, 256> table{};
  double prob = 2.0 / 3, rest = 1.0 / 3;
  for (int at = 182; at > 0; --at, prob /= 1.05) table[at] = float(prob);
  for (int at = 183; at < 255; ++at) table[at] = float(1 - (rest *= 0.914));
  table[255] = 1;
  return table;
}

float prob_of_code(uint8_t code) {
  static const std::array<float, 256> table = prob_table();
  return table[code];
}

Next next_at(const Block& block, int32_t place, long depth) {
  const long position = block.order[place] + depth;
  const int64_t token = with_tokens(block, [&](const auto* tokens) { return code(tokens[position]); });
  const int32_t* document = block.starts;  // the last start up to it, by halving without branches
  for (int32_t count = block.documents; count > 1;) {
    const int32_t half = count / 2;
    document += document[half] <= position ? half : 0;
    count -= half;
  }
  return {int32_t(token - 1), float(block.edges[position]) / 65536, prob_of_code(block.probs[position]),
          block.rewards[document - block.starts]};
}

// ---- the store: which blocks a prompt has ----

struct Store {
  std::unordered_map<uint64_t, std::vector<Block>> prompts;  // of each, the newest block first
  uint64_t generation = 0;
};

uint64_t generation(const Store* store) { return store->generation; }

long blocks_of(const Store* store, uint64_t prompt, const Block** out, long most) {
  const auto found = const_cast<Store*>(store)->prompts.find(prompt);  // sorting late is nobody's business
  if (found == store->prompts.end()) return 0;
  long count = 0;
  for (Block& block : found->second) {
    if (count == most) break;
    sort(block);
    out[count++] = &block;
  }
  return count;
}

// ---- for Python; ``history_`` before every name ----

extern "C" {

Store* history_new() { return new Store; }
void history_free(Store* store) { delete store; }
uint64_t history_generation(const Store* store) { return generation(store); }

// The caller has dropped a block of the same prompt and step, and keeps the arrays until it drops this one.
void history_add(Store* store, uint64_t prompt, const Block* block) {
  auto& blocks = store->prompts[prompt];
  const auto older = [&](const Block& other) { return other.step < block->step; };
  blocks.insert(std::find_if(blocks.begin(), blocks.end(), older), *block);
  ++store->generation;
}

void history_drop(Store* store, uint64_t prompt, int32_t step) {
  auto& blocks = store->prompts[prompt];
  const auto same = [&](const Block& block) { return block.step == step; };
  blocks.erase(std::remove_if(blocks.begin(), blocks.end(), same), blocks.end());
  if (blocks.empty()) store->prompts.erase(prompt);
  ++store->generation;
}

// The block of a prompt and step, sorted; null where there is none.
const Block* history_block(Store* store, uint64_t prompt, int32_t step) {
  const auto found = store->prompts.find(prompt);
  if (found == store->prompts.end()) return nullptr;
  for (Block& block : found->second)
    if (block.step == step) return sort(block), &block;
  return nullptr;
}

void history_find(const Block* block, const int32_t* context, long n, Span* span) {
  *span = find(*block, context, n);
}

void history_narrow(const Block* block, Span* span, long depth, int32_t token) {
  *span = narrow(*block, *span, depth, token);
}

long history_longest(const Block* block, const int32_t* context, long n, long least, Span* span) {
  return longest(*block, context, n, least, span);
}

void history_next(const Block* block, int32_t place, long depth, Next* next) {
  *next = next_at(*block, place, depth);
}

}  // extern "C"
