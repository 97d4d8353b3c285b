// One vector core: its unified buffer with a shadow, its pipes with their clocks, its counters.
//
// Every pipe executes its own instructions on its own. `clock[p][q]` says: the next instruction of pipe p starts
// after the first `clock[p][q]` instructions of pipe q have ended. Flags, queues and barriers raise it, nothing else.
#pragma once

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "rules.h"
#include "types.h"

namespace emu {

enum Pipe : uint8_t { SCALAR, VECTOR, MTE2, MTE3, PIPES };
constexpr const char* PIPE_NAMES[] = {"S", "V", "MTE2", "MTE3"};

using Clock = std::array<uint32_t, PIPES>;

constexpr uint32_t BLOCK = 32;
constexpr uint32_t UB_BYTES = 188160;  // 192 KiB less what the compiler keeps
constexpr uint32_t NO_BUFFER = ~0U;

// The place in the kernel that a message names.
struct Where {
    const char* file;
    int line;
    static constexpr Where here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        return {file, line};
    }
};
#define EMU_AT emu::Where at = emu::Where::here()

struct Violation {
    std::string rule, message;
};

enum Content : uint8_t { UNDEFINED, DEFINED, UNDEFINED_TAIL };

struct Access {
    Pipe pipe = SCALAR;
    uint32_t time = 0;  // 0: never
};

struct BlockShadow {
    Access write;
    Clock reads{};  // by pipe
};

struct GmCell {
    Access write, read;
    int32_t writer = -1, reader = -1;  // blocks
};

// A cell for 4 bytes, made where a kernel touches them: a device's memory is large.
class GmCells {
public:
    explicit GmCells(uint64_t bytes) : chunks_(bytes / (4 * CHUNK) + 1) {}

    GmCell& operator[](uint64_t cell) {
        std::unique_ptr<Chunk>& chunk = chunks_[cell / CHUNK];
        if (!chunk) chunk = std::make_unique<Chunk>(), touched_.push_back(cell / CHUNK);
        return (*chunk)[cell % CHUNK];
    }

    void clear() {
        for (uint64_t chunk : touched_) chunks_[chunk].reset();
        touched_.clear();
    }

private:
    static constexpr uint64_t CHUNK = 256;
    using Chunk = std::array<GmCell, CHUNK>;
    std::vector<std::unique_ptr<Chunk>> chunks_;
    std::vector<uint64_t> touched_;
};

struct Region {
    uint8_t* base;
    uint64_t bytes;
    bool writable;
    GmCells cells;  // of writable regions only
};

enum BufferState : uint8_t { FREE, ALLOCATED, ENQUEUED, DEQUEUED, RESIDENT };
constexpr const char* STATE_NAMES[] = {"free", "allocated", "in the queue", "taken from the queue", "resident"};

struct Buffer {
    uint32_t offset, bytes, owner;
    BufferState state;
    uint32_t generation = 0;
    Clock ready{};  // what a waiter learns: after EnQue, or after FreeTensor
};

struct Counters {
    uint64_t vector_instructions, vector_repeats, barriers, copies_in, bytes_in, copies_out, bytes_out, scalar_reads,
        ub_bytes;  // the last: the most that buffers took
};

struct Core {
    const char* kernel = "";
    uint32_t block = 0, blocks = 1;
    alignas(64) uint8_t ub[UB_BYTES];
    Content content[UB_BYTES];
    BlockShadow shadow[UB_BYTES / BLOCK];
    uint32_t used = 0, owners = 0;
    std::vector<Buffer> buffers;
    std::array<uint32_t, 4> buffers_at{};  // by TPosition
    std::array<Clock, PIPES> clock{};
    Clock issued{};
    std::array<std::array<bool, 8>, PIPES * PIPES> flag{};
    std::array<std::array<Clock, 8>, PIPES * PIPES> flag_clock{};
    std::vector<Region> regions;
    Counters counters{};

    void begin(const char* name, uint32_t index, uint32_t count) {
        kernel = name, block = index, blocks = count;
        used = owners = 0;
        buffers.clear();
        buffers_at = {}, clock = {}, issued = {}, flag = {};
        std::memset(ub, 0xff, sizeof ub);  // NaN in every floating type
        std::memset(content, UNDEFINED, sizeof content);
        std::fill(std::begin(shadow), std::end(shadow), BlockShadow{});
    }

    void end() {
        const Where at{"the kernel's end", 0};
        for (const Buffer& buffer : buffers)
            if (buffer.state != FREE && buffer.state != RESIDENT)
                fail(rule::QUEUE_LEFT, at, "a buffer of %u bytes is %s", buffer.bytes, STATE_NAMES[buffer.state]);
        for (uint32_t event = 0; event < flag.size(); ++event)
            for (uint32_t id = 0; id < 8; ++id)
                if (flag[event][id])
                    fail(rule::FLAG_LEFT, at, "flag %s to %s, id %u", PIPE_NAMES[event / PIPES],
                         PIPE_NAMES[event % PIPES], id);
    }

    [[noreturn, gnu::format(printf, 4, 5)]] void fail(const Rule& rule, Where at, const char* format, ...) const {
        char detail[320], message[1024];
        va_list arguments;
        va_start(arguments, format);
        std::vsnprintf(detail, sizeof detail, format, arguments);
        va_end(arguments);
        const char* slash = std::strrchr(at.file, '/');
        std::snprintf(message, sizeof message, "kernel %s, block %u, %s:%d: %s: %s [%s]", kernel, block,
                      slash ? slash + 1 : at.file, at.line, rule.name, detail, rule.source);
        throw Violation{rule.name, message};
    }

    // ---- order ----

    static void merge(Clock& into, const Clock& from) {
        for (int q = 0; q < PIPES; ++q) into[q] = std::max(into[q], from[q]);
    }

    // What somebody knows who waits for everything that `pipe` was given so far.
    Clock snapshot(Pipe pipe) const {
        Clock known = clock[pipe];
        known[pipe] = issued[pipe];
        return known;
    }

    void wait(Pipe pipe, const Clock& known) { merge(clock[pipe], known); }

    // The next instruction of `pipe`: the scalar unit issues it, after all that it has itself waited for.
    uint32_t issue(Pipe pipe) {
        if (pipe != SCALAR) {
            Clock known = clock[SCALAR];
            known[SCALAR] = clock[pipe][SCALAR];
            merge(clock[pipe], known);
        }
        return ++issued[pipe];
    }

    bool ordered(Pipe pipe, Pipe earlier, uint32_t time) const {
        return time <= clock[pipe][earlier] || (pipe == SCALAR && earlier == SCALAR);
    }

    void check_order(Pipe pipe, const Rule& race, Pipe earlier, uint32_t time, uint32_t address, Where at) const {
        if (ordered(pipe, earlier, time)) return;
        fail(pipe == earlier ? rule::BARRIER : race, at, "pipe %s is not ordered after pipe %s at UB address %u",
             PIPE_NAMES[pipe], PIPE_NAMES[earlier], address / BLOCK * BLOCK);
    }

    // ---- unified buffer; a range lies inside one block of 32 bytes or is walked block by block ----

    void read(Pipe pipe, uint32_t time, uint32_t address, uint32_t bytes, Where at) {
        if (std::memchr(content + address, UNDEFINED, bytes))
            fail(rule::UNINITIALISED, at, "read of %u bytes at UB address %u", bytes, address);
        if (std::memchr(content + address, UNDEFINED_TAIL, bytes))
            fail(rule::TAIL, at, "read of %u bytes at UB address %u", bytes, address);
        for (uint32_t b = address / BLOCK; b <= (address + bytes - 1) / BLOCK; ++b) {
            BlockShadow& cell = shadow[b];
            if (cell.write.time) {
                if (cell.write.pipe == pipe && cell.write.time == time && pipe != SCALAR)
                    fail(rule::OVERLAP, at, "UB address %u was written earlier in the instruction", b * BLOCK);
                check_order(pipe, rule::RACE_RAW, cell.write.pipe, cell.write.time, b * BLOCK, at);
            }
            cell.reads[pipe] = time;
        }
    }

    void write(Pipe pipe, uint32_t time, uint32_t address, uint32_t bytes, Content what, Where at) {
        std::memset(content + address, what, bytes);
        for (uint32_t b = address / BLOCK; b <= (address + bytes - 1) / BLOCK; ++b) {
            BlockShadow& cell = shadow[b];
            for (uint8_t q = 0; q < PIPES; ++q)
                if (cell.reads[q] && !(q == pipe && cell.reads[q] == time))
                    check_order(pipe, rule::RACE_WAR, Pipe(q), cell.reads[q], b * BLOCK, at);
            const bool same = cell.write.pipe == pipe && cell.write.time == time;
            if (cell.write.time && !same)
                check_order(pipe, rule::RACE_WAW, cell.write.pipe, cell.write.time, b * BLOCK, at);
            cell.write = {pipe, time};
        }
    }

    // ---- global memory ----

    void add_region(void* address, uint64_t bytes, bool writable) {
        regions.push_back({static_cast<uint8_t*>(address), bytes, writable, GmCells(writable ? bytes : 0)});
    }

    Region& region(const void* address, uint64_t bytes, Where at) {
        const auto* byte = static_cast<const uint8_t*>(address);
        for (Region& r : regions)
            if (byte >= r.base && byte + bytes <= r.base + r.bytes) return r;
        fail(rule::GM_BOUNDS, at, "%llu bytes at %p lie in none of the %zu arrays", (unsigned long long)bytes, address,
             regions.size());
    }

    void touch_gm(Pipe pipe, uint32_t time, const void* address, uint64_t bytes, bool writes, Where at) {
        Region& r = region(address, bytes, at);
        if (writes && !r.writable) fail(rule::GM_CONST, at, "write of %llu bytes", (unsigned long long)bytes);
        if (!r.writable || bytes == 0) return;
        const uint64_t first = uint64_t(static_cast<const uint8_t*>(address) - r.base), last = first + bytes - 1;
        const int32_t me = int32_t(block);
        for (uint64_t c = first / 4; c <= last / 4; ++c) {
            GmCell& cell = r.cells[c];
            const bool foreign_read = writes && cell.reader >= 0 && cell.reader != me;
            if ((cell.writer >= 0 && cell.writer != me) || foreign_read)
                fail(rule::GM_RACE, at, "block %d uses it too", foreign_read ? cell.reader : cell.writer);
            if (cell.writer == me && pipe == SCALAR) fail(rule::GM_STALE, at, "the kernel wrote this address");
            const bool same = cell.write.pipe == pipe && cell.write.time == time;
            if (cell.writer == me && !same && !ordered(pipe, cell.write.pipe, cell.write.time))
                fail(writes ? rule::RACE_WAW : rule::RACE_RAW, at, "global memory, after pipe %s",
                     PIPE_NAMES[cell.write.pipe]);
            if (writes && cell.reader == me && !ordered(pipe, cell.read.pipe, cell.read.time))
                fail(rule::RACE_WAR, at, "global memory, after pipe %s", PIPE_NAMES[cell.read.pipe]);
            (writes ? cell.write : cell.read) = {pipe, time};
            (writes ? cell.writer : cell.reader) = me;
        }
    }
};

inline thread_local Core core;

}  // namespace emu
