// The host code of csrc/ without CUDA: g++ -DMOERT_EMU compiles the same sources as nvcc, and their launches run on the
// emulator, with the PTX that nvcc made of the kernels. Of a kernel only the name is used; what its body calls is declared here.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define __global__ __attribute__((visibility("default"), used))
#define __device__ static
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

extern "C" int emulator_launch(const void* kernel, const uint32_t grid[3], uint32_t threads, int shared_bytes, int together,
                               const void* const* arguments);
extern "C" const char* emulator_message();

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct __half {
  uint16_t bits;
};
struct __nv_bfloat16 {
  uint16_t bits;
};

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchFailure = 719,
  cudaErrorCooperativeLaunchTooLarge = 720,
  cudaErrorNotSupported = 801
};
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaDriverGetVersion(int*) { return cudaSuccess; }
inline cudaError_t cudaRuntimeGetVersion(int*) { return cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t code) {
  if (code == cudaErrorLaunchFailure) return emulator_message();
  return code == cudaErrorInvalidConfiguration ? "invalid configuration argument" : "too many blocks in cooperative launch";
}

namespace emu {

constexpr int kProcessors = 5;      // few, and not a divisor of any size; with MOERT_EMU_SHARED, launches may use only one
constexpr size_t kShared = 48 << 10;  // most bytes of a launch without opting in to more

template <typename T>
struct Same {
  using type = T;
};

// `values` are converted to the kernel's parameters
template <typename... Parameters>
int launch(bool together, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
           typename Same<Parameters>::type... values) {
  const unsigned threads = block.x * block.y * block.z;
  const int64_t blocks = (int64_t)grid.x * grid.y * grid.z;
  if (blocks < 1 || threads < 1 || threads > 1024 || shared_bytes > kShared) return cudaErrorInvalidConfiguration;
  if (together && blocks > (getenv("MOERT_EMU_SHARED") ? 1 : kProcessors)) return cudaErrorCooperativeLaunchTooLarge;
  const uint32_t sizes[] = {grid.x, grid.y, grid.z};
  const void* arguments[] = {&values...};
  const int failed = emulator_launch((const void*)kernel, sizes, threads, (int)shared_bytes, together, arguments);
  return failed ? cudaErrorLaunchFailure : cudaSuccess;
}

// what only kernels call
template <typename T>
T never(T) {
  abort();
}

}  // namespace emu

#define MOERT_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  ((void)(stream), ::emu::launch(false, (kernel), dim3((unsigned)(grid)), dim3(block), (shared_bytes), __VA_ARGS__))
#define MOERT_LAUNCH_TOGETHER(kernel, grid, block, shared_bytes, stream, argument) \
  ((void)(stream), ::emu::launch(true, (kernel), dim3((unsigned)(grid)), dim3(block), (shared_bytes), argument))
#define MOERT_SHARED(type, name) type* name = nullptr

static const dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace moert {
inline void wait_for_all_blocks() {}
inline int processors(int* count) { return *count = ::emu::kProcessors, 0; }
}  // namespace moert

inline void __syncthreads() {}
inline int __syncthreads_or(int value) { return emu::never(value); }
inline void __syncwarp(unsigned = 0) {}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int) {
  return emu::never(value);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, unsigned) {
  return emu::never(value);
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T) {
  return emu::never(mask);
}
template <typename T>
T atomicAdd(T*, T value) {
  return emu::never(value);
}
template <typename T>
void __stcg(T*, T value) {
  emu::never(value);
}
inline int __popc(unsigned x) { return emu::never((int)x); }
inline int __float_as_int(float x) { return emu::never((int)x); }
inline float __int_as_float(int x) { return emu::never((float)x); }
inline float __fmul_rn(float a, float) { return emu::never(a); }
inline float __fadd_rn(float a, float) { return emu::never(a); }
inline float __bfloat162float(__nv_bfloat16 x) { return emu::never((float)x.bits); }
inline __nv_bfloat16 __float2bfloat16_rn(float) { return emu::never(__nv_bfloat16{}); }
inline float __half2float(__half x) { return emu::never((float)x.bits); }
inline __half __float2half_rn(float) { return emu::never(__half{}); }
