// Compares one variant's results with plain sums in double. Built without a variant's instructions, like moert_cpu.cpp.
// No size is a multiple of a vector. One expert has many tokens, one a few, one a single token and one none.
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "moert_cpu.h"

namespace {

constexpr int64_t T = 50, K = 2, E = 4, H = 83, I = 45, SLOTS = T * K, STACK = I * H;
constexpr int SILU = 0, GATE_FIRST = 1;

// one tensor: its values in double, and the bytes that the library reads or writes as float32 or bfloat16
template <int64_t N>
struct Tensor {
    double values[N];
    alignas(64) char bytes[N * sizeof(float)];

    double at(int dtype, int64_t n) const {
        float value;
        if (dtype == 0) {
            memcpy(&value, bytes + n * sizeof value, sizeof value);
            return value;
        }
        uint16_t half;
        memcpy(&half, bytes + n * sizeof half, sizeof half);
        const uint32_t bits = (uint32_t)half << 16;
        memcpy(&value, &bits, sizeof value);
        return value;
    }

    // values in -scale..scale that bfloat16 represents exactly
    void fill(int dtype, uint32_t seed, float scale) {
        for (int64_t n = 0; n < N; n++) {
            seed = seed * 1664525u + 1013904223u;
            const float value = scale * ((float)(seed >> 8) / (1 << 23) - 1);
            uint32_t bits;
            memcpy(&bits, &value, sizeof bits);
            bits &= 0xffff0000u;
            const uint16_t half = (uint16_t)(bits >> 16);
            if (dtype == 0) memcpy(bytes + n * sizeof bits, &bits, sizeof bits);
            else memcpy(bytes + n * sizeof half, &half, sizeof half);
            values[n] = at(dtype, n);
        }
    }

    void clear() {
        memset(values, 0, sizeof values);
        memset(bytes, 0xff, sizeof bytes);  // NaN, so that values that are never written are detected
    }

    // whether the library's values differ from `values` by at most `tolerance` of their Frobenius norm
    bool close(int dtype, double tolerance) const {
        double error = 0, norm = 0;
        for (int64_t n = 0; n < N; n++) {
            const double difference = at(dtype, n) - values[n];
            error += difference * difference;
            norm += values[n] * values[n];
        }
        return error <= tolerance * tolerance * norm;  // false for NaN
    }
};

Tensor<T * H> x, dout, out, dx;
Tensor<E * 2 * STACK> up, dup;
Tensor<E * STACK> down, ddown;
Tensor<STACK> merged;
Tensor<E> alpha, dalpha;
Tensor<SLOTS> weight, dweight;
int32_t topk_idx[SLOTS], offsets[E + 1], row_slot[SLOTS];
alignas(64) char z[SLOTS * 2 * I * sizeof(float)];
alignas(64) char scratch[16 << 20];

// LoRA experts, ranks of R, over z as of an MLP
constexpr int64_t R = 3, ROWS = T + T - 6, HALF = E * R * I;
Tensor<T * 2 * I> lora_z, lora_dz;
Tensor<2 * T * E * R> low, dlow;
Tensor<HALF> gate_b, up_b, down_a, dgate_b, dup_b, ddown_a;
Tensor<ROWS> row_weight, dots;
Tensor<T * I> lora_h, lora_dh;
Tensor<T * E * R> q, dq;
int32_t lora_offsets[E + 1], row_token[ROWS];

double exponential(double value) {
    double power = 1, term = 1;
    for (int n = 1; n < 20; n++) power += term *= value / 1024 / n;
    for (int n = 0; n < 10; n++) power *= power;
    return power;
}

// expert 0 has every token, 1 all but one, 2 that one, 3 none; the second slot of the first six tokens is dropped
void choose_experts() {
    for (int64_t t = 0; t < T; t++) {
        topk_idx[t * K] = 0;
        topk_idx[t * K + 1] = t < 6 ? E : t == 6 ? 2 : 1;
    }
}

// the reference of one token and expert, forward and backward
void add_slot(int64_t slot) {
    const int64_t t = slot / K, e = topk_idx[slot];
    if (e >= E) return;
    const double w = weight.values[slot], *row = x.values + t * H, *dy = dout.values + t * H;
    const double *gates = up.values + e * 2 * STACK, *ups = gates + STACK, *downs = down.values + e * STACK;
    double* const dgates = dup.values + e * 2 * STACK;
    double* const ddowns = ddown.values + e * STACK;
    for (int64_t i = 0; i < I; i++) {
        double gate = 0, raised = 0, dh = 0;
        for (int64_t n = 0; n < H; n++) {
            gate += gates[i * H + n] * row[n];
            raised += ups[i * H + n] * row[n];
            dh += downs[n * I + i] * dy[n];
        }
        const double sigmoid = 1 / (1 + exponential(-gate)), h = gate * sigmoid * raised;
        const double dgate = w * dh * raised * sigmoid * (1 + gate * (1 - sigmoid)), draised = w * dh * gate * sigmoid;
        dweight.values[slot] += dh * h;
        for (int64_t n = 0; n < H; n++) {
            out.values[t * H + n] += w * h * downs[n * I + i];
            dx.values[t * H + n] += dgate * gates[i * H + n] + draised * ups[i * H + n];
            dgates[i * H + n] += dgate * row[n];
            dgates[STACK + i * H + n] += draised * row[n];
            ddowns[n * I + i] += w * h * dy[n];
        }
    }
}

// the reference of merging the experts' down matrices, with the first of them as the gradient of the merged matrix
void add_merged() {
    for (int64_t e = 0; e < E; e++)
        for (int64_t n = 0; n < STACK; n++) {
            merged.values[n] += alpha.values[e] * down.values[e * STACK + n];
            dalpha.values[e] += down.values[n] * down.values[e * STACK + n];
        }
}

// the reference of a row of the LoRA experts, forward and backward; SCALING is of the ranks
constexpr float SCALING = 1.5f;
void add_lora_row(int64_t row, int64_t e) {
    const int64_t t = row_token[row], at = (t * E + e) * R;
    const double w = row_weight.values[row], *gate_ranks = low.values + at, *up_ranks = gate_ranks + T * E * R;
    for (int64_t i = 0; i < I; i++) {
        double gate = lora_z.values[t * 2 * I + i], raised = lora_z.values[t * 2 * I + I + i], dh = lora_dh.values[t * I + i];
        for (int64_t k = 0; k < R; k++) {
            const int64_t n = (e * R + k) * I + i;
            gate += SCALING * gate_ranks[k] * gate_b.values[n];
            raised += SCALING * up_ranks[k] * up_b.values[n];
            dh += dq.values[at + k] * down_a.values[n];
        }
        const double sigmoid = 1 / (1 + exponential(-gate)), h = gate * sigmoid * raised;
        const double dgate = w * dh * raised * sigmoid * (1 + gate * (1 - sigmoid)), draised = w * dh * gate * sigmoid;
        lora_h.values[t * I + i] += w * h;
        dots.values[row] += dh * h;
        lora_dz.values[t * 2 * I + i] += dgate;
        lora_dz.values[t * 2 * I + I + i] += draised;
        for (int64_t k = 0; k < R; k++) {
            const int64_t n = (e * R + k) * I + i;
            q.values[at + k] += w * h * down_a.values[n];
            dlow.values[at + k] += SCALING * dgate * gate_b.values[n];
            dlow.values[T * E * R + at + k] += SCALING * draised * up_b.values[n];
            dgate_b.values[n] += SCALING * gate_ranks[k] * dgate;
            dup_b.values[n] += SCALING * up_ranks[k] * draised;
            ddown_a.values[n] += dq.values[at + k] * w * h;
        }
    }
}

// expert 0 has every token, 1 all but seven, 2 one of these, 3 none
void make_lora_reference(int dtype) {
    lora_z.fill(dtype, 7, 1.0f), low.fill(dtype, 8, 1.0f), lora_dh.fill(dtype, 9, 1.0f), dq.fill(dtype, 10, 1.0f);
    gate_b.fill(dtype, 11, 0.5f), up_b.fill(dtype, 12, 0.5f), down_a.fill(dtype, 13, 0.5f), row_weight.fill(0, 14, 1.0f);
    lora_h.clear(), q.clear(), lora_dz.clear(), dlow.clear(), dots.clear(), dgate_b.clear(), dup_b.clear(), ddown_a.clear();
    const int64_t ends[] = {T, 2 * T - 7, 2 * T - 6, 2 * T - 6};
    for (int64_t e = 0, row = 0; e < E; e++) {
        for (int64_t t = e == 1 ? 7 : e == 2 ? 6 : 0; row < ends[e]; row++, t++) {
            row_token[row] = (int32_t)t;
            add_lora_row(row, e);
        }
        lora_offsets[e + 1] = (int32_t)row;
    }
}

const char* check_lora(int dtype, double tolerance) {
    make_lora_reference(dtype);
    // what no expert writes is the caller's: zeros
    memset(q.bytes, 0, sizeof q.bytes), memset(dlow.bytes, 0, sizeof dlow.bytes);
    memset(dgate_b.bytes, 0, sizeof dgate_b.bytes), memset(dup_b.bytes, 0, sizeof dup_b.bytes), memset(ddown_a.bytes, 0, sizeof ddown_a.bytes);
    if (moert_cpu_lora_bytes(dtype, T, I, E, R, K, 1, 1) > (int64_t)sizeof scratch) return "the LoRA experts' memory";
    moert_cpu_lora(
        dtype, SILU, SCALING, lora_z.bytes, low.bytes, gate_b.bytes, up_b.bytes, down_a.bytes, lora_offsets, row_token,
        (const float*)row_weight.bytes, T, I, E, R, K, scratch, lora_h.bytes, q.bytes, 1);
    if (!lora_h.close(dtype, tolerance) || !q.close(dtype, tolerance)) return "the LoRA experts' forward pass";
    moert_cpu_lora_backward(
        dtype, SILU, SCALING, lora_z.bytes, low.bytes, gate_b.bytes, up_b.bytes, down_a.bytes, lora_offsets, row_token,
        (const float*)row_weight.bytes, T, I, E, R, K, scratch, lora_dh.bytes, dq.bytes, lora_dz.bytes, dlow.bytes,
        (float*)dots.bytes, (float*)dgate_b.bytes, (float*)dup_b.bytes, (float*)ddown_a.bytes, 1);
    if (!lora_dz.close(dtype, tolerance) || !dlow.close(dtype, tolerance) || !dots.close(0, tolerance))
        return "the LoRA experts' backward pass";
    const bool right = dgate_b.close(0, tolerance) && dup_b.close(0, tolerance) && ddown_a.close(0, tolerance);
    return right ? nullptr : "the gradient of the LoRA pairs";
}

void make_reference(int dtype) {
    choose_experts();
    x.fill(dtype, 1, 1.0f);
    dout.fill(dtype, 2, 1.0f);
    up.fill(dtype, 3, 0.2f);
    down.fill(dtype, 4, 0.2f);
    weight.fill(0, 5, 1.0f);  // float32, whatever the dtype of the experts
    alpha.fill(0, 6, 1.0f);
    out.clear(), dx.clear(), dup.clear(), ddown.clear(), dweight.clear(), merged.clear(), dalpha.clear();
    for (int64_t slot = 0; slot < SLOTS; slot++) add_slot(slot);
    add_merged();
}

// the name of the first result that is wrong, or null
const char* check(int dtype) {
    const double tolerance = dtype ? 1.5e-2 : 5e-6;
    const int32_t grad_row[E] = {0, 1, 2, 3};
    const int64_t group = I, forward_bytes = moert_cpu_experts_bytes(dtype, T, H, I, E, K, 0, 1);
    moert_cpu_sort(topk_idx, -4, SLOTS, E, offsets, row_slot, nullptr);
    if (forward_bytes > (int64_t)sizeof scratch) return "the forward pass's memory";
    moert_cpu_experts(
        dtype, SILU, GATE_FIRST, INFINITY, 0, x.bytes, up.bytes, 2 * STACK, H, down.bytes, STACK, I, nullptr, nullptr,
        nullptr, nullptr, nullptr, (const float*)weight.bytes, offsets, row_slot, T, H, I, E, K, 0, E, scratch, z, out.bytes, 1);
    if (!out.close(dtype, tolerance)) return "the forward pass";
    for (int recompute = 0; recompute < 2; recompute++) {
        memset(dweight.bytes, 0, sizeof dweight.bytes);  // only slots of experts are written
        memset(dup.bytes, 0, sizeof dup.bytes);          // gradients of experts without tokens are not written
        memset(ddown.bytes, 0, sizeof ddown.bytes);
        const int64_t bytes =
            moert_cpu_experts_backward_bytes(dtype, GATE_FIRST, offsets, T, H, I, E, K, group, recompute, 1);
        if (bytes > (int64_t)sizeof scratch) return "the backward pass's memory";
        moert_cpu_experts_backward(
            dtype, SILU, GATE_FIRST, INFINITY, 0, x.bytes, dout.bytes, up.bytes, 2 * STACK, H, down.bytes, STACK, I,
            nullptr, nullptr, nullptr, (const float*)weight.bytes, offsets, row_slot, T, H, I, E, K, group, grad_row, recompute ? nullptr : z, scratch,
            dx.bytes, (float*)dweight.bytes, dup.bytes, 2 * STACK, H, 0, ddown.bytes, STACK, I, 0, 1);
        if (!dx.close(dtype, tolerance)) return "the gradient of x";
        if (!dweight.close(0, tolerance)) return "the gradient of the routing weights";
        if (!dup.close(dtype, tolerance)) return "the gradient of the up projections";
        if (!ddown.close(dtype, tolerance)) return "the gradient of the down projections";
    }
    moert_cpu_merge(dtype, down.bytes, STACK, (const float*)alpha.bytes, E, STACK, merged.bytes, 1);
    if (!merged.close(dtype, tolerance)) return "merging";
    moert_cpu_merge_gradient(dtype, dtype, down.bytes, down.bytes, STACK, E, STACK, scratch, (float*)dalpha.bytes, 1);
    if (!dalpha.close(0, tolerance)) return "the gradient of merging";
    return check_lora(dtype, tolerance);
}

}  // namespace

int moert_cpu_self_test(const char* variant, char* wrong, int64_t size) {
    const char* const before = moert_cpu_variant();
    if (!moert_cpu_limit(variant)) {
        snprintf(wrong, size, "it does not run on this processor");
        return 0;
    }
    const char* problem = nullptr;
    for (int dtype = 0; dtype <= 2 && !problem; dtype += 2) {
        make_reference(dtype);
        problem = check(dtype);
        if (problem) snprintf(wrong, size, "%s in %s is wrong", problem, dtype ? "bfloat16" : "float32");
    }
    moert_cpu_limit(before);
    return !problem;
}
