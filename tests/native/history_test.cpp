// Closed history: search by suffix, against walks over the whole text.

#include "../../ostinato/history/native/blocks.h"
#include "check.h"

extern "C" {
Store* history_new();
void history_free(Store*);
void history_add(Store*, uint64_t, const Block*);
const Block* history_block(Store*, uint64_t, int32_t);
void history_find(const Block*, const int32_t*, long, Span*);
void history_narrow(const Block*, Span*, long, int32_t);
long history_longest(const Block*, const int32_t*, long, long, Span*);
void history_next(const Block*, int32_t, long, Next*);
double drafter_uniform(const int64_t*, long, int64_t);
}

namespace {

// Documents of few different tokens, so that much repeats; END is a token's place that begins no match.
struct Text {
  std::vector<int32_t> tokens, starts, order;
  std::vector<uint16_t> narrow, edges;
  std::vector<uint8_t> probs;
  std::vector<int8_t> rewards;
  Text(Random& random, long documents) {
    for (long d = 0; d < documents; d++) {
      starts.push_back(int32_t(tokens.size()));
      for (long n = 1 + random.below(60); n > 0; n--) tokens.push_back(int32_t(random.below(4)));
      tokens.push_back(END);
      rewards.push_back(int8_t(d % 3 - 1));
    }
    starts.push_back(int32_t(tokens.size()));
    for (int32_t token : tokens) {
      narrow.push_back(uint16_t(token)), edges.push_back(uint16_t(random.below(65536)));
      probs.push_back(uint8_t(random.below(256)));
    }
    order.resize(tokens.size() - documents);
  }
  Block block(bool is_wide) {
    Block b;
    b.step = 7, b.length = int32_t(tokens.size()), b.documents = int32_t(rewards.size());
    (is_wide ? (void)(b.wide = tokens.data()) : (void)(b.narrow = narrow.data()));
    b.order = order.data(), b.edges = edges.data(), b.probs = probs.data();
    b.starts = starts.data(), b.rewards = rewards.data();
    return b;
  }
  long count(const int32_t* context, long n, bool continued) const {
    long found = 0;
    for (size_t i = 0; i + n <= tokens.size(); i++)
      found += std::equal(context, context + n, tokens.begin() + long(i)) &&
               (!continued || (i + n < tokens.size() && tokens[i + n] != END));
    return found;
  }
};

void searched(bool is_wide) {
  Test test(is_wide ? "history, 32 bits a token" : "history, 16 bits a token");
  Random random(14);
  Text text(random, 40);
  Store* store = history_new();
  const Block given = text.block(is_wide);
  history_add(store, 5, &given);
  const Block* block = history_block(store, 5, 7);
  test.that(block && block->sorted && !history_block(store, 5, 8) && !history_block(store, 6, 7), "the block");
  for (int round = 0; round < 2000; round++) {
    const long n = 1 + random.below(9);
    std::vector<int32_t> context;
    for (long i = 0; i < n; i++) context.push_back(int32_t(random.below(4)));
    Span span;
    history_find(block, context.data(), n, &span);
    test.that(span.size() == text.count(context.data(), n, false), "places (round, tokens, found)", round, n, span.size());
    for (int32_t place = span.low; place < span.high; place++) {
      Next next;
      history_next(block, place, n - 1, &next);
      test.that(next.token == context[n - 1], "a place that begins otherwise", round, place);
    }
    Span less;
    history_find(block, context.data(), n - 1, &less);
    if (n > 1) {
      history_narrow(block, &less, n - 1, context[n - 1]);
      test.that(less.size() == span.size() && (less.size() == 0 || less.low == span.low), "narrowed (round)", round);
    }
    const long longest = history_longest(block, context.data(), n, 1, &span);
    long want = n;
    while (want > 0 && !text.count(context.data() + n - want, want, true)) want--;
    test.that(longest == want, "longest suffix (round, found, wanted)", round, longest, want);
  }
  history_free(store);
}

}  // namespace

void test_history() {
  searched(false);
  searched(true);
  Test test("noise");
  for (int64_t i = 0; i < 1000; i++) {
    const int64_t seed[] = {i, 3};
    const double u = drafter_uniform(seed, 2, 17 * i);
    test.that(u > 0 && u < 1 && u == drafter_uniform(seed, 2, 17 * i), "a uniform number in (0, 1)", i);
  }
}
