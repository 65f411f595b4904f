// The C interface of libmoert_cuda.so: plain pointers, sizes and a stream, without torch or Python.
//
// moe_runtime/native/library.py reads the signatures from this file; raise MOERT_ABI_VERSION with every change.
// Launchers only enqueue on `stream`, on the current device: they never synchronize, allocate, throw or keep state, and their
// grids depend only on sizes and the GPU. They return 0, a negative moert_status for arguments that they reject before any launch,
// or a positive cudaError_t. Pointers are to device memory, to contiguous arrays unless a stride is given.
// T tokens, E experts, K slots per token, R = T * K slots, H hidden, P values of one expert.
#pragma once
#include <stdint.h>

#define MOERT_ABI_VERSION 1
#define MOERT_API extern "C" __attribute__((visibility("default")))

enum moert_dtype { MOERT_F32 = 0, MOERT_F16 = 1, MOERT_BF16 = 2 };

// in the order of moe_runtime.config.GATES
enum moert_gate {
  MOERT_XFT = 0,
  MOERT_NONORM = 1,
  MOERT_TOPK_SOFTMAX = 2,
  MOERT_SOFTMAX_TOPK = 3,
  MOERT_SOFTMAX_TOPK_RENORM = 4,
  MOERT_SIGMOID_TOPK = 5
};

enum moert_status { MOERT_OK = 0, MOERT_EINVAL = -1, MOERT_EUNSUPPORTED = -2, MOERT_EWORKSPACE = -3 };

// one map of row tiles: each tile's expert (-1 beyond the last tile), first row and its expert's end row
struct moert_tiles {
  int32_t* map;          // [3, R / block_m + min(E, R)]
  int32_t block_m;       // rows of a tile
  int32_t first_expert;  // tiles have no rows of experts below it
};
#define MOERT_MAX_MAPS 4

// Identity.

MOERT_API int moert_abi_version(void);
MOERT_API const char* moert_build_info(void);  // JSON in static storage
MOERT_API const char* moert_error_string(int status);
// writes the versions of driver and runtime and the number of devices; returns 0 or a cudaError_t (35 or 100 without a driver)
MOERT_API int moert_probe(int* driver, int* runtime, int* devices);

// Routing (routing.cu). E is the number of logits per token; K includes the shared expert of XFT and NONORM.

// tokens per row of block_count, which has ceil(T / this) rows of E counts, or E + 1 with a shared expert
MOERT_API int64_t moert_route_block_tokens(int64_t T, int E);
// logits [T, E], rows stride_t apart; bias [E] or null -> weight [T, K], idx [T, K] (an input if forced),
// block_count [blocks, E or E + 1] or null: how many slots of each block of tokens go to each expert
MOERT_API int moert_route_forward(const void* logits, int dtype, int64_t stride_t, const float* bias, int64_t T, int E,
                                  int K, int gate, int forced, float* weight, int32_t* idx, int32_t* block_count,
                                  void* stream);
// dweight [T, K] -> dlogits [T, E] in the logits' dtype
MOERT_API int moert_route_backward(const void* dweight, int dweight_dtype, const void* logits, int dtype,
                                   int64_t stride_t, const int32_t* idx, int64_t T, int E, int K, int gate, int forced,
                                   void* dlogits, void* stream);

// Dispatch (route_plan.cu): a stable counting sort of the slots by expert, in one launch. E <= 1024.

MOERT_API int64_t moert_route_plan_workspace(int64_t R, int E);  // bytes, may be 0
// ids [R] of id_bytes 4 or 8 each; those outside 0..E-1 are sorted after all others and belong to no expert
// -> expert_offsets [E + 1], row_token [R], row_slot [R], slot_row [R], and num_maps maps.
// block_count [ceil(R / block_slots), E] contains the counts of moert_route_forward for these ids, or is null; counts of other ids
// produce a wrong plan, whose indices are still in range.
MOERT_API int moert_route_plan(const void* ids, int id_bytes, int64_t R, int E, int K, const int32_t* block_count,
                               int64_t block_slots, int32_t* expert_offsets, int32_t* row_token, int32_t* row_slot,
                               int32_t* slot_row, const struct moert_tiles* maps, int num_maps, void* workspace,
                               int64_t workspace_bytes, void* stream);
// only the maps, from expert_offsets [E + 1]
MOERT_API int moert_tile_map(const int32_t* expert_offsets, int64_t R, int E, const struct moert_tiles* maps,
                             int num_maps, void* stream);

// Merging (merging.cu).

// weight [E, P], experts stride_e apart, alpha [E] -> out [P]; not written if seen [E] is not null and equals alpha
MOERT_API int moert_merge_forward(const void* weight, int dtype, const float* alpha, const float* seen, int E,
                                  int64_t P, int64_t stride_e, void* out, int out_dtype, void* stream);
MOERT_API int64_t moert_merge_backward_alpha_workspace(int E, int64_t P);  // bytes
// dout [P], weight [E, P] -> dalpha [E]
MOERT_API int moert_merge_backward_alpha(const void* dout, int dout_dtype, const void* weight, int dtype, int E,
                                         int64_t P, int64_t stride_e, float* dalpha, void* workspace,
                                         int64_t workspace_bytes, void* stream);

// Combine (combine.cu). slot_row [T, K] has indices of row_bytes 4 or 8.

// y [R, H], weight [T, K] -> out [T, H]; slots whose row is not below num_rows [1] are ignored unless that is null
MOERT_API int moert_combine_forward(const void* y, int dtype, const float* weight, const void* slot_row, int row_bytes,
                                    const int32_t* num_rows, int64_t T, int K, int64_t H, void* out, void* stream);
// dout [T, H], y [R, H], both of dtype -> dy [R, H], dweight [T, K]
MOERT_API int moert_combine_backward(const void* dout, const void* y, int dtype, const float* weight,
                                     const void* slot_row, int row_bytes, int64_t T, int K, int64_t H, void* dy,
                                     float* dweight, void* stream);
