// GlobalTensor and LocalTensor, and the scalar unit's access to both.
#pragma once

#include "core.h"

#define __aicore__
#define __global__
#define __gm__
#define __vector__
using GM_ADDR = uint8_t*;

namespace AscendC {

template <typename T>
class LocalTensor {
public:
    LocalTensor() = default;
    LocalTensor(uint32_t buffer, uint32_t generation, uint32_t offset, uint32_t bytes)
        : buffer_(buffer), generation_(generation), offset_(offset), bytes_(bytes) {}

    // Elements from `index` on.
    LocalTensor operator[](uint32_t index) const {
        const uint64_t skip = uint64_t(index) * sizeof(T);
        const auto bytes = uint32_t(skip < bytes_ ? bytes_ - skip : 0);
        return {buffer_, generation_, uint32_t(offset_ + skip), bytes};
    }

    template <typename U>
    LocalTensor<U> ReinterpretCast() const {
        return {buffer_, generation_, offset_, bytes_};
    }

    uint32_t GetSize() const { return bytes_ / sizeof(T); }

    T GetValue(uint32_t index, EMU_AT) const {
        const uint32_t address = scalar(index, at);
        emu::core.read(emu::SCALAR, emu::core.issue(emu::SCALAR), address, sizeof(T), at);
        T value;
        std::memcpy(&value, emu::core.ub + address, sizeof(T));
        return value;
    }

    void SetValue(uint32_t index, T value, EMU_AT) const {
        const uint32_t address = scalar(index, at);
        emu::core.write(emu::SCALAR, emu::core.issue(emu::SCALAR), address, sizeof(T), emu::DEFINED, at);
        std::memcpy(emu::core.ub + address, &value, sizeof(T));
    }

    // The tensor may be used, and `bytes` from its start on lie inside it. Returns the UB address.
    uint32_t checked(uint64_t bytes, emu::Where at) const {
        if (buffer_ >= emu::core.buffers.size() || emu::core.buffers[buffer_].generation != generation_)
            emu::core.fail(emu::rule::FREED, at, "tensor at UB address %u", offset_);
        if (bytes > bytes_)
            emu::core.fail(emu::rule::BOUNDS, at, "%llu bytes used of %u", (unsigned long long)bytes, bytes_);
        return offset_;
    }

    uint32_t offset() const { return offset_; }
    uint32_t bytes() const { return bytes_; }
    uint32_t buffer() const { return buffer_; }

private:
    uint32_t scalar(uint32_t index, emu::Where at) const {
        ++emu::core.counters.scalar_reads;
        return checked((uint64_t(index) + 1) * sizeof(T), at) + index * uint32_t(sizeof(T));
    }

    uint32_t buffer_ = emu::NO_BUFFER, generation_ = 0, offset_ = 0, bytes_ = 0;
};

template <typename T>
class GlobalTensor {
public:
    void SetGlobalBuffer(T* address) { address_ = address; }
    void SetGlobalBuffer(T* address, uint64_t) { address_ = address; }

    GlobalTensor operator[](uint64_t index) const {
        GlobalTensor rest;
        rest.address_ = address_ + index;
        return rest;
    }

    T GetValue(uint64_t index, EMU_AT) const {
        ++emu::core.counters.scalar_reads;
        emu::core.touch_gm(emu::SCALAR, emu::core.issue(emu::SCALAR), address_ + index, sizeof(T), false, at);
        return address_[index];
    }

    T* GetPhyAddr() const { return address_; }

private:
    T* address_ = nullptr;
};

inline uint32_t GetBlockIdx() { return emu::core.block; }
inline uint32_t GetBlockNum() { return emu::core.blocks; }

}  // namespace AscendC
