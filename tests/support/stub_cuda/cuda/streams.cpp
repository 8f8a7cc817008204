// Streams, events, and waits of the host. Nothing is ever under way, so that a wait ends at once; it is counted.
//
// Within a capture an event carries the nodes after which it was recorded. A stream that waits for it joins the
// capture.
#include "state.h"

using namespace stub;

namespace stub {

Stream &legacy_stream() {
    static Stream *made = new Stream;
    return *made;
}

Stream &stream_of(const void *handle) {
    bool ordinary = handle && handle != cudaStreamLegacy && handle != cudaStreamPerThread;
    return ordinary ? *static_cast<Stream *>(const_cast<void *>(handle)) : legacy_stream();
}

}  // namespace stub

namespace {

Event &event_of(cudaEvent_t handle) { return *reinterpret_cast<Event *>(handle); }

// The host may not look at an event that was last recorded in a capture, nor at any one from a capturing thread.
cudaError_t look_at(Event &event, const std::string &what) {
    if (event.capture) {
        if (event.capture->active) return invalidate(*event.capture, cudaErrorCapturedEvent, what);
        return refuse(cudaErrorCapturedEvent, what);
    }
    return unsafe(what);
}

cudaError_t look_at(Stream &stream, const std::string &what) {
    if (Capture *capture = capture_of(stream)) return invalidate(*capture, cudaErrorStreamCaptureUnsupported, what);
    return uses(stream, what);
}

cudaError_t join(Stream &stream, Event &event) {
    Capture *own = capture_of(stream);
    if (&stream == &legacy_stream())
        return invalidate(*event.capture, cudaErrorStreamCaptureImplicit, "stream wait event");
    if (own && own != event.capture.get()) {
        own->invalid = true;
        return invalidate(*event.capture, cudaErrorStreamCaptureMerge, "stream wait event");
    }
    if (!own) {
        stream.capture = event.capture;
        stream.last.clear();
        event.capture->streams.insert(&stream);
    }
    stream.last.insert(event.last.begin(), event.last.end());
    return cudaSuccess;
}

}  // namespace

// ------------------------------------------------------------------------------------------------------------ streams

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    auto *made = new Stream;
    made->blocking = !(flags & cudaStreamNonBlocking);
    made->priority = priority;
    *stream = reinterpret_cast<cudaStream_t>(made);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

EXPORT cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    Locked locked;
    Stream &stream = stream_of(handle);
    if (&stream == &legacy_stream()) return refuse(cudaErrorInvalidResourceHandle, "destroy stream");
    if (Capture *capture = capture_of(stream)) {
        invalidate(*capture, cudaErrorStreamCaptureUnsupported, "destroy stream");
        capture->streams.erase(&stream);
    }
    delete &stream;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = stream_of(stream).priority;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) {
    Locked locked;
    return look_at(stream_of(stream), "query stream");
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    Locked locked;
    if (auto error = look_at(stream_of(stream), "wait stream")) return error;
    count("wait stream");
    return cudaSuccess;
}

// ------------------------------------------------------------------------------------------------------------- events

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    Locked locked;
    *event = reinterpret_cast<cudaEvent_t>(new Event);
    count("event create");
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
    Locked locked;
    delete &event_of(event);
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t of, unsigned flags) {
    Locked locked;
    Event &event = event_of(handle);
    Stream &stream = stream_of(of);
    if (auto error = uses(stream, "event record")) return error;
    Capture *capture = capture_of(stream);
    if (capture && (flags & cudaEventRecordExternal)) {
        add_node(stream, "event record", {});
        return cudaSuccess;
    }
    if (capture && capture->invalid) return refuse(cudaErrorStreamCaptureInvalidated, "event record");
    event.capture = capture ? stream.capture : nullptr;
    event.last = capture ? stream.last : std::set<Node *>{};
    event.recorded_at = launches_so_far();
    count("event record");
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t of, cudaEvent_t handle, unsigned flags) {
    Locked locked;
    const char *what = "stream wait event";
    Event &event = event_of(handle);
    Stream &stream = stream_of(of);
    if (auto error = uses(stream, what)) return error;
    count(what);
    Capture *capture = capture_of(stream);
    if (capture && (flags & cudaEventWaitExternal)) {
        add_node(stream, what, {});
        return cudaSuccess;
    }
    if (event.capture && event.capture->active) return join(stream, event);
    if (event.capture) return refuse(cudaErrorCapturedEvent, what);
    if (capture) return invalidate(*capture, cudaErrorStreamCaptureIsolation, what);
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
    Locked locked;
    return look_at(event_of(event), "query event");
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    Locked locked;
    if (auto error = look_at(event_of(event), "wait event")) return error;
    count("wait event");
    return cudaSuccess;
}

// No time passes on this device. A launch counts as 10 us, so that what launches less counts as faster, reproducibly.
EXPORT cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
    Locked locked;
    Event &first = event_of(start), &second = event_of(end);
    if (first.recorded_at < 0 || second.recorded_at < 0)
        return refuse(cudaErrorInvalidResourceHandle, "time between events that were not recorded");
    *ms = 0.01f * static_cast<float>(second.recorded_at - first.recorded_at) + 0.001f;
    return cudaSuccess;
}

// ------------------------------------------------------------------------------------------------------------- device

EXPORT cudaError_t cudaDeviceSynchronize() {
    Locked locked;
    if (any_capture()) return invalidate_all(cudaErrorStreamCaptureUnsupported, "wait device");
    count("wait device");
    return cudaSuccess;
}

// ------------------------------------------------------------------------------------------- functions in a stream

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument) {
    Locked locked;
    return launch(stream_of(stream), "host function", [=] { return function(argument), cudaSuccess; });
}

EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *argument, unsigned) {
    {
        Locked locked;
        if (auto error = look_at(stream_of(stream), "stream callback")) return error;
    }
    function(stream, cudaSuccess, argument);
    return cudaSuccess;
}
