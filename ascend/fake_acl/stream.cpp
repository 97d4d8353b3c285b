// Streams, each a thread with a queue; events.
#include "fake.h"

using namespace fake;

namespace fake {

int usable(void* handle, std::shared_ptr<Stream>& stream) {
    std::shared_ptr<Context> context;
    TRY(usable(context));
    stream = state().find<Stream>(handle);
    if (!stream) return misused(INVALID_HANDLE, "%p is not a stream", handle);
    if (stream->context != current_context)
        return misused(STREAM_CONTEXT, "stream %p is not of the current context", handle);
    return OK;
}

int enqueue(Stream& stream, Task task) {
    stream.tasks.push_back(std::move(task));
    state().changed.notify_all();
    return OK;
}

static bool fatal(int code) { return code == 507000 || code == 507014 || code == 507015 || code == 507034 || code == 507035; }

static void work(Stream& stream) {
    State& s = state();
    Lock lock(s.mutex);
    while (true) {
        s.changed.wait(lock, [&] { return stream.stopping || (!stream.held && !stream.tasks.empty()); });
        if (stream.stopping) return;
        Task task = std::move(stream.tasks.front());
        stream.tasks.pop_front();
        stream.busy = true;
        const uint64_t delay = s.delay_us;
        int code = std::exchange(s.task_failure, OK);
        std::string message = code ? "the task was told to fail" : "";
        const bool skipped = s.devices[stream.device].error != OK;
        lock.unlock();
        if (delay) std::this_thread::sleep_for(std::chrono::microseconds(delay));
        if (code == OK && !skipped) code = task.run(message);
        task.run = nullptr;  // what it holds is dropped without the lock
        lock.lock();
        task.finish();
        stream.busy = false;
        if (fatal(code)) s.devices[stream.device].error = code, s.devices[stream.device].message = message;
        else if (code) stream.error = code, stream.message = message;
        s.reap();
        s.changed.notify_all();
    }
}

void stop(const std::shared_ptr<Stream>& stream, Lock& lock) {
    stream->stopping = true;
    state().changed.notify_all();
    lock.unlock();
    stream->worker.join();
    lock.lock();
    for (const Task& task : stream->tasks) task.finish();
    stream->tasks.clear();
}

static int outcome(Stream& stream) {
    const Device& device = state().devices[stream.device];
    if (device.error) return failed(device.error, "%s", device.message.c_str());
    return stream.error ? failed(std::exchange(stream.error, OK), "%s", stream.message.c_str()) : OK;
}

}  // namespace fake

extern "C" {

int aclrtCreateStream(void** handle) {
    ENTER;
    std::shared_ptr<Context> context;
    TRY(usable(context));
    const auto stream = s.make<Stream>(handle, context->device, current_context);
    stream->worker = std::thread([stream] { work(*stream); });
    return OK;
}

int aclrtDestroyStream(void* handle) {
    ENTER;
    const auto stream = s.find<Stream>(handle);
    if (!stream) return misused(INVALID_HANDLE, "aclrtDestroyStream(%p)", handle);
    if (!stream->idle() && !s.devices[stream->device].error) misused(OK, "aclrtDestroyStream of a stream at work");
    s.objects.erase(handle);
    stop(stream, entry.lock);
    return OK;
}

int aclrtSynchronizeStream(void* handle) {
    ENTER;
    std::shared_ptr<Stream> stream;
    TRY(usable(handle, stream));
    s.changed.wait(entry.lock, [&] { return stream->idle(); });
    return outcome(*stream);
}

int aclrtSynchronizeStreamWithTimeout(void* handle, int32_t milliseconds) {
    ENTER;
    std::shared_ptr<Stream> stream;
    TRY(usable(handle, stream));
    const auto idle = [&] { return stream->idle(); };
    if (milliseconds < 0) s.changed.wait(entry.lock, idle);
    else if (!s.changed.wait_for(entry.lock, std::chrono::milliseconds(milliseconds), idle))
        return failed(SYNC_TIMEOUT, "the stream was still at work after %d ms", milliseconds);
    return outcome(*stream);
}

int aclrtSynchronizeDevice() {
    ENTER;
    std::shared_ptr<Context> context;
    TRY(usable(context));
    s.changed.wait(entry.lock, [&] {
        for (const auto& [handle, object] : s.objects)
            if (object->kind == STREAM && object->device == context->device && !static_cast<Stream&>(*object).idle())
                return false;
        return true;
    });
    return usable(context);
}

int aclrtCreateEvent(void** handle) {
    ENTER;
    std::shared_ptr<Context> context;
    TRY(usable(context));
    s.make<Event>(handle, context->device);
    return OK;
}

int aclrtDestroyEvent(void* handle) {
    ENTER;
    const auto event = s.find<Event>(handle);
    if (!event) return misused(INVALID_HANDLE, "aclrtDestroyEvent(%p)", handle);
    if (event->passed != event->recorded && !s.devices[event->device].error)
        misused(OK, "aclrtDestroyEvent of an event that has not passed");
    s.objects.erase(handle);
    return OK;
}

int aclrtRecordEvent(void* handle, void* on) {
    ENTER;
    std::shared_ptr<Stream> stream;
    TRY(usable(on, stream));
    const auto event = s.find<Event>(handle);
    if (!event) return misused(INVALID_HANDLE, "%p is not an event", handle);
    const uint64_t mark = ++event->recorded;
    const auto pass = [event, mark] {
        event->passed = std::max(event->passed, mark);
        event->when = std::chrono::steady_clock::now();
        state().changed.notify_all();
    };
    return enqueue(*stream, {[](std::string&) { return OK; }, pass});
}

int aclrtStreamWaitEvent(void* on, void* handle) {
    ENTER;
    std::shared_ptr<Stream> stream;
    TRY(usable(on, stream));
    const auto event = s.find<Event>(handle);
    if (!event) return misused(INVALID_HANDLE, "%p is not an event", handle);
    const uint64_t mark = event->recorded;
    Stream* const waiting = stream.get();
    return enqueue(*stream, {[event, mark, waiting](std::string&) {
        Lock lock(state().mutex);
        state().changed.wait(lock, [&] { return event->passed >= mark || waiting->stopping; });
        return OK;
    }});
}

int aclrtSynchronizeEvent(void* handle) {
    ENTER;
    std::shared_ptr<Context> context;
    TRY(usable(context));
    const auto event = s.find<Event>(handle);
    if (!event) return misused(INVALID_HANDLE, "%p is not an event", handle);
    s.changed.wait(entry.lock, [&] { return event->passed == event->recorded; });
    return usable(context);
}

int aclrtQueryEventStatus(void* handle, int32_t* status) {
    ENTER;
    std::shared_ptr<Context> context;
    TRY(usable(context));
    const auto event = s.find<Event>(handle);
    if (!event) return misused(INVALID_HANDLE, "%p is not an event", handle);
    *status = event->passed == event->recorded;
    return OK;
}

int aclrtEventElapsedTime(float* milliseconds, void* first, void* second) {
    ENTER;
    const auto begin = s.find<Event>(first), end = s.find<Event>(second);
    if (!begin || !end) return misused(INVALID_HANDLE, "%p or %p is not an event", first, second);
    if (!begin->recorded || begin->passed != begin->recorded || !end->recorded || end->passed != end->recorded)
        return failed(PARAM, "both events must have passed");
    *milliseconds = std::chrono::duration<float, std::milli>(end->when - begin->when).count();
    return OK;
}
}
