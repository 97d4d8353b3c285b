// Vector instructions that fill, spread or reduce: their operands differ in shape.
#pragma once

#include "vector.h"

namespace emu {

template <typename T>
void fill(const LocalTensor<T>& dst, T value, const Lanes& lanes, uint32_t repeats, uint32_t block_stride,
          int64_t repeat_stride, Where at) {
    if (repeats == 0) return;
    const Operand<T> to(dst, block_stride, stride8(repeat_stride, at), lanes, repeats, at);
    const uint32_t time = start_vector(repeats);
    double values[128];
    std::fill(std::begin(values), std::end(values), double(value));
    for (uint32_t r = 0; r < repeats; ++r) to.store(r, time, values);
}

// Writes `count` results of one repeat next to each other.
template <typename T>
void put(uint32_t address, const double* values, uint32_t count, uint32_t time, Where at) {
    core.write(VECTOR, time, address, count * sizeof(T), DEFINED, at);
    for (uint32_t i = 0; i < count; ++i) {
        const T value = T(float(values[i]));
        std::memcpy(core.ub + address + i * sizeof(T), &value, sizeof(T));
    }
}

// Each repeat's lanes in groups of `group`; a group without a lane leaves its result untouched.
template <typename T, typename F>
void reduce(const char* name, const LocalTensor<T>& dst, const LocalTensor<T>& src, uint32_t group, int64_t mask,
            int64_t repeats, uint64_t step, uint32_t align, int64_t src_block, int64_t src_repeat, Where at, F f) {
    check_type<T, half, float>(name, at);
    check_repeat(repeats, at);
    if (repeats == 0) return;
    const Lanes lanes = Lanes::first(uint64_t(mask), width_of<T>(), at);
    const Operand<T> from(src, uint32_t(src_block), stride8(src_repeat, at), lanes, uint32_t(repeats), at);
    if (dst.offset() % align) core.fail(rule::ALIGN, at, "UB address %u, %u bytes asked for", dst.offset(), align);
    const auto results = uint32_t((mask + group - 1) / group);
    const uint32_t base = dst.checked(uint64_t(repeats - 1) * step + results * sizeof(T), at);
    const uint32_t time = start_vector(uint32_t(repeats));
    double x[128], y[64];
    for (uint32_t r = 0; r < repeats; ++r) {
        from.load(r, time, x);
        for (uint32_t g = 0; g < results; ++g) {
            y[g] = x[g * group];
            for (uint32_t i = g * group + 1; i < std::min(uint32_t(mask), (g + 1) * group); ++i) y[g] = f(y[g], x[i]);
        }
        put<T>(base + uint32_t(r * step), y, results, time, at);
    }
}

inline double sum_of(double a, double b) { return double(float(a) + float(b)); }
inline double max_of(double a, double b) { return std::max(a, b); }

}  // namespace emu

namespace AscendC {

enum class ReduceOrder { ORDER_VALUE_INDEX, ORDER_INDEX_VALUE, ORDER_ONLY_VALUE };

template <typename T>
void Duplicate(const LocalTensor<T>& dst, T value, int32_t count, EMU_AT) {
    emu::by_count(count, emu::width_of<T>(), at, [&](const emu::Lanes& lanes, uint32_t repeats, uint32_t start) {
        emu::fill(dst[start], value, lanes, repeats, 1, 8, at);
    });
}

template <typename T>
void Duplicate(const LocalTensor<T>& dst, T value, uint64_t mask, int64_t repeat, uint16_t block_stride,
               int64_t repeat_stride, EMU_AT) {
    emu::check_repeat(repeat, at);
    emu::fill(dst, value, emu::Lanes::first(mask, emu::width_of<T>(), at), uint32_t(repeat), block_stride,
              repeat_stride, at);
}

template <typename T>
void Duplicate(const LocalTensor<T>& dst, T value, uint64_t mask[], int64_t repeat, uint16_t block_stride,
               int64_t repeat_stride, EMU_AT) {
    emu::check_repeat(repeat, at);
    emu::fill(dst, value, emu::Lanes::of(mask, emu::width_of<T>(), at), uint32_t(repeat), block_stride, repeat_stride,
              at);
}

struct BrcbRepeatParams {
    BrcbRepeatParams(uint16_t block_stride, uint16_t repeat_stride)
        : dstBlkStride(block_stride), dstRepStride(repeat_stride) {}
    uint16_t dstBlkStride, dstRepStride;
};

// Each repeat spreads 8 elements over 8 blocks.
template <typename T>
void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src, int64_t repeat, const BrcbRepeatParams& p, EMU_AT) {
    using emu::core;
    emu::check_repeat(repeat, at);
    if (p.dstBlkStride == 0) core.fail(emu::rule::BRCB_STRIDE, at, "dstBlkStride 0");
    if (repeat == 0) return;
    const uint64_t last = uint64_t(repeat - 1) * p.dstRepStride + 7ULL * p.dstBlkStride;
    if (dst.offset() % emu::BLOCK || src.offset() % emu::BLOCK)
        core.fail(emu::rule::ALIGN, at, "UB addresses %u and %u", dst.offset(), src.offset());
    const uint32_t to = dst.checked((last + 1) * emu::BLOCK, at);
    const uint32_t from = src.checked(uint64_t(repeat) * 8 * sizeof(T), at);
    if (to < from + repeat * 8 * sizeof(T) && from < to + (last + 1) * emu::BLOCK)
        core.fail(emu::rule::OVERLAP, at, "UB addresses %u and %u", to, from);
    const uint32_t time = emu::start_vector(uint32_t(repeat));
    for (uint32_t r = 0; r < repeat; ++r)
        for (uint32_t i = 0; i < 8; ++i) {
            const uint32_t source = from + (r * 8 + i) * uint32_t(sizeof(T));
            const uint32_t block = to + (r * p.dstRepStride + i * p.dstBlkStride) * emu::BLOCK;
            core.read(emu::VECTOR, time, source, sizeof(T), at);
            core.write(emu::VECTOR, time, block, emu::BLOCK, emu::DEFINED, at);
            for (uint32_t k = 0; k < emu::BLOCK; k += sizeof(T)) std::memcpy(core.ub + block + k, core.ub + source, sizeof(T));
        }
}

// One value of a repeat; the stride between results counts elements.
template <typename T>
void WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, int32_t mask, int32_t repeat,
                    int32_t dst_repeat, int32_t src_block, int32_t src_repeat, EMU_AT) {
    emu::reduce("WholeReduceSum", dst, src, emu::width_of<T>(), mask, repeat, uint64_t(dst_repeat) * sizeof(T),
                sizeof(T), src_block, src_repeat, at, emu::sum_of);
}

template <typename T>
void WholeReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, int32_t mask, int32_t repeat,
                    int32_t dst_repeat, int32_t src_block, int32_t src_repeat, ReduceOrder order, EMU_AT) {
    if (order != ReduceOrder::ORDER_ONLY_VALUE)
        emu::core.fail(emu::rule::DTYPE, at, "WholeReduceMax with indices is not emulated");
    emu::reduce("WholeReduceMax", dst, src, emu::width_of<T>(), mask, repeat, uint64_t(dst_repeat) * sizeof(T),
                2 * sizeof(T), src_block, src_repeat, at, emu::max_of);
}

// One value of a block, 8 of a repeat. Here `repeat` comes before `mask`.
template <typename T>
void BlockReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, int32_t repeat, int32_t mask,
                    int32_t dst_repeat, int32_t src_block, int32_t src_repeat, EMU_AT) {
    emu::reduce("BlockReduceSum", dst, src, emu::BLOCK / sizeof(T), mask, repeat, uint64_t(dst_repeat) * 8 * sizeof(T),
                8 * sizeof(T), src_block, src_repeat, at, emu::sum_of);
}

template <typename T>
void BlockReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, int32_t repeat, int32_t mask,
                    int32_t dst_repeat, int32_t src_block, int32_t src_repeat, EMU_AT) {
    emu::reduce("BlockReduceMax", dst, src, emu::BLOCK / sizeof(T), mask, repeat, uint64_t(dst_repeat) * 8 * sizeof(T),
                8 * sizeof(T), src_block, src_repeat, at, emu::max_of);
}

// Sums of neighbours, half a repeat's lanes of them.
template <typename T>
void PairReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, int32_t repeat, int32_t mask,
                   int32_t dst_repeat, int32_t src_block, int32_t src_repeat, EMU_AT) {
    emu::reduce("PairReduceSum", dst, src, 2, mask, repeat, uint64_t(dst_repeat) * 128, emu::BLOCK, src_block,
                src_repeat, at, emu::sum_of);
}

}  // namespace AscendC
