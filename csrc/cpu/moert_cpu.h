// C interface of libmoert_cpu.so: the experts on a CPU, the steps around their matmuls if torch computes those, and merging.
// moe_runtime/native/library.py reads the argument types from here. Pointers are to contiguous memory; dtypes are 0 float32 and
// 2 bfloat16, as in moert.h. No function allocates.
#pragma once
#include <stdint.h>

#define MOERT_CPU_ABI_VERSION 8
#define MOERT_API extern "C" __attribute__((visibility("default")))

MOERT_API int moert_cpu_abi_version();
MOERT_API const char* moert_cpu_build_info();  // JSON
MOERT_API const char* moert_cpu_variant();     // the one in use: amx, avx512_bf16, avx512, avx2 or generic

// The names of the variants that this machine can run, the best first, each followed by a space.
MOERT_API const char* moert_cpu_variants();

// Limits the library to the variant of this name; returns 0 if this machine cannot run it. For tests.
MOERT_API int moert_cpu_limit(const char* name);

// Runs the experts forward and backward and merges them with this variant, serially, and compares the results with sums in double.
// Returns 1 if they agree; otherwise 0, and writes what differs to `wrong`, of `size` bytes. A process runs one at a time.
MOERT_API int moert_cpu_self_test(const char* variant, char* wrong, int64_t size);

// Sets the OpenMP runtime: GOMP_parallel, omp_get_thread_num, omp_get_num_threads. Without one, all work is serial.
MOERT_API void moert_cpu_use_openmp(const void* parallel, const void* thread_num, const void* num_threads);

// Stable counting sort of the slots of topk_idx [T, K]; `idx_kind` is its element size, negative for signed ints: offsets [E + 1],
// row_slot and slot_row [T * K] (may be null). Ids outside 0..E-1 are sorted after every expert. Returns the rows of the largest expert.
MOERT_API int64_t moert_cpu_sort(
    const void* topk_idx, int idx_kind, int64_t slots, int64_t E, int32_t* offsets, int32_t* row_slot, int32_t* slot_row);

// From offsets and row_slot: row_token [R], slot_row [R], and for each expert whether it sees every one of T tokens
// once, in order.
MOERT_API void moert_cpu_plan(
    const int32_t* offsets, const int32_t* row_slot, int64_t T, int64_t K, int64_t E, int32_t* row_token, int32_t* slot_row,
    uint8_t* everyone);

// out[r] = x[row_token[r]], rows of `bytes` bytes.
MOERT_API void moert_cpu_gather(const void* x, const int32_t* row_token, int64_t rows, int64_t bytes, void* out, int threads);

// h [rows, I] from z [rows, 2I or I]; `form` 0 no gate, 1 gate first, 2 interleaved; `limit` is infinity for no clamp.
MOERT_API void moert_cpu_activate(
    int dtype, int act, int form, float limit, float up_offset, const void* z, int64_t rows, int64_t I, void* h, int threads);

// From z and dh (unweighted): dz, wh = w * h and dweight[slot] = <dh, h>, where slot = row_slot[row] and w = weight[slot].
MOERT_API void moert_cpu_activate_backward(
    int dtype, int act, int form, float limit, float up_offset, const void* z, const void* dh, const float* weight,
    const int32_t* row_slot, int64_t rows, int64_t I, void* dz, void* wh, float* dweight, int threads);

// out[t] = sum_k weight[t, k] y[slot_row[t, k]] over rows below `rows`; every weight is 1 where `weight` is null.
MOERT_API void moert_cpu_combine(
    int dtype, const void* y, const float* weight, const int32_t* slot_row, int64_t T, int64_t K, int64_t H, int64_t rows,
    void* out, int threads);

// The forward pass of the experts first..last-1. The weights of an expert that has tokens are read once, or several times if it has many rows.
// Strides are in elements, and the last dim of both stacks is contiguous. Experts with `trained_row` [E] >= 0 have the weights in
// that row of up_trained and down_trained, whose strides are those of the stacks; it may be null. Biases may be null, and so may
// z [rows, 2I or I], an output whose first row is the first one of these experts. If out is null, only z is computed. `scratch` has moert_cpu_experts_bytes bytes,
// aligned to 64, for T * K rows; with `z_alone`, enough for calls whose out is null.
MOERT_API int64_t moert_cpu_experts_bytes(
    int dtype, int64_t T, int64_t H, int64_t I, int64_t E, int64_t K, int z_alone, int threads);
MOERT_API void moert_cpu_experts(
    int dtype, int act, int form, float limit, float up_offset, const void* x, const void* up, int64_t up_stride_e,
    int64_t up_stride, const void* down, int64_t down_stride_e, int64_t down_stride, const int32_t* trained_row,
    const void* up_trained, const void* down_trained, const void* up_bias, const void* down_bias, const float* weight,
    const int32_t* offsets, const int32_t* row_slot, int64_t T, int64_t H, int64_t I, int64_t E, int64_t K, int64_t first,
    int64_t last, void* scratch, void* z, void* out, int threads);

// The backward pass of the experts without biases, from x, dout [T, H] and z [rows, 2I or I], which is recomputed if it is null.
// Gradients that are null are not computed. Those of the weights, of experts with rows, are written to the row `grad_row` [E] unless
// it is negative, or accumulated if `up_adds` or `down_adds`; their last dim is contiguous. dweight is written for the slots of these rows. dz and wh
// hold the rows of several experts, up to `group` rows. `scratch` has moert_cpu_experts_backward_bytes bytes, aligned to 64.
MOERT_API int64_t moert_cpu_experts_backward_bytes(
    int dtype, int form, const int32_t* offsets, int64_t T, int64_t H, int64_t I, int64_t E, int64_t K, int64_t group,
    int recompute, int threads);
MOERT_API void moert_cpu_experts_backward(
    int dtype, int act, int form, float limit, float up_offset, const void* x, const void* dout, const void* up,
    int64_t up_stride_e, int64_t up_stride, const void* down, int64_t down_stride_e, int64_t down_stride,
    const int32_t* trained_row, const void* up_trained, const void* down_trained, const float* weight, const int32_t* offsets,
    const int32_t* row_slot, int64_t T, int64_t H, int64_t I, int64_t E, int64_t K, int64_t group, const int32_t* grad_row,
    const void* z, void* scratch, void* dx, float* dweight, void* dup, int64_t dup_stride_e,
    int64_t dup_stride, int up_adds, void* ddown, int64_t ddown_stride_e, int64_t ddown_stride, int down_adds, int threads);

// LoRA experts over one MLP, moe_runtime/ops/lora.py: h [T, I] and q [T, E r] from the MLP's z [T, 2I] and low [2, T, E r], x A^T of gate
// and up. gate_b, up_b and down_a [E, r, I] may be null; q is written where an expert has a row. The rows of expert e are
// offsets[e]..offsets[e + 1], by token, each token at most `most` times in all; weight [rows]. `scratch` has moert_cpu_lora_bytes
// bytes, aligned to 64.
MOERT_API int64_t moert_cpu_lora_bytes(
    int dtype, int64_t T, int64_t I, int64_t E, int64_t r, int64_t most, int backward, int threads);
MOERT_API void moert_cpu_lora(
    int dtype, int act, float scaling, const void* z, const void* low, const void* gate_b, const void* up_b, const void* down_a,
    const int32_t* offsets, const int32_t* row_token, const float* weight, int64_t T, int64_t I, int64_t E, int64_t r, int64_t most,
    void* scratch, void* h, void* q, int threads);

// Its backward pass from dh [T, I] and dq [T, E r], which includes the scaling and may be null: dz [T, 2I], dlow [2, T, E r] where an
// expert has a row, dots [rows] = <gradient of a row, its unweighted h>; the gradients of the pairs are added to dgate_b, dup_b and
// ddown_a [E, r, I], which may be null.
MOERT_API void moert_cpu_lora_backward(
    int dtype, int act, float scaling, const void* z, const void* low, const void* gate_b, const void* up_b, const void* down_a,
    const int32_t* offsets, const int32_t* row_token, const float* weight, int64_t T, int64_t I, int64_t E, int64_t r, int64_t most,
    void* scratch, const void* dh, const void* dq, void* dz, void* dlow, float* dots, float* dgate_b, float* dup_b, float* ddown_a,
    int threads);

// out [P] = sum_e alpha[e] weight[e], E >= 1 contiguous experts of P values, `stride_e` elements apart. Each product is rounded to
// float32, then each sum, from the first expert on.
MOERT_API void moert_cpu_merge(
    int dtype, const void* weight, int64_t stride_e, const float* alpha, int64_t E, int64_t P, void* out, int threads);

// dalpha[e] = <dout, weight[e]>, dout [P] of `dout_dtype`, summed in float32 within blocks, in double over blocks. `scratch` has
// moert_cpu_merge_gradient_bytes bytes, aligned to 4.
MOERT_API int64_t moert_cpu_merge_gradient_bytes(int64_t E, int64_t P);
MOERT_API void moert_cpu_merge_gradient(
    int dtype, int dout_dtype, const void* dout, const void* weight, int64_t stride_e, int64_t E, int64_t P, void* scratch,
    float* dalpha, int threads);

// out [P, Q] of expert `e` of a packed stack of format 0 NF4, 1 MXFP4, 2 FP8 in blocks, 3 int8, with the byte layout of
// moe_runtime/ops/packed.py; `nested`, `map` and `offset` are those of NF4's scales.
MOERT_API void moert_cpu_unpack(
    int format, int dtype, const void* data, const void* scale, const float* nested, const float* map, float offset, int64_t e,
    int64_t P, int64_t Q, void* out, int threads);

// Peak arithmetic on registers: `rounds` rounds of sums of `steps` products each. Returns the number of floating-point operations;
// `sink` [rounds] keeps the compiler from removing them.
MOERT_API double moert_cpu_peak(int dtype, int64_t rounds, int64_t steps, float* sink, int threads);
