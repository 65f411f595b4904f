// Sorts slots by expert (a stable counting sort) and maps the grouped GEMMs' row tiles, in one launch.
//
// moe_runtime/ops/dispatch.py defines the operation. A slot's key is its expert, or E if it is dropped. Each warp of each block
// owns a run of slots and reads it twice: it counts its keys and, after the counts of all blocks have been summed, assigns each
// slot its row. Ranks depend only on the order of lanes and runs, so the result does not depend on which block runs first.
//   up to kOneBlock slots  one block
//   more                   a block per 2048 slots, at most as many as the GPU runs at once; all wait for each other's counts
//   with block_count       the same number; no block waits, as the router has already counted
#include "common.cuh"

namespace moert {

constexpr int kMaxExperts = 1024;
constexpr int64_t kOneBlock = 8192;
constexpr int64_t kBlockSlots = 2048;
constexpr int kMaxBlocks = 128;
constexpr int kMaxCountedBlocks = 64;
constexpr int kAhead = 4;               // loads of a lane in flight
constexpr int kSharedBytes = 48 << 10;  // most that a block may use without opting in to more
constexpr int kWarpSums = 32;

struct Plan {
  const void* ids;
  int id_bytes, E, K;
  int64_t R;
  int64_t block_slots;    // slots per block of the grid
  const int32_t* counts;  // [rows, columns], columns from E on are for dropped slots; null: there is one block
  int32_t* own_counts;    // the same array, if this grid fills it
  int rows, rows_before;  // rows_before: per block of the grid
  int columns;
  int32_t *expert_offsets, *row_token, *row_slot, *slot_row;
  int num_maps;
  moert_tiles maps[MOERT_MAX_MAPS];
};

// exclusive prefix sum in place, by all threads of the block; a[n] becomes the total. sums [kWarpSums] is scratch
__device__ void scan(int32_t* a, int n, int32_t* sums) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  int32_t carry = 0;
  for (int base = 0; base < n; base += blockDim.x) {
    const int i = base + threadIdx.x;
    const int32_t x = i < n ? a[i] : 0;
    int32_t upto = x;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const int32_t left = __shfl_up_sync(kAllLanes, upto, o);
      if (lane >= o) upto += left;
    }
    if (lane == 31) sums[warp] = upto;
    __syncthreads();
    if (warp == 0) {
      int32_t total = lane < warps ? sums[lane] : 0;
#pragma unroll
      for (int o = 1; o < 32; o <<= 1) {
        const int32_t left = __shfl_up_sync(kAllLanes, total, o);
        if (lane >= o) total += left;
      }
      sums[lane] = total;
    }
    __syncthreads();
    if (i < n) a[i] = carry + upto - x + (warp ? sums[warp - 1] : 0);
    carry += sums[warps - 1];
    __syncthreads();  // before the next round overwrites the sums
  }
  if (threadIdx.x == 0) a[n] = carry;
  __syncthreads();
}

// this block's part of one map; offsets [E + 1] and the scratch `starts` [E + 1] and `sums` are in shared memory
__device__ void write_map(const moert_tiles& tiles, const int32_t* offsets, int E, int64_t R, int32_t* starts,
                          int32_t* sums) {
  const int64_t count = R / tiles.block_m + least<int64_t>(E, R);
  const int64_t begin = (int64_t)blockIdx.x * blockDim.x;
  if (begin >= count) return;
  for (int e = threadIdx.x; e < E; e += blockDim.x)
    starts[e] = e < tiles.first_expert ? 0 : (int32_t)cdiv<int64_t>(most(offsets[e + 1] - offsets[e], 0), tiles.block_m);
  __syncthreads();
  scan(starts, E, sums);
  for (int64_t tile = begin + threadIdx.x; tile < count; tile += (int64_t)gridDim.x * blockDim.x) {
    int low = 0, high = E;  // the last expert whose tiles start at or before this one
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (starts[middle] <= tile) low = middle;
      else high = middle;
    }
    const bool live = tile < starts[E];
    tiles.map[tile] = live ? low : -1;
    tiles.map[count + tile] = live ? (int32_t)(offsets[low] + (tile - starts[low]) * tiles.block_m) : starts[E];
    tiles.map[2 * count + tile] = live ? offsets[low + 1] : 0;
  }
  __syncthreads();  // before the next map overwrites the starts
}

// calls visit(slot, key) for each slot of a warp's run, 32 at a time; the key is E + 1 for lanes beyond the end
template <typename Visit>
__device__ __forceinline__ void visit_run(const Plan& plan, int64_t from, int64_t to, Visit visit) {
  const int lane = threadIdx.x & 31;
  for (int64_t s0 = from; s0 < to; s0 += 32 * kAhead) {
    int key[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int64_t s = s0 + 32 * j + lane;
      const int64_t id = s < to ? load_index(plan.ids, s, plan.id_bytes) : 0;
      key[j] = s >= to ? plan.E + 1 : id < 0 || id >= plan.E ? plan.E : (int)id;
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) visit(s0 + 32 * j + lane, key[j]);
  }
}

__global__ void __launch_bounds__(1024, 1) plan_kernel(const Plan plan) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int E = plan.E, keys = E + 1;
  MOERT_SHARED(int32_t, shared);
  int32_t* next = shared;  // [warps, keys]: a warp's number of slots per key, then the row of its next slot
  int32_t* offsets = next + warps * keys;  // [keys]
  int32_t* before = offsets + keys;        // [keys]: counts of earlier blocks
  int32_t* sums = before + keys;           // [kWarpSums]
  int32_t* mine = next + warp * keys;
  const int64_t begin = least(blockIdx.x * plan.block_slots, plan.R), end = least(begin + plan.block_slots, plan.R);
  const int64_t run = cdiv<int64_t>(end - begin, 32 * warps) * 32;
  const int64_t from = least(begin + warp * run, end), to = least(from + run, end);

  for (int i = threadIdx.x; i < (warps + 2) * keys; i += blockDim.x) next[i] = 0;
  __syncthreads();
  visit_run(plan, from, to, [&](int64_t, int key) {
    const unsigned same = __match_any_sync(kAllLanes, key);
    if (key < keys && (same & ((1u << lane) - 1)) == 0) mine[key] += __popc(same);
    __syncwarp();
  });
  __syncthreads();
  for (int e = threadIdx.x; e < keys; e += blockDim.x) {
    int32_t sum = 0;
    for (int w = 0; w < warps; ++w) {
      const int32_t n = next[w * keys + e];
      next[w * keys + e] = sum;
      sum += n;
    }
    if (plan.own_counts) plan.own_counts[(int64_t)blockIdx.x * keys + e] = sum;
    else if (!plan.counts) offsets[e] = sum;
  }
  if (plan.counts) {
    if (plan.own_counts) wait_for_all_blocks();
    const int rows_before = blockIdx.x * plan.rows_before;
    for (int i = threadIdx.x; i < plan.rows * plan.columns; i += blockDim.x) {
      const int32_t n = plan.counts[i];
      const int row = i / plan.columns, e = i - row * plan.columns;
      if (n == 0) continue;
      atomicAdd(&offsets[e], n);  // integers: any order gives the same sum
      if (row < rows_before) atomicAdd(&before[e], n);
    }
  }
  __syncthreads();
  scan(offsets, E, sums);
  const int32_t R = (int32_t)plan.R;
  for (int e = threadIdx.x; e < keys; e += blockDim.x) {
    offsets[e] = most(least(offsets[e], R), 0);  // counts of other ids produce a wrong plan, but no row is out of range
    const int32_t first = offsets[e] + before[e];
    for (int w = 0; w < warps; ++w) next[w * keys + e] += first;
    if (blockIdx.x == 0) plan.expert_offsets[e] = offsets[e];
  }
  __syncthreads();
  visit_run(plan, from, to, [&](int64_t s, int key) {
    const unsigned same = __match_any_sync(kAllLanes, key);
    const int rank = __popc(same & ((1u << lane) - 1));
    const bool live = key < keys;
    if (live) {
      const int32_t row = most(least(mine[key] + rank, R - 1), 0);
      plan.slot_row[s] = row;
      plan.row_slot[row] = (int32_t)s;
      plan.row_token[row] = (int32_t)((uint32_t)s / (uint32_t)plan.K);
    }
    __syncwarp();
    if (live && rank == 0) mine[key] += __popc(same);
    __syncwarp();
  });
#pragma unroll  // otherwise the arguments are copied to the stack for indexing
  for (int m = 0; m < MOERT_MAX_MAPS; ++m)
    if (m < plan.num_maps) write_map(plan.maps[m], offsets, E, plan.R, before, sums);
}

struct Maps {
  const int32_t* expert_offsets;
  int64_t R;
  int E, num_maps;
  moert_tiles maps[MOERT_MAX_MAPS];
};

__global__ void __launch_bounds__(256) map_kernel(const Maps maps) {
  MOERT_SHARED(int32_t, offsets);  // [E + 1]
  int32_t* starts = offsets + maps.E + 1;
  int32_t* sums = starts + maps.E + 1;
  for (int e = threadIdx.x; e <= maps.E; e += blockDim.x) offsets[e] = maps.expert_offsets[e];
  __syncthreads();
#pragma unroll  // otherwise the arguments are copied to the stack for indexing
  for (int m = 0; m < MOERT_MAX_MAPS; ++m)
    if (m < maps.num_maps) write_map(maps.maps[m], offsets, maps.E, maps.R, starts, sums);
}

static bool valid(const moert_tiles* maps, int num_maps, int64_t R) {
  if (num_maps < 0 || num_maps > MOERT_MAX_MAPS || (num_maps && !maps)) return false;
  for (int m = 0; m < num_maps; ++m)
    if (maps[m].block_m < 1 || maps[m].first_expert < 0 || (R && !maps[m].map)) return false;
  return true;
}

// as many warps as fit into the shared memory of a block, but no more than its slots keep busy
static int warps_for(int E, int64_t slots, int limit) {
  int warps = limit;
  while (warps > 8 && (warps + 2) * (E + 1) * 4 + kWarpSums * 4 > kSharedBytes) warps /= 2;
  return (int)most<int64_t>(least<int64_t>(warps, cdiv<int64_t>(slots, 64)), 4);
}

}  // namespace moert

MOERT_API int64_t moert_route_plan_workspace(int64_t R, int E) {
  using namespace moert;
  return R <= kOneBlock ? 0 : least<int64_t>(cdiv(R, kBlockSlots), kMaxBlocks) * (E + 1) * 4;
}

MOERT_API int moert_route_plan(const void* ids, int id_bytes, int64_t R, int E, int K, const int32_t* block_count,
                               int64_t block_slots, int32_t* expert_offsets, int32_t* row_token, int32_t* row_slot,
                               int32_t* slot_row, const moert_tiles* maps, int num_maps, void* workspace,
                               int64_t workspace_bytes, void* stream) {
  using namespace moert;
  if (R < 0 || E < 1 || (R && K < 1) || (id_bytes != 4 && id_bytes != 8) || !expert_offsets) return MOERT_EINVAL;
  if ((R && !(ids && row_token && row_slot && slot_row)) || !valid(maps, num_maps, R)) return MOERT_EINVAL;
  if (block_count && (block_slots < 1 || cdiv(R, block_slots) * E > kMaxGrid / 2)) return MOERT_EINVAL;
  if (E > kMaxExperts || R > kMaxGrid) return MOERT_EUNSUPPORTED;
  Plan plan{};
  plan.ids = ids, plan.id_bytes = id_bytes, plan.E = E, plan.K = K, plan.R = R;
  plan.expert_offsets = expert_offsets, plan.row_token = row_token, plan.row_slot = row_slot, plan.slot_row = slot_row;
  plan.num_maps = num_maps;
  for (int m = 0; m < num_maps; ++m) plan.maps[m] = maps[m];
  int grid = 1, limit = 16;
  if (R <= kOneBlock) {
    plan.block_slots = R;
    limit = 32;
  } else if (block_count) {
    plan.rows = (int)cdiv(R, block_slots);
    plan.rows_before = cdiv(plan.rows, kMaxCountedBlocks);
    plan.block_slots = plan.rows_before * block_slots;
    plan.counts = block_count, plan.columns = E;
    grid = cdiv(plan.rows, plan.rows_before);
  } else {
    int count = 0;
    if (const int code = processors(&count)) return code;
    if (!workspace || workspace_bytes < moert_route_plan_workspace(R, E)) return MOERT_EWORKSPACE;
    grid = (int)least<int64_t>(cdiv(R, kBlockSlots), least(kMaxBlocks, count));
    plan.block_slots = cdiv<int64_t>(R, 32 * grid) * 32;
    plan.rows = grid, plan.rows_before = 1, plan.columns = E + 1;
    plan.counts = plan.own_counts = static_cast<int32_t*>(workspace);
  }
  const int warps = warps_for(E, plan.block_slots, limit);
  const size_t shared_bytes = ((warps + 2) * (E + 1) + kWarpSums) * sizeof(int32_t);
  if (plan.own_counts) {
    const int code = MOERT_LAUNCH_TOGETHER(plan_kernel, grid, 32 * warps, shared_bytes, stream, plan);
    if (code != cudaErrorCooperativeLaunchTooLarge && code != cudaErrorNotSupported) return code;
    // this process may use fewer multiprocessors than the GPU has (MPS, green contexts): use one block
    plan.counts = plan.own_counts = nullptr, plan.block_slots = R, grid = 1;
  }
  return MOERT_LAUNCH(plan_kernel, grid, 32 * warps, shared_bytes, stream, plan);
}

MOERT_API int moert_tile_map(const int32_t* expert_offsets, int64_t R, int E, const moert_tiles* maps, int num_maps,
                             void* stream) {
  using namespace moert;
  if (R < 0 || E < 1 || !expert_offsets || !valid(maps, num_maps, R)) return MOERT_EINVAL;
  if (E > kMaxExperts || R > kMaxGrid) return MOERT_EUNSUPPORTED;
  Maps all{expert_offsets, R, E, num_maps, {}};
  int64_t tiles = 0;
  for (int m = 0; m < num_maps; ++m) {
    all.maps[m] = maps[m];
    tiles = most(tiles, R / maps[m].block_m + least<int64_t>(E, R));
  }
  if (tiles == 0) return MOERT_OK;
  const size_t shared_bytes = (2 * (E + 1) + kWarpSums) * sizeof(int32_t);
  return MOERT_LAUNCH(map_kernel, least<int64_t>(cdiv<int64_t>(tiles, 256), kMaxBlocks), 256, shared_bytes, stream,
                      all);
}
