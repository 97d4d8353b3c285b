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
};

struct Function : Object {
    Function(const Binary* its_binary, EmuEntry its_entry)
        : Object(FUNCTION, its_binary->device), binary(its_binary), entry(its_entry) {}
    static constexpr Kind KIND = FUNCTION;
    const Binary* binary;
    EmuEntry entry;
};

struct Arguments : Object {
    explicit Arguments(const Binary* its_binary) : Object(ARGUMENTS, its_binary->device), binary(its_binary) {}
    static constexpr Kind KIND = ARGUMENTS;
    const Binary* binary;
    std::deque<std::string> values;
    bool complete = false;
};

// Of the launch that this thread is making, if it is by function: its binary has to stay until the kernel has run.
thread_local std::shared_ptr<Binary> launched_from;

}  // namespace

extern "C" {

int emu_enqueue(void* handle, void* launch, EmuRun run, EmuDrop drop) {
    ENTER;
    std::shared_ptr<Stream> stream;
    TRY(usable(handle, stream));
    const std::shared_ptr<void> owned(launch, drop);
    const int device = stream->device;
    return enqueue(*stream, {[owned, run, device, binary = launched_from](std::string& message) {
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
    }});
}

int aclrtBinaryLoadFromFile(const char* path, BinaryLoadOptions* options, void** binary) {
    ENTER;
    std::shared_ptr<Context> context;
    TRY(usable(context));
    const bool vector_core = options && options->numOpt == 1 && options->options->type == 2 &&
                             options->options->value.magic == 0x41415246;
    if (!vector_core) return misused(PARAM, "aclrtBinaryLoadFromFile: not for the vector cores");
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
    if (binary.use_count() > 2) misused(OK, "aclrtBinaryUnLoad while a kernel of it waits for its turn");
    const auto goes_too = [&](const Object& object) {
        return (object.kind == FUNCTION && static_cast<const Function&>(object).binary == binary.get()) ||
               (object.kind == ARGUMENTS && static_cast<const Arguments&>(object).binary == binary.get());
    };
    for (auto next = s.objects.begin(); next != s.objects.end();)
        next = goes_too(*next->second) ? s.objects.erase(next) : std::next(next);
    s.objects.erase(handle);
    return OK;
}

int aclrtBinaryGetFunction(void* handle, const char* name, void** function) {
    ENTER;
    const auto binary = s.find<Binary>(handle);
    if (!binary) return misused(INVALID_HANDLE, "%p is not a binary", handle);
    const auto entry_point = reinterpret_cast<EmuEntry>(dlsym(binary->library, (std::string("emu_entry_") + name).c_str()));
    if (!entry_point) return failed(KERNEL_LOOKUP, "no kernel %s", name);
    s.make<Function>(function, binary.get(), entry_point);
    return OK;
}

int aclrtKernelArgsInit(void* function, void** arguments) {
    ENTER;
    const auto found = s.find<Function>(function);
    if (!found) return misused(INVALID_HANDLE, "%p is not a function", function);
    s.make<Arguments>(arguments, found->binary);
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

int aclrtLaunchKernelWithConfig(void* function, uint32_t blocks, void* stream, LaunchKernelCfg*, void* handle,
                                void* reserved) {
    EmuEntry launch;
    std::shared_ptr<Arguments> arguments;
    {
        ENTER;
        const auto found = s.find<Function>(function);
        arguments = s.find<Arguments>(handle);
        if (!found || !arguments || !arguments->complete || reserved || blocks == 0)
            return misused(PARAM, "aclrtLaunchKernelWithConfig of %u blocks: a function, and complete arguments", blocks);
        launch = found->entry;
        launched_from = std::static_pointer_cast<Binary>(s.objects.at(const_cast<Binary*>(found->binary)));
        s.objects.erase(handle);  // the arguments are the launch's now
    }
    std::vector<const void*> values;
    std::vector<size_t> sizes;
    for (const std::string& value : arguments->values) values.push_back(value.data()), sizes.push_back(value.size());
    const int code = launch(stream, blocks, values.data(), sizes.data(), values.size());
    launched_from.reset();
    if (code != 1) return code;
    const Lock lock(state().mutex);
    return misused(PARAM, "the kernel takes other arguments");
}
}
