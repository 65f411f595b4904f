// Merging experts, and the gradient of their coefficients: each expert is read once, one block of all experts at a time, so that the
// sums stay in the L1 cache. The merged weight is bit-identical to torch's.
#pragma once
#include "kernels.h"
#include "vector.h"

namespace {

using moert::Merge;
using moert::MergeGradient;

constexpr int AT_ONCE = 4;                     // vectors of a sum that stay in registers for the experts of a group
constexpr int DOTS = LANES == 16 ? 8 : 4;      // experts whose products with one block are summed together, in two registers each
constexpr int64_t BLOCK = moert::Merge::BLOCK;  // values

// v unchanged; prevents the compiler from fusing the product v with the sum that uses it, as torch rounds both
inline vf rounded(vf v) {
#if defined(__x86_64__)
    __asm__("" : "+v"(v));
#elif defined(__aarch64__)
    __asm__("" : "+w"(v));
#else
    __asm__("" : "+m"(v));
#endif
    return v;
}

// Adds experts first..last-1 to `sums`, or starts them with expert 0, for N vectors from value i on; the last expert writes `out`.
// `n` is how many of LANES the last vector has.
template <class T, int N>
inline void merge_vectors(const Merge& m, int64_t first, int64_t last, int64_t i, float* sums, int64_t n = LANES) {
    const T* w = (const T*)m.weight + first * m.stride_e + i;
    vf total[N];
    for (int v = 0; v < N; v++) total[v] = first ? load(sums + v * LANES) : rounded(m.alpha[0] * load_up_to(w + v * LANES, n));
    int64_t e = first;
    if (!first) e++, w += m.stride_e;
    for (; e < last; e++, w += m.stride_e)
        for (int v = 0; v < N; v++) total[v] += rounded(m.alpha[e] * load_up_to(w + v * LANES, n));
    for (int v = 0; v < N; v++) {
        if (last < m.E) store(sums + v * LANES, total[v]);
        else store_up_to((T*)m.out + i + v * LANES, total[v], n);
    }
}

template <class T>
void merge(const Merge& m, int64_t begin, int64_t end) {
    alignas(64) float sums[BLOCK];
    for (int64_t at = begin * BLOCK; at < m.P && at < end * BLOCK; at += BLOCK) {
        const int64_t size = m.P - at < BLOCK ? m.P - at : BLOCK;
        for (int64_t e = 0; e < m.E; e += Merge::GROUP) {
            const int64_t last = m.E - e < Merge::GROUP ? m.E : e + Merge::GROUP;
            int64_t i = 0;
            for (; i + AT_ONCE * LANES <= size; i += AT_ONCE * LANES) merge_vectors<T, AT_ONCE>(m, e, last, at + i, sums + i);
            for (; i < size; i += LANES) merge_vectors<T, 1>(m, e, last, at + i, sums + i, lanes(size - i));
        }
    }
}

// out[e] = <w[e], g> of N experts, `size` values each
template <class T, int N>
inline void block_dots(const T* w, int64_t stride, const float* g, int64_t size, float* out) {
    constexpr int64_t WIDE = 2 * LANES;
    vf total[N][2] = {};
    int64_t i = 0;
    for (; i + WIDE <= size; i += WIDE) {
        const vf low = load(g + i), high = load(g + i + LANES);
        for (int e = 0; e < N; e++) {
            total[e][0] += load(w + e * stride + i) * low;
            total[e][1] += load(w + e * stride + i + LANES) * high;
        }
    }
    for (; i < size; i += LANES)
        for (int e = 0; e < N; e++) total[e][0] += load_up_to(w + e * stride + i, lanes(size - i)) * load(g + i);
    for (int e = 0; e < N; e++) out[e] = sum(total[e][0] + total[e][1]);
}

template <class T>
void widen(const T* from, int64_t size, float* to) {
    for (int64_t i = 0; i < size; i += LANES) store(to + i, load_up_to(from + i, lanes(size - i)));
}

template <class T>
void merge_gradient(const MergeGradient& m, int64_t begin, int64_t end) {
    alignas(64) float g[BLOCK];
    for (int64_t block = begin; block < end; block++) {
        const int64_t at = block * BLOCK, rest = m.P - at;
        const int64_t size = rest < BLOCK ? rest : BLOCK;
        if (m.narrow) widen((const bf16*)m.dout + at, size, g);
        else widen((const float*)m.dout + at, size, g);
        const T* w = (const T*)m.weight + at;
        float* parts = m.parts + block * m.E;
        int64_t e = 0;
        for (; e + DOTS <= m.E; e += DOTS) block_dots<T, DOTS>(w + e * m.stride_e, m.stride_e, g, size, parts + e);
        for (; e < m.E; e++) block_dots<T, 1>(w + e * m.stride_e, m.stride_e, g, size, parts + e);
    }
}

}  // namespace
