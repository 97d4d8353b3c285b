// Element-wise vector instructions.
#pragma once

#include "lanes.h"

namespace AscendC {

// Strides in blocks of 32 bytes; taken as integers so that one too large is noticed instead of truncated.
struct BinaryRepeatParams {
    BinaryRepeatParams(int dst_block, int src0_block, int src1_block, int dst_repeat, int src0_repeat, int src1_repeat)
        : block{dst_block, src0_block, src1_block}, repeat{dst_repeat, src0_repeat, src1_repeat} {}
    int block[3], repeat[3];
};

struct UnaryRepeatParams {
    UnaryRepeatParams(int dst_block, int src_block, int dst_repeat, int src_repeat)
        : block{dst_block, src_block}, repeat{dst_repeat, src_repeat} {}
    int block[2], repeat[2];
};

enum class RoundMode { CAST_NONE, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC, CAST_ODD };

}  // namespace AscendC

namespace emu {

using AscendC::LocalTensor;

template <typename T, typename... Allowed>
void check_type(const char* instruction, Where at) {
    if (!one_of<T, Allowed...>()) core.fail(rule::DTYPE, at, "%s of %s", instruction, type_name<T>());
}

// dst = f(src0, src1), or f(src0, src1, dst) where `accumulates`.
template <bool accumulates, typename D, typename A, typename B, typename F>
void binary(const LocalTensor<D>& dst, const LocalTensor<A>& src0, const LocalTensor<B>& src1, const Lanes& lanes,
            uint32_t repeats, const AscendC::BinaryRepeatParams& p, Where at, F f) {
    if (repeats == 0) return;
    const Operand<D> to(dst, uint32_t(p.block[0]), stride8(p.repeat[0], at), lanes, repeats, at);
    const Operand<A> a(src0, uint32_t(p.block[1]), stride8(p.repeat[1], at), lanes, repeats, at);
    const Operand<B> b(src1, uint32_t(p.block[2]), stride8(p.repeat[2], at), lanes, repeats, at);
    to.check_apart(a, !accumulates), to.check_apart(b, !accumulates);
    const uint32_t time = start_vector(repeats);
    double x[128], y[128], z[128];
    for (uint32_t r = 0; r < repeats; ++r) {
        a.load(r, time, x), b.load(r, time, y);
        if (accumulates) to.load(r, time, z);
        for (uint32_t i = 0; i < lanes.end(); ++i)
            if (lanes.on(i)) z[i] = f(x[i], y[i], accumulates ? z[i] : 0.0);
        to.store(r, time, z);
    }
}

template <typename D, typename S, typename F>
void unary(const LocalTensor<D>& dst, const LocalTensor<S>& src, const Lanes& lanes, uint32_t repeats,
           const AscendC::UnaryRepeatParams& p, Where at, F f) {
    if (repeats == 0) return;
    const Operand<D> to(dst, uint32_t(p.block[0]), stride8(p.repeat[0], at), lanes, repeats, at);
    const Operand<S> from(src, uint32_t(p.block[1]), stride8(p.repeat[1], at), lanes, repeats, at);
    to.check_apart(from, true);
    const uint32_t time = start_vector(repeats);
    double x[128];
    for (uint32_t r = 0; r < repeats; ++r) {
        from.load(r, time, x);
        for (uint32_t i = 0; i < lanes.end(); ++i)
            if (lanes.on(i)) x[i] = f(x[i]);
        to.store(r, time, x);
    }
}

constexpr int step_of(uint32_t width, size_t size) { return int(width * size / BLOCK); }

template <typename D, typename S, typename F>
void unary_count(const LocalTensor<D>& dst, const LocalTensor<S>& src, int64_t count, Where at, F f) {
    constexpr uint32_t width = width_of<D, S>();
    by_count(count, width, at, [&](const Lanes& lanes, uint32_t repeats, uint32_t start) {
        unary(dst[start], src[start], lanes, repeats, {1, 1, step_of(width, sizeof(D)), step_of(width, sizeof(S))}, at, f);
    });
}

template <typename T, typename F>
void binary_count(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, int64_t count,
                  Where at, F f) {
    by_count(count, width_of<T>(), at, [&](const Lanes& lanes, uint32_t repeats, uint32_t start) {
        binary<false>(dst[start], src0[start], src1[start], lanes, repeats, {1, 1, 1, 8, 8, 8}, at, f);
    });
}

template <typename D, typename S>
bool castable(AscendC::RoundMode mode) {
    const bool none = mode == AscendC::RoundMode::CAST_NONE, odd = mode == AscendC::RoundMode::CAST_ODD;
    if (one_of<S, half, bfloat16_t>() && std::is_same<D, float>()) return none;
    if (std::is_same<S, float>() && std::is_same<D, half>()) return true;
    if (std::is_same<S, float>() && std::is_same<D, bfloat16_t>()) return !none && !odd;
    if (std::is_same<S, int32_t>() && std::is_same<D, float>()) return !odd;
    return std::is_same<S, float>() && std::is_same<D, int32_t>() && !none && !odd;
}

template <typename D, typename S>
void check_cast(AscendC::RoundMode mode, Where at) {
    bool any = false;
    for (int m = 0; m <= int(AscendC::RoundMode::CAST_ODD); ++m) any |= castable<D, S>(AscendC::RoundMode(m));
    if (!any) core.fail(rule::DTYPE, at, "Cast of %s to %s", type_name<S>(), type_name<D>());
    if (!castable<D, S>(mode)) core.fail(rule::ROUND, at, "mode %d from %s to %s", int(mode), type_name<S>(), type_name<D>());
    const bool exact = one_of<S, half, bfloat16_t>();
    if (!exact && mode != AscendC::RoundMode::CAST_RINT && mode != AscendC::RoundMode::CAST_NONE)
        core.fail(rule::ROUND, at, "mode %d is not emulated: only NONE and RINT are", int(mode));
}

}  // namespace emu

namespace AscendC {

#define EMU_BINARY(NAME, EXPRESSION, ...)                                                                         \
    template <typename T>                                                                                         \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, int32_t count,   \
              EMU_AT) {                                                                                           \
        emu::check_type<T, __VA_ARGS__>(#NAME, at);                                                               \
        emu::binary_count(dst, src0, src1, count, at, [](double a, double b, double) { return EXPRESSION; });     \
    }                                                                                                             \
    template <typename T>                                                                                         \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, uint64_t mask,   \
              int64_t repeat, const BinaryRepeatParams& p, EMU_AT) {                                              \
        emu::check_type<T, __VA_ARGS__>(#NAME, at);                                                               \
        emu::check_repeat(repeat, at);                                                                            \
        emu::binary<false>(dst, src0, src1, emu::Lanes::first(mask, emu::width_of<T>(), at), uint32_t(repeat), p, \
                           at, [](double a, double b, double) { return EXPRESSION; });                            \
    }
EMU_BINARY(Add, a + b, half, float, int16_t, int32_t)
EMU_BINARY(Sub, a - b, half, float, int16_t, int32_t)
EMU_BINARY(Mul, a* b, half, float, int16_t, int32_t)
EMU_BINARY(Max, std::max(a, b), half, float, int16_t, int32_t)
EMU_BINARY(Min, std::min(a, b), half, float, int16_t, int32_t)
EMU_BINARY(Div, a / b, half, float)
#undef EMU_BINARY

// dst += src0 * src1. With halves into floats, a repeat is 64 lanes: 4 blocks of either source.
template <typename D, typename S>
void MulAddDst(const LocalTensor<D>& dst, const LocalTensor<S>& src0, const LocalTensor<S>& src1, uint64_t mask,
               int64_t repeat, const BinaryRepeatParams& p, EMU_AT) {
    emu::check_type<D, half, float>("MulAddDst into", at);
    emu::check_type<S, half, D>("MulAddDst", at);
    emu::check_repeat(repeat, at);
    emu::binary<true>(dst, src0, src1, emu::Lanes::first(mask, emu::width_of<D, S>(), at), uint32_t(repeat), p, at,
                      [](double a, double b, double c) { return a * b + c; });
}

#define EMU_UNARY(NAME, EXPRESSION)                                                                              \
    template <typename T>                                                                                        \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, int32_t count, EMU_AT) {                     \
        emu::check_type<T, half, float>(#NAME, at);                                                              \
        emu::unary_count(dst, src, count, at, [](double a) { return EXPRESSION; });                              \
    }
EMU_UNARY(Exp, double(std::exp(float(a))))
EMU_UNARY(Ln, std::log(a))
EMU_UNARY(Abs, std::fabs(a))
EMU_UNARY(Reciprocal, 1.0 / a)
#undef EMU_UNARY

#define EMU_SCALAR(NAME, EXPRESSION)                                                                             \
    template <typename T>                                                                                        \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, T scalar, int32_t count, EMU_AT) {           \
        emu::check_type<T, half, float, int16_t, int32_t>(#NAME, at);                                            \
        emu::unary_count(dst, src, count, at, [b = double(scalar)](double a) { return EXPRESSION; });            \
    }
EMU_SCALAR(Adds, a + b)
EMU_SCALAR(Muls, a* b)
EMU_SCALAR(Maxs, std::max(a, b))
EMU_SCALAR(Mins, std::min(a, b))
#undef EMU_SCALAR

template <typename D, typename S>
void Cast(const LocalTensor<D>& dst, const LocalTensor<S>& src, RoundMode mode, int32_t count, EMU_AT) {
    emu::check_cast<D, S>(mode, at);
    emu::unary_count(dst, src, count, at, [](double a) { return a; });
}

template <typename D, typename S>
void Cast(const LocalTensor<D>& dst, const LocalTensor<S>& src, RoundMode mode, uint64_t mask, int64_t repeat,
          const UnaryRepeatParams& p, EMU_AT) {
    emu::check_cast<D, S>(mode, at);
    emu::check_repeat(repeat, at);
    emu::unary(dst, src, emu::Lanes::first(mask, emu::width_of<D, S>(), at), uint32_t(repeat), p, at,
               [](double a) { return a; });
}

}  // namespace AscendC
