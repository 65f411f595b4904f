// Code that all kernels share: the CUDA runtime (or, with MOERT_EMU, what the tests have instead), dtypes, sums over lanes.
#pragma once
#include <string.h>

#include "moert.h"
#ifdef MOERT_EMU
#include "cuda_host.h"
#else
#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define MOERT_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                     \
  (kernel<<<dim3((unsigned)(grid)), dim3(block), (shared_bytes), (cudaStream_t)(stream)>>>(__VA_ARGS__), \
   (int)cudaGetLastError())
// all blocks run at once, so that they can wait for each other; `argument` is the kernel's only argument
#define MOERT_LAUNCH_TOGETHER(kernel, grid, block, shared_bytes, stream, argument) \
  ::moert::launch_together((const void*)(kernel), (grid), (block), (shared_bytes), (stream), &(argument))
// all shared memory is dynamic and uninitialized; its size is an argument of the launch
#define MOERT_SHARED(type, name)                              \
  extern __shared__ __align__(16) unsigned char name##_raw[]; \
  type* name = reinterpret_cast<type*>(name##_raw)
#endif

namespace moert {

constexpr unsigned kAllLanes = 0xffffffffu;

#ifndef MOERT_EMU
inline int launch_together(const void* kernel, int grid, int block, size_t shared_bytes, void* stream, void* argument) {
  void* arguments[] = {argument};
  const int code =
      (int)cudaLaunchCooperativeKernel(kernel, dim3(grid), dim3(block), arguments, shared_bytes, (cudaStream_t)stream);
  return code ? (cudaGetLastError(), code) : 0;  // clears the error, so that the next launch does not report it
}
__device__ __forceinline__ void wait_for_all_blocks() { cooperative_groups::this_grid().sync(); }
// of the current device, without synchronizing with the GPU
inline int processors(int* count) {
  int device = 0;
  const int code = (int)cudaGetDevice(&device);
  return code ? code : (int)cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}
#endif

template <typename I>
__host__ __device__ constexpr I cdiv(I a, I b) {
  return (a + b - 1) / b;
}
template <typename I>
__host__ __device__ constexpr I least(I a, I b) {
  return a < b ? a : b;
}
template <typename I>
__host__ __device__ constexpr I most(I a, I b) {
  return a < b ? b : a;
}

__device__ __forceinline__ float to_f32(float x) { return x; }
__device__ __forceinline__ float to_f32(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_f32(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void from_f32(float x, float& y) { y = x; }
__device__ __forceinline__ void from_f32(float x, __half& y) { y = __float2half_rn(x); }
__device__ __forceinline__ void from_f32(float x, __nv_bfloat16& y) { y = __float2bfloat16_rn(x); }

__device__ __forceinline__ float load_f32(const void* p, int64_t i, int dtype) {
  if (dtype == MOERT_F32) return static_cast<const float*>(p)[i];
  if (dtype == MOERT_F16) return to_f32(static_cast<const __half*>(p)[i]);
  return to_f32(static_cast<const __nv_bfloat16*>(p)[i]);
}
__device__ __forceinline__ void store_f32(void* p, int64_t i, int dtype, float x) {
  if (dtype == MOERT_F32) static_cast<float*>(p)[i] = x;
  else if (dtype == MOERT_F16) from_f32(x, static_cast<__half*>(p)[i]);
  else from_f32(x, static_cast<__nv_bfloat16*>(p)[i]);
}
// reads an index of 4 or 8 bytes
__device__ __forceinline__ int64_t load_index(const void* p, int64_t i, int bytes) {
  return bytes == 8 ? static_cast<const int64_t*>(p)[i] : static_cast<const int32_t*>(p)[i];
}

// values per 16-byte access
template <typename T>
constexpr int kPack = 16 / (int)sizeof(T);
template <typename T, int N>
struct Pack {
  T value[N];
};

// these accesses stay whole; the compiler splits those of a struct, and sometimes of a uint4, into smaller ones
template <typename P>
__device__ __forceinline__ void read_whole(P& pack, const void* p) {
  uint4 words[sizeof(P) / 16];
#pragma unroll
  for (size_t i = 0; i < sizeof(P) / 16; ++i) words[i] = static_cast<const uint4*>(p)[i];
  memcpy(&pack, words, sizeof(P));
}
template <typename P>
__device__ __forceinline__ void write_whole(void* p, const P& pack) {
  if constexpr (sizeof(P) == 8) {
    uint2 words;
    memcpy(&words, &pack, 8);
    __stcg(static_cast<uint2*>(p), words);
  } else {
    uint4 words[sizeof(P) / 16];
    memcpy(words, &pack, sizeof(P));
#pragma unroll
    for (size_t i = 0; i < sizeof(P) / 16; ++i) __stcg(static_cast<uint4*>(p) + i, words[i]);
  }
}

// the first `count` of N values, the rest 0; in 16-byte accesses if `whole`, which requires aligned addresses
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load_pack(const T* p, int64_t count, bool whole) {
  Pack<T, N> pack;
  if (whole && count >= N) {
    read_whole(pack, p);
    return pack;
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
    if (n < count) pack.value[n] = p[n];
    else from_f32(0.f, pack.value[n]);
  }
  return pack;
}
template <int N, typename T>
__device__ __forceinline__ void store_pack(T* p, const float (&x)[N], int64_t count, bool whole) {
  Pack<T, N> pack;
#pragma unroll
  for (int n = 0; n < N; ++n) from_f32(x[n], pack.value[n]);
  if (whole && count >= N) {
    write_whole(p, pack);
    return;
  }
#pragma unroll
  for (int n = 0; n < N; ++n)
    if (n < count) p[n] = pack.value[n];
}

// reductions over groups of LANES neighboring lanes; every lane gets the same bits
template <int LANES>
__device__ __forceinline__ float sum_lanes(float x) {
#pragma unroll
  for (int o = LANES / 2; o; o >>= 1) x += __shfl_xor_sync(kAllLanes, x, o);
  return x;
}
template <int LANES>
__device__ __forceinline__ float max_lanes(float x) {
#pragma unroll
  for (int o = LANES / 2; o; o >>= 1) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, o));
  return x;
}

inline bool aligned(const void* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }
template <typename T>
constexpr int kDtype = MOERT_F32;
template <>
constexpr int kDtype<__half> = MOERT_F16;
template <>
constexpr int kDtype<__nv_bfloat16> = MOERT_BF16;
inline bool known(int dtype) { return dtype >= MOERT_F32 && dtype <= MOERT_BF16; }
constexpr int64_t kMaxGrid = 0x7fffffff;

}  // namespace moert
