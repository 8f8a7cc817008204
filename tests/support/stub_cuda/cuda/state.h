// A CUDA that computes nothing: what its files share.
//
// The library stands in front of the real CUDA runtime, driver, cuBLAS and NCCL (LD_PRELOAD), below an unchanged torch
// and Triton. Device memory is host memory. A copy is done when it is launched, and again when a graph that holds it is
// launched. A kernel is counted and does nothing. Streams, events and captures keep the rules of CUDA's documentation,
// and what these refuse is refused with CUDA's error codes. It knows nothing of numbers, races or speed.
//
//     memory     allocations at addresses that are never given out twice; copies
//     streams    streams, events, waits of the host
//     capture    which calls a capture refuses; graphs and their launch
//     launches   kernels of the runtime API, and what runs when something is launched
//     device     the properties of an H100; the driver API, as Triton uses it
//     parameters what a launch of Triton's passes, if it is asked for
//     cublas     cuBLAS and cuBLASLt: products are counted
//     nccl       NCCL for a group of one: copies
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace stub {

// One lock for everything: every exported function that reads or writes the state holds it.
std::recursive_mutex &mutex();
struct Locked : std::lock_guard<std::recursive_mutex> {
    Locked() : std::lock_guard<std::recursive_mutex>(mutex()) {}
};

// ------------------------------------------------------------------------------------------------------------ counts

void count(const std::string &what, long by = 1);

// Remembers an error as the thread's last one, counts it as "refused CODE what", and returns it. Not for success.
cudaError_t refuse(cudaError_t error, const std::string &what);

// Writes a line to standard error.
void report(const std::string &line);

// Launches so far: the only clock there is.
long &launches_so_far();

// ------------------------------------------------------------------------------------------------------------ memory

enum class Place { Pageable, Device, Pinned, Gone };

// Where the whole range lies. `Gone`: it was allocated here once, and freed; or it leaves its allocation.
Place place_of(const void *start, size_t bytes);

void *allocate(Place place, size_t bytes);  // null if the device has no such memory left
bool release(void *start);                  // whether an allocation began there
size_t bytes_in_use();
size_t bytes_of_device();

// Copies; `Gone` memory is refused with cudaErrorInvalidValue.
cudaError_t copy(void *to, const void *from, size_t bytes);

// ----------------------------------------------------------------------------------------------- streams and captures

struct Node {
    std::string what;
    std::set<Node *> after;              // the nodes that are over when this one begins
    std::function<cudaError_t()> again;  // what a launch of the graph does; empty for a kernel, which cannot be checked
};

struct Graph {
    std::vector<std::unique_ptr<Node>> nodes;  // in the order of their capture, in which a launch runs them
};

struct Stream;

struct Capture {
    unsigned long long id = 0;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
    unsigned long thread = 0;
    Stream *origin = nullptr;
    bool active = true;
    bool invalid = false;
    std::set<Stream *> streams;  // the origin, and those that joined by waiting for an event
    std::set<Node *> ends;       // nodes after which nothing was captured
    std::shared_ptr<Graph> graph = std::make_shared<Graph>();
};

struct Stream {
    bool blocking = true;  // it waits for the legacy stream, and the legacy stream for it
    int priority = 0;
    std::shared_ptr<Capture> capture;
    std::set<Node *> last;  // what its next node comes after
};

struct Event {
    std::shared_ptr<Capture> capture;  // in which it was last recorded
    std::set<Node *> last;
    long recorded_at = -1;  // in launches
};

Stream &legacy_stream();
Stream &stream_of(const void *handle);

// The stream's capture while it is under way, else null.
Capture *capture_of(const Stream &stream);

bool any_capture();

// Refuses a call that may not run next to a capture ("potentially unsafe"); it also invalidates the capture.
cudaError_t unsafe(const std::string &what);

// Refuses use of the legacy stream while a stream is captured that it would wait for.
cudaError_t uses(Stream &stream, const std::string &what);

cudaError_t invalidate(Capture &capture, cudaError_t error, const std::string &what);
cudaError_t invalidate_all(cudaError_t error, const std::string &what);

// Adds a node to a capture that is under way in this stream.
void add_node(Stream &stream, const std::string &what, std::function<cudaError_t()> again);

// Runs `work` now and counts `what`; in a capture adds a node instead, and counts "captured what".
cudaError_t launch(Stream &stream, const std::string &what, std::function<cudaError_t()> work = {});

// ------------------------------------------------------------------------------------------------- Triton's parameters

using ParameterSizes = std::map<std::string, std::vector<size_t>>;  // of every kernel of a module, in bytes
using Shape = std::array<size_t, 8>;  // the grid, the block, bytes of shared memory, the stream

ParameterSizes parameter_sizes(const void *image);

// Keeps what a launch passed, if the tests asked for it.
void note_launch(const std::string &name, const Shape &shape, const std::vector<size_t> &sizes, void **parameters);

}  // namespace stub
