// How a vector instruction walks its operands: repeats of 256 bytes of the wider type, in blocks of 32 bytes.
#pragma once

#include "queue.h"

namespace emu {

// The lanes that take part in each repeat.
struct Lanes {
    uint64_t bits[2];
    uint32_t width;  // 64 or 128, by the wider operand

    bool on(uint32_t lane) const { return bits[lane / 64] >> lane % 64 & 1; }

    uint32_t end() const {
        uint32_t lane = width;
        while (lane && !on(lane - 1)) --lane;
        return lane;
    }

    static Lanes first(uint64_t count, uint32_t width, Where at) {
        if (count < 1 || count > width)
            core.fail(rule::MASK, at, "mask %llu of %u lanes", (unsigned long long)count, width);
        const auto low = [](uint64_t n) { return n >= 64 ? ~0ULL : (1ULL << n) - 1; };
        return {{low(count), count > 64 ? low(count - 64) : 0}, width};
    }

    static Lanes of(const uint64_t mask[], uint32_t width, Where at) {
        const Lanes lanes{{mask[0], width > 64 ? mask[1] : 0}, width};
        if (lanes.end() == 0) core.fail(rule::MASK, at, "no lane is set");
        return lanes;
    }
};

inline void check_repeat(int64_t repeat, Where at) {
    if (repeat < 0 || repeat > 255) core.fail(rule::REPEAT, at, "%lld repeats", (long long)repeat);
}

inline uint32_t stride8(int64_t stride, Where at) {
    if (stride < 0 || stride > 255) core.fail(rule::STRIDE, at, "repeat stride %lld", (long long)stride);
    return uint32_t(stride);
}

// One operand: strides between blocks and between repeats, in blocks.
template <typename T>
class Operand {
public:
    static constexpr uint32_t PER_BLOCK = BLOCK / sizeof(T);

    Operand(const AscendC::LocalTensor<T>& tensor, uint32_t block_stride, uint32_t repeat_stride, const Lanes& lanes,
            uint32_t repeats, Where at)
        : block_(block_stride), repeat_(repeat_stride), lanes_(lanes), at_(at) {
        if (tensor.offset() % BLOCK) core.fail(rule::ALIGN, at, "UB address %u", tensor.offset());
        const uint32_t last = lanes.end() - 1;
        const uint64_t blocks = uint64_t(repeats - 1) * repeat_stride + uint64_t(last / PER_BLOCK) * block_stride;
        base_ = tensor.checked(blocks * BLOCK + (last % PER_BLOCK + 1) * sizeof(T), at);
    }

    void load(uint32_t repeat, uint32_t time, double* values) const {
        walk(repeat, [&](uint32_t lane, uint32_t address, uint32_t count) {
            core.read(VECTOR, time, address, count * sizeof(T), at_);
            T value;
            for (uint32_t i = 0; i < count; ++i) {
                std::memcpy(&value, core.ub + address + i * sizeof(T), sizeof(T));
                values[lane + i] = double(value);
            }
        });
    }

    void store(uint32_t repeat, uint32_t time, const double* values) const {
        walk(repeat, [&](uint32_t lane, uint32_t address, uint32_t count) {
            core.write(VECTOR, time, address, count * sizeof(T), DEFINED, at_);
            for (uint32_t i = 0; i < count; ++i) {
                const T value = narrow(values[lane + i]);
                std::memcpy(core.ub + address + i * sizeof(T), &value, sizeof(T));
            }
        });
    }

    // An iteration's destination is the source itself, or lies apart from it. Interleaved operands are not compared.
    template <typename U>
    void check_apart(const Operand<U>& source, bool may_be_same) const {
        if (block_ > 1 || source.block_ > 1) return;
        if (may_be_same && base_ == source.base_ && block_ == source.block_ && sizeof(T) == sizeof(U)) return;
        if (base_ < source.base_ + source.extent() && source.base_ < base_ + extent())
            core.fail(rule::OVERLAP, at_, "UB addresses %u and %u", base_, source.base_);
    }

private:
    template <typename U>
    friend class Operand;

    static T narrow(double value) {
        if constexpr (std::is_integral<T>()) return T(value);
        else return T(float(value));
    }

    uint32_t extent() const {
        const uint32_t last = lanes_.end() - 1;
        return last / PER_BLOCK * block_ * BLOCK + (block_ ? last % PER_BLOCK + 1 : PER_BLOCK) * sizeof(T);
    }

    // Calls `act(lane, address, count)` for every run of lanes inside one block.
    template <typename Act>
    void walk(uint32_t repeat, Act act) const {
        const uint32_t end = lanes_.end();
        for (uint32_t lane = 0; lane < end;) {
            uint32_t count = 0;
            const uint32_t room = std::min(PER_BLOCK - lane % PER_BLOCK, end - lane);
            while (count < room && lanes_.on(lane + count)) ++count;
            if (count)
                act(lane, base_ + (repeat * repeat_ + lane / PER_BLOCK * block_) * BLOCK +
                              lane % PER_BLOCK * uint32_t(sizeof(T)), count);
            lane += count ? count : 1;
        }
    }

    uint32_t base_, block_, repeat_;
    Lanes lanes_;
    Where at_;
};

inline uint32_t start_vector(uint32_t repeats) {
    ++core.counters.vector_instructions;
    core.counters.vector_repeats += repeats;
    return core.issue(VECTOR);
}

template <typename... T>
constexpr uint32_t width_of() {
    return std::max({sizeof(T)...}) == 4 ? 64 : 128;
}

// The (dst, src, count) forms: full repeats, then one of the rest.
template <typename Act>
void by_count(int64_t count, uint32_t width, Where at, Act act) {
    if (count <= 0) core.fail(rule::MASK, at, "%lld elements", (long long)count);
    const auto full = uint32_t(count / width), rest = uint32_t(count % width);
    if (full) act(Lanes::first(width, width, at), full, 0U);
    if (rest) act(Lanes::first(rest, width, at), 1U, full * width);
}

}  // namespace emu
