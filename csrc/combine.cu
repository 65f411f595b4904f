// Sums each token's expert rows with their weights: a gather, never a scatter; and the gradient.
//
// The equation is in moe_runtime/ops/combine.py. Sums are float32 and start at 0; slots are added in order by fused
// multiply-adds, each rounded once, as in torch's embedding_bag and the Triton kernel.
#include "common.cuh"

namespace moert {

constexpr int kThreads = 256;
constexpr int kInFlight = 4;  // rows of one token that a thread loads at once

struct Sum {
  const float* weight;
  const void* slot_row;
  const int32_t* num_rows;
  int64_t tokens, H;
  int row_bytes, K;
};

// N values of one token from column h on, of which `count` are within the row
template <int N, typename T>
__device__ __forceinline__ void sum_slots(const Sum& s, const T* y, int64_t t, int64_t h, int64_t count, bool whole,
                                          T* out) {
  // rows from num_rows on are never written, and their weights may have any value
  const int64_t limit = s.num_rows ? *s.num_rows : INT64_MAX;
  float sum[N];
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] = 0.f;
  for (int k0 = 0; k0 < s.K; k0 += kInFlight) {
    Pack<T, N> row[kInFlight];
    bool live[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const int64_t r = k0 + j < s.K ? load_index(s.slot_row, t * s.K + k0 + j, s.row_bytes) : limit;
      live[j] = k0 + j < s.K && r < limit;
      if (live[j]) row[j] = load_pack<N>(y + r * s.H + h, count, whole);
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (!live[j]) continue;
      const float w = s.weight[t * s.K + k0 + j];
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] = fmaf(w, to_f32(row[j].value[i]), sum[i]);
    }
  }
  store_pack(out + t * s.H + h, sum, count, whole);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) combine_forward_kernel(const Sum s, const T* y, T* out, bool whole) {
  constexpr int N = kPack<T>;
  const int64_t n = (int64_t)blockIdx.x * kThreads + threadIdx.x, columns = cdiv<int64_t>(s.H, N), t = n / columns;
  if (t >= s.tokens) return;
  const int64_t h = (n - t * columns) * N;
  if (whole) sum_slots<N>(s, y, t, h, N, true, out);  // N divides H
  else sum_slots<N>(s, y, t, h, s.H - h, false, out);
}

// one warp per slot: the K warps that read the same row of dout run together and share it in the caches
template <typename T>
__global__ void __launch_bounds__(kThreads)
    combine_backward_kernel(const T* dout, const T* y, const float* weight, const void* slot_row, int row_bytes,
                            int64_t R, int K, int64_t H, T* dy, float* dweight, bool whole) {
  constexpr int N = kPack<T>;
  const int64_t s = (int64_t)blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  if (s >= R) return;  // the whole warp
  const int lane = threadIdx.x & 31;
  const int64_t row = load_index(slot_row, s, row_bytes), t = s / K;
  const float w = weight[s];
  float sum = 0.f;
  for (int64_t h = lane * N; h < H; h += 32 * N) {
    const Pack<T, N> d = load_pack<N>(dout + t * H + h, H - h, whole), v = load_pack<N>(y + row * H + h, H - h, whole);
    float product[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      product[i] = w * to_f32(d.value[i]);
      sum = fmaf(to_f32(d.value[i]), to_f32(v.value[i]), sum);
    }
    store_pack(dy + row * H + h, product, H - h, whole);
  }
  sum = sum_lanes<32>(sum);
  if (lane == 0) dweight[s] = sum;
}

template <typename T>
static int combine(const Sum& s, const void* y, void* out, void* stream) {
  const bool whole = aligned(y, 16) && aligned(out, 16) && s.H % kPack<T> == 0;
  const int64_t grid = cdiv<int64_t>(s.tokens * cdiv<int64_t>(s.H, kPack<T>), kThreads);
  if (grid > kMaxGrid) return MOERT_EUNSUPPORTED;
  return MOERT_LAUNCH((combine_forward_kernel<T>), grid, kThreads, 0, stream, s, (const T*)y, (T*)out, whole);
}

template <typename T>
static int combine_back(const void* dout, const void* y, const float* weight, const void* slot_row, int row_bytes,
                        int64_t R, int K, int64_t H, void* dy, float* dweight, void* stream) {
  const bool whole = aligned(y, 16) && aligned(dout, 16) && aligned(dy, 16) && H % kPack<T> == 0;
  const int64_t grid = cdiv<int64_t>(R, kThreads / 32);
  if (grid > kMaxGrid) return MOERT_EUNSUPPORTED;
  return MOERT_LAUNCH((combine_backward_kernel<T>), grid, kThreads, 0, stream, (const T*)dout, (const T*)y, weight,
                      slot_row, row_bytes, R, K, H, (T*)dy, dweight, whole);
}

static bool valid(int dtype, int row_bytes, int64_t T, int K, int64_t H) {
  return known(dtype) && (row_bytes == 4 || row_bytes == 8) && T >= 0 && K >= 0 && H >= 0;
}

}  // namespace moert

MOERT_API int moert_combine_forward(const void* y, int dtype, const float* weight, const void* slot_row, int row_bytes,
                                    const int32_t* num_rows, int64_t T, int K, int64_t H, void* out, void* stream) {
  using namespace moert;
  if (!valid(dtype, row_bytes, T, K, H) || (T && H && (!out || (K && !(y && weight && slot_row))))) return MOERT_EINVAL;
  if (T == 0 || H == 0) return MOERT_OK;
  const Sum s{weight, slot_row, num_rows, T, H, row_bytes, K};
  if (dtype == MOERT_F32) return combine<float>(s, y, out, stream);
  if (dtype == MOERT_F16) return combine<__half>(s, y, out, stream);
  return combine<__nv_bfloat16>(s, y, out, stream);
}

MOERT_API int moert_combine_backward(const void* dout, const void* y, int dtype, const float* weight,
                                     const void* slot_row, int row_bytes, int64_t T, int K, int64_t H, void* dy,
                                     float* dweight, void* stream) {
  using namespace moert;
  const int64_t R = T * K;
  if (!valid(dtype, row_bytes, T, K, H) || (R && !(weight && slot_row && dweight))) return MOERT_EINVAL;
  if (R && H && !(dout && y && dy)) return MOERT_EINVAL;
  if (R == 0) return MOERT_OK;
  if (dtype == MOERT_F32)
    return combine_back<float>(dout, y, weight, slot_row, row_bytes, R, K, H, dy, dweight, stream);
  if (dtype == MOERT_F16)
    return combine_back<__half>(dout, y, weight, slot_row, row_bytes, R, K, H, dy, dweight, stream);
  return combine_back<__nv_bfloat16>(dout, y, weight, slot_row, row_bytes, R, K, H, dy, dweight, stream);
}
