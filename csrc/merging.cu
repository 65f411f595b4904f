// Weighted sum of experts, each value read once, and the gradient of the weights.
//
// The equations are in moe_runtime/ops/merging.py. Each value of the sum uses the same float32 operations as torch: every product
// and sum is rounded, in the order of the experts, so the bits are equal. dalpha is summed in a fixed order: the values of a
// thread, the lanes of a warp as a tree, the warps of a block, then the blocks in the same way.
#include "common.cuh"

namespace moert {

constexpr int kThreads = 256;
constexpr int kInFlight = 4;              // experts that a thread loads at once
constexpr int64_t kTile = 32 * kThreads;  // values per block of the gradient
constexpr int kExpertsAtOnce = 32;

template <typename T>
__global__ void __launch_bounds__(kThreads)
    merge_forward_kernel(const T* weight, const float* alpha, const float* seen, int E, int64_t P, int64_t stride_e,
                         void* out, int out_dtype, bool whole, bool whole_out) {
  constexpr int N = kPack<T>;
  if (seen) {  // `out` already holds the weight merged with `seen`: nothing to do if alpha is unchanged
    int changed = 0;
    for (int e = threadIdx.x; e < E; e += kThreads) changed |= alpha[e] != seen[e];
    if (!__syncthreads_or(changed)) return;
  }
  const int64_t p = ((int64_t)blockIdx.x * kThreads + threadIdx.x) * N, count = least<int64_t>(P - p, N);
  if (count <= 0) return;
  weight += p;
  float sum[N];
  for (int e0 = 0; e0 < E; e0 += kInFlight) {
    Pack<T, N> w[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j)
      if (e0 + j < E) w[j] = load_pack<N>(weight + (e0 + j) * stride_e, count, whole);
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (e0 + j >= E) break;
      const float a = alpha[e0 + j];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float product = __fmul_rn(a, to_f32(w[j].value[n]));
        sum[n] = e0 + j ? __fadd_rn(sum[n], product) : product;
      }
    }
  }
  if (out_dtype == MOERT_F32) store_pack(static_cast<float*>(out) + p, sum, count, whole_out);
  else if (out_dtype == MOERT_F16) store_pack(static_cast<__half*>(out) + p, sum, count, whole_out);
  else store_pack(static_cast<__nv_bfloat16*>(out) + p, sum, count, whole_out);
}

// sum of x over the block, for thread 0, in a fixed order; scratch [kThreads / 32]
__device__ __forceinline__ float sum_block(float x, float* scratch) {
  x = sum_lanes<32>(x);
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;
  __syncthreads();
  float sum = 0.f;
  for (int w = 0; w < kThreads / 32; ++w) sum += scratch[w];
  return sum;
}

// three blocks per multiprocessor: without a limit, ptxas spills to fit a fourth on sm_120
template <typename T>
__global__ void __launch_bounds__(kThreads, 3)
    merge_backward_kernel(const void* dout, int dout_dtype, const T* weight, int E, int64_t P, int64_t stride_e,
                          float* partial, bool whole, bool whole_dout) {
  constexpr int N = kPack<T>, packs = (int)(kTile / (kThreads * N));
  MOERT_SHARED(float, sums);  // [kExpertsAtOnce, warps]
  constexpr int warps = kThreads / 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int64_t base = blockIdx.x * kTile + threadIdx.x * N;
  float d[packs][N];
#pragma unroll
  for (int j = 0; j < packs; ++j) {
    const int64_t p = base + j * kThreads * N;
    if (dout_dtype == kDtype<T>) {
      const Pack<T, N> pack = load_pack<N>(static_cast<const T*>(dout) + p, P - p, whole_dout);
#pragma unroll
      for (int n = 0; n < N; ++n) d[j][n] = to_f32(pack.value[n]);
    } else {
#pragma unroll
      for (int n = 0; n < N; ++n) d[j][n] = p + n < P ? load_f32(dout, p + n, dout_dtype) : 0.f;
    }
  }
  for (int e0 = 0; e0 < E; e0 += kExpertsAtOnce) {
    const int experts = least(E - e0, kExpertsAtOnce);
    for (int i = 0; i < experts; ++i) {
      const T* row = weight + (e0 + i) * stride_e;
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < packs; ++j) {
        const int64_t p = base + j * kThreads * N;
        if (p >= P) break;
        const Pack<T, N> w = load_pack<N>(row + p, P - p, whole);
#pragma unroll
        for (int n = 0; n < N; ++n) sum = fmaf(d[j][n], to_f32(w.value[n]), sum);
      }
      sum = sum_lanes<32>(sum);
      if (lane == 0) sums[i * warps + warp] = sum;
    }
    __syncthreads();
    if ((int)threadIdx.x < experts) {
      float sum = 0.f;
      for (int w = 0; w < warps; ++w) sum += sums[threadIdx.x * warps + w];
      partial[(int64_t)(e0 + threadIdx.x) * gridDim.x + blockIdx.x] = sum;
    }
    __syncthreads();
  }
}

// dalpha[e] = sum of partial[e, :], one block per expert
__global__ void __launch_bounds__(kThreads) sum_kernel(const float* partial, int64_t blocks, float* dalpha) {
  MOERT_SHARED(float, scratch);
  float sum = 0.f;
  for (int64_t b = threadIdx.x; b < blocks; b += kThreads) sum += partial[blockIdx.x * blocks + b];
  sum = sum_block(sum, scratch);
  if (threadIdx.x == 0) dalpha[blockIdx.x] = sum;
}

template <typename T>
static int merge(const void* weight, const float* alpha, const float* seen, int E, int64_t P, int64_t stride_e,
                 void* out, int out_dtype, void* stream) {
  const bool whole = aligned(weight, 16) && stride_e % kPack<T> == 0;
  const int64_t grid = cdiv<int64_t>(P, kThreads * kPack<T>);
  if (grid > kMaxGrid) return MOERT_EUNSUPPORTED;
  return MOERT_LAUNCH((merge_forward_kernel<T>), grid, kThreads, 0, stream, (const T*)weight, alpha, seen, E, P,
                      stride_e, out, out_dtype, whole, aligned(out, 16));
}

template <typename T>
static int merge_backward(const void* dout, int dout_dtype, const void* weight, int E, int64_t P, int64_t stride_e,
                          float* partial, void* stream) {
  const bool whole = aligned(weight, 16) && stride_e % kPack<T> == 0;
  const size_t shared_bytes = kExpertsAtOnce * (kThreads / 32) * sizeof(float);
  return MOERT_LAUNCH((merge_backward_kernel<T>), cdiv<int64_t>(P, kTile), kThreads, shared_bytes, stream, dout,
                      dout_dtype, (const T*)weight, E, P, stride_e, partial, whole, aligned(dout, 16));
}

}  // namespace moert

MOERT_API int moert_merge_forward(const void* weight, int dtype, const float* alpha, const float* seen, int E,
                                  int64_t P, int64_t stride_e, void* out, int out_dtype, void* stream) {
  using namespace moert;
  if (E < 1 || P < 0 || !known(dtype) || !known(out_dtype) || !alpha || (P && !(weight && out))) return MOERT_EINVAL;
  if (P == 0) return MOERT_OK;
  if (dtype == MOERT_F32) return merge<float>(weight, alpha, seen, E, P, stride_e, out, out_dtype, stream);
  if (dtype == MOERT_F16) return merge<__half>(weight, alpha, seen, E, P, stride_e, out, out_dtype, stream);
  return merge<__nv_bfloat16>(weight, alpha, seen, E, P, stride_e, out, out_dtype, stream);
}

MOERT_API int64_t moert_merge_backward_alpha_workspace(int E, int64_t P) {
  return E * moert::cdiv(P, moert::kTile) * (int64_t)sizeof(float);
}

MOERT_API int moert_merge_backward_alpha(const void* dout, int dout_dtype, const void* weight, int dtype, int E,
                                         int64_t P, int64_t stride_e, float* dalpha, void* workspace,
                                         int64_t workspace_bytes, void* stream) {
  using namespace moert;
  if (E < 1 || P < 0 || !known(dtype) || !known(dout_dtype) || !dalpha || (P && !(weight && dout))) return MOERT_EINVAL;
  if (cdiv(P, kTile) > kMaxGrid) return MOERT_EUNSUPPORTED;
  if (workspace_bytes < moert_merge_backward_alpha_workspace(E, P) || (P && !workspace)) return MOERT_EWORKSPACE;
  float* partial = static_cast<float*>(workspace);
  int code = MOERT_OK;
  if (P && dtype == MOERT_F32) code = merge_backward<float>(dout, dout_dtype, weight, E, P, stride_e, partial, stream);
  if (P && dtype == MOERT_F16) code = merge_backward<__half>(dout, dout_dtype, weight, E, P, stride_e, partial, stream);
  if (P && dtype == MOERT_BF16)
    code = merge_backward<__nv_bfloat16>(dout, dout_dtype, weight, E, P, stride_e, partial, stream);
  if (code) return code;
  return MOERT_LAUNCH(sum_kernel, E, kThreads, kThreads / 32 * sizeof(float), stream, partial, cdiv(P, kTile), dalpha);
}
