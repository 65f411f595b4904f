// The work on a range of rows, for one instruction set: build_cpu.py compiles this file once per set, as MOERT_SET.
// Everything here but the table has internal linkage: a function that two sets share would run on machines of the lesser one.
#include "kernels.h"

#include "activation.h"
#include "vector.h"
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

using moert::Backward;
using moert::Combine;
using moert::Few;
using moert::Form;
using moert::Forward;

inline float scalar(float x) { return x; }
inline float scalar(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

struct Pair {
    vf gate, up;
};

// LANES of gate and up from element i on of a row z [2I], `n` of them, the others zero
template <class T>
inline Pair load_pair(const T* z, int64_t I, int64_t i, int64_t n, bool in_turns) {
    if (!in_turns)
        return n == LANES ? Pair{load(z + i), load(z + I + i)} : Pair{load_part(z + i, n), load_part(z + I + i, n)};
    T gate[LANES] = {}, up[LANES] = {};
    for (int64_t j = 0; j < n; j++) gate[j] = z[2 * (i + j)], up[j] = z[2 * (i + j) + 1];
    return {load(gate), load(up)};
}

template <class T>
inline void store_pair(T* z, int64_t I, int64_t i, int64_t n, bool in_turns, Pair pair) {
    if (!in_turns) {
        if (n == LANES) return store(z + i, pair.gate), store(z + I + i, pair.up);
        return store_part(z + i, pair.gate, n), store_part(z + I + i, pair.up, n);
    }
    T gate[LANES], up[LANES];
    store(gate, pair.gate), store(up, pair.up);
    for (int64_t j = 0; j < n; j++) z[2 * (i + j)] = gate[j], z[2 * (i + j) + 1] = up[j];
}

template <class T>
inline vf load_up_to(const T* p, int64_t n) {
    return n == LANES ? load(p) : load_part(p, n);
}
template <class T>
inline void store_up_to(T* p, vf v, int64_t n) {
    n == LANES ? store(p, v) : store_part(p, v, n);
}
inline int64_t lanes(int64_t rest) { return rest < LANES ? rest : LANES; }

inline vf clamp(vf v, float limit) { return max(min(v, limit), -limit); }

template <int ACT>
inline vf gated(vf gate, vf up, Form form) {
    return activation<ACT>(min(gate, form.limit)).value * (clamp(up, form.limit) + form.up_offset);
}

template <class T, int ACT>
void activate_rows(const Forward& f, int64_t begin, int64_t end) {
    const int64_t I = f.I, Z = f.form.form ? 2 * I : I;
    for (int64_t r = begin; r < end; r++) {
        const T* z = (const T*)f.z + r * Z;
        T* h = (T*)f.h + r * I;
        for (int64_t i = 0; i < I; i += LANES) {
            const int64_t n = lanes(I - i);
            if (!f.form.form) {
                store_up_to(h + i, activation<ACT>(load_up_to(z + i, n)).value, n);
                continue;
            }
            Pair pair = load_pair(z, I, i, n, f.form.form == 2);
            store_up_to(h + i, gated<ACT>(pair.gate, pair.up, f.form), n);
        }
    }
}

template <class T, int ACT>
void activate_rows_backward(const Backward& b, int64_t begin, int64_t end) {
    const int64_t I = b.I, Z = b.form.form ? 2 * I : I;
    const float limit = b.form.limit;
    for (int64_t r = begin; r < end; r++) {
        const T *z = (const T*)b.z + r * Z, *dh = (const T*)b.dh + r * I;
        T *dz = (T*)b.dz + r * Z, *wh = (T*)b.wh + r * I;
        const float w = b.weight[b.row_slot[r]];
        vf dots = {};
        for (int64_t i = 0; i < I; i += LANES) {
            const int64_t n = lanes(I - i);
            vf grad = load_up_to(dh + i, n);
            if (!b.form.form) {
                Point at = activation<ACT>(load_up_to(z + i, n));
                dots += at.value * grad;
                store_up_to(wh + i, at.value * w, n);
                store_up_to(dz + i, grad * w * at.slope, n);
                continue;
            }
            Pair pair = load_pair(z, I, i, n, b.form.form == 2);
            Point at = activation<ACT>(min(pair.gate, limit));
            vf factor = clamp(pair.up, limit) + b.form.up_offset, h = at.value * factor;
            dots += h * grad;
            store_up_to(wh + i, h * w, n);
            grad *= w;
            vf dup = absolute(pair.up) > limit ? vf{} : at.value * grad;
            vf dgate = pair.gate > limit ? vf{} : grad * factor * at.slope;
            store_pair(dz, I, i, n, b.form.form == 2, {dgate, dup});
        }
        b.dweight[b.row_slot[r]] = sum(dots);
    }
}

template <class T>
void activate(const Forward& f, int64_t begin, int64_t end) {
    void (*const rows[])(const Forward&, int64_t, int64_t) = {
        activate_rows<T, 0>, activate_rows<T, 1>, activate_rows<T, 2>,
        activate_rows<T, 3>, activate_rows<T, 4>, activate_rows<T, 5>,
    };
    rows[f.form.act](f, begin, end);
}

template <class T>
void activate_backward(const Backward& b, int64_t begin, int64_t end) {
    void (*const rows[])(const Backward&, int64_t, int64_t) = {
        activate_rows_backward<T, 0>, activate_rows_backward<T, 1>, activate_rows_backward<T, 2>,
        activate_rows_backward<T, 3>, activate_rows_backward<T, 4>, activate_rows_backward<T, 5>,
    };
    rows[b.form.act](b, begin, end);
}

template <class T>
void combine(const Combine& c, int64_t begin, int64_t end) {
    constexpr int N = 4;
    const T* y = (const T*)c.y;
    for (int64_t t = begin; t < end; t++) {
        T* out = (T*)c.out + t * c.H;
        const int32_t* rows = c.slot_row + t * c.K;
        const float* weight = c.weight ? c.weight + t * c.K : nullptr;
        int64_t i = 0;
        for (; i + N * LANES <= c.H; i += N * LANES) {
            vf total[N] = {};
            for (int64_t k = 0; k < c.K; k++) {
                if (rows[k] >= c.rows) continue;
                const T* from = y + rows[k] * c.H + i;
                const float w = weight ? weight[k] : 1.0f;
                for (int n = 0; n < N; n++) total[n] += w * load(from + n * LANES);
            }
            for (int n = 0; n < N; n++) store(out + i + n * LANES, total[n]);
        }
        for (; i < c.H; i += LANES) {
            const int64_t n = lanes(c.H - i);
            vf total = {};
            for (int64_t k = 0; k < c.K; k++)
                if (rows[k] < c.rows) total += (weight ? weight[k] : 1.0f) * load_up_to(y + rows[k] * c.H + i, n);
            store_up_to(out + i, total, n);
        }
    }
}

// the product of LANES or, in bfloat16 with its own instruction, twice as many elements, added to acc
template <class T>
struct Step {
    static constexpr int WIDTH = LANES;
    typedef vf Elements;
    static Elements get(const T* p) { return load(p); }
    static Elements get_part(const T* p, int64_t n) { return load_part(p, n); }
    static vf add(vf acc, Elements a, Elements b) { return acc + a * b; }
};
#if defined(__AVX512BF16__)
template <>
struct Step<bf16> {
    static constexpr int WIDTH = 2 * LANES;
    typedef __m512bh Elements;
    static Elements get(const bf16* p) {
        Elements v;
        memcpy(&v, p, sizeof v);
        return v;
    }
    static Elements get_part(const bf16* p, int64_t n) {
        bf16 some[2 * LANES] = {};
        memcpy(some, p, n * sizeof(bf16));
        return get(some);
    }
    static vf add(vf acc, Elements a, Elements b) { return (vf)_mm512_dpbf16_ps((__m512)acc, a, b); }
};
#endif

#if defined(__AVX512F__)
constexpr int TALL = 6;  // x's rows in registers at once: 6 x 4 sums and 4 weights of the 32 there are
#else
constexpr int TALL = 2;
#endif
constexpr int BROAD = 4;

// out[m][n] = <x[m], w[n]>, M x N of them at once
template <class T, int M, int N>
inline void dots_tile(const T* const* x, const T* w, int64_t stride, int64_t length, float* out, int64_t out_stride) {
    typedef Step<T> S;
    vf acc[M][N] = {};
    int64_t i = 0;
    for (; i + S::WIDTH <= length; i += S::WIDTH) {
        typename S::Elements b[N];
        for (int n = 0; n < N; n++) b[n] = S::get(w + n * stride + i);
        for (int m = 0; m < M; m++) {
            typename S::Elements a = S::get(x[m] + i);
            for (int n = 0; n < N; n++) acc[m][n] = S::add(acc[m][n], a, b[n]);
        }
    }
    if (i < length)
        for (int n = 0; n < N; n++) {
            typename S::Elements b = S::get_part(w + n * stride + i, length - i);
            for (int m = 0; m < M; m++) acc[m][n] = S::add(acc[m][n], S::get_part(x[m] + i, length - i), b);
        }
    for (int m = 0; m < M; m++) {
        if (N == 4) {
            const v4 four = sums(acc[m]);
            memcpy(out + m * out_stride, &four, sizeof four);
        } else
            for (int n = 0; n < N; n++) out[m * out_stride + n] = sum(acc[m][n]);
    }
}

template <class T, int M>
inline void dots_broad(const T* const* x, const T* w, int64_t stride, int64_t columns, int64_t length, float* out) {
    int64_t n = 0;
    for (; n + BROAD <= columns; n += BROAD) dots_tile<T, M, BROAD>(x, w + n * stride, stride, length, out + n, Few::COLUMNS);
    for (; n < columns; n++) dots_tile<T, M, 1>(x, w + n * stride, stride, length, out + n, Few::COLUMNS);
}

// out [rows][COLUMNS] = x w^T for `columns` rows of w [.., length]
template <class T>
void dots(const T* const* x, int64_t rows, const T* w, int64_t stride, int64_t columns, int64_t length, float* out) {
    int64_t m = 0;
    for (; m + TALL <= rows; m += TALL) dots_broad<T, TALL>(x + m, w, stride, columns, length, out + m * Few::COLUMNS);
    for (; m < rows; m++) dots_broad<T, 1>(x + m, w, stride, columns, length, out + m * Few::COLUMNS);
}

template <class T>
inline void add_bias(float* z, int64_t rows, const T* bias, int64_t step, int64_t columns) {
    for (int64_t m = 0; m < rows; m++)
        for (int64_t n = 0; n < columns; n++) z[m * Few::COLUMNS + n] += scalar(bias[n * step]);
}

template <class T, int ACT>
void few_up_act(const Few& f, int64_t begin, int64_t end) {
    constexpr int64_t C = Few::COLUMNS;
    const int64_t blocks = (f.I + C - 1) / C;
    const bool turns = f.form.form == 2;
    const int64_t step = turns ? 2 : 1, up_from = turns ? 1 : f.I, Z = f.form.form ? 2 * f.I : f.I;
    alignas(64) float gate[Few::ROWS * C], up[Few::ROWS * C];
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t e = f.active[unit / blocks], i = unit % blocks * C, columns = f.I - i < C ? f.I - i : C;
        const T* w = (const T*)f.up + e * f.up_stride_e + i * step * f.up_stride;
        const T* bias = f.up_bias ? (const T*)f.up_bias + e * Z + i * step : nullptr;
        for (int64_t r = f.offsets[e]; r < f.offsets[e + 1]; r += Few::ROWS) {
            const int64_t rest = f.offsets[e + 1] - r, rows = rest < Few::ROWS ? rest : Few::ROWS;
            const T* x[Few::ROWS];
            for (int64_t m = 0; m < rows; m++) x[m] = (const T*)f.x + f.row_slot[r + m] / f.K * f.H;
            dots(x, rows, w, step * f.up_stride, columns, f.H, gate);
            if (bias) add_bias(gate, rows, bias, step, columns);
            if (f.form.form) {
                dots(x, rows, w + up_from * f.up_stride, step * f.up_stride, columns, f.H, up);
                if (bias) add_bias(up, rows, bias + up_from, step, columns);
            }
            for (int64_t m = 0; m < rows; m++)
                for (int64_t j = 0; j < columns; j += LANES) {
                    const int64_t n = lanes(columns - j), at = m * C + j;
                    const Pair pair = {load_up_to(gate + at, n), f.form.form ? load_up_to(up + at, n) : vf{}};
                    if (f.z) {
                        T* z = (T*)f.z + (r + m) * Z;
                        if (f.form.form) store_pair(z, f.I, i + j, n, turns, pair);
                        else store_up_to(z + i + j, pair.gate, n);
                    }
                    vf h = f.form.form ? gated<ACT>(pair.gate, pair.up, f.form) : activation<ACT>(pair.gate).value;
                    store_up_to((T*)f.h + (r + m) * f.I + i + j, h, n);
                }
        }
    }
}

template <class T>
void few_up(const Few& f, int64_t begin, int64_t end) {
    void (*const of[])(const Few&, int64_t, int64_t) = {
        few_up_act<T, 0>, few_up_act<T, 1>, few_up_act<T, 2>, few_up_act<T, 3>, few_up_act<T, 4>, few_up_act<T, 5>,
    };
    of[f.form.act](f, begin, end);
}

template <class T>
void few_down(const Few& f, int64_t begin, int64_t end) {
    constexpr int64_t C = Few::COLUMNS;
    alignas(64) float y[Few::ROWS * C];
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t c = unit * C, columns = f.H - c < C ? f.H - c : C;
        for (int64_t t = 0; t < f.T; t++)
            for (int64_t n = 0; n < columns; n++) f.sums[t * f.H + c + n] = 0;
        for (int64_t a = 0; a < f.actives; a++) {
            const int64_t e = f.active[a];
            const T* w = (const T*)f.down + e * f.down_stride_e + c * f.down_stride;
            for (int64_t r = f.offsets[e]; r < f.offsets[e + 1]; r += Few::ROWS) {
                const int64_t rest = f.offsets[e + 1] - r, rows = rest < Few::ROWS ? rest : Few::ROWS;
                const T* h[Few::ROWS];
                for (int64_t m = 0; m < rows; m++) h[m] = (const T*)f.h + (r + m) * f.I;
                dots(h, rows, w, f.down_stride, columns, f.I, y);
                if (f.down_bias) add_bias(y, rows, (const T*)f.down_bias + e * f.H + c, 1, columns);
                for (int64_t m = 0; m < rows; m++) {
                    const int32_t slot = f.row_slot[r + m];
                    float* total = f.sums + slot / f.K * f.H + c;
                    for (int64_t n = 0; n < columns; n++) total[n] += f.weight[slot] * y[m * C + n];
                }
            }
        }
        for (int64_t t = 0; t < f.T; t++)
            for (int64_t n = 0; n < columns; n += LANES)
                store_up_to((T*)f.out + t * f.H + c + n, load_up_to(f.sums + t * f.H + c + n, lanes(columns - n)), lanes(columns - n));
    }
}

}  // namespace

namespace moert {
extern const Kernels MOERT_SET = {
    {activate<float>, activate<bf16>},
    {activate_backward<float>, activate_backward<bf16>},
    {combine<float>, combine<bf16>},
    {few_up<float>, few_up<bf16>},
    {few_down<float>, few_down<bf16>},
};
}
