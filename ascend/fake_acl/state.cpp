// What all parts share: handles, memory, errors, counts.
#include "fake.h"

#include <pthread.h>

#include <cstdarg>
#include <cstdlib>

namespace fake {

thread_local void* current_context = nullptr;
static thread_local std::string recent;

// Never destroyed: threads and destructors of others may come late.
State& state() {
    static State& only = *[] {
        pthread_atfork(nullptr, nullptr, [] { state().forked = true; });
        auto* fresh = new State;
        if (const char* bytes = std::getenv("PAGED_KV_FAKE_MEMORY")) fresh->memory_limit = std::strtoull(bytes, nullptr, 10);
        return fresh;
    }();
    return only;
}

static std::string formatted(const char* format, va_list arguments) {
    char text[512];
    std::vsnprintf(text, sizeof text, format, arguments);
    return text;
}

int failed(int code, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    recent = formatted(format, arguments);
    va_end(arguments);
    return code;
}

int misused(int code, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    recent = formatted(format, arguments);
    va_end(arguments);
    state().misuse.push_back(recent);
    return code;
}

Entry::Entry(const char* name) {
    State& s = state();
    if (s.forked) {  // the lock may be held by a thread that doesn't exist here
        std::fprintf(stderr, "fake_acl: %s in a forked child, which a real runtime would not survive\n", name);
        std::_Exit(86);
    }
    lock = Lock(s.mutex);
    const uint64_t count = ++s.calls[name];
    const auto found = s.failures.find(name);
    if (found != s.failures.end() && found->second.nth == count) {
        code = failed(found->second.code, "%s was told to fail", name);
        s.failures.erase(found);
        return;
    }
    const std::string which = name;
    if (!s.initialised && which != "aclInit" && which != "aclFinalize")
        code = misused(UNINITIALIZED, "%s before aclInit or after aclFinalize", name);
}

int usable(std::shared_ptr<Context>& context) {
    State& s = state();
    context = s.find<Context>(current_context);
    if (!context) return failed(CONTEXT_NULL, "this thread has no context");
    const Device& device = s.devices[context->device];
    return device.error ? failed(device.error, "%s", device.message.c_str()) : OK;
}

const Memory* State::holding(const void* address, uint64_t bytes) const {
    const auto first = reinterpret_cast<uintptr_t>(address);
    auto next = memory.upper_bound(first);
    if (next == memory.begin()) return nullptr;
    const auto& [base, block] = *--next;
    return first + bytes <= base + block.bytes ? &block : nullptr;
}

const Memory* State::touching(const void* address, uint64_t bytes) const {
    const auto first = reinterpret_cast<uintptr_t>(address);
    auto next = memory.lower_bound(first + bytes);
    if (next == memory.begin()) return nullptr;
    const auto& [base, block] = *--next;
    return base + block.bytes > first ? &block : nullptr;
}

bool State::at_rest() const {
    for (const auto& [handle, object] : objects)
        if (object->kind == STREAM && !static_cast<const Stream&>(*object).idle()) return false;
    return true;
}

// Freed memory is the system's again when no stream can be reading it: a test is to see an error, not a crash.
void State::reap() {
    if (quarantine.empty() || !at_rest()) return;
    for (void* address : quarantine) std::free(address);
    quarantine.clear();
}

}  // namespace fake

extern "C" const char* aclGetRecentErrMsg() {
    static thread_local std::string told;
    if (fake::recent.empty()) return nullptr;
    told = std::move(fake::recent);
    fake::recent.clear();
    return told.c_str();
}
