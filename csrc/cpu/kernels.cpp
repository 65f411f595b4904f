// The work on a range of rows, for one instruction set: moe_runtime/native/build.py compiles this file once per set, as MOERT_SET.
// Everything here except the table has internal linkage: otherwise the linker could merge the functions of two sets, and a processor
// would run instructions that it lacks.
#include "kernels.h"

#include "activation.h"
#include "experts.h"
#include "gradients.h"
#include "lora.h"
#include "merging.h"
#include "packed.h"
#include "vector.h"
#if defined(__AMX_BF16__)
#include "amx_gradients.h"
#endif

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
    for (int64_t r = begin; r < end; r++) {
        const float w = b.weight[b.row_slot[r]];
        vf dots = {};
        for (int64_t i = 0; i < I; i += LANES) {
            const int64_t n = lanes(I - i);
            dots += activation_backward<T, ACT>(
                b.form, (const T*)b.z + r * Z, load_up_to((const T*)b.dh + r * I + i, n), w, I, i, n, (T*)b.dz + r * Z,
                (T*)b.wh + r * I);
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

// acc * a + b, which the compiler cannot move out of a loop
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

#if defined(__AMX_BF16__)
// twelve sums of 16 x 16 per step, two per tile
void peak_tiled(const Peak& p, int64_t begin, int64_t end) {
    alignas(64) bf16 a[TILE_SIZE], b[TILE_SIZE];
    for (int64_t n = 0; n < TILE_SIZE; n += LANES) store(a + n, all(p.scale)), store(b + n, all(p.shift));
    const Configured configured;
    _tile_loadd(6, a, 64);
    _tile_loadd(7, b, 64);
    for (int64_t r = begin; r < end; r++) {
        alignas(64) float sums[6][TILE * TILE];
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        _tile_zero(4);
        _tile_zero(5);
        for (int64_t s = 0; s < p.steps * Peak::SUMS; s += 6) {
            _tile_dpbf16ps(0, 6, 7);
            _tile_dpbf16ps(1, 6, 7);
            _tile_dpbf16ps(2, 6, 7);
            _tile_dpbf16ps(3, 6, 7);
            _tile_dpbf16ps(4, 6, 7);
            _tile_dpbf16ps(5, 6, 7);
        }
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
        _tile_stored(4, sums[4], 64);
        _tile_stored(5, sums[5], 64);
        p.sink[r] = 0;
        for (const auto& tile : sums)
            for (float each : tile) p.sink[r] += each;
    }
}
#endif

template <class T>
constexpr int64_t PEAK_FLOPS = 2 * LANES * Step<T>::DEPTH;

}  // namespace

namespace moert {

// constexpr, as an initializer at load time would execute this set's instructions on every processor
extern constexpr Kernels MOERT_SET = {
    {activate<float>, activate<bf16>},
    {activate_backward<float>, activate_backward<bf16>},
    {combine<float>, combine<bf16>},
    {experts_up<float>, experts_up<bf16>},
    {experts_down<float>, experts_down<bf16>},
#if defined(__AMX_BF16__)
    {experts_dh<float>, experts_dh_tiled},
    {experts_dx<float>, experts_dx_tiled},
    {experts_dw<float>, experts_dw_tiled},
#else
    {experts_dh<float>, experts_dh<bf16>},
    {experts_dx<float>, experts_dx<bf16>},
    {experts_dw<float>, experts_dw<bf16>},
#endif
    {lora_forward<float>, lora_forward<bf16>},
    {lora_backward<float>, lora_backward<bf16>},
    {lora_pairs<float>, lora_pairs<bf16>},
    {merge<float>, merge<bf16>},
    {merge_gradient<float>, merge_gradient<bf16>},
    {unpack<float>, unpack<bf16>},
#if defined(__AMX_BF16__)
    {peak<float>, peak_tiled},
    {PEAK_FLOPS<float>, 2 * TILE * TILE * ELEMENTS},
    {false, true},
#else
    {peak<float>, peak<bf16>},
    {PEAK_FLOPS<float>, PEAK_FLOPS<bf16>},
    {false, false},
#endif
};

}  // namespace moert
