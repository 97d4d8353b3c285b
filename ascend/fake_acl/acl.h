// The part of ACL that paged_kv calls, declared by ourselves: what the fake runtime defines, and what a test compares
// Python's table with. Handles are opaque; every function returns an error code unless it returns text.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

union LaunchKernelAttrValue {
    uint8_t schemMode;
    uint32_t engineType;
    uint32_t blockDimOffset;
    uint16_t timeout;
    uint32_t rsv[4];
};
struct LaunchKernelAttr {
    uint32_t id;
    LaunchKernelAttrValue value;
};
struct LaunchKernelCfg {
    LaunchKernelAttr* attrs;
    size_t numAttrs;
};
union BinaryLoadOptionValue {
    uint32_t isLazyLoad;
    uint32_t magic;
    int32_t cpuKernelMode;
    uint32_t rsv[4];
};
struct BinaryLoadOption {
    uint32_t type;
    BinaryLoadOptionValue value;
};
struct BinaryLoadOptions {
    BinaryLoadOption* options;
    size_t numOpt;
};
struct PlaceHolderInfo {
    uint32_t addrOffset;
    uint32_t dataOffset;
};
static_assert(sizeof(LaunchKernelAttrValue) == 16 && sizeof(LaunchKernelAttr) == 20 && sizeof(LaunchKernelCfg) == 16 &&
                  sizeof(BinaryLoadOptionValue) == 16 && sizeof(BinaryLoadOption) == 20 &&
                  sizeof(BinaryLoadOptions) == 16 && sizeof(PlaceHolderInfo) == 8,
              "Python declares the same structures");

int aclInit(const char* config_path);
int aclFinalize();
const char* aclGetRecentErrMsg();
const char* aclrtGetSocName();
int aclrtGetVersion(int32_t* major, int32_t* minor, int32_t* patch);

int aclrtGetDeviceCount(uint32_t* count);
int aclrtSetDevice(int32_t device);
int aclrtResetDevice(int32_t device);
int aclrtGetDevice(int32_t* device);
int aclrtGetDeviceInfo(uint32_t device, int32_t attribute, int64_t* value);
int aclrtSynchronizeDevice();
int aclrtCreateContext(void** context, int32_t device);
int aclrtDestroyContext(void* context);
int aclrtSetCurrentContext(void* context);
int aclrtGetCurrentContext(void** context);

int aclrtCreateStream(void** stream);
int aclrtDestroyStream(void* stream);
int aclrtSynchronizeStream(void* stream);
int aclrtSynchronizeStreamWithTimeout(void* stream, int32_t milliseconds);
int aclrtCreateEvent(void** event);
int aclrtDestroyEvent(void* event);
int aclrtRecordEvent(void* event, void* stream);
int aclrtSynchronizeEvent(void* event);
int aclrtQueryEventStatus(void* event, int32_t* status);
int aclrtEventElapsedTime(float* milliseconds, void* first, void* second);
int aclrtStreamWaitEvent(void* stream, void* event);

int aclrtMalloc(void** address, size_t bytes, int32_t policy);
int aclrtFree(void* address);
int aclrtMallocHost(void** address, size_t bytes);
int aclrtFreeHost(void* address);
int aclrtMemcpy(void* target, size_t room, const void* source, size_t bytes, int32_t kind);
int aclrtMemcpyAsync(void* target, size_t room, const void* source, size_t bytes, int32_t kind, void* stream);
int aclrtMemset(void* address, size_t room, int32_t value, size_t bytes);
int aclrtMemsetAsync(void* address, size_t room, int32_t value, size_t bytes, void* stream);
int aclrtGetMemInfo(int32_t attribute, size_t* free, size_t* total);
int aclrtCmoAsync(void* address, size_t bytes, int32_t kind, void* stream);

int aclrtBinaryLoadFromFile(const char* path, BinaryLoadOptions* options, void** binary);
int aclrtBinaryGetFunction(void* binary, const char* name, void** function);
int aclrtBinaryUnLoad(void* binary);
int aclrtKernelArgsInit(void* function, void** arguments);
int aclrtKernelArgsAppend(void* arguments, void* value, size_t bytes, void** parameter);
int aclrtKernelArgsFinalize(void* arguments);
int aclrtLaunchKernelWithConfig(void* function, uint32_t blocks, void* stream, LaunchKernelCfg* config,
                                void* arguments, void* reserved);

// Declared only: nothing here uses them, and the fake runtime is one that lacks them.
int aclrtBinaryLoadFromData(const void* data, size_t bytes, BinaryLoadOptions* options, void** binary);
int aclrtLaunchKernel(void* function, uint32_t blocks, const void* arguments, size_t bytes, void* stream);
int aclrtLaunchKernelV2(void* function, uint32_t blocks, const void* arguments, size_t bytes, LaunchKernelCfg* config,
                        void* stream);
int aclrtLaunchKernelWithHostArgs(void* function, uint32_t blocks, void* stream, LaunchKernelCfg* config,
                                  void* arguments, size_t bytes, PlaceHolderInfo* places, size_t count);
}
