// How a launch gets onto a stream: between a library of emulated kernels and the fake runtime it is linked with.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

struct EmuMemory {
    void* address;
    uint64_t bytes;
};

// Runs a launch, which may touch these parts of memory. 0, or 1 with the reason in `message`.
using EmuRun = int (*)(void* launch, const EmuMemory* memory, size_t count, char* message, size_t size);
using EmuDrop = void (*)(void* launch);

// Takes over `launch`; 0, or the runtime's error code, and then nothing will be run.
__attribute__((weak)) int emu_enqueue(void* stream, void* launch, EmuRun run, EmuDrop drop);

// A kernel by its arguments one by one, as aclrtKernelArgsAppend collects them; in the library under
// `emu_entry_` and the kernel's name.
using EmuEntry = int (*)(void* stream, uint32_t blocks, const void* const* arguments, const size_t* sizes,
                         size_t count);
}
