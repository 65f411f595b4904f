// tcgen05 of sm_100: products whose sums lie in tensor memory, 128 lanes of 512 columns of 32 bits.
#include <algorithm>
#include <cstring>
#include <utility>

#include "layout.h"
#include "opcodes.h"

namespace emulator {
namespace {

constexpr int kColumns = TensorMemory::kColumns;
constexpr int kRows = TensorMemory::kLanes;
constexpr int kHalf = TensorMemory::kHalf;

// An address has the lane in its upper half, the column in the lower one.
struct Place {
  int lane;
  int column;

  explicit Place(uint64_t address)
      : lane(static_cast<int>(address >> 16 & 0xFFFF)), column(static_cast<int>(address & 0xFFFF)) {}
};

// The 32 bits that describe a product of kind f16.
struct Description {
  bool is_known;
  Type type;
  bool a_transposed;
  bool b_transposed;
  int n;
  int m;

  explicit Description(uint64_t bits)
      : is_known((bits & 0b1111) == 0 && (bits >> 4 & 3) == 1 && (bits >> 7 & 7) <= 1 &&
                 (bits >> 7 & 7) == (bits >> 10 & 7) && (bits >> 13 & 3) == 0),
        type((bits >> 7 & 7) == 1 ? Type::bf16 : Type::f16),
        a_transposed(bits >> 15 & 1),
        b_transposed(bits >> 16 & 1),
        n(static_cast<int>(bits >> 17 & 63) * 8),
        m(static_cast<int>(bits >> 24 & 31) * 16) {}
};

Layout layout_of(Warp& warp, uint64_t bits) {
  constexpr int kSwizzles[] = {0, -1, 128, -1, 64, -1, 32, -1};
  const int swizzle = kSwizzles[bits >> 61];
  if (swizzle < 0 || (bits >> 46 & 7) != 1 || (bits >> 49 & 15) != 0)
    warp.fail("The emulator does not know this matrix descriptor of tcgen05");
  return {bits, swizzle};
}

// The lane of a row, from the lane of the sums' address on: 64 rows are spread over one half of each
// warp's lanes.
int lane_of(int row, int rows) { return rows == 128 ? row : row / 16 * 32 + row % 16; }

// Calls function(lane, column) for each half of a warp's lanes that has sums of a product.
template <class Function>
void for_sums(const TensorProduct& product, Function function) {
  const Place d(product.d);
  for (int row = 0; row < product.rows; row += TensorMemory::kHalf)
    for (int column = d.column; column < d.column + product.columns; ++column)
      function(lane_of(row, product.rows) + d.lane, column);
}

void compute(Block& block, const TensorProduct& product) {
  Warp& warp = *block.warps[product.warp];
  const Description what(product.description);
  const Shape shape{what.n, 16, what.type, 2};
  static thread_local float a[kRows][16];
  static thread_local float b[16][256];
  gather(warp, layout_of(warp, product.a), 0, what.m, shape, what.a_transposed,
         [&](int row, int k, float value) { a[row][k] = value; });
  gather(warp, layout_of(warp, product.b), 0, what.n, shape, what.b_transposed,
         [&](int column, int k, float value) { b[k][column] = value; });
  const Place d(product.d);
  for (int row = 0; row < what.m; ++row) {
    uint32_t* cells = block.tensor_memory.at(lane_of(row, what.m) + d.lane, d.column);
    for (int column = 0; column < what.n; ++column) {
      double sum = product.accumulates ? float_of_bits(cells[column]) : 0;
      for (int k = 0; k < 16; ++k) sum += static_cast<double>(a[row][k]) * b[k][column];
      cells[column] = bits_of_float(static_cast<float>(sum));
    }
  }
  for (const Reading& one : product.readings)
    block.shared->note_tensor_read(one.begin, one.size, product.time);
}

// Where a register of a lane lies: 32x32b, or 16x32bx2, whose second half of the lanes is `split`
// columns further.
Place place_of(Warp& warp, const Instruction& at, const Operand& address, uint64_t split, int lane,
               int i) {
  Place place(warp.address(address, lane));
  const bool is_split = at.has("16x32bx2");
  const int first = warp.number % 4 * 32;
  if (place.lane != first && !(is_split && place.lane == first + 16))
    warp.fail("A warp accesses other lanes of tensor memory than its own");
  if (!is_split && !at.has("32x32b"))
    warp.fail("The emulator does not know this form of " + at.words[0]);
  place.lane += is_split ? lane % 16 : lane;
  place.column += i + static_cast<int>(is_split && lane >= 16 ? split : 0);
  if (place.column >= kColumns || !warp.block.tensor_memory.allocated[place.column])
    warp.fail("Tensor memory that is not allocated is accessed");
  return place;
}

// ld d, [address][, split] and st [address][, split], a
struct Transfer {
  const Operand& address;
  const std::vector<Operand>& registers;
  uint64_t split = 0;

  Transfer(Warp& warp, const Instruction& at, uint32_t mask, bool is_load)
      : address(at.operands[is_load ? 1 : 0]),
        registers(is_load ? at.operands[0].parts : at.operands.back().parts) {
    if (mask != ~0u) warp.fail("tcgen05 is executed by a part of the warp");
    if (at.operands.size() == 3) split = warp.read_uniform(at.operands[is_load ? 2 : 1], mask);
  }
};

}  // namespace

void TensorMemory::check_read(Warp& warp, int lane, int column) {
  Cell& cell = of(lane, column);
  if (cell.products != 0) warp.fail("Tensor memory is accessed while a product in flight uses it");
  if (cell.stores != 0) warp.fail("Tensor memory is accessed before tcgen05.wait::st");
  if (cell.time != 0 && warp.knowledge.happened.at[cell.who] < cell.time)
    warp.fail("Race: column " + std::to_string(column) + " of tensor memory is accessed, and no" +
              " barrier orders the earlier write of " + SharedMemory::name_of(cell.who));
}

void TensorMemory::check_write(Warp& warp, int lane, int column) {
  check_read(warp, lane, column);
  check_unread(warp, lane, column);
}

void TensorMemory::check_unread(Warp& warp, int lane, int column) {
  const Cell& cell = of(lane, column);
  for (int other = 0; other < kMaxWarps; ++other)
    if (warp.knowledge.happened.at[other] < cell.readers[other])
      warp.fail("Race: tensor memory is written, and no barrier orders the earlier read of warp " +
                std::to_string(other));
}

// tcgen05.alloc [to], columns: the address of so many columns, which may lie anywhere.
void tensor_allocate(Warp& warp, const Instruction& at, uint32_t mask) {
  const int count = static_cast<int>(warp.read_uniform(at.operands[1], mask));
  if (count < 32 || count > kColumns || (count & (count - 1)) != 0)
    warp.fail("tcgen05.alloc of " + std::to_string(count) + " columns");
  TensorMemory& memory = warp.block.tensor_memory;
  memory.create();
  std::vector<int> free;
  for (int begin = 0; begin + count <= kColumns; begin += 32) {
    const auto first = memory.allocated.begin() + begin;
    if (std::none_of(first, first + count, [](char used) { return used; })) free.push_back(begin);
  }
  if (free.empty()) warp.fail("Deadlock: no tensor memory is left");
  const int begin = free[warp.block.random() % free.size()];
  std::fill_n(memory.allocated.begin() + begin, count, 1);
  const uint32_t address = static_cast<uint32_t>(begin);
  const int lane = __builtin_ctz(mask);
  warp.block.shared->store(warp, kSeveral, warp.address(at.operands[0], lane), &address, 4);
}

// tcgen05.dealloc address, columns
void tensor_free(Warp& warp, const Instruction& at, uint32_t mask) {
  const Place place(warp.read_uniform(at.operands[0], mask));
  const int count = static_cast<int>(warp.read_uniform(at.operands[1], mask));
  TensorMemory& memory = warp.block.tensor_memory;
  for (int column = place.column; column < place.column + count; ++column) {
    if (column >= kColumns || !memory.allocated[column])
      warp.fail("Tensor memory that is not allocated is freed");
    for (int lane = 0; lane < kRows; lane += kHalf) memory.check_write(warp, lane, column);
    memory.allocated[column] = 0;
  }
}

// tcgen05.mma [d], a, b, description, accumulates: d (+)= a b, at once, late, or between.
void tensor_multiply(Warp& warp, const Instruction& at, uint32_t mask) {
  if (!at.has("cta_group::1") || !at.has("kind::f16") || at.operands[1].kind == Operand::address)
    warp.fail("The emulator does not know this form of tcgen05.mma");
  Block& block = warp.block;
  for_lanes(mask, [&](int lane) {
    TensorProduct product{};
    product.warp = warp.number;
    product.d = warp.address(at.operands[0], lane);
    product.a = warp.read_lane(at.operands[1], lane);
    product.b = warp.read_lane(at.operands[2], lane);
    product.description = warp.read_lane(at.operands[3], lane);
    const Operand& accumulates = at.operands[4];
    product.accumulates =
        (warp.read_lane(accumulates, lane) & 1) != uint64_t{accumulates.negated};
    const Description what(product.description);
    if (!what.is_known || what.n == 0 || (what.m != 64 && what.m != 128))
      warp.fail("The emulator does not know this description of tcgen05.mma");
    const Shape shape{what.n, 16, what.type, 2};
    const auto read = [&](uint64_t bits, int lines, bool is_transposed) {
      for (const Reading& one : readings_of(layout_of(warp, bits), 0, lines, shape, is_transposed)) {
        block.shared->check_read(warp, kSeveral, one.begin, one.size, true);
        product.readings.push_back(one);
      }
    };
    read(product.a, what.m, what.a_transposed);
    read(product.b, what.n, what.b_transposed);
    product.columns = what.n;
    product.rows = what.m;
    const Place d(product.d);
    if (d.lane != 0 && !(what.m == 64 && d.lane == 16))
      warp.fail("A product whose sums start at lane " + std::to_string(d.lane));
    block.tensor_memory.check_sums(warp, product);
    product.time = ++block.tensor_time;
    block.tensor_memory.count(product, 1);
    block.tensor_work.push_back(product);
    if (warp.machine.arrival() == Arrival::early) block.advance_tensor();
  });
}

// tcgen05.commit [barrier]: one arrival when all products that this thread issued are complete.
void tensor_commit(Warp& warp, const Instruction& at, uint32_t mask) {
  for_lanes(mask, [&](int lane) {
    TensorProduct commit{};
    commit.warp = warp.number;
    commit.barrier = warp.address(at.operands[0], lane) & 0xFFFFFFFF;
    warp.block.tensor_work.push_back(commit);
    if (warp.machine.arrival() == Arrival::early) warp.block.advance_tensor();
  });
}

// tcgen05.ld d, [address]: the registers are poisoned until tcgen05.wait::ld.
void tensor_load(Warp& warp, const Instruction& at, uint32_t mask) {
  const Transfer what(warp, at, mask, true);
  for (size_t i = 0; i < what.registers.size(); ++i) {
    TensorLoad load{&what.registers[i], {}};
    for (int lane = 0; lane < kLanes; ++lane) {
      const Place place =
          place_of(warp, at, what.address, what.split, lane, static_cast<int>(i));
      warp.block.tensor_memory.check_read(warp, place.lane, place.column);
      warp.block.tensor_memory.note_read(warp, place.lane, place.column);
      load.values[lane] = *warp.block.tensor_memory.at(place.lane, place.column);
    }
    warp.write(what.registers[i]);
    ++warp.in_flight[what.registers[i].index];
    warp.tensor_loads.push_back(load);
  }
}

// tcgen05.st [address], a: other warps and products see it after tcgen05.wait::st and a barrier.
void tensor_store(Warp& warp, const Instruction& at, uint32_t mask) {
  const Transfer what(warp, at, mask, false);
  std::vector<TensorStore> stores;
  for (size_t i = 0; i < what.registers.size(); ++i) {
    const Warp::Values values = warp.read(what.registers[i]);
    for (int lane = 0; lane < kLanes; ++lane) {
      const Place place =
          place_of(warp, at, what.address, what.split, lane, static_cast<int>(i));
      TensorMemory& memory = warp.block.tensor_memory;
      stores.push_back({place.lane, place.column, static_cast<uint32_t>(values[lane])});
      memory.check_write(warp, place.lane, place.column);
    }
  }
  for (const TensorStore& store : stores) {
    warp.block.tensor_memory.begin_store(warp, store.lane, store.column);
    warp.tensor_stores.push_back(store);
  }
}

bool Warp::is_loading(const Operand& given) const {
  return std::any_of(tensor_loads.begin(), tensor_loads.end(), [&](const TensorLoad& load) {
    return std::any_of(given.parts.begin(), given.parts.end(), [&](const Operand& part) {
      return part.kind == Operand::reg && part.index == load.target->index;
    });
  });
}

void tensor_wait(Warp& warp, const Instruction& at, uint32_t) {
  if (at.words[1] == "wait::ld") {
    for (const TensorLoad& load : warp.tensor_loads) {
      --warp.in_flight[load.target->index];
      std::copy(load.values.begin(), load.values.end(), warp.raw(*load.target));
    }
    warp.tensor_loads.clear();
    for (const Instruction* join : std::exchange(warp.tensor_joins, {})) join->run(warp, *join, ~0u);
    return;
  }
  for (const TensorStore& store : warp.tensor_stores) warp.block.tensor_memory.end_store(store);
  warp.tensor_stores.clear();
}

void TensorMemory::check_sums(Warp& warp, const TensorProduct& product) {
  for_sums(product, [&](int lane, int column) {
    if (column >= kColumns || !allocated[column])
      warp.fail("A product whose sums lie in tensor memory that is not allocated");
    // products of one thread are in order, those of several are not
    const Cell& cell = of(lane, column);
    const bool continues = cell.who == kTensor && cell.issuer == warp.number;
    if (!continues) check_write(warp, lane, column);
    else check_unread(warp, lane, column);
  });
}

void TensorMemory::count(const TensorProduct& product, int by) {
  for_sums(product, [&](int lane, int column) {
    Cell& cell = of(lane, column);
    cell.products += by;
    cell.issuer = product.warp;
    cell.time = cell.who == kTensor ? std::max(cell.time, product.time) : product.time;
    cell.who = kTensor;
  });
}

void Block::advance_tensor() {
  const TensorProduct work = tensor_work.front();
  tensor_work.pop_front();
  progress();
  if (work.columns != 0) {
    compute(*this, work);
    tensor_memory.count(work, -1);
    tensor_done = work.time;
    return;
  }
  complete_tensor(work.barrier, *warps[work.warp]);
}

}  // namespace emulator
