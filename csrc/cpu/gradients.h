// The backward pass of the experts: dh with the activation, dx, and the gradients of the weights, each on units that no two threads
// share and that sum in one order. Where rows are what is summed over, or the weights' own rows, the operands are laid out as they are.
#pragma once
#include "activation.h"
#include "experts.h"
#include "kernels.h"
#include "tiles.h"

namespace {

using moert::ExpertsBackward;

// n <= LANES elements of a row: dz and wh from z, dh (unweighted) and the row's weight; returns dh * h
template <class T, int ACT>
inline vf activation_backward(Form form, const T* z, vf grad, float w, int64_t I, int64_t i, int64_t n, T* dz, T* wh) {
    if (!form.form) {
        Point at = activation<ACT>(load_up_to(z + i, n));
        store_up_to(wh + i, at.value * w, n);
        store_up_to(dz + i, grad * w * at.slope, n);
        return at.value * grad;
    }
    Pair pair = load_pair(z, I, i, n, form.form == 2);
    Point at = activation<ACT>(min(pair.gate, form.limit));
    vf factor = clamp(pair.up, form.limit) + form.up_offset, h = at.value * factor, dot = h * grad;
    store_up_to(wh + i, h * w, n);
    grad *= w;
    vf dup = absolute(pair.up) > form.limit ? vf{} : at.value * grad;
    vf dgate = pair.gate > form.limit ? vf{} : grad * factor * at.slope;
    store_pair(dz, I, i, n, form.form == 2, {dgate, dup});
    return dot;
}

// dh of a piece and PANEL columns, from there dz, wh and these columns' part of dweight
template <class T, int ACT>
void experts_dh_act(const ExpertsBackward& b, int64_t unit, float* panel) {
    const Experts& f = b.forward;
    const int64_t blocks = (f.I + PANEL - 1) / PANEL, block = unit % blocks, i = block * PANEL;
    const int64_t columns = f.I - i < PANEL ? f.I - i : PANEL, Z = f.form.form ? 2 * f.I : f.I;
    const Piece piece = f.pieces[unit / blocks];
    const T* w = (const T*)f.down + piece.expert * f.down_stride_e + i;
    alignas(64) float dh[Experts::ROWS * PANEL];
    stack<T>([=](int64_t k) { return w + k * f.down_stride; }, columns, f.H, panel);
    for (int64_t r = piece.begin; r < piece.end; r += Experts::ROWS) {
        const int64_t rest = piece.end - r, rows = rest < Experts::ROWS ? rest : Experts::ROWS;
        const T* dy[Experts::ROWS];
        for (int64_t m = 0; m < rows; m++) dy[m] = (const T*)b.dout + f.row_slot[r + m] / f.K * f.H;
        packed_rows<T, PANEL>(dy, rows, panel, f.H, dh);
        for (int64_t m = 0; m < rows; m++) {
            const int64_t row = r + m - f.first_row;
            vf dots = {};
            for (int64_t j = 0; j < columns; j += LANES)
                dots += activation_backward<T, ACT>(
                    f.form, (const T*)f.z + row * Z, load(dh + m * PANEL + j), f.weight[f.row_slot[r + m]], f.I, i + j,
                    lanes(columns - j), (T*)b.dz + row * Z, (T*)b.wh + row * f.I);
            b.dots[block * b.rows + row] = sum(dots);
        }
    }
}

template <class T>
void experts_dh(const ExpertsBackward& b, int64_t unit, float* panel) {
    void (*const of[])(const ExpertsBackward&, int64_t, float*) = {
        experts_dh_act<T, 0>, experts_dh_act<T, 1>, experts_dh_act<T, 2>,
        experts_dh_act<T, 3>, experts_dh_act<T, 4>, experts_dh_act<T, 5>,
    };
    of[b.forward.form.act](b, unit, panel);
}

// PANEL columns of dx of a part of the tokens, summed over the groups of experts
template <class T>
void experts_dx(const ExpertsBackward& b, int64_t unit, float* panel) {
    const Experts& f = b.forward;
    const int64_t block = unit / f.token_parts, part = unit % f.token_parts, c = block * PANEL;
    const int64_t columns = f.H - c < PANEL ? f.H - c : PANEL, Z = f.form.form ? 2 * f.I : f.I;
    const int64_t first = f.T * part / f.token_parts, tokens = f.T * (part + 1) / f.token_parts - first;
    alignas(64) float y[Experts::ROWS * PANEL];
    float* sums = b.sums + (block * f.T + first) * PANEL;
    if (b.first) memset(sums, 0, tokens * PANEL * sizeof *sums);
    for (const Piece* piece = f.pieces; piece != f.pieces + f.n_pieces; piece++) {
        const int64_t begin = row_of(f, *piece, first), end = row_of(f, *piece, first + tokens);
        const T* w = (const T*)f.up + piece->expert * f.up_stride_e + c;
        for (int64_t k = 0; begin < end && k < Z; k += ExpertsBackward::REACH) {
            const int64_t length = Z - k < ExpertsBackward::REACH ? Z - k : ExpertsBackward::REACH;
            stack<T>([=](int64_t i) { return w + (k + i) * f.up_stride; }, columns, length, panel);
            for (int64_t r = begin; r < end; r += Experts::ROWS) {
                const int64_t rest = end - r, rows = rest < Experts::ROWS ? rest : Experts::ROWS;
                const T* dz[Experts::ROWS];
                for (int64_t m = 0; m < rows; m++) dz[m] = (const T*)b.dz + (r + m - f.first_row) * Z + k;
                packed_rows<T, PANEL>(dz, rows, panel, length, y);
                for (int64_t m = 0; m < rows; m++) {
                    float* total = sums + (f.row_slot[r + m] / f.K - first) * PANEL;
                    for (int64_t n = 0; n < PANEL; n += LANES) store(total + n, load(total + n) + load(y + m * PANEL + n));
                }
            }
        }
    }
    for (int64_t t = first; b.last && t < first + tokens; t++, sums += PANEL)
        for (int64_t n = 0; n < columns; n += LANES) {
            const int64_t some = lanes(columns - n);
            store_up_to((T*)b.dx + t * f.H + c + n, load(sums + n), some);
        }
}

// rows x columns of a square [PANEL][PANEL] into a gradient; where it is added to, the product is rounded first, as autograd's is
template <class T>
inline void flush(const float* square, int64_t rows, int64_t columns, bool adds, T* out, int64_t stride) {
    for (int64_t m = 0; m < rows; m++, out += stride, square += PANEL)
        for (int64_t n = 0; n < columns; n += LANES) {
            const int64_t some = lanes(columns - n);
            if (!adds) {
                store_up_to(out + n, load(square + n), some);
                continue;
            }
            T product[LANES];
            store(product, load(square + n));
            store_up_to(out + n, load_up_to(out + n, some) + load(product), some);
        }
}

// A block of an expert's d up = dz^T x or d down = dy^T wh, HIGH x WIDE numbers, over DEPTH rows at a time
template <class T>
void experts_dw(const ExpertsBackward& b, int64_t unit, float* panel) {
    typedef ExpertsBackward B;
    const Experts& f = b.forward;
    const int64_t of_up = b.dup ? b.up_units : 0, each = of_up + (b.ddown ? b.down_units : 0);
    const Piece rows = b.experts[unit / each];
    const bool up = unit % each < of_up;
    const int64_t Z = f.form.form ? 2 * f.I : f.I, M = up ? Z : f.H, N = up ? f.H : f.I;
    const int64_t across = (N + B::WIDE - 1) / B::WIDE, at = unit % each - (up ? 0 : of_up);
    const int64_t m0 = at / across * B::HIGH, n0 = at % across * B::WIDE;
    const int64_t high = M - m0 < B::HIGH ? M - m0 : B::HIGH, wide = N - n0 < B::WIDE ? N - n0 : B::WIDE;
    T* out = up ? (T*)b.dup + rows.expert * b.dup_stride_e : (T*)b.ddown + rows.expert * b.ddown_stride_e;
    const int64_t stride = up ? b.dup_stride : b.ddown_stride;
    float *const strip = panel, *const own = strip + B::DEPTH * PANEL, *const squares = own + B::DEPTH * B::WIDE;
    for (int64_t r = rows.begin; r < rows.end; r += B::DEPTH) {
        const bool more = r > rows.begin, last = rows.end - r <= B::DEPTH;
        const int64_t length = last ? rows.end - r : B::DEPTH, steps = (length + Step<T>::DEPTH - 1) / Step<T>::DEPTH;
        const int64_t row = r - f.first_row;
        const T* tokens[B::DEPTH];
        for (int64_t k = 0; k < length; k++) tokens[k] = (const T*)(up ? f.x : b.dout) + f.row_slot[r + k] / f.K * f.H;
        const auto token = [&](int64_t n) { return [&tokens, n](int64_t k) { return tokens[k] + n; }; };
        const auto own_row = [=](const void* x, int64_t width, int64_t n) {
            return [=](int64_t k) { return (const T*)x + (row + k) * width + n; };
        };
        for (int64_t n = 0; n < wide; n += PANEL) {
            const int64_t columns = wide - n < PANEL ? wide - n : PANEL;
            if (up) stack<T>(token(n0 + n), columns, length, own + n * B::DEPTH);
            else stack<T>(own_row(b.wh, f.I, n0 + n), columns, length, own + n * B::DEPTH);
        }
        for (int64_t m = 0; m < high; m += PANEL) {
            const int64_t some = high - m < PANEL ? high - m : PANEL;
            if (up) stack<T>(own_row(b.dz, Z, m0 + m), some, length, strip);
            else stack<T>(token(m0 + m), some, length, strip);
            for (int64_t n = 0; n < wide; n += PANEL) {
                float* square = squares + (more || !last ? m * B::WIDE + n * PANEL : 0);
                outer<T>(strip, own + n * B::DEPTH, steps, more, square);
                const int64_t columns = wide - n < PANEL ? wide - n : PANEL;
                if (last) flush<T>(square, some, columns, up ? b.up_adds : b.down_adds, out + (m0 + m) * stride + n0 + n, stride);
            }
        }
    }
}

}  // namespace
