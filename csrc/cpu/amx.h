// The experts' products on matrix tiles (AMX), in bfloat16: blocks of 32 rows of weights times 32 rows of x or h, 16 x 16 sums each.
// The rows of weights have the same layout in their tiles as in memory. Those of x and h are interleaved in pairs,
// [elements / 2][16 rows][2]. Two rows of sums of `up` have that layout, so h is never transposed; z and out, which are written by
// rows, are. Each sum runs over its elements in order, so neither threads nor the position of a row in its tile change a bit.
#pragma once
#include "activation.h"
#include "kernels.h"
#include "tiles.h"

namespace {

using moert::Experts;
using moert::Piece;
using moert::Tiled;

constexpr int64_t TILE = 16, BROADER = 2 * TILE, ELEMENTS = 32;  // rows of a tile; rows of a block; elements of a row in a tile
constexpr int64_t TILE_SIZE = TILE * ELEMENTS, PAIR_SIZE = 2 * TILE_SIZE, SUMS = 4 * TILE * TILE;
constexpr int64_t CHUNK = 8, GROUP = 4;  // steps of a sum and blocks, so that weights and sums stay in the L1 cache

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
const TileConfig TILE_CONFIG;  // not a local: g++ < 13 assumes that ldtilecfg reads 8 bytes, and drops stores just before it

// Configures eight whole tiles for this thread until the end of a block.
struct Configured {
    Configured() { _tile_loadconfig(&TILE_CONFIG); }
    ~Configured() { _tile_release(); }
};

// Two times 16 rows, in tiles `step` bytes apart, whose rows are `stride` bytes apart.
struct Rows {
    const char *first, *second;
    int64_t stride, step;
    Rows from(int64_t k) const { return {first + k * step, second + k * step, stride, step}; }
};

inline int64_t steps_of(int64_t length) { return (length + ELEMENTS - 1) / ELEMENTS; }

// Cache lines to prefetch during the products: at each step `lines` from each of two addresses, `stride` apart, which then advance by `step`.
struct Ahead {
    const char *first = nullptr, *second = nullptr;
    int64_t stride = 0, step = 0, lines = 0;
    void ask() {
        for (int64_t n = 0; n < lines; n++) {
            _mm_prefetch(first + n * stride, _MM_HINT_T1);
            _mm_prefetch(second + n * stride, _MM_HINT_T1);
        }
        first += step, second += step;
    }
};

// sums [2 of w][2 of pairs][16][16] = the products of `steps` tiles, with only the first 16 rows of `pairs` unless `both`; added to
// the previous sums if `more`.
inline void multiply(Rows w, const bf16* pairs, bool both, int64_t steps, bool more, float* sums, Ahead weights, Ahead fresh) {
    if (more) {
        _tile_loadd(0, sums, 64);
        _tile_loadd(1, sums + 256, 64);
        _tile_loadd(2, sums + 512, 64);
        _tile_loadd(3, sums + 768, 64);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    if (both) {
        for (int64_t k = 0; k < steps; k++, w.first += w.step, w.second += w.step, pairs += PAIR_SIZE) {
            _tile_loadd(4, w.first, w.stride);
            _tile_loadd(6, pairs, 64);
            _tile_loadd(7, pairs + TILE_SIZE, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, w.second, w.stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            weights.ask();
            fresh.ask();
        }
    } else {
        for (int64_t k = 0; k < steps; k++, w.first += w.step, w.second += w.step, pairs += PAIR_SIZE) {
            _tile_loadd(6, pairs, 64);
            _tile_loadd(4, w.first, w.stride);
            _tile_loadd(5, w.second, w.stride);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(2, 5, 6);
            weights.ask();
            fresh.ask();
        }
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
}

// a row's elements from k on in a tile, zeros beyond the last
inline __m512i tile_row(const bf16* row, int64_t k, int64_t length) {
    return (__m512i)(k + ELEMENTS <= length ? Step<bf16>::get(row + k) : Step<bf16>::get_part(row + k, length - k));
}

// `n` <= 16 rows as tiles, PAIR_SIZE apart, zeros for the missing ones
inline void lay_pairs(const bf16* const* rows, int64_t n, int64_t length, bf16* out) {
    for (int64_t k = 0; k < length; k += ELEMENTS, out += PAIR_SIZE) {
        __m512i square[TILE];
        if (n == TILE && k + ELEMENTS <= length)
            for (int m = 0; m < TILE; m++) square[m] = (__m512i)Step<bf16>::get(rows[m] + k);
        else
            for (int m = 0; m < TILE; m++) square[m] = m < n ? tile_row(rows[m], k, length) : _mm512_setzero_si512();
        transpose(square);
        for (int m = 0; m < TILE; m++) _mm512_store_si512(out + m * ELEMENTS, square[m]);
    }
}

// `n` <= 16 rows of weights as tiles, PAIR_SIZE apart, zeros for the missing ones
inline void lay_weights(const bf16* w, int64_t stride, int64_t n, int64_t length, bf16* out) {
    for (int64_t k = 0; k < length; k += ELEMENTS, out += PAIR_SIZE)
        if (n >= TILE && k + ELEMENTS <= length)
            for (int m = 0; m < TILE; m++)
                _mm512_store_si512(out + m * ELEMENTS, (__m512i)Step<bf16>::get(w + m * stride + k));
        else
            for (int m = 0; m < TILE; m++)
                _mm512_store_si512(out + m * ELEMENTS, m < n ? tile_row(w + m * stride, k, length) : _mm512_setzero_si512());
}

// 2 x 16 rows of weights, read in place, or from `copy` if they are not whole tiles.
struct Source {
    const bf16 *first, *second;
    int64_t stride, n_first, n_second, length;
    bool whole() const { return n_first >= TILE && n_second >= TILE && length % ELEMENTS == 0; }
    Rows rows(bf16* copy) const {
        if (whole())
            return {(const char*)first, (const char*)second, stride * (int64_t)sizeof(bf16), ELEMENTS * sizeof(bf16)};
        lay_weights(first, stride, n_first, length, copy);
        lay_weights(second, stride, n_second, length, copy + TILE_SIZE);
        return {(const char*)copy, (const char*)(copy + TILE_SIZE), ELEMENTS * sizeof(bf16), PAIR_SIZE * sizeof(bf16)};
    }
    // what the b-th of `blocks` prefetches, from element k on
    Ahead ahead(int64_t b, int64_t blocks, int64_t k) const {
        const int64_t from = TILE * b / blocks, end = TILE * (b + 1) / blocks, at = from * stride + k;
        if (!whole()) return {};
        return {(const char*)(first + at), (const char*)(second + at), stride * (int64_t)sizeof(bf16), 64, end - from};
    }
};

// Calls finish(block, sums) for the products of w with each of the blocks [..][steps][2][TILE_SIZE] of 32 rows, `rows` in all.
// Meanwhile prefetches the rows of the Source `next`, and what fresh(block, step) returns. The sums are stored in `kept` unless it is
// null, and added to its contents if `more`.
template <class Next, class Fresh, class Finish>
inline void for_blocks(
    const Rows& w, const bf16* pairs, int64_t rows, int64_t steps, const Next& next, const Fresh& fresh, const Finish& finish,
    float* kept = nullptr, bool more = false) {
    const int64_t blocks = (rows + BROADER - 1) / BROADER, chunks = (steps + CHUNK - 1) / CHUNK;
    alignas(64) float sums[GROUP * SUMS];
    for (int64_t g = 0; g < blocks; g += GROUP)
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
            const int64_t k = steps * chunk / chunks, end = steps * (chunk + 1) / chunks;
            for (int64_t b = g; b < g + GROUP && b < blocks; b++) {
                const bf16* const at = pairs + (b * steps + k) * PAIR_SIZE;
                const bool both = rows - b * BROADER > TILE;
                float* const to = kept ? kept + b * SUMS : sums + (b - g) * SUMS;
                multiply(w.from(k), at, both, end - k, more || chunk, to, next.ahead(b, blocks, k * ELEMENTS), fresh(b, k));
                if (chunk + 1 == chunks) finish(b, to);
            }
        }
}

inline vu bits(vf v) { return __builtin_convertvector(narrow(v), vu); }
inline __m512i pair(vf even, vf odd) { return (__m512i)(bits(even) | bits(odd) << 16); }

// h of 16 rows, in pairs, and z if it is saved, from the sums of gate and up; twice as many columns without a gate
template <int ACT>
inline void finish_up_tile(
    const Experts& f, const bf16* bias, int64_t row, int64_t rows, int64_t i, const float* first, const float* second, bf16* h) {
    const bool form = f.form.form, turns = f.form.form == 2;
    const int64_t Z = form ? 2 * f.I : f.I, step = turns ? 2 : 1, second_from = turns ? 1 : form ? f.I : TILE;
    const auto column = [&](const float* sums, int64_t n, int64_t from, int64_t base) {
        const vf v = load(sums + n * TILE);
        return bias && base + n < f.I ? v + scalar(bias[from + n * step]) : v;
    };
    __m512i z[TILE];
    for (int n = 0; n < TILE; n += 2) {
        const vf a = column(first, n, 0, i), b = column(first, n + 1, 0, i);
        const int64_t base = form ? i : i + TILE;
        const vf c = column(second, n, second_from, base), d = column(second, n + 1, second_from, base);
        if (f.z && turns) z[n] = pair(a, c), z[n + 1] = pair(b, d);
        else if (f.z) z[n / 2] = pair(a, b), z[n / 2 + 8] = pair(c, d);
        if (!f.h) continue;
        bf16* const at = h + n * TILE;
        if (form) {
            const __m512i both = pair(gated<ACT>(a, c, f.form), gated<ACT>(b, d, f.form));
            memcpy(at, &both, sizeof both);
            continue;
        }
        const __m512i near = pair(activation<ACT>(a).value, activation<ACT>(b).value);
        const __m512i far = pair(activation<ACT>(c).value, activation<ACT>(d).value);
        memcpy(at, &near, sizeof near);
        memcpy(at + TILE_SIZE / 2, &far, sizeof far);
    }
    if (!f.z || i >= f.I) return;
    transpose(z);
    const int64_t rest = f.I - i;
    const bool whole = rest >= 2 * TILE || (form && rest >= TILE);
    for (int64_t m = 0; whole && m < rows; m++) {  // sizes known to the compiler
        char* at = (char*)((bf16*)f.z + (row - f.first_row + m) * Z + i * step);
        if (!form || turns) memcpy(at, &z[m], 64);
        else memcpy(at, &z[m], 32), memcpy(at + f.I * sizeof(bf16), (const char*)&z[m] + 32, 32);
    }
    for (int64_t m = 0; !whole && m < rows; m++) {
        bf16 some[2 * TILE], *at = (bf16*)f.z + (row - f.first_row + m) * Z + i * step;
        memcpy(some, &z[m], sizeof some);
        if (!form || turns) {
            const int64_t n = turns ? 2 * rest : rest;
            memcpy(at, some, (n < 2 * TILE ? n : 2 * TILE) * sizeof *at);
            continue;
        }
        const int64_t n = rest < TILE ? rest : TILE;
        memcpy(at, some, n * sizeof *at);
        memcpy(at + f.I, some + TILE, n * sizeof *at);
    }
}

template <int ACT>
void up_tiled(const Experts& f, const Piece& piece, int64_t begin, int64_t end, float* panel) {
    const bool form = f.form.form, turns = f.form.form == 2;
    const int64_t Z = form ? 2 * f.I : f.I, rows = piece.end - piece.begin, steps = steps_of(f.H), h_steps = steps_of(f.I), e = piece.expert;
    const int64_t blocks = (rows + BROADER - 1) / BROADER, columns = form ? TILE : 2 * TILE, step = turns ? 2 : 1;
    bf16 *const x = (bf16*)panel, *const copy = x + blocks * steps * PAIR_SIZE;
    bf16* const h = (bf16*)f.h + piece.at * h_steps * ELEMENTS;
    for (int64_t m = 0; m < rows; m += TILE) {
        const bf16* at[TILE];
        const int64_t n = rows - m < TILE ? rows - m : TILE;
        for (int64_t j = 0; j < n; j++) at[j] = (const bf16*)f.x + f.row_slot[piece.begin + m + j] / f.K * f.H;
        lay_pairs(at, n, f.H, x + m / BROADER * steps * PAIR_SIZE + m / TILE % 2 * TILE_SIZE);
    }
    const Configured configured;
    end = end < f.I ? end : h_steps * ELEMENTS;  // beyond f.I, h and its sums are zero
    const auto weights = [&](int64_t i) {
        const bf16* w = f.up_of<bf16>(e) + i * step * f.up_stride;
        const int64_t second = turns ? 1 : form ? f.I : TILE, rest = f.I - i;
        return Source{w, w + second * f.up_stride, step * f.up_stride, rest, form ? rest : rest - TILE, f.H};
    };
    for (int64_t i = begin; i < end; i += columns) {
        const bf16* bias = f.up_bias ? (const bf16*)f.up_bias + e * (form ? 2 * f.I : f.I) + i * step : nullptr;
        const Rows w = weights(i).rows(copy);
        const auto kept = [&](int64_t b, int64_t k) {  // at each step two rows of z, to which 16 rows of sums are written later
            const int64_t row = Z * (piece.begin - f.first_row + b * BROADER + 2 * k);
            const char* const z = (const char*)((const bf16*)f.z + row + i * step);
            const int64_t far = form && !turns ? f.I * sizeof(bf16) : 0, bytes = Z * sizeof(bf16);
            return Ahead{z, z + far, bytes, 2 * bytes, f.z && 2 * k < BROADER ? 2 : 0};
        };
        for_blocks(w, x, rows, steps, weights(i + columns), kept, [&](int64_t b, const float* at) {
            for (int64_t m = b * BROADER, half = 0; half < 2 && m < rows; half++, m += TILE) {
                const int64_t n = rows - m < TILE ? rows - m : TILE;
                bf16* const out = h + (b * h_steps + i / ELEMENTS) * PAIR_SIZE + half * TILE_SIZE + i % ELEMENTS * TILE;
                finish_up_tile<ACT>(f, bias, piece.begin + m, n, i, at + half * 256, at + 512 + half * 256, out);
            }
        });
    }
}

// Rows begin..end of a piece times the columns of `down` from c on, added to the sums [..][tokens][PANEL] of their tokens.
inline void down_tiled(
    const Experts& f, const Piece& piece, int64_t c, int64_t columns, int64_t begin, int64_t end, int64_t first, int64_t tokens,
    float* sums, float* panel) {
    const int64_t steps = steps_of(f.I), e = piece.expert, ahead = (begin - piece.begin) / BROADER * BROADER;
    const int64_t rows = end - piece.begin - ahead, base = piece.begin + ahead;
    const int64_t group = Tiled::rows(f.I);
    const bf16* const h = (const bf16*)f.h + (piece.at + ahead) * steps * ELEMENTS;
    bf16* const copies = (bf16*)panel;
    Rows w[Tiled::COLUMNS / BROADER];
    const auto weights = [&](int64_t n) {
        const bf16* from = f.down_of<bf16>(e) + (c + n) * f.down_stride;
        const int64_t rest = f.H - c - n;
        return Source{from, from + TILE * f.down_stride, f.down_stride, rest, rest - TILE, f.I};
    };
    const Configured configured;
    for (int64_t g = 0; g < rows; g += group)
        for (int64_t n = 0; n < columns; n += BROADER) {
            const int64_t rest = f.H - c - n;
            if (!g) w[n / BROADER] = weights(n).rows(copies + n * steps * ELEMENTS);
            const Source next = g ? Source{} : weights(n + BROADER);
            vf bias[2] = {};
            for (int64_t j = 0; f.down_bias && j < BROADER && j < rest; j++)
                bias[j / TILE][j % TILE] = scalar(((const bf16*)f.down_bias)[e * f.H + c + n + j]);
            float* const totals = sums + n / PANEL * tokens * PANEL + n % PANEL;
            const int64_t some = rows - g < group ? rows - g : group;
            const bf16* const from = h + g * steps * ELEMENTS;
            const auto fresh = [&](int64_t b, int64_t k) {  // rows that have not been multiplied yet
                const char* const then = (const char*)(from + ((b + 1) * steps + k) * PAIR_SIZE);
                return Ahead{then, then + 1024, 64, 2048, !n && g + (b + 1) * BROADER < rows ? 16 : 0};
            };
            for_blocks(w[n / BROADER], from, some, steps, next, fresh, [&](int64_t b, const float* at) {
                for (int64_t m = g + b * BROADER, half = 0; half < 2 && m < rows; half++, m += TILE)
                    for (int side = 0; side < 2; side++) {
                        __m512i y[TILE];
                        memcpy(y, at + side * 512 + half * 256, sizeof y);
                        transpose(y);
                        for (int64_t j = base + m < begin ? begin - base - m : 0; j < TILE && m + j < rows; j++) {
                            const int32_t slot = f.row_slot[base + m + j];
                            float* const total = totals + (slot / f.K - first) * PANEL + side * TILE;
                            store(total, load(total) + f.weight[slot] * ((vf)y[j] + bias[side]));
                        }
                    }
            });
        }
}

}  // namespace
