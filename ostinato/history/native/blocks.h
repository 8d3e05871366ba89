// Closed history: what one prompt was answered in one step, searchable by suffix.
//
// text    documents one after another: the last tokens before a response, the response, END
// order   the suffix array of text (starts of responses and contexts alike, END itself left out): suffixes end
//         with their document, are compared up to DEPTH tokens, and among equals the earlier one comes first
// A Span is an interval of ``order``: the places whose suffixes begin with the same tokens.
//
// Python owns the memory of every block (blocks.py lays it out) and keeps it as long as the block is in the store.
// Nothing here locks: all calls into this library hold Python's GIL (ctypes.PyDLL), so no two run at once.
#pragma once
#include <cstdint>

constexpr int32_t END = -1;  // as a token id; how it is stored is the block's affair
constexpr long DEPTH = 64;   // tokens after which two suffixes count as equal

struct Span {
  int32_t low = 0, high = 0;  // [low, high)
  int32_t size() const { return high - low; }
};

// One occurrence of a next token.
struct Next {
  int32_t token;  // END at the end of a document
  float edge, prob;  // its interval when it was sampled; prob 0 where it was context, which nobody sampled
  int8_t reward;  // of its document against the mean of its prompt: -1, 0, 1
};

struct Block {
  int32_t step = 0;  // of the rollout
  int32_t length = 0, documents = 0;  // of the text, END included
  const uint16_t* narrow = nullptr;   // [length] tokens where every id fits (END = 0xffff), otherwise null
  const int32_t* wide = nullptr;      // [length] tokens otherwise
  int32_t* order = nullptr;           // [size()], filled by ``sort``
  const uint16_t* edges = nullptr;    // [length] in units of 2^-16
  const uint8_t* probs = nullptr;     // [length] codes, see ``prob_of_code``
  const int32_t* starts = nullptr;    // [documents + 1] of documents in text, and the end of the last
  const int8_t* rewards = nullptr;    // [documents]
  bool sorted = false;
  int32_t size() const { return length - documents; }
};

// ``context`` points at the last ``n`` tokens, n <= DEPTH for find, none of them END. A block that came from ``blocks_of`` is sorted.
Span find(const Block& block, const int32_t* context, long n);           // places that begin with these n tokens
Span narrow(const Block& block, Span span, long depth, int32_t token);   // those whose token at ``depth`` is ``token``;
    // depth < DEPTH unless the span is one place, since deeper tokens are in no order
long longest(const Block& block, const int32_t* context, long n, long least, Span* span);  // longest suffix of the
    // context, of at least ``least`` (>= 1) and at most min(n, DEPTH - 1) tokens, that occurs with a token (not END)
    // after it; the span has all its places, those at an END first; 0: none, and an empty span
Next next_at(const Block& block, int32_t place, long depth);  // the token ``depth`` after order[place], which must not
    // lie behind the END of its document
float prob_of_code(uint8_t code);  // 0 is 0 (context); 1 .. 255 rise from under 1e-4 to 1, no step over 5 %

// The blocks of a prompt, newest first, at most ``most`` of them; their count comes back. Valid until the next add or
// drop (ask again when ``generation`` has changed). Blocks are sorted here, when somebody first asks for them.
struct Store;
long blocks_of(const Store* store, uint64_t prompt, const Block** out, long most);
uint64_t generation(const Store* store);
