// A PTX module as the machine runs it: one entry, its instructions decoded once.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace emulator {

// Shared memory starts here: the first kilobyte of a block's window belongs to the system.
constexpr uint64_t kSharedBase = 1024;
// Parameters have addresses that no tensor has.
constexpr uint64_t kParameterBase = uint64_t{1} << 56;

// Element types of instructions. B* have no meaning but their width.
enum class Type : uint8_t {
  none, pred,
  b8, b16, b32, b64, b128,
  u8, u16, u32, u64,
  s8, s16, s32, s64,
  f16, bf16, tf32, f32, f64,
  f16x2, bf16x2, f32x2, u16x2, s16x2,
};

int bits_of(Type type);
Type type_of(const std::string& word);  // Type::none if it names no type

enum class Special : uint8_t { tid, ntid, ctaid, nctaid, laneid, warpid, clock, envreg1, envreg2 };

struct Operand {
  enum Kind : uint8_t {
    reg,        // `index`
    immediate,  // `value`
    special,    // `index` is a Special, `axis` its dimension
    label,      // `value` is an instruction's number
    vector,     // `parts`, as {a, b} and a|b
    address,    // parts[0] + `offset`; the others are the coordinates of a tensor
    sink,       // _
  };
  Kind kind = sink;
  bool negated = false;  // !%p
  uint8_t axis = 0;
  int index = 0;
  uint64_t value = 0;
  int64_t offset = 0;
  std::string name;
  std::vector<Operand> parts;
};

struct Instruction;
class Warp;
// Runs an instruction for the lanes of `mask`, at least one.
using Semantics = void (*)(Warp& warp, const Instruction& at, uint32_t mask);

struct Instruction {
  Semantics run = nullptr;
  std::string opcode;              // mbarrier.init.shared::cta.b64
  std::vector<std::string> words;  // the same, split at dots
  std::vector<Operand> operands;
  int predicate = -1;              // a register, -1 without
  bool predicate_negated = false;
  Type type = Type::none;    // the last type that the opcode names
  Type source = Type::none;  // of cvt; of others the type before the last; else `type`
  bool ftz = false;          // flushes subnormal numbers
  bool sat = false;          // clamps to [0, 1]
  int line = 0;              // in the PTX
  int source_file = 0;       // of the .loc before it
  int source_line = 0;

  bool has(const char* word) const;
};

struct Parameter {
  int size = 0;
  int align = 1;
  int offset = 0;
};

struct Program {
  std::string name;
  std::string target;
  std::vector<Instruction> instructions;
  std::vector<Parameter> parameters;
  int parameter_bytes = 0;
  int threads = 0;        // .reqntid, 0 if the launch says it
  int static_shared = 0;  // bytes of .shared variables
  int registers = 0;      // distinct names
  std::vector<char> awaited;  // by register: whether an asynchronous instruction uses it
  std::map<int, std::string> files;
  std::vector<std::string> lines;  // of the PTX

  std::string place(const Instruction& at) const;  // for messages
};

// Parses an entry of a module, the only one if `entry` is empty. Raises std::runtime_error, with
// the line, for what it does not know.
Program parse(const std::string& text, const std::string& entry = "");

// Returns what runs an opcode; nullptr for one that the machine does not know.
Semantics semantics_of(const Instruction& at);

// Returns whether an opcode's registers are used after it was issued.
bool is_awaited(const Instruction& at);

}  // namespace emulator
