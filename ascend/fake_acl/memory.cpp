// Memory, copies, prefetches. Copies read and write when the stream comes to them, not earlier.
#include "fake.h"

#include <cstdlib>
#include <cstring>

using namespace fake;

namespace {

enum Direction { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE };

// All bytes are the device's, or none is.
bool lies(const void* address, uint64_t bytes, int device) {
    if (device >= 0) {
        const Memory* block = state().holding(address, bytes);
        return block && block->device == device;
    }
    const Memory* block = state().touching(address, bytes);
    return !block || block->device < 0;
}

int check(const void* target, size_t room, const void* source, size_t bytes, int32_t kind, int device) {
    if (!target || !source || bytes == 0) return misused(INVALID_PARAM, "a copy of %zu bytes from %p to %p", bytes, source, target);
    if (bytes > room) return misused(PARAM, "%zu bytes into %zu", bytes, room);
    if (kind < HOST_TO_HOST || kind > DEVICE_TO_DEVICE) return misused(PARAM, "a copy of kind %d", kind);
    const bool to = kind == HOST_TO_DEVICE || kind == DEVICE_TO_DEVICE, from = kind >= DEVICE_TO_HOST;
    if (!lies(target, bytes, to ? device : -1)) return misused(PARAM, "copy of kind %d: wrong target %p", kind, target);
    if (!lies(source, bytes, from ? device : -1)) return misused(PARAM, "copy of kind %d: wrong source %p", kind, source);
    return OK;
}

int allocate(void** address, size_t bytes, int device) {
    State& s = state();
    if (!address || bytes == 0) return misused(INVALID_PARAM, "an allocation of %zu bytes", bytes);
    if (device >= 0 && bytes % 32)
        misused(OK, "aclrtMalloc of %zu bytes: a multiple of 32, and 32 more than are used, are needed", bytes);
    if (device >= 0 && s.devices[device].used + bytes > s.memory_limit)
        return failed(OUT_OF_MEMORY, "%zu bytes, %zu of %zu are used", bytes, size_t(s.devices[device].used), size_t(s.memory_limit));
    *address = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!*address) return failed(OUT_OF_MEMORY, "the host has no %zu bytes", bytes);
    std::memset(*address, 0xff, bytes);  // NaN in every floating type
    s.memory[reinterpret_cast<uintptr_t>(*address)] = {bytes, device};
    if (device >= 0) s.devices[device].used += bytes;
    return OK;
}

int release(void* address, bool of_device) {
    State& s = state();
    const auto found = s.memory.find(reinterpret_cast<uintptr_t>(address));
    if (found == s.memory.end() || (found->second.device >= 0) != of_device)
        return misused(PARAM, "%p was not allocated, or freed already", address);
    if (of_device) s.devices[found->second.device].used -= found->second.bytes;
    s.memory.erase(found);
    s.quarantine.push_back(address);
    s.reap();
    return OK;
}

}  // namespace

extern "C" {

int aclrtMalloc(void** address, size_t bytes, int32_t policy) {
    ENTER;
    std::shared_ptr<Context> context;
    TRY(usable(context));
    if (policy < 0 || policy > 6) return misused(PARAM, "aclrtMalloc: policy %d", policy);
    return allocate(address, bytes, context->device);
}

int aclrtFree(void* address) {
    ENTER;
    return release(address, true);
}

int aclrtMallocHost(void** address, size_t bytes) {
    ENTER;
    std::shared_ptr<Context> context;
    TRY(usable(context));
    return allocate(address, bytes, -1);
}

int aclrtFreeHost(void* address) {
    ENTER;
    return release(address, false);
}

int aclrtMemcpy(void* target, size_t room, const void* source, size_t bytes, int32_t kind) {
    ENTER;
    std::shared_ptr<Context> context;
    TRY(usable(context));
    TRY(check(target, room, source, bytes, kind, context->device));
    std::memcpy(target, source, bytes);
    return OK;
}

int aclrtMemcpyAsync(void* target, size_t room, const void* source, size_t bytes, int32_t kind, void* handle) {
    ENTER;
    std::shared_ptr<Stream> stream;
    TRY(usable(handle, stream));
    TRY(check(target, room, source, bytes, kind, stream->device));
    const auto both = reinterpret_cast<uintptr_t>(target) | reinterpret_cast<uintptr_t>(source);
    if (kind == DEVICE_TO_DEVICE && both % 64) return misused(PARAM, "a copy on the device from %p to %p", source, target);
    const int device = stream->device;
    return enqueue(*stream, {[=](std::string& message) {
        const Lock lock(state().mutex);
        if (check(target, room, source, bytes, kind, device)) {
            message = "a copy reached memory that was freed";
            return int(AICORE_EXCEPTION);
        }
        std::memmove(target, source, bytes);
        return int(OK);
    }});
}

int aclrtMemset(void* address, size_t room, int32_t value, size_t bytes) {
    ENTER;
    std::shared_ptr<Context> context;
    TRY(usable(context));
    if (bytes > room || !lies(address, bytes, context->device)) return misused(PARAM, "aclrtMemset of %zu bytes at %p", bytes, address);
    std::memset(address, value, bytes);
    return OK;
}

int aclrtMemsetAsync(void* address, size_t room, int32_t value, size_t bytes, void* handle) {
    ENTER;
    std::shared_ptr<Stream> stream;
    TRY(usable(handle, stream));
    const int device = stream->device;
    if (bytes > room || !lies(address, bytes, device)) return misused(PARAM, "aclrtMemsetAsync of %zu bytes at %p", bytes, address);
    return enqueue(*stream, {[=](std::string& message) {
        const Lock lock(state().mutex);
        if (!lies(address, bytes, device)) {
            misused(OK, "memory was freed before it was set");
            message = "aclrtMemsetAsync reached memory that was freed";
            return int(AICORE_EXCEPTION);
        }
        std::memset(address, value, bytes);
        return int(OK);
    }});
}

int aclrtGetMemInfo(int32_t attribute, size_t* free, size_t* total) {
    ENTER;
    std::shared_ptr<Context> context;
    TRY(usable(context));
    if (attribute != 0 && attribute != 1) return misused(PARAM, "aclrtGetMemInfo: attribute %d", attribute);
    *total = s.memory_limit;
    *free = s.memory_limit - std::min(s.memory_limit, s.devices[context->device].used);
    return OK;
}

int aclrtCmoAsync(void* address, size_t bytes, int32_t kind, void* handle) {
    ENTER;
    std::shared_ptr<Stream> stream;
    TRY(usable(handle, stream));
    if (kind != 0) return misused(207000, "aclrtCmoAsync: kind %d", kind);
    if (!lies(address, bytes, stream->device)) return misused(PARAM, "aclrtCmoAsync of %zu bytes at %p", bytes, address);
    return enqueue(*stream, {[](std::string&) { return OK; }});
}
}
