// The forward pass of the experts: up with the activation, then down with the weighted sum, in units of work for one thread each.
#pragma once
#include "activation.h"
#include "kernels.h"
#include "tiles.h"
#if defined(__AMX_BF16__)
#include "amx.h"
#endif

namespace {

using moert::Experts;
using moert::Piece;

template <class T>
inline void add_bias(float* z, int64_t rows, const T* bias, int64_t step, int64_t columns) {
    for (int64_t m = 0; m < rows; m++)
        for (int64_t n = 0; n < columns; n++) z[m * PANEL + n] += scalar(bias[n * step]);
}

// stores `columns` rows of w in a panel of `product`, from column `at` on
template <class T>
inline void lay_out(const T* w, int64_t stride, int64_t columns, int64_t length, float* panel, int64_t at = 0) {
    for (int64_t n = 0; n < columns; n += LANES)
        pack(w + n * stride, stride, lanes(columns - n), length, panel + column(at + n, Experts::REACH * PANEL));
}

inline bool many(int64_t rows) { return LANES > 4 && rows >= PACK_FROM; }

// whether a piece is computed with matrix tiles
template <class T>
inline bool tiled(const Piece& piece) {
#if defined(__AMX_BF16__)
    return sizeof(T) == sizeof(bf16) && piece.end - piece.begin >= Tiled::FROM;
#else
    return false;
#endif
}

// rows of h [.., I], and of z if it is saved, from gate and up
template <class T, int ACT>
inline void finish_up(
    const Experts& f, const Piece& piece, int64_t row, int64_t rows, int64_t i, int64_t columns, const float* gate) {
    constexpr int64_t C = Experts::COLUMNS;
    const bool turns = f.form.form == 2;
    const int64_t Z = f.form.form ? 2 * f.I : f.I;
    for (int64_t m = 0; m < rows; m++)
        for (int64_t j = 0; j < columns; j += LANES) {
            const int64_t n = lanes(columns - j), at = m * PANEL + j;
            const Pair pair = {load_up_to(gate + at, n), f.form.form ? load_up_to(gate + C + at, n) : vf{}};
            if (f.z) {
                T* z = (T*)f.z + (row - f.first_row + m) * Z;
                if (f.form.form) store_pair(z, f.I, i + j, n, turns, pair);
                else store_up_to(z + i + j, pair.gate, n);
            }
            if (!f.h) continue;
            vf h = f.form.form ? gated<ACT>(pair.gate, pair.up, f.form) : activation<ACT>(pair.gate).value;
            store_up_to((T*)f.h + (piece.at + row - piece.begin + m) * f.h_stride + i + j, h, n);
        }
}

// columns i..end of h
template <class T, int ACT>
void up_block(const Experts& f, const Piece& piece, int64_t i, int64_t end, float* panels) {
    const bool form = f.form.form, turns = f.form.form == 2;
    const int64_t step = turns ? 2 : 1, up_from = turns ? 1 : f.I, Z = form ? 2 * f.I : f.I, stride = step * f.up_stride;
    const int64_t e = piece.expert, rows = piece.end - piece.begin, C = form ? Experts::COLUMNS : PANEL;  // of a panel
    const T* const w = f.template up_of<T>(e);
    const auto x = [&](int64_t r) { return (const T*)f.x + f.row_slot[piece.begin + r] / f.K * f.H; };
    const auto columns = [=](int64_t n) { return end - n < C ? end - n : C; };
    const auto finish = [&](int64_t r, int64_t some, int64_t n, float* sums) {
        const T* bias = f.up_bias ? (const T*)f.up_bias + e * Z + n * step : nullptr;
        if (bias) add_bias(sums, some, bias, step, columns(n));
        if (bias && form) add_bias(sums + C, some, bias + up_from, step, columns(n));
        finish_up<T, ACT>(f, piece, piece.begin + r, some, n, columns(n), sums);
    };
    if (many(rows)) {
        const auto lay = [&](int64_t k, int64_t depth, float* panel) {
            for (int64_t n = i; n < end; n += C, panel += Experts::REACH * PANEL) {
                const T* const from = w + n * stride + k;
                lay_out(from, stride, columns(n), depth, panel);
                if (form) lay_out(from + up_from * f.up_stride, stride, columns(n), depth, panel, C);
            }
        };
        const auto each = [&](int64_t r, int64_t some, float* sums, int64_t distance) {
            for (int64_t n = i; n < end; n += C, sums += distance) finish(r, some, n, sums);
        };
        return product<T>(rows, (end - i + C - 1) / C * PANEL, f.H, lay, x, each, panels);
    }
    alignas(64) float sums[Experts::ROWS * PANEL];
    for (int64_t n = i; n < end; n += C)
        for (int64_t r = 0; r < rows; r += Experts::ROWS) {
            const int64_t some = rows - r < Experts::ROWS ? rows - r : Experts::ROWS;
            const T* at[Experts::ROWS];
            for (int64_t m = 0; m < some; m++) at[m] = x(r + m);
            dots(at, some, w + n * stride, stride, columns(n), f.H, sums);
            if (form) dots(at, some, w + n * stride + up_from * f.up_stride, stride, columns(n), f.H, sums + C);
            finish(r, some, n, sums);
        }
}

template <class T, int ACT>
void experts_up_act(const Experts& f, int64_t unit, float* panel) {
    const int64_t blocks = (f.I + f.up_columns - 1) / f.up_columns, end = (unit % blocks + 1) * f.up_columns;
    const Piece& piece = f.pieces[unit / blocks];
    int64_t i = end - f.up_columns;
#if defined(__AMX_BF16__)
    if (tiled<T>(piece)) return up_tiled<ACT>(f, piece, i, end, panel);
#endif
    if (i < f.I) up_block<T, ACT>(f, piece, i, end < f.I ? end : f.I, panel);
}

template <class T>
void experts_up(const Experts& f, int64_t unit, float* panel) {
    void (*const of[])(const Experts&, int64_t, float*) = {
        experts_up_act<T, 0>, experts_up_act<T, 1>, experts_up_act<T, 2>,
        experts_up_act<T, 3>, experts_up_act<T, 4>, experts_up_act<T, 5>,
    };
    of[f.form.act](f, unit, panel);
}

// adds rows of y to the sums [..][PANEL] of their tokens, from token `first` on
inline void add_weighted(
    const Experts& f, int64_t row, int64_t rows, int64_t columns, const float* y, int64_t first, float* sums) {
    for (int64_t m = 0; m < rows; m++, y += PANEL) {
        const int32_t slot = f.row_slot[row + m];
        const float w = f.weight[slot];
        float* total = sums + (slot / f.K - first) * PANEL;
        int64_t n = 0;
        for (; n + LANES <= columns; n += LANES) store(total + n, load(total + n) + w * load(y + n));
        for (; n < columns; n++) total[n] += w * y[n];
    }
}

// the first row of a piece that belongs to `token` or a later one; slots ascend
inline int64_t row_of(const Experts& f, const Piece& piece, int64_t token) {
    return moert::first_from(f.row_slot, piece.begin, piece.end, token * f.K);
}

// rows begin..end of a piece times the columns of `down` from c on, added to the sums [..][tokens][PANEL] of their tokens
template <class T>
inline void down_block(
    const Experts& f, const Piece& piece, int64_t c, int64_t columns, int64_t begin, int64_t end, int64_t first, int64_t tokens,
    float* sums, float* panels) {
    const int64_t e = piece.expert;
    const T* const w = f.template down_of<T>(e) + c * f.down_stride;
    const auto h = [&](int64_t r) { return (const T*)f.h + (piece.at + begin - piece.begin + r) * f.h_stride; };
    const auto finish = [&](int64_t r, int64_t some, int64_t n, float* y) {
        const int64_t wide = columns - n < PANEL ? columns - n : PANEL;
        if (f.down_bias) add_bias(y, some, (const T*)f.down_bias + e * f.H + c + n, 1, wide);
        add_weighted(f, begin + r, some, wide, y, first, sums + n * tokens);
    };
    if (many(piece.end - piece.begin)) {  // depends on the whole piece, as the number of threads must not change bits
        const auto lay = [&](int64_t k, int64_t depth, float* panel) {
            for (int64_t n = 0; n < columns; n += PANEL)
                lay_out(w + n * f.down_stride + k, f.down_stride, columns - n < PANEL ? columns - n : PANEL, depth, panel + n * Experts::REACH);
        };
        const auto each = [&](int64_t r, int64_t some, float* y, int64_t distance) {
            for (int64_t n = 0; n < columns; n += PANEL, y += distance) finish(r, some, n, y);
        };
        return product<T>(end - begin, (columns + PANEL - 1) / PANEL * PANEL, f.I, lay, h, each, panels);
    }
    alignas(64) float y[Experts::ROWS * PANEL];
    for (int64_t n = 0; n < columns; n += PANEL)
        for (int64_t r = 0; r < end - begin; r += Experts::ROWS) {
            const int64_t some = end - begin - r < Experts::ROWS ? end - begin - r : Experts::ROWS;
            const T* at[Experts::ROWS];
            for (int64_t m = 0; m < some; m++) at[m] = h(r + m);
            dots(at, some, w + n * f.down_stride, f.down_stride, columns - n < PANEL ? columns - n : PANEL, f.I, y);
            finish(r, some, n, y);
        }
}

template <class T>
void experts_down(const Experts& f, int64_t unit, float* panel) {
    const int64_t c = unit / f.token_parts * f.down_columns, part = unit % f.token_parts;
    const int64_t columns = f.H - c < f.down_columns ? f.H - c : f.down_columns;
    const int64_t first = f.T * part / f.token_parts, tokens = f.T * (part + 1) / f.token_parts - first;
    float* const sums = panel + f.sums_at;  // [columns / PANEL][tokens][PANEL]
    memset(sums, 0, tokens * f.down_columns * sizeof *sums);
    for (const Piece* piece = f.pieces; piece != f.pieces + f.n_pieces; piece++) {
        const int64_t begin = row_of(f, *piece, first), end = row_of(f, *piece, first + tokens);
#if defined(__AMX_BF16__)
        if (begin < end && tiled<T>(*piece)) down_tiled(f, *piece, c, columns, begin, end, first, tokens, sums, panel);
        if (tiled<T>(*piece)) continue;
#endif
        if (begin < end) down_block<T>(f, *piece, c, columns, begin, end, first, tokens, sums, panel);
    }
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t n = 0; n < columns; n += LANES) {
            const int64_t some = lanes(columns - n);
            const float* from = sums + n / PANEL * PANEL * tokens + t * PANEL + n % PANEL;
            store_up_to((T*)f.out + (first + t) * f.H + c + n, load_up_to(from, some), some);
        }
}

}  // namespace
