// Runs csrc/ on the CPU, for tests on machines without a GPU: g++ -DMOERT_EMU compiles the same sources as nvcc.
//
// Each CUDA thread is a fiber. Blocks run one after another, those of MOERT_LAUNCH_TOGETHER all at once. Emulated: grids,
// dynamic shared memory (filled with 0xCD, so that no kernel relies on zeros, and of the launch's size, so that
// AddressSanitizer detects its end), barriers of a block and of the grid, shuffles and matches of full warps, integer atomics.
// Not emulated: the GPU's memory model and time. Built with -fsanitize=thread, each fiber is a thread to ThreadSanitizer, and
// only launches, barriers and __syncwarp order their accesses; shuffles and matches do not.
// MOERT_EMU_SEED exposes missing barriers: 1 runs the threads in another order and delays warps; n > 1 makes warp n - 2 wait
// after every barrier until the others cannot continue. Code that hangs or is undefined on a GPU (a barrier that a thread never
// reaches, a warp operation without all lanes of its mask) is an error.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
extern "C" void AnnotateIgnoreReadsBegin(const char*, int);
extern "C" void AnnotateIgnoreReadsEnd(const char*, int);
extern "C" void AnnotateIgnoreWritesBegin(const char*, int);
extern "C" void AnnotateIgnoreWritesEnd(const char*, int);
#endif

#define __global__ static
#define __device__ static
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
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

namespace emu {

constexpr int kProcessors = 5;        // few, and not a divisor of any size; with MOERT_EMU_SHARED, launches may use only one
constexpr size_t kShared = 48 << 10;  // most bytes of a launch without opting in to more
constexpr size_t kStack = 128 << 10;

// informs ThreadSanitizer of the running thread and of what orders accesses, and hides the emulator's own accesses
#ifdef __SANITIZE_THREAD__
struct Unwatched {
  Unwatched() { AnnotateIgnoreReadsBegin("", 0), AnnotateIgnoreWritesBegin("", 0); }
  ~Unwatched() { AnnotateIgnoreWritesEnd("", 0), AnnotateIgnoreReadsEnd("", 0); }
};
inline void release(void* order) { __tsan_release(order); }
inline void acquire(void* order) { __tsan_acquire(order); }
inline void* new_thread() { return __tsan_create_fiber(0); }
inline void* this_thread() { return __tsan_get_current_fiber(); }
inline void become(void* thread) { __tsan_switch_to_fiber(thread, __tsan_switch_to_fiber_no_sync); }
#else
struct Unwatched {
  Unwatched() {}
};
inline void release(void*) {}
inline void acquire(void*) {}
inline void* new_thread() { return nullptr; }
inline void* this_thread() { return nullptr; }
inline void become(void*) {}
#endif

struct Barrier {
  char order[2];  // of this round and of the previous one
  int arrived = 0, any = 0, result = 0;
  uint64_t round = 0;
};
struct Warp {
  char order[2];
  uint64_t value[2][32] = {};  // of this round and of the previous one, which slow lanes still read
  unsigned present[2] = {0, 0};
  int live = 0, arrived = 0;
  uint64_t round = 0;
};
struct Block {
  dim3 index;
  int live = 0;
  Barrier barrier;
  std::vector<Warp> warps;
  std::unique_ptr<unsigned char[]> shared;
};
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  void* watched = nullptr;
  Block* block;
  unsigned thread;
  bool done = true;
};

// one per program, although every source includes this code
struct Machine {
  std::vector<Fiber> fibers;
  std::vector<Block> blocks;
  ucontext_t scheduler;
  std::function<void()> body;
  dim3 grid;
  unsigned threads = 0;
  int live = 0, now = 0;
  int64_t slow = -1, lags = -1;  // the warp that waits now, and the one that waits after every barrier
  bool moved = false;
  const char* error = nullptr;
  Barrier all;
  void* watched = nullptr;
  char begin, end;
};
inline Machine& machine() {
  static Machine m;
  return m;
}
inline Fiber& self() { return machine().fibers[machine().now]; }
inline unsigned lane() { return self().thread & 31; }

inline void yield() {
  Fiber& fiber = self();
  become(machine().watched);
  swapcontext(&fiber.context, &machine().scheduler);
}

// ends the launch and abandons its fibers
[[noreturn]] inline void fail(const char* what) {
  machine().error = what;
  for (;;) yield();
}

// waits for `count` threads; returns whether `predicate` holds for any of them
inline int meet(Barrier& barrier, int count, int predicate) {
  const Unwatched unwatched;
  const uint64_t round = barrier.round;
  release(&barrier.order[round & 1]);
  barrier.any |= predicate != 0;
  machine().moved = true;
  if (++barrier.arrived == count) {
    barrier.result = barrier.any;
    barrier.arrived = barrier.any = 0;
    ++barrier.round;
    machine().slow = machine().lags;
    if (machine().now / 32 == machine().slow) yield();
  }
  while (barrier.round == round) yield();
  acquire(&barrier.order[round & 1]);
  machine().moved = true;
  return barrier.result;
}

// waits for all lanes of the warp; returns the value of each
inline const uint64_t* exchange(unsigned mask, uint64_t value, bool orders = false) {
  const Unwatched unwatched;
  Warp& warp = self().block->warps[self().thread / 32];
  const uint64_t round = warp.round;
  if (orders) release(&warp.order[round & 1]);
  if (warp.arrived == 0) warp.present[round & 1] = 0;
  warp.value[round & 1][lane()] = value;
  warp.present[round & 1] |= 1u << lane();
  machine().moved = true;
  if (++warp.arrived == warp.live) {
    if (warp.present[round & 1] != mask) fail("a warp operation without all lanes of its mask");
    warp.arrived = 0;
    ++warp.round;
  }
  while (warp.round == round) yield();
  if (orders) acquire(&warp.order[round & 1]);
  machine().moved = true;
  return warp.value[round & 1];
}

template <typename T>
inline uint64_t pack(T value) {
  static_assert(sizeof(T) <= 8, "one slot of the table");
  uint64_t raw = 0;
  memcpy(&raw, &value, sizeof(T));
  return raw;
}
template <typename T>
inline T unpack(uint64_t raw) {
  T value;
  memcpy(&value, &raw, sizeof(T));
  return value;
}

inline void enter() {
  acquire(&machine().begin);
  machine().body();
  release(&machine().end);
  const Unwatched unwatched;
  Fiber& fiber = self();
  Block& block = *fiber.block;
  fiber.done = true;
  --machine().live;
  --block.live;
  --block.warps[fiber.thread / 32].live;
  machine().moved = true;
  // a GPU counts a thread that has left as arrived; a kernel that relies on it has a bug
  if (block.barrier.arrived || block.warps[fiber.thread / 32].arrived || machine().all.arrived)
    fail("a thread has left while others wait for it");
  yield();  // never to return
}

inline void start(Fiber& fiber, Block& block, unsigned thread) {
  if (!fiber.stack) {
    fiber.stack.reset(new char[kStack]);
    fiber.watched = new_thread();
  }
  fiber.block = &block;
  fiber.thread = thread;
  fiber.done = false;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStack;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, enter, 0);
}

inline void run_blocks(int64_t first, int count, size_t shared_bytes, unsigned& random) {
  Machine& m = machine();
  m.blocks.clear();
  m.blocks.resize(count);
  m.all = Barrier{};
  if (m.fibers.size() < (size_t)count * m.threads) m.fibers.resize((size_t)count * m.threads);
  std::vector<int> order(count * m.threads);
  for (int b = 0; b < count; ++b) {
    Block& block = m.blocks[b];
    const int64_t index = first + b;
    block.index = dim3(index % m.grid.x, index / m.grid.x % m.grid.y, index / m.grid.x / m.grid.y);
    block.live = m.threads;
    block.warps.resize((m.threads + 31) / 32);
    block.shared.reset(new unsigned char[shared_bytes]);
    memset(block.shared.get(), 0xCD, shared_bytes);
    for (unsigned t = 0; t < m.threads; ++t) {
      const int i = b * m.threads + t;
      start(m.fibers[i], block, t);
      ++block.warps[t / 32].live;
      order[i] = i;
    }
  }
  m.live = order.size();
  const auto pick = [&](size_t choices) {
    random = random * 1664525u + 1013904223u;
    return (random >> 8) % choices;
  };
  m.slow = -1;
  for (int round = 0; m.live; ++round) {
    m.moved = false;
    for (size_t i = order.size() - 1; random && i > 0; --i) std::swap(order[i], order[pick(i + 1)]);
    if (random && round % 32 == 0) m.slow = pick(order.size() / 32 + 1);
    for (int i : order) {
      m.now = i;
      if (!m.fibers[i].done && i / 32 != m.slow) {
        become(m.fibers[i].watched);
        swapcontext(&m.scheduler, &m.fibers[i].context);
      }
      if (m.error) return;
    }
    if (!m.moved && m.slow >= 0) m.slow = -1;
    else if (!m.moved) {
      m.error = "threads wait at a barrier or a warp operation that others never reach";
      return;
    }
  }
}

inline int launch(dim3 grid, dim3 block, size_t shared_bytes, bool together, std::function<void()> body) {
  Machine& m = machine();
  release(&m.begin);
  const Unwatched unwatched;
  m.watched = this_thread();
  const int64_t blocks = (int64_t)grid.x * grid.y * grid.z;
  m.threads = block.x * block.y * block.z;
  if (blocks < 1 || m.threads < 1 || m.threads > 1024 || shared_bytes > kShared) return cudaErrorInvalidConfiguration;
  if (together && blocks > (getenv("MOERT_EMU_SHARED") ? 1 : kProcessors)) return cudaErrorCooperativeLaunchTooLarge;
  m.error = nullptr;
  m.grid = grid;
  m.body = std::move(body);
  const char* set = getenv("MOERT_EMU_SEED");
  const int seed = set ? atoi(set) : 0;
  unsigned random = seed == 1 ? 2654435761u : 0;
  m.lags = seed > 1 ? seed - 2 : -1;
  if (together) run_blocks(0, (int)blocks, shared_bytes, random);
  else
    for (int64_t b = 0; b < blocks && !m.error; ++b) run_blocks(b, 1, shared_bytes, random);
  acquire(&m.end);
  return m.error ? cudaErrorLaunchFailure : cudaSuccess;
}

}  // namespace emu

inline const char* cudaGetErrorString(cudaError_t code) {
  if (code == cudaErrorLaunchFailure) return emu::machine().error;
  return code == cudaErrorInvalidConfiguration ? "invalid configuration argument"
                                               : "too many blocks in cooperative launch";
}

#define threadIdx (dim3(::emu::self().thread, 0, 0))
#define blockIdx (::emu::self().block->index)
#define blockDim (dim3(::emu::machine().threads))
#define gridDim (::emu::machine().grid)
#define MOERT_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  ((void)(stream),                                                   \
   ::emu::launch(dim3((unsigned)(grid)), dim3(block), (shared_bytes), false, [=] { (kernel)(__VA_ARGS__); }))
#define MOERT_LAUNCH_TOGETHER(kernel, grid, block, shared_bytes, stream, argument) \
  ((void)(stream),                                                                 \
   ::emu::launch(dim3((unsigned)(grid)), dim3(block), (shared_bytes), true, [=] { (kernel)(argument); }))
#define MOERT_SHARED(type, name) type* name = reinterpret_cast<type*>(::emu::self().block->shared.get())

namespace moert {
static inline void wait_for_all_blocks() { ::emu::meet(::emu::machine().all, ::emu::machine().live, 0); }
static inline int processors(int* count) { return *count = ::emu::kProcessors, 0; }
}  // namespace moert

static inline void __syncthreads() { emu::meet(emu::self().block->barrier, emu::self().block->live, 0); }
static inline int __syncthreads_or(int predicate) {
  return emu::meet(emu::self().block->barrier, emu::self().block->live, predicate);
}
static inline void __syncwarp(unsigned mask = 0xffffffffu) { emu::exchange(mask, 0, true); }
template <typename T>
static inline T __shfl_xor_sync(unsigned mask, T value, int other) {
  return emu::unpack<T>(emu::exchange(mask, emu::pack(value))[(emu::lane() ^ other) & 31]);
}
template <typename T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta) {
  const unsigned lane = emu::lane();
  const uint64_t* values = emu::exchange(mask, emu::pack(value));
  return lane >= delta ? emu::unpack<T>(values[lane - delta]) : value;
}
template <typename T>
static inline unsigned __match_any_sync(unsigned mask, T value) {
  const uint64_t* values = emu::exchange(mask, emu::pack(value));
  unsigned same = 0;
  for (int i = 0; i < 32; ++i) same |= (unsigned)(values[i] == emu::pack(value)) << i;
  return same;
}
template <typename T>
static inline T atomicAdd(T* place, T value) {
  return __atomic_fetch_add(place, value, __ATOMIC_RELAXED);
}

template <typename T>
static inline void __stcg(T* place, T value) {
  *place = value;
}
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __float_as_int(float x) { return emu::unpack<int>(emu::pack(x)); }
static inline float __int_as_float(uint32_t x) { return emu::unpack<float>(x); }
static inline float __fmul_rn(float a, float b) { return a * b; }  // compiled with -ffp-contract=off
static inline float __fadd_rn(float a, float b) { return a + b; }

// to the nearest, ties to even, as the hardware does
static inline float __bfloat162float(__nv_bfloat16 x) { return __int_as_float((uint32_t)x.bits << 16); }
static inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const uint32_t bits = (uint32_t)__float_as_int(x);
  if (x != x) return {0x7fff};
  return {(uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
static inline float __half2float(__half x) {
  const uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16, exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  if (exponent == 0) return __int_as_float(sign | (uint32_t)__float_as_int(std::ldexp((float)fraction, -24)));
  return __int_as_float(sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13);
}
static inline __half __float2half_rn(float x) {
  const uint32_t bits = (uint32_t)__float_as_int(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return {0x7fff};
  if (size >= 0x477ff000) return {(uint16_t)(sign | 0x7c00)};  // rounds to 2^16 or more
  if (size < 0x38800000) {                                     // subnormal: a multiple of 2^-24
    const float scaled = std::nearbyint(std::ldexp(std::fabs(x), 24));
    return {(uint16_t)(sign | (uint32_t)scaled)};
  }
  const uint32_t rounded = size + 0xfff + (size >> 13 & 1);
  return {(uint16_t)(sign | ((rounded - (112u << 23)) >> 13))};
}
