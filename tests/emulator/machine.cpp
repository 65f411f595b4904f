#include "machine.h"

#include <algorithm>
#include <cstring>

namespace emulator {
namespace {

constexpr int kLongestTurn = 48;   // instructions of a warp before another one runs
constexpr int kMostSpins = 20000;  // failed waits without any progress: a deadlock

std::string hexadecimal(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

}  // namespace

void Clock::join(const Clock& other) {
  for (size_t i = 0; i < at.size(); ++i) at[i] = std::max(at[i], other.at[i]);
}

void Knowledge::join(const Knowledge& other) {
  happened.join(other.happened);
  fenced.join(other.fenced);
}

// ---- warps

Warp::Warp(Block& its_block, int its_number)
    : block(its_block),
      machine(its_block.machine),
      program(its_block.machine.program),
      number(its_number),
      registers(static_cast<size_t>(program.registers) * kLanes),
      in_flight(program.registers),
      in_use(program.registers),
      written_at(program.registers) {
  for (uint64_t& value : registers) value = ~uint64_t{0};
  const int threads = std::min(machine.threads() - number * kLanes, kLanes);
  alive_ = threads == kLanes ? ~0u : (1u << threads) - 1;
  tick();
}

void Warp::fail(const std::string& what) const {
  std::string text = what;
  if (current_ != nullptr) text += ". At " + program.place(*current_);
  text += "; block " + std::to_string(block.number) + ", warp " + std::to_string(number);
  throw std::runtime_error(text);
}

void Warp::run(int steps) {
  yields = false;
  while (steps-- > 0 && alive_ != 0 && !waits && !yields) {
    uint32_t lowest = ~0u;
    uint32_t mask = 0;
    for_lanes(alive_, [&](int lane) { lowest = std::min(lowest, pc_[lane]); });
    for_lanes(alive_, [&](int lane) { mask |= uint32_t{pc_[lane] == lowest} << lane; });
    if (lowest >= program.instructions.size()) {
      leave(mask);
      continue;
    }
    const Instruction& at = program.instructions[lowest];
    current_ = &at;
    for_lanes(mask, [&](int lane) { pc_[lane] = lowest + 1; });
    if (at.predicate >= 0) {
      const uint64_t* values = &registers[static_cast<size_t>(at.predicate) * kLanes];
      uint32_t allowed = 0;
      for (int lane = 0; lane < kLanes; ++lane)
        allowed |= uint32_t{(values[lane] & 1) != uint64_t{at.predicate_negated}} << lane;
      mask &= allowed;
    }
    if (mask == 0) continue;
    ++step;
    machine.launch.executed += static_cast<uint64_t>(__builtin_popcount(mask));
    at.run(*this, at, mask);
  }
}

void Warp::jump(uint32_t mask, uint32_t target) {
  for_lanes(mask, [&](int lane) { pc_[lane] = target; });
}

void Warp::leave(uint32_t mask) {
  alive_ &= ~mask;
  if (alive_ == 0 && (!open_products.empty() || !product_groups.empty()))
    fail("The warp ends before its wgmma");
  if (alive_ == 0 && (!open_stores.empty() || !store_groups.empty()))
    fail("The warp ends before shared memory was read by its bulk stores");
}

Warp::Values Warp::read(const Operand& operand) {
  static const uint64_t kZero = 0;
  switch (operand.kind) {
    case Operand::reg:
      if (program.awaited[operand.index] && in_flight[operand.index] != 0)
        fail(operand.name + " is read while a wgmma in flight writes it");
      return {&registers[static_cast<size_t>(operand.index) * kLanes], 1};
    case Operand::immediate:
    case Operand::label:
      return {&operand.value, 0};
    case Operand::special:
      return special(operand);
    case Operand::sink:
      return {&kZero, 0};
    default:
      fail("An operand that is no single value");
  }
}

Warp::Values Warp::special(const Operand& operand) {
  std::array<uint64_t, kLanes>& values = special_[next_special_++ % special_.size()];
  const uint32_t* size = machine.launch.block;
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint32_t thread = static_cast<uint32_t>(number * kLanes + lane);
    const uint32_t position[3] = {thread % size[0], thread / size[0] % size[1],
                                  thread / size[0] / size[1]};
    switch (static_cast<Special>(operand.index)) {
      case Special::tid: values[lane] = position[operand.axis]; break;
      case Special::ntid: values[lane] = size[operand.axis]; break;
      case Special::ctaid: values[lane] = block.index[operand.axis]; break;
      case Special::nctaid: values[lane] = machine.launch.grid[operand.axis]; break;
      case Special::laneid: values[lane] = static_cast<uint64_t>(lane); break;
      case Special::warpid: values[lane] = static_cast<uint64_t>(number); break;
      case Special::clock: values[lane] = step; break;
    }
  }
  return {values.data(), 1};
}

uint64_t Warp::read_uniform(const Operand& operand, uint32_t mask) {
  const Values values = read(operand);
  const uint64_t first = values[__builtin_ctz(mask)];
  for_lanes(mask, [&](int lane) {
    if (values[lane] != first) fail("The lanes of the warp disagree on an operand");
  });
  return first;
}

uint64_t* Warp::write(const Operand& operand) {
  if (operand.kind == Operand::sink) return sink_.data();
  if (operand.kind != Operand::reg) fail("A target that is no register");
  if (program.awaited[operand.index]) {
    if (in_flight[operand.index] != 0 || in_use[operand.index] != 0)
      fail(operand.name + " is written while a wgmma in flight uses it");
    written_at[operand.index] = step;
  }
  return raw(operand);
}

uint64_t* Warp::raw(const Operand& operand) {
  if (operand.kind != Operand::reg) fail("An operand that is no register");
  return &registers[static_cast<size_t>(operand.index) * kLanes];
}

uint64_t Warp::address(const Operand& operand, int lane) {
  return read(operand.parts[0])[lane] + static_cast<uint64_t>(operand.offset);
}

// ---- shared memory

SharedMemory::SharedMemory(Block& block, int bytes, int warps)
    : block_(block),
      warps_(warps),
      bytes_(bytes, kPoison),
      writers_(bytes),
      readers_(static_cast<size_t>(bytes) * warps) {}

uint8_t* SharedMemory::at(const Warp& warp, uint64_t address, uint64_t size, int align) {
  address &= 0xFFFFFFFF;
  if (address < kSharedBase || address + size > kSharedBase + bytes_.size())
    warp.fail("Shared memory has " + std::to_string(bytes_.size()) + " bytes, but " +
              std::to_string(size) + " at " + std::to_string(int64_t(address - kSharedBase)) +
              " are accessed");
  if (address % align != 0)
    warp.fail("Address " + hexadecimal(address) + " is not a multiple of " +
              std::to_string(align));
  return &bytes_[address - kSharedBase];
}

void SharedMemory::check_read(Warp& warp, uint64_t address, uint64_t size, bool is_async) {
  at(warp, address, size, 1);
  const size_t begin = (address & 0xFFFFFFFF) - kSharedBase;
  const Knowledge& known = warp.knowledge;
  for (size_t i = begin; i < begin + size; ++i) {
    const Writer& writer = writers_[i];
    if (writer.time == 0) continue;
    if (known.happened.at[writer.who] < writer.time)
      warp.fail("Race: byte " + std::to_string(i) + " of shared memory is read, and no barrier" +
                " orders the write of " + name_of(writer.who));
    if (is_async && writer.is_generic && known.fenced.at[writer.who] < writer.time)
      warp.fail("Byte " + std::to_string(i) + " of shared memory is read asynchronously without a" +
                " fence.proxy.async after the write of " + name_of(writer.who));
  }
}

void SharedMemory::check_write(Warp& warp, uint64_t address, uint64_t size, bool is_same) {
  at(warp, address, size, 1);
  const size_t begin = (address & 0xFFFFFFFF) - kSharedBase;
  const Clock& known = warp.knowledge.happened;
  for (size_t i = begin; i < begin + size; ++i) {
    const Writer& writer = writers_[i];
    if (!is_same && known.at[writer.who] < writer.time)
      warp.fail("Race: byte " + std::to_string(i) + " of shared memory is written, and no barrier" +
                " orders the earlier write of " + name_of(writer.who));
    const uint32_t* readers = &readers_[i * warps_];
    for (int other = 0; other < warps_; ++other)
      if (!is_same && known.at[other] < readers[other])
        warp.fail("Race: byte " + std::to_string(i) + " of shared memory is written, and no" +
                  " barrier orders the earlier read of warp " + std::to_string(other));
  }
  block_.check_unread(warp, address, size);
}

std::string SharedMemory::name_of(int who) {
  return who == kEngine ? "an asynchronous copy" : "warp " + std::to_string(who);
}

void SharedMemory::note_read(Warp& warp, uint64_t address, uint64_t size) {
  const size_t begin = (address & 0xFFFFFFFF) - kSharedBase;
  for (size_t i = begin; i < begin + size; ++i) readers_[i * warps_ + warp.number] = warp.time();
}

void SharedMemory::note_write(Warp& warp, uint64_t address, uint64_t size, bool is_generic) {
  const size_t begin = (address & 0xFFFFFFFF) - kSharedBase;
  const Writer writer{static_cast<uint8_t>(warp.number), is_generic, false, warp.time()};
  std::fill_n(writers_.begin() + begin, size, writer);
}

void SharedMemory::note_engine_write(uint64_t address, uint64_t size, uint32_t time) {
  const size_t begin = (address & 0xFFFFFFFF) - kSharedBase;
  std::fill_n(writers_.begin() + begin, size, Writer{kEngine, false, false, time});
}

void SharedMemory::load(Warp& warp, uint64_t address, void* to, int size) {
  const uint8_t* from = at(warp, address, size, size);
  check_read(warp, address, size, false);
  note_read(warp, address, size);
  std::memcpy(to, from, size);
}

void SharedMemory::store(Warp& warp, uint64_t address, const void* from, int size) {
  uint8_t* to = at(warp, address, size, size);
  // warps that compute the same write it to one place, which no order changes
  const bool is_same = std::memcmp(to, from, size) == 0;
  check_write(warp, address, size, is_same);
  note_write(warp, address, size, true);
  std::memcpy(to, from, size);
}

void SharedMemory::load_atomic(Warp& warp, uint64_t address, void* to, int size) {
  const uint8_t* from = at(warp, address, size, size);
  const size_t begin = (address & 0xFFFFFFFF) - kSharedBase;
  if (!writers_[begin].is_atomic) check_read(warp, address, size, false);
  std::memcpy(to, from, size);
}

void SharedMemory::store_atomic(Warp& warp, uint64_t address, const void* from, int size) {
  uint8_t* to = at(warp, address, size, size);
  const size_t begin = (address & 0xFFFFFFFF) - kSharedBase;
  if (!writers_[begin].is_atomic) check_write(warp, address, size);
  const Writer writer{static_cast<uint8_t>(warp.number), true, true, warp.time()};
  std::fill_n(writers_.begin() + begin, size, writer);
  std::memcpy(to, from, size);
}

// ---- blocks

Block::Block(Machine& its_machine, std::array<uint32_t, 3> its_index, int its_number)
    : machine(its_machine), index(its_index), number(its_number) {
  const int count = (machine.threads() + kLanes - 1) / kLanes;
  if (count > kMaxWarps) throw std::runtime_error("A block of more than 32 warps");
  int bytes = machine.program.static_shared;
  if (bytes != 0 && machine.launch.shared_bytes != 0) bytes = (bytes + 1023) / 1024 * 1024;
  bytes += machine.launch.shared_bytes;
  shared = std::make_unique<SharedMemory>(*this, bytes, count);
  for (int i = 0; i < count; ++i) warps.push_back(std::make_unique<Warp>(*this, i));
}

uint32_t Block::random() { return static_cast<uint32_t>(machine.generator()); }

void Block::run() {
  std::vector<Warp*> ready;
  while (true) {
    ready.clear();
    bool is_done = true;
    for (const auto& warp : warps) {
      if (warp->is_done()) continue;
      is_done = false;
      if (!warp->waits) ready.push_back(warp.get());
    }
    if (is_done) break;
    if (ready.empty()) {
      for (const auto& warp : warps)
        if (!warp->is_done()) warp->fail("Deadlock: every warp waits at a barrier");
    }
    ready[random() % ready.size()]->run(1 + random() % kLongestTurn);
    if (machine.arrival() == Arrival::random && !loads.empty() && chance(4)) land_one(random());
  }
  if (!loads.empty()) warps[loads[0].warp]->fail("The block ends before its bulk loads");
  for (const auto& warp : warps)
    if (warp->number % 4 != 0 && warp->products != warps[warp->number / 4 * 4]->products)
      warp->fail("The warps of a warpgroup issue different numbers of wgmma");
}

void Block::arrive(Warp& warp, int barrier, int threads, uint32_t mask) {
  if (mask != warp.alive()) warp.fail("A barrier that a part of the warp's threads reaches");
  Named& named = named_[barrier];
  const int expected = threads != 0 ? threads : machine.threads();
  if (named.waiting.empty()) {
    named.threads = 0;
    named.expected = expected;
    named.knowledge = {};
  }
  if (named.expected != expected)
    warp.fail("Barrier " + std::to_string(barrier) + " is passed by " +
              std::to_string(named.expected) + " threads and by " + std::to_string(expected));
  named.threads += kLanes;
  named.waiting.push_back(&warp);
  named.knowledge.join(warp.knowledge);
  warp.waits = true;
  if (named.threads < expected) return;
  for (Warp* one : named.waiting) {
    one->waits = false;
    one->knowledge.join(named.knowledge);
    one->tick();
  }
  named.waiting.clear();
  progress();
}

void Block::check_unread(Warp& warp, uint64_t address, uint64_t size) {
  const uint64_t begin = address & 0xFFFFFFFF;
  const auto overlaps = [&](const Reading& one) {
    return begin < one.begin + one.size && one.begin < begin + size;
  };
  for (const auto& other : warps) {
    for (const auto& group : other->product_groups)
      for (const Product& product : group)
        for (const Reading& one : product.readings)
          if (overlaps(one)) warp.fail("Shared memory is written while a wgmma still reads it");
    for (const Product& product : other->open_products)
      for (const Reading& one : product.readings)
        if (overlaps(one)) warp.fail("Shared memory is written while a wgmma still reads it");
    for (const auto& group : other->store_groups)
      for (const BulkCopy& copy : group)
        if (overlaps({copy.shared, copy.bytes}))
          warp.fail("Shared memory is written while a bulk store still reads it");
  }
}

void Block::spin(Warp& warp) {
  warp.yields = true;
  if (++spins_ > kMostSpins) warp.fail("Deadlock: a barrier's phase never ends");
}

// ---- the machine and its global memory

Machine::Machine(const Program& its_program, Launch& its_launch)
    : program(its_program), launch(its_launch), generator(its_launch.seed) {
  if (program.threads != 0 && program.threads != threads())
    throw std::runtime_error(program.name + " needs blocks of " + std::to_string(program.threads) +
                             " threads, not " + std::to_string(threads()));
  parameters.assign(program.parameter_bytes, 0);
  for (size_t i = 0; i < program.parameters.size(); ++i) {
    const Parameter& parameter = program.parameters[i];
    std::memcpy(&parameters[parameter.offset], &launch.arguments[i],
                std::min<size_t>(parameter.size, sizeof(uint64_t)));
  }
  for (int i = 0; i < launch.region_count; ++i)
    accesses_.emplace_back(launch.regions[i].bytes);
}

int Machine::threads() const {
  return static_cast<int>(launch.block[0] * launch.block[1] * launch.block[2]);
}

void Machine::run() {
  launch.executed = 0;
  const int count = static_cast<int>(launch.grid[0] * launch.grid[1] * launch.grid[2]);
  std::vector<int> order(count);
  for (int i = 0; i < count; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), generator);
  for (const int number : order) {
    const uint32_t n = static_cast<uint32_t>(number);
    const uint32_t rows = n / launch.grid[0];
    Block block(*this, {n % launch.grid[0], rows % launch.grid[1], rows / launch.grid[1]}, number);
    block.run();
  }
}

Machine::Access* Machine::find(Warp& warp, uint64_t address, int size, const char* what) {
  if (address % size != 0)
    warp.fail(std::string(what) + " of " + std::to_string(size) + " bytes at " +
              hexadecimal(address) + ", which is not a multiple");
  for (int i = 0; i < launch.region_count; ++i) {
    const Region& region = launch.regions[i];
    if (address >= region.begin && address + size <= region.begin + region.bytes)
      return &accesses_[i][address - region.begin];
  }
  std::string nearest;
  uint64_t distance = ~uint64_t{0};
  for (int i = 0; i < launch.region_count; ++i) {
    const Region& region = launch.regions[i];
    const uint64_t end = region.begin + region.bytes;
    const uint64_t gap = address >= end ? address - end : region.begin - address;
    if (gap >= distance) continue;
    distance = gap;
    nearest = std::to_string(gap) + (address >= end ? " bytes behind" : " bytes before") +
              " a tensor of " + std::to_string(region.bytes);
  }
  warp.fail(std::string(what) + " outside of every tensor, " + nearest);
}

void Machine::load(Warp& warp, uint64_t address, void* to, int size, bool is_atomic) {
  Access* access = find(warp, address, size, "A load");
  const int32_t self = warp.block.number + 1;
  for (int i = 0; i < size; ++i) {
    Access& one = access[i];
    const bool is_other = one.writer != 0 && one.writer != self;
    if (is_other && !(one.is_atomic && is_atomic))
      warp.fail("Race: a load of what block " + std::to_string(one.writer - 1) + " writes");
    const bool is_late = one.writer == self && one.warp != warp.number &&
                         warp.knowledge.happened.at[one.warp] < one.time;
    if (is_late && !(one.is_atomic && is_atomic))
      warp.fail("Race: a load of what warp " + std::to_string(one.warp) +
                " writes, and no barrier orders them");
    if (!is_atomic) one.reader = one.reader == 0 || one.reader == self ? self : -1;
  }
  std::memcpy(to, reinterpret_cast<const void*>(address), size);
}

void Machine::store(Warp& warp, uint64_t address, const void* from, int size, bool is_atomic) {
  Access* access = find(warp, address, size, "A store");
  const int32_t self = warp.block.number + 1;
  for (int i = 0; i < size; ++i) {
    Access& one = access[i];
    const bool is_other = one.writer != 0 && one.writer != self;
    if (is_other && !(one.is_atomic && is_atomic))
      warp.fail("Race: a store to what block " + std::to_string(one.writer - 1) + " writes");
    if (one.reader != 0 && one.reader != self)
      warp.fail("Race: a store to what another block reads");
    const bool is_late = one.writer == self && one.warp != warp.number &&
                         warp.knowledge.happened.at[one.warp] < one.time;
    if (is_late && !(one.is_atomic && is_atomic))
      warp.fail("Race: a store to what warp " + std::to_string(one.warp) +
                " writes, and no barrier orders them");
    one.writer = self;
    one.warp = static_cast<uint16_t>(warp.number);
    one.time = warp.time();
    one.is_atomic = is_atomic;
  }
  std::memcpy(reinterpret_cast<void*>(address), from, size);
}

}  // namespace emulator
