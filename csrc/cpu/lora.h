// LoRA experts over one frozen MLP, the equations of moe_runtime/ops/lora.py: from z of the MLP, each expert's activation with its
// pairs, and their weighted sum per token. Units are blocks of tokens, and for the gradients of the pairs (expert, pair, columns).
// Sums are in float32 and run in a fixed order, by expert and by columns, whatever the blocks and threads.
#pragma once
#include "activation.h"
#include "gradients.h"
#include "kernels.h"
#include "tiles.h"

namespace {

using moert::Lora;
using moert::LoraBackward;

constexpr int64_t PART = Lora::PART, SOME = Lora::ROWS;

// the first row of a piece whose token is `token` or a later one
inline int64_t row_of_token(const Lora& f, const Piece& piece, int64_t token) {
    return moert::first_from(f.row_token, piece.begin, piece.end, token);
}

// expert e's half of a pair, [r, I]; null without one
template <class T>
inline const T* half_of(const void* half, const Lora& f, int64_t e) {
    return half ? (const T*)half + e * f.r * f.I : nullptr;
}

// Up to SOME rows of an expert, and their products with the expert's halves, PART columns of h at a time.
template <class T>
struct LoraRows {
    const Lora& f;
    const int64_t e, first, some;  // the expert, its first row and the number of rows
    LoraRows(const Lora& f, int64_t e, int64_t first, int64_t some) : f(f), e(e), first(first), some(some) {}
    int64_t token(int64_t m) const { return f.row_token[first + m]; }
    // the ranks of row m in a plane [T, E r]
    const T* ranks(const void* plane, int64_t m) const { return (const T*)plane + (token(m) * f.E + e) * f.r; }
    const T* low(int64_t which, int64_t m) const { return ranks((const T*)f.low + which * f.T * f.E * f.r, m); }

    // sums [SOME][PANEL] of the rows' ranks times a panel of a half
    template <class Ranks>
    void expand(const Ranks& ranks, const float* panel, float* sums) const {
        const T* at[SOME];
        for (int64_t m = 0; m < some; m++) at[m] = ranks(m);
        packed_rows<T>(at, some, panel, f.r * PANEL, f.r, false, sums);
    }

    // adds to totals [SOME][r] the products of rows of `columns` values, `stride` apart, with a half's columns from i on
    void reduce(const T* rows, int64_t stride, const T* half, int64_t i, int64_t columns, float* totals) const {
        const T* at[SOME];
        float sums[SOME * PANEL];
        for (int64_t m = 0; m < some; m++) at[m] = rows + m * stride;
        for (int64_t k = 0; k < f.r; k += PANEL) {
            const int64_t ranks = f.r - k < PANEL ? f.r - k : PANEL;
            dots<T>(at, some, half + k * f.I + i, f.I, ranks, columns, sums);
            for (int64_t m = 0; m < some; m++)
                for (int64_t n = 0; n < ranks; n++) totals[m * f.r + k + n] += sums[m * PANEL + n];
        }
    }
};

// stores `n` floats, times `scaling`, as T
template <class T>
inline void store_all(T* to, const float* from, int64_t n, float scaling = 1) {
    for (int64_t j = 0; j < n; j += LANES) store_up_to(to + j, scaling * load_up_to(from + j, lanes(n - j)), lanes(n - j));
}

// panels of PART columns of a half from i on, r * PANEL floats each
template <class T>
inline void lay_half(const Lora& f, const T* half, int64_t i, int64_t columns, float* panels) {
    if (half) stack<T>([=](int64_t k) { return half + k * f.I + i; }, columns, f.r, panels, f.r * PANEL);
}

// For the pieces' rows of the tokens first..end and PART columns of h at a time, calls lay(expert, i, columns), and then for some rows
// after the other run(LoraRows, piece, at, i, columns); `at` counts the piece's rows of these tokens.
template <class T, class Lay, class Run>
inline void for_rows(const Lora& f, int64_t first, int64_t end, const Lay& lay, const Run& run) {
    for (const Piece* piece = f.pieces; piece != f.pieces + f.n_pieces; piece++) {
        const int64_t begin = row_of_token(f, *piece, first), last = row_of_token(f, *piece, end);
        for (int64_t i = 0; begin < last && i < f.I; i += PART) {
            const int64_t columns = f.I - i < PART ? f.I - i : PART;
            lay(piece->expert, i, columns);
            for (int64_t row = begin; row < last; row += SOME)
                run(LoraRows<T>(f, piece->expert, row, last - row < SOME ? last - row : SOME), *piece, row - begin, i, columns);
        }
    }
}

// h and q of a block of tokens
template <class T, int ACT>
void lora_forward_act(const Lora& f, int64_t unit, float* space) {
    const int64_t first = unit * f.tokens, end = first + f.tokens < f.T ? first + f.tokens : f.T, size = f.r * PART;
    float *const gates = space, *const ups = gates + size, *const totals = ups + size;  // totals [tokens][I]
    float *const q = totals + f.tokens * f.I, *const rows_of_h = q + f.tokens * f.r;
    alignas(64) float gate[SOME * PANEL] = {}, up[SOME * PANEL] = {};  // zeros without a half
    memset(totals, 0, f.tokens * f.I * sizeof *totals);
    const auto lay = [&](int64_t e, int64_t i, int64_t columns) {
        lay_half(f, half_of<T>(f.gate_b, f, e), i, columns, gates);
        lay_half(f, half_of<T>(f.up_b, f, e), i, columns, ups);
    };
    for_rows<T>(f, first, end, lay, [&](const LoraRows<T>& rows, const Piece&, int64_t at, int64_t i, int64_t columns) {
        T* const weighted = (T*)rows_of_h;
        for (int64_t n = 0; n < columns; n += PANEL) {
            if (f.gate_b) rows.expand([&](int64_t m) { return rows.low(0, m); }, gates + n * f.r, gate);
            if (f.up_b) rows.expand([&](int64_t m) { return rows.low(1, m); }, ups + n * f.r, up);
            for (int64_t m = 0; m < rows.some; m++) {
                const T* const z = (const T*)f.z + rows.token(m) * 2 * f.I + i;
                float* const total = totals + (rows.token(m) - first) * f.I + i;
                const float w = f.weight[rows.first + m];
                for (int64_t j = n; j < n + PANEL && j < columns; j += LANES) {
                    const int64_t some = lanes(columns - j);
                    const vf g = load_up_to(z + j, some) + f.scaling * load(gate + m * PANEL + j - n);
                    const vf u = load_up_to(z + f.I + j, some) + f.scaling * load(up + m * PANEL + j - n);
                    const vf h = activation<ACT>(g).value * u * w;
                    store_up_to(total + j, load_up_to(total + j, some) + h, some);
                    store_up_to(weighted + m * PART + j, h, some);
                }
            }
        }
        if (!f.down_a) return;
        float* const mine = q + at * f.r;
        if (!i) memset(mine, 0, rows.some * f.r * sizeof *mine);
        rows.reduce(weighted, PART, half_of<T>(f.down_a, f, rows.e), i, columns, mine);
        if (i + columns < f.I) return;
        for (int64_t m = 0; m < rows.some; m++) store_all((T*)rows.ranks(f.q, m), mine + m * f.r, f.r);
    });
    store_all((T*)f.h + first * f.I, totals, (end - first) * f.I);
}

template <class T>
void lora_forward(const Lora& f, int64_t unit, float* space) {
    void (*const of[])(const Lora&, int64_t, float*) = {
        lora_forward_act<T, 0>, lora_forward_act<T, 1>, lora_forward_act<T, 2>,
        lora_forward_act<T, 3>, lora_forward_act<T, 4>, lora_forward_act<T, 5>,
    };
    of[f.act](f, unit, space);
}

// dz of a block of tokens, and for its rows the gradients of the ranks, of the weight, and what the gradients of the pairs are sums of
template <class T, int ACT>
void lora_backward_act(const LoraBackward& b, int64_t unit, float* space) {
    const Lora& f = b.forward;
    const int64_t first = b.first + unit * f.tokens, end = first + f.tokens < b.last ? first + f.tokens : b.last, size = f.r * PART;
    const int64_t I = f.I, Z = 2 * f.I;
    float *const gates = space, *const ups = gates + size, *const downs = ups + size, *const totals = downs + size;  // [tokens][2I]
    float *const dgates = totals + f.tokens * Z, *const dups = dgates + f.tokens * f.r;
    alignas(64) float gate[SOME * PANEL] = {}, up[SOME * PANEL] = {}, down[SOME * PANEL] = {};
    const bool downs_rank = b.dq && f.down_a;
    memset(totals, 0, f.tokens * Z * sizeof *totals);
    const auto lay = [&](int64_t e, int64_t i, int64_t columns) {
        lay_half(f, half_of<T>(f.gate_b, f, e), i, columns, gates);
        lay_half(f, half_of<T>(f.up_b, f, e), i, columns, ups);
        if (downs_rank) lay_half(f, half_of<T>(f.down_a, f, e), i, columns, downs);
    };
    for_rows<T>(f, first, end, lay, [&](const LoraRows<T>& rows, const Piece& piece, int64_t at, int64_t i, int64_t columns) {
        T* const kept = (T*)b.kept + (piece.at + rows.first - piece.begin) * 3 * I + i;  // [rows][dgate, dup, weighted h]
        for (int64_t n = 0; n < columns; n += PANEL) {
            if (f.gate_b) rows.expand([&](int64_t m) { return rows.low(0, m); }, gates + n * f.r, gate);
            if (f.up_b) rows.expand([&](int64_t m) { return rows.low(1, m); }, ups + n * f.r, up);
            if (downs_rank) rows.expand([&](int64_t m) { return rows.ranks(b.dq, m); }, downs + n * f.r, down);
            for (int64_t m = 0; m < rows.some; m++) {
                const int64_t token = rows.token(m);
                const T *const z = (const T*)f.z + token * Z + i, *const dh = (const T*)b.dh + token * I + i;
                float* const total = totals + (token - first) * Z + i;
                T* const to = kept + m * 3 * I;
                const float w = f.weight[rows.first + m];
                vf dot = {};
                for (int64_t j = n; j < n + PANEL && j < columns; j += LANES) {
                    const int64_t some = lanes(columns - j), on = m * PANEL + j - n;
                    const Point a = activation<ACT>(load_up_to(z + j, some) + f.scaling * load(gate + on));
                    const vf u = load_up_to(z + I + j, some) + f.scaling * load(up + on);
                    const vf da = load_up_to(dh + j, some) + load(down + on), h = a.value * u, grad = w * da;
                    dot += h * da;  // zeros beyond the last column
                    const vf dgate = grad * u * a.slope, dup = grad * a.value;
                    store_up_to(total + j, load_up_to(total + j, some) + dgate, some);
                    store_up_to(total + I + j, load_up_to(total + I + j, some) + dup, some);
                    store_up_to(to + j, dgate, some);
                    store_up_to(to + I + j, dup, some);
                    store_up_to(to + 2 * I + j, w * h, some);
                }
                float& sum_of_row = b.dots[rows.first + m];
                sum_of_row = (i || n ? sum_of_row : 0) + sum(dot);
            }
        }
        const void* const halves[] = {f.gate_b, f.up_b};
        float* const sums[] = {dgates, dups};
        for (int which = 0; which < 2; which++) {
            if (!halves[which]) continue;
            float* const mine = sums[which] + at * f.r;
            if (!i) memset(mine, 0, rows.some * f.r * sizeof *mine);
            rows.reduce(kept + which * I, 3 * I, half_of<T>(halves[which], f, rows.e), i, columns, mine);
            if (i + columns < I) continue;
            const T* const plane = (const T*)b.dlow + which * f.T * f.E * f.r;
            for (int64_t m = 0; m < rows.some; m++) store_all((T*)rows.ranks(plane, m), mine + m * f.r, f.r, f.scaling);
        }
    });
    store_all((T*)b.dz + first * Z, totals, (end - first) * Z);
}

template <class T>
void lora_backward(const LoraBackward& b, int64_t unit, float* space) {
    void (*const of[])(const LoraBackward&, int64_t, float*) = {
        lora_backward_act<T, 0>, lora_backward_act<T, 1>, lora_backward_act<T, 2>,
        lora_backward_act<T, 3>, lora_backward_act<T, 4>, lora_backward_act<T, 5>,
    };
    of[b.forward.act](b, unit, space);
}

// `high` columns of ranks, from a strip on, times the columns of a panel: out [high][PANEL]
template <class T>
void outer_ranks(const float* ranks, const float* panel, int64_t distance, int64_t high, int64_t steps, bool more, float* out) {
    void (*const rest[])(const float*, const float*, int64_t, bool, float*) = {
        nullptr, outer_tile<T, 1>, outer_tile<T, 2>, outer_tile<T, 3>, outer_tile<T, 4>, outer_tile<T, 5>,
    };
    for (int64_t n = 0; n < PANEL; n += STRIP)
        for (int64_t s = 0; s < high; s += STRIP) {
            const float *x = ranks + column(s, distance), *y = panel + column(n, distance);
            const int64_t some = high - s < STRIP ? high - s : STRIP;
            float* const to = out + s * PANEL + n;
            int64_t m = 0;
            for (; m + HIGH <= some; m += HIGH) outer_tile<T, HIGH>(x + m, y, steps, more, to + m * PANEL);
            if (m < some) rest[some - m](x + m, y, steps, more, to + m * PANEL);
        }
}

// adds the group's rows to PART columns of an expert's dB of gate, dB of up or dA of down
template <class T>
void lora_pairs(const LoraBackward& b, int64_t unit, float* space) {
    const Lora& f = b.forward;
    constexpr int64_t DEPTH = LoraBackward::DEPTH, SIZE = DEPTH * PANEL;
    const int64_t parts = (f.I + PART - 1) / PART, i = unit % parts * PART, which = unit / parts % 3, columns = f.I - i < PART ? f.I - i : PART;
    const Piece& piece = f.pieces[unit / parts / 3];
    const int64_t begin = piece.begin, end = piece.end;
    float* const grads[] = {b.dgate_b, b.dup_b, b.ddown_a};
    if (!grads[which]) return;
    float *const own = space, *const ranks = own + PART / PANEL * SIZE, *const squares = ranks + (f.r + PANEL - 1) / PANEL * SIZE;
    for (int64_t row = begin; row < end; row += DEPTH) {
        const int64_t length = end - row < DEPTH ? end - row : DEPTH, steps = (length + Step<T>::DEPTH - 1) / Step<T>::DEPTH;
        const LoraRows<T> rows(f, piece.expert, row, length);
        const T* const kept = (const T*)b.kept + ((piece.at + row - begin) * 3 + which) * f.I + i;
        stack<T>([&](int64_t k) { return kept + k * 3 * f.I; }, columns, length, own, SIZE);
        stack<T>([&](int64_t k) { return which < 2 ? rows.low(which, k) : rows.ranks(b.dq, k); }, f.r, length, ranks, SIZE);
        for (int64_t n = 0; n < columns; n += PANEL)
            outer_ranks<T>(ranks, own + n * DEPTH, SIZE, f.r, steps, row > begin, squares + n * f.r);
    }
    const float scaling = which < 2 ? f.scaling : 1;  // of dq, that is included
    for (int64_t k = 0; k < f.r; k++)
        for (int64_t n = 0; n < columns; n += LANES) {
            const int64_t some = lanes(columns - n);
            float* const to = grads[which] + (piece.expert * f.r + k) * f.I + i + n;
            const float* const from = squares + n / PANEL * PANEL * f.r + k * PANEL + n % PANEL;
            store_up_to(to, load_up_to(to, some) + scaling * load(from), some);
        }
}

}  // namespace
