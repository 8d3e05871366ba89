// P(a draft token is accepted): a logistic model of what is known about the candidate, learnt from what came.
//
// Everything is in double precision and in one order (built without fused multiply-adds), so that every processor
// decides alike.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

enum Source : int32_t { HISTORY, SIBLING, OWN, OTHER, SOURCES };

constexpr int FEATURES = 16;
constexpr int LABELS_PER_STEP = 64;  // of the Newton method
constexpr double DAMPING = 8.0;      // added to the curvature
constexpr double MEMORY = 0.98;      // of the curvature, from step to step: about 3000 labels

// What supports a candidate: its best occurrence, and how often it came after this context.
struct Evidence {
  double u;           // log-odds of the uniform of the coming position
  double edge, prob;  // of its best occurrence; prob 0: not known
  double count, total;  // occurrences of this token, and of all tokens, after this context
  double votes;       // its share of the occurrences whose interval holds u
  double reward;      // of its best occurrence: -1, 0 or 1
  double age;         // of the block, 0 for the newest
  double length;      // log2 of one more than the tokens of context that agree
  Source source;
};

inline double log_odds(double x) {
  x = std::min(std::max(x, 1e-6), 1 - 1e-6);
  return std::log(x / (1 - x));
}

// How far u (in log-odds) lies inside the interval, in log-odds, at most 6; negative: outside. Drift of a policy moves
// the edges by factors, so that 0.001 is far from 0.01, and 0.5 near 0.509.
inline double margin(double u, double edge, double prob) {
  const double low = edge <= 0 ? 6.0 : u - log_odds(edge);
  const double high = edge + prob >= 1 ? 6.0 : log_odds(edge + prob) - u;
  return std::min(std::max(std::min(low, high), -6.0), 6.0);
}

inline void features(const Evidence& about, double* x) {
  const double share = std::log(about.count / (about.total - about.count + 0.5)) / 4;
  const double length = about.length / 4;
  std::fill(x, x + FEATURES, 0.0);
  x[0] = 1;
  x[5] = length;
  x[6] = about.source == SIBLING;
  x[7] = about.source == OWN;
  x[8] = about.source == OTHER;
  x[9] = about.age / 2;
  x[11] = about.reward;
  if (about.prob > 0) {
    const double inside = margin(about.u, about.edge, about.prob);
    x[1] = std::max(inside, 0.0) / 4;
    x[2] = std::max(-inside, 0.0) / 4;
    x[3] = inside > 0;
    x[4] = about.votes;
    x[10] = share;
    x[15] = inside > 0 ? length : 0;
  } else {
    x[12] = 1;
    x[13] = share;
    x[14] = length;
  }
}

// Logistic regression by damped Newton steps on the log loss of every LABELS_PER_STEP labels, with a curvature that
// fades: an online Newton step (Hazan, Agarwal and Kale 2007) with forgetting.
class Estimator {
 public:
  explicit Estimator(const double* weights) { std::copy(weights, weights + FEATURES, weights_); }

  double probability(const double* x) const {
    double sum = 0;
    for (int i = 0; i < FEATURES; ++i) sum += weights_[i] * x[i];
    return 1 / (1 + std::exp(-std::min(std::max(sum, -12.0), 12.0)));
  }

  // ``p`` is what was estimated.
  void learn(const double* x, double p, bool accepted) {
    const double slope = p * (1 - p);
    for (int i = 0; i < FEATURES; ++i) {
      if (x[i] == 0) continue;
      gradient_[i] += (accepted - p) * x[i];
      const double scaled = slope * x[i];
      for (int j = 0; j <= i; ++j) curvature_[i][j] += scaled * x[j];
    }
    if (++labels_ == LABELS_PER_STEP) step();
  }

  const double* weights() const { return weights_; }

 private:
  // weights += (curvature + DAMPING)^-1 gradient, by Cholesky's factor.
  void step() {
    double factor[FEATURES][FEATURES], move[FEATURES];
    for (int i = 0; i < FEATURES; ++i) {
      for (int j = 0; j <= i; ++j) {
        double sum = curvature_[i][j] + (i == j ? DAMPING : 0);
        for (int k = 0; k < j; ++k) sum -= factor[i][k] * factor[j][k];
        factor[i][j] = i == j ? std::sqrt(sum) : sum / factor[j][j];
      }
    }
    for (int i = 0; i < FEATURES; ++i) {
      double sum = gradient_[i];
      for (int k = 0; k < i; ++k) sum -= factor[i][k] * move[k];
      move[i] = sum / factor[i][i];
    }
    for (int i = FEATURES - 1; i >= 0; --i) {
      double sum = move[i];
      for (int k = i + 1; k < FEATURES; ++k) sum -= factor[k][i] * move[k];
      move[i] = sum / factor[i][i];
    }
    for (int i = 0; i < FEATURES; ++i) weights_[i] += move[i], gradient_[i] = 0;
    for (auto& row : curvature_)
      for (double& value : row) value *= MEMORY;
    labels_ = 0;
  }

  double weights_[FEATURES];
  double gradient_[FEATURES] = {};
  double curvature_[FEATURES][FEATURES] = {};  // lower half
  int labels_ = 0;
};
