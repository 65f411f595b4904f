// Products of rows with contiguous rows of weights: dot products for few rows; for many rows, the weights are packed first, so that
// a register holds one column of LANES of them and no sum runs across lanes.
#pragma once
#include "kernels.h"
#include "vector.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

// acc plus the product of LANES elements, or of 2 LANES with the bfloat16 instruction
template <class T>
struct Step {
    static constexpr int DEPTH = 1, WIDTH = LANES;
    typedef vf Elements;
    typedef float Multiplied;  // the type of rows that many columns are multiplied with
    static Elements get(const T* p) { return load(p); }
    static Elements get_part(const T* p, int64_t n) { return load_part(p, n); }
    static Elements repeat(const T* p) { return all(scalar(*p)); }
    static Elements repeat_packed(const float* p) { return all(*p); }
    static vf add(vf acc, Elements a, Elements b) { return acc + a * b; }
};
#if defined(__AVX512BF16__)
template <>
struct Step<bf16> {
    static constexpr int DEPTH = 2, WIDTH = 2 * LANES;
    typedef __m512bh Elements;
    typedef bf16 Multiplied;
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
    static Elements repeat_packed(const float* p) { return repeat((const bf16*)p); }
    static vf add(vf acc, Elements a, Elements b) { return (vf)_mm512_dpbf16_ps((__m512)acc, a, b); }
};
#endif

// LANES values of a row; for the bfloat16 instruction each is paired with that of the next row
template <class T>
inline vf stacked(const T* a, const T* b) {
    if (Step<T>::DEPTH == 1) return load(a);
#if defined(__AVX512F__)  // g++ 12 compiles the vector extension to loads and stores
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)a));
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)b));
    return (vf)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
#else
    vh low, high;
    memcpy(&low, a, sizeof low), memcpy(&high, b, sizeof high);
    return (vf)(__builtin_convertvector(low, vu) | __builtin_convertvector(high, vu) << 16);
#endif
}

// `stacked` of the first n <= LANES values of two rows, either of which may be null; zeros for the rest
template <class T>
inline vf stacked_up_to(const T* a, const T* b, int64_t n) {
    if (n >= LANES && a && (b || Step<T>::DEPTH == 1)) return stacked<T>(a, b);
    T one[LANES] = {}, two[LANES] = {};
    if (n > 0 && a) memcpy(one, a, (n < LANES ? n : LANES) * sizeof(T));
    if (n > 0 && b) memcpy(two, b, (n < LANES ? n : LANES) * sizeof(T));
    return stacked<T>(one, two);
}

constexpr int64_t PANEL = moert::Experts::PANEL;  // columns of a product, at most, and the stride of its rows

#if defined(__AVX512F__)
constexpr int TALL = 6;  // rows in registers at once: 6 x 4 sums and 4 weights of 32 registers
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

constexpr int64_t PACK_FROM = 16;  // least rows of an expert for which packing the weights pays off
constexpr int HIGH = 6;                       // rows in registers at once with packed weights, with ABREAST vectors:
constexpr int ABREAST = LANES == 16 ? 4 : 2;  // 24 sums and 5 more of 32 registers, or 12 and 3 more of 16
constexpr int64_t STRIP = ABREAST * LANES;    // columns of a panel that are stored together, [..][STRIP]: wider strips would share cache sets
constexpr int64_t DEEP = LANES == 16 ? 512 : 256;  // products summed in one float32 before it is added to the rest; even

#if defined(__AVX512F__)
typedef __m512i Bits;
// transposes a 16 x 16 square
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

#elif defined(__AVX2__)
typedef __m256i Bits;
// transposes an 8 x 8 square
inline void transpose(__m256i (&v)[8]) {
    __m256i a[8], b[8];
    for (int i = 0; i < 8; i += 2)
        a[i] = _mm256_unpacklo_epi32(v[i], v[i + 1]), a[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            b[i + 2 * j] = _mm256_unpacklo_epi64(a[i + j], a[i + j + 2]);
            b[i + 2 * j + 1] = _mm256_unpackhi_epi64(a[i + j], a[i + j + 2]);
        }
    for (int j = 0; j < 4; j++) {
        v[j] = _mm256_permute2x128_si256(b[j], b[j + 4], 0x20);
        v[j + 4] = _mm256_permute2x128_si256(b[j], b[j + 4], 0x31);
    }
}
#else
typedef vi Bits;
inline void transpose(vi (&v)[LANES]) {
    vi a[LANES];
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) a[i][j] = v[j][i];
    for (int i = 0; i < LANES; i++) v[i] = a[i];
}
#endif

// column n of a panel with `distance` floats
constexpr int64_t column(int64_t n, int64_t distance) { return n / STRIP * (distance / PANEL * STRIP) + n % STRIP; }

// strip [length / DEPTH][STRIP] from `columns` <= LANES rows of w [.., length], zeros for the missing ones
template <class T>
void pack(const T* w, int64_t stride, int64_t columns, int64_t length, float* panel) {
    typedef Step<T> S;
    for (int64_t k = 0; k < length; k += S::WIDTH, panel += LANES * STRIP) {
        Bits square[LANES];
        for (int n = 0; n < LANES; n++) __builtin_prefetch(w + (LANES + n) * stride + k);  // the next strip's
        for (int n = 0; n < LANES; n++) {
            if (n >= columns) square[n] = Bits{};
            else if (k + S::WIDTH <= length) square[n] = (Bits)S::get(w + n * stride + k);
            else square[n] = (Bits)S::get_part(w + n * stride + k, length - k);
        }
        transpose(square);
        for (int i = 0; i < LANES; i++) memcpy(panel + i * STRIP, &square[i], sizeof square[i]);
    }
}

// V vectors of out [M][PANEL] = elements k..length of x times those of a strip; accumulated if `more`
template <class T, int M, int V>
void packed_tile(const T* const* x, const float* panel, int64_t k, int64_t length, bool more, float* out) {
    typedef Step<T> S;
    vf acc[M][V];
    for (int m = 0; m < M; m++)
        for (int v = 0; v < V; v++) acc[m][v] = vf{};
    panel += k / S::DEPTH * STRIP;
    for (; k + S::DEPTH <= length; k += S::DEPTH, panel += STRIP) {
        typename S::Elements b[V];
        for (int v = 0; v < V; v++) {
            memcpy(&b[v], panel + v * LANES, sizeof b[v]);
            if (LANES == 16) __builtin_prefetch(panel + 8 * STRIP + v * LANES);  // from the L2 cache
        }
        for (int m = 0; m < M; m++) {
            const typename S::Elements a = S::repeat(x[m] + k);
            for (int v = 0; v < V; v++) acc[m][v] = S::add(acc[m][v], a, b[v]);
        }
    }
    if (S::DEPTH > 1 && k < length) {
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

// out [rows][PANEL] = x times the panel, which has `distance` floats; accumulated if `more`
template <class T>
void packed_rows(
    const T* const* x, int64_t rows, const float* panel, int64_t distance, int64_t length, bool more, float* out) {
    constexpr int A = ABREAST;
    void (*const rest[])(const T* const*, const float*, int64_t, int64_t, bool, float*) = {
        nullptr, packed_tile<T, 1, A>, packed_tile<T, 2, A>, packed_tile<T, 3, A>, packed_tile<T, 4, A>, packed_tile<T, 5, A>,
    };
    int64_t k = 0;
    do {  // at least once: an empty sum is 0
        const int64_t end = length - k < DEEP ? length : k + DEEP;
        for (int64_t n = 0; n < PANEL; n += A * LANES) {
            const float* strip = panel + column(n, distance);
            int64_t m = 0;
            for (; m + HIGH <= rows; m += HIGH) packed_tile<T, HIGH, A>(x + m, strip, k, end, more, out + m * PANEL + n);
            if (m < rows) rest[rows - m](x + m, strip, k, end, more, out + m * PANEL + n);
        }
        k = end, more = true;
    } while (k < length);
}

// Rows as they are multiplied. Without the bfloat16 instruction they become float32 once, not again for each strip.
template <class T, int64_t ROWS, int64_t LENGTH, class Multiplied = typename Step<T>::Multiplied>
struct Widened {
    static constexpr int64_t STRIDE = LENGTH + 64 / sizeof(float);  // not a multiple of the distance of a cache's sets
    alignas(64) Multiplied rows[ROWS * STRIDE];
    const Multiplied* row(int64_t m, const T* from, int64_t length) {
        Multiplied* const to = rows + m * STRIDE;
        for (int64_t i = 0; i < length; i += LANES) store_up_to(to + i, load_up_to(from + i, lanes(length - i)), lanes(length - i));
        return to;
    }
};
template <class T, int64_t ROWS, int64_t LENGTH>
struct Widened<T, ROWS, LENGTH, T> {
    const T* row(int64_t, const T* from, int64_t) { return from; }
};

// `rows` rows at(r) times `width` columns, which lay(k, depth, panels) packs from element k on; calls finish(r, some, sums, distance)
// when some rows are done. A panel's sums are `distance` floats after those of the previous one. `panels` has room for
// Experts::product(width / PANEL, rows) floats.
template <class T, class Lay, class At, class Finish>
inline void product(
    int64_t rows, int64_t width, int64_t length, const Lay& lay, const At& at, const Finish& finish, float* panels) {
    constexpr int64_t ROWS = moert::Experts::ROWS, REACH = moert::Experts::REACH, SIZE = REACH * PANEL;
    float* const out = panels + REACH * width;
    const bool whole = length > REACH;  // the sums of all rows are kept until the last elements are added
    const int64_t distance = (whole || rows < ROWS ? rows : ROWS) * PANEL;
    typedef typename Step<T>::Multiplied Multiplied;
    Widened<T, ROWS, REACH> widened;
    int64_t k = 0;
    do {
        const bool last = length - k <= REACH;
        const int64_t depth = last ? length - k : REACH;
        lay(k, depth, panels);
        for (int64_t r = 0; r < rows; r += ROWS) {
            const int64_t some = rows - r < ROWS ? rows - r : ROWS;
            const Multiplied* x[ROWS];
            for (int64_t m = 0; m < some; m++) x[m] = widened.row(m, at(r + m) + k, depth);
            float* const to = out + (whole ? r * PANEL : 0);
            for (int64_t n = 0; n < width; n += PANEL)
                packed_rows<Multiplied>(x, some, panels + n * REACH, SIZE, depth, k > 0, to + n / PANEL * distance);
            if (last) finish(r, some, to, distance);
        }
        k += depth;
    } while (k < length);
}

// Panels of `distance` floats from `length` rows of `columns` values, row k at at(k); zeros for the rest
template <class T, class At>
inline void stack(At at, int64_t columns, int64_t length, float* panels, int64_t distance) {
    constexpr int64_t DEPTH = Step<T>::DEPTH;
    const int64_t step = distance / PANEL * STRIP;
    for (int64_t k = 0; k < length; k += DEPTH) {
        const T *a = at(k), *b = DEPTH > 1 && k + 1 < length ? at(k + 1) : nullptr;
        float* strip = panels + k / DEPTH * STRIP;
        int64_t n = 0;
        for (; (DEPTH == 1 || b) && n + STRIP <= columns; n += STRIP, strip += step)
            for (int64_t i = 0; i < STRIP; i += LANES) store(strip + i, stacked<T>(a + n + i, b + n + i));
        for (const int64_t end = (columns + PANEL - 1) / PANEL * PANEL; n < end; n += STRIP, strip += step)
            for (int64_t i = 0; i < STRIP; i += LANES) {
                const int64_t rest = columns - n - i;
                store(strip + i, stacked_up_to<T>(rest > 0 ? a + n + i : nullptr, rest > 0 && b ? b + n + i : nullptr, rest));
            }
    }
}

// a strip's columns of out [M][PANEL] = the products of columns of a strip with another strip, [steps][STRIP]; accumulated if `more`
template <class T, int M>
inline void outer_tile(const float* a, const float* b, int64_t steps, bool more, float* out) {
    typedef Step<T> S;
    constexpr int V = ABREAST;
    vf acc[M][V] = {};
    for (int64_t k = 0; k < steps; k++, a += STRIP, b += STRIP) {
        typename S::Elements row[V];
        for (int v = 0; v < V; v++) memcpy(&row[v], b + v * LANES, sizeof row[v]);
        for (int m = 0; m < M; m++) {
            const typename S::Elements one = S::repeat_packed(a + m);
            for (int v = 0; v < V; v++) acc[m][v] = S::add(acc[m][v], one, row[v]);
        }
    }
    for (int m = 0; m < M; m++)
        for (int v = 0; v < V; v++) {
            float* at = out + m * PANEL + v * LANES;
            store(at, more ? load(at) + acc[m][v] : acc[m][v]);
        }
}

// out [PANEL][PANEL] of two panels
template <class T>
void outer(const float* a, const float* b, int64_t distance, int64_t steps, bool more, float* out) {
    constexpr int REST = STRIP % HIGH;
    for (int64_t n = 0; n < PANEL; n += STRIP)
        for (int64_t s = 0; s < PANEL; s += STRIP) {
            const float *x = a + column(s, distance), *y = b + column(n, distance);
            float* to = out + s * PANEL + n;
            for (int64_t m = 0; m + HIGH <= STRIP; m += HIGH) outer_tile<T, HIGH>(x + m, y, steps, more, to + m * PANEL);
            outer_tile<T, REST>(x + STRIP - REST, y, steps, more, to + (STRIP - REST) * PANEL);
        }
}

}  // namespace
