// How many draft tokens a pass is worth: which n has the most (expected tokens) / seconds[n].
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

constexpr double LEAST_GAIN = 1.01;  // a draft that promises less than 1 % is noise of the cost table

// The seconds of a pass by its draft tokens, and how cheaply it can grow from n on.
class Costs {
 public:
  // cheapest[n] = min over m > n of (seconds[m] - seconds[n]) / (m - n): slopes of the lower hull of what lies to
  // the right. Tables seldom change from pass to pass.
  void set(const double* seconds, long most) {
    if (long(seconds_.size()) == most + 1 && std::equal(seconds_.begin(), seconds_.end(), seconds)) return;
    seconds_.assign(seconds, seconds + most + 1);
    cheapest_.assign(most + 1, std::numeric_limits<double>::infinity());
    hull_.assign(most + 1, most);
    for (long n = most - 1; n >= 0; --n) {
      long m = n + 1;
      while (m < most && slope(n, hull_[m]) <= slope(n, m)) m = hull_[m];
      hull_[n] = m;
      cheapest_[n] = slope(n, m);
    }
  }
  long most() const { return long(seconds_.size()) - 1; }
  double seconds(long n) const { return seconds_[n]; }
  double cheapest(long n) const { return cheapest_[n]; }

 private:
  double slope(long n, long m) const { return (seconds_[m] - seconds_[n]) / double(m - n); }
  std::vector<double> seconds_, cheapest_;
  std::vector<long> hull_;  // the next corner
};

// Tokens are offered in falling order of their worth (expected tokens, weighted).
class Budget {
 public:
  Budget(const Costs& costs, double worth) : costs_(costs), worth_(worth), plain_(worth / costs.seconds(0)) {
    rate_ = plain_;
  }
  // Could tokens of at most this worth still raise the rate? With any m more of them the worth grows by m * worth at
  // the most, the time by m * cheapest at the least.
  bool open(double worth) const { return taken_ < costs_.most() && worth > rate_ * costs_.cheapest(taken_); }
  void take(double worth) {
    worth_ += worth;
    const double rate = worth_ / costs_.seconds(++taken_);
    if (rate > rate_) rate_ = rate, best_ = taken_;
  }
  long best() const { return rate_ >= LEAST_GAIN * plain_ ? best_ : 0; }

 private:
  const Costs& costs_;
  double worth_, plain_, rate_;
  long taken_ = 0, best_ = 0;
};
