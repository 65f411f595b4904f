// What each opcode means, in one table; those of shared memory's asynchronous copies are in
// copies.cpp, those of tensor cores in matrices.cpp.
#include "opcodes.h"

#include <algorithm>
#include <bit>
#include <cfenv>

#include "numbers.h"

namespace emulator {
namespace {

using Lanes = uint32_t;

// Calls function(T{}) with the C++ type of a PTX type. bN is taken as uN.
template <class Function>
bool with_integer(Type type, Function function) {
  switch (type) {
    case Type::b8: case Type::u8: function(uint8_t{}); return true;
    case Type::b16: case Type::u16: function(uint16_t{}); return true;
    case Type::b32: case Type::u32: function(uint32_t{}); return true;
    case Type::b64: case Type::u64: function(uint64_t{}); return true;
    case Type::s8: function(int8_t{}); return true;
    case Type::s16: function(int16_t{}); return true;
    case Type::s32: function(int32_t{}); return true;
    case Type::s64: function(int64_t{}); return true;
    default: return false;
  }
}

template <class Function>
bool with_float(Type type, Function function) {
  switch (type) {
    case Type::f32: function(float{}); return true;
    case Type::bf16: function(Bfloat{}); return true;
    case Type::f16: function(Half{}); return true;
    default: return false;
  }
}

// Two values in one register: calls function(T{}, bits of one).
template <class Function>
bool with_pair(Type type, Function function) {
  switch (type) {
    case Type::f32x2: function(float{}, 32); return true;
    case Type::bf16x2: function(Bfloat{}, 16); return true;
    case Type::f16x2: function(Half{}, 16); return true;
    default: return false;
  }
}

float finish(const Instruction& at, float value) {
  if (at.ftz) value = flush(value);
  if (at.sat) value = std::isnan(value) ? 0.f : std::clamp(value, 0.f, 1.f);
  // every NaN that arithmetic makes has the same bits, whatever those of its operands
  return std::isnan(value) ? decode<float>(0x7FFFFFFF) : value;
}

template <class Function>
void map1(Warp& warp, const Instruction& at, Lanes mask, Function function) {
  const Warp::Values a = warp.read(at.operands[1]);
  uint64_t* d = warp.write(at.operands[0]);
  for_lanes(mask, [&](int lane) { d[lane] = function(a[lane]); });
}

template <class Function>
void map2(Warp& warp, const Instruction& at, Lanes mask, Function function) {
  const Warp::Values a = warp.read(at.operands[1]);
  const Warp::Values b = warp.read(at.operands[2]);
  uint64_t* d = warp.write(at.operands[0]);
  for_lanes(mask, [&](int lane) { d[lane] = function(a[lane], b[lane]); });
}

template <class Function>
void map3(Warp& warp, const Instruction& at, Lanes mask, Function function) {
  const Warp::Values a = warp.read(at.operands[1]);
  const Warp::Values b = warp.read(at.operands[2]);
  const Warp::Values c = warp.read(at.operands[3]);
  uint64_t* d = warp.write(at.operands[0]);
  for_lanes(mask, [&](int lane) { d[lane] = function(a[lane], b[lane], c[lane]); });
}

[[noreturn]] void unknown(Warp& warp, const Instruction& at) {
  warp.fail("The emulator does not know this form of " + at.words[0]);
}

// ---- floats: f(a, b) in double, rounded once to the type

template <class Function>
void float1(Warp& warp, const Instruction& at, Lanes mask, Function function) {
  const bool is_one = with_float(at.type, [&](auto t) {
    using T = decltype(t);
    map1(warp, at, mask, [&](uint64_t a) {
      const T value = narrow<T>(function(widen(decode<T>(a))));
      return encode(std::is_same_v<T, float> ? narrow<T>(finish(at, widen(value))) : value);
    });
  });
  if (is_one) return;
  const bool is_pair = with_pair(at.type, [&](auto t, int bits) {
    using T = decltype(t);
    map1(warp, at, mask, [&](uint64_t a) {
      const uint64_t low = encode(narrow<T>(function(widen(decode<T>(a)))));
      return low | encode(narrow<T>(function(widen(decode<T>(a >> bits))))) << bits;
    });
  });
  if (!is_pair) unknown(warp, at);
}

template <class Function>
void float2(Warp& warp, const Instruction& at, Lanes mask, Function function) {
  if (at.has("rz") || at.has("rm") || at.has("rp")) unknown(warp, at);
  if (at.type == Type::f64) {
    map2(warp, at, mask, [&](uint64_t a, uint64_t b) {
      return encode<double>(function(decode<double>(a), decode<double>(b)));
    });
    return;
  }
  // add.f32.bf16 d, a, c: a is narrow, the others are not
  const bool is_mixed = at.source == Type::f32 && at.type != Type::f32;
  const bool is_one = with_float(at.type, [&](auto t) {
    using T = decltype(t);
    map2(warp, at, mask, [&](uint64_t a, uint64_t b) {
      if (is_mixed) return encode<float>(finish(
          at, static_cast<float>(function(widen(decode<T>(a)), decode<float>(b)))));
      const T value = narrow<T>(function(widen(decode<T>(a)), widen(decode<T>(b))));
      return encode(std::is_same_v<T, float> ? narrow<T>(finish(at, widen(value))) : value);
    });
  });
  if (is_one) return;
  const bool is_pair = with_pair(at.type, [&](auto t, int bits) {
    using T = decltype(t);
    map2(warp, at, mask, [&](uint64_t a, uint64_t b) {
      uint64_t both = 0;
      for (int shift : {0, bits})
        both |= encode(narrow<T>(function(widen(decode<T>(a >> shift)),
                                          widen(decode<T>(b >> shift))))) << shift;
      return both;
    });
  });
  if (!is_pair) unknown(warp, at);
}

// a * b + c in float, rounded as the opcode says: .rn, .rz, .rm or .rp
float fused_float(const Instruction& at, float a, float b, float c) {
  const int mode = at.has("rz")   ? FE_TOWARDZERO
                   : at.has("rm") ? FE_DOWNWARD
                   : at.has("rp") ? FE_UPWARD
                                  : FE_TONEAREST;
  std::fesetround(mode);
  const volatile float result = std::fma(a, b, c);
  std::fesetround(FE_TONEAREST);
  return result;
}

template <class T>
T fused(const Instruction& at, T a, T b, T c) {
  if constexpr (std::is_same_v<T, float>) return fused_float(at, a, b, c);
  else return narrow<T>(static_cast<double>(widen(a)) * widen(b) + widen(c));
}

// fma d, a, b, c: d = a * b + c, rounded once.
void fma(Warp& warp, const Instruction& at, Lanes mask) {
  const bool is_mixed = at.source == Type::f32 && at.type != Type::f32;
  const bool is_one = with_float(at.type, [&](auto t) {
    using T = decltype(t);
    map3(warp, at, mask, [&](uint64_t a, uint64_t b, uint64_t c) {
      if (is_mixed) return encode<float>(finish(
          at, std::fma(widen(decode<T>(a)), widen(decode<T>(b)), decode<float>(c))));
      const T value = fused(at, decode<T>(a), decode<T>(b), decode<T>(c));
      return encode(std::is_same_v<T, float> ? narrow<T>(finish(at, widen(value))) : value);
    });
  });
  if (is_one) return;
  const bool is_pair = with_pair(at.type, [&](auto t, int bits) {
    using T = decltype(t);
    map3(warp, at, mask, [&](uint64_t a, uint64_t b, uint64_t c) {
      uint64_t both = 0;
      for (int shift : {0, bits})
        both |= encode(fused(at, decode<T>(a >> shift), decode<T>(b >> shift), decode<T>(c >> shift)))
                << shift;
      return both;
    });
  });
  if (!is_pair) unknown(warp, at);
}

double smaller(const Instruction& at, double a, double b) {
  if (std::isnan(a) || std::isnan(b)) {
    if (at.has("NaN") || (std::isnan(a) && std::isnan(b))) return std::nan("");
    return std::isnan(a) ? b : a;
  }
  if (a == b) return std::signbit(a) ? a : b;
  return std::min(a, b);
}

// ---- arithmetic

template <class Function>
void integer2(Warp& warp, const Instruction& at, Lanes mask, Function function) {
  const auto apply = [&](auto t, int count) {
    using T = decltype(t);
    map2(warp, at, mask, [&](uint64_t a, uint64_t b) {
      uint64_t result = 0;
      for (int i = 0; i < count; ++i) {
        const int shift = 16 * i;
        const T one = static_cast<T>(function(decode<T>(a >> shift), decode<T>(b >> shift)));
        result |= encode<T>(one) << shift;
      }
      return result;
    });
  };
  if (at.type == Type::u16x2) return apply(uint16_t{}, 2);
  if (at.type == Type::s16x2) return apply(int16_t{}, 2);
  if (!with_integer(at.type, [&](auto t) { apply(t, 1); })) unknown(warp, at);
}

bool is_integer(Type type) {
  return type == Type::u16x2 || type == Type::s16x2 || with_integer(type, [](auto) {});
}

// Wraps around, as registers do.
template <class T, class Function>
T wrapping(T a, T b, Function function) {
  using U = std::make_unsigned_t<T>;
  return static_cast<T>(
      function(static_cast<uint64_t>(static_cast<U>(a)), static_cast<uint64_t>(static_cast<U>(b))));
}

void add(Warp& warp, const Instruction& at, Lanes mask) {
  if (is_integer(at.type))
    return integer2(warp, at, mask, [](auto a, auto b) { return wrapping(a, b, std::plus<>()); });
  float2(warp, at, mask, [](double a, double b) { return a + b; });
}

void sub(Warp& warp, const Instruction& at, Lanes mask) {
  if (is_integer(at.type))
    return integer2(warp, at, mask, [](auto a, auto b) { return wrapping(a, b, std::minus<>()); });
  float2(warp, at, mask, [](double a, double b) { return a - b; });
}

template <class T>
T high_product(T a, T b) {
  if constexpr (sizeof(T) == 8) {
    using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b) >> 64);
  } else {
    using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
    return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b) >> (8 * sizeof(T)));
  }
}

// The product of two integers in twice their width.
uint64_t wide_product(Type type, uint64_t a, uint64_t b) {
  uint64_t product = 0;
  with_integer(type, [&](auto t) {
    using T = decltype(t);
    using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
    product = static_cast<uint64_t>(static_cast<Wide>(decode<T>(a)) *
                                    static_cast<Wide>(decode<T>(b)));
  });
  return product;
}

uint64_t cut(uint64_t value, int bits) { return bits >= 64 ? value : value & ((1ull << bits) - 1); }

void mul(Warp& warp, const Instruction& at, Lanes mask) {
  if (!is_integer(at.type))
    return float2(warp, at, mask, [](double a, double b) { return a * b; });
  if (at.has("wide"))
    return map2(warp, at, mask, [&](uint64_t a, uint64_t b) {
      return cut(wide_product(at.type, a, b), 2 * bits_of(at.type));
    });
  if (at.has("hi"))
    return integer2(warp, at, mask, [](auto a, auto b) { return high_product(a, b); });
  integer2(warp, at, mask, [](auto a, auto b) { return wrapping(a, b, std::multiplies<>()); });
}

void mad(Warp& warp, const Instruction& at, Lanes mask) {
  if (!is_integer(at.type)) return fma(warp, at, mask);
  const int bits = bits_of(at.type);
  map3(warp, at, mask, [&](uint64_t a, uint64_t b, uint64_t c) {
    if (at.has("wide")) return cut(wide_product(at.type, a, b) + c, 2 * bits);
    if (!at.has("hi")) return cut(a * b + c, bits);
    uint64_t high = 0;
    with_integer(at.type, [&](auto t) {
      using T = decltype(t);
      high = encode<T>(high_product(decode<T>(a), decode<T>(b)));
    });
    return cut(high + c, bits);
  });
}

void div(Warp& warp, const Instruction& at, Lanes mask) {
  if (!is_integer(at.type))
    return float2(warp, at, mask, [](double a, double b) { return a / b; });
  // what a division by zero gives is unspecified
  integer2(warp, at, mask, [](auto a, auto b) -> decltype(a) {
    using T = decltype(a);
    if (b == 0) return static_cast<T>(-1);
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return wrapping(T{0}, a, std::minus<>());
    return static_cast<T>(a / b);
  });
}

void rem(Warp& warp, const Instruction& at, Lanes mask) {
  integer2(warp, at, mask, [](auto a, auto b) -> decltype(a) {
    using T = decltype(a);
    if (b == 0) return static_cast<T>(-1);
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return T{0};
    return static_cast<T>(a % b);
  });
}

void min(Warp& warp, const Instruction& at, Lanes mask) {
  if (is_integer(at.type))
    return integer2(warp, at, mask, [](auto a, auto b) { return std::min(a, b); });
  float2(warp, at, mask, [&](double a, double b) { return smaller(at, a, b); });
}

void max(Warp& warp, const Instruction& at, Lanes mask) {
  if (is_integer(at.type))
    return integer2(warp, at, mask, [](auto a, auto b) { return std::max(a, b); });
  float2(warp, at, mask, [&](double a, double b) { return -smaller(at, -a, -b); });
}

void abs(Warp& warp, const Instruction& at, Lanes mask) {
  if (is_integer(at.type)) {
    const bool is_known = with_integer(at.type, [&](auto t) {
      using T = decltype(t);
      map1(warp, at, mask, [](uint64_t a) {
        const T value = decode<T>(a);
        return encode<T>(value < T{0} ? wrapping(T{0}, value, std::minus<>()) : value);
      });
    });
    if (is_known) return;
  }
  float1(warp, at, mask, [](double a) { return std::fabs(a); });
}

void neg(Warp& warp, const Instruction& at, Lanes mask) {
  if (is_integer(at.type))
    return map1(warp, at, mask, [&](uint64_t a) { return cut(0 - a, bits_of(at.type)); });
  float1(warp, at, mask, [](double a) { return -a; });
}

// ex2.approx, lg2.approx, rcp, rsqrt, sqrt, tanh.approx, sin, cos: correctly rounded here, which
// lies within the documented error of the hardware
template <double (*function)(double)>
void elementary(Warp& warp, const Instruction& at, Lanes mask) {
  if (at.type == Type::f64)
    return map1(warp, at, mask, [](uint64_t a) {
      return encode<double>(function(decode<double>(a)));
    });
  float1(warp, at, mask, [&](double a) {
    return function(at.ftz ? flush(static_cast<float>(a)) : a);
  });
}

double power_of_two(double x) { return std::exp2(x); }
double logarithm(double x) { return std::log2(x); }
double reciprocal(double x) { return 1 / x; }
double root(double x) { return std::sqrt(x); }
double reciprocal_root(double x) { return 1 / std::sqrt(x); }
double hyperbolic_tangent(double x) { return std::tanh(x); }
double sine(double x) { return std::sin(x); }
double cosine(double x) { return std::cos(x); }

// ---- bits

template <class Function>
void bits2(Warp& warp, const Instruction& at, Lanes mask, Function function) {
  const int bits = bits_of(at.type);
  const bool a_negated = at.operands[1].negated;
  const bool b_negated = at.operands[2].negated;
  map2(warp, at, mask, [&](uint64_t a, uint64_t b) {
    return cut(function(a_negated ? ~a : a, b_negated ? ~b : b), bits);
  });
}

void bit_and(Warp& warp, const Instruction& at, Lanes mask) {
  bits2(warp, at, mask, [](uint64_t a, uint64_t b) { return a & b; });
}
void bit_or(Warp& warp, const Instruction& at, Lanes mask) {
  bits2(warp, at, mask, [](uint64_t a, uint64_t b) { return a | b; });
}
void bit_xor(Warp& warp, const Instruction& at, Lanes mask) {
  bits2(warp, at, mask, [](uint64_t a, uint64_t b) { return a ^ b; });
}
void bit_not(Warp& warp, const Instruction& at, Lanes mask) {
  map1(warp, at, mask, [&](uint64_t a) { return cut(~a, bits_of(at.type)); });
}

// Shifts by 32 bits; what exceeds the width shifts everything out.
void shl(Warp& warp, const Instruction& at, Lanes mask) {
  const uint64_t bits = bits_of(at.type);
  map2(warp, at, mask, [&](uint64_t a, uint64_t by) {
    by &= 0xFFFFFFFF;
    return by >= bits ? 0 : cut(a << by, static_cast<int>(bits));
  });
}

void shr(Warp& warp, const Instruction& at, Lanes mask) {
  const uint64_t bits = bits_of(at.type);
  with_integer(at.type, [&](auto t) {
    using T = decltype(t);
    map2(warp, at, mask, [&](uint64_t a, uint64_t by) {
      by &= 0xFFFFFFFF;
      if (by >= bits && !std::is_signed_v<T>) return uint64_t{0};
      return encode<T>(static_cast<T>(decode<T>(a) >> std::min(by, bits - 1)));
    });
  });
}

// shf.l/r: the concatenation b:a, shifted. wrap takes the amount modulo 32, clamp at most 32.
void shf(Warp& warp, const Instruction& at, Lanes mask) {
  map3(warp, at, mask, [&](uint64_t a, uint64_t b, uint64_t by) {
    const uint64_t both = (b & 0xFFFFFFFF) << 32 | (a & 0xFFFFFFFF);
    by = at.has("wrap") ? by & 31 : std::min<uint64_t>(by & 0xFFFFFFFF, 32);
    if (at.has("l")) return by == 32 ? both & 0xFFFFFFFF : both << by >> 32;
    return both >> by & 0xFFFFFFFF;
  });
}

// bfe d, a, position, length: a field, extended by its sign for sN.
void bfe(Warp& warp, const Instruction& at, Lanes mask) {
  const int bits = bits_of(at.type);
  const bool is_signed = at.type == Type::s32 || at.type == Type::s64;
  map3(warp, at, mask, [&](uint64_t a, uint64_t position, uint64_t length) {
    position &= 255;
    length &= 255;
    a = cut(a, bits);
    const uint64_t last = std::min<uint64_t>(position + length - 1, bits - 1);
    const bool sign = is_signed && length != 0 && (a >> last & 1);
    uint64_t field = position >= 64 ? 0 : cut(a >> position, static_cast<int>(std::min<uint64_t>(length, 64)));
    if (sign)
      for (uint64_t i = std::min<uint64_t>(length, last - position + 1); i < 64; ++i) field |= 1ull << i;
    return cut(field, bits);
  });
}

// bfi d, a, b, position, length: b with a field of a.
void bfi(Warp& warp, const Instruction& at, Lanes mask) {
  const int bits = bits_of(at.type);
  const Warp::Values length = warp.read(at.operands[4]);
  const Warp::Values a = warp.read(at.operands[1]);
  const Warp::Values b = warp.read(at.operands[2]);
  const Warp::Values position = warp.read(at.operands[3]);
  uint64_t* d = warp.write(at.operands[0]);
  for_lanes(mask, [&](int lane) {
    const int from = static_cast<int>(position[lane] & 255);
    const int count = static_cast<int>(length[lane] & 255);
    const uint64_t ones = from >= 64 ? 0 : cut(~0ull, std::min(count, 64)) << from;
    const uint64_t field = from >= 64 ? 0 : a[lane] << from;
    d[lane] = cut((b[lane] & ~ones) | (field & ones), bits);
  });
}

// prmt d, a, b, selector: each byte of d is one of the eight of b:a, or eight times its sign.
void prmt(Warp& warp, const Instruction& at, Lanes mask) {
  if (at.words.size() > 2) unknown(warp, at);
  map3(warp, at, mask, [](uint64_t a, uint64_t b, uint64_t selector) {
    const uint64_t both = (b & 0xFFFFFFFF) << 32 | (a & 0xFFFFFFFF);
    uint64_t result = 0;
    for (int i = 0; i < 4; ++i) {
      const uint64_t choice = selector >> (4 * i) & 15;
      uint64_t byte = both >> (8 * (choice & 7)) & 255;
      if (choice & 8) byte = byte & 128 ? 255 : 0;
      result |= byte << (8 * i);
    }
    return result;
  });
}

// lop3 d, a, b, c, table: any function of three bits.
void lop3(Warp& warp, const Instruction& at, Lanes mask) {
  const uint64_t table = warp.read_uniform(at.operands[4], mask);
  map3(warp, at, mask, [&](uint64_t a, uint64_t b, uint64_t c) {
    uint64_t result = 0;
    for (int i = 0; i < 32; ++i) {
      const uint64_t row = (a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1);
      result |= (table >> row & 1) << i;
    }
    return result;
  });
}

void popc(Warp& warp, const Instruction& at, Lanes mask) {
  map1(warp, at, mask, [&](uint64_t a) {
    return static_cast<uint64_t>(std::popcount(cut(a, bits_of(at.type))));
  });
}

void clz(Warp& warp, const Instruction& at, Lanes mask) {
  const int bits = bits_of(at.type);
  map1(warp, at, mask, [&](uint64_t a) {
    return static_cast<uint64_t>(std::countl_zero(cut(a, bits)) - (64 - bits));
  });
}

void brev(Warp& warp, const Instruction& at, Lanes mask) {
  const int bits = bits_of(at.type);
  map1(warp, at, mask, [&](uint64_t a) {
    uint64_t result = 0;
    for (int i = 0; i < bits; ++i) result |= (a >> i & 1) << (bits - 1 - i);
    return result;
  });
}

// bfind: the position of the highest bit that is set, or 2^32 - 1.
void bfind(Warp& warp, const Instruction& at, Lanes mask) {
  const bool is_signed = at.type == Type::s32 || at.type == Type::s64;
  map1(warp, at, mask, [&](uint64_t a) {
    a = cut(a, bits_of(at.type));
    if (is_signed && a >> (bits_of(at.type) - 1)) a = cut(~a, bits_of(at.type));
    return a == 0 ? uint64_t{0xFFFFFFFF} : uint64_t(63 - std::countl_zero(a));
  });
}

// ---- moves, comparisons, conversions

// mov d, a; mov {a, b}, d and mov d, {a, b} take apart and put together.
void mov(Warp& warp, const Instruction& at, Lanes mask) {
  const Operand& to = at.operands[0];
  const Operand& from = at.operands[1];
  const int bits = bits_of(at.type);
  if (to.kind == Operand::vector) {
    const int part = bits / static_cast<int>(to.parts.size());
    const Warp::Values values = warp.read(from);
    std::array<uint64_t, kLanes> whole;
    for (int lane = 0; lane < kLanes; ++lane) whole[lane] = values[lane];
    for (size_t i = 0; i < to.parts.size(); ++i) {
      uint64_t* d = warp.write(to.parts[i]);
      for_lanes(mask, [&](int lane) { d[lane] = cut(whole[lane] >> (part * i), part); });
    }
    return;
  }
  if (from.kind == Operand::vector) {
    const int part = bits / static_cast<int>(from.parts.size());
    std::array<uint64_t, kLanes> whole{};
    // The ISA forbids to read registers before tcgen05.wait::ld. LLVM (Triton 3.7) moves what only
    // joins two of them before it, and ptxas moves it back: it takes effect at the wait here.
    if (warp.is_loading(from)) {
      uint64_t* poisoned = warp.write(to);
      for_lanes(mask, [&](int lane) { poisoned[lane] = ~uint64_t{0}; });
      warp.tensor_joins.push_back(&at);
      return;
    }
    for (size_t i = 0; i < from.parts.size(); ++i) {
      const Warp::Values values = warp.read(from.parts[i]);
      for_lanes(mask, [&](int lane) { whole[lane] |= cut(values[lane], part) << (part * i); });
    }
    uint64_t* d = warp.write(to);
    for_lanes(mask, [&](int lane) { d[lane] = whole[lane]; });
    return;
  }
  map1(warp, at, mask, [&](uint64_t a) { return cut(a, bits); });
}

// cvta: generic and global addresses are the same numbers here; those of parameters may be cut to 32
// bits before.
void cvta(Warp& warp, const Instruction& at, Lanes mask) {
  const uint64_t base = at.has("param") ? kParameterBase : 0;
  map1(warp, at, mask, [&](uint64_t a) { return base != 0 ? base | (a & 0xFFFFFFFF) : a; });
}

void selp(Warp& warp, const Instruction& at, Lanes mask) {
  map3(warp, at, mask, [](uint64_t a, uint64_t b, uint64_t p) { return p & 1 ? a : b; });
}

bool holds(const std::string& relation, double a, double b) {
  const bool is_nan = std::isnan(a) || std::isnan(b);
  if (relation == "num") return !is_nan;
  if (relation == "nan") return is_nan;
  const bool unordered = relation.size() == 3 && relation.back() == 'u';
  if (is_nan) return unordered;
  const std::string base = relation.substr(0, 2);
  if (base == "eq") return a == b;
  if (base == "ne") return a != b;
  if (base == "lt") return a < b;
  if (base == "le") return a <= b;
  if (base == "gt") return a > b;
  return a >= b;
}

template <class T>
bool compares(const std::string& relation, T a, T b) {
  if (relation == "eq") return a == b;
  if (relation == "ne") return a != b;
  if (relation == "lt" || relation == "lo") return a < b;
  if (relation == "le" || relation == "ls") return a <= b;
  if (relation == "gt" || relation == "hi") return a > b;
  return a >= b;
}

// setp.relation[.and|.or|.xor] p[|q], a, b[, r]: q is the negation, or the upper half's result.
void setp(Warp& warp, const Instruction& at, Lanes mask) {
  const std::string& relation = at.words[1];
  const Warp::Values a = warp.read(at.operands[1]);
  const Warp::Values b = warp.read(at.operands[2]);
  const Operand& target = at.operands[0];
  const bool has_two = target.kind == Operand::vector;
  std::array<bool, kLanes> first{};
  std::array<bool, kLanes> second{};
  bool is_pair = false;
  const auto fill = [&](auto compare) {
    for_lanes(mask, [&](int lane) { first[lane] = compare(a[lane], b[lane]); });
  };
  const bool is_integer_type = with_integer(at.type, [&](auto t) {
    using T = decltype(t);
    fill([&](uint64_t x, uint64_t y) { return compares(relation, decode<T>(x), decode<T>(y)); });
  });
  if (!is_integer_type && at.type == Type::f64) {
    fill([&](uint64_t x, uint64_t y) {
      return holds(relation, decode<double>(x), decode<double>(y));
    });
  } else if (!is_integer_type) {
    const bool is_one = with_float(at.type, [&](auto t) {
      using T = decltype(t);
      fill([&](uint64_t x, uint64_t y) {
        return holds(relation, widen(decode<T>(x)), widen(decode<T>(y)));
      });
    });
    is_pair = !is_one && with_pair(at.type, [&](auto t, int bits) {
      using T = decltype(t);
      for_lanes(mask, [&](int lane) {
        first[lane] = holds(relation, widen(decode<T>(a[lane])), widen(decode<T>(b[lane])));
        second[lane] =
            holds(relation, widen(decode<T>(a[lane] >> bits)), widen(decode<T>(b[lane] >> bits)));
      });
    });
    if (!is_one && !is_pair) unknown(warp, at);
  }
  if (!is_pair)
    for (int lane = 0; lane < kLanes; ++lane) second[lane] = !first[lane];
  if (at.operands.size() > 3) {
    const Warp::Values with = warp.read(at.operands[3]);
    for_lanes(mask, [&](int lane) {
      const bool c = (with[lane] & 1) != uint64_t{at.operands[3].negated};
      const auto combine = [&](bool p) { return at.has("and") ? p && c : at.has("or") ? p || c : p != c; };
      first[lane] = combine(first[lane]);
      second[lane] = combine(second[lane]);
    });
  }
  uint64_t* p = warp.write(has_two ? target.parts[0] : target);
  for_lanes(mask, [&](int lane) { p[lane] = first[lane]; });
  if (!has_two) return;
  uint64_t* q = warp.write(target.parts[1]);
  for_lanes(mask, [&](int lane) { q[lane] = second[lane]; });
}

double round_to_integer(const Instruction& at, double value) {
  if (at.has("rzi") || at.has("rz")) return std::trunc(value);
  if (at.has("rmi") || at.has("rm")) return std::floor(value);
  if (at.has("rpi") || at.has("rp")) return std::ceil(value);
  return std::nearbyint(value);
}

template <class T>
uint64_t saturating(double value) {
  if (std::isnan(value)) return 0;
  const double least = static_cast<double>(std::numeric_limits<T>::min());
  const double most = static_cast<double>(std::numeric_limits<T>::max());
  if (value <= least) return encode<T>(std::numeric_limits<T>::min());
  if (value >= most) return encode<T>(std::numeric_limits<T>::max());
  return encode<T>(static_cast<T>(value));
}

// The value of a register in a type, as double or as a 64-bit integer.
double float_value(Type type, uint64_t bits) {
  if (type == Type::f64) return decode<double>(bits);
  double value = 0;
  with_float(type, [&](auto t) { value = widen(decode<decltype(t)>(bits)); });
  return value;
}

uint64_t convert(const Instruction& at, uint64_t a) {
  uint64_t result = 0;
  if (is_integer(at.source)) {
    with_integer(at.source, [&](auto s) {
      const auto value = decode<decltype(s)>(a);
      if (at.type == Type::f32) result = encode<float>(static_cast<float>(value));
      else if (at.type == Type::f64) result = encode<double>(static_cast<double>(value));
      else if (at.type == Type::bf16) result = bfloat_of(static_cast<float>(value));
      else if (at.type == Type::f16) result = half_of(static_cast<float>(value));
      else if (at.sat)
        with_integer(at.type, [&](auto t) {
          result = saturating<decltype(t)>(static_cast<double>(value));
        });
      else  // sign-extended: a register may be wider than the type
        result = static_cast<uint64_t>(static_cast<int64_t>(value));
    });
    if (is_integer(at.type) && !at.sat)
      with_integer(at.type, [&](auto t) {
        const auto value = decode<decltype(t)>(result);
        result = static_cast<uint64_t>(static_cast<int64_t>(value));
      });
    return result;
  }
  double value = float_value(at.source, a);
  if (at.ftz) value = flush(static_cast<float>(value));
  if (is_integer(at.type)) {
    with_integer(at.type, [&](auto t) {
      result = saturating<decltype(t)>(round_to_integer(at, value));
    });
    return result;
  }
  if (at.has("rni") || at.has("rzi") || at.has("rmi") || at.has("rpi"))
    value = round_to_integer(at, value);
  if (at.sat) value = std::isnan(value) ? 0 : std::clamp(value, 0.0, 1.0);
  switch (at.type) {
    case Type::f32: return encode<float>(static_cast<float>(value));
    case Type::f64: return encode<double>(value);
    case Type::bf16: return bfloat_of(static_cast<float>(value));
    default: return half_of(static_cast<float>(value));
  }
}

// cvt.d.s, and cvt.rn.d2x.f32 d, high, low
void cvt(Warp& warp, const Instruction& at, Lanes mask) {
  if (at.type == Type::bf16x2 || at.type == Type::f16x2) {
    const bool is_relu = at.has("relu");
    const bool is_bfloat = at.type == Type::bf16x2;
    map2(warp, at, mask, [&](uint64_t high, uint64_t low) {
      const auto narrowed = [&](uint64_t bits) -> uint64_t {
        float value = decode<float>(bits);
        if (is_relu && value < 0) value = 0;
        return is_bfloat ? bfloat_of(value) : half_of(value);
      };
      return narrowed(high) << 16 | narrowed(low);
    });
    return;
  }
  if (at.type == Type::tf32)  // rna: ties away from zero
    return map1(warp, at, mask, [](uint64_t a) { return (a + 0x1000) & 0xFFFFE000; });
  const bool is_known = is_integer(at.source) || at.source == Type::f64 ||
                        with_float(at.source, [](auto) {});
  if (!is_known) unknown(warp, at);
  map1(warp, at, mask, [&](uint64_t a) { return convert(at, a); });
}

// ---- control, barriers, exchanges between lanes

void bra(Warp& warp, const Instruction& at, Lanes mask) {
  warp.jump(mask, static_cast<uint32_t>(at.operands[0].value));
}

void ret(Warp& warp, const Instruction&, Lanes mask) { warp.leave(mask); }

void trap(Warp& warp, const Instruction&, Lanes) { warp.fail("trap"); }

// Whether every lane that takes part is here. Others would have to come first, and none comes back.
void check_members(Warp& warp, const Instruction& at, Lanes mask, const Operand& operand) {
  const Warp::Values members = warp.read(operand);
  for_lanes(mask, [&](int lane) {
    if ((members[lane] & 0xFFFFFFFF) != mask)
      warp.fail(at.words[0] + " of other lanes than those that reach it");
  });
}

// bar.sync, barrier.cta.sync: all threads of the block, or the given number of them. What was
// written before is visible after. bar.red.or p, barrier, q: the same, and p tells whether q holds
// for any thread. bar.warp.sync members: the lanes of a warp.
void bar(Warp& warp, const Instruction& at, Lanes mask) {
  if (at.has("warp")) {
    check_members(warp, at, mask, at.operands[0]);
    if (mask == warp.alive()) ++warp.turn;
    return;
  }
  const bool is_reduction = at.has("red") && at.has("or");
  if (!at.has("sync") && !is_reduction) unknown(warp, at);
  const size_t first = is_reduction ? 1 : 0;
  const size_t count = at.operands.size() - (is_reduction ? 1 : 0);
  const uint64_t barrier = count > first ? warp.read_uniform(at.operands[first], mask) : 0;
  const uint64_t threads = count > first + 1 ? warp.read_uniform(at.operands[first + 1], mask) : 0;
  uint64_t* any = nullptr;
  bool own = false;
  if (is_reduction) {
    const Operand& predicate = at.operands.back();
    const Warp::Values values = warp.read(predicate);
    for_lanes(mask, [&](int lane) { own |= (values[lane] & 1) != uint64_t{predicate.negated}; });
    any = warp.write(at.operands[0]);
  }
  warp.block.arrive(warp, static_cast<int>(barrier), static_cast<int>(threads), mask, any, own);
}

// membar and fence order memory, which is in order here; fence.proxy.async makes generic writes
// that happened before visible to the asynchronous proxy.
void fence(Warp& warp, const Instruction& at, Lanes) {
  if (at.has("proxy")) warp.knowledge.fenced.join(warp.knowledge.happened);
}

void nothing(Warp&, const Instruction&, Lanes) {}

// shfl.sync.mode d[|p], a, b, c, members: lane's value from another lane of its segment; from
// itself, and p false, if that is none.
void shfl(Warp& warp, const Instruction& at, Lanes mask) {
  const Operand& target = at.operands[0];
  const bool has_two = target.kind == Operand::vector;
  const std::string& mode = at.words[2];
  check_members(warp, at, mask, at.operands[4]);
  const Warp::Values values = warp.read(at.operands[1]);
  const Warp::Values by = warp.read(at.operands[2]);
  const Warp::Values control = warp.read(at.operands[3]);
  std::array<uint64_t, kLanes> result{};
  std::array<bool, kLanes> in_range{};
  for_lanes(mask, [&](int lane) {
    const int b = static_cast<int>(by[lane] & 31);
    const int clamp = static_cast<int>(control[lane] & 31);
    const int segment = static_cast<int>(control[lane] >> 8 & 31);
    const int most = (lane & segment) | (clamp & ~segment);
    const int least = lane & segment;
    int from = lane;
    bool fits = true;
    if (mode == "up") from = lane - b, fits = from >= most;
    else if (mode == "down") from = lane + b, fits = from <= most;
    else if (mode == "bfly") from = lane ^ b, fits = from <= most;
    else from = least | (b & ~segment), fits = from <= most;
    if (!fits) from = lane;
    if (!(mask >> from & 1)) warp.fail("shfl.sync reads a lane that does not take part");
    result[lane] = values[from];
    in_range[lane] = fits;
  });
  uint64_t* d = warp.write(has_two ? target.parts[0] : target);
  for_lanes(mask, [&](int lane) { d[lane] = cut(result[lane], 32); });
  if (!has_two) return;
  uint64_t* p = warp.write(target.parts[1]);
  for_lanes(mask, [&](int lane) { p[lane] = in_range[lane]; });
}

// redux.sync.op d, a, members: over the lanes
void redux(Warp& warp, const Instruction& at, Lanes mask) {
  check_members(warp, at, mask, at.operands[2]);
  const Warp::Values values = warp.read(at.operands[1]);
  const std::string& op = at.words[2];
  uint64_t result = 0;
  bool is_first = true;
  for_lanes(mask, [&](int lane) {
    const uint64_t value = values[lane];
    if (is_first) result = value;
    else if (op == "add") result += value;
    else if (op == "and") result &= value;
    else if (op == "or") result |= value;
    else if (op == "xor") result ^= value;
    else
      with_integer(at.type, [&](auto t) {
        using T = decltype(t);
        const T a = decode<T>(result), b = decode<T>(value);
        result = encode<T>(op == "min" ? std::min(a, b) : std::max(a, b));
      });
    is_first = false;
  });
  uint64_t* d = warp.write(at.operands[0]);
  for_lanes(mask, [&](int lane) { d[lane] = cut(result, 32); });
}

// vote.sync.mode d, p, members
void vote(Warp& warp, const Instruction& at, Lanes mask) {
  check_members(warp, at, mask, at.operands[2]);
  const Warp::Values values = warp.read(at.operands[1]);
  const bool negated = at.operands[1].negated;
  uint32_t ballot = 0;
  for_lanes(mask, [&](int lane) {
    ballot |= uint32_t{(values[lane] & 1) != uint64_t{negated}} << lane;
  });
  uint64_t result = ballot;
  if (at.has("any")) result = ballot != 0;
  if (at.has("all")) result = ballot == mask;
  if (at.has("uni")) result = ballot == mask || ballot == 0;
  uint64_t* d = warp.write(at.operands[0]);
  for_lanes(mask, [&](int lane) { d[lane] = result; });
}

// match.any.sync d, a, members: the lanes with the same value
void match(Warp& warp, const Instruction& at, Lanes mask) {
  if (!at.has("any")) unknown(warp, at);
  check_members(warp, at, mask, at.operands[2]);
  const Warp::Values values = warp.read(at.operands[1]);
  std::array<uint64_t, kLanes> result{};
  for_lanes(mask, [&](int lane) {
    for_lanes(mask, [&](int other) {
      if (cut(values[other], bits_of(at.type)) == cut(values[lane], bits_of(at.type)))
        result[lane] |= uint64_t{1} << other;
    });
  });
  uint64_t* d = warp.write(at.operands[0]);
  for_lanes(mask, [&](int lane) { d[lane] = result[lane]; });
}

void activemask(Warp& warp, const Instruction& at, Lanes mask) {
  uint64_t* d = warp.write(at.operands[0]);
  for_lanes(mask, [&](int lane) { d[lane] = mask; });
}

// elect.sync d|p, members: p is true in one lane; here in any that takes part, as the ISA allows
void elect(Warp& warp, const Instruction& at, Lanes mask) {
  const uint64_t leader = static_cast<uint64_t>(__builtin_ctz(mask));
  uint64_t* d = warp.write(at.operands[0].parts[0]);
  for_lanes(mask, [&](int lane) { d[lane] = leader; });
  uint64_t* p = warp.write(at.operands[0].parts[1]);
  for_lanes(mask, [&](int lane) { p[lane] = static_cast<uint64_t>(lane) == leader; });
}

// ---- memory

enum class Space { parameter, shared, global };

Space space_of(const Instruction& at, uint64_t address) {
  for (const std::string& word : at.words) {
    if (word == "param") return Space::parameter;
    if (word.rfind("shared", 0) == 0) return Space::shared;
    if (word == "global") return Space::global;
  }
  return address >= kParameterBase ? Space::parameter : Space::global;
}

std::vector<Operand> parts_of(const Operand& operand) {
  return operand.kind == Operand::vector ? operand.parts : std::vector<Operand>{operand};
}

// ld[.space][.vN].type d, [address]
void ld(Warp& warp, const Instruction& at, Lanes mask) {
  const std::vector<Operand> targets = parts_of(at.operands[0]);
  const int size = bits_of(at.type) / 8;
  const int total = size * static_cast<int>(targets.size());
  const bool is_atomic = at.has("acquire") || at.has("relaxed") || at.has("volatile");
  std::vector<std::array<uint64_t, kLanes>> values(targets.size());
  for_lanes(mask, [&](int lane) {
    uint8_t bytes[32];
    const uint64_t address = warp.address(at.operands[1], lane);
    switch (space_of(at, address)) {
      case Space::parameter: {
        const uint64_t offset = address & 0xFFFFFFFF;
        if (offset + total > warp.machine.parameters.size())
          warp.fail("A load behind the parameters");
        std::memcpy(bytes, &warp.machine.parameters[offset], total);
        break;
      }
      case Space::shared: warp.block.shared->load(warp, lane, address, bytes, total); break;
      case Space::global:
        if (at.has("acquire")) warp.machine.acquire(warp, address);
        warp.machine.load(warp, lane, address, bytes, total, is_atomic);
        break;
    }
    for (size_t i = 0; i < targets.size(); ++i) {
      uint64_t value = 0;
      std::memcpy(&value, bytes + size * i, size);
      with_integer(at.type, [&](auto t) {
        if (std::is_signed_v<decltype(t)>)
          value = static_cast<uint64_t>(static_cast<int64_t>(decode<decltype(t)>(value)));
      });
      values[i][lane] = value;
    }
  });
  for (size_t i = 0; i < targets.size(); ++i) {
    uint64_t* d = warp.write(targets[i]);
    for_lanes(mask, [&](int lane) { d[lane] = values[i][lane]; });
  }
}

// st[.space][.vN].type [address], a
void st(Warp& warp, const Instruction& at, Lanes mask) {
  const std::vector<Operand> sources = parts_of(at.operands[1]);
  const int size = bits_of(at.type) / 8;
  const int total = size * static_cast<int>(sources.size());
  std::vector<Warp::Values> values;
  for (const Operand& source : sources) values.push_back(warp.read(source));
  std::map<uint64_t, uint64_t> stored;  // lanes of one instruction that store other values
  for_lanes(mask, [&](int lane) {
    uint8_t bytes[32];
    for (size_t i = 0; i < sources.size(); ++i) {
      const uint64_t value = values[i][lane];
      std::memcpy(bytes + size * i, &value, size);
    }
    const uint64_t address = warp.address(at.operands[0], lane);
    uint64_t digest = 0;
    for (int i = 0; i < total; ++i) digest = digest * 257 + bytes[i] + 1;
    const auto [entry, is_new] = stored.emplace(address, digest);
    if (!is_new && entry->second != digest)
      warp.fail("Race: two lanes store different values to one address");
    if (space_of(at, address) == Space::shared)
      warp.block.shared->store(warp, lane, address, bytes, total);
    else
      warp.machine.store(warp, lane, address, bytes, total);
  });
}

uint64_t combined(const Instruction& at, uint64_t old, uint64_t a, uint64_t b) {
  uint64_t result = 0;
  const auto is = [&](const char* op) { return at.has(op); };
  if (is("exch")) return a;
  if (is("cas")) return cut(old, bits_of(at.type)) == cut(a, bits_of(at.type)) ? b : old;
  const bool is_integer_type = with_integer(at.type, [&](auto t) {
    using T = decltype(t);
    const T x = decode<T>(old), y = decode<T>(a);
    if (is("add")) result = encode<T>(wrapping(x, y, std::plus<>()));
    else if (is("min")) result = encode<T>(std::min(x, y));
    else if (is("max")) result = encode<T>(std::max(x, y));
    else if (is("and")) result = old & a;
    else if (is("or")) result = old | a;
    else if (is("xor")) result = old ^ a;
    else if (is("inc")) result = encode<T>(x >= y ? T{0} : static_cast<T>(x + 1));
    else throw std::runtime_error("The emulator does not know " + at.opcode);
  });
  if (is_integer_type) return result;
  with_float(at.type, [&](auto t) {
    using T = decltype(t);
    result = encode(narrow<T>(double{widen(decode<T>(old))} + widen(decode<T>(a))));
  });
  return result;
}

// atom.op d, [address], a[, b] and red.op [address], a
void atomic(Warp& warp, const Instruction& at, Lanes mask) {
  const bool has_result = at.words[0] == "atom";
  const size_t first = has_result ? 1 : 0;
  const int size = bits_of(at.type) / 8;
  const Warp::Values a = warp.read(at.operands[first + 1]);
  const bool has_b = at.operands.size() > first + 2;
  const Warp::Values b = has_b ? warp.read(at.operands[first + 2]) : a;
  const bool releases = at.has("release") || at.has("acq_rel");
  const bool acquires = at.has("acquire") || at.has("acq_rel");
  std::array<uint64_t, kLanes> before{};
  for_lanes(mask, [&](int lane) {
    const uint64_t address = warp.address(at.operands[first], lane);
    uint64_t old = 0;
    if (space_of(at, address) == Space::shared) {
      warp.block.shared->load_atomic(warp, address, &old, size);
      const uint64_t fresh = combined(at, old, a[lane], b[lane]);
      warp.block.shared->store_atomic(warp, address, &fresh, size);
    } else {
      if (releases) warp.machine.release(warp.block, address);
      warp.machine.load(warp, lane, address, &old, size, true);
      const uint64_t fresh = combined(at, old, a[lane], b[lane]);
      warp.machine.store(warp, lane, address, &fresh, size, true);
      if (acquires) warp.machine.acquire(warp, address);
    }
    before[lane] = old;
  });
  if (!has_result) return;
  uint64_t* d = warp.write(at.operands[0]);
  for_lanes(mask, [&](int lane) { d[lane] = before[lane]; });
}

struct Entry {
  const char* name;  // the opcode up to a dot
  Semantics run;
};

// The longest name that fits decides.
constexpr Entry kTable[] = {
    // arithmetic
    {"add", add}, {"sub", sub}, {"mul", mul}, {"mul24", nullptr}, {"mad", mad}, {"fma", fma},
    {"div", div}, {"rem", rem}, {"min", min}, {"max", max}, {"abs", abs}, {"neg", neg},
    {"ex2", elementary<power_of_two>}, {"lg2", elementary<logarithm>},
    {"rcp", elementary<reciprocal>}, {"sqrt", elementary<root>},
    {"rsqrt", elementary<reciprocal_root>}, {"tanh", elementary<hyperbolic_tangent>},
    {"sin", elementary<sine>}, {"cos", elementary<cosine>},
    // bits
    {"and", bit_and}, {"or", bit_or}, {"xor", bit_xor}, {"not", bit_not}, {"shl", shl},
    {"shr", shr}, {"shf", shf}, {"bfe", bfe}, {"bfi", bfi}, {"prmt", prmt}, {"lop3", lop3},
    {"popc", popc}, {"clz", clz}, {"brev", brev}, {"bfind", bfind},
    // moves, comparisons, conversions
    {"mov", mov}, {"cvta", cvta}, {"selp", selp}, {"setp", setp}, {"cvt", cvt},
    // control
    {"bra", bra}, {"ret", ret}, {"exit", ret}, {"trap", trap}, {"bar", bar}, {"barrier", bar},
    {"membar", fence}, {"fence", fence}, {"griddepcontrol", nothing}, {"nanosleep", nothing},
    {"prefetch", nothing}, {"pragma", nothing},
    // between lanes
    {"shfl", shfl}, {"redux", redux}, {"vote", vote}, {"match", match}, {"elect", elect},
    {"activemask", activemask},
    // memory
    {"ld", ld}, {"ldu", ld}, {"st", st}, {"atom", atomic}, {"red", atomic},
    // copies.cpp
    {"cp.async", copy_async}, {"cp.async.commit_group", copy_commit},
    {"cp.async.wait_group", copy_wait}, {"cp.async.wait_all", copy_wait},
    {"cp.async.bulk.tensor", bulk_copy}, {"cp.async.bulk.commit_group", bulk_commit},
    {"cp.async.bulk.wait_group", bulk_wait},
    {"mbarrier.init", barrier_init}, {"mbarrier.inval", barrier_invalidate},
    {"mbarrier.arrive", barrier_arrive}, {"mbarrier.expect_tx", barrier_arrive},
    {"mbarrier.try_wait", barrier_wait}, {"mbarrier.test_wait", barrier_wait},
    // matrices.cpp
    {"ldmatrix", load_matrix}, {"stmatrix", store_matrix}, {"mma", multiply},
    {"wgmma.fence", product_fence}, {"wgmma.mma_async", product_issue},
    {"wgmma.commit_group", product_commit}, {"wgmma.wait_group", product_wait},
    // tensors.cpp
    {"tcgen05.alloc", tensor_allocate}, {"tcgen05.dealloc", tensor_free},
    {"tcgen05.relinquish_alloc_permit", nothing}, {"tcgen05.mma", tensor_multiply},
    {"tcgen05.commit", tensor_commit}, {"tcgen05.ld", tensor_load}, {"tcgen05.st", tensor_store},
    {"tcgen05.wait::ld", tensor_wait}, {"tcgen05.wait::st", tensor_wait},
};

}  // namespace

Semantics semantics_of(const Instruction& at) {
  const Entry* best = nullptr;
  for (const Entry& entry : kTable) {
    const std::string name = entry.name;
    const bool fits = at.opcode.compare(0, name.size(), name) == 0 &&
                      (at.opcode.size() == name.size() || at.opcode[name.size()] == '.');
    if (fits && (best == nullptr || name.size() > std::strlen(best->name))) best = &entry;
  }
  return best == nullptr ? nullptr : best->run;
}

bool is_awaited(const Instruction& at) {
  return at.run == product_issue || at.run == tensor_load;
}

}  // namespace emulator
