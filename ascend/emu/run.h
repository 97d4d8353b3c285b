// Runs a kernel block by block, and what the tests ask of the emulation, as plain C.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <tuple>
#include <utility>

#include "kernel_operator.h"
#include "stream.h"

namespace emu {

inline thread_local std::string last_rule, last_message;

// Every block of a launch, one after the other. Returns 0, or 1 with the rule and message kept.
template <typename Kernel>
int launch(const char* name, uint32_t blocks, Kernel kernel) {
    last_rule.clear(), last_message.clear();
    for (Region& region : core.regions) region.cells.clear();
    try {
        for (uint32_t block = 0; block < blocks; ++block) {
            core.begin(name, block, blocks);
            kernel();
            core.end();
        }
    } catch (const Violation& violation) {
        last_rule = violation.rule, last_message = violation.message;
        return 1;
    }
    return 0;
}

// A launch that waits for its turn, with a copy of its arguments.
using Launch = std::function<int()>;

inline int run_launch(void* launch, const EmuMemory* memory, size_t count, char* message, size_t size) {
    core.regions.clear();
    for (size_t i = 0; i < count; ++i) core.add_region(memory[i].address, memory[i].bytes, true);
    const int status = (*static_cast<Launch*>(launch))();
    if (status) std::snprintf(message, size, "%s", last_message.c_str());
    core.regions.clear();
    return status;
}
inline void drop_launch(void* launch) { delete static_cast<Launch*>(launch); }

// At once without a stream; else when the stream comes to it. Arguments are copied here, as by a device's launch.
template <typename... P>
int submit(void* stream, const char* name, uint32_t blocks, void (*kernel)(P...), std::common_type_t<P>... arguments) {
    const Launch whole = [=] { return launch(name, blocks, [&] { kernel(arguments...); }); };
    if (stream == nullptr) return whole();
    if (emu_enqueue == nullptr) {
        last_message = "a stream, but this library was not linked with the fake runtime";
        return 1;
    }
    auto waiting = std::make_unique<Launch>(whole);
    const int code = emu_enqueue(stream, waiting.get(), run_launch, drop_launch);
    if (code == 0) waiting.release();
    return code;
}

template <typename... P>
constexpr std::index_sequence_for<P...> places(void (*)(P...)) {
    return {};
}

template <typename... P, size_t... I>
int enter(void* stream, const char* name, uint32_t blocks, void (*kernel)(P...), const void* const* arguments,
          const size_t* sizes, size_t count, std::index_sequence<I...>) {
    if (count != sizeof...(P) || !((sizes[I] == sizeof(P)) && ...)) return 1;
    const auto value = [&](auto type, size_t i) {
        std::memcpy(&type, arguments[i], sizeof type);
        return type;
    };
    return submit(stream, name, blocks, kernel, value(P(), I)...);
}

}  // namespace emu

#define EMU_ENTRY(KERNEL)                                                                                   \
    __attribute__((used)) int emu_entry_##KERNEL(void* stream, uint32_t blocks, const void* const* arguments, \
                                                 const size_t* sizes, size_t count) {                       \
        return emu::enter(stream, #KERNEL, blocks, KERNEL, arguments, sizes, count, emu::places(KERNEL));    \
    }

extern "C" {

// The arrays that kernels may touch; GM_CONST guards those that are not writable.
inline __attribute__((used)) void emu_add_memory(void* address, uint64_t bytes, int writable) {
    emu::core.add_region(address, bytes, writable != 0);
}
inline __attribute__((used)) void emu_clear_memory() { emu::core.regions.clear(); }
inline __attribute__((used)) const char* emu_rule() { return emu::last_rule.c_str(); }
inline __attribute__((used)) const char* emu_message() { return emu::last_message.c_str(); }
inline __attribute__((used)) void emu_reset_counters() { emu::core.counters = {}; }
inline __attribute__((used)) const emu::Counters* emu_counters() { return &emu::core.counters; }
}
