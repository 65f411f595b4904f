// Products of some rows with rows of weights, which are contiguous: as dots where the rows are few; where they are many, with the
// weights laid out anew first, so that a register holds one column of LANES of them and no sum runs across lanes.
#pragma once
#include "kernels.h"
#include "vector.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

// the product of LANES or, in bfloat16 with its own instruction, twice as many elements, added to acc
template <class T>
struct Step {
    static constexpr int DEPTH = 1, WIDTH = LANES;
    typedef vf Elements;
    static Elements get(const T* p) { return load(p); }
    static Elements get_part(const T* p, int64_t n) { return load_part(p, n); }
    static Elements repeat(const T* p) { return all(scalar(*p)); }
    static vf add(vf acc, Elements a, Elements b) { return acc + a * b; }
};
#if defined(__AVX512BF16__)
template <>
struct Step<bf16> {
    static constexpr int DEPTH = 2, WIDTH = 2 * LANES;
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
    static Elements repeat(const bf16* p) {
        int32_t two;
        memcpy(&two, p, sizeof two);
        return (Elements)_mm512_set1_epi32(two);
    }
    static vf add(vf acc, Elements a, Elements b) { return (vf)_mm512_dpbf16_ps((__m512)acc, a, b); }
};
#endif

constexpr int64_t PANEL = moert::Experts::PANEL;  // columns of a product, at most, and the distance of its rows

#if defined(__AVX512F__)
constexpr int TALL = 6;  // rows in registers at once: 6 x 4 sums and 4 weights of the 32 there are
#else
constexpr int TALL = 2;
#endif
constexpr int BROAD = 4;

// out[m][n] = <x[m], w[n]>, M x N of them at once
template <class T, int M, int N>
inline void dots_tile(const T* const* x, const T* w, int64_t stride, int64_t length, float* out) {
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
            memcpy(out + m * PANEL, &four, sizeof four);
        } else
            for (int n = 0; n < N; n++) out[m * PANEL + n] = sum(acc[m][n]);
    }
}

template <class T, int M>
inline void dots_broad(const T* const* x, const T* w, int64_t stride, int64_t columns, int64_t length, float* out) {
    int64_t n = 0;
    for (; n + BROAD <= columns; n += BROAD) dots_tile<T, M, BROAD>(x, w + n * stride, stride, length, out + n);
    for (; n < columns; n++) dots_tile<T, M, 1>(x, w + n * stride, stride, length, out + n);
}

// out [rows][PANEL] = x w^T for `columns` rows of w [.., length]
template <class T>
void dots(const T* const* x, int64_t rows, const T* w, int64_t stride, int64_t columns, int64_t length, float* out) {
    int64_t m = 0;
    for (; m + TALL <= rows; m += TALL) dots_broad<T, TALL>(x + m, w, stride, columns, length, out + m * PANEL);
    for (; m < rows; m++) dots_broad<T, 1>(x + m, w, stride, columns, length, out + m * PANEL);
}

#if defined(__AVX512F__)

constexpr int64_t PACK_FROM = 16;  // rows of an expert, from which on laying out the weights pays
constexpr int VECTORS = PANEL / LANES;
constexpr int64_t DEEP = 512;  // products that one float32 sums before it is added to the rest; even

// a 16 x 16 square, mirrored
inline void transpose(__m512i (&v)[16]) {
    __m512i a[16];
    for (int i = 0; i < 16; i += 2)
        a[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]), a[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            v[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
            v[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            a[i + j] = _mm512_shuffle_i32x4(v[i + j], v[i + j + 4], 0x88);
            a[i + j + 4] = _mm512_shuffle_i32x4(v[i + j], v[i + j + 4], 0xdd);
        }
    for (int j = 0; j < 8; j++) {
        v[j] = _mm512_shuffle_i32x4(a[j], a[j + 8], 0x88);
        v[j + 8] = _mm512_shuffle_i32x4(a[j], a[j + 8], 0xdd);
    }
}

// panel [length / DEPTH][PANEL] from `columns` <= LANES rows of w [.., length], and zeros for those that it lacks
template <class T>
void pack(const T* w, int64_t stride, int64_t columns, int64_t length, float* panel) {
    typedef Step<T> S;
    for (int64_t k = 0; k < length; k += S::WIDTH, panel += LANES * PANEL) {
        __m512i square[LANES];
        for (int n = 0; n < LANES; n++) {
            if (n >= columns) square[n] = _mm512_setzero_si512();
            else if (k + S::WIDTH <= length) square[n] = (__m512i)S::get(w + n * stride + k);
            else square[n] = (__m512i)S::get_part(w + n * stride + k, length - k);
        }
        transpose(square);
        for (int i = 0; i < LANES; i++) memcpy(panel + i * PANEL, &square[i], sizeof square[i]);
    }
}

// out [M][PANEL], V vectors of it, = x times the panel, of their elements k..length; added to those before k
template <class T, int M, int V>
void packed_tile(const T* const* x, const float* panel, int64_t k, int64_t length, float* out) {
    typedef Step<T> S;
    vf acc[M][V] = {};
    const bool more = k > 0;
    panel += k / S::DEPTH * PANEL;
    for (; k + S::DEPTH <= length; k += S::DEPTH, panel += PANEL) {
        typename S::Elements b[V];
        for (int v = 0; v < V; v++) memcpy(&b[v], panel + v * LANES, sizeof b[v]);
        for (int m = 0; m < M; m++) {
            const typename S::Elements a = S::repeat(x[m] + k);
            for (int v = 0; v < V; v++) acc[m][v] = S::add(acc[m][v], a, b[v]);
        }
    }
    if (k < length) {
        typename S::Elements b[V];
        for (int v = 0; v < V; v++) memcpy(&b[v], panel + v * LANES, sizeof b[v]);
        for (int m = 0; m < M; m++) {
            const T last[2] = {x[m][k], {}};
            const typename S::Elements a = S::repeat(last);
            for (int v = 0; v < V; v++) acc[m][v] = S::add(acc[m][v], a, b[v]);
        }
    }
    for (int m = 0; m < M; m++)
        for (int v = 0; v < V; v++) {
            float* at = out + m * PANEL + v * LANES;
            store(at, more ? load(at) + acc[m][v] : acc[m][v]);
        }
}

template <class T, int V>
void packed_rows(const T* const* x, int64_t rows, const float* panel, int64_t length, float* out) {
    void (*const rest[])(const T* const*, const float*, int64_t, int64_t, float*) = {
        nullptr, packed_tile<T, 1, V>, packed_tile<T, 2, V>, packed_tile<T, 3, V>, packed_tile<T, 4, V>, packed_tile<T, 5, V>,
    };
    int64_t k = 0;
    do {  // once at least: a sum of nothing is 0
        const int64_t end = length - k < DEEP ? length : k + DEEP;
        int64_t m = 0;
        for (; m + TALL <= rows; m += TALL) packed_tile<T, TALL, V>(x + m, panel, k, end, out + m * PANEL);
        if (m < rows) rest[rows - m](x + m, panel, k, end, out + m * PANEL);
        k = end;
    } while (k < length);
}

#endif

}  // namespace
