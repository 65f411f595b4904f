// One block at a time: its warps, its memory, and what is on its way.
//
// Time is adversarial. Warps run in random order, a random number of instructions at a time, so
// that only barriers order them. An asynchronous copy or matrix product happens when it is issued,
// when it is waited for, or at a random time between, as the launch says; until then its target is
// poisoned. What no barrier orders is reported even if the values come out right: each warp has a
// vector clock, and each byte of memory remembers who wrote and read it, and when.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <random>

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
  int32_t arrival;  // of Arrival
  uint64_t seed;
  const uint64_t* arguments;  // by parameter; of a tensor map, its number
  const Region* regions;
  int32_t region_count;
  const TensorMap* maps;
  int32_t map_count;
  uint64_t executed;  // thread instructions, out
};

// The time of each warp that others have seen, and the last of them in the component behind the
// warps: the asynchronous engine.
constexpr int kEngine = kMaxWarps;
struct Clock {
  std::array<uint32_t, kMaxWarps + 1> at{};
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
  bool yields = false;
  std::vector<uint64_t> registers;  // [register][lane], zero-extended or sign-extended
  std::array<std::vector<Copy>, kLanes> open_copies;
  std::array<std::deque<std::vector<Copy>>, kLanes> copy_groups;
  std::vector<Product> open_products;
  std::deque<std::vector<Product>> product_groups;
  std::vector<BulkCopy> open_stores;
  std::deque<std::vector<BulkCopy>> store_groups;
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

 private:
  Values special(const Operand& operand);
  const Instruction* current_ = nullptr;
  std::array<uint32_t, kLanes> pc_{};
  uint32_t alive_ = 0;
  std::array<std::array<uint64_t, kLanes>, 8> special_{};  // values of the last ones read
  unsigned next_special_ = 0;
  std::array<uint64_t, kLanes> sink_{};
};

// Who wrote and read each byte of shared memory.
class SharedMemory {
 public:
  SharedMemory(Block& block, int bytes, int warps);

  // Plain accesses of one lane: bounds, alignment, races.
  void load(Warp& warp, uint64_t address, void* to, int size);
  void store(Warp& warp, uint64_t address, const void* from, int size);
  // Atomic ones are ordered among themselves.
  void load_atomic(Warp& warp, uint64_t address, void* to, int size);
  void store_atomic(Warp& warp, uint64_t address, const void* from, int size);
  // Accesses of the asynchronous proxy; `warp` issued or waited for them.
  void check_read(Warp& warp, uint64_t address, uint64_t size, bool is_async);
  void check_write(Warp& warp, uint64_t address, uint64_t size, bool is_same = false);
  void note_read(Warp& warp, uint64_t address, uint64_t size);
  void note_engine_write(uint64_t address, uint64_t size, uint32_t time);
  void note_write(Warp& warp, uint64_t address, uint64_t size, bool is_generic);
  uint8_t* at(const Warp& warp, uint64_t address, uint64_t size, int align);

 private:
  struct Writer {
    uint8_t who = 0;
    bool is_generic = true;
    bool is_atomic = false;
    uint32_t time = 0;
  };
  static std::string name_of(int who);
  Block& block_;
  int warps_;
  std::vector<uint8_t> bytes_;
  std::vector<Writer> writers_;
  std::vector<uint32_t> readers_;  // [byte][warp]
};

class Block {
 public:
  Block(Machine& machine, std::array<uint32_t, 3> index, int number);
  void run();

  void arrive(Warp& warp, int barrier, int threads, uint32_t mask);
  void check_unread(Warp& warp, uint64_t address, uint64_t size);
  bool deliver(uint64_t barrier);   // a load that the barrier waits for, if there is one
  void land_one(uint32_t which);    // one of the loads
  void land(const BulkCopy& copy);  // a load
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

 private:
  struct Named {
    int threads = 0;
    int expected = 0;
    std::vector<Warp*> waiting;
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

  Arrival arrival() const { return static_cast<Arrival>(launch.arrival); }
  // Global memory: bounds, alignment, races between blocks and warps.
  void load(Warp& warp, uint64_t address, void* to, int size, bool is_atomic = false);
  void store(Warp& warp, uint64_t address, const void* from, int size, bool is_atomic = false);
  int threads() const;

 private:
  struct Access {
    int32_t writer = 0;  // block + 1
    int32_t reader = 0;  // block + 1; -1 for several
    uint32_t time = 0;   // of the writing warp
    uint16_t warp = 0;
    bool is_atomic = false;
  };
  Access* find(Warp& warp, uint64_t address, int size, const char* what);
  std::vector<std::vector<Access>> accesses_;  // by region
};

template <class Function>
void for_lanes(uint32_t mask, Function function) {
  for (int lane = 0; lane < kLanes; ++lane)
    if (mask >> lane & 1) function(lane);
}

}  // namespace emulator
