// Where the closed history of a prompt goes on: the longest match of the running text in each of its blocks, followed
// token by token and searched again when it breaks.
#pragma once
#include <algorithm>
#include <cstdint>

#include "blocks.h"

constexpr long MOST_BLOCKS = 4;  // of a prompt, the newest ones

struct Blocks {
  const Block* at[MOST_BLOCKS] = {};
  long count = 0;
};

constexpr int32_t NOWHERE = -1;
constexpr int64_t FOLLOWED = 16;  // more new tokens than this are searched for, not followed

struct Match {
  Span spans[MOST_BLOCKS];
  int32_t lengths[MOST_BLOCKS] = {};  // tokens that agree; 0: to be searched, NOWHERE: searched in vain
  int64_t seen[MOST_BLOCKS] = {};     // tokens of the text when it was last asked
};

// One token further; false where the match breaks. Spans are sorted for DEPTH tokens only: the next token of a span has
// to be one of them, but a single place can be followed to its end.
inline bool follow(const Block& block, Span& span, int32_t& length, int32_t token) {
  if (length <= 0) return false;
  const Span further = narrow(block, span, length, token);
  if (further.size() == 0 || (further.size() > 1 && length + 1 >= DEPTH)) return false;
  span = further, ++length;
  return true;
}

// Bring block ``b`` up to a text of ``size`` tokens, of which the last ``known`` stand before ``end``: follow what is
// new since it was last asked, and search where that breaks. Nothing is done for a block that nobody asks.
inline void update(Match& match, long b, const Blocks& blocks, const int32_t* end, long known, int64_t size,
                   long most, long least) {
  const int64_t news = size - match.seen[b];
  int32_t& length = match.lengths[b];
  match.seen[b] = size;
  if (news == 0 && length != 0) return;
  bool follows = news <= FOLLOWED;
  for (const int32_t* token = end - news; follows && token < end; ++token)
    follows = follow(*blocks.at[b], match.spans[b], length, *token);
  if (follows && news > 0) return;
  const long tried = std::min(known, most);
  const long found = tried < least ? 0 : longest(*blocks.at[b], end - tried, tried, least, &match.spans[b]);
  length = found == 0 ? NOWHERE : int32_t(found);
}
