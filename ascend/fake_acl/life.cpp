// Initialisation, devices, contexts.
#include "fake.h"

using namespace fake;

namespace {

int known(int32_t device) {
    const size_t count = state().devices.size();
    if (device >= 0 && size_t(device) < count) return OK;
    return failed(DEVICE_ID, "device %d of %zu", device, count);
}

size_t left(int device) {
    size_t count = 0;
    for (const auto& [handle, object] : state().objects)
        count += object->kind != CONTEXT && object->kind != FUNCTION && object->kind != ARGUMENTS &&
                 (device < 0 || object->device == device);
    for (const auto& [address, block] : state().memory) count += device < 0 || block.device == device;
    return count;
}

}  // namespace

extern "C" {

int aclInit(const char*) {
    ENTER;
    if (s.initialised) return failed(REPEATED, "aclInit was called before");
    s.initialised = true;
    return OK;
}

int aclFinalize() {
    ENTER;
    if (!s.initialised) return failed(UNINITIALIZED, "aclFinalize without aclInit");
    if (const size_t count = left(-1)) misused(OK, "aclFinalize with %zu objects left", count);
    s.initialised = false;
    return OK;
}

const char* aclrtGetSocName() { return "Ascend910B3 (fake)"; }

int aclrtGetVersion(int32_t* major, int32_t* minor, int32_t* patch) {
    ENTER;
    *major = 1, *minor = 15, *patch = 0;
    return OK;
}

int aclrtGetDeviceCount(uint32_t* count) {
    ENTER;
    *count = uint32_t(s.devices.size());
    return OK;
}

int aclrtSetDevice(int32_t device) {
    ENTER;
    TRY(known(device));
    Device& d = s.devices[device];
    if (d.error) return failed(d.error, "%s", d.message.c_str());
    if (!d.primary) s.make<Context>(&d.primary, device, true);
    current_context = d.primary;
    return OK;
}

int aclrtResetDevice(int32_t device) {
    ENTER;
    TRY(known(device));
    Device& d = s.devices[device];
    if (!d.primary) return misused(PARAM, "aclrtResetDevice of device %d, which is not set", device);
    if (const size_t count = left(device)) misused(OK, "aclrtResetDevice(%d) with %zu objects left", device, count);
    s.objects.erase(d.primary);
    d.primary = nullptr, d.error = OK;
    return OK;
}

int aclrtGetDevice(int32_t* device) {
    ENTER;
    const auto context = s.find<Context>(current_context);
    if (!context) return failed(CONTEXT_NULL, "this thread has no context");
    *device = context->device;
    return OK;
}

int aclrtGetDeviceInfo(uint32_t device, int32_t attribute, int64_t* value) {
    ENTER;
    TRY(known(int32_t(device)));
    const std::map<int32_t, int64_t> values{
        {101, 4}, {102, 4}, {201, 8}, {301, int64_t(s.memory_limit)}, {302, 192LL << 20}};
    const auto found = values.find(attribute);
    if (found == values.end()) return failed(PARAM, "attribute %d", attribute);
    *value = found->second;
    return OK;
}

int aclrtCreateContext(void** context, int32_t device) {
    ENTER;
    TRY(known(device));
    s.make<Context>(context, device, false);
    current_context = *context;
    return OK;
}

int aclrtDestroyContext(void* context) {
    ENTER;
    const auto found = s.find<Context>(context);
    if (!found || found->primary) return misused(INVALID_HANDLE, "aclrtDestroyContext(%p)", context);
    s.objects.erase(context);
    return OK;
}

int aclrtSetCurrentContext(void* context) {
    ENTER;
    if (!s.find<Context>(context)) return misused(INVALID_HANDLE, "aclrtSetCurrentContext(%p)", context);
    current_context = context;
    return OK;
}

int aclrtGetCurrentContext(void** context) {
    ENTER;
    if (!s.find<Context>(current_context)) return failed(CONTEXT_NULL, "this thread has no context");
    *context = current_context;
    return OK;
}
}
