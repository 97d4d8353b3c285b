// What a test asks and tells the runtime; not part of ACL.
#include "fake.h"

#include <cstring>

using namespace fake;

namespace {

constexpr const char* NAMES[KINDS] = {"context", "stream", "event", "binary", "function", "arguments"};

size_t copied(const std::string& text, char* target, size_t size) {
    if (size) std::snprintf(target, size, "%s", text.c_str());
    return text.size();
}

int held(void* handle, bool hold) {
    const Lock lock(state().mutex);
    const auto stream = state().find<Stream>(handle);
    if (!stream) return INVALID_HANDLE;
    stream->held = hold;
    state().changed.notify_all();
    return OK;
}

}  // namespace

extern "C" {

// The n-th call from now on of a function fails with a code, and does nothing.
void fake_fail(const char* name, uint64_t nth, int code) {
    const Lock lock(state().mutex);
    state().failures[name] = {state().calls[name] + nth, code};
}

// The next task that a stream comes to fails with a code.
void fake_fail_task(int code) {
    const Lock lock(state().mutex);
    state().task_failure = code;
}

uint64_t fake_calls(const char* name) {
    const Lock lock(state().mutex);
    const auto found = state().calls.find(name);
    return found == state().calls.end() ? 0 : found->second;
}

// The names of the functions that were called, one a line.
size_t fake_called(char* text, size_t size) {
    const Lock lock(state().mutex);
    std::string names;
    for (const auto& [name, count] : state().calls)
        if (count) names += name + "\n";
    return copied(names, text, size);
}

// A held stream finishes its step and begins no other.
int fake_hold(void* stream) { return held(stream, true); }
int fake_release(void* stream) { return held(stream, false); }

// Steps that a stream has not finished.
uint64_t fake_pending(void* handle) {
    const Lock lock(state().mutex);
    const auto stream = state().find<Stream>(handle);
    return stream ? stream->tasks.size() + stream->busy : 0;
}

// Each step takes so many microseconds longer.
void fake_delay(uint64_t microseconds) {
    const Lock lock(state().mutex);
    state().delay_us = microseconds;
}

void fake_memory_limit(uint64_t bytes) {
    const Lock lock(state().mutex);
    state().memory_limit = bytes;
}

uint64_t fake_memory_used(int device) {
    const Lock lock(state().mutex);
    return state().devices.at(size_t(device)).used;
}

// What is still there, one a line; contexts of devices aside, and what goes with its binary.
size_t fake_leaks(char* text, size_t size) {
    const Lock lock(state().mutex);
    std::string lines;
    for (const auto& [handle, object] : state().objects) {
        const bool primary = object->kind == CONTEXT && static_cast<Context&>(*object).primary;
        if (!primary && object->kind != FUNCTION && object->kind != ARGUMENTS)
            lines += std::string(NAMES[object->kind]) + " of device " + std::to_string(object->device) + "\n";
    }
    for (const auto& [address, block] : state().memory)
        lines += std::to_string(block.bytes) + " bytes of " +
                 (block.device < 0 ? "the host" : "device " + std::to_string(block.device)) + "\n";
    return copied(lines, text, size);
}

// What was done that ACL forbids, one a line.
size_t fake_misuse(char* text, size_t size) {
    const Lock lock(state().mutex);
    std::string lines;
    for (const std::string& line : state().misuse) lines += line + "\n";
    return copied(lines, text, size);
}

// Forget failures that have not come to pass.
void fake_clear_failures() {
    const Lock lock(state().mutex);
    state().failures.clear(), state().task_failure = OK;
}

// Forget misuse, counts, failures, delays and limits: for the next test.
void fake_clear() {
    const Lock lock(state().mutex);
    state().misuse.clear(), state().calls.clear(), state().failures.clear();
    state().task_failure = OK, state().delay_us = 0, state().memory_limit = 256ULL << 20;
}
}
