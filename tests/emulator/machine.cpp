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
  if (alive_ == 0 && (!tensor_loads.empty() || !tensor_stores.empty()))
    fail("The warp ends before its tcgen05.ld or tcgen05.st");
  if (alive_ == 0 && (!open_stores.empty() || !store_groups.empty()))
    fail("The warp ends before shared memory was read by its bulk stores");
}

Warp::Values Warp::read(const Operand& operand) {
  static const uint64_t kZero = 0;
  switch (operand.kind) {
    case Operand::reg:
      if (program.awaited[operand.index] && in_flight[operand.index] != 0)
        fail(operand.name + " is read while an instruction in flight writes it");
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
  const uint64_t meeting = reinterpret_cast<uint64_t>(machine.meeting.data());
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
      case Special::envreg1: values[lane] = meeting >> 32; break;
      case Special::envreg2: values[lane] = meeting & 0xFFFFFFFF; break;
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
      fail(operand.name + " is written while an instruction in flight uses it");
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
      readers_(static_cast<size_t>(bytes) * (warps + 1)),
      last_readers_(bytes) {}

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

void SharedMemory::check_read(Warp& warp, int lane, uint64_t address, uint64_t size,
                              bool is_async) {
  at(warp, address, size, 1);
  const size_t begin = (address & 0xFFFFFFFF) - kSharedBase;
  const Knowledge& known = warp.knowledge;
  for (size_t i = begin; i < begin + size; ++i) {
    const Writer& writer = writers_[i];
    if (writer.time == 0) continue;
    if (known.happened.at[writer.who] < writer.time)
      warp.fail("Race: byte " + std::to_string(i) + " of shared memory is read, and no barrier" +
                " orders the write of " + name_of(writer.who));
    if (writer.who == warp.number && writer.turn == warp.turn && writer.lane != lane)
      warp.fail("Race: byte " + std::to_string(i) + " of shared memory is read, and no barrier" +
                " orders the write of another lane");
    if (is_async && writer.is_generic && known.fenced.at[writer.who] < writer.time)
      warp.fail("Byte " + std::to_string(i) + " of shared memory is read asynchronously without a" +
                " fence.proxy.async after the write of " + name_of(writer.who));
  }
}

void SharedMemory::check_write(Warp& warp, int lane, uint64_t address, uint64_t size) {
  at(warp, address, size, 1);
  const size_t begin = (address & 0xFFFFFFFF) - kSharedBase;
  const Clock& known = warp.knowledge.happened;
  for (size_t i = begin; i < begin + size; ++i) {
    const std::string place = "Race: byte " + std::to_string(i) + " of shared memory is written";
    const Writer& writer = writers_[i];
    if (known.at[writer.who] < writer.time)
      warp.fail(place + ", and no barrier orders the earlier write of " + name_of(writer.who));
    if (writer.who == warp.number && writer.turn == warp.turn && writer.lane != lane)
      warp.fail(place + ", and no barrier orders the earlier write of another lane");
    const Reader& reader = last_readers_[i];
    if (reader.who == warp.number && reader.turn == warp.turn && reader.lane != lane)
      warp.fail(place + ", and no barrier orders the earlier read of another lane");
    const uint32_t* readers = &readers_[i * (warps_ + 1)];
    if (known.at[kTensor] < readers[warps_])
      warp.fail(place + ", and no barrier orders the earlier read of a product");
    for (int other = 0; other < warps_; ++other)
      if (known.at[other] < readers[other])
        warp.fail(place + ", and no barrier orders the earlier read of warp " +
                  std::to_string(other));
  }
  block_.check_unread(warp, address, size);
}

std::string SharedMemory::name_of(int who) {
  if (who == kTensor) return "a product";
  return who == kEngine ? "an asynchronous copy" : "warp " + std::to_string(who);
}

void SharedMemory::note_read(Warp& warp, int lane, uint64_t address, uint64_t size) {
  const size_t begin = (address & 0xFFFFFFFF) - kSharedBase;
  for (size_t i = begin; i < begin + size; ++i) {
    readers_[i * (warps_ + 1) + warp.number] = warp.time();
    Reader& last = last_readers_[i];
    const bool is_another =
        last.who == warp.number && last.turn == warp.turn && last.lane != lane;
    last = {static_cast<uint8_t>(warp.number), static_cast<uint8_t>(is_another ? kSeveral : lane),
            warp.turn};
  }
}

void SharedMemory::note_write(Warp& warp, int lane, uint64_t address, uint64_t size,
                              bool is_generic) {
  const size_t begin = (address & 0xFFFFFFFF) - kSharedBase;
  const Writer writer{static_cast<uint8_t>(warp.number), static_cast<uint8_t>(lane), is_generic,
                      false, warp.time(), warp.turn};
  std::fill_n(writers_.begin() + begin, size, writer);
}

void SharedMemory::note_engine_write(uint64_t address, uint64_t size, uint32_t time) {
  const size_t begin = (address & 0xFFFFFFFF) - kSharedBase;
  std::fill_n(writers_.begin() + begin, size, Writer{kEngine, 0, false, false, time, 0});
}

void SharedMemory::note_tensor_read(uint64_t address, uint64_t size, uint32_t time) {
  const size_t begin = (address & 0xFFFFFFFF) - kSharedBase;
  for (size_t i = begin; i < begin + size; ++i) readers_[i * (warps_ + 1) + warps_] = time;
}

void SharedMemory::load(Warp& warp, int lane, uint64_t address, void* to, int size) {
  const uint8_t* from = at(warp, address, size, size);
  check_read(warp, lane, address, size, false);
  note_read(warp, lane, address, size);
  std::memcpy(to, from, size);
}

void SharedMemory::store(Warp& warp, int lane, uint64_t address, const void* from, int size) {
  uint8_t* to = at(warp, address, size, size);
  // warps that compute the same write it to one place, which no order changes
  const bool is_same = std::memcmp(to, from, size) == 0;
  if (!is_same) check_write(warp, lane, address, size);
  else block_.check_unread(warp, address, size);
  note_write(warp, lane, address, size, true);
  std::memcpy(to, from, size);
}

void SharedMemory::load_atomic(Warp& warp, uint64_t address, void* to, int size) {
  const uint8_t* from = at(warp, address, size, size);
  const size_t begin = (address & 0xFFFFFFFF) - kSharedBase;
  if (!writers_[begin].is_atomic) check_read(warp, kSeveral, address, size, false);
  std::memcpy(to, from, size);
}

void SharedMemory::store_atomic(Warp& warp, uint64_t address, const void* from, int size) {
  uint8_t* to = at(warp, address, size, size);
  const size_t begin = (address & 0xFFFFFFFF) - kSharedBase;
  if (!writers_[begin].is_atomic) check_write(warp, kSeveral, address, size);
  note_write(warp, kSeveral, address, size, true);
  for (size_t i = begin; i < begin + size; ++i) writers_[i].is_atomic = true;
  std::memcpy(to, from, size);
}

// ---- blocks

Block::Block(Machine& its_machine, int its_number)
    : machine(its_machine), number(its_number) {
  const uint32_t* grid = machine.launch.grid;
  const uint32_t n = static_cast<uint32_t>(number);
  index = {n % grid[0], n / grid[0] % grid[1], n / grid[0] / grid[1]};
  const int count = (machine.threads() + kLanes - 1) / kLanes;
  if (count > kMaxWarps) throw std::runtime_error("A block of more than 32 warps");
  int bytes = machine.program.static_shared;
  if (bytes != 0 && machine.launch.shared_bytes != 0) bytes = (bytes + 1023) / 1024 * 1024;
  bytes += machine.launch.shared_bytes;
  shared = std::make_unique<SharedMemory>(*this, bytes, count);
  for (int i = 0; i < count; ++i) warps.push_back(std::make_unique<Warp>(*this, i));
  if (machine.launch.together == 0) return;
  seen.resize(machine.blocks());
  seen[number] = 1;
}

uint32_t Block::random() { return static_cast<uint32_t>(machine.generator()); }

bool Block::step() {
  std::vector<Warp*> ready;
  bool is_done = true;
  for (const auto& warp : warps) {
    if (warp->is_done()) continue;
    is_done = false;
    if (!warp->waits) ready.push_back(warp.get());
  }
  if (is_done) return false;
  if (ready.empty()) {
    for (const auto& warp : warps)
      if (!warp->is_done()) warp->fail("Deadlock: every warp waits at a barrier");
  }
  ready[random() % ready.size()]->run(1 + random() % kLongestTurn);
  if (machine.arrival() == Arrival::random && !loads.empty() && chance(4)) land_one(random());
  if (machine.arrival() == Arrival::random && !tensor_work.empty() && chance(4)) advance_tensor();
  return true;
}

void Block::finish() const {
  if (!loads.empty()) warps[loads[0].warp]->fail("The block ends before its bulk loads");
  if (!tensor_work.empty()) warps[tensor_work[0].warp]->fail("The block ends before its tcgen05.mma");
  const std::vector<char>& columns = tensor_memory.allocated;
  if (std::any_of(columns.begin(), columns.end(), [](char used) { return used; }))
    warps[0]->fail("The block ends with tensor memory that is allocated");
  for (const auto& warp : warps)
    if (warp->number % 4 != 0 && warp->products != warps[warp->number / 4 * 4]->products)
      warp->fail("The warps of a warpgroup issue different numbers of wgmma");
}

void Block::arrive(Warp& warp, int barrier, int threads, uint32_t mask, uint64_t* any, bool own) {
  if (mask != warp.alive()) warp.fail("A barrier that a part of the warp's threads reaches");
  Named& named = named_[barrier];
  const int expected = threads != 0 ? threads : machine.threads();
  if (named.waiting.empty()) {
    named.threads = 0;
    named.expected = expected;
    named.any = false;
    named.knowledge = {};
  }
  if (named.expected != expected)
    warp.fail("Barrier " + std::to_string(barrier) + " is passed by " +
              std::to_string(named.expected) + " threads and by " + std::to_string(expected));
  named.threads += kLanes;
  named.any |= own;
  named.waiting.push_back(&warp);
  named.results.push_back(any);
  named.knowledge.join(warp.knowledge);
  warp.waits = true;
  if (named.threads < expected) return;
  for (Warp* one : named.waiting) {
    one->waits = false;
    one->knowledge.join(named.knowledge);
    one->tick();
    ++one->turn;
  }
  for (uint64_t* result : named.results)
    if (result != nullptr) std::fill_n(result, kLanes, uint64_t{named.any});
  named.waiting.clear();
  named.results.clear();
  progress();
}

void Block::check_unread(Warp& warp, uint64_t address, uint64_t size) {
  const uint64_t begin = address & 0xFFFFFFFF;
  const auto overlaps = [&](const Reading& one) {
    return begin < one.begin + one.size && one.begin < begin + size;
  };
  for (const TensorProduct& product : tensor_work)
    for (const Reading& one : product.readings)
      if (overlaps(one)) warp.fail("Shared memory is written while a tcgen05.mma still reads it");
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

void TensorMemory::note_read(const Warp& warp, int lane, int column) {
  of(lane, column).readers[warp.number] = warp.time();
}

void TensorMemory::begin_store(const Warp& warp, int lane, int column) {
  Cell& cell = of(lane, column);
  cell.who = warp.number;
  cell.time = warp.time();
  ++cell.stores;
  *at(lane, column) = ~0u;
}

void TensorMemory::end_store(const TensorStore& store) {
  --of(store.lane, store.column).stores;
  *at(store.lane, store.column) = store.value;
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
    std::memcpy(&parameters[parameter.offset], launch.arguments[i], parameter.size);
  }
}

int Machine::threads() const {
  return static_cast<int>(launch.block[0] * launch.block[1] * launch.block[2]);
}

int Machine::blocks() const {
  return static_cast<int>(launch.grid[0] * launch.grid[1] * launch.grid[2]);
}

void Machine::run() {
  launch.executed = 0;
  std::vector<int> order(blocks());
  for (int i = 0; i < blocks(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), generator);
  // blocks that run together take turns, of others each runs to its end
  std::vector<std::unique_ptr<Block>> running;
  while (!order.empty() || !running.empty()) {
    while (!order.empty() && (running.empty() || launch.together != 0)) {
      running.push_back(std::make_unique<Block>(*this, order.back()));
      order.pop_back();
    }
    const size_t turn = running.size() == 1 ? 0 : generator() % running.size();
    if (running[turn]->step()) continue;
    running[turn]->finish();
    running.erase(running.begin() + static_cast<int64_t>(turn));
  }
}

void Machine::check_inside(const Warp& warp, uint64_t address, int size, const char* what) const {
  const uint64_t own = reinterpret_cast<uint64_t>(meeting.data());
  if (launch.region_count == 0 || (address >= own && address + size <= own + meeting.size()))
    return;
  std::string nearest;
  uint64_t distance = ~uint64_t{0};
  for (int i = 0; i < launch.region_count; ++i) {
    const Region& region = launch.regions[i];
    const uint64_t end = region.begin + region.bytes;
    if (address >= region.begin && address + size <= end) return;
    const uint64_t gap = address >= end ? address - end : region.begin - address;
    if (gap >= distance) continue;
    distance = gap;
    nearest = std::to_string(gap) + (address >= end ? " bytes behind" : " bytes before") +
              " a tensor of " + std::to_string(region.bytes);
  }
  warp.fail(std::string(what) + " outside of every tensor, " + nearest);
}

// No access is longer than its alignment, so that none is on two pages.
Machine::Access* Machine::find(Warp& warp, uint64_t address, int size, const char* what) {
  if (address % size != 0)
    warp.fail(std::string(what) + " of " + std::to_string(size) + " bytes at " +
              hexadecimal(address) + ", which is not a multiple");
  check_inside(warp, address, size, what);
  const uint64_t number = address / kPage;
  if (last_ == nullptr || number != last_page_) {
    std::unique_ptr<Page>& page = pages_[number];
    if (!page) page = std::make_unique<Page>();
    last_page_ = number;
    last_ = page.get();
  }
  return &(*last_)[address % kPage];
}

// Whether the write of `one` happened before.
bool Machine::is_ordered(const Warp& warp, const Access& one) const {
  const Block& block = warp.block;
  if (one.writer == 0) return true;
  if (one.writer != block.number + 1)
    return launch.together != 0 && block.seen[one.writer - 1] > one.written;
  return warp.knowledge.happened.at[one.warp] >= one.time;
}

void Machine::load(Warp& warp, int lane, uint64_t address, void* to, int size, bool is_atomic) {
  Access* access = find(warp, address, size, "A load");
  const int32_t self = warp.block.number + 1;
  const uint32_t releases = launch.together != 0 ? warp.block.seen[self - 1] : 0;
  for (int i = 0; i < size; ++i) {
    Access& one = access[i];
    const bool is_known = is_ordered(warp, one);
    const bool is_lane = one.writer == self && one.warp == warp.number && one.turn == warp.turn &&
                         one.lane != lane;
    if ((!is_known || is_lane) && !(one.is_atomic && is_atomic))
      warp.fail("Race: a load of what " + std::string(is_lane ? "another lane" : "another warp") +
                " writes, of block " + std::to_string(one.writer - 1) + ", and nothing orders them");
    if (is_atomic) continue;
    one.reader = one.reader == 0 || one.reader == self ? self : -1;
    one.read = std::max(one.read, releases);
  }
  std::memcpy(to, reinterpret_cast<const void*>(address), size);
}

void Machine::store(Warp& warp, int lane, uint64_t address, const void* from, int size,
                    bool is_atomic) {
  Access* access = find(warp, address, size, "A store");
  const int32_t self = warp.block.number + 1;
  const uint32_t releases = launch.together != 0 ? warp.block.seen[self - 1] : 0;
  const bool is_same = std::memcmp(reinterpret_cast<const void*>(address), from, size) == 0;
  polls_ = 0;
  for (int i = 0; i < size; ++i) {
    Access& one = access[i];
    const bool is_lane = one.writer == self && one.warp == warp.number && one.turn == warp.turn &&
                         one.lane != lane && !is_same;
    if ((!is_ordered(warp, one) || is_lane) && !(one.is_atomic && is_atomic))
      warp.fail("Race: a store to what " + std::string(is_lane ? "another lane" : "another warp") +
                " writes, of block " + std::to_string(one.writer - 1) + ", and nothing orders them");
    if (one.reader != 0 && one.reader != self) {
      bool is_before = launch.together != 0;
      for (int other = 0; other < static_cast<int>(warp.block.seen.size()); ++other) {
        const bool has_read = one.reader == other + 1 || (one.reader == -1 && other + 1 != self);
        if (has_read) is_before &= warp.block.seen[other] > one.read;
      }
      if (!is_before) warp.fail("Race: a store to what another block reads");
    }
    one.writer = self;
    one.written = releases;
    one.warp = static_cast<uint16_t>(warp.number);
    one.lane = static_cast<uint8_t>(lane);
    one.time = warp.time();
    one.turn = warp.turn;
    one.is_atomic = is_atomic;
  }
  std::memcpy(reinterpret_cast<void*>(address), from, size);
}

void Machine::release(Block& block, uint64_t address) {
  if (launch.together == 0) return;
  std::vector<uint32_t>& released = releases_[address];
  ++block.seen[block.number];
  released.resize(block.seen.size());
  for (size_t i = 0; i < released.size(); ++i) released[i] = std::max(released[i], block.seen[i]);
}

void Machine::acquire(Warp& warp, uint64_t address) {
  if (++polls_ > kMostSpins) warp.fail("Deadlock: a value is waited for that no block writes");
  if (launch.together == 0) return;
  const auto released = releases_.find(address);
  if (released == releases_.end()) return;
  std::vector<uint32_t>& seen = warp.block.seen;
  for (size_t i = 0; i < seen.size(); ++i) seen[i] = std::max(seen[i], released->second[i]);
}

}  // namespace emulator
