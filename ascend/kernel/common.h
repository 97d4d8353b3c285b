// Small steps that the kernels share. Everything here runs on the vector pipe.
#pragma once

#include "kernel_operator.h"
#include "tiling.h"

namespace paged_kv {

using namespace AscendC;

// Stands for minus infinity where a difference of two must not be NaN: the lowest finite float. Any other one is so much
// larger that the exponential of the difference is 0.
constexpr float LOWEST = -3.402823466e38F;
constexpr float MINUS_INFINITY = -__builtin_huge_valf();
constexpr uint32_t REPEAT = 64;  // floats in a repeat

__aicore__ inline uint32_t Min(uint32_t a, uint32_t b) { return a < b ? a : b; }
__aicore__ inline uint32_t RoundUp(uint32_t value, uint32_t step) { return (value + step - 1) / step * step; }

// Dependent vector instructions are not ordered by the hardware.
__aicore__ inline void Then() { PipeBarrier<PIPE_V>(); }

struct Multiply {
    template <typename... A>
    static __aicore__ void Apply(A... a) { Mul(a...); }
};
struct Divide {
    template <typename... A>
    static __aicore__ void Apply(A... a) { Div(a...); }
};

// dst[0 … count) = src[0 … count) op factor, where the factor fills one block.
template <typename Op>
__aicore__ inline void ByFactor(const LocalTensor<float>& dst, const LocalTensor<float>& src,
                                const LocalTensor<float>& factor, uint32_t count) {
    const uint32_t full = count / REPEAT, rest = count % REPEAT;
    const BinaryRepeatParams strides(1, 1, 0, 8, 8, 0);
    if (full) Op::Apply(dst, src, factor, uint64_t(REPEAT), full, strides);
    if (rest) Op::Apply(dst[full * REPEAT], src[full * REPEAT], factor, uint64_t(rest), 1, strides);
}

// Each of `count` values (a multiple of 8) fills a block.
template <typename T>
__aicore__ inline void Spread(const LocalTensor<T>& blocks, const LocalTensor<T>& values, uint32_t count) {
    Brcb(blocks, values, count / 8, BrcbRepeatParams(1, 8));
}

// The first `count` elements, of 16 bits: all bits 0 is 0 in each of the types.
template <typename T>
__aicore__ inline void Clear(const LocalTensor<T>& tensor, uint32_t count) {
    Duplicate(tensor.template ReinterpretCast<int16_t>(), int16_t(0), int32_t(count));
}

template <typename T>
__aicore__ inline DataCopyExtParams OneBlock(uint32_t count) {
    return DataCopyExtParams(1, uint32_t(count * sizeof(T)), 0, 0, 0);
}

}  // namespace paged_kv
