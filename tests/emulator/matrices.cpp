// Tensor cores and the layouts of their operands.
#include <algorithm>
#include <cstring>

#include "layout.h"
#include "opcodes.h"

namespace emulator {
namespace {

// ---- ldmatrix, stmatrix: 8x8 matrices of 16-bit elements; lane i points at row i % 8 of matrix
// i / 8, and lane i holds columns 2 (i % 4) and the next of row i / 4

int count_of(const Instruction& at) { return at.has("x4") ? 4 : at.has("x2") ? 2 : 1; }

uint16_t& element(uint16_t (*matrix)[8], int lane, int half, bool is_transposed) {
  const int row = lane / 4;
  const int column = 2 * (lane % 4) + half;
  return is_transposed ? matrix[column][row] : matrix[row][column];
}

void check_whole(Warp& warp, const Instruction& at, uint32_t mask) {
  if (mask != ~0u) warp.fail(at.words[0] + " is executed by a part of the warp");
}

}  // namespace

void load_matrix(Warp& warp, const Instruction& at, uint32_t mask) {
  check_whole(warp, at, mask);
  const Operand& targets = at.operands[0];
  const bool is_transposed = at.has("trans");
  uint16_t matrices[4][8][8];
  for (int i = 0; i < count_of(at); ++i)
    for (int row = 0; row < 8; ++row)
      warp.block.shared->load(warp, kSeveral, warp.address(at.operands[1], 8 * i + row),
                              matrices[i][row], 16);
  for (int i = 0; i < count_of(at); ++i) {
    uint64_t* d = warp.write(targets.kind == Operand::vector ? targets.parts[i] : targets);
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint32_t low = element(matrices[i], lane, 0, is_transposed);
      const uint32_t high = element(matrices[i], lane, 1, is_transposed);
      d[lane] = high << 16 | low;
    }
  }
}

void store_matrix(Warp& warp, const Instruction& at, uint32_t mask) {
  check_whole(warp, at, mask);
  const Operand& sources = at.operands[1];
  const bool is_transposed = at.has("trans");
  for (int i = 0; i < count_of(at); ++i) {
    const Warp::Values values =
        warp.read(sources.kind == Operand::vector ? sources.parts[i] : sources);
    uint16_t matrix[8][8];
    for (int lane = 0; lane < kLanes; ++lane) {
      element(matrix, lane, 0, is_transposed) = static_cast<uint16_t>(values[lane]);
      element(matrix, lane, 1, is_transposed) = static_cast<uint16_t>(values[lane] >> 16);
    }
    for (int row = 0; row < 8; ++row)
      warp.block.shared->store(warp, kSeveral, warp.address(at.operands[0], 8 * i + row),
                               matrix[row], 16);
  }
}

namespace {

int elements_of(Type type) { return type == Type::tf32 ? 1 : 2; }

Type operand_type(const Instruction& at) {
  for (Type type : {Type::bf16, Type::f16, Type::tf32})
    for (const std::string& word : at.words)
      if (type_of(word) == type) return type;
  return Type::none;
}

}  // namespace

// mma.sync.m16n8kK d, a, b, c: d = a b + c. With g = lane / 4 and t = lane % 4, register i of
//   a holds row g + 8 (i % 2), columns t w + (i / 2) (K / 2) and the w - 1 next,
//   b holds column g, rows t w + i (K / 2) and the next,
//   c and d hold row g + 8 (i / 2), column 2 t + i % 2,
// where w elements fill a register. Products are exact; their sum is rounded once.
void multiply(Warp& warp, const Instruction& at, uint32_t mask) {
  check_whole(warp, at, mask);
  const Type type = operand_type(at);
  const bool is_known = (at.has("m16n8k16") && type != Type::tf32 && type != Type::none) ||
                        (at.has("m16n8k8") && type == Type::tf32);
  if (!is_known || !at.has("f32") || !at.has("row") || !at.has("col"))
    warp.fail("The emulator does not know this form of mma");
  const int width = elements_of(type);
  const int half = type == Type::tf32 ? 4 : 8;  // K / 2
  float a[16][16];
  float b[16][8];
  double d[16][8];
  for (int i = 0; i < 4; ++i) {
    const Warp::Values values = warp.read(at.operands[1].parts[i]);
    for (int lane = 0; lane < kLanes; ++lane)
      for (int j = 0; j < width; ++j)
        a[lane / 4 + 8 * (i % 2)][lane % 4 * width + j + i / 2 * half] =
            packed(type, values[lane], j);
  }
  for (int i = 0; i < 2; ++i) {
    const Warp::Values values = warp.read(at.operands[2].parts[i]);
    for (int lane = 0; lane < kLanes; ++lane)
      for (int j = 0; j < width; ++j)
        b[lane % 4 * width + j + i * half][lane / 4] = packed(type, values[lane], j);
  }
  for (int i = 0; i < 4; ++i) {
    const Warp::Values values = warp.read(at.operands[3].parts[i]);
    for (int lane = 0; lane < kLanes; ++lane)
      d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2] =
          float_of_bits(static_cast<uint32_t>(values[lane]));
  }
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 2 * half; ++k)
      for (int column = 0; column < 8; ++column)
        d[row][column] += static_cast<double>(a[row][k]) * b[k][column];
  for (int i = 0; i < 4; ++i) {
    uint64_t* target = warp.write(at.operands[0].parts[i]);
    for (int lane = 0; lane < kLanes; ++lane)
      target[lane] =
          bits_of_float(static_cast<float>(d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2]));
  }
}

namespace {

// ---- wgmma: four warps multiply 64 x K by K x N; each has 16 rows

constexpr int kRows = 16;  // of a warp

Layout layout_of(uint64_t bits) {
  constexpr int kSwizzles[] = {0, 128, 64, 32};
  return {bits, kSwizzles[bits >> 62]};
}

Shape shape_of(Warp& warp, const Instruction& at) {
  Shape shape{};
  for (const std::string& word : at.words)
    if (std::sscanf(word.c_str(), "m64n%dk%d", &shape.n, &shape.k) == 2) break;
  shape.type = operand_type(at);
  shape.bytes = shape.type == Type::tf32 ? 4 : 2;
  if (shape.n == 0 || shape.type == Type::none || shape.k * shape.bytes != 32 || !at.has("f32"))
    warp.fail("The emulator does not know this form of wgmma");
  return shape;
}

// wgmma d, a, b, p, scale-a, scale-b[, transposed-a][, transposed-b]; a is a descriptor or four
// registers, and then has no transposition.
struct Operands {
  bool a_in_registers;
  bool a_transposed = false;
  bool b_transposed = false;

  explicit Operands(const Instruction& at) : a_in_registers(at.operands[1].kind == Operand::vector) {
    const auto flag = [&](size_t i) {
      return i < at.operands.size() && at.operands[i].value == 1;
    };
    a_transposed = !a_in_registers && flag(6);
    b_transposed = flag(a_in_registers ? 6 : 7);
  }
};

void check_fenced(Warp& warp, const Operand& registers) {
  for (const Operand& one : registers.parts)
    if (one.kind == Operand::reg && warp.written_at[one.index] > warp.fence_step)
      warp.fail("wgmma uses " + one.name + ", which was written after the last wgmma.fence");
}

void count_registers(Warp& warp, const Instruction& at, int by) {
  for (const Operand& one : at.operands[0].parts) warp.in_flight[one.index] += by;
  if (at.operands[1].kind == Operand::vector)
    for (const Operand& one : at.operands[1].parts) warp.in_use[one.index] += by;
}

// Register i of d holds, of the warp's rows, row lane / 4 + 8 (i / 2 % 2) and column
// 8 (i / 4) + 2 (lane % 4) + i % 2.
void compute(Warp& warp, const Product& product) {
  const Instruction& at = *product.at;
  const Shape shape = shape_of(warp, at);
  const Operands operands(at);
  static thread_local float a[kRows][16];
  static thread_local float b[16][256];
  static thread_local double d[kRows][256];
  if (operands.a_in_registers) {
    const int width = elements_of(shape.type);
    for (int i = 0; i < 4; ++i) {
      const uint64_t* values = warp.raw(at.operands[1].parts[i]);
      for (int lane = 0; lane < kLanes; ++lane)
        for (int j = 0; j < width; ++j)
          a[lane / 4 + 8 * (i % 2)][lane % 4 * width + j + i / 2 * (shape.k / 2)] =
              packed(shape.type, values[lane], j);
    }
  } else {
    gather(warp, layout_of(product.a), warp.number % 4 * kRows, kRows, shape, operands.a_transposed,
           [&](int row, int k, float value) { a[row][k] = value; });
  }
  gather(warp, layout_of(product.b), 0, shape.n, shape, operands.b_transposed,
         [&](int column, int k, float value) { b[k][column] = value; });
  const std::vector<Operand>& targets = at.operands[0].parts;
  for (int i = 0; i < shape.n / 2; ++i) {
    const uint64_t* values = warp.raw(targets[i]);
    for (int lane = 0; lane < kLanes; ++lane) {
      const float before = float_of_bits(static_cast<uint32_t>(values[lane]));
      d[lane / 4 + 8 * (i / 2 % 2)][8 * (i / 4) + 2 * (lane % 4) + i % 2] =
          product.accumulates ? before : 0;
    }
  }
  for (int row = 0; row < kRows; ++row)
    for (int k = 0; k < shape.k; ++k) {
      const double factor = a[row][k];
      for (int column = 0; column < shape.n; ++column) d[row][column] += factor * b[k][column];
    }
  for (int i = 0; i < shape.n / 2; ++i) {
    uint64_t* values = warp.raw(targets[i]);
    for (int lane = 0; lane < kLanes; ++lane)
      values[lane] = bits_of_float(static_cast<float>(
          d[lane / 4 + 8 * (i / 2 % 2)][8 * (i / 4) + 2 * (lane % 4) + i % 2]));
  }
  for (const Reading& one : product.readings)
    warp.block.shared->note_read(warp, kSeveral, one.begin, one.size);
}

}  // namespace

// Orders the registers that were written before with the products that follow.
void product_fence(Warp& warp, const Instruction&, uint32_t) { warp.fence_step = warp.step; }

void product_issue(Warp& warp, const Instruction& at, uint32_t mask) {
  check_whole(warp, at, mask);
  const Shape shape = shape_of(warp, at);
  const Operands operands(at);
  Product product{};
  product.at = &at;
  const Operand& accumulates = at.operands[3];
  product.accumulates = (warp.read_uniform(accumulates, mask) & 1) != uint64_t{accumulates.negated};
  for (const size_t i : {size_t{4}, size_t{5}})
    if (warp.read_uniform(at.operands[i], mask) != 1) warp.fail("A wgmma that negates an operand");
  if (product.accumulates) check_fenced(warp, at.operands[0]);
  const auto check = [&](const Layout& layout, int begin, int lines, bool is_transposed) {
    for (const Reading& one : readings_of(layout, begin, lines, shape, is_transposed)) {
      warp.block.shared->check_read(warp, kSeveral, one.begin, one.size, true);
      product.readings.push_back(one);
    }
  };
  if (operands.a_in_registers) {
    check_fenced(warp, at.operands[1]);
  } else {
    product.a = warp.read_uniform(at.operands[1], mask);
    check(layout_of(product.a), warp.number % 4 * kRows, kRows, operands.a_transposed);
  }
  product.b = warp.read_uniform(at.operands[2], mask);
  check(layout_of(product.b), 0, shape.n, operands.b_transposed);
  ++warp.products;
  const bool is_first = warp.open_products.empty() && warp.product_groups.empty();
  const bool is_early = warp.machine.arrival() == Arrival::early ||
                        (warp.machine.arrival() == Arrival::random && is_first && warp.block.chance(2));
  if (is_early) {
    compute(warp, product);
    product.at = nullptr;
  }
  count_registers(warp, at, 1);
  product.issued = &at;
  warp.open_products.push_back(std::move(product));
}

void product_commit(Warp& warp, const Instruction&, uint32_t) {
  warp.product_groups.push_back(std::move(warp.open_products));
  warp.open_products.clear();
}

// wgmma.wait_group n: all but the last n groups are complete, in the order of their issue.
void product_wait(Warp& warp, const Instruction& at, uint32_t mask) {
  const size_t left = warp.read_uniform(at.operands[0], mask);
  while (warp.product_groups.size() > left) {
    for (const Product& product : warp.product_groups.front()) {
      count_registers(warp, *product.issued, -1);
      if (product.at != nullptr) compute(warp, product);
    }
    warp.product_groups.pop_front();
  }
}

}  // namespace emulator
