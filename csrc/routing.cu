// Chooses K experts and their weights per token from router logits, and counts the experts; and the gradient of the logits.
//
// The equations are in moe_runtime/ops/routing.py. A token has LANES neighboring lanes, each of which holds VALUES logits in
// registers: logit i * LANES + lane. Experts are chosen in k rounds over int32 keys that are ordered like the logits: the largest
// key, and of equal ones the lowest id. The key of a chosen expert becomes its slot, below the keys of all logits. Arithmetic is
// float32.
#include <math.h>

#include "common.cuh"

namespace moert {

constexpr int kThreads = 256;
constexpr int64_t kMaxRouteBlocks = 512;
constexpr int kMaxLogits = 1024;
constexpr int kTaken = -0x7fffffff - 1;  // 2^23 below the key of -inf

struct Route {
  const void* logits;
  const float* bias;
  float* weight;
  int32_t* idx;
  int32_t* block_count;
  const void* dweight;
  void* dlogits;
  int64_t T, stride_t, block_tokens;
  int E, k, shared, gate, dtype, dweight_dtype, forced;
};

// ordered like x: -0.0 equals 0.0, and every NaN is the largest
__device__ __forceinline__ int key_of(float x) {
  if (x != x) return 0x7fffffff;
  const int bits = __float_as_int(x);
  return bits >= 0 ? bits : bits == kTaken ? 0 : bits ^ 0x7fffffff;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }
// gates whose softmax is over the chosen experts only
__device__ __forceinline__ bool over_chosen(int gate) {
  return gate == MOERT_TOPK_SOFTMAX || gate == MOERT_SOFTMAX_TOPK_RENORM;
}

template <int LANES, int VALUES>
__device__ __forceinline__ void load_row(const Route& r, int64_t t, int lane, float (&x)[VALUES]) {
#pragma unroll
  for (int i = 0; i < VALUES; ++i) {
    const int e = i * LANES + lane;
    x[i] = e < r.E ? load_f32(r.logits, t * r.stride_t + e, r.dtype) : -INFINITY;
  }
}

// exp(x - max x), 0 beyond the last logit; the maximum is over the logits for which `counts` is true
template <int LANES, int VALUES, typename Counts>
__device__ __forceinline__ void exponentials(float (&x)[VALUES], Counts counts) {
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < VALUES; ++i)
    if (counts(i)) top = fmaxf(top, x[i]);
  top = max_lanes<LANES>(top);
#pragma unroll
  for (int i = 0; i < VALUES; ++i) x[i] = expf(x[i] - top);
}

template <int LANES, int VALUES, typename Term>
__device__ __forceinline__ float total(Term term) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < VALUES; ++i) sum += term(i);
  return sum_lanes<LANES>(sum);
}

// column, in the logits, of the expert in a slot of token t
__device__ __forceinline__ int column(const Route& r, int64_t t, int slot) {
  return r.idx[t * (r.k + r.shared) + slot] - r.shared;
}

// sum of term(x[i]) over the slots of token t; the caller may repeat an expert
template <int LANES, int VALUES, typename Chosen, typename Term>
__device__ __forceinline__ float total_of_slots(
    const Route& r, int64_t t, int lane, const float (&x)[VALUES], Chosen chosen, Term term) {
  if (!r.forced) return total<LANES, VALUES>([&](int i) { return chosen(i) ? term(x[i]) : 0.f; });
  float sum = 0.f;
#pragma unroll 1  // unrolled, the backward kernel of 1024 experts spills
  for (int slot = 0; slot < r.k; ++slot) {
    const int id = column(r, t, slot);
    float value = 0.f;
#pragma unroll
    for (int i = 0; i < VALUES; ++i)
      if (i * LANES + lane == id) value = x[i];
    // after the search, as the terms of all values would otherwise be kept in registers
    if (id >= 0 && id < r.E && id % LANES == lane) sum += term(value);
  }
  return sum_lanes<LANES>(sum);
}

// id of the largest key, the lowest of equal ones
template <int LANES, int VALUES>
__device__ __forceinline__ int first_of_largest(const int (&key)[VALUES], int lane) {
  int best = key[0], id = lane;
#pragma unroll
  for (int i = 1; i < VALUES; ++i)
    if (key[i] > best) best = key[i], id = i * LANES + lane;
#pragma unroll
  for (int o = LANES / 2; o; o >>= 1) {
    const int other = __shfl_xor_sync(kAllLanes, best, o), other_id = __shfl_xor_sync(kAllLanes, id, o);
    if (other > best || (other == best && other_id < id)) best = other, id = other_id;
  }
  return id;
}

template <int LANES, int VALUES>
__global__ void __launch_bounds__(kThreads, 2) route_forward_kernel(const Route r) {
  MOERT_SHARED(int32_t, counts);  // [E + shared]
  const int lane = threadIdx.x % LANES, K = r.k + r.shared;
  for (int e = threadIdx.x; e < r.E + r.shared; e += kThreads) counts[e] = 0;
  __syncthreads();
  const int64_t begin = blockIdx.x * r.block_tokens, end = least(begin + r.block_tokens, r.T);
  for (int64_t t0 = begin; t0 < end; t0 += kThreads / LANES) {
    // lanes without a token take part, as the shuffles need all lanes
    const int64_t t = least<int64_t>(t0 + threadIdx.x / LANES, end - 1);
    const bool live = t0 + threadIdx.x / LANES < end;
    float x[VALUES];
    load_row<LANES>(r, t, lane, x);
    int key[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      const int e = i * LANES + lane;
      const float choice = r.bias && e < r.E ? sigmoid(x[i]) + r.bias[e] : x[i];
      key[i] = e < r.E ? key_of(choice) : kTaken + LANES * VALUES;
    }
    for (int slot = 0; slot < r.k; ++slot) {
      const int id = r.forced ? column(r, t, slot) : first_of_largest<LANES>(key, lane);
#pragma unroll
      for (int i = 0; i < VALUES; ++i)
        if (i * LANES + lane == id) key[i] = kTaken + slot;
    }
    const auto chosen = [&](int i) { return key[i] < kTaken + r.k; };
    float largest = 0.f;  // the first expert's probability
    if (r.gate == MOERT_SIGMOID_TOPK) {
#pragma unroll
      for (int i = 0; i < VALUES; ++i) x[i] = sigmoid(x[i]);
    } else {
      // the logits of the caller's experts may be far below the others
      const bool of_chosen = r.forced && over_chosen(r.gate);
      exponentials<LANES>(x, [&](int i) { return !of_chosen || chosen(i); });
      if (over_chosen(r.gate)) {
        const float sum = total_of_slots<LANES>(r, t, lane, x, chosen, [](float value) { return value; });
#pragma unroll
        for (int i = 0; i < VALUES; ++i) x[i] /= sum;
      } else {
        largest = 1.f / total<LANES, VALUES>([&](int i) { return x[i]; });
#pragma unroll
        for (int i = 0; i < VALUES; ++i) x[i] *= largest;
        if (r.forced) {
          const int first = column(r, t, 0);
          largest = total<LANES, VALUES>([&](int i) { return i * LANES + lane == first ? x[i] : 0.f; });
        }
        if (r.gate == MOERT_XFT) {
#pragma unroll
          for (int i = 0; i < VALUES; ++i) x[i] = expf(x[i]);
          const float scale =
              largest / total_of_slots<LANES>(r, t, lane, x, chosen, [](float value) { return value; });
#pragma unroll
          for (int i = 0; i < VALUES; ++i) x[i] *= scale;
        }
      }
    }
    if (!live) continue;
    for (int slot = 0; r.forced && slot < r.k; ++slot) {
      const int id = column(r, t, slot);
#pragma unroll
      for (int i = 0; i < VALUES; ++i) {
        if (i * LANES + lane != id || id >= r.E) continue;
        r.weight[t * K + slot] = x[i];
        if (r.block_count) atomicAdd(&counts[id + r.shared], 1);
      }
    }
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      if (r.forced || !chosen(i)) continue;
      const int e = i * LANES + lane + r.shared;
      const int64_t slot = t * K + (key[i] - kTaken);
      r.weight[slot] = x[i];
      r.idx[slot] = e;
      if (r.block_count) atomicAdd(&counts[e], 1);
    }
    if (r.shared && lane == 0) {
      r.weight[t * K + r.k] = 1.f - largest;
      if (!r.forced) r.idx[t * K + r.k] = 0;
      if (r.block_count) atomicAdd(&counts[0], 1);
    }
  }
  if (!r.block_count) return;
  __syncthreads();
  for (int e = threadIdx.x; e < r.E + r.shared; e += kThreads)
    r.block_count[(int64_t)blockIdx.x * (r.E + r.shared) + e] = counts[e];
}

template <int LANES, int VALUES>
__global__ void __launch_bounds__(kThreads, 2) route_backward_kernel(const Route r) {
  // [tokens at once, E], of the chosen experts; each lane accesses only its own
  MOERT_SHARED(float, gradients);
  const int lane = threadIdx.x % LANES, K = r.k + r.shared;
  float* d = gradients + threadIdx.x / LANES * r.E;
  const int64_t begin = blockIdx.x * r.block_tokens, end = least(begin + r.block_tokens, r.T);
  for (int64_t t0 = begin; t0 < end; t0 += kThreads / LANES) {
    const int64_t t = least<int64_t>(t0 + threadIdx.x / LANES, end - 1);
    const bool live = t0 + threadIdx.x / LANES < end;
    float y[VALUES];
    load_row<LANES>(r, t, lane, y);
    unsigned mask = 0;  // bit i: this lane's i-th expert is chosen
    static_assert(VALUES <= 32, "one bit each");
    for (int slot = 0; slot < r.k; ++slot) {
      const int id = column(r, t, slot);
      if (id < 0 || id >= r.E || id % LANES != lane) continue;
      const float slot_dw = load_f32(r.dweight, t * K + slot, r.dweight_dtype);
      d[id] = mask >> id / LANES & 1u ? d[id] + slot_dw : slot_dw;  // the caller may repeat an expert
      mask |= 1u << id / LANES;
    }
    const int first = column(r, t, 0);
    const auto chosen = [&](int i) { return (mask >> i & 1u) != 0; };
    const auto dw = [&](int i) { return chosen(i) ? d[i * LANES + lane] : 0.f; };
    const auto subtract_from_slots = [&](float x) {
#pragma unroll 1  // as above
      for (int slot = 0; slot < r.k; ++slot) {
        const int id = column(r, t, slot);
        if (id >= 0 && id < r.E && id % LANES == lane) d[id] -= x;
      }
    };
    float mean = 0.f;
    if (r.gate == MOERT_SIGMOID_TOPK) {
#pragma unroll
      for (int i = 0; i < VALUES; ++i) y[i] = sigmoid(y[i]);
    } else if (over_chosen(r.gate)) {
      exponentials<LANES>(y, [&](int i) { return !r.forced || chosen(i); });
      const float sum = total_of_slots<LANES>(r, t, lane, y, chosen, [](float value) { return value; });
#pragma unroll
      for (int i = 0; i < VALUES; ++i) y[i] = chosen(i) ? y[i] / sum : 0.f;
      subtract_from_slots(total<LANES, VALUES>([&](int i) { return y[i] * dw(i); }));
    } else {
      exponentials<LANES>(y, [&](int) { return true; });
      float largest = 1.f / total<LANES, VALUES>([&](int i) { return y[i]; });
#pragma unroll
      for (int i = 0; i < VALUES; ++i) y[i] *= largest;
      if (r.forced) largest = total<LANES, VALUES>([&](int i) { return i * LANES + lane == first ? y[i] : 0.f; });
      if (r.gate == MOERT_XFT) {  // exp(y) / sum is the softmax over the chosen probabilities
        const float sum = total_of_slots<LANES>(r, t, lane, y, chosen, [](float value) { return expf(value); });
        const float inner = total<LANES, VALUES>([&](int i) { return chosen(i) ? expf(y[i]) / sum * dw(i) : 0.f; });
        subtract_from_slots(inner);
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
          const int e = i * LANES + lane;
          if (chosen(i)) d[e] = largest * (expf(y[i]) / sum) * d[e] + (e == first ? inner : 0.f);
        }
      }
      if (r.shared && first >= 0 && first < r.E && first % LANES == lane)
        d[first] -= load_f32(r.dweight, t * K + r.k, r.dweight_dtype);
      mean = total<LANES, VALUES>([&](int i) { return y[i] * dw(i); });
    }
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      const int e = i * LANES + lane;
      float dx = y[i] * (dw(i) - mean);
      if (r.gate == MOERT_SIGMOID_TOPK) dx = dw(i) * y[i] * (1.f - y[i]);
      // even in a row of NaN
      if ((r.gate == MOERT_SIGMOID_TOPK || over_chosen(r.gate)) && !chosen(i)) dx = 0.f;
      if (live && e < r.E) store_f32(r.dlogits, t * r.E + e, r.dtype, dx);
    }
  }
}

static bool shares(int gate) { return gate == MOERT_XFT || gate == MOERT_NONORM; }

static int check(const Route& r) {
  if (r.T < 0 || r.E < 1 || r.k < 1 || r.k > r.E || r.gate < MOERT_XFT || r.gate > MOERT_SIGMOID_TOPK)
    return MOERT_EINVAL;
  if (!known(r.dtype) || !known(r.dweight_dtype) || (r.T && !(r.logits && r.idx))) return MOERT_EINVAL;
  return r.E > kMaxLogits ? MOERT_EUNSUPPORTED : MOERT_OK;
}

}  // namespace moert

#define MOERT_ROUTE(kernel, lanes, values) \
  MOERT_LAUNCH((kernel<lanes, values>), moert::cdiv(r.T, r.block_tokens), moert::kThreads, shared_bytes, stream, r)
#define MOERT_ROUTE_BY_SIZE(kernel)         \
  r.E <= 8     ? MOERT_ROUTE(kernel, 8, 1)  \
  : r.E <= 64  ? MOERT_ROUTE(kernel, 32, 2) \
  : r.E <= 256 ? MOERT_ROUTE(kernel, 32, 8) \
               : MOERT_ROUTE(kernel, 32, 32)

MOERT_API int64_t moert_route_block_tokens(int64_t T, int E) {
  using namespace moert;
  const int64_t at_once = kThreads / (E <= 8 ? 8 : 32);
  return at_once * most<int64_t>(cdiv(T, at_once * kMaxRouteBlocks), 1);
}

MOERT_API int moert_route_forward(const void* logits, int dtype, int64_t stride_t, const float* bias, int64_t T, int E,
                                  int K, int gate, int forced, float* weight, int32_t* idx, int32_t* block_count,
                                  void* stream) {
  using namespace moert;
  const int shared = shares(gate);
  Route r{};
  r.logits = logits, r.dtype = dtype, r.stride_t = stride_t, r.bias = bias, r.T = T, r.E = E, r.k = K - shared;
  r.shared = shared, r.gate = gate, r.forced = forced, r.weight = weight, r.idx = idx, r.block_count = block_count;
  if (const int code = check(r)) return code;
  if (T && !weight) return MOERT_EINVAL;
  if (T == 0) return MOERT_OK;
  r.block_tokens = moert_route_block_tokens(T, E);
  const size_t shared_bytes = (E + shared) * sizeof(int32_t);
  return MOERT_ROUTE_BY_SIZE(route_forward_kernel);
}

MOERT_API int moert_route_backward(const void* dweight, int dweight_dtype, const void* logits, int dtype,
                                   int64_t stride_t, const int32_t* idx, int64_t T, int E, int K, int gate, int forced,
                                   void* dlogits, void* stream) {
  using namespace moert;
  const int shared = shares(gate);
  Route r{};
  r.logits = logits, r.dtype = dtype, r.stride_t = stride_t, r.T = T, r.E = E, r.k = K - shared, r.shared = shared;
  r.gate = gate, r.forced = forced, r.idx = const_cast<int32_t*>(idx), r.dweight = dweight;
  r.dweight_dtype = dweight_dtype, r.dlogits = dlogits;
  if (const int code = check(r)) return code;
  if (T && !(dweight && dlogits)) return MOERT_EINVAL;
  if (T == 0) return MOERT_OK;
  r.block_tokens = moert_route_block_tokens(T, E);
  const size_t shared_bytes = kThreads / (E <= 8 ? 8 : 32) * E * sizeof(float);
  return MOERT_ROUTE_BY_SIZE(route_backward_kernel);
}
