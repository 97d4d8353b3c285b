// Copies between global memory and UB.
#pragma once

#include "queue.h"

namespace AscendC {

// Blocks of `blockLen` units of 32 bytes; gaps between the end of one and the start of the next.
struct DataCopyParams {
    DataCopyParams(uint16_t count, uint16_t length, uint16_t source_gap, uint16_t destination_gap)
        : blockCount(count), blockLen(length), srcGap(source_gap), dstGap(destination_gap) {}
    uint16_t blockCount, blockLen, srcGap, dstGap;
};

// The same in bytes, except for the gap in UB, which counts units of 32 bytes.
struct DataCopyExtParams {
    DataCopyExtParams(uint32_t count, uint32_t length, uint32_t source_gap, uint32_t destination_gap, uint32_t)
        : blockCount(count), blockLen(length), srcStride(source_gap), dstStride(destination_gap) {}
    uint32_t blockCount, blockLen, srcStride, dstStride;
};

template <typename T>
struct DataCopyPadExtParams {
    DataCopyPadExtParams() : isPad(false), leftPadding(0), rightPadding(0), paddingValue() {}
    DataCopyPadExtParams(bool pad, uint8_t left, uint8_t right, T value)
        : isPad(pad), leftPadding(left), rightPadding(right), paddingValue(value) {}
    bool isPad;
    uint8_t leftPadding, rightPadding;
    T paddingValue;
};

}  // namespace AscendC

namespace emu {

struct Copy {
    uint32_t count;
    uint64_t length, gm_step, ub_step;  // bytes; a step leads from one block's start to the next one's
};

inline uint64_t round_block(uint64_t bytes) { return (bytes + BLOCK - 1) / BLOCK * BLOCK; }

template <typename T>
uint32_t place(const AscendC::LocalTensor<T>& tensor, const Copy& copy, Where at) {
    if (tensor.offset() % BLOCK) core.fail(rule::ALIGN, at, "UB address %u", tensor.offset());
    if (copy.count < 1 || copy.count > 4095) core.fail(rule::COPY_BLOCKS, at, "%u blocks", copy.count);
    return tensor.checked((copy.count - 1) * copy.ub_step + round_block(copy.length), at);
}

// `left` and `right` elements of `value` around each block where `pad`; an undefined tail where not.
template <typename T>
void copy_in(const AscendC::LocalTensor<T>& to, const T* from, const Copy& copy, bool pad, uint32_t left,
             uint32_t right, T value, Where at) {
    const uint32_t base = place(to, copy, at), time = core.issue(MTE2);
    ++core.counters.copies_in;
    for (uint32_t i = 0; i < copy.count; ++i) {
        const uint8_t* source = reinterpret_cast<const uint8_t*>(from) + i * copy.gm_step;
        uint32_t address = base + uint32_t(i * copy.ub_step);
        core.touch_gm(MTE2, time, source, copy.length, false, at);
        const auto fill = [&](uint32_t elements) {
            for (uint32_t k = 0; k < elements; ++k, address += sizeof(T)) std::memcpy(core.ub + address, &value, sizeof(T));
        };
        const uint32_t start = address;
        fill(pad ? left : 0);
        std::memcpy(core.ub + address, source, copy.length);
        address += uint32_t(copy.length);
        fill(pad ? right : 0);
        core.write(MTE2, time, start, address - start, DEFINED, at);
        const auto tail = uint32_t(round_block(address) - address);
        if (tail) {
            std::memset(core.ub + address, 0xff, tail);
            core.write(MTE2, time, address, tail, UNDEFINED_TAIL, at);
        }
        core.counters.bytes_in += copy.length;
    }
}

template <typename T>
void copy_out(T* to, const AscendC::LocalTensor<T>& from, const Copy& copy, Where at) {
    const uint32_t base = place(from, copy, at), time = core.issue(MTE3);
    ++core.counters.copies_out;
    for (uint32_t i = 0; i < copy.count; ++i) {
        uint8_t* destination = reinterpret_cast<uint8_t*>(to) + i * copy.gm_step;
        const uint32_t address = base + uint32_t(i * copy.ub_step);
        core.read(MTE3, time, address, uint32_t(copy.length), at);
        core.touch_gm(MTE3, time, destination, copy.length, true, at);
        std::memcpy(destination, core.ub + address, copy.length);
        core.counters.bytes_out += copy.length;
    }
}

inline Copy whole(uint64_t bytes, Where at) {
    if (bytes == 0 || bytes % BLOCK) core.fail(rule::COPY_SIZE, at, "%llu bytes", (unsigned long long)bytes);
    return {1, bytes, bytes, bytes};
}

inline void check_length(const AscendC::DataCopyExtParams& p, Where at) {
    if (p.blockLen < 1 || p.blockLen > 2097151) core.fail(rule::COPY_LENGTH, at, "%u bytes", p.blockLen);
}

}  // namespace emu

namespace AscendC {

template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, uint32_t count, EMU_AT) {
    emu::copy_in(dst, src.GetPhyAddr(), emu::whole(uint64_t(count) * sizeof(T), at), false, 0, 0, T(), at);
}

template <typename T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, uint32_t count, EMU_AT) {
    emu::copy_out(dst.GetPhyAddr(), src, emu::whole(uint64_t(count) * sizeof(T), at), at);
}

template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& p, EMU_AT) {
    const emu::Copy copy{p.blockCount, p.blockLen * 32U, (p.blockLen + p.srcGap) * 32U, (p.blockLen + p.dstGap) * 32U};
    emu::copy_in(dst, src.GetPhyAddr(), copy, false, 0, 0, T(), at);
}

template <typename T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& p,
                 const DataCopyPadExtParams<T>& pad, EMU_AT) {
    emu::check_length(p, at);
    if (pad.leftPadding * sizeof(T) > 32 || pad.rightPadding * sizeof(T) > 32)
        emu::core.fail(emu::rule::PAD, at, "%u and %u elements", pad.leftPadding, pad.rightPadding);
    const uint64_t padded = p.blockLen + (pad.isPad ? (pad.leftPadding + pad.rightPadding) * sizeof(T) : 0);
    const emu::Copy copy{p.blockCount, p.blockLen, uint64_t(p.blockLen) + p.srcStride,
                         emu::round_block(padded) + p.dstStride * 32ULL};
    emu::copy_in(dst, src.GetPhyAddr(), copy, pad.isPad, pad.leftPadding, pad.rightPadding, pad.paddingValue, at);
}

template <typename T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& p, EMU_AT) {
    emu::check_length(p, at);
    const emu::Copy copy{p.blockCount, p.blockLen, uint64_t(p.blockLen) + p.dstStride,
                         emu::round_block(p.blockLen) + p.srcStride * 32ULL};
    emu::copy_out(dst.GetPhyAddr(), src, copy, at);
}

}  // namespace AscendC
