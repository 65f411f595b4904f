// Vectors of LANES floats with the compilers' vector extension, compiled for each instruction set by kernels.cpp.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));

struct bf16 {
    uint16_t bits;
};

inline float scalar(float x) { return x; }
inline float scalar(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#if defined(__AVX512F__)  // g++ 12 compiles __builtin_convertvector to two halves, through memory
inline vf wide(vh h) { return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16); }
inline vh low_halves(vu u) { return (vh)_mm512_cvtepi32_epi16((__m512i)u); }
#else
inline vf wide(vh h) { return (vf)(__builtin_convertvector(h, vu) << 16); }
inline vh low_halves(vu u) { return __builtin_convertvector(u, vh); }
#endif

// rounds to nearest, ties to even; propagates NaN
inline vh narrow_any(vf v) {
    vu u = (vu)v;
    vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    vu quiet = (u >> 16) | 0x40;
    return low_halves((vu)((v == v) ? (vi)rounded : (vi)quiet));
}
#if defined(__AVX512BF16__)
inline vh narrow(vf v) {
    constexpr int SUBNORMAL = 0x20;  // which the instruction takes for zero
    if (__builtin_expect(_mm512_fpclass_ps_mask((__m512)v, SUBNORMAL), 0)) return narrow_any(v);
    return (vh)_mm512_cvtneps_pbh((__m512)v);
}
#else
inline vh narrow(vf v) { return narrow_any(v); }
#endif

inline vf load(const float* p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}
inline vf load(const bf16* p) {
    vh h;
    memcpy(&h, p, sizeof h);
    return wide(h);
}
inline void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
inline void store(bf16* p, vf v) {
    vh h = narrow(v);
    memcpy(p, &h, sizeof h);
}

// stores without caching if the instruction set supports it; p is aligned to the size of the vector. A fence follows the last store.
inline void stream(float* p, vf v) {
#if defined(__AVX512F__)
    _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX2__)
    _mm256_stream_ps(p, (__m256)v);
#else
    store(p, v);
#endif
}
inline void stream(bf16* p, vf v) {
#if defined(__AVX512F__)
    _mm256_stream_si256((__m256i*)p, (__m256i)narrow(v));
#elif defined(__AVX2__)
    _mm_stream_si128((__m128i*)p, (__m128i)narrow(v));
#else
    store(p, v);
#endif
}
inline void fence() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

// the first n < LANES values; the others are zero
template <class T>
inline vf load_part(const T* p, int64_t n) {
    T some[LANES] = {};
    memcpy(some, p, n * sizeof(T));
    return load(some);
}
template <class T>
inline void store_part(T* p, vf v, int64_t n) {
    T some[LANES];
    store(some, v);
    memcpy(p, some, n * sizeof(T));
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

inline vf all(float x) { return x - vf{}; }

typedef float v4 __attribute__((vector_size(16)));

// sums of every fourth lane, always in the same order
inline v4 quarters(vf v) {
    v4 part[LANES / 4];
    memcpy(part, &v, sizeof v);
    for (int n = LANES / 8; n; n /= 2)
        for (int i = 0; i < n; i++) part[i] += part[i + n];
    return part[0];
}

inline float sum(vf v) {
    v4 q = quarters(v);
    return (q[0] + q[2]) + (q[1] + q[3]);
}

// sums of four vectors, in the order of `sum`
inline v4 sums(const vf* v) {
    v4 a = quarters(v[0]), b = quarters(v[1]), c = quarters(v[2]), d = quarters(v[3]);
    // element by element: g++ < 12 has no __builtin_shufflevector, and compilers recognize the shuffles
    v4 ab = v4{a[0], b[0], a[1], b[1]} + v4{a[2], b[2], a[3], b[3]};
    v4 cd = v4{c[0], d[0], c[1], d[1]} + v4{c[2], d[2], c[3], d[3]};
    return v4{ab[0], ab[1], cd[0], cd[1]} + v4{ab[2], ab[3], cd[2], cd[3]};
}

// propagates NaN, as the instructions return their second operand if one is NaN
#if defined(__AVX512F__)
inline vf min(vf v, float limit) { return (vf)_mm512_min_ps((__m512)all(limit), (__m512)v); }
inline vf max(vf v, float limit) { return (vf)_mm512_max_ps((__m512)all(limit), (__m512)v); }
#elif defined(__AVX2__)
inline vf min(vf v, float limit) { return (vf)_mm256_min_ps((__m256)all(limit), (__m256)v); }
inline vf max(vf v, float limit) { return (vf)_mm256_max_ps((__m256)all(limit), (__m256)v); }
#else
inline vf min(vf v, float limit) { return v > limit ? all(limit) : v; }
inline vf max(vf v, float limit) { return v < limit ? all(limit) : v; }
#endif

// e^v = 2^n e^r, |r| <= ln(2) / 2; infinity on overflow, subnormals are exact
inline vf exponential(vf v) {
    v = max(min(v, 89.0f), -104.0f);
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    vf shifted = v * 1.44269504f + shift;
    vf whole = shifted - shift;
    vf r = v - whole * 0.693359375f;
    r = r + whole * 2.12194440e-4f;
    vf p = all(1.9841270e-4f);
    p = p * r + 1.3888889e-3f;
    p = p * r + 8.3333333e-3f;
    p = p * r + 4.1666667e-2f;
    p = p * r + 1.6666667e-1f;
    p = p * r + 0.5f;
    p = p * r * r + r;
    p = p + 1.0f;
#if defined(__AVX512F__)
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
    vi n = (vi)shifted - 0x4b400000, half = n >> 1;  // in two steps: the exponents of 2^128 and 2^-149 are out of range
    return p * (vf)((half + 127) << 23) * (vf)((n - half + 127) << 23);
#endif
}

}  // namespace
