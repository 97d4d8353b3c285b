// Element types of the NPU on the host: half and bfloat16 as bit patterns, converted through float.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace emu {

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float widen_half(uint16_t bits) {
    const float sign = bits & 0x8000 ? -1.0F : 1.0F;
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 31) return fraction ? float_of(0x7fc00000U) : sign * INFINITY;
    return sign * (exponent ? std::ldexp(1024.0F + fraction, exponent - 25) : std::ldexp(float(fraction), -24));
}

inline const std::array<float, 65536> HALVES = [] {
    std::array<float, 65536> table{};
    for (uint32_t i = 0; i < table.size(); ++i) table[i] = widen_half(uint16_t(i));
    return table;
}();

// Rounds to nearest, ties to even, as CAST_RINT does.
inline uint16_t narrow_half(float value) {
    const uint16_t sign = uint16_t(bits_of(value) >> 16 & 0x8000);
    const float size = std::fabs(value);
    if (std::isnan(value)) return 0x7e00;
    if (size >= 65520.0F) return sign | 0x7c00;
    if (size < 0x1p-14F) return sign | uint16_t(std::nearbyint(size * 0x1p24F));
    const uint32_t bits = bits_of(size);
    return sign | uint16_t(((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112U << 10));
}

}  // namespace emu

struct half {
    uint16_t bits;
    half() = default;
    half(float value) : bits(emu::narrow_half(value)) {}
    operator float() const { return emu::HALVES[bits]; }
};

struct bfloat16_t {
    uint16_t bits;
    bfloat16_t() = default;
    bfloat16_t(float value) {
        const uint32_t wide = emu::bits_of(value);
        bits = std::isnan(value) ? 0x7fc0 : uint16_t((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
    }
    operator float() const { return emu::float_of(uint32_t(bits) << 16); }
};

namespace emu {

template <typename T>
constexpr const char* type_name() {
    if (std::is_same<T, half>()) return "half";
    if (std::is_same<T, bfloat16_t>()) return "bfloat16_t";
    if (std::is_same<T, float>()) return "float";
    if (std::is_same<T, int32_t>()) return "int32_t";
    return "another type";
}

template <typename T, typename... Allowed>
constexpr bool one_of() {
    return (std::is_same<T, Allowed>() || ...);
}

}  // namespace emu
