// Paged attention, and the mixture of experts: kernels that are whole operations of a decoder.

#include "kernels.h"

namespace {

constexpr long BLOCK = 16;
constexpr double EXP = 4 * U;

// ---- paged attention

struct Shape { long H, Hkv, Dk, Dv; };

// softmax(scale q k^T) v over positions [0, n): a score that is off by s multiplies its weight by at most exp(s), and
// dividing by the sum of weights doubles that.
template <class T, class Key, class Value>
Approx attended(const T* q, long n, double scale, long Dk, long d, Key key, Value value) {
  std::vector<double> score(n);
  double top = -INFINITY, off = 0, total = 0;
  for (long j = 0; j < n; j++) {
    Sum sum;
    for (long i = 0; i < Dk; i++) sum.add(exactly(wide(q[i])), exactly(key(j, i)));
    const Approx scaled = sum.total() * exactly(scale);
    score[j] = scaled.value;
    off = std::max(off, scaled.error + 2 * U * std::fabs(scaled.value));
    top = std::max(top, score[j]);
  }
  for (long j = 0; j < n; j++) total += score[j] = std::exp(score[j] - top);
  const double relative = 2 * (off + EXP) + (n + 4) * U;
  Sum sum;
  for (long j = 0; j < n; j++)
    sum.add(Approx{score[j] / total, relative * score[j] / total}, exactly(value(j, d)));
  return rounded<T>(sum.total());
}

template <class T> void attention(const char* name, const Shape& s) {
  Test test(name);
  Random random(10);
  const long sequences = 3, width = 7, blocks = sequences * width, most = width * BLOCK, scale_of = s.Dk;
  const double scale = float(1 / std::sqrt(double(scale_of)));
  std::vector<int32_t> tables(sequences * width);
  for (long i = 0; i < blocks; i++) tables[i] = int32_t((5 * i + 3) % blocks);  // blocks lie anywhere: 5 and 21 are coprime
  const long ldk = s.Hkv * s.Dk + 5, ldv = s.Hkv * s.Dv + 1, tokens = sequences * most;
  const auto k = random.vector<T>(tokens * ldk), v = random.vector<T>(tokens * ldv);
  std::vector<T> keys(blocks * s.Hkv * s.Dk * BLOCK), values(blocks * s.Hkv * s.Dv * BLOCK);
  std::vector<int64_t> slots(tokens);
  for (long i = 0; i < tokens; i++) {  // slot of position i % most of sequence i / most, written by row i
    const long position = i % most;
    slots[i] = tables[i / most * width + position / BLOCK] * BLOCK + position % BLOCK;
  }
  omp_set_num_threads(3);
  Kernels<T>::write_cache(k.data(), ldk, v.data(), ldv, slots.data(), keys.data(), values.data(), tokens,
                          s.Hkv, s.Dk, s.Dv);

  const long rows = 24, ldq = s.H * s.Dk + 3;
  const auto q = random.vector<T>(rows * ldq, 2);
  std::vector<int32_t> sequence(rows), lengths(rows);
  for (long t = 0; t < rows; t++) sequence[t] = int32_t(t % sequences), lengths[t] = int32_t(1 + (t * 37) % most);
  lengths[1] = 16, lengths[2] = 17, lengths[3] = int32_t(most);
  std::vector<T> all(rows * s.H * s.Dv), out(all.size());
  auto run = [&](long t, long n, T* to) {
    Kernels<T>::paged_attention(&q[t * ldq], ldq, keys.data(), values.data(), tables.data(), width, &sequence[t],
                                &lengths[t], to, nullptr, n, s.H, s.Hkv, s.Dk, s.Dv, scale);
  };
  for (int threads : THREADS) {
    omp_set_num_threads(threads);
    run(0, rows, out.data());
    if (threads == 1) all = out;
    test.same(out.data(), all.data(), long(all.size()), "other bits with (threads)", threads);
  }
  for (long t = 0; t < rows; t++) {
    run(t, 1, out.data());
    test.same(out.data(), &all[t * s.H * s.Dv], s.H * s.Dv, "other bits alone (row)", t);
  }
  for (long t = 0; t < rows; t++)
    for (long h = 0; h < s.H; h++) {
      const long head = h / (s.H / s.Hkv);
      auto row = [&](long j) { return long(sequence[t] * most + j); };
      auto key = [&](long j, long i) { return wide(k[row(j) * ldk + head * s.Dk + i]); };
      auto value = [&](long j, long i) { return wide(v[row(j) * ldv + head * s.Dv + i]); };
      for (long d = 0; d < s.Dv; d += 5)
        test.near(wide(all[(t * s.H + h) * s.Dv + d]),
                  attended(&q[t * ldq + h * s.Dk], lengths[t], scale, s.Dk, d, key, value), "(row, head, feature)", t, h, d);
    }
}

// ---- the mixture of experts

// [experts, rows, columns] as the kernel gets it, and as numbers.
struct Weights {
  std::vector<double> values;
  std::vector<uint8_t> memory;
  std::vector<float> scale;
  long rows, columns, format;
  Matrix matrix() const { return {memory.data(), format ? scale.data() : nullptr, format}; }
  Approx at(long e, long n, long k) const { return exactly(values[(e * rows + n) * columns + k]); }
  double scale_of(long e, long n) const { return format ? scale[e * rows + n] : 1; }
};

template <class T> Weights weights(Random& random, long experts, long rows, long columns, long format) {
  Weights w{{}, {}, {}, rows, columns, format};
  w.values.resize(experts * rows * columns);
  const long each = format ? code_bytes(rows, columns) : rows * columns * long(sizeof(T));
  w.memory.resize(experts * each + 64);
  for (long i = 0; i < experts * rows; i++) w.scale.push_back(float(0.005 * (1 + random.uniform())));
  for (long e = 0; e < experts; e++)
    for (long n = 0; n < rows; n++)
      for (long k = 0; k < columns; k++) {
        double& value = w.values[(e * rows + n) * columns + k];
        if (format) {
          const uint8_t code = random_code(random, format);
          w.memory[e * each + place_of_code(n, k, columns)] = code;
          value = value_of_code(code, format);
        } else {
          T number;
          set(number, random.centred());
          memcpy(w.memory.data() + e * each + (n * columns + k) * sizeof(T), &number, sizeof(T));
          value = wide(number);
        }
      }
  return w;
}

using Row = std::vector<Approx>;

// round(x w^T), or round(y + x w^T) where there is a y.
template <class T> Row times(const Row& x, const Weights& w, long e, const Row* y = nullptr) {
  Row out(w.rows);
  const Row in = inputs_of_codes<T>(x, w.format);
  for (long n = 0; n < w.rows; n++) {
    Sum sum;
    for (long k = 0; k < w.columns; k++) sum.add(in[k], w.at(e, n, k));
    const Approx product = w.format ? sum.total() * exactly(w.scale_of(e, n)) : sum.total();
    out[n] = rounded<T>(y ? product + (*y)[n] : product);
  }
  return out;
}
template <class T> Row scaled(Row x, double scale) {
  for (Approx& v : x) v = rounded<T>(v * exactly(scale));
  return x;
}
template <class T> Row weighted(const std::vector<Row>& rows, const float* weights) {
  Row out(rows[0].size());
  for (size_t d = 0; d < out.size(); d++) {
    Sum sum;
    for (size_t k = 0; k < rows.size(); k++) sum.add(exactly(weights[k]), rows[k][d]);
    out[d] = rounded<T>(sum.total());
  }
  return out;
}
inline Approx silu(Approx v) {  // its slope is at most 1.1
  const double value = v.value / (1 + std::exp(-v.value));
  return {value, 1.1 * v.error + (EXP + 4 * U) * (std::fabs(value) + 1.1 * v.error)};
}

enum class Lora { NONE, EACH, SHARED };

template <class T> void experts(const char* name, Lora lora, long format) {
  Test test(name);
  Random random(11);
  const long E = 5, D = 40, F = 24, R = 4, rows = 45, K = 2;
  const double scale = 0.5;
  const bool shared = lora == Lora::SHARED, any = lora != Lora::NONE;
  const auto up = weights<T>(random, E, 2 * F, D, format), down = weights<T>(random, E, D, F, format);
  const auto up_a = weights<T>(random, shared ? 1 : E, R, D, 0), up_b = weights<T>(random, E, 2 * F, R, 0);
  const auto down_a = weights<T>(random, E, R, F, 0), down_b = weights<T>(random, shared ? 1 : E, D, R, 0);
  Experts w{up.matrix(), down.matrix(), nullptr, nullptr, nullptr, nullptr, E, F, D, 0, 0, shared, scale};
  if (any) {
    w.gate_up_a = up_a.memory.data(), w.gate_up_b = up_b.memory.data();
    w.down_a = down_a.memory.data(), w.down_b = down_b.memory.data();
    w.rank_up = w.rank_down = R;
  }
  const auto x = random.vector<T>(rows * D);
  auto weight = random.vector<float>(rows * K);
  std::vector<int32_t> ids(rows * K);
  for (long t = 0; t < rows; t++) ids[2 * t] = int32_t(random.below(E - 1)), ids[2 * t + 1] = int32_t(E - 1);  // a busy one
  auto run = [&](long t, long n) {
    std::vector<T> y(n * D);
    const long bytes = Kernels<T>::experts(&w, &x[t * D], &ids[t * K], &weight[t * K], y.data(), n, K, nullptr);
    std::vector<char> room(bytes + 64);
    char* aligned = room.data() + (64 - uintptr_t(room.data()) % 64);
    Kernels<T>::experts(&w, &x[t * D], &ids[t * K], &weight[t * K], y.data(), n, K, aligned);
    return y;
  };
  omp_set_num_threads(1);
  const std::vector<T> all = run(0, rows);
  for (int threads : THREADS) {
    omp_set_num_threads(threads);
    test.same(run(0, rows).data(), all.data(), rows * D, "other bits with (threads)", threads);
    for (long t = 0; t < rows; t += threads == 1 ? 1 : 20)
      test.same(run(t, 1).data(), &all[t * D], D, "other bits alone (row, threads)", t, threads);
  }
  for (long t = 0; t < rows; t++) {
    Row in;
    for (long d = 0; d < D; d++) in.push_back(exactly(wide(x[t * D + d])));
    std::vector<Row> outs, lows;
    for (long k = 0; k < K; k++) {
      const long e = ids[t * K + k];
      Row hidden = times<T>(in, up, e);
      if (any) hidden = times<T>(scaled<T>(times<T>(in, up_a, shared ? 0 : e), scale), up_b, e, &hidden);
      Row act(F);
      for (long f = 0; f < F; f++) act[f] = rounded<T>(rounded<T>(silu(hidden[f])) * hidden[F + f]);
      outs.push_back(times<T>(act, down, e));
      if (any) lows.push_back(scaled<T>(times<T>(act, down_a, e), scale));
      if (any && !shared) outs[k] = times<T>(lows[k], down_b, e, &outs[k]);
    }
    Row y = weighted<T>(outs, &weight[t * K]);
    if (any && shared) y = times<T>(weighted<T>(lows, &weight[t * K]), down_b, 0, &y);
    for (long d = 0; d < D; d++) test.near(wide(all[t * D + d]), y[d], "(row, feature)", t, d);
  }
}

}  // namespace

void test_attention() {
  const Shape grouped{9, 3, 64, 64}, alone{2, 2, 32, 32}, wide_values{5, 1, 128, 128}, odd{3, 1, 20, 40};
  attention<float>("attention_f32, 9 heads over 3", grouped);
  attention<bf16>("attention_bf16, 9 heads over 3", grouped);
  attention<float>("attention_f32, 2 heads", alone);
  attention<bf16>("attention_bf16, 2 heads", alone);
  attention<float>("attention_f32, width 128", wide_values);
  attention<bf16>("attention_bf16, width 128", wide_values);
  attention<float>("attention_f32, widths 20 and 40", odd);
  attention<bf16>("attention_bf16, widths 20 and 40", odd);
}

void test_experts() {
  experts<float>("experts_f32", Lora::NONE, 0);
  experts<float>("experts_f32, adapters", Lora::EACH, 0);
  experts<float>("experts_f32, shared adapters", Lora::SHARED, 0);
  experts<bf16>("experts_bf16", Lora::NONE, 0);
  experts<bf16>("experts_bf16, adapters", Lora::EACH, 0);
  experts<bf16>("experts_bf16, shared adapters", Lora::SHARED, 0);
  experts<bf16>("experts_bf16, int8, adapters", Lora::EACH, 1);
  experts<float>("experts_f32, int8", Lora::SHARED, 1);
  experts<bf16>("experts_bf16, e4m3", Lora::NONE, 2);
}
