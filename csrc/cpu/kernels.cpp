// The work on a range of rows, for one instruction set: moe_runtime/native/build.py compiles this file once per set, as MOERT_SET.
// Everything here but the table has internal linkage: a function that two sets share would run on machines of the lesser one.
#include "kernels.h"

#include "activation.h"
#include "experts.h"
#include "merging.h"
#include "packed.h"
#include "vector.h"

namespace {

using moert::Backward;
using moert::Combine;
using moert::Forward;
using moert::Peak;

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

// acc * a + b, which no compiler takes out of a loop
template <class T, int DEPTH = Step<T>::DEPTH>
struct Chain {
    typedef vf Elements;
    static Elements repeat(float x) { return all(x); }
    static vf next(vf acc, Elements a, Elements b) { return acc * a + b; }
};
#if defined(__AVX512BF16__)
template <>
struct Chain<bf16, 2> {
    typedef Step<bf16>::Elements Elements;
    static Elements repeat(float x) {
        bf16 some[2 * LANES];
        for (int i = 0; i < 2 * LANES; i += LANES) store(some + i, all(x));
        return Step<bf16>::get(some);
    }
    static vf next(vf acc, Elements a, Elements b) { return Step<bf16>::add(acc, a, b); }
};
#endif

template <class T>
void peak(const Peak& p, int64_t begin, int64_t end) {
    const typename Chain<T>::Elements a = Chain<T>::repeat(p.scale), b = Chain<T>::repeat(p.shift);
    for (int64_t r = begin; r < end; r++) {
        vf acc[Peak::SUMS];
        for (int n = 0; n < Peak::SUMS; n++) acc[n] = all((float)n);
        for (int64_t s = 0; s < p.steps; s++)
            for (int n = 0; n < Peak::SUMS; n++) acc[n] = Chain<T>::next(acc[n], a, b);
        float total = 0;
        for (int n = 0; n < Peak::SUMS; n++) total += sum(acc[n]);
        p.sink[r] = total;
    }
}

template <class T>
constexpr int64_t PEAK_FLOPS = 2 * LANES * Step<T>::DEPTH;

}  // namespace

namespace moert {
extern const Kernels MOERT_SET = {
    {activate<float>, activate<bf16>},
    {activate_backward<float>, activate_backward<bf16>},
    {combine<float>, combine<bf16>},
    {experts_up<float>, experts_up<bf16>},
    {experts_down<float>, experts_down<bf16>},
    {merge<float>, merge<bf16>},
    {merge_gradient<float>, merge_gradient<bf16>},
    {unpack<float>, unpack<bf16>},
    {peak<float>, peak<bf16>},
    {PEAK_FLOPS<float>, PEAK_FLOPS<bf16>},
};
}
