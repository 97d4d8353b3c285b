// Launches of emulated kernels: by their library's launchers, or by binary, function and arguments.
#include <dlfcn.h>

#include "fake.h"
#include "stream.h"

using namespace fake;

namespace {

struct Binary : Object {
    Binary(int where, void* its_library) : Object(BINARY, where), library(its_library) {}
    ~Binary() override { dlclose(library); }
    static constexpr Kind KIND = BINARY;
    void* library;
    std::vector<void*> functions;
};

struct Function : Object {
    Function(int where, EmuEntry its_entry) : Object(FUNCTION, where), entry(its_entry) {}
    static constexpr Kind KIND = FUNCTION;
    EmuEntry entry;
};

struct Arguments : Object {
    explicit Arguments(int where) : Object(ARGUMENTS, where) {}
    static constexpr Kind KIND = ARGUMENTS;
    std::deque<std::string> values;
    bool complete = false;
};

}  // namespace

extern "C" {

int emu_enqueue(void* handle, void* launch, EmuRun run, EmuDrop drop) {
    ENTER;
    std::shared_ptr<Stream> stream;
    TRY(usable(handle, stream));
    const std::shared_ptr<void> owned(launch, drop);
    const int device = stream->device;
    return enqueue(*stream, [owned, run, device](std::string& message) {
        std::vector<EmuMemory> memory;
        {
            const Lock lock(state().mutex);
            for (const auto& [address, block] : state().memory)
                if (block.device == device) memory.push_back({reinterpret_cast<void*>(address), block.bytes});
        }
        char text[1024] = "";
        if (run(owned.get(), memory.data(), memory.size(), text, sizeof text) == 0) return int(OK);
        message = text;
        return int(AICORE_EXCEPTION);
    });
}

int aclrtBinaryLoadFromFile(const char* path, const void*, void** binary) {
    ENTER;
    std::shared_ptr<Context> context;
    TRY(usable(context));
    if (!path || path[0] != '/') return misused(PARAM, "aclrtBinaryLoadFromFile: not an absolute path");
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) return failed(PARAM, "%s", dlerror());
    s.make<Binary>(binary, context->device, library);
    return OK;
}

int aclrtBinaryUnLoad(void* handle) {
    ENTER;
    const auto binary = s.find<Binary>(handle);
    if (!binary) return misused(INVALID_HANDLE, "aclrtBinaryUnLoad(%p)", handle);
    if (!s.at_rest()) misused(OK, "aclrtBinaryUnLoad while streams are at work");
    for (void* function : binary->functions) s.objects.erase(function);
    s.objects.erase(handle);
    return OK;
}

int aclrtBinaryGetFunction(void* handle, const char* name, void** function) {
    ENTER;
    const auto binary = s.find<Binary>(handle);
    if (!binary) return misused(INVALID_HANDLE, "%p is not a binary", handle);
    const auto entry_point = reinterpret_cast<EmuEntry>(dlsym(binary->library, (std::string("emu_entry_") + name).c_str()));
    if (!entry_point) return failed(KERNEL_LOOKUP, "no kernel %s", name);
    s.make<Function>(function, binary->device, entry_point);
    binary->functions.push_back(*function);
    return OK;
}

int aclrtKernelArgsInit(void* function, void** arguments) {
    ENTER;
    const auto found = s.find<Function>(function);
    if (!found) return misused(INVALID_HANDLE, "%p is not a function", function);
    s.make<Arguments>(arguments, found->device);
    return OK;
}

int aclrtKernelArgsAppend(void* handle, void* value, size_t bytes, void** parameter) {
    ENTER;
    const auto arguments = s.find<Arguments>(handle);
    if (!arguments || arguments->complete) return misused(INVALID_HANDLE, "aclrtKernelArgsAppend(%p)", handle);
    arguments->values.emplace_back(static_cast<const char*>(value), bytes);
    *parameter = &arguments->values.back();
    return OK;
}

int aclrtKernelArgsFinalize(void* handle) {
    ENTER;
    const auto arguments = s.find<Arguments>(handle);
    if (!arguments || arguments->complete) return misused(INVALID_HANDLE, "aclrtKernelArgsFinalize(%p)", handle);
    arguments->complete = true;
    return OK;
}

int aclrtLaunchKernelWithConfig(void* function, uint32_t blocks, void* stream, const void*, void* handle, void* reserved) {
    EmuEntry launch;
    std::shared_ptr<Arguments> arguments;
    {
        ENTER;
        const auto found = s.find<Function>(function);
        arguments = s.find<Arguments>(handle);
        if (!found || !arguments || !arguments->complete || reserved || blocks == 0)
            return misused(PARAM, "aclrtLaunchKernelWithConfig of %u blocks: a function, and complete arguments", blocks);
        launch = found->entry;
        s.objects.erase(handle);  // the arguments are the launch's now
    }
    std::vector<const void*> values;
    std::vector<size_t> sizes;
    for (const std::string& value : arguments->values) values.push_back(value.data()), sizes.push_back(value.size());
    const int code = launch(stream, blocks, values.data(), sizes.data(), values.size());
    return code == 1 ? misused(PARAM, "the kernel takes other arguments") : code;
}
}
