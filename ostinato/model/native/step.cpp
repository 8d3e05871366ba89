// The fused step: all layers for a flat row of tokens in one parallel region.
//
// A pass alternates two kinds of phases, with a barrier after each. In a product phase every thread computes its
// columns for all rows, so that weights are read once; in a row phase every thread finishes its rows: norms, rotary
// positions, activations, routing, and the low-rank half of the adapter of the product that comes next. Every number is
// made by the functions that the single kernels are made of, so both give the same bits.

#include "attention.h"
#include "moe.h"

// ---- what fused.py fills in; the layouts are the same there ---------------------------------------------------

struct Adapter {
  const void *a, *b;  // [rank, in], [out, rank]; null without
  long rank;
  double scale;
};
struct Linear {
  Matrix w;  // [out, in]
  const void* bias;  // [out] or null
  long out, in;
  const Adapter* adapters;  // [policies]; null where no policy adapts it
};
struct Layer {
  const void *attn_norm, *mlp_norm, *next_norm;
  const void *q_norm, *k_norm;  // [Dk], [H Dk] and [Hkv Dk], or null
  Linear qkv, o;
  Linear gate_up, down;  // the MLP, or the shared expert; out is 0 without
  Linear router;         // out is 0 in a dense layer
  const Experts* experts;  // [policies], the same weights with the adapters of each; null in a dense layer
  long window;  // positions that a row sees, itself included; 0: all
};
struct Model {
  const Layer* layers;
  long num_layers, D, H, Hkv, Dk, K;
  long norm_topk, norm_all;  // weights of chosen experts sum to 1; q_norm and k_norm are over all heads at once
  Matrix embed;
  const void *cos, *sin;  // [positions, Dk]
  long positions;
  double eps, scale, scaling;
  long policies;
};
struct Batch {
  const int64_t *tokens, *places;
  const int64_t* slots;  // [T] where the key and value of a row go
  const int32_t* tables;
  const int32_t *sequence, *lengths;
  void *keys, *values;  // [layers, ...]
  void* hidden;         // [T, D]
  int16_t* routing;     // [T, MoE layers, K]
  long T_, ldt, moe_layers;
  long key_layer, value_layer;  // elements from layer to layer
  const Span* spans;            // [num_spans] which rows are of which policy
  long num_spans;
};

namespace {

template <class T> class Pass {
  const Model& model;
  const Batch& batch;
  T *x, *residual, *qkv, *q, *attended, *y, *z, *low, *gate_up, *act, *narrow;
  float *logits, *weights;
  int32_t* ids;
  long low_width = 0;
  Spans spans;
  Mixture<T> mixture{};  // for the largest of the layers and policies

 public:
  Pass(const Model& model, const Batch& batch, Arena& arena)
      : model(model), batch(batch), spans{batch.spans, batch.num_spans} {
    const long rows = batch.T_, D = model.D, heads = model.H * model.Dk;
    long width = 0, E = 0;
    Experts& most = mixture.w;
    for (long l = 0; l < model.num_layers; l++) {
      const Layer& layer = model.layers[l];
      for (const Linear* p : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down, &layer.router})
        for (long n = 0; p->adapters && n < model.policies; n++)
          low_width = std::max(low_width, p->adapters[n].rank);
      width = std::max(width, layer.gate_up.out);
      E = std::max(E, layer.router.out);
      for (long n = 0; layer.experts && n < model.policies; n++) {
        most.F = std::max(most.F, layer.experts[n].F);
        most.R = std::max(most.R, layer.experts[n].R);
        most.r = std::max(most.r, layer.experts[n].r);
      }
    }
    most.E = E;
    most.D = D;
    x = arena.take<T>(rows * D);
    residual = arena.take<T>(rows * D);
    qkv = arena.take<T>(rows * (heads + 2 * model.Hkv * model.Dk));
    q = arena.take<T>(rows * heads);
    attended = arena.take<T>(rows * heads);
    y = arena.take<T>(rows * D);
    z = arena.take<T>(rows * D);
    low = arena.take<T>(rows * low_width);
    gate_up = arena.take<T>(rows * width);
    act = arena.take<T>(rows * width / 2);
    if (!E) return;
    logits = arena.take<float>(rows * E);
    narrow = arena.take<T>(rows * E);
    ids = arena.take<int32_t>(rows * model.K);
    weights = arena.take<float>(rows * model.K);
    mixture.x = x;
    mixture.ids = ids;
    mixture.weights = weights;
    mixture.T_ = rows;
    mixture.K = model.K;
    mixture.take(arena);
  }

  void run() {
#pragma omp parallel
    {
      long first, last, moe = 0;
      share(batch.T_, first, last);
      begin(first, last);
      for (long l = 0; l < model.num_layers; l++) {
        const Layer& layer = model.layers[l];
        Mixture<T> experts = mixture;
        if (layer.experts) {
          experts.w = layer.experts[0];
          experts.w.R = mixture.w.R;
          experts.w.r = mixture.w.r;
          experts.policies = layer.experts;
          experts.num_policies = model.policies;
          experts.spans = spans;
        }
        attention(layer, l);
        close_attention(layer, experts, moe, first, last);
        feed_forward(layer, experts, first, last);
        close_layer(layer, experts, l, first, last);
        moe += layer.router.out > 0;
      }
    }
  }

 private:
  // ---- products, shared by columns

  Product<T, T> map(const Linear& p, const T* x, T* y) {
    return {{x, p.in}, p.w, (const T*)p.bias, y, p.out, batch.T_, p.out, p.in};
  }

  // y = x w^T + bias and, where the low-rank half of the adapter is known, its other half.
  void product(const Linear& p, const T* x, T* y) {
    long first, last;
    share(units(p.out), first, last);
    first *= UNIT;
    last = std::min(last * UNIT, p.out);
    multiply(map(p, x, y), first, last);
    raise(p, y, 0, batch.T_, first, last);
  }

  // y = x w^T + bias and low = x a^T: where x is not known by rows, the low-rank half is more columns.
  void product_and_low(const Linear& p, const T* x, T* y) {
    const long own = units(p.out);
    long first, last, at = own;
    adapted(p, 0, batch.T_, [&](const Adapter& adapter, long, long) { at += units(adapter.rank); });
    share(at, first, last);
    multiply(map(p, x, y), first * UNIT, std::min(last * UNIT, p.out));
    at = own;
    adapted(p, 0, batch.T_, [&](const Adapter& adapter, long a, long b) {
      multiply(Product<T, T>{{x + a * p.in, p.in}, adapter.a, nullptr, low + a * low_width, low_width, b - a,
                             adapter.rank, p.in},
               std::max(0L, first - at) * UNIT, std::min(std::max(0L, last - at) * UNIT, adapter.rank));
      at += units(adapter.rank);
    });
  }

  // ---- adapters, by rows: low = scale x a^T, y += low b^T

  // f(adapter, first row, last row + 1) for the rows of [first, last) whose policy adapts this map.
  template <class F> void adapted(const Linear& p, long first, long last, F f) {
    if (!p.adapters) return;
    spans.over(first, last, [&](long policy, long a, long b) {
      if (p.adapters[policy].rank) f(p.adapters[policy], a, b);
    });
  }

  void lower(const Linear& p, const T* x, long first, long last) {
    adapted(p, first, last, [&](const Adapter& adapter, long a, long b) {
      project_low(RowsOf<T>{x + a * p.in, p.in}, (const T*)adapter.a, float(adapter.scale), low + a * low_width,
                  low_width, b - a, adapter.rank, p.in);
    });
  }

  void raise(const Linear& p, T* y, long first, long last, long column, long end) {
    adapted(p, first, last, [&](const Adapter& adapter, long a, long b) {
      const RowsOf<T> mine{low + a * low_width, low_width};
      multiply(Product<T, T>{mine, adapter.b, nullptr, y + a * p.out, p.out, b - a, p.out, adapter.rank, true}, column,
               end);
    });
  }

  // ---- phases

  void embed(long token, T* to) {
    const long at = token * model.D;
    if (model.embed.format == BF16)
      for (long d = 0; d < model.D; d++) store1(to + d, to_float(((const bf16*)model.embed.data)[at + d]));
    else memcpy(to, (const T*)model.embed.data + at, model.D * sizeof(T));
  }

  void begin(long first, long last) {
    const T* norm = (const T*)model.layers[0].attn_norm;
    const long D = model.D;
    for (long t = first; t < last; t++) {
      embed(batch.tokens[t], residual + t * D);
      normalise(residual + t * D, norm, x + t * D, D, float(model.eps));
    }
    lower(model.layers[0].qkv, x, first, last);
#pragma omp barrier
  }

  void attention(const Layer& layer, long l) {
    const Cache<T> cache{(T*)batch.keys + l * batch.key_layer, (T*)batch.values + l * batch.value_layer, model.Hkv,
                         model.Dk, model.Dk};
    product(layer.qkv, x, qkv);
#pragma omp barrier
    turn_queries(layer);
    cache_keys(layer, cache);
#pragma omp barrier
    attend_share(Attention<T>{q, model.H * model.Dk, cache, batch.tables, batch.ldt, batch.sequence, batch.lengths,
                              attended, batch.T_, model.H, float(model.scale), nullptr, layer.window});
#pragma omp barrier
    product_and_low(layer.o, attended, y);
#pragma omp barrier
  }

  // Heads of row t, normed and turned to its position.
  void turn(const T* from, const void* norm, long t, long heads, T* to) {
    const long place = batch.places[t] * model.Dk, width = heads * model.Dk;
    const T *cos = (const T*)model.cos + place, *sin = (const T*)model.sin + place;
    if (!norm) return rotate(from, cos, sin, to, heads, model.Dk);
    const long together = model.norm_all ? width : model.Dk;
    for (long d = 0; d < width; d += together) normalise(from + d, (const T*)norm, to + d, together, float(model.eps));
    rotate(to, cos, sin, to, heads, model.Dk);
  }

  void turn_queries(const Layer& layer) {
    long first, last;
    share(batch.T_, first, last);
    const long width = model.H * model.Dk;
    for (long t = first; t < last; t++) turn(qkv + t * layer.qkv.out, layer.q_norm, t, model.H, q + t * width);
  }

  void cache_keys(const Layer& layer, const Cache<T>& cache) {
    static thread_local std::vector<T> key;
    const long width = model.Hkv * model.Dk;
    key.resize(width);
    long first, last;
    share(batch.T_, first, last);
    for (long t = first; t < last; t++) {
      const T* k = qkv + t * layer.qkv.out + model.H * model.Dk;
      turn(k, layer.k_norm, t, model.Hkv, key.data());
      write_slot(cache, key.data(), k + width, batch.slots[t]);
    }
  }

  void close_attention(const Layer& layer, const Mixture<T>& experts, long moe, long first, long last) {
    adapted(layer.o, first, last, [&](const Adapter& adapter, long a, long b) {
      for (long t = a; t < b; t++) scale_row(low + t * low_width, float(adapter.scale), adapter.rank);
    });
    raise(layer.o, y, first, last, 0, layer.o.out);
    add_norm(y, layer.mlp_norm, x, first, last);
    if (layer.router.out) {
      route(layer.router, moe, first, last);
      project_tokens(experts, first, last);
    }
    lower(layer.gate_up, x, first, last);
#pragma omp barrier
  }

  void feed_forward(const Layer& layer, const Mixture<T>& experts, long first, long last) {
    const bool moe = layer.router.out, mlp = layer.gate_up.out;
    if (moe) {
#pragma omp single
      sort_rows(experts);
      expert_up_share(experts);
    }
    if (mlp) product(layer.gate_up, x, gate_up);
#pragma omp barrier
    if (moe) expert_act_share(experts);
    if (mlp) {
      const long F = layer.down.in;
      for (long t = first; t < last; t++) silu_row(gate_up + t * 2 * F, act + t * F, F);
      lower(layer.down, act, first, last);
    }
#pragma omp barrier
    if (moe) expert_down_share(experts);
    if (mlp) product(layer.down, act, moe ? z : y);
#pragma omp barrier
  }

  void close_layer(const Layer& layer, const Mixture<T>& experts, long l, long first, long last) {
    if (layer.router.out) {
      mix(experts, y, first, last);
      const long at = first * model.D;
      if (layer.gate_up.out) add_row(y + at, z + at, y + at, (last - first) * model.D);
    }
    const bool final = l + 1 == model.num_layers;
    add_norm(y, layer.next_norm, final ? (T*)batch.hidden : x, first, last);
    if (!final) lower(model.layers[l + 1].qkv, x, first, last);
#pragma omp barrier
  }

  // residual += y, to = norm(residual).
  void add_norm(const T* y, const void* norm, T* to, long first, long last) {
    for (long d = first * model.D; d < last * model.D; d += model.D) {
      add_row(y + d, residual + d, residual + d, model.D);
      normalise(residual + d, (const T*)norm, to + d, model.D, float(model.eps));
    }
  }

  // In fp32 whatever T is, as the decoder does.
  void route(const Linear& p, long moe, long first, long last) {
    const long E = p.out, K = model.K, rows = last - first, moe_layers = batch.moe_layers;
    float* z = logits + first * E;
    multiply(Product<T, float>{{x + first * p.in, p.in}, p.w, nullptr, z, E, rows, E, p.in});
    lower(p, x, first, last);
    adapted(p, first, last, [&](const Adapter& adapter, long a, long b) {
      T* update = narrow + a * E;
      multiply(Product<T, T>{{low + a * low_width, low_width}, adapter.b, nullptr, update, E, b - a, E, adapter.rank});
      for (long i = 0; i < (b - a) * E; i++) logits[a * E + i] += to_float(update[i]);
    });
    for (long t = first; t < last; t++) {
      choose_experts(logits + t * E, E, K, model.norm_topk, float(model.scaling), ids + t * K, weights + t * K);
      for (long k = 0; k < K; k++) batch.routing[(t * moe_layers + moe) * K + k] = int16_t(ids[t * K + k]);
    }
  }
};

// 0 when the pass is done. Otherwise nothing was done: n > 0 asks for n bytes of workspace, n < 0 for the rotations
// of -n positions.
template <class T> long pass(const Model& model, const Batch& batch, char* workspace, long bytes) {
  for (long t = 0; t < batch.T_; t++)
    if (batch.places[t] >= model.positions) return -1 - batch.places[t];
  Arena arena{workspace};
  Pass<T> pass(model, batch, arena);
  if (arena.used > bytes) return arena.used;
  pass.run();
  return 0;
}

}  // namespace

extern "C" {
long step_f32(const Model* model, const Batch* batch, char* workspace, long bytes) {
  return pass<float>(*model, *batch, workspace, bytes);
}
long step_bf16(const Model* model, const Batch* batch, char* workspace, long bytes) {
  return pass<bf16>(*model, *batch, workspace, bytes);
}
}
