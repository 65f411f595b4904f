// Operands of matrix products in shared memory.
#pragma once

#include <algorithm>
#include <cstring>

#include "machine.h"
#include "numbers.h"

namespace emulator {

// Element `i` of those that a 32-bit register packs.
inline float packed(Type type, uint64_t bits, int i) {
  switch (type) {
    case Type::bf16: return float_of_bfloat(static_cast<uint16_t>(bits >> (16 * i)));
    case Type::f16: return float_of_half(static_cast<uint16_t>(bits >> (16 * i)));
    default: return truncate_to_tf32(float_of_bits(static_cast<uint32_t>(bits)));
  }
}

// What a 64-bit matrix descriptor says; distances in bytes.
struct Layout {
  uint64_t start;
  uint64_t leading;
  uint64_t stride;
  int swizzle;  // bytes, 0 without

  Layout(uint64_t bits, int swizzle_bytes)
      : start((bits & 0x3FFF) << 4),
        leading((bits >> 16 & 0x3FFF) << 4),
        stride((bits >> 32 & 0x3FFF) << 4),
        swizzle(swizzle_bytes) {}

  // The address of an element: `line` counts rows of A or columns of B, `k` their elements.
  // Without transposition k is contiguous: eight lines make a group of `stride` bytes. Transposed,
  // lines are contiguous, and eight values of k make a group.
  uint64_t address(int line, int k, int bytes, bool is_transposed) const {
    const int width = swizzle != 0 ? swizzle : 16;  // bytes that lie together
    uint64_t offset = 0;
    if (!is_transposed) {
      const int column = k * bytes;
      offset = line / 8 * stride + line % 8 * width + column % width + column / width * leading;
    } else {
      const int column = line * bytes;
      const uint64_t across = swizzle != 0 ? leading : stride;
      const uint64_t along = swizzle != 0 ? stride : leading;
      offset = column / width * across + column % width + k % 8 * width + k / 8 * along;
    }
    const uint64_t plain = start + offset;
    switch (swizzle) {
      case 128: return plain ^ ((plain >> 7 & 7) << 4);
      case 64: return plain ^ ((plain >> 7 & 3) << 4);
      case 32: return plain ^ ((plain >> 7 & 1) << 4);
      default: return plain;
    }
  }
};

// The last dimension of a product, and its elements.
struct Shape {
  int n;
  int k;
  Type type;
  int bytes;  // of an element
};

// Calls function(address, line, k) for each 16 bytes that hold an operand's elements: those of one
// line from k on, or, transposed, those of one k from line on.
template <class Function>
void for_pieces(const Layout& layout, int begin, int lines, const Shape& shape, bool is_transposed,
                Function function) {
  const int step = 16 / shape.bytes;
  const int line_step = is_transposed ? step : 1;
  const int k_step = is_transposed ? 1 : step;
  for (int line = begin; line < begin + lines; line += line_step)
    for (int k = 0; k < shape.k; k += k_step)
      function(layout.address(line, k, shape.bytes, is_transposed), line, k);
}

// Reads an operand; set(line - begin, k, value) takes each element.
template <class Function>
void gather(Warp& warp, const Layout& layout, int begin, int lines, const Shape& shape,
            bool is_transposed, Function set) {
  for_pieces(layout, begin, lines, shape, is_transposed, [&](uint64_t address, int line, int k) {
    const uint8_t* bytes = warp.block.shared->at(warp, address, 16, 16);
    for (int i = 0; i < 16 / shape.bytes; ++i) {
      uint32_t bits = 0;
      std::memcpy(&bits, bytes + i * shape.bytes, shape.bytes);
      const float value = packed(shape.type, bits, 0);
      if (is_transposed) set(line + i - begin, k, value);
      else set(line - begin, k + i, value);
    }
  });
}

// The bytes of shared memory that a product reads, as runs.
inline std::vector<Reading> readings_of(const Layout& layout, int begin, int lines, const Shape& shape,
                                 bool is_transposed) {
  std::vector<uint64_t> pieces;
  for_pieces(layout, begin, lines, shape, is_transposed,
             [&](uint64_t address, int, int) { pieces.push_back(address); });
  std::sort(pieces.begin(), pieces.end());
  std::vector<Reading> runs;
  for (const uint64_t piece : pieces) {
    const bool continues = !runs.empty() && piece == runs.back().begin + runs.back().size;
    if (continues) runs.back().size += 16;
    else runs.push_back({piece, 16});
  }
  return runs;
}

}  // namespace emulator
