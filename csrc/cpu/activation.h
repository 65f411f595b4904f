// The activations of moe_runtime/ops/activation.py and their derivatives, on vectors; `act` is an index of ACTS in
// moe_runtime/native/library.py.
#pragma once
#include "kernels.h"
#include "vector.h"

namespace {

using moert::Form;

inline vf absolute(vf v) { return (vf)((vi)v & 0x7fffffff); }

// erf: an odd polynomial up to 1, then 1 - erfc by a polynomial in 1 / (1 + x / 2); least squares on Chebyshev nodes
inline vf error_function(vf v) {
    vf a = min(absolute(v), 4.2f), s = a * a, t = 1.0f / (1.0f + 0.5f * a);
    vf near = all(-9.67359084e-06f);
    near = near * s + 1.12682539e-4f;
    near = near * s - 8.48439655e-4f;
    near = near * s + 5.22105341e-3f;
    near = near * s - 2.68654383e-2f;
    near = near * s + 1.12837826e-1f;
    near = near * s - 3.76126385e-1f;
    near = near * s + 1.12837917f;
    vf far = all(1.71416507e-2f);
    far = far * t + 5.14297188e-2f;
    far = far * t - 3.54471562e-1f;
    far = far * t + 4.49622276e-1f;
    far = far * t - 3.50569596e-2f;
    far = far * t + 3.21564377e-1f;
    far = far * t + 2.65910652e-1f;
    far = far * t + 2.84076220e-1f;
    far = far * t - 1.05416061e-4f;
    far = 1.0f - far * exponential(-s);
    vf both = a > 1.0f ? far : near * a;
    return (vf)((vi)both | ((vi)v & (int32_t)0x80000000));
}

struct Point {
    vf value, slope;
};

// x sigmoid(c x)
inline Point swish(vf x, float c) {
    vf s = 1.0f / (1.0f + exponential(-c * x));
    return {x * s, s * (1.0f + c * x * (1.0f - s))};
}

template <int ACT>
inline Point activation(vf x) {
    if (ACT == 0) return swish(x, 1.0f);
    if (ACT == 1) {
        vf half = 0.5f + 0.5f * error_function(x * 0.70710678f);
        return {x * half, half + x * 0.39894228f * exponential(-0.5f * x * x)};
    }
    if (ACT == 2) {
        vf t = 1.0f - 2.0f / (1.0f + exponential(1.59576912f * x * (1.0f + 0.044715f * x * x)));
        vf half = 0.5f + 0.5f * t;
        return {x * half, half + x * half * (1.0f - t) * 0.79788456f * (1.0f + 0.134145f * x * x)};
    }
    if (ACT == 3) return swish(x, 1.702f);
    vf positive = x <= 0.0f ? vf{} : x;
    if (ACT == 4) return {positive, x <= 0.0f ? vf{} : all(1.0f)};
    return {positive * positive, 2.0f * positive};
}

struct Pair {
    vf gate, up;
};

// gate and up from element i on of a row z [2I]: the first `n` of LANES, the others zero
template <class T>
inline Pair load_pair(const T* z, int64_t I, int64_t i, int64_t n, bool in_turns) {
    if (!in_turns)
        return n == LANES ? Pair{load(z + i), load(z + I + i)} : Pair{load_part(z + i, n), load_part(z + I + i, n)};
    T gate[LANES] = {}, up[LANES] = {};
    for (int64_t j = 0; j < n; j++) gate[j] = z[2 * (i + j)], up[j] = z[2 * (i + j) + 1];
    return {load(gate), load(up)};
}

// inlined: a call would store and load every vector register in use
template <class T>
__attribute__((always_inline)) inline void store_pair(T* z, int64_t I, int64_t i, int64_t n, bool in_turns, Pair pair) {
    if (!in_turns) {
        if (n == LANES) return store(z + i, pair.gate), store(z + I + i, pair.up);
        return store_part(z + i, pair.gate, n), store_part(z + I + i, pair.up, n);
    }
    T gate[LANES], up[LANES];
    store(gate, pair.gate), store(up, pair.up);
    for (int64_t j = 0; j < n; j++) z[2 * (i + j)] = gate[j], z[2 * (i + j) + 1] = up[j];
}

inline vf clamp(vf v, float limit) { return max(min(v, limit), -limit); }

template <int ACT>
inline vf gated(vf gate, vf up, Form form) {
    return activation<ACT>(min(gate, form.limit)).value * (clamp(up, form.limit) + form.up_offset);
}

}  // namespace
