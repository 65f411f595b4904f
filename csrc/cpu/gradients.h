// The backward pass of the experts: dh with the activation, dx, and the gradients of the weights, each in units of work for one
// thread, which sums in a fixed order. Sums over rows, and over the rows of the weights, read the operands without transposing them.
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

// `product` with `columns` columns of w [length, ..]
template <class T, class At, class Finish>
inline void product_along(
    const At& at, int64_t rows, const T* w, int64_t stride, int64_t columns, int64_t length, const Finish& finish,
    float* panels) {
    const auto lay = [&](int64_t k, int64_t depth, float* panel) {
        stack<T>([=](int64_t j) { return w + (k + j) * stride; }, columns, depth, panel, Experts::REACH * PANEL);
    };
    product<T>(rows, (columns + PANEL - 1) / PANEL * PANEL, length, lay, at, finish, panels);
}

// dh of a piece and some panels of columns, and from it dz, wh and each panel's part of dweight
template <class T, int ACT>
void experts_dh_act(const ExpertsBackward& b, int64_t unit, float* panels) {
    const Experts& f = b.forward;
    const int64_t width = b.dh_panels * PANEL, blocks = (f.I + width - 1) / width, i = unit % blocks * width;
    const int64_t columns = f.I - i < width ? f.I - i : width, Z = f.form.form ? 2 * f.I : f.I;
    const Piece piece = f.pieces[unit / blocks];
    const int64_t rows = piece.end - piece.begin;
    const int32_t* slot = f.row_slot + piece.begin;
    const auto dy = [&](int64_t r) { return (const T*)b.dout + slot[r] / f.K * f.H; };
    const auto finish = [&](int64_t r, int64_t some, const float* dh, int64_t distance) {
        for (const int64_t end = r + some; r < end; r++, dh += PANEL) {
            const int64_t row = piece.begin + r - f.first_row;
            for (int64_t n = 0; n < columns; n += PANEL) {
                vf dots = {};
                for (int64_t j = n; j < n + PANEL && j < columns; j += LANES)
                    dots += activation_backward<T, ACT>(
                        f.form, (const T*)f.z + row * Z, load(dh + n / PANEL * distance + j - n), f.weight[slot[r]], f.I, i + j,
                        lanes(columns - j), (T*)b.dz + row * Z, (T*)b.wh + row * f.I);
                b.dots[(i + n) / PANEL * b.rows + row] = sum(dots);
            }
        }
    };
    const T* const w = f.template down_of<T>(piece.expert) + i;
    product_along(dy, rows, w, f.down_stride, columns, f.H, finish, panels);
}

template <class T>
void experts_dh(const ExpertsBackward& b, int64_t unit, float* panel) {
    void (*const of[])(const ExpertsBackward&, int64_t, float*) = {
        experts_dh_act<T, 0>, experts_dh_act<T, 1>, experts_dh_act<T, 2>,
        experts_dh_act<T, 3>, experts_dh_act<T, 4>, experts_dh_act<T, 5>,
    };
    of[b.forward.form.act](b, unit, panel);
}

// dx of a piece's rows and some panels of columns
template <class T>
void experts_dx(const ExpertsBackward& b, int64_t unit, float* panels) {
    const Experts& f = b.forward;
    const int64_t width = b.dx_panels * PANEL, blocks = (f.H + width - 1) / width, c = unit % blocks * width;
    const int64_t columns = f.H - c < width ? f.H - c : width, Z = f.form.form ? 2 * f.I : f.I;
    const Piece piece = f.pieces[unit / blocks];
    const int64_t rows = piece.end - piece.begin;
    const auto dz = [&](int64_t r) { return (const T*)b.dz + (piece.begin + r - f.first_row) * Z; };
    const auto dx = [&](int64_t r) { return (T*)b.dx_rows + (piece.begin + r) * f.H + c; };
    const auto finish = [&](int64_t r, int64_t some, const float* sums, int64_t distance) {
        for (const int64_t end = r + some; r < end; r++, sums += PANEL)
            for (int64_t n = 0; n < columns; n += LANES)
                store_up_to(dx(r) + n, load(sums + n / PANEL * distance + n % PANEL), lanes(columns - n));
    };
    const T* const w = f.template up_of<T>(piece.expert) + c;
    product_along(dz, rows, w, f.up_stride, columns, Z, finish, panels);
}

// stores rows x columns of sums, LANES of them at at(m, n), in a gradient; to accumulate, the product is rounded first, as in autograd
template <class T, class At>
inline void flush(const At& at, int64_t rows, int64_t columns, bool adds, bool past, T* out, int64_t stride) {
    past = past && (uintptr_t)out % 64 == 0 && stride * sizeof(T) % 64 == 0;
    for (int64_t m = 0; m < rows; m++, out += stride)
        for (int64_t n = 0; n < columns; n += LANES) {
            const int64_t some = lanes(columns - n);
            vf v = at(m, n);
            if (adds) {
                T product[LANES];
                store(product, v);
                v = load_up_to(out + n, some) + load(product);
            }
            past && some == LANES ? stream(out + n, v) : store_up_to(out + n, v, some);
        }
}

// A block of an expert's d up = dz^T x or d down = dy^T wh, HIGH x WIDE values: row m, column n is the sum over the expert's rows of
// dz or dy[.][m0 + m] times x or wh[.][n0 + n].
template <class T>
struct Block {
    Piece rows;
    bool up, adds;
    int64_t m0, n0, high, wide, stride;
    T* out;
    Block(const ExpertsBackward& b, int64_t unit) {
        typedef ExpertsBackward B;
        const Experts& f = b.forward;
        const int64_t of_up = b.dup ? b.up_units : 0, each = of_up + (b.ddown ? b.down_units : 0);
        rows = b.experts[unit / each];
        up = unit % each < of_up, adds = up ? b.up_adds : b.down_adds, stride = up ? b.dup_stride : b.ddown_stride;
        const int64_t Z = f.form.form ? 2 * f.I : f.I, M = up ? Z : f.H, N = up ? f.H : f.I;
        const int64_t across = (N + B::WIDE - 1) / B::WIDE, at = unit % each - (up ? 0 : of_up);
        m0 = at / across * B::HIGH, n0 = at % across * B::WIDE;
        high = M - m0 < B::HIGH ? M - m0 : B::HIGH, wide = N - n0 < B::WIDE ? N - n0 : B::WIDE;
        out = (up ? (T*)b.dup + rows.expert * b.dup_stride_e : (T*)b.ddown + rows.expert * b.ddown_stride_e) + m0 * stride + n0;
    }
};

// Addresses of the rows r..r + N of the operands of a block: x and dy by token, dz and wh in sequence.
template <class T, int64_t N>
struct Operands {
    bool up;
    const T *of_token[N], *of_row;
    int64_t stride;
    Operands(bool up) : up(up) {}
    void take(const ExpertsBackward& b, int64_t r, int64_t length) {
        const Experts& f = b.forward;
        const int64_t Z = f.form.form ? 2 * f.I : f.I;
        stride = up ? Z : f.I, of_row = (const T*)(up ? b.dz : b.wh) + (r - f.first_row) * stride;
        for (int64_t k = 0; k < length; k++) of_token[k] = (const T*)(up ? f.x : b.dout) + f.row_slot[r + k] / f.K * f.H;
    }
    const T* high(int64_t k) const { return up ? of_row + k * stride : of_token[k]; }
    const T* wide(int64_t k) const { return up ? of_token[k] : of_row + k * stride; }
};

// A block, over DEPTH rows at a time
template <class T>
void experts_dw(const ExpertsBackward& b, int64_t unit, float* panels) {
    typedef ExpertsBackward B;
    constexpr int64_t SIZE = B::DEPTH * PANEL;
    const Block<T> block(b, unit);
    const int64_t high = block.high, wide = block.wide, stride = block.stride;
    Operands<T, B::DEPTH> at(block.up);
    float *const strips = panels, *const own = strips + B::DEPTH * B::STRIP, *const squares = own + B::DEPTH * B::WIDE;
    for (int64_t r = block.rows.begin; r < block.rows.end; r += B::DEPTH) {
        const bool more = r > block.rows.begin, last = block.rows.end - r <= B::DEPTH;
        const int64_t length = last ? block.rows.end - r : B::DEPTH, steps = (length + Step<T>::DEPTH - 1) / Step<T>::DEPTH;
        at.take(b, r, length);
        stack<T>([&](int64_t k) { return at.wide(k) + block.n0; }, wide, length, own, SIZE);
        for (int64_t m = 0; m < high; m += PANEL) {
            const int64_t strip = m % B::STRIP, rest = high - m, some = rest < PANEL ? rest : PANEL;
            const auto row = [&](int64_t k) { return at.high(k) + block.m0 + m; };
            if (!strip) stack<T>(row, rest < B::STRIP ? rest : B::STRIP, length, strips, SIZE);
            for (int64_t n = 0; n < wide; n += PANEL) {
                float* square = squares + (more || !last ? m * B::WIDE + n * PANEL : 0);
                outer<T>(strips + strip * B::DEPTH, own + n * B::DEPTH, SIZE, steps, more, square);
                if (!last) continue;
                const auto sums = [=](int64_t i, int64_t j) { return load(square + i * PANEL + j); };
                flush(sums, some, wide - n < PANEL ? wide - n : PANEL, block.adds, b.past, block.out + m * stride + n, stride);
            }
        }
    }
    if (b.past) fence();
}

}  // namespace
