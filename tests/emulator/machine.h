// One block at a time: its warps, its memory, and what is on its way.
//
// Time is adversarial. Warps run in random order, a random number of instructions at a time, so
// that only barriers order them. An asynchronous copy or matrix product happens when it is issued,
// when it is waited for, or at a random time between, as the launch says; until then its target is
// poisoned. What no barrier orders is reported even if the values come out right: each warp has a
// vector clock, and each byte of memory remembers which lane wrote and read it, and when.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <random>
#include <unordered_map>

#include "program.h"

namespace emulator {

constexpr int kLanes = 32;
constexpr int kMaxWarps = 32;
constexpr uint8_t kPoison = 0xFF;  // NaN in every float format

enum class Arrival : int { early, late, random };

// A tensor that the launch may touch.
struct Region {
  uint64_t begin;
  uint64_t bytes;
};

// A tensor map as CUDA's driver encodes it: sizes are listed from the innermost dimension.
struct TensorMap {
  uint64_t base;
  int32_t rank;
  int32_t element_bytes;
  int32_t swizzle_bytes;  // 0, 32, 64 or 128
  int32_t fill_nan;       // of elements outside of the tensor; else zeros
  uint64_t sizes[5];
  uint64_t strides[5];  // in bytes
  uint32_t box[5];
};

struct Launch {
  uint32_t grid[3];
  uint32_t block[3];
  int32_t shared_bytes;
  int32_t arrival;   // of Arrival
  int32_t fenced;    // whether cp.async needs a fence before an asynchronous read
  int32_t together;  // whether all blocks run at once and may wait for each other
  uint64_t seed;
  const void* const* arguments;  // the bytes of each parameter; of a tensor map, its number
  const Region* regions;         // none: every address may be accessed
  int32_t region_count;
  const TensorMap* maps;
  int32_t map_count;
  uint64_t executed;  // thread instructions, out
};

// The time of each warp that others have seen; behind the warps, of the asynchronous copies.
constexpr int kEngine = kMaxWarps;
constexpr int kTensor = kMaxWarps + 1;  // and of sm_100's tensor cores
struct Clock {
  std::array<uint32_t, kMaxWarps + 2> at{};
  void join(const Clock& other);
};

// What a thread knows when it passes a barrier: what happened before, and of these the writes that
// a proxy fence has made visible to the asynchronous proxy.
struct Knowledge {
  Clock happened;
  Clock fenced;
  void join(const Knowledge& other);
};

struct MemoryBarrier {
  uint32_t expected = 0;
  int64_t pending = 0;  // arrivals
  int64_t bytes = 0;    // still to come
  uint32_t phase = 0;
  Knowledge arriving;   // in this phase
  Knowledge completed;  // in the last one
};

class Machine;
class Block;

// Bytes [begin, begin + size) that an asynchronous instruction of a warp still reads.
struct Reading {
  uint64_t begin;
  uint64_t size;
};

// cp.async of one lane.
struct Copy {
  uint64_t to;
  uint64_t from;
  int size;
  int valid;  // bytes from `from`; the rest is zeros
};

// wgmma of one warp: its 16 rows of the 64.
struct Product {
  const Instruction* issued;
  const Instruction* at;  // nullptr if it is computed
  uint64_t a;  // descriptor, unless A lies in registers
  uint64_t b;
  bool accumulates;
  std::vector<Reading> readings;
};

// cp.async.bulk.tensor, to shared memory or from it.
struct BulkCopy {
  const Instruction* at;
  const TensorMap* map;
  std::array<int32_t, 5> start;
  uint64_t shared;
  uint64_t bytes;
  uint64_t barrier;
  uint32_t time;  // of the engine
  int warp;
};

// tcgen05.mma, or tcgen05.commit if it has no columns.
struct TensorProduct {
  int warp;
  uint64_t d;  // an address of tensor memory
  uint64_t a;  // descriptors
  uint64_t b;
  uint64_t description;
  bool accumulates;
  int columns;
  int rows;
  uint32_t time;  // of the tensor cores
  uint64_t barrier;
  std::vector<Reading> readings;
};

// tcgen05.ld of one register.
struct TensorLoad {
  const Operand* target;
  std::array<uint64_t, kLanes> values;
};

// tcgen05.st of one register of one lane.
struct TensorStore {
  int lane;
  int column;
  uint32_t value;
};

// The sums of tcgen05.mma. Who wrote and read them is known by column and half of a warp's lanes.
class TensorMemory {
 public:
  static constexpr int kColumns = 512;
  static constexpr int kLanes = 128;
  static constexpr int kHalf = 16;

  void create() {
    if (!values_.empty()) return;
    values_.assign(kColumns * kLanes, ~0u);
    cells_.resize(kColumns * kLanes / kHalf);
  }
  uint32_t* at(int lane, int column) { return &values_[lane * kColumns + column]; }
  void check_read(Warp& warp, int lane, int column);
  void check_write(Warp& warp, int lane, int column);
  void check_unread(Warp& warp, int lane, int column);
  void check_sums(Warp& warp, const TensorProduct& product);
  void note_read(const Warp& warp, int lane, int column);
  void begin_store(const Warp& warp, int lane, int column);
  void end_store(const TensorStore& store);
  void count(const TensorProduct& product, int by);

  std::vector<char> allocated = std::vector<char>(kColumns);

 private:
  struct Cell {
    int products = 0;  // in flight
    int stores = 0;    // not waited for
    int issuer = 0;    // the warp of the last one
    int who = 0;       // wrote last
    uint32_t time = 0;
    std::array<uint32_t, kMaxWarps> readers{};
  };
  Cell& of(int lane, int column) { return cells_[lane / kHalf * kColumns + column]; }
  std::vector<uint32_t> values_;
  std::vector<Cell> cells_;
};

class Warp {
 public:
  Warp(Block& block, int number);

  // Runs up to `steps` instructions; stops where it has to wait.
  void run(int steps);
  bool is_done() const { return alive_ == 0; }

  Block& block;
  Machine& machine;
  const Program& program;
  int number;
  Knowledge knowledge;
  bool waits = false;  // at a barrier
  uint32_t turn = 1;   // barriers of its lanes so far
  bool yields = false;
  std::vector<uint64_t> registers;  // [register][lane], zero-extended or sign-extended
  std::array<std::vector<Copy>, kLanes> open_copies;
  std::array<std::deque<std::vector<Copy>>, kLanes> copy_groups;
  std::vector<Product> open_products;
  std::deque<std::vector<Product>> product_groups;
  std::vector<BulkCopy> open_stores;
  std::deque<std::vector<BulkCopy>> store_groups;
  std::vector<TensorLoad> tensor_loads;
  std::vector<const Instruction*> tensor_joins;  // mov of registers that are being loaded
  std::vector<TensorStore> tensor_stores;
  std::vector<uint8_t> in_flight;    // by register: how many products write it
  std::vector<uint8_t> in_use;       // and how many read it
  std::vector<uint32_t> written_at;  // by register: the step of the last write
  uint32_t step = 1;
  uint32_t fence_step = 0;  // of the last wgmma.fence
  int products = 0;         // issued

  uint32_t time() const { return knowledge.happened.at[number]; }
  void tick() { ++knowledge.happened.at[number]; }
  void jump(uint32_t mask, uint32_t target);
  void leave(uint32_t mask);
  uint32_t alive() const { return alive_; }

  [[noreturn]] void fail(const std::string& what) const;

  // Lane values of an operand: values[lane * stride].
  struct Values {
    const uint64_t* values;
    int stride;
    uint64_t operator[](int lane) const { return values[lane * stride]; }
  };
  Values read(const Operand& operand);
  uint64_t read_lane(const Operand& operand, int lane) { return read(operand)[lane]; }
  uint64_t read_uniform(const Operand& operand, uint32_t mask);
  uint64_t* write(const Operand& operand);
  uint64_t* raw(const Operand& operand);  // of a register, whatever is in flight
  uint64_t address(const Operand& operand, int lane);
  bool is_loading(const Operand& registers) const;

 private:
  Values special(const Operand& operand);
  const Instruction* current_ = nullptr;
  std::array<uint32_t, kLanes> pc_{};
  uint32_t alive_ = 0;
  std::array<std::array<uint64_t, kLanes>, 8> special_{};  // values of the last ones read
  unsigned next_special_ = 0;
  std::array<uint64_t, kLanes> sink_{};
};

// Stands for the lanes that access memory together, as for a matrix.
constexpr int kSeveral = kLanes;

// Who wrote and read each byte of shared memory.
class SharedMemory {
 public:
  SharedMemory(Block& block, int bytes, int warps);

  // Plain accesses of one lane: bounds, alignment, races.
  void load(Warp& warp, int lane, uint64_t address, void* to, int size);
  void store(Warp& warp, int lane, uint64_t address, const void* from, int size);
  // Atomic ones are ordered among themselves.
  void load_atomic(Warp& warp, uint64_t address, void* to, int size);
  void store_atomic(Warp& warp, uint64_t address, const void* from, int size);
  // Accesses of the asynchronous proxy; `warp` issued or waited for them.
  void check_read(Warp& warp, int lane, uint64_t address, uint64_t size, bool is_async);
  void check_write(Warp& warp, int lane, uint64_t address, uint64_t size);
  void note_read(Warp& warp, int lane, uint64_t address, uint64_t size);
  void note_engine_write(uint64_t address, uint64_t size, uint32_t time);
  void note_tensor_read(uint64_t address, uint64_t size, uint32_t time);
  void note_write(Warp& warp, int lane, uint64_t address, uint64_t size, bool is_generic);
  uint8_t* at(const Warp& warp, uint64_t address, uint64_t size, int align);
  static std::string name_of(int who);

 private:
  struct Writer {
    uint8_t who = 0;
    uint8_t lane = 0;
    bool is_generic = true;
    bool is_atomic = false;
    uint32_t time = 0;
    uint32_t turn = 0;
  };
  struct Reader {  // the last one
    uint8_t who = 0;
    uint8_t lane = 0;  // kSeveral: more than one lane in this turn
    uint32_t turn = 0;
  };
  Block& block_;
  int warps_;
  std::vector<uint8_t> bytes_;
  std::vector<Writer> writers_;
  std::vector<uint32_t> readers_;  // times, [byte][warp], the tensor cores last
  std::vector<Reader> last_readers_;
};

class Block {
 public:
  Block(Machine& machine, int number);
  bool step();  // runs a warp for a while; returns whether any is left
  void finish() const;

  // `any` is where bar.red.or puts whether the predicate of any thread holds; `own`, of this warp's
  void arrive(Warp& warp, int barrier, int threads, uint32_t mask, uint64_t* any = nullptr,
              bool own = false);
  void check_unread(Warp& warp, uint64_t address, uint64_t size);
  bool deliver(uint64_t barrier);   // a load that the barrier waits for, if there is one
  void land_one(uint32_t which);    // one of the loads
  void land(const BulkCopy& copy);  // a load
  void advance_tensor();            // the next product or commit
  void complete_tensor(uint64_t barrier, Warp& warp);
  void update(MemoryBarrier& barrier);
  void progress() { spins_ = 0; }
  void spin(Warp& warp);
  bool chance(int of) { return random() % of == 0; }
  uint32_t random();

  Machine& machine;
  std::array<uint32_t, 3> index;
  int number;
  std::unique_ptr<SharedMemory> shared;
  std::map<uint64_t, MemoryBarrier> barriers;
  std::vector<BulkCopy> loads;  // on their way
  std::vector<std::unique_ptr<Warp>> warps;
  uint32_t engine_time = 0;
  TensorMemory tensor_memory;
  std::deque<TensorProduct> tensor_work;  // in its order
  uint32_t tensor_time = 0;               // of the last product that was issued
  uint32_t tensor_done = 0;               // and of the last one that is complete
  std::vector<uint32_t> seen;  // releases of each block that this one knows of, and its own

 private:
  struct Named {
    int threads = 0;
    int expected = 0;
    bool any = false;
    std::vector<Warp*> waiting;
    std::vector<uint64_t*> results;
    Knowledge knowledge;
  };
  std::map<int, Named> named_;
  int spins_ = 0;
};

class Machine {
 public:
  Machine(const Program& program, Launch& launch);
  void run();

  const Program& program;
  Launch& launch;
  std::mt19937_64 generator;
  std::vector<uint8_t> parameters;
  // where blocks that run together meet: cooperative_groups reads its address from %envreg1 and 2
  alignas(64) std::array<uint8_t, 64> meeting{};

  Arrival arrival() const { return static_cast<Arrival>(launch.arrival); }
  // Global memory: bounds, alignment, races between blocks, warps and lanes.
  void load(Warp& warp, int lane, uint64_t address, void* to, int size, bool is_atomic = false);
  void store(Warp& warp, int lane, uint64_t address, const void* from, int size,
             bool is_atomic = false);
  // Releases and acquires order what blocks do before and after.
  void release(Block& block, uint64_t address);
  void acquire(Warp& warp, uint64_t address);
  int threads() const;
  int blocks() const;

 private:
  struct Access {
    int32_t writer = 0;  // block + 1
    int32_t reader = 0;  // block + 1; -1 for several
    uint32_t written = 0;  // after so many releases of the block
    uint32_t read = 0;
    uint32_t time = 0;  // of the writing warp
    uint32_t turn = 0;
    uint16_t warp = 0;
    uint8_t lane = 0;
    bool is_atomic = false;
  };
  static constexpr uint64_t kPage = 4096;
  using Page = std::array<Access, kPage>;
  Access* find(Warp& warp, uint64_t address, int size, const char* what);
  void check_inside(const Warp& warp, uint64_t address, int size, const char* what) const;
  bool is_ordered(const Warp& warp, const Access& one) const;
  std::unordered_map<uint64_t, std::unique_ptr<Page>> pages_;
  uint64_t last_page_ = 0;
  Page* last_ = nullptr;
  std::map<uint64_t, std::vector<uint32_t>> releases_;
  int polls_ = 0;
};

template <class Function>
void for_lanes(uint32_t mask, Function function) {
  for (int lane = 0; lane < kLanes; ++lane)
    if (mask >> lane & 1) function(lane);
}

}  // namespace emulator
