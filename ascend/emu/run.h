// Runs a kernel block by block, and what the tests ask of the emulation, as plain C.
#pragma once

#include <exception>

#include "kernel_operator.h"

namespace emu {

inline thread_local std::string last_rule, last_message;

// Every block of a launch, one after the other. Returns 0, or 1 with the rule and message kept.
template <typename Kernel>
int launch(const char* name, uint32_t blocks, Kernel kernel) {
    last_rule.clear(), last_message.clear();
    for (Region& region : core.regions) std::fill(region.cells.begin(), region.cells.end(), GmCell{});
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

}  // namespace emu

extern "C" {

// The arrays that kernels may touch; GM_CONST guards those that are not writable.
inline __attribute__((used)) void emu_add_memory(void* address, uint64_t bytes, int writable) {
    emu::core.regions.push_back({static_cast<uint8_t*>(address), bytes, writable != 0, {}});
    if (writable) emu::core.regions.back().cells.resize((bytes + 3) / 4);
}
inline __attribute__((used)) void emu_clear_memory() { emu::core.regions.clear(); }
inline __attribute__((used)) const char* emu_rule() { return emu::last_rule.c_str(); }
inline __attribute__((used)) const char* emu_message() { return emu::last_message.c_str(); }
inline __attribute__((used)) void emu_reset_counters() { emu::core.counters = {}; }
inline __attribute__((used)) const emu::Counters* emu_counters() { return &emu::core.counters; }
}
