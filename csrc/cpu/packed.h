// One expert's weight from a packed stack: codes of 4 or 8 bits times the scale of their block, rounded once.
#pragma once
#include "kernels.h"
#include "merging.h"
#include "vector.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

using moert::Unpack;

const float NF4[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f, -0.18477343022823334f,
    -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
const float E2M1[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline vu load_bytes(const uint8_t* p, int64_t n) {
    uint8_t bytes[LANES] = {};
    if (n < LANES) p = (const uint8_t*)memcpy(bytes, p, n);
#if defined(__AVX512F__)  // g++ 12 compiles __builtin_convertvector to one conversion per element
    return (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    vu u;
    for (int i = 0; i < LANES; i++) u[i] = p[i];
    return u;
#endif
}

// E4M3 without infinities; no intermediate value is a subnormal float
inline vf fp8(vu byte) {
    const vu m = byte & 127;
    const vf small = __builtin_convertvector((vi)m, vf) * 0.001953125f;
    vu bits = (vi)m < 8 ? (vu)small : (m << 20) + (120u << 23);
    bits = (vi)m == 127 ? (vu)all(from_bits(0x7fc00000)) : bits;
    return (vf)(bits | ((byte & 128) << 24));
}

// n values, a multiple of 32 for 4 bits; the first of each pair is in the high nibble (NF4) or in the low one
template <int FORMAT>
inline void decode(const uint8_t* p, int64_t n, float* v) {
    if (FORMAT == Unpack::INT8) {
        for (int64_t i = 0; i < n; i += LANES)
            store(v + i, __builtin_convertvector((vi)(load_bytes(p + i, lanes(n - i)) << 24) >> 24, vf));
        return;
    }
    if (FORMAT == Unpack::FP8) {
        for (int64_t i = 0; i < n; i += LANES) store(v + i, fp8(load_bytes(p + i, lanes(n - i))));
        return;
    }
    const float* table = FORMAT == Unpack::NF4 ? NF4 : E2M1;
#if defined(__AVX512F__) && defined(__AVX512BW__)
    const __m512 values = _mm512_loadu_ps(table);
    for (int64_t i = 0; i < n; i += 32) {
        const __m128i bytes = _mm_loadu_si128((const __m128i*)(p + i / 2)), mask = _mm_set1_epi8(15);
        const __m128i low = _mm_and_si128(bytes, mask), high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
        const __m128i a = FORMAT == Unpack::NF4 ? high : low, b = FORMAT == Unpack::NF4 ? low : high;
        _mm512_storeu_ps(v + i, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(a, b)), values));
        _mm512_storeu_ps(v + i + 16, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(_mm_unpackhi_epi8(a, b)), values));
    }
#else
    for (int64_t i = 0; i < n; i += 2) {
        const uint8_t b = p[i / 2];
        v[i] = table[FORMAT == Unpack::NF4 ? b >> 4 : b & 15];
        v[i + 1] = table[FORMAT == Unpack::NF4 ? b & 15 : b >> 4];
    }
#endif
}

// values of row r from i on
template <int FORMAT>
inline float scale_at(const Unpack& u, int64_t r, int64_t i) {
    const int64_t e = u.expert;
    if (FORMAT == Unpack::INT8) return ((const float*)u.scale)[e * u.P + r] / 127.0f;
    if (FORMAT == Unpack::FP8) {
        const int64_t rows = (u.P + 127) / 128, columns = (u.Q + 127) / 128;
        return ((const float*)u.scale)[(e * rows + r / 128) * columns + i / 128];
    }
    const int64_t block = ((e * u.P + r) * u.Q + i) / (FORMAT == Unpack::NF4 ? 64 : 32);
    const uint8_t code = ((const uint8_t*)u.scale)[block];
    if (FORMAT == Unpack::MXFP4) return from_bits(code ? (uint32_t)code << 23 : 0x400000);
    return (rounded(all(u.map[code] * u.nested[block / 256])) + u.offset)[0];
}

template <class T, int FORMAT>
void unpack_rows(const Unpack& u, int64_t begin, int64_t end) {
    constexpr int64_t STEP = FORMAT == Unpack::MXFP4 ? 32 : 64;
    constexpr int64_t PER_BYTE = FORMAT == Unpack::NF4 || FORMAT == Unpack::MXFP4 ? 2 : 1;
    alignas(64) float v[STEP] = {};
    for (int64_t r = begin; r < end; r++) {
        const uint8_t* data = u.data + (u.expert * u.P + r) * (u.Q / PER_BYTE);
        T* out = (T*)u.out + r * u.Q;
        for (int64_t i = 0; i < u.Q; i += STEP) {
            const int64_t n = u.Q - i < STEP ? u.Q - i : STEP;
            const float scale = scale_at<FORMAT>(u, r, i);
            decode<FORMAT>(data + i / PER_BYTE, n, v);
            for (int64_t j = 0; j < n; j += LANES) store_up_to(out + i + j, load(v + j) * scale, lanes(n - j));
        }
    }
}

template <class T>
void unpack(const Unpack& u, int64_t begin, int64_t end) {
    void (*const rows[])(const Unpack&, int64_t, int64_t) = {
        unpack_rows<T, 0>, unpack_rows<T, 1>, unpack_rows<T, 2>, unpack_rows<T, 3>};
    rows[u.format](u, begin, end);
}

}  // namespace
