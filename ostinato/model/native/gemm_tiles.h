// bf16 products by tiles (AMX, tdpbf16ps): 16 x 16 sums of 32 values at a time, for a whole number of those.
//
// nt: 16 rows of w are a tile as they lie in memory; 16 rows of x are packed in pairs (pack_pairs), so that a tile of
// sums has columns of y as its rows. nn: rows of x are a tile as they lie, panels of w are packed in pairs (pack_nn).
// A tile adds its 32 products to nothing and their sum to what was there, by K alone: a row's result depends neither
// on the number of rows nor on what else is in its tile.
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

#include "gemm_pairs.h"

namespace {

constexpr long SIDE = 16, DEPTH_OF_TILE = 32, TILE = SIDE * DEPTH_OF_TILE;

// Linux grants tiles to a process that requests them (ARCH_REQ_XCOMP_PERM of XTILEDATA).
inline bool has_tiles() {
  static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return granted;
}

// Eight tiles of 16 rows of 64 bytes in the calling thread, while it lives.
struct Tiles {
  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
};

// The sums of tiles 0 to 3: those of row r of tile t are of[t][r].
struct alignas(64) Sums {
  vec of[4][SIDE];
};
inline void zero_tiles() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}
inline void store_tiles(Sums& sums) {
  _tile_stored(0, sums.of[0], 64);
  _tile_stored(1, sums.of[1], 64);
  _tile_stored(2, sums.of[2], 64);
  _tile_stored(3, sums.of[3], 64);
}

// w[0 .. 4) times one packed vector of rows: w's rows lie `row` bytes apart.
inline void tall_tiles(const bf16* const* w, long row, const bf16* x, long K, Sums& sums) {
  zero_tiles();
  for (long k = 0; k < K; k += DEPTH_OF_TILE, x += TILE) {
    _tile_loadd(4, x, 64);
    _tile_loadd(5, w[0] + k, row);
    _tile_dpbf16ps(0, 5, 4);
    _tile_loadd(6, w[1] + k, row);
    _tile_dpbf16ps(1, 6, 4);
    _tile_loadd(7, w[2] + k, row);
    _tile_dpbf16ps(2, 7, 4);
    _tile_loadd(5, w[3] + k, row);
    _tile_dpbf16ps(3, 5, 4);
  }
  store_tiles(sums);
}

// a[0 .. 2) times b[0 .. 2), added to what tiles 0 to 3 hold: sums of a[i] b[j] are in tile 2 i + j.
inline void square_tiles(const bf16* const* a, long row_a, const bf16* const* b, long row_b, long next_b, long K) {
  for (long k = 0, at = 0; k < K; k += DEPTH_OF_TILE, at += next_b) {
    _tile_loadd(4, a[0] + k, row_a);
    _tile_loadd(6, b[0] + at, row_b);
    _tile_loadd(5, a[1] + k, row_a);
    _tile_loadd(7, b[1] + at, row_b);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// 16 rows of w from column n of y on, those that are there; a last tile that is not whole is copied.
inline const bf16* tile_rows(const bf16* w, long K, long n, long some) {
  if (some == SIDE) return w + n * K;
  bf16* whole = scratch<bf16, WIDENED>(SIDE * K);
  memcpy(whole, w + n * K, some * K * sizeof(bf16));
  std::fill(whole + some * K, whole + SIDE * K, bf16{0});
  return whole;
}

// Columns [n, last), at most 64 of them, of up to 16 rows.
template <class Y> void few_rows(const Product<bf16, Y>& p, const bf16* packed, long n, long last, Sums& sums) {
  const bf16* w[4];
  for (long t = 0, at = n; t < 4; t++, at += at + SIDE < last ? SIDE : 0)
    w[t] = tile_rows((const bf16*)p.w.data, p.K, at, std::min(SIDE, last - at));
  tall_tiles(w, 2 * p.K, packed, p.K, sums);
  for (long t = 0, at = n; at < last; t++, at += SIDE)
    store_lanes(p, sums.of[t], 1, 0, p.M, at, std::min(SIDE, last - at));
}

// Columns [n, last), at most 32 of them, of `rows` packed rows from m on.
template <class Y>
void many_rows(const Product<bf16, Y>& p, const bf16* packed, long m, long rows, long n, long last, Sums& sums) {
  const bf16* w = (const bf16*)p.w.data;
  const bool two = n + SIDE < last;
  const bf16* a[2] = {tile_rows(w, p.K, n, std::min(SIDE, last - n)), nullptr};
  a[1] = two ? tile_rows(w, p.K, n + SIDE, std::min(SIDE, last - n - SIDE)) : a[0];
  for (long r = 0; r < rows; r += 2 * SIDE) {
    const bool both = r + SIDE < rows;
    const bf16* b[2] = {packed + r * p.K, packed + (both ? r + SIDE : r) * p.K};
    zero_tiles();
    square_tiles(a, 2 * p.K, b, 64, TILE, p.K);
    store_tiles(sums);
    for (long i = 0; i <= two; i++)
      for (long j = 0; j <= both; j++) {
        const long from = r + j * SIDE, at = n + i * SIDE;
        store_lanes(p, sums.of[2 * i + j], 1, m + from, std::min(SIDE, rows - from), at, std::min(SIDE, last - at));
      }
  }
}

// Codes are widened 32 columns at a time into pairs, and rows of x are tiles as they lie: the same sums, turned.
template <class C, class Y>
void coded_columns(const Product<bf16, Y>& p, const bf16* x, long m, long rows, long n, long last, Sums& sums) {
  const bool two = n + SIDE < last;
  bf16* wide = scratch<bf16, WIDENED>(2 * SIDE * p.K);
  const bf16* b[2] = {wide, two ? wide + SIDE * p.K : wide};
  for (long j = 0; j <= two; j++) widen_tile(rows_at((const C*)p.w.data, n + j * SIDE, p.K), p.K, wide + j * SIDE * p.K);
  for (long r = 0; r < rows; r += 2 * SIDE) {
    const bf16* a[2] = {x + r * p.K, x + (r + SIDE < rows ? r + SIDE : r) * p.K};
    zero_tiles();
    square_tiles(a, 2 * p.K, b, 64, TILE, p.K);
    store_tiles(sums);
    for (long j = 0; j <= two; j++) {
      const long at = n + j * SIDE;
      const Finish<Y> finish(p, at, std::min(SIDE, last - at));
      for (long i = 0; i < std::min(2 * SIDE, rows - r); i++)
        finish.store(sums.of[i / SIDE * 2 + j][i % SIDE], p.y + (m + r + i) * p.ldy + at);
    }
  }
}

// Rows [m, m + rows) of x side by side, and zeros up to a whole tile.
inline bf16* side_by_side(const RowsOf<bf16>& x, long m, long rows, long K, bf16* to) {
  for (long i = 0; i < rows; i++) memcpy(to + i * K, x[m + i], K * sizeof(bf16));
  std::fill(to + rows * K, to + (rows + SIDE - 1) / SIDE * SIDE * K, bf16{0});
  return to;
}

template <class W, class Y> void tiles(const Product<bf16, Y>& p, long first, long last) {
  const long block = std::max(4L, (512 << 10) / (SIDE * p.K * 2)) * SIDE;  // rows of x that stay in the second cache
  const Tiles tiles;
  Sums sums;
  for (long m = 0; m < p.M; m += block) {
    const long rows = std::min(block, p.M - m);
    bf16* packed = scratch<bf16, PACKED>((rows + SIDE) * p.K);
    if constexpr (sizeof(W) == 1) {
      side_by_side(p.x, m, rows, p.K, packed);
      for (long n = first; n < last; n += 2 * SIDE)
        coded_columns<W>(p, packed, m, rows, n, std::min(last, n + 2 * SIDE), sums);
      continue;
    }
    for (long r = 0; r < rows; r += SIDE) pack_pairs(p.x, m + r, std::min(SIDE, rows - r), p.K, packed + r * p.K, 32);
    if (p.M <= SIDE)
      for (long n = first; n < last; n += 4 * SIDE) few_rows(p, packed, n, std::min(last, n + 4 * SIDE), sums);
    else
      for (long n = first; n < last; n += 2 * SIDE) many_rows(p, packed, m, rows, n, std::min(last, n + 2 * SIDE), sums);
  }
}

// ---- nn

// Rows [m, m + rows) of x from column n on, as two tiles read them; where rows lack, a copy with zeros.
inline const bf16* pair_of_tiles(const bf16* x, long& ldx, long rows, long depth, bf16* copy) {
  if (rows == 2 * SIDE) return x;
  for (long i = 0; i < rows; i++) memcpy(copy + i * depth, x + i * ldx, depth * sizeof(bf16));
  std::fill(copy + rows * depth, copy + 2 * SIDE * depth, bf16{0});
  ldx = depth;
  return copy;
}

// Two tiles of rows times a panel: sums[2 SIDE][PANEL], from nothing if it is the first.
inline void tile_panel(const bf16* x, long ldx, const bf16* panel, long depth, float* sums, bool first) {
  constexpr long row = PANEL * sizeof(float);
  const bf16* a[2] = {x, x + SIDE * ldx};
  for (long c = 0; c < PANEL; c += 2 * SIDE) {
    const bf16* b[2] = {panel + 2 * c, panel + 2 * (c + SIDE)};
    float *upper = sums + c, *lower = upper + SIDE * PANEL;
    zero_tiles();
    if (!first) {
      _tile_loadd(0, upper, row);
      _tile_loadd(1, upper + SIDE, row);
      _tile_loadd(2, lower, row);
      _tile_loadd(3, lower + SIDE, row);
    }
    square_tiles(a, 2 * ldx, b, 4 * PANEL, SIDE * 2 * PANEL, depth);
    _tile_stored(0, upper, row);
    _tile_stored(1, upper + SIDE, row);
    _tile_stored(2, lower, row);
    _tile_stored(3, lower + SIDE, row);
  }
}

// The calling thread's panels of y[M, K] = x[M, N] w[N, K].
void nn_tiles_share(const bf16* x, long ldx, const bf16* w, bf16* y, long ldy, long M, long N, long K) {
  constexpr long DEPTH = 768;
  bf16 *panel = scratch<bf16, PANEL_OF_W>(DEPTH * PANEL), *copy = scratch<bf16, WIDENED>(2 * SIDE * DEPTH);
  float* kept = scratch<float, KEPT>((N > DEPTH ? M + 2 * SIDE : 2 * SIDE) * PANEL);
  const Tiles tiles;
  long first, last;
  share((K + PANEL - 1) / PANEL, first, last);
  for (long k = first * PANEL; k < std::min(last * PANEL, K); k += PANEL)
    for (long n = 0; n < N; n += DEPTH) {
      const long columns = std::min(PANEL, K - k), depth = std::min(DEPTH, N - n);
      pack_nn(w, K, k, columns, n, depth, panel);
      for (long m = 0; m < M; m += 2 * SIDE) {
        const long rows = std::min(2 * SIDE, M - m);
        long ld = ldx;
        const bf16* from = pair_of_tiles(x + m * ldx + n, ld, rows, depth, copy);
        float* sums = kept + (N > DEPTH ? m : 0) * PANEL;
        tile_panel(from, ld, panel, depth, sums, n == 0);
        if (n + depth < N) continue;
        for (long i = 0; i < rows; i++)
          for (long c = 0; c < columns; c += SIDE)
            store_some(y + (m + i) * ldy + k + c, first_lanes(columns - c), load(sums + i * PANEL + c));
      }
    }
}

}  // namespace
