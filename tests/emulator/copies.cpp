// Asynchronous copies and the barriers that count them.
#include <algorithm>
#include <cstring>

#include "opcodes.h"

namespace emulator {
namespace {

bool comes_early(Warp& warp) {
  switch (warp.machine.arrival()) {
    case Arrival::early: return true;
    case Arrival::late: return false;
    default: return warp.block.chance(2);
  }
}

// ---- cp.async: each lane copies up to 16 bytes from global to shared memory

void land(Warp& warp, int lane, const Copy& copy) {
  uint8_t bytes[16] = {};
  if (copy.valid > 0) warp.machine.load(warp, lane, copy.from, bytes, copy.valid);
  std::memcpy(warp.block.shared->at(warp, copy.to, copy.size, copy.size), bytes, copy.size);
  warp.block.shared->note_write(warp, lane, copy.to, copy.size, warp.machine.launch.fenced != 0);
}

}  // namespace

// cp.async [to], [from], size[, valid]: the bytes behind `valid` are zeros.
void copy_async(Warp& warp, const Instruction& at, uint32_t mask) {
  const int size = static_cast<int>(warp.read_uniform(at.operands[2], mask));
  const bool has_valid = at.operands.size() > 3;
  const Warp::Values valid = warp.read(at.operands[has_valid ? 3 : 2]);
  for_lanes(mask, [&](int lane) {
    Copy copy{warp.address(at.operands[0], lane), warp.address(at.operands[1], lane), size,
              static_cast<int>(valid[lane] & 0xFFFFFFFF)};
    if (copy.valid > size) warp.fail("cp.async of more bytes than its size");
    uint8_t* target = warp.block.shared->at(warp, copy.to, size, size);
    warp.block.shared->check_write(warp, lane, copy.to, size);
    warp.block.shared->note_write(warp, lane, copy.to, size, true);
    if (comes_early(warp)) {
      land(warp, lane, copy);
      return;
    }
    std::memset(target, kPoison, size);
    warp.open_copies[lane].push_back(copy);
  });
}

void copy_commit(Warp& warp, const Instruction&, uint32_t mask) {
  for_lanes(mask, [&](int lane) {
    warp.copy_groups[lane].push_back(std::move(warp.open_copies[lane]));
    warp.open_copies[lane].clear();
  });
}

// cp.async.wait_group n: all but the last n groups have landed; wait_all: everything.
void copy_wait(Warp& warp, const Instruction& at, uint32_t mask) {
  const bool is_all = at.has("wait_all");
  const size_t left = is_all ? 0 : warp.read_uniform(at.operands[0], mask);
  for_lanes(mask, [&](int lane) {
    auto& groups = warp.copy_groups[lane];
    while (groups.size() > left) {
      for (const Copy& copy : groups.front()) land(warp, lane, copy);
      groups.pop_front();
    }
    if (!is_all) return;
    for (const Copy& copy : warp.open_copies[lane]) land(warp, lane, copy);
    warp.open_copies[lane].clear();
  });
}

// ---- cp.async.bulk.tensor: one thread moves a box of a tensor

namespace {

uint64_t box_bytes(const TensorMap& map) {
  uint64_t bytes = map.element_bytes;
  for (int i = 0; i < map.rank; ++i) bytes *= map.box[i];
  return bytes;
}

// Where a byte of a box lies: rows of the swizzle's width have their 16-byte pieces exchanged.
uint64_t swizzled(const TensorMap& map, uint64_t address) {
  switch (map.swizzle_bytes) {
    case 128: return address ^ ((address >> 7 & 7) << 4);
    case 64: return address ^ ((address >> 7 & 3) << 4);
    case 32: return address ^ ((address >> 7 & 1) << 4);
    default: return address;
  }
}

// Calls function(offset in the box, global address or 0 if it lies outside) for each element.
template <class Function>
void for_elements(const BulkCopy& copy, Function function) {
  const TensorMap& map = *copy.map;
  const uint64_t count = copy.bytes / map.element_bytes;
  for (uint64_t i = 0; i < count; ++i) {
    uint64_t rest = i;
    uint64_t address = map.base;
    bool is_inside = true;
    for (int axis = 0; axis < map.rank; ++axis) {
      const int64_t position = int64_t{copy.start[axis]} + static_cast<int64_t>(rest % map.box[axis]);
      rest /= map.box[axis];
      is_inside &= position >= 0 && position < static_cast<int64_t>(map.sizes[axis]);
      const uint64_t stride = axis == 0 ? map.element_bytes : map.strides[axis];
      address += static_cast<uint64_t>(position) * stride;
    }
    function(i * map.element_bytes, is_inside ? address : 0);
  }
}

BulkCopy decode(Warp& warp, const Instruction& at, const Operand& tensor, const Operand& shared,
                int lane) {
  BulkCopy copy{};
  copy.at = &at;
  const uint64_t handle = warp.address(tensor, lane) - kParameterBase;
  if (handle + 8 > warp.machine.parameters.size())
    warp.fail("A tensor map that is no parameter of the kernel");
  uint64_t number = 0;
  std::memcpy(&number, &warp.machine.parameters[handle], sizeof number);
  if (number >= static_cast<uint64_t>(warp.machine.launch.map_count))
    warp.fail("A parameter that is no tensor map");
  copy.map = &warp.machine.launch.maps[number];
  const std::vector<Operand>& start = tensor.parts[1].parts;
  if (static_cast<int>(start.size()) != copy.map->rank)
    warp.fail("A tensor map of " + std::to_string(copy.map->rank) + " dimensions with " +
              std::to_string(start.size()) + " coordinates");
  for (size_t i = 0; i < start.size(); ++i)
    copy.start[i] = static_cast<int32_t>(warp.read_lane(start[i], lane));
  copy.shared = warp.address(shared, lane) & 0xFFFFFFFF;
  copy.bytes = box_bytes(*copy.map);
  copy.warp = warp.number;
  const int align = std::max(copy.map->swizzle_bytes * 8, 128);
  warp.block.shared->at(warp, copy.shared, copy.bytes, align);
  return copy;
}

// Reads shared memory into the tensor.
void land_store(Warp& warp, const BulkCopy& copy) {
  uint8_t* bytes = warp.block.shared->at(warp, copy.shared, copy.bytes, 1);
  for_elements(copy, [&](uint64_t offset, uint64_t address) {
    if (address == 0) return;
    const uint64_t from = swizzled(*copy.map, copy.shared + offset) - copy.shared;
    warp.machine.store(warp, kSeveral, address, bytes + from, copy.map->element_bytes);
  });
}

MemoryBarrier& barrier_at(Warp& warp, uint64_t address) {
  const auto found = warp.block.barriers.find(address & 0xFFFFFFFF);
  if (found == warp.block.barriers.end())
    warp.fail("An mbarrier that was not initialized, or is invalid");
  return found->second;
}

}  // namespace

// Load:  cp.async.bulk.tensor.Nd.shared.global [to], [map, {start}], [mbarrier]
// Store: cp.async.bulk.tensor.Nd.global.shared [map, {start}], [from]
void bulk_copy(Warp& warp, const Instruction& at, uint32_t mask) {
  const bool is_load = at.has("mbarrier::complete_tx::bytes");
  if (!is_load && !at.has("bulk_group"))
    warp.fail("The emulator does not know this form of cp.async.bulk.tensor");
  for_lanes(mask, [&](int lane) {
    Block& block = warp.block;
    if (!is_load) {
      BulkCopy copy = decode(warp, at, at.operands[0], at.operands[1], lane);
      block.shared->check_read(warp, kSeveral, copy.shared, copy.bytes, true);
      if (comes_early(warp)) land_store(warp, copy);
      else warp.open_stores.push_back(copy);
      return;
    }
    BulkCopy copy = decode(warp, at, at.operands[1], at.operands[0], lane);
    copy.barrier = warp.address(at.operands[2], lane) & 0xFFFFFFFF;
    barrier_at(warp, copy.barrier);
    block.shared->check_write(warp, kSeveral, copy.shared, copy.bytes);
    copy.time = ++block.engine_time;
    block.shared->note_engine_write(copy.shared, copy.bytes, copy.time);
    std::memset(block.shared->at(warp, copy.shared, copy.bytes, 1), kPoison, copy.bytes);
    if (comes_early(warp)) block.land(copy);
    else block.loads.push_back(copy);
  });
}

void bulk_commit(Warp& warp, const Instruction&, uint32_t) {
  warp.store_groups.push_back(std::move(warp.open_stores));
  warp.open_stores.clear();
}

// cp.async.bulk.wait_group[.read] n: all but the last n groups have read shared memory.
void bulk_wait(Warp& warp, const Instruction& at, uint32_t mask) {
  const size_t left = warp.read_uniform(at.operands[0], mask);
  while (warp.store_groups.size() > left) {
    for (const BulkCopy& copy : warp.store_groups.front()) {
      land_store(warp, copy);
      warp.block.shared->note_read(warp, kSeveral, copy.shared, copy.bytes);
    }
    warp.store_groups.pop_front();
  }
}

void Block::land(const BulkCopy& copy) {
  Warp& warp = *warps[copy.warp];
  uint8_t* bytes = shared->at(warp, copy.shared, copy.bytes, 1);
  const TensorMap& map = *copy.map;
  for_elements(copy, [&](uint64_t offset, uint64_t address) {
    uint8_t* to = bytes + (swizzled(map, copy.shared + offset) - copy.shared);
    if (address != 0) machine.load(warp, kSeveral, address, to, map.element_bytes);
    else std::memset(to, map.fill_nan ? kPoison : 0, map.element_bytes);
  });
  MemoryBarrier& barrier = barrier_at(warp, copy.barrier);
  barrier.bytes -= static_cast<int64_t>(copy.bytes);
  uint32_t& seen = barrier.arriving.happened.at[kEngine];
  seen = std::max(seen, copy.time);
  update(barrier);
  progress();
}

void Block::land_one(uint32_t which) {
  const size_t i = which % loads.size();
  const BulkCopy copy = loads[i];
  loads.erase(loads.begin() + static_cast<int64_t>(i));
  land(copy);
}

// A commit arrives at its barrier.
void Block::complete_tensor(uint64_t address, Warp& warp) {
  MemoryBarrier& barrier = barrier_at(warp, address);
  if (--barrier.pending < 0) warp.fail("More arrivals at an mbarrier than it expects");
  uint32_t& seen = barrier.arriving.happened.at[kTensor];
  seen = std::max(seen, tensor_done);
  update(barrier);
}

bool Block::deliver(uint64_t barrier) {
  const auto is_commit = [&](const TensorProduct& work) {
    return work.columns == 0 && work.barrier == barrier;
  };
  if (std::any_of(tensor_work.begin(), tensor_work.end(), is_commit)) {
    advance_tensor();
    return true;
  }
  std::vector<uint32_t> fitting;
  for (size_t i = 0; i < loads.size(); ++i)
    if (loads[i].barrier == barrier) fitting.push_back(static_cast<uint32_t>(i));
  if (fitting.empty()) return false;
  land_one(fitting[random() % fitting.size()]);
  return true;
}

// A phase ends when all have arrived and all bytes have come.
void Block::update(MemoryBarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.phase ^= 1;
  barrier.pending = barrier.expected;
  barrier.completed = barrier.arriving;
  barrier.arriving = {};
  progress();
}

// ---- mbarrier

void barrier_init(Warp& warp, const Instruction& at, uint32_t mask) {
  for_lanes(mask, [&](int lane) {
    const uint64_t address = warp.address(at.operands[0], lane) & 0xFFFFFFFF;
    warp.block.shared->at(warp, address, 8, 8);
    warp.block.shared->check_write(warp, lane, address, 8);
    warp.block.shared->note_write(warp, lane, address, 8, true);
    if (warp.block.barriers.count(address) != 0)
      warp.fail("An mbarrier is initialized where one is");
    MemoryBarrier barrier;
    barrier.expected = static_cast<uint32_t>(warp.read_lane(at.operands[1], lane));
    barrier.pending = barrier.expected;
    warp.block.barriers[address] = barrier;
  });
}

void barrier_invalidate(Warp& warp, const Instruction& at, uint32_t mask) {
  for_lanes(mask, [&](int lane) {
    const uint64_t address = warp.address(at.operands[0], lane) & 0xFFFFFFFF;
    barrier_at(warp, address);
    warp.block.shared->check_write(warp, lane, address, 8);
    for (const BulkCopy& copy : warp.block.loads)
      if (copy.barrier == address) warp.fail("An mbarrier is invalidated before its bulk loads");
    warp.block.barriers.erase(address);
    warp.block.shared->note_write(warp, lane, address, 8, true);
  });
}

// mbarrier.arrive[.expect_tx] state, [address][, bytes or count]
void barrier_arrive(Warp& warp, const Instruction& at, uint32_t mask) {
  const bool has_bytes = at.has("expect_tx");
  const bool arrives = at.has("arrive");
  const size_t place = arrives ? 1 : 0;  // of the address
  for_lanes(mask, [&](int lane) {
    const uint64_t address = warp.address(at.operands[place], lane);
    MemoryBarrier& barrier = barrier_at(warp, address);
    warp.block.shared->check_read(warp, lane, address, 8, false);
    const bool has_last = at.operands.size() > place + 1;
    const int64_t last =
        has_last ? static_cast<int32_t>(warp.read_lane(at.operands[place + 1], lane)) : 1;
    if (has_bytes) barrier.bytes += last;
    if (arrives) {
      barrier.pending -= has_bytes ? 1 : last;
      if (barrier.pending < 0) warp.fail("More arrivals at an mbarrier than it expects");
      barrier.arriving.join(warp.knowledge);
    }
    warp.block.update(barrier);
  });
  warp.tick();
  warp.block.progress();
}

// mbarrier.try_wait.parity p, [address], parity: whether the phase of that parity has ended. What
// happened before it has then happened before what follows. It may give up at any time.
void barrier_wait(Warp& warp, const Instruction& at, uint32_t mask) {
  if (!at.has("parity")) warp.fail("The emulator knows mbarrier waits with a parity only");
  if (warp.machine.arrival() != Arrival::early && warp.block.chance(2)) {
    uint64_t* gives_up = warp.write(at.operands[0]);
    for_lanes(mask, [&](int lane) { gives_up[lane] = 0; });
    warp.yields = true;
    return;
  }
  bool is_over = true;
  std::array<bool, kLanes> result{};
  for_lanes(mask, [&](int lane) {
    const uint64_t address = warp.address(at.operands[1], lane) & 0xFFFFFFFF;
    const uint32_t parity = static_cast<uint32_t>(warp.read_lane(at.operands[2], lane)) & 1;
    MemoryBarrier& barrier = barrier_at(warp, address);
    warp.block.shared->check_read(warp, lane, address, 8, false);
    while (barrier.phase == parity && warp.block.deliver(address)) {
    }
    result[lane] = barrier.phase != parity;
    if (result[lane]) warp.knowledge.join(barrier.completed);
    is_over &= result[lane];
  });
  uint64_t* p = warp.write(at.operands[0]);
  for_lanes(mask, [&](int lane) { p[lane] = result[lane]; });
  if (!is_over) warp.block.spin(warp);
}

}  // namespace emulator
