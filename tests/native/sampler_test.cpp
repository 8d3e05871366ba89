// Drawing tokens, and the support that was drawn from.

#include "kernels.h"

namespace {

struct Drawn {
  std::vector<int64_t> tokens;
  std::vector<float> logprobs, edges, cuts;
};
struct Rows {  // what `sample` takes
  long V;
  std::vector<float> logits, temperature, top_p, min_p;
  std::vector<int32_t> top_k;
  std::vector<double> u;
  long count() const { return long(u.size()); }
  void add(const std::vector<float>& z, float t, int32_t k, float p, float least, double at) {
    logits.insert(logits.end(), z.begin(), z.end());
    temperature.push_back(t), top_k.push_back(k), top_p.push_back(p), min_p.push_back(least), u.push_back(at);
  }
  Drawn draw(long first, long rows) const {
    Drawn d{std::vector<int64_t>(rows), std::vector<float>(rows), std::vector<float>(rows), std::vector<float>(rows)};
    sample(&logits[first * V], V, &temperature[first], &top_k[first], &top_p[first], &min_p[first], &u[first],
           d.tokens.data(), d.logprobs.data(), d.edges.data(), d.cuts.data(), rows);
    return d;
  }
};

// Of one row: scaled logits as the kernel has them, and the share of the mass of each that is kept.
struct Reference {
  std::vector<float> scaled;
  std::vector<double> mass;
  double peak = -INFINITY, off = 0;  // how far a share may be from the truth
  Reference(const float* z, long V, float temperature) : scaled(V), mass(V) {
    const float inverse = 1.0f / temperature;
    double size = 0;
    for (long i = 0; i < V; i++) {
      scaled[i] = z[i] * inverse;
      peak = std::max(peak, double(scaled[i]));
      if (std::isfinite(scaled[i])) size = std::max(size, std::fabs(double(scaled[i])));
    }
    for (long i = 0; i < V; i++) mass[i] = std::exp(double(scaled[i]) - peak);
    off = (V + 8 + 4 * size) * U;  // a sum of V terms, each of which exp and a rounded difference made
  }

  // How many of the best tokens are kept, ties with the last of them included, when top-p and min-p are `slack` wider.
  long kept(long top_k, double top_p, double min_p, double slack) const {
    std::vector<long> order(scaled.size());
    for (size_t i = 0; i < order.size(); i++) order[i] = long(i);
    std::stable_sort(order.begin(), order.end(), [&](long a, long b) { return scaled[a] > scaled[b]; });
    const long V = long(order.size());
    auto ties = [&](long n) {
      while (n < V && scaled[order[n]] == scaled[order[n - 1]]) n++;
      return n;
    };
    long n = top_k > 0 && top_k < V ? ties(top_k) : V;
    if (top_p < 1) {
      double all = 0, held = 0;
      for (long i = 0; i < n; i++) all += mass[order[i]];
      long best = 0;
      while (best < n && held < (top_p + slack) * all) held += mass[order[best++]];
      n = std::min(n, ties(std::max(1L, best)));
    }
    if (min_p > 0) {
      long best = 0;
      while (best < n && mass[order[best]] >= min_p * (1 - slack)) best++;
      n = std::max(1L, best);
    }
    while (n > 1 && mass[order[n - 1]] == 0 && std::isinf(scaled[order[n - 1]])) n--;  // a banned token is never kept
    return n;
  }
};

void check_row(Test& test, const Rows& rows, const Drawn& drawn, const std::vector<int32_t>& kept, long r) {
  const float* z = &rows.logits[r * rows.V];
  const Reference reference(z, rows.V, rows.temperature[r]);
  const double off = reference.off;
  const bool filtered = (rows.top_k[r] > 0 && rows.top_k[r] < rows.V) || rows.top_p[r] < 1 || rows.min_p[r] > 0;
  test.that(std::isnan(drawn.cuts[r]) == !filtered, "a cut without filters, or none with", r);
  std::vector<char> in(rows.V, kept.empty());
  for (int32_t id : kept) in[id] = 1;
  if (!kept.empty()) {
    const long least = reference.kept(rows.top_k[r], rows.top_p[r], rows.min_p[r], -4 * off);
    const long most = reference.kept(rows.top_k[r], rows.top_p[r], rows.min_p[r], 4 * off);
    test.that(least <= long(kept.size()) && long(kept.size()) <= most, "kept (row, tokens, wanted)", r, kept.size(), most);
    for (long i = 0; i < rows.V; i++)
      test.that(in[i] == (reference.scaled[i] >= drawn.cuts[r]), "support (row, token)", r, i);
  }
  double total = 0, below = 0;
  const long token = drawn.tokens[r];
  for (long i = 0; i < rows.V; i++) {
    if (in[i]) total += reference.mass[i];
    if (in[i] && i < token) below += reference.mass[i];
  }
  test.that(token >= 0 && token < rows.V && in[token], "a token that is not kept (row, token)", r, token);
  const double u = rows.u[r];
  test.that(below / total - off <= u && u <= (below + reference.mass[token]) / total + off, "another token (row)", r, token);
  test.near(drawn.edges[r], {below / total, off + U}, "edge", r);
  const double logprob = std::log(reference.mass[token] / total);
  test.near(drawn.logprobs[r], {logprob, 2 * off + U * std::fabs(logprob)}, "logprob", r);
}

std::vector<float> row(Random& random, long V, double size) {
  auto z = random.vector<float>(V, size);
  for (long i = 0; i < V; i += 97) z[i] = -INFINITY;                    // banned
  if (V > 50) z[40] = z[41] = *std::max_element(z.begin(), z.end());  // ties at the top
  return z;
}

void sampled(const char* name, long V) {
  Test test(name);
  Random random(12);
  Rows rows{V, {}, {}, {}, {}, {}, {}};
  struct Filter { int32_t k; float p, least; };
  const Filter filters[] = {{0, 1, 0}, {1, 1, 0}, {5, 1, 0}, {40, 1, 0}, {0, 0.9f, 0}, {0, 0.3f, 0}, {0, 1, 0.05f},
                            {20, 0.8f, 0}, {30, 0.95f, 0.02f}, {int32_t(V), 1, 0}, {0, 1e-6f, 0}};
  for (const Filter& f : filters)
    for (float temperature : {0.6f, 1.0f, 1.7f})
      for (int i = 0; i < 4; i++)
        rows.add(row(random, V, i == 3 ? 30 : 6), temperature, f.k, f.p, f.least, i ? random.uniform() : 1 - 0x1p-53);
  omp_set_num_threads(1);
  const long n = rows.count();
  const Drawn drawn = rows.draw(0, n);
  for (int threads : THREADS) {
    omp_set_num_threads(threads);
    const Drawn again = rows.draw(0, n);
    test.same(again.tokens.data(), drawn.tokens.data(), n, "other tokens with (threads)", threads);
    test.same(again.logprobs.data(), drawn.logprobs.data(), n, "other bits with (threads)", threads);
    test.same(again.cuts.data(), drawn.cuts.data(), n, "other cuts with (threads)", threads);
  }
  std::vector<int32_t> counts(n), ids;
  support_counts(rows.logits.data(), V, rows.temperature.data(), drawn.cuts.data(), counts.data(), n);
  std::vector<int64_t> ends(n);
  for (long r = 0, end = 0; r < n; r++) ends[r] = end += counts[r];
  ids.resize(ends[n - 1] + 1);
  support_ids(rows.logits.data(), V, rows.temperature.data(), drawn.cuts.data(), counts.data(), ends.data(), ids.data(), n);
  for (long r = 0; r < n; r++) {
    const Drawn alone = rows.draw(r, 1);
    test.that(alone.tokens[0] == drawn.tokens[r], "another token alone (row)", r);
    test.same(alone.edges.data(), &drawn.edges[r], 1, "another edge alone (row)", r);
    const std::vector<int32_t> kept(ids.begin() + ends[r] - counts[r], ids.begin() + ends[r]);
    test.that(std::is_sorted(kept.begin(), kept.end()), "support in another order (row)", r);
    check_row(test, rows, drawn, kept, r);
  }
}

void greedy_and_broken() {
  Test test("sample: greedy rows and broken ones");
  Random random(13);
  for (long V : {1L, 5L, 16L, 100L, 1000L}) {
    Rows rows{V, {}, {}, {}, {}, {}, {}};
    auto z = random.vector<float>(V);
    z[V / 2] = z[V - 1] = 2;  // the first of equals
    rows.add(z, 0, 0, 1, 0, 0.9);
    for (float bad : {float(NAN), INFINITY}) {
      auto broken = z;
      broken[V / 3] = bad;
      rows.add(broken, 1, 0, 1, 0, 0.5);
      rows.add(broken, 0, 3, 0.9f, 0, 0.5);
    }
    rows.add(std::vector<float>(V, -INFINITY), 1, 0, 1, 0, 0.5);
    rows.add(z, 0, 0, 1, 0, 0.1);
    omp_set_num_threads(2);
    const Drawn drawn = rows.draw(0, rows.count());
    for (long r : {0L, rows.count() - 1}) {
      test.that(drawn.tokens[r] == V / 2, "greedy (vocabulary, token)", V, drawn.tokens[r]);
      test.that(drawn.logprobs[r] == 0 && drawn.edges[r] == 0 && std::isnan(drawn.cuts[r]), "a point mass", V);
    }
    for (long r = 1; r + 1 < rows.count(); r++)
      test.that(drawn.tokens[r] == -1 && std::isnan(drawn.logprobs[r]), "a broken row (vocabulary, row)", V, r);
  }
}

}  // namespace

void test_sampler() {
  sampled("sample, 100 tokens", 100);
  sampled("sample, 1003 tokens", 1003);
  greedy_and_broken();
}
