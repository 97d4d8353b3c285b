// Buffers in UB, queues between pipes, flags and barriers.
#pragma once

#include <deque>

#include "tensor.h"

namespace AscendC {

enum class TPosition : uint8_t { VECIN, VECOUT, VECCALC };

using pipe_t = emu::Pipe;
constexpr pipe_t PIPE_S = emu::SCALAR, PIPE_V = emu::VECTOR, PIPE_MTE2 = emu::MTE2, PIPE_MTE3 = emu::MTE3,
                 PIPE_ALL = emu::PIPES;

constexpr uint8_t event_between(emu::Pipe from, emu::Pipe to) { return uint8_t(from * emu::PIPES + to); }

enum class HardEvent : uint8_t {
    MTE2_V = event_between(emu::MTE2, emu::VECTOR),
    V_MTE2 = event_between(emu::VECTOR, emu::MTE2),
    V_MTE3 = event_between(emu::VECTOR, emu::MTE3),
    MTE3_V = event_between(emu::MTE3, emu::VECTOR),
    MTE2_MTE3 = event_between(emu::MTE2, emu::MTE3),
    MTE3_MTE2 = event_between(emu::MTE3, emu::MTE2),
    V_S = event_between(emu::VECTOR, emu::SCALAR),
    S_V = event_between(emu::SCALAR, emu::VECTOR),
    MTE2_S = event_between(emu::MTE2, emu::SCALAR),
    S_MTE2 = event_between(emu::SCALAR, emu::MTE2),
    S_MTE3 = event_between(emu::SCALAR, emu::MTE3),
    MTE3_S = event_between(emu::MTE3, emu::SCALAR),
};

using event_t = int32_t;
constexpr event_t EVENT_ID0 = 0, EVENT_ID1 = 1, EVENT_ID2 = 2, EVENT_ID3 = 3;

template <HardEvent event>
void SetFlag(event_t id, EMU_AT) {
    constexpr auto from = emu::Pipe(uint8_t(event) / emu::PIPES);
    if (id < 0 || id > 5) emu::core.fail(emu::rule::FLAG_ID, at, "id %d", id);
    bool& set = emu::core.flag[uint8_t(event)][size_t(id)];
    if (set) emu::core.fail(emu::rule::FLAG_SET, at, "id %d of pipe %s", id, emu::PIPE_NAMES[from]);
    set = true;
    emu::core.flag_clock[uint8_t(event)][size_t(id)] = emu::core.snapshot(from);
}

template <HardEvent event>
void WaitFlag(event_t id, EMU_AT) {
    constexpr auto to = emu::Pipe(uint8_t(event) % emu::PIPES);
    if (id < 0 || id > 5) emu::core.fail(emu::rule::FLAG_ID, at, "id %d", id);
    bool& set = emu::core.flag[uint8_t(event)][size_t(id)];
    if (!set) emu::core.fail(emu::rule::FLAG_WAIT, at, "id %d, pipe %s waits", id, emu::PIPE_NAMES[to]);
    set = false;
    emu::core.wait(to, emu::core.flag_clock[uint8_t(event)][size_t(id)]);
}

template <pipe_t pipe>
void PipeBarrier() {
    ++emu::core.counters.barriers;
    for (uint8_t p = 0; p < emu::PIPES; ++p)
        if (pipe == p || pipe == PIPE_ALL)
            for (uint8_t q = 0; q < emu::PIPES; ++q)
                if (pipe == PIPE_ALL || p == q) emu::core.clock[q][p] = emu::core.issued[p];
}

// A queue's buffers: who produces waits until one is free, who consumes waits until it is filled.
template <TPosition source, TPosition destination, int32_t depth>
class TQueBind {
public:
    template <typename T>
    LocalTensor<T> AllocTensor(EMU_AT) {
        for (uint32_t id = first_; id < first_ + count_; ++id) {
            emu::Buffer& buffer = emu::core.buffers[id];
            if (buffer.state != emu::FREE) continue;
            buffer.state = emu::ALLOCATED;
            emu::core.wait(PRODUCER, buffer.ready);
            std::memset(emu::core.ub + buffer.offset, 0xff, buffer.bytes);
            std::memset(emu::core.content + buffer.offset, emu::UNDEFINED, buffer.bytes);
            return {id, buffer.generation, buffer.offset, buffer.bytes};
        }
        emu::core.fail(emu::rule::QUEUE_ALLOC, at, "%u of %u buffers taken", count_, count_);
    }

    template <typename T>
    void EnQue(const LocalTensor<T>& tensor, EMU_AT) {
        emu::Buffer& buffer = own(tensor, emu::ALLOCATED, "EnQue", at);
        if (int32_t(waiting_.size()) >= depth) emu::core.fail(emu::rule::QUEUE_DEPTH, at, "depth %d", depth);
        buffer.state = emu::ENQUEUED;
        buffer.ready = emu::core.snapshot(PRODUCER);
        waiting_.push_back(tensor.buffer());
    }

    template <typename T>
    LocalTensor<T> DeQue(EMU_AT) {
        if (waiting_.empty()) emu::core.fail(emu::rule::QUEUE_EMPTY, at, "0 of %u buffers are in it", count_);
        const uint32_t id = waiting_.front();
        waiting_.pop_front();
        emu::Buffer& buffer = emu::core.buffers[id];
        buffer.state = emu::DEQUEUED;
        emu::core.wait(CONSUMER, buffer.ready);
        return {id, buffer.generation, buffer.offset, buffer.bytes};
    }

    template <typename T>
    void FreeTensor(const LocalTensor<T>& tensor, EMU_AT) {
        emu::Buffer& buffer = own(tensor, emu::DEQUEUED, "FreeTensor", at);
        buffer.state = emu::FREE;
        ++buffer.generation;
        buffer.ready = emu::core.snapshot(CONSUMER);
    }

private:
    friend class TPipe;
    static constexpr emu::Pipe PRODUCER = source == TPosition::VECIN ? emu::MTE2 : emu::VECTOR;
    static constexpr emu::Pipe CONSUMER = destination == TPosition::VECOUT ? emu::MTE3 : emu::VECTOR;

    template <typename T>
    emu::Buffer& own(const LocalTensor<T>& tensor, emu::BufferState expected, const char* what, emu::Where at) {
        const uint32_t id = tensor.buffer();
        if (id < first_ || id >= first_ + count_)
            emu::core.fail(emu::rule::QUEUE_ORDER, at, "%s of another queue's tensor", what);
        tensor.checked(0, at);
        emu::Buffer& buffer = emu::core.buffers[id];
        if (buffer.state != expected)
            emu::core.fail(emu::rule::QUEUE_ORDER, at, "%s of a tensor that is %s", what,
                           emu::STATE_NAMES[buffer.state]);
        return buffer;
    }

    uint32_t first_ = 0, count_ = 0;
    std::deque<uint32_t> waiting_;
};

template <TPosition position, int32_t depth>
using TQue = TQueBind<position, position, depth>;

// Memory without order: flags and barriers are the kernel's business.
template <TPosition position = TPosition::VECCALC>
class TBuf {
public:
    template <typename T>
    LocalTensor<T> Get() const {
        const emu::Buffer& buffer = emu::core.buffers[id_];
        return {id_, buffer.generation, buffer.offset, buffer.bytes};
    }

private:
    friend class TPipe;
    uint32_t id_ = emu::NO_BUFFER;
};

class TPipe {
public:
    template <TPosition source, TPosition destination, int32_t depth>
    void InitBuffer(TQueBind<source, destination, depth>& queue, uint8_t count, uint32_t bytes, EMU_AT) {
        queue.first_ = uint32_t(emu::core.buffers.size());
        queue.count_ = count;
        for (uint8_t i = 0; i < count; ++i) take(source, bytes, emu::FREE, at);
    }

    template <TPosition position>
    void InitBuffer(TBuf<position>& buffer, uint32_t bytes, EMU_AT) {
        buffer.id_ = take(position, bytes, emu::RESIDENT, at);
    }

private:
    static uint32_t take(TPosition position, uint32_t bytes, emu::BufferState state, emu::Where at) {
        emu::Core& core = emu::core;
        const uint32_t rounded = (bytes + emu::BLOCK - 1) / emu::BLOCK * emu::BLOCK;
        if (rounded > emu::UB_BYTES - core.used)
            core.fail(emu::rule::CAPACITY, at, "%u bytes more than the %u in use", rounded, core.used);
        if (++core.buffers_at[uint8_t(position)] > 8)
            core.fail(emu::rule::BUFFERS, at, "buffer %u", core.buffers_at[uint8_t(position)]);
        core.buffers.push_back({core.used, rounded, core.owners++, state});
        core.used += rounded;
        core.counters.ub_bytes = std::max<uint64_t>(core.counters.ub_bytes, core.used);
        return uint32_t(core.buffers.size() - 1);
    }
};

}  // namespace AscendC
