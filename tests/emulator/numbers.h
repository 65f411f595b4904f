// The number formats of PTX, in the lower bits of 64-bit registers.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace emulator {

inline float float_of_bits(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t bits_of_float(float value) { return std::bit_cast<uint32_t>(value); }
inline double double_of_bits(uint64_t bits) { return std::bit_cast<double>(bits); }
inline uint64_t bits_of_double(double value) { return std::bit_cast<uint64_t>(value); }

inline float float_of_bfloat(uint16_t bits) { return float_of_bits(uint32_t{bits} << 16); }

// Rounds to the nearest, ties to even.
inline uint16_t bfloat_of(float value) {
  const uint32_t bits = bits_of_float(value);
  if (std::isnan(value)) return 0x7FFF;
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline float float_of_half(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t exponent = bits >> 10 & 31;
  const uint32_t fraction = bits & 1023u;
  if (exponent == 31) return float_of_bits(sign | 0x7F800000 | fraction << 13);
  if (exponent != 0) return float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
  const float small = std::ldexp(static_cast<float>(fraction), -24);
  return sign ? -small : small;
}

inline uint16_t half_of(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint16_t sign = bits >> 16 & 0x8000;
  if (std::isnan(value)) return 0x7FFF;
  const float size = std::fabs(value);
  if (size >= 65520.f) return sign | 0x7C00;
  if (size < std::ldexp(1.f, -14))  // multiples of 2^-24
    return sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(size, 24)));
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  const uint32_t rounded = magnitude + 0xFFF + (magnitude >> 13 & 1);
  return sign | static_cast<uint16_t>((rounded >> 13) - (112 << 10));
}

inline float flush(float value) {
  return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.f, value) : value;
}

// What tensor cores see of a tf32 operand: ten bits of the fraction.
inline float truncate_to_tf32(float value) { return float_of_bits(bits_of_float(value) & ~0x1FFFu); }

// Formats that no C++ type has. Arithmetic on them happens in float, rounded once.
struct Bfloat {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

template <class T>
T decode(uint64_t bits) {
  if constexpr (std::is_same_v<T, float>) return float_of_bits(static_cast<uint32_t>(bits));
  else if constexpr (std::is_same_v<T, double>) return double_of_bits(bits);
  else if constexpr (std::is_same_v<T, Bfloat> || std::is_same_v<T, Half>)
    return T{static_cast<uint16_t>(bits)};
  else return static_cast<T>(bits);
}

template <class T>
uint64_t encode(T value) {
  if constexpr (std::is_same_v<T, float>) return bits_of_float(value);
  else if constexpr (std::is_same_v<T, double>) return bits_of_double(value);
  else if constexpr (std::is_same_v<T, Bfloat> || std::is_same_v<T, Half>) return value.bits;
  else return static_cast<uint64_t>(static_cast<std::make_unsigned_t<T>>(value));
}

inline float widen(float value) { return value; }
inline float widen(Bfloat value) { return float_of_bfloat(value.bits); }
inline float widen(Half value) { return float_of_half(value.bits); }

template <class T>
T narrow(double value) {
  if constexpr (std::is_same_v<T, float>) return static_cast<float>(value);
  else if constexpr (std::is_same_v<T, Bfloat>) return Bfloat{bfloat_of(static_cast<float>(value))};
  else return Half{half_of(static_cast<float>(value))};
}

}  // namespace emulator
