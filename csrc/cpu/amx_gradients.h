// The experts' backward pass on matrix tiles (AMX), in bfloat16: 32 x 32 sums at a time. One operand has the summed dimension in
// pairs: two rows of weights, or of x and wh, are interleaved, once per unit. Of the other operand, rows of dy and dz are copied into
// tiles unchanged, or transposed for the gradients of the weights. Each sum runs over its elements in order.
#pragma once
#include "amx.h"
#include "gradients.h"

namespace {

using moert::TiledBackward;

// `length` rows of `columns` values, row k at at(k), in pairs: [blocks of 32 columns][steps][2][TILE_SIZE]
template <class At>
inline void lay_between(const At& at, int64_t columns, int64_t length, bf16* out) {
    const int64_t steps = steps_of(length);
    for (int64_t k = 0; k < steps * ELEMENTS; k += 2) {
        const bf16 *a = k < length ? at(k) : nullptr, *b = k + 1 < length ? at(k + 1) : nullptr;
        bf16* to = out + k / ELEMENTS * PAIR_SIZE + k % ELEMENTS * TILE;
        int64_t n = 0;
        for (; b && n + BROADER <= columns; n += BROADER, to += steps * PAIR_SIZE) {
            store((float*)to, stacked<bf16>(a + n, b + n));
            store((float*)(to + TILE_SIZE), stacked<bf16>(a + n + TILE, b + n + TILE));
        }
        for (; n < columns; n += BROADER, to += steps * PAIR_SIZE)
            for (int64_t i = n; i < n + BROADER; i += TILE) {
                const int64_t rest = columns - i;
                const vf v = stacked_up_to<bf16>(rest > 0 && a ? a + i : nullptr, rest > 0 && b ? b + i : nullptr, rest);
                store((float*)(to + (i - n) / TILE * TILE_SIZE), v);
            }
    }
}

// up to 32 rows at(m) unchanged, [steps][2][TILE_SIZE], zeros for the missing ones
template <class At>
inline void lay_rows(const At& at, int64_t rows, int64_t length, bf16* out) {
    for (int64_t m = 0; m < BROADER; m++) {
        const bf16* row = m < rows ? at(m) : nullptr;
        bf16* to = out + m / TILE * TILE_SIZE + m % TILE * ELEMENTS;
        for (int64_t k = 0; k < length; k += ELEMENTS, to += PAIR_SIZE)
            _mm512_store_si512(to, row ? tile_row(row, k, length) : _mm512_setzero_si512());
    }
}

// up to 32 columns of the rows at(k), transposed: [steps][2][TILE_SIZE]
template <class At>
inline void lay_turned(const At& at, int64_t columns, int64_t length, bf16* out) {
    for (int64_t k = 0; k < length; k += ELEMENTS)
        for (int64_t i = 0; i < BROADER; i += TILE, out += TILE_SIZE) {
            __m512i square[TILE];
            for (int64_t j = 0; j < TILE; j++) {
                const int64_t first = k + 2 * j, rest = columns - i;
                const bf16 *a = rest > 0 && first < length ? at(first) + i : nullptr;
                square[j] = (__m512i)stacked_up_to<bf16>(a, rest > 0 && first + 1 < length ? at(first + 1) + i : nullptr, rest);
            }
            transpose(square);
            for (int m = 0; m < TILE; m++) _mm512_store_si512(out + m * ELEMENTS, square[m]);
        }
}

// floats of a thread's panels for `columns` columns of `elements` elements, with the sums of `kept` rows
constexpr int64_t floats_of(int64_t elements, int64_t columns, int64_t kept) { return (columns + BROADER) * elements / 2 + kept * columns; }
static_assert(floats_of(TiledBackward::LONG, TiledBackward::PANELS * PANEL, 0) <= ExpertsBackward::WEIGHTS, "dh and dx");
static_assert(floats_of(TiledBackward::LONG, TiledBackward::PANELS_OF_LONGER * PANEL, Experts::PIECE) <= ExpertsBackward::WEIGHTS, "longer sums");
static_assert(floats_of(TiledBackward::PART, ExpertsBackward::WIDE, ExpertsBackward::HIGH) <= ExpertsBackward::WEIGHTS, "dw");

// Sums over `length` elements, `elements` at a time, of 32 of the `rows`, laid out by lay(m, k, depth, tiles), and 32 of the `columns`,
// laid out by between(k, depth, pairs); calls finish(m, n, sums [2][2][16][16]) for each such block. Meanwhile prefetches what
// next(m, k) and fresh(m, n, step) return, as for_blocks does.
template <class Lay, class Between, class Next, class Fresh, class Finish>
inline void tile_product(
    int64_t rows, int64_t columns, int64_t length, int64_t elements, const Lay& lay, const Between& between, const Next& next,
    const Fresh& fresh, const Finish& finish, float* panels) {
    const int64_t blocks = (columns + BROADER - 1) / BROADER;
    bf16 *const pairs = (bf16*)panels, *const tiles = pairs + blocks * BROADER * elements;
    float* const kept = length > elements ? (float*)(tiles + BROADER * elements) : nullptr;
    const Configured configured;
    for (int64_t k = 0; k < length; k += elements) {
        const bool last = length - k <= elements;
        const int64_t depth = last ? length - k : elements, steps = steps_of(depth);
        between(k, depth, pairs);
        for (int64_t m = 0; m < rows; m += BROADER) {
            lay(m, k, depth, tiles);
            const Rows w = {(const char*)tiles, (const char*)(tiles + TILE_SIZE), ELEMENTS * sizeof(bf16), PAIR_SIZE * sizeof(bf16)};
            const auto of_block = [&](int64_t block, int64_t step) { return last ? fresh(m, block * BROADER, step) : Ahead{}; };
            const auto done = [&](int64_t block, const float* sums) {
                if (last) finish(m, block * BROADER, sums);
            };
            float* const of_these = kept ? kept + m / BROADER * blocks * SUMS : nullptr;
            for_blocks(w, pairs, columns, steps, next(m, k), of_block, done, of_these, k > 0);
        }
    }
}

struct Nothing {
    Ahead ahead(int64_t, int64_t, int64_t) const { return {}; }
    Nothing operator()(int64_t, int64_t) const { return {}; }
    Ahead operator()(int64_t, int64_t, int64_t) const { return {}; }
};

// At each step two rows of 32 columns from each of two addresses of `rows`
struct Pages {
    const char *first, *second;
    int64_t stride, rows;
    Ahead at(int64_t step) const {
        const int64_t row = 2 * step * stride;
        return {first + row, second + row, stride, 2 * stride, 2 * step < BROADER && 2 * step < rows ? 2 : 0};
    }
};

// 16 columns, from n on, of row m of a block of 32 x 32 sums
inline vf sums_at(const float* sums, int64_t m, int64_t n) {
    return load(sums + m / TILE * 2 * TILE * TILE + n / TILE * TILE * TILE + m % TILE * TILE);
}

template <int ACT>
void dh_tiled(const ExpertsBackward& b, const Piece& piece, int64_t i, int64_t columns, float* panels) {
    const Experts& f = b.forward;
    const int64_t Z = f.form.form ? 2 * f.I : f.I, rows = piece.end - piece.begin, from = piece.begin - f.first_row;
    const int32_t* const slot = f.row_slot + piece.begin;
    const bf16* const w = f.down_of<bf16>(piece.expert) + i;
    const auto lay = [&](int64_t r, int64_t k, int64_t depth, bf16* tiles) {
        lay_rows([&](int64_t m) { return (const bf16*)b.dout + slot[r + m] / f.K * f.H + k; }, rows - r, depth, tiles);
    };
    const auto between = [&](int64_t k, int64_t depth, bf16* pairs) {
        lay_between([&](int64_t j) { return w + (k + j) * f.down_stride; }, columns, depth, pairs);
    };
    const auto finish = [&](int64_t r, int64_t n, const float* sums) {
        for (int64_t m = 0; m < BROADER && r + m < rows; m++) {
            const int64_t row = from + r + m;
            bf16* const dz = (bf16*)b.dz + row * Z;
            vf dots = {};
            for (int64_t j = n; j < n + BROADER && j < columns; j += LANES)
                dots += activation_backward<bf16, ACT>(
                    f.form, (const bf16*)f.z + row * Z, sums_at(sums, m, j - n), f.weight[slot[r + m]], f.I, i + j,
                    lanes(columns - j), dz, (bf16*)b.wh + row * f.I);
            float& dot = b.dots[(i + n) / PANEL * b.rows + row];
            dot = (n % PANEL ? dot : 0) + sum(dots);
        }
    };
    // z is read, and dz written, in pieces of 64 bytes per row, which hardware does not prefetch
    const auto pages = [&](const void* z, int64_t r, int64_t n) {
        const bf16* at = (const bf16*)z + (from + r) * Z + (f.form.form == 2 ? 2 : 1) * (i + n);
        return Pages{(const char*)at, (const char*)(at + (f.form.form == 1 ? f.I : f.form.form == 2 ? BROADER : 0)), Z * (int64_t)sizeof(bf16), rows - r};
    };
    const auto fresh = [&](int64_t r, int64_t n, int64_t step) { return pages(f.z, r, n).at(step); };
    tile_product(rows, columns, f.H, TiledBackward::LONG, lay, between, Nothing(), fresh, finish, panels);
}

void experts_dh_tiled(const ExpertsBackward& b, int64_t unit, float* panels) {
    void (*const of[])(const ExpertsBackward&, const Piece&, int64_t, int64_t, float*) = {
        dh_tiled<0>, dh_tiled<1>, dh_tiled<2>, dh_tiled<3>, dh_tiled<4>, dh_tiled<5>,
    };
    const int64_t I = b.forward.I, width = b.dh_panels * PANEL, blocks = (I + width - 1) / width, i = unit % blocks * width;
    const Piece& piece = b.forward.pieces[unit / blocks];
    if (!tiled<bf16>(piece)) return experts_dh<bf16>(b, unit, panels);
    of[b.forward.form.act](b, piece, i, I - i < width ? I - i : width, panels);
}

void experts_dx_tiled(const ExpertsBackward& b, int64_t unit, float* panels) {
    const Experts& f = b.forward;
    const int64_t width = b.dx_panels * PANEL, blocks = (f.H + width - 1) / width, c = unit % blocks * width;
    const int64_t columns = f.H - c < width ? f.H - c : width, Z = f.form.form ? 2 * f.I : f.I;
    const Piece piece = f.pieces[unit / blocks];
    if (!tiled<bf16>(piece)) return experts_dx<bf16>(b, unit, panels);
    const int64_t rows = piece.end - piece.begin;
    const bf16 *const w = f.up_of<bf16>(piece.expert) + c, *const dz = (bf16*)b.dz + (piece.begin - f.first_row) * Z;
    const auto lay = [&](int64_t r, int64_t k, int64_t depth, bf16* tiles) {
        lay_rows([&](int64_t m) { return dz + (r + m) * Z + k; }, rows - r, depth, tiles);
    };
    const auto between = [&](int64_t k, int64_t depth, bf16* pairs) {
        lay_between([&](int64_t j) { return w + (k + j) * f.up_stride; }, columns, depth, pairs);
    };
    const auto finish = [&](int64_t r, int64_t n, const float* sums) {
        for (int64_t m = 0; m < BROADER && r + m < rows; m++)
            for (int64_t j = n; j < n + BROADER && j < columns; j += LANES)
                store_up_to((bf16*)b.dx_rows + (piece.begin + r + m) * f.H + c + j, sums_at(sums, m, j - n), lanes(columns - j));
    };
    const auto next = [&](int64_t r, int64_t k) {
        const bf16* const at = dz + (r + BROADER) * Z + k;
        return Source{at, at + TILE * Z, Z, rows - r - BROADER, rows - r - BROADER - TILE, Z - k};
    };
    tile_product(rows, columns, Z, TiledBackward::LONG, lay, between, next, Nothing(), finish, panels);
}

void experts_dw_tiled(const ExpertsBackward& b, int64_t unit, float* panels) {
    const Block<bf16> block(b, unit);
    if (!tiled<bf16>(block.rows)) return experts_dw<bf16>(b, unit, panels);
    const int64_t length = block.rows.end - block.rows.begin, elements = length > TiledBackward::LONG ? TiledBackward::PART : TiledBackward::LONG;
    Operands<bf16, TiledBackward::LONG> at(block.up);
    const auto lay = [&](int64_t m, int64_t, int64_t depth, bf16* tiles) {
        lay_turned([&](int64_t k) { return at.high(k) + block.m0 + m; }, block.high - m, depth, tiles);
    };
    const auto between = [&](int64_t k, int64_t depth, bf16* pairs) {
        at.take(b, block.rows.begin + k, depth);
        lay_between([&](int64_t j) { return at.wide(j) + block.n0; }, block.wide, depth, pairs);
    };
    const auto finish = [&](int64_t m, int64_t n, const float* sums) {
        const int64_t high = block.high - m, wide = block.wide - n;
        const auto at_once = [=](int64_t i, int64_t j) { return sums_at(sums, i, j); };
        flush(at_once, high < BROADER ? high : BROADER, wide < BROADER ? wide : BROADER, block.adds, b.past,
            block.out + m * block.stride + n, block.stride);
    };
    tile_product(block.high, block.wide, length, elements, lay, between, Nothing(), Nothing(), finish, panels);
    if (b.past) fence();
}

}  // namespace
