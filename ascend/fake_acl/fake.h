// A CANN runtime (libascendcl) of our own for tests: what ACL's documentation promises, on threads of the host.
//
// It is no simulator of Huawei's runtime: it holds callers to the documented order of calls, contexts, alignments and
// lifetimes, keeps count of what they leave behind, and fails where a test tells it to.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "acl.h"

namespace fake {

enum Code : int {
    OK = 0,
    INVALID_PARAM = 100000,
    UNINITIALIZED = 100001,
    REPEATED = 100002,
    PARAM = 107000,
    DEVICE_ID = 107001,
    CONTEXT_NULL = 107002,
    STREAM_CONTEXT = 107003,
    INVALID_HANDLE = 107017,
    OUT_OF_MEMORY = 207001,
    AICORE_EXCEPTION = 507015,
    KERNEL_LOOKUP = 507027,
    SYNC_TIMEOUT = 507046,
};

using Lock = std::unique_lock<std::mutex>;

enum Kind { CONTEXT, STREAM, EVENT, BINARY, FUNCTION, ARGUMENTS, KINDS };

struct Object {
    Object(Kind what, int where) : kind(what), device(where) {}
    virtual ~Object() = default;
    Kind kind;
    int device;
};

struct Context : Object {
    Context(int where, bool is_primary) : Object(CONTEXT, where), primary(is_primary) {}
    static constexpr Kind KIND = CONTEXT;
    bool primary;
};

// A step of a stream's work: done without the lock, with a code and the reason in the text; then, also when it was
// skipped, what is to be seen of its end.
struct Task {
    std::function<int(std::string&)> run;
    std::function<void()> finish = [] {};
};

struct Stream : Object {
    Stream(int where, void* its_context) : Object(STREAM, where), context(its_context) {}
    static constexpr Kind KIND = STREAM;
    void* context;
    std::thread worker;
    std::deque<Task> tasks;
    bool busy = false, held = false, stopping = false;
    int error = OK;  // told by the next synchronisation
    std::string message;
    bool idle() const { return tasks.empty() && !busy; }
};

struct Event : Object {
    explicit Event(int where) : Object(EVENT, where) {}
    static constexpr Kind KIND = EVENT;
    uint64_t recorded = 0, passed = 0;
    std::chrono::steady_clock::time_point when{};
};

struct Memory {
    uint64_t bytes;
    int device;  // -1: page-locked memory of the host
};

struct Device {
    int error = OK;  // why nothing works until it is reset
    std::string message;
    void* primary = nullptr;
    uint64_t used = 0;
};

struct Failure {
    uint64_t nth;
    int code;
};

struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool initialised = false, forked = false;
    std::vector<Device> devices{2};
    std::map<void*, std::shared_ptr<Object>> objects;
    std::map<uintptr_t, Memory> memory;
    std::vector<void*> quarantine;  // freed while streams were at work
    std::map<std::string, uint64_t> calls;
    std::map<std::string, Failure> failures;
    std::vector<std::string> misuse;
    int task_failure = OK;
    uint64_t delay_us = 0;
    uint64_t memory_limit = 256ULL << 20;

    // The object behind a handle, if there is one of this kind.
    template <typename T>
    std::shared_ptr<T> find(void* handle) const {
        const auto found = objects.find(handle);
        return found == objects.end() || found->second->kind != T::KIND ? nullptr
                                                                        : std::static_pointer_cast<T>(found->second);
    }
    template <typename T, typename... A>
    std::shared_ptr<T> make(void** handle, A... arguments) {
        auto object = std::make_shared<T>(arguments...);
        objects[*handle = object.get()] = object;
        return object;
    }
    // The allocation that holds all of these bytes; any that holds one of them.
    const Memory* holding(const void* address, uint64_t bytes) const;
    const Memory* touching(const void* address, uint64_t bytes) const;
    bool at_rest() const;
    void reap();
};

State& state();
extern thread_local void* current_context;

// Sets what aclGetRecentErrMsg will say in this thread; returns the code.
[[gnu::format(printf, 2, 3)]] int failed(int code, const char* format, ...);
// The same for what a program must never do; remembered for the test.
[[gnu::format(printf, 2, 3)]] int misused(int code, const char* format, ...);

// The beginning of every function: counts it, and says with what code it has to fail at once.
struct Entry {
    explicit Entry(const char* name);
    Lock lock;
    int code = OK;
};

// The current context, its device being in order; else the code to return.
int usable(std::shared_ptr<Context>& context);
int usable(void* handle, std::shared_ptr<Stream>& stream);
int enqueue(Stream& stream, Task task);
void stop(const std::shared_ptr<Stream>& stream, Lock& lock);

}  // namespace fake

#define ENTER                         \
    fake::Entry entry(__func__);      \
    fake::State& s = fake::state();   \
    (void)s;                          \
    if (entry.code) return entry.code
#define TRY(EXPRESSION) \
    if (const int code = (EXPRESSION)) return code
