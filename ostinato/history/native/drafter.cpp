// The drafter: what the running sequences will most likely be sampled to say next, as far as it is worth its time.
//
// propose   the next token of every sequence is looked up in what was said after the same words; the best candidates
//           of the whole batch are taken in the order of their survival, each is followed by its own look-up, and
//           the cut is where expected tokens per second are the most
// observe   appends what was really sampled, and teaches the estimator with every candidate whose place was reached
#include <algorithm>
#include <memory>
#include <unordered_map>
#include <vector>

#include "blocks.h"
#include "budget.h"
#include "estimate.h"
#include "live.h"
#include "lookup.h"
#include "match.h"
#include "noise.h"
#include "rules.h"

namespace {

constexpr double FAINT = 0.05;     // a path that survives less often is not followed
constexpr int PATIENCE = 6;        // misses in a row before a sequence sleeps
constexpr int LONGEST_SLEEP = 16;  // passes
constexpr int QUIET = 8;           // passes in a row without a draft before the whole drafter sleeps

// The live text of one prompt: of siblings that run, and of those that have ended since the last ``forget``.
struct Group {
  explicit Group(int64_t most) : live(uint32_t(most)) {}
  Live live;
  int running = 0;
  uint32_t opened = 0;  // by which sequence
  uint64_t prompt = 0;  // hash of the prompt that is in ``live``
};

struct Sequence {
  bool open = false, greedy = false, shared = false;
  uint64_t key = 0, prompt = 0;  // of the noise; of the history
  uint32_t writer = 0;
  Group* group = nullptr;
  std::vector<int32_t> tokens;
  std::vector<float> edges, probs;  // of those behind the prompt
  long prompt_length = 0, indexed = 0;
  Blocks blocks;
  uint64_t generation = 0;
  Match match;
  int64_t wake = 0;  // the first pass that looks at it again
  int misses = 0;
  // of the last pass that looked at it
  int64_t pass = -1;
  int32_t first = -1;  // candidate for its next token
  double weight = 1;
  int deepest = 0, drafted = 0;
  bool exhausted = false;  // history had no more to say
  long size() const { return long(tokens.size()); }
};

// A candidate; ``rank`` is its place in the order of taking, -1 as long as it is not taken; ``kept``: it is drafted.
struct Node {
  int32_t sequence, parent, first, rank, depth;  // first: what follows it
  bool expanded, kept;
  double survival;
  Match match;
  Candidate candidate;
};

// The place of a token that is asked for, behind the text and a path of drafts.
struct Place {
  const int32_t* end;  // the tokens before it end here ...
  long known;          // ... and this many of them can be read
  int64_t position;
  double u, odds;      // the uniform, and its log-odds
};

struct Entry {
  double worth;
  int32_t node;
  bool operator<(const Entry& other) const { return worth != other.worth ? worth < other.worth : node > other.node; }
};

class Drafter {
 public:
  Drafter(const Store* store, const Rules& rules, const double* weights)
      : store_(store), rules_(rules), estimator_(weights), others_(uint32_t(rules.ring)) {}

  int64_t open(uint64_t prompt, bool shared, uint64_t key, bool greedy, const int32_t* tokens, long n);
  long propose(long count, const int64_t* handles, const int32_t* room, const float* weights, const double* seconds,
               long most, int32_t* counts, int32_t* tokens);
  void observe(long count, const int64_t* handles, const int32_t* counts, const int32_t* tokens, const float* probs,
               const float* edges, const uint8_t* ended);
  void forget(const uint64_t* prompts, long n);
  bool known(int64_t handle) const {
    return handle >= 0 && handle < int64_t(sequences_.size()) && sequences_[handle].open;
  }
  Stats stats() const;
  const double* weights() const { return estimator_.weights(); }

 private:
  void index(Sequence& sequence);
  void refresh(Sequence& sequence);
  void expand(int32_t sequence, int32_t parent);
  void look_up(Sequence& sequence, Match& match, const Place& at, Candidates& candidates) const;
  void look_up_history(Sequence& sequence, Match& match, const Place& at, Candidates& candidates) const;
  void look_up_ladder(Sequence& sequence, const Match& match, const Place& at, Candidates& candidates) const;
  void look_up_live(const Live& live, const Levels& levels, bool others, const Sequence& sequence, const Place& at,
                    Candidates& candidates) const;
  bool look_up_block(const Block& block, Span span, int length, double age, const Place& at,
                     Candidates& candidates) const;
  bool enough(const Tally& tally, const Place& at, const Block* block, int length, double age,
              Candidates& candidates) const;
  void offer(const Sequence& sequence, int32_t node);
  long take(double worth);
  long write(int32_t node, long best, int32_t* tokens);
  void doze(Sequence& sequence);
  bool judge(const Candidate& candidate, int32_t token);
  void teach(Sequence& sequence, const int32_t* tokens, long n);
  void close(Sequence& sequence);
  void drop(uint64_t prompt);
  void make_room();

  const Store* store_;
  Rules rules_;
  Estimator estimator_;
  Costs costs_;
  Live others_;
  Reader reader_;
  std::unordered_map<uint64_t, std::unique_ptr<Group>> groups_;
  std::vector<Sequence> sequences_;
  std::vector<int64_t> closed_;  // handles to use again
  std::vector<Node> nodes_;
  std::vector<Entry> heap_;
  uint32_t writers_ = 0;
  int64_t pass_ = 0, live_ = 0;
  int64_t quiet_ = 0, wake_ = 0;  // passes in a row without a draft; the first pass that is not slept through
  Stats stats_ = {};
};

uint64_t hash_of(const int32_t* tokens, long n) {
  uint64_t hash = 0;
  for (long i = 0; i < n; ++i) hash = mix(hash + uint64_t(uint32_t(tokens[i])) + GOLDEN);
  return hash;
}

int64_t Drafter::open(uint64_t prompt, bool shared, uint64_t key, bool greedy, const int32_t* tokens, long n) {
  make_room();
  int64_t handle = int64_t(sequences_.size());
  if (closed_.empty()) sequences_.emplace_back();
  else handle = closed_.back(), closed_.pop_back();
  Sequence& sequence = sequences_[handle] = Sequence();
  sequence.open = true, sequence.greedy = greedy, sequence.shared = shared, sequence.key = key;
  sequence.writer = ++writers_;
  sequence.prompt = shared ? prompt : mix(sequence.writer);  // nobody's text is shared with nobody
  sequence.tokens.assign(tokens, tokens + n);
  sequence.prompt_length = n;
  sequence.wake = pass_;
  sequence.generation = ~uint64_t(0);
  auto& group = groups_[sequence.prompt];
  if (!group) group = std::make_unique<Group>(rules_.group), group->opened = sequence.writer;
  const uint64_t hash = hash_of(tokens, n);
  if (group->prompt == hash) sequence.indexed = n;
  group->prompt = hash;
  ++group->running;
  sequence.group = group.get();
  wake_ = pass_, quiet_ = 0;
  return handle;
}

// Put what is new in the text of a sequence before its siblings and the others.
void Drafter::index(Sequence& sequence) {
  const bool live = (rules_.sources[SIBLING] || rules_.sources[OWN]) && live_ < rules_.total;
  const bool others = rules_.sources[OTHER] && sequence.blocks.count == 0;
  const int64_t before = sequence.group->live.size();
  for (long at = sequence.indexed; at < sequence.size(); ++at) {
    const int32_t* end = sequence.tokens.data() + at;
    const long said = at - sequence.prompt_length;
    Seen seen{*end, 0.0f, 0.0f, 0};
    if (said >= 0) seen = {*end, sequence.edges[said], sequence.probs[said], sequence.writer};
    if (live) sequence.group->live.add(contexts_before(end, at, rules_.live), seen);
    if (said >= 0 && others) others_.add(contexts_before(end, at, rules_.shared), seen);
  }
  live_ += sequence.group->live.size() - before;
  sequence.indexed = sequence.size();
}

// The blocks of its prompt, where the store has changed.
void Drafter::refresh(Sequence& sequence) {
  if (!store_ || !rules_.sources[HISTORY]) return;
  if (sequence.generation == generation(store_)) return;
  sequence.generation = generation(store_);
  sequence.blocks.count =
      blocks_of(store_, sequence.prompt, sequence.blocks.at, std::min<long>(rules_.epochs, MOST_BLOCKS));
  sequence.match = Match();
}

// Candidates of one look-up join the others; true when nothing more needs to be asked.
bool Drafter::enough(const Tally& tally, const Place& at, const Block* block, int length, double age,
                     Candidates& candidates) const {
  if (tally.total() == 0) return false;
  tally.offer(estimator_, at.odds, block, length, age, candidates);
  return candidates.good();
}

// After ``length`` tokens in one block; false where all of these places are at the end of their response.
bool Drafter::look_up_block(const Block& block, Span span, int length, double age, const Place& at,
                            Candidates& candidates) const {
  span = window(reader_, block, span, length, rules_.noise, at.u);
  Tally tally(at.u);
  add_span(reader_, block, span, length, rules_.noise, tally);
  enough(tally, at, &block, length, age, candidates);
  return span.size() > 0;
}

// At the longest match in every block, the newest first, then after fewer tokens: more occurrences, under less similar
// circumstances.
void Drafter::look_up_history(Sequence& sequence, Match& match, const Place& at, Candidates& candidates) const {
  bool ended = false;
  for (long b = 0; b < sequence.blocks.count && !candidates.good(); ++b) {
    update(match, b, sequence.blocks, at.end, at.known, at.position, rules_.most, rules_.least);
    if (match.lengths[b] != NOWHERE)
      ended |= !look_up_block(*sequence.blocks.at[b], match.spans[b], match.lengths[b], double(b), at, candidates);
  }
  candidates.ended = ended && candidates.count == 0;
}

void Drafter::look_up_ladder(Sequence& sequence, const Match& match, const Place& at, Candidates& candidates) const {
  for (int level = 0; level < rules_.ladder.count; ++level) {
    const int32_t length = rules_.ladder.lengths[level];
    for (long b = 0; b < sequence.blocks.count && !candidates.good(); ++b) {
      if (match.lengths[b] <= length) continue;
      const Block& block = *sequence.blocks.at[b];
      look_up_block(block, find(block, at.end - length, length), length, double(b), at, candidates);
    }
  }
}

// In live text, at the longest context first.
void Drafter::look_up_live(const Live& live, const Levels& levels, bool others, const Sequence& sequence,
                           const Place& at, Candidates& candidates) const {
  struct Found {
    Occurrence seen;
    int level;  // the longest context that agrees
  } found[MOST_WALK];
  int count = 0;
  const Contexts contexts = contexts_before(at.end, at.known, levels);
  live.walk(contexts, rules_.walk, [&](const Seen& seen) {
    const bool own = seen.writer == sequence.writer || seen.writer == 0;
    const Source source = others ? OTHER : own ? OWN : SIBLING;
    if (!rules_.sources[source]) return;
    int level = 0;
    while (level < levels.count - 1 && (contexts.longer[level] == 0 || seen.longer[level] != contexts.longer[level]))
      ++level;
    found[count++] = {{seen.token, seen.edge, rules_.noise ? seen.prob : 0, -1, source}, level};
  });
  for (int level = 0; level < levels.count; ++level) {
    Tally tally(at.u);
    bool more = false;
    for (int i = 0; i < count; ++i) {
      if (found[i].level <= level) tally.add(found[i].seen);
      more |= found[i].level == level;
    }
    if (more && enough(tally, at, nullptr, levels.lengths[level], 0.0, candidates)) return;
  }
}

// Everything that is known about the token at a place, from the most similar circumstances to the least.
void Drafter::look_up(Sequence& sequence, Match& match, const Place& at, Candidates& candidates) const {
  look_up_history(sequence, match, at, candidates);
  if (candidates.good() || candidates.ended) return;
  if (rules_.sources[SIBLING] || rules_.sources[OWN])
    look_up_live(sequence.group->live, rules_.live, false, sequence, at, candidates);
  if (!candidates.good()) look_up_ladder(sequence, match, at, candidates);
  if (!candidates.good() && rules_.sources[OTHER] && sequence.blocks.count == 0)
    look_up_live(others_, rules_.shared, true, sequence, at, candidates);
}

// The best candidate for what follows ``parent`` (-1: the last token of the sequence) becomes a node.
void Drafter::expand(int32_t at, int32_t parent) {
  // the last tokens of the text, and behind them the path to the parent
  Sequence& sequence = sequences_[at];
  int32_t tail[MOST_CONTEXT + MOST_DEPTH];
  const int depth = parent < 0 ? 0 : nodes_[parent].depth;
  const long kept = std::min<long>(sequence.size(), MOST_CONTEXT);
  std::copy(sequence.tokens.end() - kept, sequence.tokens.end(), tail);
  for (int32_t node = parent, place = int32_t(kept) + depth; node >= 0; node = nodes_[node].parent)
    tail[--place] = nodes_[node].candidate.token;
  const int64_t position = sequence.size() + depth;
  const double u = sequence.greedy ? 0.5 : uniform(sequence.key, position);

  Match& match = parent < 0 ? sequence.match : nodes_[parent].match;
  if (parent >= 0) {
    const int32_t above = nodes_[parent].parent;
    match = above < 0 ? sequence.match : nodes_[above].match;
    nodes_[parent].expanded = true;
  }
  Candidates candidates;
  look_up(sequence, match, {tail + kept + depth, kept + depth, position, u, log_odds(u)}, candidates);
  ++stats_.looked;
  if (parent < 0) sequence.exhausted = candidates.ended;
  if (candidates.count == 0) return;
  const Candidate& candidate = candidates.at[0];
  const double survival = (parent < 0 ? 1.0 : nodes_[parent].survival) * candidate.estimate;
  const int32_t node = int32_t(nodes_.size());
  nodes_.push_back({at, parent, -1, -1, depth + 1, false, false, survival, Match(), candidate});
  (parent < 0 ? sequence.first : nodes_[parent].first) = node;
}

// Put a candidate on the heap, if there is one and it may be taken.
void Drafter::offer(const Sequence& sequence, int32_t node) {
  if (node < 0 || nodes_[node].depth > sequence.deepest || nodes_[node].survival < FAINT) return;
  heap_.push_back({sequence.weight * nodes_[node].survival, node});
  std::push_heap(heap_.begin(), heap_.end());
}

// Take candidates in the order of their worth, and look up what follows those taken; how many of them are kept.
long Drafter::take(double worth) {
  Budget budget(costs_, worth);
  long taken = 0;
  while (!heap_.empty() && taken < costs_.most()) {
    const Entry entry = heap_.front();
    if (!budget.open(entry.worth)) break;
    std::pop_heap(heap_.begin(), heap_.end());
    heap_.pop_back();
    Node& node = nodes_[entry.node];
    const Sequence& sequence = sequences_[node.sequence];
    node.rank = int32_t(taken++);
    budget.take(entry.worth);
    if (node.depth == sequence.deepest) continue;
    expand(node.sequence, entry.node);
    offer(sequence, nodes_[entry.node].first);
  }
  return budget.best();
}

// The kept ones of ``node`` and what follows it; the number of tokens written.
long Drafter::write(int32_t node, long best, int32_t* tokens) {
  long written = 0;
  for (; node >= 0; node = nodes_[node].first) {
    Node& taken = nodes_[node];
    taken.kept = taken.rank >= 0 && taken.rank < best;
    if (!taken.kept) break;
    tokens[written++] = taken.candidate.token;
    ++stats_.drafted[taken.candidate.source];
    ++stats_.drafted_at[taken.depth - 1];
  }
  return written;
}

// A miss: after PATIENCE of them in a row a sequence is left alone for 1, 2, 4 .. passes.
void Drafter::doze(Sequence& sequence) {
  if (++sequence.misses <= PATIENCE) return;
  sequence.wake = pass_ + 1 + std::min(LONGEST_SLEEP, 1 << std::min(sequence.misses - PATIENCE - 1, 30));
}

long Drafter::propose(long count, const int64_t* handles, const int32_t* room, const float* weights,
                      const double* seconds, long most, int32_t* counts, int32_t* tokens) {
  ++pass_, ++stats_.passes;
  std::fill(counts, counts + count, 0);
  if (pass_ < wake_) return ++stats_.naps, 0;
  const auto awake = [&](int64_t handle) { return sequences_[handle].wake <= pass_; };
  const long looked = std::count_if(handles, handles + count, awake);
  stats_.slept += count - looked;
  if (looked == 0 || most == 0) return 0;
  nodes_.clear(), heap_.clear();
  costs_.set(seconds, most);
  double worth = 0;
  for (long i = 0; i < count; ++i) {
    refresh(sequences_[handles[i]]);
    index(sequences_[handles[i]]);
    worth += double(weights[i]);
  }
  for (long i = 0; i < count; ++i) {
    Sequence& sequence = sequences_[handles[i]];
    if (!awake(handles[i])) continue;
    sequence.pass = pass_, sequence.first = -1, sequence.weight = double(weights[i]);
    sequence.drafted = 0, sequence.exhausted = false;
    sequence.deepest = std::min({MOST_DEPTH, int(rules_.length), int(room[i])});
    if (sequence.deepest < 1) continue;
    expand(int32_t(handles[i]), -1);
    offer(sequence, sequence.first);
  }
  const long best = take(worth);
  long written = 0;
  for (long i = 0; i < count; ++i) {
    Sequence& sequence = sequences_[handles[i]];
    if (sequence.pass != pass_) continue;
    counts[i] = int32_t(write(sequence.first, best, tokens + written));
    sequence.drafted = counts[i];
    written += counts[i];
    if (counts[i] == 0 && sequence.deepest >= 1 && !sequence.exhausted) doze(sequence);
  }
  quiet_ = written ? 0 : quiet_ + 1;
  if (quiet_ >= QUIET)
    wake_ = pass_ + 1 + std::min<int64_t>(LONGEST_SLEEP, int64_t(1) << std::min<int64_t>(quiet_ - QUIET, 30));
  return written;
}

// A candidate against the token that came at its place: is it the same?
bool Drafter::judge(const Candidate& candidate, int32_t token) {
  const bool same = candidate.token == token;
  const int bin = std::min(int(candidate.estimate * BINS), BINS - 1);
  ++stats_.labels[bin], stats_.hits[bin] += same, stats_.predicted[bin] += candidate.estimate;
  estimator_.learn(candidate.x, candidate.estimate, same);
  return same;
}

// Go along what came, as far as it was foreseen. Every candidate whose place was reached is a label, drafted or not.
void Drafter::teach(Sequence& sequence, const int32_t* tokens, long n) {
  int accepted = 0;
  int32_t first = sequence.first;
  for (long at = 0; at < n && first >= 0; ++at) {
    const Node& node = nodes_[first];
    if (!judge(node.candidate, tokens[at])) break;
    if (node.kept) ++accepted, ++stats_.accepted[node.candidate.source], ++stats_.accepted_at[node.depth - 1];
    if (node.expanded) sequence.match = node.match;
    first = node.first;
  }
  if (accepted > 0) sequence.misses = 0;
  else if (sequence.drafted > 0) doze(sequence);
}

void Drafter::observe(long count, const int64_t* handles, const int32_t* counts, const int32_t* tokens,
                      const float* probs, const float* edges, const uint8_t* ended) {
  for (long i = 0; i < count; ++i) {
    Sequence& sequence = sequences_[handles[i]];
    const long n = counts[i];
    if (sequence.pass == pass_) teach(sequence, tokens, n);
    sequence.pass = -1;  // what was foreseen has been judged
    sequence.tokens.insert(sequence.tokens.end(), tokens, tokens + n);
    for (long at = 0; at < n; ++at) {  // a greedy token comes whatever the uniform is
      sequence.edges.push_back(sequence.greedy ? 0.0f : edges[at]);
      sequence.probs.push_back(sequence.greedy ? 1.0f : probs[at]);
    }
    stats_.emitted += n;
    tokens += n, probs += n, edges += n;
    if (ended[i]) close(sequence), closed_.push_back(handles[i]);
  }
}

void Drafter::close(Sequence& sequence) {
  index(sequence);
  const uint64_t prompt = sequence.prompt;
  const bool shared = sequence.shared;
  Group& group = *sequence.group;
  sequence = Sequence();
  if (--group.running == 0 && !shared) drop(prompt);
}

void Drafter::drop(uint64_t prompt) {
  const auto found = groups_.find(prompt);
  if (found == groups_.end() || found->second->running > 0) return;
  live_ -= found->second->live.size();
  groups_.erase(found);
}

void Drafter::forget(const uint64_t* prompts, long n) {
  std::vector<uint64_t> all;
  if (n < 0) {
    for (const auto& [prompt, group] : groups_) all.push_back(prompt);
    prompts = all.data(), n = long(all.size());
  }
  for (long i = 0; i < n; ++i) drop(prompts[i]);
}

// Where live text is too much, that of finished groups goes, the one opened first before the others.
void Drafter::make_room() {
  while (live_ >= rules_.total) {
    const Group* oldest = nullptr;
    uint64_t prompt = 0;
    for (const auto& [key, group] : groups_)
      if (group->running == 0 && (!oldest || group->opened < oldest->opened)) oldest = group.get(), prompt = key;
    if (!oldest) return;
    drop(prompt);
  }
}

Stats Drafter::stats() const {
  Stats stats = stats_;
  stats.groups = int64_t(groups_.size());
  stats.sequences = int64_t(sequences_.size() - closed_.size());
  stats.live_bytes = others_.bytes();
  for (const auto& [prompt, group] : groups_) stats.live_bytes += group->live.bytes();
  return stats;
}

}  // namespace

// ---- for Python ----

extern "C" {

Drafter* drafter_new(const Store* store, const Rules* rules, const double* weights) {
  return new Drafter(store, *rules, weights);
}
void drafter_free(Drafter* drafter) { delete drafter; }

int64_t drafter_open(Drafter* drafter, uint64_t prompt, int shared, const int64_t* seed, long parts, int greedy,
                     const int32_t* tokens, long n) {
  return drafter->open(prompt, shared != 0, key_of(seed, parts), greedy != 0, tokens, n);
}

// The number of draft tokens, at most ``most``; -1 for a handle that is not open.
long drafter_propose(Drafter* drafter, long count, const int64_t* handles, const int32_t* room, const float* weights,
                     const double* seconds, long most, int32_t* counts, int32_t* tokens) {
  if (!std::all_of(handles, handles + count, [&](int64_t handle) { return drafter->known(handle); })) return -1;
  return drafter->propose(count, handles, room, weights, seconds, most, counts, tokens);
}

// 0, or -1 for a handle that is not open; then nothing is taken in.
int drafter_observe(Drafter* drafter, long count, const int64_t* handles, const int32_t* counts,
                    const int32_t* tokens, const float* probs, const float* edges, const uint8_t* ended) {
  if (!std::all_of(handles, handles + count, [&](int64_t handle) { return drafter->known(handle); })) return -1;
  drafter->observe(count, handles, counts, tokens, probs, edges, ended);
  return 0;
}

void drafter_forget(Drafter* drafter, const uint64_t* prompts, long n) { drafter->forget(prompts, n); }
void drafter_stats(const Drafter* drafter, Stats* stats) { *stats = drafter->stats(); }
void drafter_weights(const Drafter* drafter, double* weights) {
  std::copy(drafter->weights(), drafter->weights() + FEATURES, weights);
}
double drafter_uniform(const int64_t* seed, long parts, int64_t position) {  // for its test
  return uniform(key_of(seed, parts), position);
}

}  // extern "C"
