// Captures and graphs: which calls a capture refuses, how it ends, and the launch of what it gave.
//
// A capture is of streams, not of threads: any thread may launch into a stream that is captured. What a *thread* may
// not do meanwhile ("potentially unsafe" calls, such as cudaMalloc) depends on the modes of capture and thread.
#include "state.h"

#include <pthread.h>

#include <algorithm>

using namespace stub;

namespace stub {
namespace {

std::set<std::shared_ptr<Capture>> &under_way() {
    static auto *captures = new std::set<std::shared_ptr<Capture>>;
    return *captures;
}

thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;

unsigned long this_thread() { return static_cast<unsigned long>(pthread_self()); }

// See the documentation of cudaThreadExchangeStreamCaptureMode.
bool forbids_unsafe_calls(const Capture &capture) {
    if (mode_of_thread == cudaStreamCaptureModeRelaxed) return false;
    if (capture.thread == this_thread() && capture.mode != cudaStreamCaptureModeRelaxed) return true;
    return mode_of_thread == cudaStreamCaptureModeGlobal && capture.mode == cudaStreamCaptureModeGlobal;
}

// The capture of a blocking stream, if this is the legacy stream, which would depend on it.
Capture *capture_against(const Stream &stream) {
    if (&stream == &legacy_stream())
        for (auto &capture : under_way())
            for (Stream *captured : capture->streams)
                if (captured->blocking) return capture.get();
    return nullptr;
}

}  // namespace

Capture *capture_of(const Stream &stream) {
    return stream.capture && stream.capture->active ? stream.capture.get() : nullptr;
}

bool any_capture() { return !under_way().empty(); }

cudaError_t invalidate(Capture &capture, cudaError_t error, const std::string &what) {
    capture.invalid = true;
    return refuse(error, what);
}

cudaError_t invalidate_all(cudaError_t error, const std::string &what) {
    for (auto &capture : under_way()) capture->invalid = true;
    return refuse(error, what);
}

cudaError_t unsafe(const std::string &what) {
    for (auto &capture : under_way())
        if (forbids_unsafe_calls(*capture)) return invalidate(*capture, cudaErrorStreamCaptureUnsupported, what);
    return cudaSuccess;
}

cudaError_t uses(Stream &stream, const std::string &what) {
    Capture *capture = capture_against(stream);
    return capture ? invalidate(*capture, cudaErrorStreamCaptureImplicit, what) : cudaSuccess;
}

void add_node(Stream &stream, const std::string &what, std::function<cudaError_t()> again) {
    Capture &capture = *stream.capture;
    auto node = std::make_unique<Node>(Node{what, stream.last, std::move(again)});
    for (Node *before : node->after) capture.ends.erase(before);
    stream.last = {node.get()};
    capture.ends.insert(node.get());
    capture.graph->nodes.push_back(std::move(node));
    count("captured " + what);
}

}  // namespace stub

namespace {

// cudaGraph_t and cudaGraphExec_t point to one of these each.
struct Handle {
    std::shared_ptr<Graph> graph;
};

Handle &handle_of(const void *handle) { return *static_cast<Handle *>(const_cast<void *>(handle)); }

void end(Capture &capture) {
    capture.active = false;
    for (Stream *stream : capture.streams)
        if (stream->capture.get() == &capture) stream->last.clear();
    auto &all = under_way();
    auto found = std::find_if(all.begin(), all.end(), [&](auto &each) { return each.get() == &capture; });
    if (found != all.end()) all.erase(found);
}

}  // namespace

// ----------------------------------------------------------------------------------------------------------- captures

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
    Locked locked;
    static unsigned long long next_id = 1;
    Stream &stream = stream_of(handle);
    if (&stream == &legacy_stream()) return refuse(cudaErrorStreamCaptureUnsupported, "begin capture");
    if (capture_of(stream)) return refuse(cudaErrorIllegalState, "begin capture");
    auto capture = std::make_shared<Capture>();
    capture->id = next_id++;
    capture->mode = mode;
    capture->thread = this_thread();
    capture->origin = &stream;
    capture->streams = {&stream};
    stream.capture = capture;
    stream.last.clear();
    under_way().insert(capture);
    count("capture begin");
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
    Locked locked;
    *graph = nullptr;
    Stream &stream = stream_of(handle);
    if (!capture_of(stream)) return refuse(cudaErrorIllegalState, "end capture");
    std::shared_ptr<Capture> capture = stream.capture;
    if (capture->origin != &stream) return invalidate(*capture, cudaErrorStreamCaptureUnmatched, "end capture");
    if (capture->thread != this_thread() && capture->mode != cudaStreamCaptureModeRelaxed)
        return invalidate(*capture, cudaErrorStreamCaptureWrongThread, "end capture");
    std::set<Node *> joined = stream.last;
    end(*capture);
    if (capture->invalid) return refuse(cudaErrorStreamCaptureInvalidated, "end capture");
    if (!std::includes(joined.begin(), joined.end(), capture->ends.begin(), capture->ends.end()))
        return refuse(cudaErrorStreamCaptureUnjoined, "end capture");
    *graph = reinterpret_cast<cudaGraph_t>(new Handle{capture->graph});
    count("capture end");
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus *status) {
    Locked locked;
    Stream &stream = stream_of(handle);
    if (capture_against(stream)) return refuse(cudaErrorStreamCaptureImplicit, "is capturing");  // still valid
    Capture *capture = capture_of(stream);
    *status = !capture            ? cudaStreamCaptureStatusNone
              : capture->invalid ? cudaStreamCaptureStatusInvalidated
                                 : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph,
                                            const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                            size_t *number) {
    Locked locked;
    if (auto error = cudaStreamIsCapturing(handle, status)) return error;
    static thread_local std::vector<Node *> last;  // valid until the next call, as CUDA's is until the next node
    Stream &stream = stream_of(handle);
    Capture *capture = capture_of(stream);
    last.clear();
    if (capture) last.assign(stream.last.begin(), stream.last.end());
    if (id) *id = capture ? capture->id : 0;
    if (graph) *graph = nullptr;
    if (nodes) *nodes = reinterpret_cast<const cudaGraphNode_t *>(last.data());
    if (edges) *edges = nullptr;
    if (number) *number = last.size();
    return cudaSuccess;
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
    std::swap(mode_of_thread, *mode);
    return cudaSuccess;
}

// ------------------------------------------------------------------------------------------------------------- graphs

EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long) {
    Locked locked;
    if (auto error = unsafe("graph instantiate")) return error;
    *made = reinterpret_cast<cudaGraphExec_t>(new Handle{handle_of(graph)});
    count("graph instantiate");
    return cudaSuccess;
}

// Runs the nodes in the order of their capture. Copies are checked and done; a kernel's arguments have no types here,
// so that a kernel node whose memory is gone cannot be told from any other.
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    Locked locked;
    std::shared_ptr<Graph> nodes = handle_of(graph).graph;
    return launch(stream_of(stream), "graph launch", [nodes] {
        launches_so_far() += static_cast<long>(nodes->nodes.size());
        for (auto &node : nodes->nodes)
            if (node->again)
                if (auto error = node->again()) return error;
        return cudaSuccess;
    });
}

EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    Locked locked;
    delete &handle_of(graph);
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
    Locked locked;
    delete &handle_of(graph);
    count("graph destroy");
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *number) {
    Locked locked;
    auto &all = handle_of(graph).graph->nodes;
    for (size_t at = 0; nodes && at < std::min(*number, all.size()); ++at)
        nodes[at] = reinterpret_cast<cudaGraphNode_t>(all[at].get());
    *number = all.size();
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t *nodes,
                                                cudaGraphEdgeData *edges, size_t *number) {
    Locked locked;
    auto &after = reinterpret_cast<Node *>(node)->after;
    size_t at = 0;
    if (nodes)
        for (auto each = after.begin(); each != after.end() && at < *number; ++each, ++at) {
            nodes[at] = reinterpret_cast<cudaGraphNode_t>(*each);
            if (edges) edges[at] = {};
        }
    *number = after.size();
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char *, unsigned) {
    return refuse(cudaErrorNotSupported, "graph debug print");
}
